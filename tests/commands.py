"""The command as a user types it, run in this process, where JAX is imported already."""

import contextlib
import io
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from jgpt.cli import main

if sys.platform != "win32":
    import fcntl
    import termios


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


def refused(
    *arguments: object, stdin: bytes = b"", cwd: Path | None = None, columns: int = 80
) -> str:
    """The one line that a refused command prints, on a terminal where there are such."""
    if sys.platform == "win32":
        code, _, shown = jgpt(*arguments, stdin=stdin, cwd=cwd)
    else:
        code, shown = on_terminal(columns, *arguments, stdin=stdin, cwd=cwd)
    assert code == 2, shown
    # what a spinner has drawn, and erased, comes before
    *drawn, line = re.split(r"\r|\n|\x1b\[[?\d;]*[A-Za-z]", shown.strip("\r\n"))
    assert line.startswith("jgpt: "), shown
    assert all(text.isprintable() for text in (line, *drawn))
    assert not {*"╭│╰"} & {*shown}
    assert "Traceback" not in shown
    return line


def on_terminal(
    columns: int, *arguments: object, stdin: bytes = b"", cwd: Path | None = None
) -> tuple[int, str]:
    """The exit code, and all that a terminal gets."""
    screen, tty = os.openpty()
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    received: list[bytes] = []

    def receive() -> None:
        with contextlib.suppress(OSError):  # of one that is closed
            while data := os.read(screen, 4096):
                received.append(data)

    reader = threading.Thread(target=receive)
    reader.start()
    before, code = (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__), 0
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with (
            open(tty, "w", encoding="utf-8") as stream,
            contextlib.chdir(cwd or Path()),
            mock.patch.dict(os.environ, TERM="xterm-256color"),
        ):
            sys.stdout = sys.stderr = sys.__stdout__ = stream  # type: ignore[misc]
            os.environ.pop("COLUMNS", None)
            main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdin, sys.stdout, sys.stderr, sys.__stdout__ = before  # type: ignore[misc]
    reader.join()
    os.close(screen)
    return code, b"".join(received).decode()


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
