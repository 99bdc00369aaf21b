"""The command as a user types it, run in this process, where JAX is imported already, or in one
that no test has set up.

`python -m tests.commands` runs a command for each line of its input.
"""

import contextlib
import fcntl
import io
import json
import os
import re
import resource
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO
from unittest import mock

from jgpt.cli import main, terminal


class Finished(NamedTuple):
    """What a process leaves behind."""

    code: int
    stdout: str
    stderr: str


def jgpt(*arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> Finished:
    stdout = io.BytesIO()
    stderr = io.BytesIO()
    output = io.TextIOWrapper(stdout, encoding="utf-8", write_through=True)
    errors = io.TextIOWrapper(stderr, encoding="utf-8", write_through=True)
    code = _exit_code(arguments, stdin, output, errors, cwd, COLUMNS="80")
    return Finished(code, stdout.getvalue().decode(), stderr.getvalue().decode())


def refused(
    *arguments: object, stdin: bytes = b"", cwd: Path | None = None, columns: int = 80
) -> str:
    """The one line that a refused command prints, on a terminal where there are such."""
    code, shown = on_terminal(columns, *arguments, stdin=stdin, cwd=cwd)
    assert code == 2, shown
    # what a spinner has drawn, and erased, comes before
    *drawn, line = re.split(r"\r|\n|\x1b\[[?\d;]*[A-Za-z]", shown.strip("\r\n"))
    assert line.startswith("jgpt: "), shown
    assert all(text.isprintable() for text in (line, *drawn))
    assert not {*"╭│╰"} & {*shown}
    assert "Traceback" not in shown
    return line


END = b"\0"
"""What ends all that a terminal gets."""


def on_terminal(
    columns: int, *arguments: object, stdin: bytes = b"", cwd: Path | None = None
) -> tuple[int, str]:
    """The exit code, and all that a terminal gets."""
    screen, tty = os.openpty()
    fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    received: list[bytes] = []

    def receive() -> None:
        with contextlib.suppress(OSError):  # of one that is closed
            while not (received and received[-1].endswith(END)):
                received.append(os.read(screen, 4096))

    reader = threading.Thread(target=receive)
    reader.start()
    with open(tty, "w", encoding="utf-8") as stream:
        code = _exit_code(arguments, stdin, stream, stream, cwd, TERM="xterm-256color", COLUMNS="")
        stream.write(END.decode())
        stream.flush()
        reader.join()  # what was written just before a terminal is closed may be lost
    os.close(screen)
    return code, b"".join(received).removesuffix(END).decode()


def worked(*arguments: object, stdin: bytes = b"", cwd: Path | None = None) -> str:
    """What a command that worked printed."""
    done = jgpt(*arguments, stdin=stdin, cwd=cwd)
    assert done.code == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def typist(cwd: Path, **environment: str) -> Iterator[Callable[..., Finished]]:
    """Types commands, one after the other, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.commands"],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = process.stdin
    answers = process.stdout
    assert lines is not None
    assert answers is not None

    def type_in(*arguments: object, stdin: str = "") -> Finished:
        print(json.dumps([stdin, *map(str, arguments)]), file=lines, flush=True)
        return Finished(*json.loads(answers.readline()))

    with process:
        yield type_in
        lines.close()


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit, as a quota sets it, that what writes more runs into."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _exit_code(
    arguments: Iterable[object],
    stdin: bytes,
    stdout: TextIO,
    stderr: TextIO,
    cwd: Path | None,
    **environment: str,
) -> int:
    """Run the command with these streams."""
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with (
        mock.patch.multiple(sys, stdin=given, stdout=stdout, stderr=stderr, __stdout__=stdout),
        mock.patch.dict(os.environ, environment),
        # conftest freezes what is imported, and to count that takes a tenth of a second
        mock.patch.object(terminal, "gc", mock.Mock()),
        contextlib.chdir(cwd or Path()),
    ):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        said, *words = json.loads(line)
        print(json.dumps(jgpt(*words, stdin=said.encode())), flush=True)
