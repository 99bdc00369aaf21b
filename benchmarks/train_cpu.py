"""The whole training command beside nanoGPT's, same hyper-parameters, alternating in one run.

    JGPT_DATA_DIR=DIR python benchmarks/train_cpu.py --nanogpt PATH

PATH is a checkout of nanoGPT; it trains on the same text with its CPU setting (its README).
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import record
import tyro

NANOGPT_CPU = [
    "--device=cpu",
    "--compile=False",
    "--eval_iters=20",
    "--log_interval=100",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--max_iters=2000",
    "--lr_decay_iters=2000",
    "--dropout=0.0",
]


@dataclass(frozen=True)
class Options:
    nanogpt: Path
    """A checkout of nanoGPT."""
    repeats: int = 3
    """How often each command runs; each time with another seed."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkout = check_out(options.nanogpt, Path(directory))
        runs = {"nanoGPT": [], "jgpt": []}
        for repeat in range(options.repeats):
            seed = 1337 + repeat
            runs["nanoGPT"].append(run_nanogpt(checkout, seed))
            runs["jgpt"].append(run_jgpt(Path(directory) / f"run-{seed}", seed))
            for name, its in runs.items():
                print(f"seed {seed} {name:<8} {its[-1]}", flush=True)
    print("\n| command | seconds | validation loss at the end |\n|---|---|---|")
    for name, its in runs.items():
        seconds = record.spread([run["seconds"] for run in its])
        losses = ", ".join(f"{run['validation_loss']:.4f}" for run in its)
        print(f"| {name} | {seconds} | {losses} |")
    medians = {name: statistics.median(run["seconds"] for run in its) for name, its in runs.items()}
    ratio = medians["jgpt"] / medians["nanoGPT"]
    print(f"\njgpt's command takes {ratio:.2f} of nanoGPT's")
    note = "nanoGPT's loss is its own estimate over 20 random batches; jgpt's is exact"
    print(record.write("train_cpu", {"runs": runs, "ratio": ratio, "note": note}))


def check_out(nanogpt: Path, directory: Path) -> Path:
    """A copy of nanoGPT's checkout that has prepared tiny Shakespeare."""
    from jgpt.data.corpus import shakespeare_file

    checkout = directory / "nanoGPT"
    shutil.copytree(nanogpt, checkout, ignore=shutil.ignore_patterns(".git"))
    prepare_nanogpt(checkout, shakespeare_file())
    return checkout


def prepare_nanogpt(checkout: Path, text: Path) -> None:
    """Its own preparation, with the text already there so that it downloads nothing."""
    folder = checkout / "data" / "shakespeare_char"
    shutil.copy(text, folder / "input.txt")
    (folder / "requests.py").write_text("")  # it imports what only its download needs
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True, capture_output=True)


def run_nanogpt(checkout: Path, seed: int) -> dict[str, float]:
    script = (checkout / "train.py").read_text()
    (checkout / "train_seed.py").write_text(
        re.sub(r"torch\.manual_seed\(1337", f"torch.manual_seed({seed}", script)
    )
    command = [sys.executable, "train_seed.py", "config/train_shakespeare_char.py", *NANOGPT_CPU]
    began = time.perf_counter()
    out = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout
    seconds = time.perf_counter() - began
    losses = [float(loss) for loss in re.findall(r"val loss ([\d.]+)", out)]
    return {"seconds": seconds, "validation_loss": losses[-1]}


def run_jgpt(out: Path, seed: int) -> dict[str, float]:
    command = [
        *(sys.executable, "-m", "jgpt.cli", "train", "nanogpt-cpu", "--data", "shakespeare"),
        *("--seed", str(seed), "--out", str(out)),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ)
    seconds = time.perf_counter() - began
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    return {"seconds": seconds, "validation_loss": losses[-1]}


if __name__ == "__main__":
    main(tyro.cli(Options))
