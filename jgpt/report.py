"""Pictures of runs: the loss curves."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jgpt.contracts import typed


@typed
def plot_losses(metrics: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw the training loss of each step and the validation losses, against steps."""
    lines = list(metrics)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, label, marker, width in (
        ("loss", "training, each step", "", 0.8),
        ("validation_loss", "validation, exact", "o", 1.5),
    ):
        steps = [line["step"] for line in lines if name in line]
        losses = [line[name] for line in lines if name in line]
        axes.plot(steps, losses, label=label, marker=marker, linewidth=width)
    axes.set(xlabel="step", ylabel="loss in nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
