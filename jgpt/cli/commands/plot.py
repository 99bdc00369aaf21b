"""`jgpt plot`: the losses or another metric of runs as a picture."""

from typing import Annotated

from jgpt.cli import terminal
from jgpt.cli.arguments import Image, Lines, path_to_write
from jgpt.cli.options import OptionSpec
from jgpt.files import write_file


def plot(
    runs: Annotated[tuple[str, ...], OptionSpec("RUN", positional=True)],
    metric: Annotated[str | None, OptionSpec("NAME")] = None,
    out: Image = "losses.png",
) -> Lines:
    """Plot the losses of runs against steps, tokens and seconds, or another metric.

    Args:
        runs: Run directories.
        metric: Another metric of metrics.jsonl, or a group such as norms of norms/head.
    """
    path = path_to_write(out, ".png", ".svg")
    with terminal.importing():
        from jgpt.runs.directory import RunDirectory
        from jgpt.runs.plots import metric_image, runs_image

    opened = [RunDirectory.open(run) for run in runs]
    if metric is None:
        image = runs_image(opened, path.suffix[1:])
    else:
        image = metric_image(opened, metric, path.suffix[1:])
    write_file(path, image)
    return [f"wrote {out}"]
