"""Watch commands: to the first step, to the first sampled text, or training on a large text."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from runner import Figures, jgpt


def first_step(out: str) -> Figures:
    """The seconds until the first line of metrics; then the process is stopped."""
    # one step per call, so that the first is reported at once
    command = jgpt("train", "nanogpt-cpu", "--out", out, "--steps-per-call", 1)
    metrics = Path(out, "metrics.jsonl")
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for_lines(metrics, process)
        return {"seconds": time.perf_counter() - began}
    finally:
        process.terminate()  # saving takes a while
        process.wait()


def wait_for_lines(path: Path, process: subprocess.Popen[Any]) -> None:
    """Wait until a file has lines; exit if the process ends before."""
    while not path.exists() or path.stat().st_size == 0:
        if process.poll() is not None:
            sys.exit(f"{process.args} ended with {process.returncode}")
        time.sleep(0.005)


def first_text(run: str) -> Figures:
    """The seconds until `jgpt sample` writes the first tokens."""
    command = jgpt("sample", run, "--prompt", "ROMEO:")
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        written = b""
        # The prompt is written first, before anything is sampled.
        while len(written) <= len("ROMEO:"):
            more = os.read(process.stdout.fileno(), 1024)
            if not more:
                sys.exit(f"{command} wrote {written!r}")
            written += more
        seconds = time.perf_counter() - began
        process.terminate()
    return {"seconds": seconds}


def metrics_of(out: str) -> list[dict[str, Any]]:
    text = Path(out, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def large_text(text: str, out: str, preset: str, steps: int) -> Figures:
    """Training on a large text: the seconds to the first step, and the share of evaluations.

    That share is of the time from the first step to the end, and counts what no step takes.
    """
    command = jgpt("train", preset, "--data", text, "--out", out, "--steps", steps)
    # one step per call, so that the first is reported at once
    command += ["--steps-per-call", "1", "--sample-tokens", "0", "--eval-interval", str(steps)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for_lines(Path(out, "metrics.jsonl"), process)
        first_step = time.perf_counter()
    ended = time.perf_counter()  # leaving the block waits for the process
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    # The first line has no tokens per second.
    timed = [line for line in metrics_of(out) if line.get("tokens_per_second")]
    last = timed[-1]
    tokens_per_step = last["tokens"] / last["step"]
    seconds_in_steps = 0.0
    for line in timed:
        seconds_in_steps += tokens_per_step / line["tokens_per_second"]
    seconds_after_first_step = ended - first_step
    return {
        "seconds_to_first_step": first_step - began,
        "share_besides_steps": 1 - seconds_in_steps / seconds_after_first_step,
    }
