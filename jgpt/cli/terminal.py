"""The terminal: wrapped text and spinners. Nothing here imports jax until it is asked to."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text


def say(console: Console, *lines: str) -> None:
    """Print plain text; a terminal wraps it at words."""
    for line in lines:
        console.print(Text(line), soft_wrap=not console.is_terminal)


def spinner(console: Console, doing: str) -> Status:
    """A spinner, of characters that the console can show."""
    return console.status(doing, spinner="line" if console.options.ascii_only else "dots")


def error_console() -> Console:
    """Standard error; a terminal only if standard output is one too."""
    return Console(stderr=True, force_terminal=None if sys.stdout.isatty() else False)


@contextlib.contextmanager
def importing() -> Iterator[Status]:
    """A spinner while the block imports what needs JAX, which takes seconds.

    Enables the compilation cache. Raises OSError if JAX has no device.
    """
    with spinner(error_console(), "importing JAX") as status:
        from jgpt.hardware import current_platform
        from jgpt.runs.profiling import enable_compilation_cache

        enable_compilation_cache()
        current_platform()
        yield status
