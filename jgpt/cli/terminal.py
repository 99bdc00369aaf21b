"""The terminal: wrapped text and spinners. Rich and JAX are imported when they are used."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any


def say(console: Any, *lines: str) -> None:
    """Print plain text; a terminal wraps it at words."""
    from rich.text import Text

    for line in lines:
        console.print(Text(line), soft_wrap=not console.is_terminal)


def spinner(console: Any, doing: str) -> Any:
    """A spinner, of characters that the console can show."""
    return console.status(doing, spinner="line" if console.options.ascii_only else "dots")


def open_console(*, stderr: bool = False) -> Any:
    """Standard output, or standard error, a terminal only if standard output is one too."""
    from rich.console import Console

    return Console(
        stderr=stderr, force_terminal=False if stderr and not sys.stdout.isatty() else None
    )


@contextlib.contextmanager
def importing() -> Iterator[Any]:
    """A spinner while the block imports what needs JAX, which takes seconds.

    Enables the compilation cache. Raises OSError if JAX has no device.
    """
    with spinner(open_console(stderr=True), "importing JAX") as status:
        from jgpt.hardware import current_platform
        from jgpt.runs.profiling import enable_compilation_cache

        enable_compilation_cache()
        current_platform()
        yield status
        if not gc.get_freeze_count():
            gc.freeze()  # what is imported stays, and collections need not look at it again
