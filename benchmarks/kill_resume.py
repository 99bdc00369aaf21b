"""Kill the training command with SIGKILL at random moments, resume it, and compare with no kill.

    python benchmarks/kill_resume.py --kills 100

Each run is started, killed and started again with the same command and `--resume` until it ends by
itself. Then parameters, optimizer state and the metrics of every step must equal those of a run
that was never killed, bit for bit. Half of the kills wait for a save to begin.

    python benchmarks/kill_resume.py --kills 100 --changing-mesh

Each start is on another of five layouts of processes and devices, in float64. Half of the kills are
of one process, after which the others must end by themselves. Then nothing may differ by more than
1e-12 from a run on one device that was never killed.
"""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import runner
import tyro

sys.path.insert(0, str(runner.ROOT))  # what a killed process leaves is the tests'

from jgpt.machine import this_machine
from jgpt.runs.checkpoints import load_checkpoint
from jgpt.runs.directory import RunDirectory
from jgpt.training.complete import complete
from jgpt.training.state import abstract_state
from tests.runs.faults import leave_all

TINY = "train tiny --steps-per-call 4 --eval-tokens 2000 --sample-tokens 0 --dropout 0.1"
FLOAT64 = "--dtype float64 --param-dtype float64 --activation-dtype float64"
SMALL_RATES = "--learning-rate 0.001 --min-learning-rate 0.0001"  # larger ones amplify rounding
CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
TOLERANCE = 1e-12
MEASURED = (
    "step",
    "loss",
    "gradient_norm",
    "learning_rate",
    "validation_loss",
)
COUNTED = (
    "kills",
    "of_one",
    "in_a_save",
    "before_the_first_checkpoint",
    "runs",
    "lost",
    "differing",
    "hanging",
)


class Layout(NamedTuple):
    processes: int = 1
    devices: int = 1
    """Of each process."""
    mesh: str | None = None


class Setting(NamedTuple):
    """What is trained and killed, and on which layouts."""

    train: str
    save_steps: range
    layouts: tuple[Layout, ...]
    """The run that is never killed is on the first."""
    x64: bool
    """Float64 runs are compared within TOLERANCE, others bit for bit."""


ONE_DEVICE = Setting(
    f"{TINY} --steps 120 --eval-interval 15", range(15, 121, 15), (Layout(),), x64=False
)
CHANGING_MESH = Setting(
    f"{TINY} --steps 60 --eval-interval 10 --batch-size 8 {SMALL_RATES} {FLOAT64}",
    range(10, 61, 10),
    (
        Layout(1, 1, "data=1"),
        Layout(1, 4, "data=4"),
        Layout(2, 1, "fsdp=2"),
        Layout(2, 4, "data=2,fsdp=2,tensor=2"),
        Layout(4, 1, "fsdp=2,tensor=2"),
    ),
    x64=True,
)


def main(kills: int = 100, seed: int = 0, changing_mesh: bool = False) -> None:
    """Kill, resume and compare, and write a record.

    Args:
        kills: How many times to kill.
        seed: Decides when.
        changing_mesh: Resume on another layout of processes and devices each time.
    """
    setting = ONE_DEVICE
    record = "kill_resume"
    if changing_mesh:
        setting = CHANGING_MESH
        record = "kill_resume_changing_mesh"
    with tempfile.TemporaryDirectory() as directory:
        result = kill_and_resume(Path(directory), kills, seed, setting)
    print(result)
    print(runner.write(record, result))
    if result["lost"] or result["differing"] or result["hanging"]:
        sys.exit(1)


def kill_and_resume(
    directory: Path, kills: int, seed: int, setting: Setting = ONE_DEVICE
) -> dict[str, Any]:
    """Kill and resume runs; count those that were lost or ended differently."""
    chance = random.Random(seed)
    never_killed = directory / "never-killed"
    durations: dict[Layout, float] = {}
    layout = setting.layouts[0]
    for _ in range(2):  # the first one compiles, so its time says nothing of when to kill
        shutil.rmtree(never_killed, ignore_errors=True)
        began = time.perf_counter()
        assert start(setting, layout, never_killed)[0].wait() == 0
        durations[layout] = time.perf_counter() - began
    expected = values(never_killed)
    count: dict[str, Any] = dict.fromkeys(COUNTED, 0) | {"largest_difference": 0.0}
    while count["kills"] < kills:
        run = directory / f"run-{count['runs']}"
        while True:
            layout = another_layout(setting.layouts, layout, chance)
            began = time.perf_counter()
            since = time.time()
            processes = start(setting, layout, run)
            if count["kills"] == kills:
                break
            # a save takes a small share of a run: a random moment would hardly ever be inside one
            if chance.random() < 0.5:
                wait_for_save(processes[0], run, chance.choice(setting.save_steps), since)
                time.sleep(chance.uniform(0, 0.1))
            else:
                ended(processes[0], chance.uniform(0, durations.get(layout, 30)))
            if processes[0].poll() is not None:
                break
            kill(processes, run, since, count, chance)
        codes = [process.wait() for process in processes]
        durations[layout] = time.perf_counter() - began
        count["runs"] += 1
        if any(codes):
            count["lost"] += 1
        else:
            compare(values(run), expected, setting, count)
        print(count, flush=True)
        shutil.rmtree(run)
    layouts = []
    for layout in setting.layouts:
        layouts.append(f"{layout.processes} x {layout.devices}: {layout.mesh or 'no mesh'}")
    return {**count, "layouts": layouts, "train": setting.train}


