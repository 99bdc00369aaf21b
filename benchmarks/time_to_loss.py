"""Whole commands beside nanoGPT's: seconds to a loss, the loss when nanoGPT ends, and memory.

    JGPT_DATA_DIR=DIR python benchmarks/time_to_loss.py --nanogpt PATH

PATH is a checkout of nanoGPT; it trains tiny Shakespeare with its CPU setting (its README), to a
loss of about 1.886 by its own estimate over 20 batches. `jgpt train nanogpt-cpu` trains the same.
`jgpt train` trains the default preset twice: for a few steps, to an exact loss at least as good,
and for as many as end before nanoGPT does. None draws a sample at the end. Each round has a seed.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from runner import Figures, Rounds, Variant, compare, jgpt

LOSS = 1.886
NANOGPT_CPU = [
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=100"),
    *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
    *("--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"),
]


@dataclass(frozen=True)
class Options(Rounds):
    nanogpt: Path = Path("nanoGPT")
    """A checkout of nanoGPT."""
    short_steps: int = 45
    """Steps to reach the loss in."""
    steps: int = 1000
    """Steps that end before nanoGPT."""


def main(options: Options) -> None:
    lengths = {"to the loss": options.short_steps, "to nanoGPT's end": options.steps}
    with tempfile.TemporaryDirectory() as directory:
        checkout = check_out(options.nanogpt, Path(directory))
        variants = [
            trained_by_nanogpt("nanoGPT", checkout, *NANOGPT_CPU),
            trained_by_jgpt("jgpt nanogpt-cpu", "nanogpt-cpu"),
            *(trained_by_jgpt(name, "--steps", its) for name, its in lengths.items()),
        ]
        compare("time_to_loss", variants, options, lambda _: {"steps": lengths, "loss": LOSS})


def check_out(nanogpt: Path, directory: Path) -> Path:
    """A copy of nanoGPT's checkout that has prepared tiny Shakespeare, and takes a seed."""
    from jgpt.data.corpus import shakespeare_file

    checkout = directory / "nanoGPT"
    shutil.copytree(nanogpt, checkout, ignore=shutil.ignore_patterns(".git"))
    folder = checkout / "data" / "shakespeare_char"
    shutil.copy(shakespeare_file(), folder / "input.txt")  # so that it downloads nothing
    (folder / "requests.py").write_text("")  # it imports what only its download needs
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True, capture_output=True)
    script = (checkout / "train.py").read_text()
    seeded = script.replace("torch.manual_seed(1337", "torch.manual_seed(seed")
    (checkout / "train.py").write_text("seed = 1337\n" + seeded)  # which is now an option
    return checkout


def losses_of(found: list[tuple[int, float]], target: float) -> Figures:
    """The last loss and the best, and the share of the steps after which the target was reached."""
    steps, losses = zip(*found, strict=True)
    reached = [step for step, loss in found if loss <= target]
    share = (reached or steps[-1:])[0] / max(steps[-1], 1)
    return {"validation_loss": losses[-1], "best_loss": min(losses), "share_to_target": share}


def trained_by_nanogpt(
    name: str, checkout: Path, *options: str, target: float = LOSS, rounds: int | None = None
) -> Variant:
    def read(printed: str, out: Path) -> Figures:
        found = re.findall(r"step (\d+):.*val loss ([\d.]+)", printed)
        return losses_of([(int(step), float(loss)) for step, loss in found], target)

    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *options]
    return Variant(name, [*command, "--seed={seed}"], read, cwd=checkout, rounds=rounds)


def trained_by_jgpt(name: str, *options: object, target: float = LOSS) -> Variant:
    def read(printed: str, out: Path) -> Figures:
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found = [(it["step"], it["validation_loss"]) for it in lines if "validation_loss" in it]
        return losses_of(found, target)

    command = jgpt("train", *options, "--data", "shakespeare", "--sample-tokens", 0)
    return Variant(name, [*command, "--out", "{out}", "--seed", "{seed}"], read)


if __name__ == "__main__":
    main(tyro.cli(Options))
