"""Whole commands beside nanoGPT's: seconds to a loss, and the loss when nanoGPT ends.

    JGPT_DATA_DIR=DIR python benchmarks/time_to_loss.py --nanogpt PATH

PATH is a checkout of nanoGPT; it trains tiny Shakespeare with its CPU setting (its README), to a
loss of about 1.886. `jgpt train` trains the default preset twice: for a few steps, to an exact loss
at least as good, and for as many as end before nanoGPT does. Neither draws a sample at the end, as
nanoGPT's doesn't. The commands alternate.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import record
import tyro
from train_cpu import check_out, run_nanogpt

LOSS = 1.886


@dataclass(frozen=True)
class Options:
    nanogpt: Path
    """A checkout of nanoGPT."""
    repeats: int = 2
    """How often nanoGPT's command runs."""
    seeds: int = 5
    """How many seeds jgpt trains."""
    short_steps: int = 45
    """Steps to reach the loss in."""
    steps: int = 1500
    """Steps that end before nanoGPT."""


def main(options: Options) -> None:
    runs = {"nanoGPT": [], "to the loss": [], "to nanoGPT's end": []}
    with tempfile.TemporaryDirectory() as directory:
        checkout = check_out(options.nanogpt, Path(directory))
        for repeat in range(options.seeds):
            seed = 1337 + repeat
            if repeat < options.repeats:
                runs["nanoGPT"].append(run_nanogpt(checkout, seed))
            for name, steps in (
                ("to the loss", options.short_steps),
                ("to nanoGPT's end", options.steps),
            ):
                runs[name].append(run_jgpt(Path(directory) / f"{steps}-{seed}", seed, steps))
            for name, its in runs.items():
                print(f"seed {seed} {name:<17} {its[-1]}", flush=True)
    seconds = {name: [run["seconds"] for run in its] for name, its in runs.items()}
    print("\n| command | seconds | validation loss |\n|---|---|---|")
    for name, its in runs.items():
        losses = [run["validation_loss"] for run in its]
        print(f"| {name} | {record.spread(seconds[name])} | {record.spread(losses)} |")
    end = statistics.median(seconds["nanoGPT"])
    short = [run["validation_loss"] for run in runs["to the loss"]]
    losses = [run["validation_loss"] for run in runs["to nanoGPT's end"]]
    results = {
        "ratio": statistics.median(seconds["to the loss"]) / end,
        "worst_loss_of_the_short_runs": max(short),
        "reached": max(short) <= LOSS,
        "mean_loss_at_nanogpts_end": statistics.mean(losses),
        "standard_deviation": statistics.stdev(losses),
        "ended_before_nanogpt": max(seconds["to nanoGPT's end"]) <= end,
    }
    print(json.dumps(results, indent=2))
    note = "nanoGPT's loss is its own estimate over 20 random batches; jgpt's is exact"
    print(record.write("time_to_loss", {"runs": runs, **results, "note": note}))


def run_jgpt(out: Path, seed: int, steps: int) -> dict[str, float]:
    command = [
        *(sys.executable, "-m", "jgpt.cli", "train", "--data", "shakespeare"),
        *("--steps", str(steps), "--seed", str(seed), "--out", str(out), "--sample-tokens", "0"),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ)
    seconds = time.perf_counter() - began
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    return {"seconds": seconds, "validation_loss": losses[-1]}


if __name__ == "__main__":
    main(tyro.cli(Options))
