"""Plots: loss curves and attention weights."""

import functools
import io
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Real
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from jgpt.data.tokenizers import Tokenizer, text_of_token
from jgpt.nn.bigram import BigramLM
from jgpt.nn.models import LanguageModel
from jgpt.nn.transformer import GPT
from jgpt.pictures.look import encode_text
from jgpt.runs.directory import RunDirectory
from jgpt.shapes.contract import typed

INCHES_PER_TOKEN, MOST_INCHES = 0.16, 40
"""Attention pictures: the size of a readable token, and of the longest row of panels."""

VISIBLE = str.maketrans({"\n": "⏎", " ": "␣", "\t": "⇥", "$": r"\$"})
"""Visible white space; dollars escaped for matplotlib."""


def losses_image(metrics: Sequence[dict[str, Any]], title: str, format: str) -> bytes:
    """Training and validation loss against steps, as an image such as svg."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    (title,), families = drawable([title], "sans-serif")
    axes.set_title(title, parse_math=False, fontfamily=families)
    lines = _draw_run(axes, np.array([line["step"] for line in metrics]), metrics, "C0", "C1")
    labels = ["training, each step", f"training, mean of {_window(metrics)} steps"]
    labels += ["validation", "validation, estimated on a part"]
    _finish(figure, {"step": axes}, lines, labels)
    return _image(figure, format)


def runs_image(runs: Sequence[RunDirectory], format: str) -> bytes:
    """The losses of several runs against steps, tokens and seconds, as an image."""
    figure = Figure(figsize=(15, 5.5), layout="constrained")
    row = figure.subplots(1, 3, sharey=True)
    smoothed: list[Artist] = []
    for index, run in enumerate(runs):
        config = run.config()
        metrics = run.metrics()
        colour = f"C{index}"
        if not metrics:
            raise ValueError(f"{run.path} has no metrics yet: train it first")
        steps = np.array([line["step"] for line in metrics])
        timed = [(line["step"], line["seconds"]) for line in metrics if "seconds" in line]
        at, spent = zip((0, 0), *timed, strict=True)
        seconds = np.interp(steps, at, spent)
        tokens = steps * (config.batch_size * config.model.block_size)
        drawn = zip(row, (steps, tokens, seconds), strict=True)
        lines = [_draw_run(axes, x, metrics, colour, colour) for axes, x in drawn]
        smoothed.append(lines[0][1])
    labels = [run.path.resolve().name for run in runs]
    if len(set(labels)) < len(runs):
        labels = [str(run.path) for run in runs]
    title = "line: training, mean of 2% of the steps around; faint: each step; "
    title += "dots: validation; circles: validation, estimated on a part"
    panels: dict[str, Axes] = dict(zip(("steps", "tokens", "seconds"), row, strict=True))
    _finish(figure, panels, smoothed, labels, title)
    return _image(figure, format)


@typed
def _draw_run(
    axes: Axes,
    x: Real[np.ndarray, " steps"],
    metrics: Sequence[dict[str, Any]],
    training: str,
    validation: str,
) -> list[Line2D]:
    """Draw a run in two colours: training, each step and smoothed; validation, and estimates."""

    def points(field: str) -> tuple[np.ndarray, np.ndarray]:
        at = [i for i, line in enumerate(metrics) if field in line]
        return x[at], np.array([metrics[i][field] for i in at])

    places, losses = points("loss")
    mean = _running_mean(losses, _window(metrics))
    dots = {"linestyle": "", "marker": "o", "color": validation, "zorder": 3}
    return [
        *axes.plot(places, losses, color=training, alpha=0.25, linewidth=0.7),
        *axes.plot(places, mean, color=training, linewidth=1.5),
        *axes.plot(*points("validation_loss"), **dots),
        *axes.plot(*points("validation_estimate"), **dots, fillstyle="none"),
    ]


def _window(metrics: Sequence[dict[str, Any]]) -> int:
    """2% of the steps, rounded to an odd number."""
    return max(len(metrics) // 50 | 1, 3)


@typed
def _running_mean(losses: Real[np.ndarray, " steps"], window: int) -> Float[np.ndarray, " steps"]:
    """Centred running mean; the window shrinks at both ends."""
    step = np.arange(len(losses))
    before = np.minimum(window // 2, step)
    after = np.minimum(before, step[::-1])
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    return (sums[step + after + 1] - sums[step - before]) / (before + 1 + after)


def _finish(
    figure: Figure,
    panels: dict[str, Axes],
    lines: Sequence[Artist],
    labels: list[str],
    title: str = "",
) -> None:
    """Name the axes and add the legend, below them, where no data is."""
    for name, axes in panels.items():
        axes.set(xlabel=name)
        axes.locator_params(axis="x", integer=name != "seconds")
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if name == "tokens" else "{x:,.12g}")
        axes.grid(alpha=0.3)
    next(iter(panels.values())).set(ylabel="loss in nats per token")
    columns = max(2, len(labels) // 2)
    labels, families = drawable(labels, "sans-serif")
    legend = figure.legend(lines, labels, loc="outside lower center", ncols=columns, title=title)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a directory may have dollars in its name
        text.set_fontfamily(families)


def drawable(texts: Sequence[str], family: str) -> tuple[list[str], list[str]]:
    """Texts that can be drawn, and the font families to draw them with.

    matplotlib's own font has no Chinese: other installed fonts are added for the characters that
    `family` lacks. A character that no font has is written as its code point, U+4F60, where
    matplotlib would draw an empty box and warn.
    """
    families = [family]
    missing = set("".join(texts)) - _characters_of(
        font_manager.findfont(font_manager.FontProperties(family=[family]))
    )
    for font in font_manager.fontManager.ttflist:
        if not missing:
            break
        if font.name.startswith("Last Resort"):  # matplotlib's own: a box for every character
            continue
        found = missing & _characters_of(font.fname)
        if found:
            families.append(font.name)
            missing -= found
    codes = {ord(character): f"U+{ord(character):04X}" for character in missing}
    return [text.translate(codes) for text in texts], families


@functools.cache
def _characters_of(font_file: str) -> frozenset[str]:
    """The characters that a font has; none if matplotlib can't read it, as fonts of bitmaps."""
    try:
        return frozenset(map(chr, font_manager.get_font(font_file).get_charmap()))
    except (RuntimeError, OSError):
        return frozenset()


