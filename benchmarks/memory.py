"""Peak memory: of a training run beside nanoGPT's, and of preparing a large text.

    JGPT_DATA_DIR=DIR python benchmarks/memory.py --nanogpt PATH

PATH is a checkout of nanoGPT. Both train on tiny Shakespeare in nanoGPT's CPU setting, each in a
process of its own, alternately. jgpt's first run compiles; later ones take the programs from the
compilation cache. The text to prepare is generated, and takes a minute or two.
"""

import os
import random
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
from train_cpu import NANOGPT_CPU, prepare_nanogpt

MIB = 2**20
PREPARE_LIMIT_MIB = 500


@dataclass(frozen=True)
class Options:
    nanogpt: Path
    """A checkout of nanoGPT."""
    repeats: int = 3
    """How often each trains."""
    steps: int = 200
    """Steps of each training."""
    gigabytes: float = 1.0
    """The size of the text to prepare; 0 leaves it out."""


def peak_mib(
    command: list[str], cwd: Path | None = None, **environment: str
) -> tuple[float, float]:
    """The most memory that a command had resident, in MiB, and its seconds."""
    env = os.environ | {"PYTHONWARNINGS": "ignore"} | environment
    began = time.perf_counter()
    # Linux counts the process that forked as well: this one must stay smaller, without jax
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak / MIB, time.perf_counter() - began


def write_text(path: Path, size: int) -> None:
    """Lines of random words out of a vocabulary of some thousands."""
    generator = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(generator.choices(letters, k=generator.randint(1, 9))) for _ in range(5000)]
    lines = [" ".join(generator.choices(words, k=12)) + "\n" for _ in range(20_000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            generator.shuffle(lines)
            file.write("".join(lines))


def jgpt(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "jgpt.cli", *map(str, arguments)]


def main(options: Options) -> None:
    from jgpt.data.corpus import shakespeare_file

    trained: dict[str, list[float]] = {"nanoGPT": [], "jgpt, first run": [], "jgpt": []}
    prepared = None
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        checkout = directory / "nanoGPT"
        shutil.copytree(options.nanogpt, checkout, ignore=shutil.ignore_patterns(".git"))
        prepare_nanogpt(checkout, shakespeare_file())
        theirs = [sys.executable, "train.py", "config/train_shakespeare_char.py", *NANOGPT_CPU]
        theirs.append(f"--max_iters={options.steps}")
        for repeat in range(options.repeats):
            trained["nanoGPT"].append(peak_mib(theirs, checkout)[0])
            cache = {"XDG_CACHE_HOME": str(directory / f"cache-{repeat}")}
            for name in ("jgpt, first run", "jgpt"):
                ours = ("train", "nanogpt-cpu", "--data", "shakespeare", "--steps", options.steps)
                out = directory / f"{name}-{repeat}"
                trained[name].append(peak_mib(jgpt(*ours, "--out", out), **cache)[0])
        if options.gigabytes:
            text = directory / "text.txt"
            write_text(text, round(options.gigabytes * 1e9))
            peak, seconds = peak_mib(jgpt("prepare", text, "--out", directory / "prepared"))
            prepared = {
                "bytes": text.stat().st_size,
                "mib": peak,
                "seconds": seconds,
                "limit_mib": PREPARE_LIMIT_MIB,
            }
    print("| peak resident memory | MiB, median (range) |\n|---|---|")
    for name, its in trained.items():
        print(f"| {name}, {options.steps} steps | {record.spread(its)} |")
    medians = {name: statistics.median(its) for name, its in trained.items()}
    ratio = medians["jgpt"] / medians["nanoGPT"]
    if prepared is not None:
        print(f"| jgpt prepare, {prepared['bytes'] / 1e9:.2f} GB | {prepared['mib']:.0f} |")
    print(f"\njgpt trains in {ratio:.2f} of nanoGPT's memory, after its first run")
    print(record.write("memory", {"train_mib": trained, "ratio": ratio, "prepare": prepared}))


if __name__ == "__main__":
    main(tyro.cli(Options))
