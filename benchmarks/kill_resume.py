"""Kill the training command with SIGKILL at random moments, resume it, and compare with no kill.

    python benchmarks/kill_resume.py --kills 100

Each run is started, killed and started again with the same command and `--resume` until it ends by
itself. Then the parameters, the optimizer's state and the metrics of every step must be those of a
run that was never killed, bit for bit. Every other kill waits for a save to begin.

    python benchmarks/kill_resume.py --kills 100 --changing-mesh

Each start is on another of five layouts of processes and devices, in float64. Half of the kills are
of one process, after which the others must end by themselves. Then nothing may differ by more than
1e-12 from a run on one device that was never killed.
"""

import contextlib
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import runner
import tyro

from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory

TRAIN = (
    *("train", "tiny", "--steps", "120", "--eval-interval", "15", "--steps-per-call", "4"),
    *("--eval-tokens", "2000", "--sample-tokens", "0", "--dropout", "0.1"),
)
ELASTIC = (
    *("train", "tiny", "--steps", "60", "--eval-interval", "10", "--steps-per-call", "4"),
    *("--eval-tokens", "2000", "--sample-tokens", "0", "--dropout", "0.1", "--batch-size", "8"),
    *("--learning-rate", "0.001", "--min-learning-rate", "0.0001"),  # larger ones amplify rounding
    *("--dtype", "float64", "--param-dtype", "float64", "--activation-dtype", "float64"),
)
LAYOUTS = (
    (1, 1, "data=1"),
    (1, 4, "data=4"),
    (2, 1, "fsdp=2"),
    (2, 4, "data=2,fsdp=2,tensor=2"),
    (4, 1, "fsdp=2,tensor=2"),
)
"""Processes, the devices of each, and the mesh."""
TOLERANCE = 1e-12
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
    changing_mesh: bool = False
    """Resume on another layout of processes and devices each time."""
    write: bool = True
    """Write the result to results/."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = kill_and_resume_elsewhere if options.changing_mesh else kill_and_resume
        result = run(Path(directory), options.kills, options.seed)
    print(result)
    if options.write:
        print(runner.write("kill_resume" + "_changing_mesh" * options.changing_mesh, result))
    sys.exit(1 if any(result.get(bad) for bad in ("lost", "differing", "hanging")) else 0)


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
            process, since = start(run), time.time()
            if chance.random() < 0.5:
                wait_for_save(process, run, chance.randrange(15, 121, 15), since)
                time.sleep(chance.uniform(0, 0.1))
            else:
                ended(process, chance.uniform(0, duration))
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            count["kills"] += 1
            count["in_a_save"] += bool(saves(run, since))
            count["before_the_first_checkpoint"] += not any(run.glob("checkpoints/[0-9]*"))
        code = process.returncode if process.returncode == 0 else start(run).wait()
        count["runs"] += 1
        count["lost"] += code != 0
        count["differing"] += code == 0 and fingerprint(run) != expected
        print(count, flush=True)
        shutil.rmtree(run)
    return {**count, "train": " ".join(TRAIN)}


def kill_and_resume_elsewhere(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    """The same, each time on another layout of processes and devices."""
    chance = random.Random(seed)
    never_killed = directory / "never-killed"
    assert start_on(LAYOUTS[0], never_killed)[0].wait() == 0
    expected = values(never_killed)
    count: dict[str, Any] = {"kills": 0, "of_one": 0, "in_a_save": 0}
    count |= {"runs": 0, "lost": 0, "differing": 0, "hanging": 0, "largest_difference": 0.0}
    layout = chance.choice(LAYOUTS)
    durations: dict[Any, float] = {}
    while count["kills"] < kills:
        run = directory / f"run-{count['runs']}"
        while True:
            layout = chance.choice([other for other in LAYOUTS if other != layout])
            processes, began, since = start_on(layout, run), time.perf_counter(), time.time()
            if count["kills"] < kills:
                if chance.random() < 0.5:
                    wait_for_save(processes[0], run, chance.randrange(10, 61, 10), since)
                    time.sleep(chance.uniform(0, 0.1))
                else:
                    ended(processes[0], chance.uniform(0, durations.get(layout, 30)))
            if count["kills"] == kills or processes[0].poll() is not None:
                break
            doomed = processes if chance.random() < 0.5 else [chance.choice(processes)]
            for process in doomed:
                process.kill()
            count["in_a_save"] += bool(saves(run, since))
            count["hanging"] += not all([ended(process, 60) for process in processes])
            for process in processes:
                process.kill()
                process.wait()
            count["kills"] += 1
            count["of_one"] += len(doomed) < len(processes)
            print(count, flush=True)
        codes = [process.wait() for process in processes]
        durations[layout] = time.perf_counter() - began
        count["runs"] += 1
        count["lost"] += any(codes)
        if not any(codes):
            largest = difference(values(run), expected)
            count["largest_difference"] = max(count["largest_difference"], largest)
            count["differing"] += not largest <= TOLERANCE
        print(count, flush=True)
        shutil.rmtree(run)
    layouts = [f"{count} x {devices}: {mesh}" for count, devices, mesh in LAYOUTS]
    return {**count, "layouts": layouts, "train": " ".join(ELASTIC)}


def start_on(layout: tuple[int, int, str], run: Path) -> list[subprocess.Popen[bytes]]:
    count, devices, mesh = layout
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    where = ("--coordinator", f"localhost:{port}", "--processes", str(count))
    environment = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_ENABLE_X64": "1"}
    return [
        start(
            run,
            *(*ELASTIC, "--mesh", mesh),
            *((*where, "--process", str(index)) if count > 1 else ()),
            **environment,
        )
        for index in range(count)
    ]


def values(run: Path) -> list[np.ndarray]:
    """The steps of the checkpoints, the metrics of all steps, and all arrays of all states."""
    directory = RunDirectory.open(run)
    metrics = [[line.get(name, np.nan) for name in MEASURED] for line in directory.metrics()]
    with jax.enable_x64(True), Checkpoints(directory, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        states = [checkpoints.restore(directory.config(), step) for step in steps]
        return [np.array(steps), np.array(metrics), *map(np.asarray, jax.tree.leaves(states))]


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest between two runs; infinite if they don't have the same steps and metrics."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return np.inf
    return max(
        float(np.where(np.isnan(one) & np.isnan(other), 0.0, np.abs(one - other)).max())
        for one, other in zip(found, expected, strict=True)
    )


def start(run: Path, *train: str, **environment: str) -> subprocess.Popen[bytes]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(run.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "jgpt.cli", *(train or TRAIN), "--out", str(run), "--resume"],
        stdout=subprocess.DEVNULL,
        env=os.environ | cache | environment,
    )


def ended(process: subprocess.Popen[bytes], within: float) -> bool:
    """Whether a process ends by itself within so many seconds."""
    try:
        process.wait(within)
    except subprocess.TimeoutExpired:
        return False
    return True


def wait_for_save(process: subprocess.Popen[bytes], run: Path, step: int, since: float) -> None:
    """Until a save is under way, of this step or a later one, that began after a time."""
    while process.poll() is None:
        names = [path.name for path in saves(run, since)]
        if any(int(name.removeprefix("saving-").split(".")[0]) >= step for name in names):
            return
        time.sleep(0.001)


def saves(run: Path, since: float) -> list[Path]:
    """The saves that are under way, without those that were killed before a time."""
    found = []
    for path in run.glob("checkpoints/saving-*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime > since:
                found.append(path)
    return found


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
