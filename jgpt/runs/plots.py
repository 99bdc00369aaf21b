"""Pictures of the metrics of runs."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Integer, Real
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from jgpt.runs.directory import RunDirectory
from jgpt.shapes.contract import typed
from jgpt.words import did_you_mean

LABELS_BELOW = 8
"""The largest number of labels in a legend below the axes; more of them are beside the axes."""
LABELS_PER_COLUMN = 25
"""The largest number of labels in a column of a legend beside the axes."""
Metrics = Sequence[dict[str, Any]]
Place = Callable[[Any], Any]
"""From steps to their places on an axis."""


def losses_image(metrics: Metrics, title: str, format: str) -> bytes:
    """Draw training and validation loss against steps, as an image in a format such as svg."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, parse_math=False)
    lines = _draw_losses(axes, metrics, lambda steps: steps, "C0", "C1")
    window = _smoothing_window(len(metrics))
    labels = ["training, each step", f"training, mean of {window} steps", "validation"]
    _finish(figure, {"step": axes}, lines, labels)
    return _image(figure, format)


def runs_image(runs: Sequence[RunDirectory], format: str) -> bytes:
    """Draw the losses of several runs against steps, tokens and seconds, as an image.

    Raises ValueError for a run without metrics.
    """
    figure = Figure(figsize=(15, 5.5), layout="constrained")
    by_steps, by_tokens, by_seconds = figure.subplots(1, 3, sharey=True)
    panels: dict[str, Axes] = {"steps": by_steps, "tokens": by_tokens, "seconds": by_seconds}
    smoothed: list[Line2D] = []
    for index, run in enumerate(runs):
        metrics = run.metrics()
        if not metrics:
            raise ValueError(f"{run.path} has no metrics yet: train it first")
        config = run.config()
        tokens_per_step = config.batch_size * config.model.block_size
        for name, axes in panels.items():
            place = _place_of(name, tokens_per_step, metrics)
            lines = _draw_losses(axes, metrics, place, f"C{index}", f"C{index}")
            if name == "steps":
                smoothed.append(lines[1])  # represents the run in the legend
    title = "line: training, mean of 2% of the steps around; faint: each step; dots: validation"
    _finish(figure, panels, smoothed, _labels_of(runs), title)
    return _image(figure, format)


def _place_of(name: str, tokens_per_step: int, metrics: Metrics) -> Place:
    """Return a function from steps to places on the axis of steps, tokens or seconds."""
    if name == "steps":
        return lambda steps: steps
    if name == "tokens":
        return lambda steps: steps * tokens_per_step
    # Some lines have the seconds; between them, those of a step are interpolated.
    timed, seconds = _column(metrics, "seconds")
    return lambda steps: np.interp(steps, [0, *timed], [0, *seconds])


def metric_image(runs: Sequence[RunDirectory], metric: str, format: str) -> bytes:
    """Draw a metric of several runs against steps, as an image.

    A group, such as norms of norms/head and norms/blocks.0, has a line for each of its metrics.
    Raises ValueError for a run without the metric.
    """
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    curves = {}
    for run, label in zip(runs, _labels_of(runs), strict=True):
        metrics = run.metrics()
        for name in _names_of(run.path, metrics, metric):
            curves[label + name.removeprefix(metric)] = _column(metrics, name)
    is_group = len(curves) > len(runs)
    colours = [f"C{index}" for index in range(len(curves))]
    if is_group:
        colours = colormaps["viridis"](np.linspace(0, 0.95, len(curves)))
    smoothed: list[Line2D] = []
    smallest = math.inf
    for (steps, values), colour in zip(curves.values(), colours, strict=True):
        smallest = min([smallest, *values])
        _, mean = _draw_smoothed(axes, steps, values, colour)
        smoothed.append(mean)
    # Norms and ratios of parts differ by powers of ten, and those of a frozen part are 0. A term of
    # an objective may be negative, for which a logarithmic axis has no place.
    if is_group and smallest >= 0:
        axes.set_yscale("log", nonpositive="mask")
    _finish(figure, {"step": axes}, smoothed, list(curves), quantity=metric)
    return _image(figure, format)