def another_layout(layouts: tuple[Layout, ...], last: Layout, chance: random.Random) -> Layout:
    """Another layout than the last one, where there are several."""
    others = [layout for layout in layouts if layout != last]
    return chance.choice(others or layouts)


def kill(
    processes: list[subprocess.Popen[bytes]],
    run: Path,
    since: float,
    count: dict[str, Any],
    chance: random.Random,
) -> None:
    """Kill all processes or one of them, after which the others must end by themselves."""
    doomed = processes
    if chance.random() >= 0.5:
        doomed = [chance.choice(processes)]
    for process in doomed:
        process.kill()
    count["kills"] += 1
    count["of_one"] += len(doomed) < len(processes)
    count["in_a_save"] += bool(saves(run, since))
    waited = [ended(process, 60) for process in processes]
    count["hanging"] += not all(waited)
    count["before_the_first_checkpoint"] += not any(run.glob("checkpoints/[0-9]*"))
    for process in processes:
        process.kill()
        process.wait()
    # after every second kill also what other moments would have left; after the others only what
    # this one left, which might need something that the leftovers would replace
    if count["kills"] % 2 == 0 and (run / "config.json").exists():
        leave_all(run)


def compare(
    found: list[np.ndarray], expected: list[np.ndarray], setting: Setting, count: dict[str, Any]
) -> None:
    """Count a run that ended differently from the one that was never killed."""
    largest = difference(found, expected)
    count["largest_difference"] = max(count["largest_difference"], largest)
    if setting.x64:
        same = largest <= TOLERANCE
    else:
        same = bits(found) == bits(expected)
    count["differing"] += not same


def start(setting: Setting, layout: Layout, run: Path) -> list[subprocess.Popen[bytes]]:
    """Start or resume a run in all processes of a layout."""
    command = runner.jgpt(*setting.train.split(), "--out", run, "--resume")
    environment = os.environ | CACHE
    environment["JAX_COMPILATION_CACHE_DIR"] = str(run.parent / "compiled")
    if setting.x64:
        environment["JAX_ENABLE_X64"] = "1"
    if layout.mesh:
        environment["JAX_NUM_CPU_DEVICES"] = str(layout.devices)
        command += ["--mesh", layout.mesh]
    if layout.processes > 1:
        with socket.create_server(("", 0)) as server:
            coordinator = f"localhost:{server.getsockname()[1]}"
        command += ["--coordinator", coordinator, "--processes", str(layout.processes)]
    processes = []
    for index in range(layout.processes):
        of_this_process = list(command)
        if layout.processes > 1:
            of_this_process += ["--process", str(index)]
        process = subprocess.Popen(of_this_process, stdout=subprocess.DEVNULL, env=environment)
        processes.append(process)
    return processes


def values(run: Path) -> list[np.ndarray]:
    """The steps of the checkpoints, the metrics of all steps, and all arrays of all states."""
    directory = RunDirectory.open(run)
    config = directory.config()
    lines = []
    for line in directory.metrics():
        lines.append([line.get(name, np.nan) for name in MEASURED])
    metrics = np.array(lines)
    assert (metrics[:, 0] == np.arange(1, len(metrics) + 1)).all()
    steps = directory.checkpoint_steps()
    with jax.enable_x64(config.model.param_dtype == "float64"):
        one_device = replace(this_machine(), devices=1)
        like = abstract_state(complete(replace(config, mesh=None), one_device))
        states = [load_checkpoint(directory.checkpoints, step, like) for step in steps]
        return [np.array(steps), metrics, *map(np.asarray, jax.tree.leaves(states))]


def bits(arrays: list[np.ndarray]) -> list[tuple[Any, ...]]:
    """What tells arrays apart to the last bit, among them a zero and a negative zero."""
    return [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]


def fingerprint(run: Path) -> list[tuple[Any, ...]]:
    """Steps, metrics and states of a run, bit for bit."""
    return bits(values(run))


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference; infinite if steps or metrics differ in number, or one is NaN."""
    if len(found) != len(expected):
        return np.inf
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return np.inf
        # most lines of metrics have no validation loss: NaN in both is equal
        apart = np.where(np.isnan(one) & np.isnan(other), 0.0, np.abs(one - other))
        if np.isnan(apart).any():  # max() would pass over it
            return np.inf
        largest = max(largest, float(apart.max()))
    return largest


def ended(process: subprocess.Popen[bytes], within: float) -> bool:
    """Whether a process ends by itself within so many seconds."""
    try:
        process.wait(within)
    except subprocess.TimeoutExpired:
        return False
    return True


def wait_for_save(process: subprocess.Popen[bytes], run: Path, step: int, since: float) -> None:
    """Wait until a save of this step or a later one is under way that began after `since`."""
    while process.poll() is None:
        for path in saves(run, since):
            if step_of(path) >= step:
                return
        time.sleep(0.001)


def step_of(save: Path) -> int:
    """The step of a save under way, whose folder is 12.orbax-checkpoint-tmp."""
    return int(save.name.partition(".")[0])


def saves(run: Path, since: float) -> list[Path]:
    """The saves under way, without those killed before `since`."""
    found = []
    for path in run.glob("checkpoints/*.orbax-checkpoint-tmp*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime > since:
                found.append(path)
    return found


if __name__ == "__main__":
    tyro.cli(main)
