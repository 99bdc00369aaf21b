"""`jgpt plot`: the losses of runs as a picture."""

from typing import Annotated

from jgpt.cli import terminal
from jgpt.cli.arguments import Image, Lines, path_to_write
from jgpt.cli.options import (
    OptionSpec,
)
from jgpt.durable import write_file


def plot(
    runs: Annotated[tuple[str, ...], OptionSpec("RUN", positional=True)], out: Image = "losses.png"
) -> Lines:
    """Plot the losses of runs against steps, tokens and seconds.

    Args:
        runs: Run directories.
    """
    path = path_to_write(out, ".png", ".svg")
    with terminal.importing():
        from jgpt.pictures.plots import runs_image
        from jgpt.runs.directory import RunDirectory

    write_file(path, runs_image([RunDirectory.open(run) for run in runs], path.suffix[1:]))
    return [f"wrote {out}"]
