"""Kill the training command with SIGKILL at random moments, resume it, and compare with no kill.

    python benchmarks/kill_resume.py --kills 100

Each run is started, killed and started again with the same command and `--resume` until it ends by
itself. Then the parameters, the optimizer's state and the metrics of every step must be those of a
run that was never killed, bit for bit. Every other kill waits for a save to begin.
"""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import record
import tyro

from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory

TRAIN = (
    *("train", "tiny", "--steps", "120", "--eval-interval", "15", "--steps-per-call", "4"),
    *("--eval-tokens", "2000", "--sample-tokens", "0", "--dropout", "0.1"),
)
MEASURED = (
    *("step", "loss", "gradient_norm", "learning_rate"),
    *("validation_loss", "validation_estimate"),
)


@dataclass(frozen=True)
class Options:
    kills: int = 100
    """How many times to kill."""
    seed: int = 0
    """Decides when."""
    write: bool = True
    """Write the result to results/."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as directory:
        result = kill_and_resume(Path(directory), options.kills, options.seed)
    print(result)
    if options.write:
        print(record.write("kill_resume", result))
    sys.exit(1 if result["lost"] or result["differing"] else 0)


def kill_and_resume(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill so many times; count the runs that were lost, or ended differently."""
    chance = random.Random(seed)
    never_killed = directory / "never-killed"
    start(never_killed).wait()  # it fills the compilation cache
    shutil.rmtree(never_killed)
    began = time.perf_counter()
    assert start(never_killed).wait() == 0
    duration = time.perf_counter() - began
    expected = fingerprint(never_killed)
    count = {"kills": 0, "in_a_save": 0, "before_the_first_checkpoint": 0}
    count |= {"runs": 0, "lost": 0, "differing": 0}
    while count["kills"] < kills:
        run = directory / f"run-{count['runs']}"
        while count["kills"] < kills:
            process = start(run)
            if chance.random() < 0.5:
                wait_for_save(process, run, chance.randrange(15, 121, 15))
                time.sleep(chance.uniform(0, 0.1))
            else:
                ended(process, chance.uniform(0, duration))
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            count["kills"] += 1
            count["in_a_save"] += any(run.glob("checkpoints/saving-*"))
            count["before_the_first_checkpoint"] += not any(run.glob("checkpoints/[0-9]*"))
        code = process.returncode if process.returncode == 0 else start(run).wait()
        count["runs"] += 1
        count["lost"] += code != 0
        count["differing"] += code == 0 and fingerprint(run) != expected
        print(count, flush=True)
        shutil.rmtree(run)
    return {**count, "train": " ".join(TRAIN)}


def start(run: Path) -> subprocess.Popen[bytes]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(run.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "jgpt.cli", *TRAIN, "--out", str(run), "--resume"],
        stdout=subprocess.DEVNULL,
        env=os.environ | cache,
    )


def ended(process: subprocess.Popen[bytes], within: float) -> bool:
    """Whether a process ends by itself within so many seconds."""
    try:
        process.wait(within)
    except subprocess.TimeoutExpired:
        return False
    return True


def wait_for_save(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    """Until a save is under way, of this step or a later one."""
    while process.poll() is None:
        names = [path.name for path in run.glob("checkpoints/saving-*")]
        if any(int(name.removeprefix("saving-").split(".")[0]) >= step for name in names):
            return
        time.sleep(0.001)


def fingerprint(run: Path) -> tuple[Any, ...]:
    """All that must not depend on what happened on the way: states and metrics, bit for bit."""
    directory = RunDirectory.open(run)
    metrics = [tuple(line.get(name) for name in MEASURED) for line in directory.metrics()]
    assert [line[0] for line in metrics] == list(range(len(metrics)))  # step 0 has an estimate
    with Checkpoints(directory, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        states = [checkpoints.restore(directory.config(), step) for step in steps]
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(states):
        digest.update(np.asarray(leaf).tobytes())
    return metrics, steps, digest.hexdigest()


if __name__ == "__main__":
    main(tyro.cli(Options))
