"""The command `jgpt`: thin, and the only place that prints and exits."""

import os
import sys
from collections.abc import Sequence

from jgpt.cli.commands import COMMANDS
from jgpt.cli.options import in_flags
from jgpt.config import did_you_mean


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; a user's error is one line and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print("usage: jgpt COMMAND ...\n")
        for name, (summary, *_) in COMMANDS.items():
            print(f"  {name:<9} {summary}")
        print("\njgpt COMMAND --help shows a command's options; start with: jgpt train")
        sys.exit(0)
    try:
        if args[0] not in COMMANDS:
            raise ValueError(
                f"unknown command {args[0]!r}{did_you_mean(args[0], COMMANDS)}; "
                f"the commands are {', '.join(COMMANDS)}"
            )
        COMMANDS[args[0]][1](args[1:])
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ModuleNotFoundError, FloatingPointError) as error:
        if os.environ.get("JGPT_TRACEBACK") == "1":
            raise
        line = _one_line(error)
        if args[0] in COMMANDS:
            line = in_flags(line, COMMANDS[args[0]][2])
        print(f"jgpt: {line}", file=sys.stderr)
        sys.exit(2)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or repr(error)
