"""How long until something happens: `jgpt --help`, and `jgpt train` to its first step.

    python benchmarks/startup.py

The first run of `jgpt train` finds no cache of compiled programs, the others find the first one's.
Each step is a call of its own here, so that the first one is reported when it is taken.
"""

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

TARGETS = {"jgpt --help": 0.3, "jgpt train, a later run": 4.0}
"""Seconds."""


@dataclass(frozen=True)
class Options:
    repeats: int = 5
    """How often `jgpt --help` runs, and `jgpt train` with a cache."""
    preset: str = "nanogpt-cpu"
    """What to train."""


def seconds_of_help() -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "jgpt.cli", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def seconds_to_first_step(preset: str, out: Path, cache: Path) -> float:
    """From the start of the process until its metrics have a line; it is stopped then."""
    command = [
        *(sys.executable, "-m", "jgpt.cli", "train", preset, "--out", str(out)),
        *("--steps-per-call", "1"),
    ]
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    metrics = out / "metrics.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, text=True
    )
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                assert process.stderr is not None
                sys.exit(f"{command} ended: {process.stderr.read()}")
            time.sleep(0.005)
        return time.perf_counter() - began
    finally:
        process.terminate()  # it saves, in its own time
        process.communicate()


def main(options: Options) -> None:
    seconds_of_help()  # compiles Python's own files
    seconds: dict[str, list[float]] = {
        "jgpt --help": [],
        "jgpt train, the first run": [],
        "jgpt train, a later run": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        train = seconds["jgpt train, the first run"]
        for repeat in range(1 + options.repeats):
            train.append(
                seconds_to_first_step(
                    options.preset, directory / f"run-{repeat}", directory / "cache"
                )
            )
            train = seconds["jgpt train, a later run"]
            seconds["jgpt --help"].append(seconds_of_help())
    print("| until | seconds, median (range) | target |\n|---|---|---|")
    for name, its in seconds.items():
        print(f"| {name} | {record.spread(its)} | {TARGETS.get(name, '')} |")
    medians = {name: statistics.median(its) for name, its in seconds.items() if its}
    results = {"seconds": seconds, "median": medians, "target": TARGETS, "preset": options.preset}
    print(record.write("startup", results))


if __name__ == "__main__":
    main(tyro.cli(Options))
