"""`jgpt presets`: what `jgpt train` can train."""

import shutil
import sys

from jgpt.cli.arguments import (
    Lines,
)
from jgpt.cli.options import (
    describe_presets,
)


def presets() -> Lines:
    """List the presets of `jgpt train`."""
    width = 1000  # for a program that reads it, a line stays one
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    return describe_presets(width)
