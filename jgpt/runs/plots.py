"""Plots: loss curves and attention weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Real
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from jgpt.contracts import typed
from jgpt.data.tokenizers import Tokenizer
from jgpt.nn.models import LanguageModel
from jgpt.nn.transformer import GPT
from jgpt.runs.directory import RunDirectory


def plot_losses(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot training and validation loss against steps."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, label, marker, width in (
        ("loss", "training, each step", "", 0.8),
        ("validation_loss", "validation, exact", "o", 1.5),
    ):
        steps = [line["step"] for line in metrics if name in line]
        losses = [line[name] for line in metrics if name in line]
        axes.plot(steps, losses, label=label, marker=marker, linewidth=width)
    axes.set(xlabel="step", ylabel="loss in nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_runs(runs: Sequence[RunDirectory], path: Path) -> None:
    """Plot the losses of several runs against steps, tokens and seconds."""
    _require_picture(path)
    figure = Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    names = _short_names([run.path for run in runs])
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        config, metrics = run.config(), run.metrics()
        if not metrics:
            raise ValueError(f"{run.path} has no metrics yet: train it first")
        steps = np.array([line["step"] for line in metrics])
        timed = [line for line in metrics if "seconds" in line]
        seconds = np.interp(
            steps, [0, *(line["step"] for line in timed)], [0, *(line["seconds"] for line in timed)]
        )
        tokens = steps * (config.batch_size * config.model.block_size)
        for axes, x in zip(panels, (steps, tokens, seconds), strict=True):
            _draw_run(axes, x, metrics, f"C{index}", name)
    for axes, label in zip(panels, ("steps", "tokens", "seconds"), strict=True):
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="loss in nats per token")
    panels[-1].legend(title="dots: validation, exact; lines: training")
    figure.savefig(path, dpi=120)


@typed
def _draw_run(
    axes: Axes,
    x: Real[np.ndarray, " steps"],
    metrics: Sequence[dict[str, Any]],
    colour: str,
    name: str,
) -> None:
    trained = [i for i, line in enumerate(metrics) if "loss" in line]
    evaluated = [i for i, line in enumerate(metrics) if "validation_loss" in line]
    losses = [metrics[i]["loss"] for i in trained]
    axes.plot(x[trained], losses, color=colour, alpha=0.3, linewidth=0.7)
    losses = [metrics[i]["validation_loss"] for i in evaluated]
    axes.plot(x[evaluated], losses, color=colour, marker="o", label=name)


def plot_attention(model: LanguageModel, tokenizer: Tokenizer, text: str, path: Path) -> None:
    """Plot the attention weights over a text: a row per layer, a column per head."""
    _require_picture(path)
    if not isinstance(model, GPT):
        raise ValueError("a bigram model has no attention weights: choose a GPT run")
    tokens = tokenizer.encode(text)[-model.block_size :]
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: give at least one character")
    maps = np.asarray(model.attention_weights(jnp.asarray(tokens)[None])[:, 0])
    names = [_visible(tokenizer.decode(tokens[i : i + 1])) for i in range(len(tokens))]
    layers, heads, time, _ = maps.shape
    side = max(2.2, 0.16 * time)
    figure = Figure(figsize=(heads * side + 1, layers * side + 0.5), layout="constrained")
    size = min(8.0, 72 * 0.85 * side / (time + 4))
    for layer, head in np.ndindex(layers, heads):
        axes = figure.add_subplot(layers, heads, layer * heads + head + 1)
        axes.imshow(maps[layer, head], vmin=0, vmax=1, cmap="viridis")
        axes.set_title(f"layer {layer}, head {head}", fontsize=9)
        axes.set_xticks(range(time), names, fontsize=size, fontfamily="monospace")
        axes.set_yticks(range(time), names, fontsize=size, fontfamily="monospace")
        axes.tick_params(length=0, pad=2)
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    shades = ScalarMappable(Normalize(0, 1), "viridis")
    figure.colorbar(shades, ax=figure.axes, label="weight", shrink=0.6)
    figure.savefig(path, dpi=120)


def _visible(text: str) -> str:
    """A token's text with visible white space, and dollars escaped for matplotlib."""
    return text.replace("\n", "⏎").replace(" ", "␣").replace("\t", "⇥").replace("$", r"\$")


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The directories' names, or full paths if two are equal."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _require_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path} must end in .png or .svg")
