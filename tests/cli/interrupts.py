"""SIGINT at random times to real commands: each has to end soon, without a traceback.

python -m tests.cli.interrupts RUN 200 sample
"""

import collections
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

LONGEST = 30
"""Seconds within which a command ends, however loaded the machine is."""
"""Characters that tiny Shakespeare and the poem of the tests have."""
STARTED = """
import signal, sys
# not in the child between fork and exec: that would fork this process, which JAX warns about
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored in the background
import jgpt.cli
print("started", file=sys.stderr, flush=True)
jgpt.cli.main()
"""


class Outcome(NamedTuple):
    kind: str
    """ended, lost, or said too much."""
    after: float
    """Seconds from the start to the signal."""
    seconds: float
    """From the signal to the end."""
    code: int
    said: str


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """A command whose handlers are Python's own, and that has imported what is there at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    return process


def interrupt(arguments: list[str], after: float) -> Outcome | None:
    """Send a command SIGINT after some seconds; None if it had ended before."""
    process = start(arguments)
    time.sleep(after)
    if process.poll() is not None:
        process.communicate()
        return None
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    try:
        _, said = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Outcome("lost", after, LONGEST, 0, "")
    seconds = time.monotonic() - sent
    kind = "ended"
    if process.returncode not in (130, -signal.SIGINT):
        kind = "lost"
    elif "Traceback" in said or "Exception ignored" in said:
        kind = "said too much"
    return Outcome(kind, after, seconds, process.returncode, said)


def duration(arguments: list[str]) -> float:
    """Seconds that the command takes, from when it has started."""
    process = start(arguments)
    began = time.monotonic()
    process.communicate()
    return time.monotonic() - began


def interrupt_often(arguments: list[str], count: int, seed: int = 0) -> list[Outcome]:
    """The outcomes of signals at times spread over what the command takes."""
    chance = random.Random(seed)
    longest = duration(arguments)
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        outcome = interrupt(arguments, chance.uniform(0, longest))
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def commands(run: Path) -> dict[str, list[str]]:
    """Commands that take a while, by name."""
    return {
        "sample": ["sample", str(run), "--max-new-tokens", "1000", "--num-samples", "64"],
        "eval": ["eval", str(run)],
        "info": ["info", "tiny"],
    }


if __name__ == "__main__":
    _, run, count, *names = sys.argv
    for name in names:
        found = interrupt_often(commands(Path(run))[name], int(count))
        print(name, dict(collections.Counter(outcome.kind for outcome in found)), flush=True)
        print("slowest", max(outcome.seconds for outcome in found))
        for outcome in found:
            if outcome.kind != "ended":
                print(outcome, flush=True)
