"""The lowest loss on tiny Shakespeare, where nothing is chosen on the text that is reported.

    JGPT_DATA_DIR=DIR python benchmarks/shakespeare_best.py choose --runs RUNS
    JGPT_DATA_DIR=DIR python benchmarks/shakespeare_best.py train --runs RUNS
    JGPT_DATA_DIR=DIR python benchmarks/shakespeare_best.py test --runs RUNS

The last tenth of the text, which nobody trains on, is cut in two. `choose` trains candidates with
one seed and compares them on the validation half. `train` trains the best one and nanoGPT's laptop
setting with five other seeds; the validation half chooses each run's checkpoint. `test` looks at
the test half, once, in windows that don't overlap. `--references nanogpt-char` trains and tests
nanoGPT's setting for a GPU too, which takes hours on a CPU. A run that was interrupted goes on;
one that is complete is not run again.
"""

import itertools
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from runner import jgpt, write

PRESET = "shakespeare-best"
CANDIDATES = {
    "the preset": "",
    "no dropout": "--dropout 0",
    "weight decay 0.1": "--weight-decay 0.1",
    "rates times 0.7": "--muon-learning-rate 0.0084 --learning-rate 0.0056",
    "average 0.998": "--ema-decay 0.998",
    "3,500 steps": "--steps 3500",
    "dropout 0.1": "--dropout 0.1",
}
"""What is compared, as changes of the preset."""
TUNING_SEED = 1337
SEEDS = (101, 102, 103, 104, 105)
WINDOWS = (64, 256, 512)


@dataclass(frozen=True)
class Options:
    phase: Annotated[Literal["choose", "train", "test"], tyro.conf.Positional]
    runs: Path
    """Where the runs are kept."""
    candidates: tuple[str, ...] = tuple(CANDIDATES)
    """Which to train in `choose`."""
    references: tuple[str, ...] = ("nanogpt-cpu",)
    """Presets that are trained and tested in the same way."""
    toy: bool = False
    """Ten steps a run and two seeds, to see that everything works."""


def main(options: Options) -> None:
    os.nice(19)
    if options.phase == "choose":
        for name in options.candidates:
            train((PRESET, name, TUNING_SEED), options)
        for name, loss in compared(options).items():
            print(f"{loss:.4f}  {name}")
    elif options.phase == "train":
        for run in itertools.chain(*models(options)):
            train(run, options)
    else:
        test(options)


Run = tuple[str, str, int]
"""A preset, a change of it, and a seed."""


def models(options: Options) -> list[list[Run]]:
    """The runs of the best candidate and of the references."""
    losses = compared(options)
    best = min(losses, key=losses.__getitem__)
    which = [(PRESET, best), *((name, "the preset") for name in options.references)]
    seeds = SEEDS[:2] if options.toy else SEEDS
    return [[(*model, seed) for seed in seeds] for model in which]


def compared(options: Options) -> dict[str, float]:
    """The validation loss of each candidate that is trained."""
    folders = {name: folder((PRESET, name, TUNING_SEED), options) for name in CANDIDATES}
    losses = {
        name: validation(out)["validation_loss"] for name, out in folders.items() if complete(out)
    }
    return losses or sys.exit("no candidate is trained: run `choose` first")


def folder(run: Run, options: Options) -> Path:
    return options.runs / "-".join(map(str, run)).replace(" ", "-").replace(",", "")


def train(run: Run, options: Options) -> None:
    (preset, change, seed), out = run, folder(run, options)
    if not complete(out):
        command = ["train", preset, *CANDIDATES[change].split(), "--seed", seed, "--out", out]
        command += ["--data", "shakespeare", "--sample-tokens", "0", "--resume"]
        command += ["--validation-fraction", "0.05", "--test-fraction", "0.05"]
        if options.toy:
            command += ["--steps", "10", "--eval-interval", "5", "--warmup-steps", "0"]
        subprocess.run(jgpt(*command), check=True, stdout=subprocess.DEVNULL)
    print(f"{out.name}: {validation(out)}", flush=True)


def complete(out: Path) -> bool:
    return (out / "samples.txt").exists()  # written at the end


def validation(out: Path) -> dict[str, Any]:
    """The evaluation with the lowest loss, whose checkpoint is tested."""
    from jgpt.runs.directory import RunDirectory

    if not complete(out):
        sys.exit(f"{out} is not complete: run `train` first")
    lines = [line for line in RunDirectory.open(out).metrics() if "validation_loss" in line]
    best = min(lines, key=lambda line: line["validation_loss"])
    return {name: best[name] for name in ("step", "validation_loss")}


def test(options: Options) -> None:
    from jgpt.runs.directory import RunDirectory
    from jgpt.runs.loop import evaluate

    seen = options.runs / "tested.json"
    if seen.exists():
        sys.exit(f"the test half was looked at already: its losses are in {seen}")
    found: dict[str, Any] = {"candidates": compared(options), "models": {}}
    for runs in models(options):
        preset, change, _ = runs[0]
        losses = []
        for run in runs:
            out = folder(run, options)
            block = RunDirectory.open(out).config().model.block_size
            its = {
                str(window): evaluate(out, split="test", window=window).loss
                for window in WINDOWS
                if window <= block
            }
            losses.append({"seed": run[2], **validation(out), "test": its})
            print(out.name, its, flush=True)
        windows = {size: [it["test"][size] for it in losses] for size in losses[0]["test"]}
        summary = {
            size: {"mean": statistics.mean(its), "deviation": statistics.stdev(its)}
            for size, its in windows.items()
        }
        print(preset, change, summary)
        found["models"][preset] = {"change": change, "runs": losses, "test": summary}
    write(seen, found)
    if not options.toy:
        print(write("shakespeare_best", found))


if __name__ == "__main__":
    main(tyro.cli(Options))
