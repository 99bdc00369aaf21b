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
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    return describe_presets(width)
