"""What a terminal shows of what is written to it, and a process that has one."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

IN_FRONT = """
import fcntl, signal, termios, jgpt.cli
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(1, termios.TIOCSCTTY)
jgpt.cli.main()
"""


@contextlib.contextmanager
def in_a_terminal(*arguments: object) -> Iterator[tuple[subprocess.Popen[Any], int]]:
    """The command as a process with a terminal of its own, and what the terminal is read from."""
    screen, tty = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_FRONT, *map(str, arguments)],
        **dict.fromkeys(("stdin", "stdout", "stderr"), tty),
        start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(tty)
    try:
        yield process, screen
    finally:
        process.kill()
        process.wait()


class Screen:
    """A terminal of some width, as a file for a console."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]
        self.row = 0
        self.column = 0
        self.cursor = True
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        with self._lock:
            for word in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.", text, re.DOTALL):
                self._take(word)

    def flush(self) -> None:
        pass

    def show(self) -> list[str]:
        """The lines, without what trails."""
        with self._lock:
            return [line.rstrip() for line in self.lines if line.strip()]

    def _take(self, word: str) -> None:
        if word == "\n" or (self.column == self.width and len(word) == 1 and word != "\r"):
            self.row += 1
            self.column = 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        if word == "\r":
            self.column = 0
        elif word == "\x1b[2K":
            self.lines[self.row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d+)A", word):
            self.row -= int(up[1])
        elif word in ("\x1b[?25h", "\x1b[?25l"):
            self.cursor = word.endswith("h")
        elif len(word) == 1 and word != "\n":
            before = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = before[: self.column] + word + before[self.column + 1 :]
            self.column += 1
