"""The command `jgpt`: thin, and the only place that prints and exits."""

import contextlib
import inspect
import io
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from jgpt.cli.commands import COMMANDS
from jgpt.cli.options import TRAIN, help_of, in_options, parse
from jgpt.cli.signals import leaving_when_interrupted
from jgpt.cli.terminal import for_terminal, on_one_line, open_console, say
from jgpt.user_code import describe_error
from jgpt.words import did_you_mean

_USER_ERRORS = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, MemoryError)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; a user's error is one line and exit code 2."""
    interruptions: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if args is None:
        interruptions = leaving_when_interrupted()
        args = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with (
        interruptions,
        _without_echoes(),
        contextlib.redirect_stdout(for_terminal(sys.stdout)),
        contextlib.redirect_stderr(for_terminal(sys.stderr)),
    ):
        _run_or_exit(list(args))


@contextlib.contextmanager
def _without_echoes() -> Iterator[None]:
    """Show warnings in one line, and silence what asyncio and TensorStore's threads say after a
    failed write, which raises an error too."""
    report_unraisable = sys.unraisablehook

    def show_in_one_line(message: Warning | str, *_: Any) -> None:
        # Without the file and the line of our code that warns, which tell a user nothing.
        print(f"jgpt: {message}", file=sys.stderr)

    def unraisable_hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report_unraisable(unraisable)

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = unraisable_hook
    with warnings.catch_warnings():
        warnings.showwarning = show_in_one_line
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        warnings.filterwarnings("always", ".* has changed since the run began")
        try:
            yield
        finally:
            sys.unraisablehook = report_unraisable


def _run_or_exit(args: list[str]) -> None:
    """Run a command; end the process as a shell expects of what went wrong."""
    try:
        try:
            lines = _run(args)
            say(open_console(), *lines)  # afterwards: processes that join replace stdout
        finally:
            sys.stdout.flush()  # Python would report a failure at exit, which is too late
    except KeyboardInterrupt:  # while a folder was written, which is deleted then
        sys.exit(130)
    except BrokenPipeError:  # the reader left, as `head` does: end as by SIGPIPE
        _discard_output()
        sys.exit(141)
    except Exception as error:
        custom = describe_error(error)
        if os.environ.get("JGPT_TRACEBACK") == "1":
            raise
        if custom is None and not isinstance(error, _USER_ERRORS):
            raise
        _discard_output()
        message = custom or _describe(error)
        print(f"jgpt: {on_one_line(in_options(message, _options_of(args)))}", file=sys.stderr)
        sys.exit(2)


def _run(args: list[str]) -> Iterable[str]:
    """Run a command, or say what commands there are."""
    name, *words = args or ["help"]
    if name == "help" and words:
        name, *words = [*words, "--help"]
    if name in ("help", "-h", "--help"):
        return _describe_commands()
    if name in ("-V", "--version"):
        from importlib.metadata import version  # which takes a while

        return [f"jgpt {version('jgpt')}"]
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS)
        raise ValueError(f"unknown command {name!r}{meant}; the commands are {', '.join(COMMANDS)}")
    if {"-h", "--help", "--help-all"} & set(words):
        return help_of(COMMANDS[name], name, words).splitlines()
    return COMMANDS[name](**parse(COMMANDS[name], name, words)) or ()


def _describe_commands() -> list[str]:
    """A line for each command."""
    lines = ["usage: jgpt COMMAND ...", ""]
    for name, command in COMMANDS.items():
        summary = str(command.__doc__).splitlines()[0]
        lines.append(f"  {name:<9}{summary}")
    ending = "jgpt help COMMAND shows a command's options; start with: jgpt train"
    return [*lines, "", ending]


def _discard_output() -> None:
    """Discard output that can't be written, or Python would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _options_of(args: list[str]) -> Collection[str]:
    """The fields that the command of these words has options for."""
    if not args or args[0] not in COMMANDS:
        return ()
    names = inspect.signature(COMMANDS[args[0]]).parameters
    if "config" in names:  # whose fields are options
        return TRAIN
    return names


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:  # the system's: `[Errno 2] ...`
        if error.filename:
            return f"{error.filename}: {error.strerror}"
        return error.strerror
    text = str(error) or repr(error)
    if isinstance(error, MemoryError):  # NumPy says how much, and not that it was too much
        return f"the memory is too small ({text}): free some, or take a smaller model or text"
    return text