def _labels_of(runs: Sequence[RunDirectory]) -> list[str]:
    """Return the names of runs, or their paths if two have the same name in different folders."""
    labels = [run.path.resolve().name for run in runs]
    if len(set(labels)) < len(runs):
        labels = [str(run.path) for run in runs]
    return labels


def _names_of(run: Path, metrics: Metrics, metric: str) -> list[str]:
    """Return the names of a run's metrics that are `metric`, or that begin with it and a slash."""
    found = {name: None for line in metrics for name in line if name != "step"}
    names = [name for name in found if name == metric or name.startswith(f"{metric}/")]
    if not names:
        groups = sorted({name.partition("/")[0] for name in found})
        known = ", ".join(groups) or "none yet"
        raise ValueError(
            f"{run} has no metric {metric!r}{did_you_mean(metric, groups)}: it has {known}"
        )
    return names


@typed
def _column(
    metrics: Metrics, name: str
) -> tuple[Integer[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
    """Return the steps that have a metric, and its values."""
    steps = []
    values = []
    for line in metrics:
        if line.get(name) is not None:  # null where it was not finite
            steps.append(line["step"])
            values.append(line[name])
    return np.array(steps, int), np.array(values, float)


def _draw_losses(
    axes: Axes, metrics: Metrics, place: Place, training_colour: str, validation_colour: str
) -> list[Line2D]:
    """Draw a run in two colours: one for training, one for validation."""
    steps, losses = _column(metrics, "loss")
    lines = _draw_smoothed(axes, place(steps), losses, training_colour)
    steps, validation = _column(metrics, "validation_loss")
    # Drawn above the lines, which have as many points as there are steps.
    dots = {"linestyle": "", "marker": "o", "color": validation_colour, "zorder": 3}
    return lines + axes.plot(place(steps), validation, **dots)


def _draw_smoothed(axes: Axes, x: Any, values: Any, colour: str) -> list[Line2D]:
    """Draw values faintly, and their running mean."""
    mean = _running_mean(values, _smoothing_window(len(values)))
    lines = axes.plot(x, values, color=colour, alpha=0.25, linewidth=0.7)
    return lines + axes.plot(x, mean, color=colour, linewidth=1.5)


def _smoothing_window(steps: int) -> int:
    """Return 2% of the steps, rounded to an odd number, so that a window has a middle."""
    two_percent = steps // 50
    return max(two_percent | 1, 3)  # | 1 makes an even number odd


@typed
def _running_mean(losses: Real[np.ndarray, " steps"], window: int) -> Float[np.ndarray, " steps"]:
    """Compute a centred running mean, at both ends of the values that there are."""
    step = np.arange(len(losses))
    first = np.maximum(step - window // 2, 0)
    end = np.minimum(step + window // 2 + 1, len(losses))
    # The sum of a window is a difference of two sums from the first value on, so that a long window
    # takes no more time than a short one.
    sums = np.append(0.0, np.cumsum(losses))
    return (sums[end] - sums[first]) / (end - first)


def _finish(
    figure: Figure,
    panels: dict[str, Axes],
    lines: Sequence[Artist],
    labels: list[str],
    title: str = "",
    quantity: str = "loss in nats per token",
) -> None:
    """Name the axes, and add the legend outside of them, where no data is."""
    for name, axes in panels.items():
        _name_axis(axes, name)
    first_axes = next(iter(panels.values()))
    first_axes.set(ylabel=quantity)
    place: Literal["outside lower center", "outside right upper"] = "outside lower center"
    columns = 2
    if len(labels) > LABELS_BELOW:
        place = "outside right upper"
        columns = math.ceil(len(labels) / LABELS_PER_COLUMN)
    legend = figure.legend(lines, labels, loc=place, ncols=columns, title=title)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a directory's name may contain dollars


def _name_axis(axes: Axes, name: str) -> None:
    """Name the horizontal axis, and write its numbers so that they can be read."""
    is_counted = name != "seconds"  # there is no half step or token
    axes.set(xlabel=name)
    axes.locator_params(axis="x", integer=is_counted)
    if name == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 4M
    else:
        axes.xaxis.set_major_formatter("{x:,.12g}")
    axes.grid(alpha=0.3)


def _image(figure: Figure, format: str) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format=format)
    return image.getvalue()
