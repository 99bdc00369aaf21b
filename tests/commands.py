"""The command as a user types it, run in this process, where JAX is imported already."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from jgpt.cli import main


class Finished(NamedTuple):
    """What a process leaves behind."""

    code: int
    stdout: str
    stderr: str


def jgpt(*arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> Finished:
    code = 0
    with (
        _streams(stdin) as (stdout, stderr),
        contextlib.chdir(cwd or Path()),
        mock.patch.dict(os.environ, COLUMNS="80"),
    ):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Finished(code, stdout.getvalue().decode(), stderr.getvalue().decode())


def refused(*arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> str:
    """The one line that a refused command prints."""
    done = jgpt(*arguments, stdin=stdin, cwd=cwd)
    assert done.code == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("jgpt: ")
    assert "Traceback" not in line
    return line


def worked(*arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> str:
    """What a command that worked printed."""
    done = jgpt(*arguments, stdin=stdin, cwd=cwd)
    assert done.code == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Standard input as given; standard output and error kept as bytes, as a pipe takes them."""
    before = sys.stdin, sys.stdout, sys.stderr
    stdout, stderr = io.BytesIO(), io.BytesIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(stdout, encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(stderr, encoding="utf-8", write_through=True)
    try:
        yield stdout, stderr
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.detach()  # or its end would close the bytes with it
        sys.stdin, sys.stdout, sys.stderr = before
