"""Step time as work grows: against layers, width, block and batch, one at a time.

    python benchmarks/scaling.py

For each it fits the exponent of the step's time over the step's floating-point operations: 1 is
linear, less means that what a step costs anyway weighs less. All sizes are compiled first and then
measured in turn, round after round.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass

import numpy as np
import record
import tyro
from stepping import TakeSteps, jgpt_steps

from jgpt.config import TrainConfig
from jgpt.nn.models import flops_per_token
from jgpt.presets import preset

AXES = {
    "num_layers": (2, 4, 8),
    "embed_dim": (64, 128, 256),
    "block_size": (32, 64, 128, 256),
    "batch_size": (6, 12, 24),
}
"""What nanoGPT's CPU setting is varied in; it is in each of these itself."""


@dataclass(frozen=True)
class Options:
    rounds: int = 3
    """How often each size is measured."""
    steps: int = 10
    """Steps in a measurement."""
    toy: bool = False
    """The smallest two of each alone, to see whether this runs."""


def varied(axis: str, size: int) -> TrainConfig:
    config = preset("nanogpt-cpu")
    if axis == "batch_size":
        return dataclasses.replace(config, batch_size=size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **{axis: size}))


def flops_per_step(config: TrainConfig) -> int:
    return 3 * flops_per_token(config.model) * config.batch_size * config.model.block_size


def milliseconds(take: TakeSteps, steps: int) -> float:
    began = time.perf_counter()
    take(steps)
    return 1e3 * (time.perf_counter() - began) / steps


def exponent(flops: list[int], times: list[float]) -> float:
    """Of the power law through the points: the slope of their logarithms' line."""
    return float(np.polyfit(np.log(flops), np.log(times), 1)[0])


def main(options: Options) -> None:
    axes = {axis: sizes[:2] if options.toy else sizes for axis, sizes in AXES.items()}
    configs = dict.fromkeys(varied(axis, size) for axis, sizes in axes.items() for size in sizes)
    takers = {config: jgpt_steps(config) for config in configs}
    for take in takers.values():
        take(options.steps)  # compiles
    measured: dict[TrainConfig, list[float]] = {config: [] for config in configs}
    for _ in range(options.rounds):
        for config, take in takers.items():
            measured[config].append(milliseconds(take, options.steps))
    results = {}
    print("| axis | size | MFLOP a step | milliseconds, median (range) | exponent |")
    print("|---|---|---|---|---|")
    for axis, sizes in axes.items():
        points = [varied(axis, size) for size in sizes]
        flops = [flops_per_step(config) for config in points]
        slope = exponent(flops, [statistics.median(measured[config]) for config in points])
        results[axis] = {
            "sizes": sizes,
            "flops": flops,
            "milliseconds": [measured[config] for config in points],
            "exponent": slope,
        }
        for size, work, config in zip(sizes, flops, points, strict=True):
            times = record.spread(measured[config])
            print(f"| {axis} | {size} | {work / 1e6:,.0f} | {times} | |")
        print(f"| {axis} | | | | {slope:.2f} |")
    slopes = [result["exponent"] for result in results.values()]
    print(f"\nthe largest exponent is {max(slopes):.2f}; linear is 1")
    print(record.write("scaling", {"axes": results, "largest_exponent": max(slopes)}))


if __name__ == "__main__":
    main(tyro.cli(Options))
