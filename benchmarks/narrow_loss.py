"""What bfloat16 operands do to the loss: the same runs in float32 and in bfloat16, seed by seed.

    JGPT_DATA_DIR=DIR python benchmarks/narrow_loss.py

nanoGPT's CPU setting on tiny Shakespeare. A seed decides parameters and batches, so that the two
runs of a seed differ by rounding alone; how far apart they come is held against how far apart
seeds are.
"""

import dataclasses
import statistics
from dataclasses import dataclass

import record
import tyro
from ablation import run

from jgpt.presets import preset

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Options:
    steps: tuple[int, ...] = (250, 2000)
    """Lengths of the runs, each with its whole schedule."""
    seeds: int = 5


def main(options: Options) -> None:
    base = preset("nanogpt-cpu")
    losses: dict[str, dict[int, list[float]]] = {
        dtype: {steps: [] for steps in options.steps} for dtype in DTYPES
    }
    for seed in range(1337, 1337 + options.seeds):
        for steps in options.steps:
            for dtype in DTYPES:
                model = dataclasses.replace(base.model, dtype=dtype)
                config = dataclasses.replace(base, model=model, steps=steps, seed=seed)
                losses[dtype][steps].append(run(config)["validation_loss"])
    print("| steps | float32, mean | standard deviation | bfloat16 minus float32, mean | largest |")
    print("|---|---|---|---|---|")
    summary = {}
    for steps in options.steps:
        wide, narrow = (losses[dtype][steps] for dtype in DTYPES)
        apart = [after - before for before, after in zip(wide, narrow, strict=True)]
        summary[steps] = {
            "mean": statistics.mean(wide),
            "deviation_over_seeds": statistics.stdev(wide),
            "mean_difference": statistics.mean(apart),
            "largest_difference": max(map(abs, apart)),
        }
        mean, deviation, difference, largest = summary[steps].values()
        print(f"| {steps} | {mean:.4f} | {deviation:.4f} | {difference:+.4f} | {largest:.4f} |")
    print(record.write("narrow_loss", {"validation_losses": losses, "summary": summary}))


if __name__ == "__main__":
    main(tyro.cli(Options))
