"""`python -m jgpt.cli.waiting`: a process that imports JAX, and waits for one command.

Its standard input has one line of JSON: the words of the command, and variables of the environment.
"""

import json
import os
import sys
import threading

from jgpt.cli import main
from jgpt.hardware import current_platform


def wait() -> None:
    """Import what a trace needs, and run the command when it comes."""
    import jgpt.shapes.source
    import jgpt.training.programs  # noqa: F401

    current_platform()
    line = sys.stdin.readline()
    if not line:  # the parent has ended
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    command = json.loads(line)
    os.environ.update(command["environment"])
    # Python takes a kept program for the newest if its file was saved in the same second.
    sys.dont_write_bytecode = True
    main(command["words"])


def _end_with_parent() -> None:
    """End this process when the parent does, however that ends: the system closes the pipe."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    wait()
