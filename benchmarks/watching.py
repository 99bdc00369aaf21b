"""Watch commands: to the first step, to the first sampled text, or training with its page open."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from runner import Figures, jgpt

TRAIN = ("train", "--data", "shakespeare", "--eval-interval", "250", "--sample-tokens", "0")
PAUSE = 2.0
"""Seconds between the questions of an open page."""


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
        while len(written) <= len("ROMEO:"):
            more = os.read(process.stdout.fileno(), 1024)
            if not more:
                sys.exit(f"{command} wrote {written!r}")
            written += more
        seconds = time.perf_counter() - began
        process.terminate()
    return {"seconds": seconds}


def page(steps: int, out: str, live: bool = False) -> Figures:
    """The time of a step after the first fifth, in which the page's server starts.

    If `live`, with the page, and a reader who asks for what an open page asks.
    """
    command = jgpt(*TRAIN, "--steps", steps, "--out", out)
    if live:
        command += ["--live", "--no-browser"]
    spent: Figures = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "look inside at " in line:
                address = line.split()[-1]
                asked = (address, process.pid, spent)
                threading.Thread(target=read_on, args=asked, daemon=True).start()
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    timed = []
    for text in Path(out, "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if "seconds" in line and line["step"] > steps // 5:
            timed.append(line)
    first = timed[0]
    last = timed[-1]
    seconds = last["seconds"] - first["seconds"]
    taken_steps = last["step"] - first["step"]
    return {"milliseconds_per_step": 1000 * seconds / taken_steps, **spent}


def read_on(address: str, trainer: int, spent: Figures) -> None:
    """Ask as an open page does, until the server is gone; note the server's processor time."""
    children: list[str] = []
    for thread in Path(f"/proc/{trainer}/task").iterdir():
        children += (thread / "children").read_text().split()
    (server,) = children  # training starts no other process

    def ask(name: str, asked: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(address + name, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    position = None
    seen: set[int] = set()
    while True:
        began = time.monotonic()
        try:
            spent["server_processor_seconds"] = processor_seconds(server)
            news = ask("training", {"since": position})
            position = news.get("at", position)
            for step in news.get("checkpoints", ()):
                if step in seen:
                    continue
                ask("checkpoint", {"checkpoint": step})
                ask("look", {"prompt": "ROMEO:", "checkpoint": step})
                seen.add(step)
        except OSError:
            return
        time.sleep(max(PAUSE, 20 * (time.monotonic() - began)))


def processor_seconds(pid: str) -> float:
    """The processor time of a process and its threads, user's and system's (proc(5))."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # The name before it is in parentheses, and may have spaces.
    _, _, after_name = text.rpartition(")")
    fields = after_name.split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def large_text(text: str, out: str, preset: str, steps: int) -> Figures:
    """Training on a large text: the seconds to the first step, and the share of evaluations.

    That share is of the time from the first step to the end, and counts what no step takes.
    """
    command = jgpt("train", preset, "--data", text, "--out", out, "--steps", steps)
    # one step per call, so that the first is reported at once
    command += ["--steps-per-call", "1", "--sample-tokens", "0", "--eval-interval", str(steps)]
    metrics = Path(out, "metrics.jsonl")
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for_lines(metrics, process)
        first = time.perf_counter()
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    ended = time.perf_counter()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    timed = [line for line in lines if line.get("tokens_per_second")]
    tokens_per_step = timed[-1]["tokens"] / timed[-1]["step"]
    in_steps = sum(tokens_per_step / line["tokens_per_second"] for line in timed)
    return {
        "seconds_to_first_step": first - began,
        "share_besides_steps": 1 - in_steps / (ended - first),
    }
