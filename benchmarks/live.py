"""Measure what `jgpt train --live` costs training: with its page, watched by a reader, and without.

    python benchmarks/live.py --rounds 7

Both train in turns on the same batches. Seconds per step are those of the run's own metrics,
without the first fifth, in which the page's process starts. The reader asks what an open page asks,
as often as it does. Training may be slower by one part in a hundred.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runner
import tyro

from jgpt.runs.directory import RunDirectory

TRAIN = ("train", "--data", "shakespeare", "--eval-interval", "250", "--sample-tokens", "0")
PAUSE = 2.0
"""Seconds between the questions of an open page."""


def read_on(address: str) -> None:
    """Ask as an open page does, until the server is gone."""

    def ask(name: str, asked: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(address + name, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    at, seen = None, set[int]()
    while True:
        began = time.monotonic()
        try:
            told = ask("training", {"since": at})
            at = told.get("at", at)
            for step in [each for each in told.get("checkpoints", ()) if each not in seen]:
                ask("checkpoint", {"checkpoint": step})
                ask("look", {"prompt": "ROMEO:", "checkpoint": step})
                seen.add(step)
        except OSError:
            return
        time.sleep(max(PAUSE, 20 * (time.monotonic() - began)))


def train(steps: int, *, live: bool) -> None:
    """Train, and print the seconds of a step and of the whole."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        options = ["--live", "--no-browser"] if live else []
        command = runner.jgpt(*TRAIN, "--steps", steps, "--out", out, *options)
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if "look inside at " in line:
                    address = line.split()[-1]
                    threading.Thread(target=read_on, args=(address,), daemon=True).start()
        whole = time.perf_counter() - began
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        timed = [
            (line["step"], line["seconds"])
            for line in RunDirectory.open(out).metrics()
            if "seconds" in line and line["step"] > steps // 5
        ]
        (first, began), (last, ended) = timed[0], timed[-1]
        milliseconds = 1000 * (ended - began) / (last - first)
        print(json.dumps({"milliseconds_per_step": milliseconds, "whole_seconds": whole}))


@dataclass(frozen=True)
class Options(runner.Rounds):
    """Of the comparison."""

    steps: int = 2000


def main(options: Options) -> None:
    """Compare, and write benchmarks/results/live.json."""
    variants = [
        runner.Variant(name, runner.python("live.py", "--train", name, "--steps", options.steps))
        for name in ("alone", "live")
    ]

    def facts(measured: runner.Measured) -> dict[str, Any]:
        times = [measured[name]["milliseconds_per_step"] for name in ("live", "alone")]
        each = [live / alone - 1 for live, alone in zip(*times, strict=False)]
        return {"steps": options.steps, "slower_by": each, "median": sorted(each)[len(each) // 2]}

    print(json.dumps(facts(runner.compare("live", variants, options, facts))))


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(int(sys.argv[4]), live=sys.argv[2] == "live")
    else:
        main(tyro.cli(Options))
