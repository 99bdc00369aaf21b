"""The terminal: streams, wrapped text, spinners. Rich and JAX are imported when they are used."""

import contextlib
import errno
import gc
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Unicode has a picture of each of the first 32, such as ␛, and of DEL, but of no later one
CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
CONTROLS[0x7F] = 0x2421
CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Control characters and what is shown instead: ESC could change a terminal, or answer for it."""

SECONDS_PER_LINE = 20  # where the output is no terminal, such as the log of a job


class Terminal(io.TextIOWrapper):
    """A stream to a terminal without control characters. The terminal may be closed."""

    draws = False
    """Let control characters through, as rich needs for bars."""

    def close(self) -> None:
        """Flush only: the stream below belongs to another."""
        self.flush()

    def write(self, text: str) -> int:
        """Write to the terminal. A closed one takes nothing more, and that is no error."""
        shown = text
        if not self.draws:
            shown = text.translate(CONTROLS)
        with self._open():
            super().write(shown)
        return len(text)  # of what the caller gave

    def flush(self) -> None:
        """Flush to the terminal."""
        with self._open():
            super().flush()

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Discard what follows if the terminal turns out to be closed: training goes on."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def for_terminal(stream: Any, *, draws: bool = False) -> Any:
    """A `Terminal` for a stream that goes to one; any other stream as it is."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    encoding = stream.encoding
    made = Terminal(stream.buffer, encoding, "replace", line_buffering=True, write_through=True)
    made.draws = draws
    return made


def say(
    console: Any, *lines: str, colours: Mapping[str, str] | None = None, style: str = ""
) -> None:
    """Print plain text; a terminal wraps it at words, and shows names before `=` in colours."""
    from rich.text import Text

    for line in lines:
        if console.is_terminal:
            text = Text(line.translate(CONTROLS), style)
            for name, colour in (colours or {}).items():
                text.highlight_regex(rf"(?<![\w*]){re.escape(name)}(?==)", colour)
            console.print(text)
        elif not console.quiet:
            print(line, file=console.file, flush=True)


class NowAndThen:
    """Says a line where there is no bar, unless another one was said a moment ago."""

    def __init__(self, console: Any, say: Callable[[str], None]) -> None:
        self.console = console
        self.say = say
        self.said()

    def said(self) -> None:
        """Note that a line is said now."""
        self.last_line = self.console.get_time()

    def __call__(self, line: str) -> None:
        """Say the line if it is time."""
        waited = self.console.get_time() - self.last_line
        if not self.console.is_terminal and waited > SECONDS_PER_LINE:
            self.say(line)
            self.said()


def on_one_line(text: str) -> str:
    """A text without line breaks, as an error is shown."""
    return " ".join(text.split())


def open_console(*, stderr: bool = False) -> Any:
    """Standard output, or standard error, a terminal only if standard output is one too."""
    from rich.console import Console

    stream = sys.stdout
    is_terminal = None  # rich asks the stream
    if stderr:
        stream = sys.stderr
        if not sys.stdout.isatty():
            is_terminal = False
    return Console(file=for_terminal(stream, draws=True), force_terminal=is_terminal)


@contextlib.contextmanager
def importing() -> Iterator[Any]:
    """A spinner while the block imports what needs JAX, which takes seconds.

    Enables the compilation cache. Raises OSError if JAX has no device.
    """
    importing_jax = open_console(stderr=True).status("importing JAX")
    with _without_collections(), importing_jax as status:
        from jgpt.machine import current_platform, enable_compilation_cache

        enable_compilation_cache()
        current_platform()
        yield status


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in the block, which imports, nor look again at what it imported."""
    # Imports leave little garbage, but each of their objects counts towards the next collection.
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    if not gc.get_freeze_count():
        # Training to a loss of 1.886 took 9.84 s instead of 10.36 (medians of four, alternating).
        gc.freeze()