def _image(figure: Figure, format: str) -> bytes:
    """The figure as an image. Raises ValueError with the reason of matplotlib.

    A `matplotlibrc` may ask for LaTeX or a backend that is not there, in errors of any kind.
    """
    image = io.BytesIO()
    try:
        figure.savefig(image, dpi=120, format=format)
    except Exception as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ValueError(f"the picture can't be drawn by matplotlib: {reason}") from error
    return image.getvalue()


def attention_image(model: LanguageModel, tokenizer: Tokenizer, text: str, format: str) -> bytes:
    """The attention weights over a text, as an image: a row per layer, a column per head."""
    if not isinstance(model, GPT):
        kind = "a bigram model" if isinstance(model, BigramLM) else "a model of your own"
        raise ValueError(f"{kind} has no attention weights: choose a GPT run")
    tokens = encode_text(tokenizer, text)[-model.block_size :]
    maps = np.asarray(model.attention_weights(jnp.asarray(tokens)[None])[:, 0])
    layers, heads, time, _ = maps.shape
    side = min(max(2.2, INCHES_PER_TOKEN * time), MOST_INCHES / max(layers, heads))
    named = range(0, time, math.ceil(INCHES_PER_TOKEN * time / side))
    small = min(8.0, 72 * 0.85 * side / (len(named) + 4))
    large = min(24.0, 7 + side)
    figure = Figure(figsize=(heads * side + 1, layers * side + 0.5), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False)
    names = [text_of_token(tokenizer, int(tokens[i])).translate(VISIBLE) for i in named]
    names, families = drawable(names, "monospace")
    for (layer, head), axes in np.ndenumerate(panels):
        axes.imshow(maps[layer, head], vmin=0, vmax=1, cmap="viridis")
        axes.set_title(f"layer {layer}, head {head}", fontsize=large)
        axes.set_xticks(named, names, fontsize=small, fontfamily=families)
        axes.set_yticks(named, names, fontsize=small, fontfamily=families)
        axes.tick_params(length=0, pad=2)
        if layer == layers - 1:
            axes.set_xlabel("key position", fontsize=large)
        if head == 0:
            axes.set_ylabel("query position", fontsize=large)
    bar = figure.colorbar(panels[0, 0].get_images()[0], ax=panels, aspect=40)
    bar.set_label("attention weight", fontsize=large)
    return _image(figure, format)
