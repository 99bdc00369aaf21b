"""Step time as work grows: against layers, width, block and batch, one at a time.

    python benchmarks/scaling.py

The exponent of a step's time over its floating-point operations is fitted for each: 1 is linear,
less means that what a step costs anyway weighs less.
"""

import statistics
from dataclasses import replace
from typing import Any

import tyro
from runner import Measured, Rounds, compare
from stepping import variant

from jgpt.config import TrainConfig
from jgpt.presets import preset

AXES = {
    "num_layers": (2, 4, 8),
    "embed_dim": (64, 128, 256),
    "block_size": (32, 64, 128, 256),
    "batch_size": (6, 12, 24),
}
"""What nanoGPT's CPU setting is varied in; it is in each of these itself."""


def varied(axis: str, size: int) -> TrainConfig:
    config = preset("nanogpt-cpu")
    if axis == "batch_size":
        return replace(config, batch_size=size)
    return replace(config, model=replace(config.model, **{axis: size}))


def exponents(measured: Measured) -> dict[str, Any]:
    """The slope of the line through the logarithms, and what it is a line through."""
    import numpy as np

    from jgpt.nn.models import flops_per_token

    found: dict[str, Any] = {"exponents": {}, "flops": {}}
    for axis, sizes in AXES.items():
        names = [name for name in (f"{axis} {size}" for size in sizes) if name in measured]
        for name in names:
            config = varied(axis, int(name.split()[1]))
            tokens = config.batch_size * config.model.block_size
            found["flops"][name] = 3 * flops_per_token(config.model) * tokens
        if len(names) > 1:
            times = [statistics.median(measured[name]["milliseconds"]) for name in names]
            work = [found["flops"][name] for name in names]
            found["exponents"][axis] = float(np.polyfit(np.log(work), np.log(times), 1)[0])
    return found


def main(options: Rounds) -> None:
    variants = [
        variant(f"{axis} {size}", varied(axis, size), "--steps", 10)
        for axis, sizes in AXES.items()
        for size in sizes
    ]
    compare("scaling", variants, options, exponents)


if __name__ == "__main__":
    main(tyro.cli(Rounds))
