"""How long until something happens: `jgpt --help`, and `jgpt train` to its first step.

    python benchmarks/startup.py

The first run of `jgpt train` finds no cache of compiled programs, the others find that of a run
before. Each step is a call of its own here, so that the first one is reported when it is taken.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from runner import Rounds, Variant, compare, jgpt, python


@dataclass(frozen=True)
class Options(Rounds):
    preset: str = "nanogpt-cpu"
    """What to train."""
    first_step: Path | None = None
    """Only train into this directory until the first step, and print the seconds."""


def seconds_to_first_step(preset: str, out: Path) -> float:
    """From the start of the process until its metrics have a line; it is stopped then."""
    command = jgpt("train", preset, "--out", out, "--steps-per-call", 1)
    metrics = out / "metrics.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                sys.exit(f"{command} ended with {process.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - began
    finally:
        process.terminate()  # it saves, in its own time
        process.wait()


def main(options: Options) -> None:
    if options.first_step:
        seconds = seconds_to_first_step(options.preset, options.first_step)
        print(json.dumps({"seconds": seconds}))
        return
    train = python("startup.py", "--first-step", "{out}", "--preset", options.preset)
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # jgpt's own is below XDG_CACHE_HOME
    with tempfile.TemporaryDirectory() as cache:
        later = {"XDG_CACHE_HOME": cache}
        first = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        variants = [
            Variant("jgpt --help", jgpt("--help"), lambda printed, out: {}, warm=True),
            Variant("jgpt train, the first run", train, environment=first),
            Variant("jgpt train, a later run", train, environment=later, warm=True),
        ]
        compare("startup", variants, options, lambda _: {"preset": options.preset})


if __name__ == "__main__":
    main(tyro.cli(Options))
