"""The command `jgpt`: thin, and the only place that prints and exits."""

import contextlib
import inspect
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from jgpt.cli.commands import COMMANDS
from jgpt.cli.options import TRAIN, in_flags, parse
from jgpt.config import did_you_mean


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; a user's error is one line and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell's >&-
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            with _without_echoes():
                _run(args)
        finally:
            sys.stdout.flush()  # Python would report a failure at exit, which is too late
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader left, as `head` does: end as by SIGPIPE
        _discard_output()
        sys.exit(141)
    except (ValueError, OSError, ModuleNotFoundError, FloatingPointError) as error:
        if os.environ.get("JGPT_TRACEBACK") == "1":
            raise
        _discard_output()
        name, line = args[0] if args else "", _one_line(error)
        if name in ("train", "plan"):
            line = in_flags(line, TRAIN)
        elif name in COMMANDS:
            line = in_flags(line, inspect.signature(COMMANDS[name]).parameters)
        print(f"jgpt: {line}", file=sys.stderr)
        sys.exit(2)


def _run(args: list[str]) -> None:
    name, *words = args or ["help"]
    if name == "help" and words:
        name, *words = [*words, "--help"]
    if name in ("help", "-h", "--help"):
        print("usage: jgpt COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:<10} {str(command.__doc__).splitlines()[0]}")
        print("\njgpt help COMMAND shows a command's options; start with: jgpt train")
    elif name in ("-V", "--version"):
        print(f"jgpt {version('jgpt')}")
    elif name in ("train", "plan"):  # their options depend on the config
        COMMANDS[name](words)
    elif name in COMMANDS:
        parse(COMMANDS[name], name, words)
    else:
        raise ValueError(
            f"unknown command {name!r}{did_you_mean(name, COMMANDS)}; "
            f"the commands are {', '.join(COMMANDS)}"
        )


@contextlib.contextmanager
def _without_echoes() -> Iterator[None]:
    """Don't report dozens of times that a write of Orbax has failed, which raises an error too.

    TensorStore's threads complain of its event loop, and asyncio of its futures, some at exit.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = report


def _discard_output() -> None:
    """Discard what standard output doesn't take, of which Python would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or repr(error)
