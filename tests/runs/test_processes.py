"""Training in many processes, which are real ones: 2 of 4 devices each, over gloo."""

import contextlib
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jgpt.runs import processes as module
from jgpt.runs.directory import RunDirectory
from jgpt.runs.processes import Vote, gather, require_same, together

TRAIN = (
    *("tiny", "--num-layers", "1", "--embed-dim", "16", "--num-heads", "2", "--block-size", "8"),
    *("--batch-size", "8", "--dropout", "0.1", "--eval-interval", "6", "--steps-per-call", "3"),
    *("--dtype", "float64", "--param-dtype", "float64", "--activation-dtype", "float64"),
    *("--eval-tokens", "200", "--sample-tokens", "5", "--learning-rate", "0.01"),
)
FOREVER = ("--steps", "100000", "--keep-last", "3")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "jgpt.cli", "train", *TRAIN, *map(str, arguments)]


def environment(devices: int) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_ENABLE_X64": "1",
    }


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class Processes:
    """Started processes of one run."""

    def __init__(
        self,
        *options: object,
        devices: tuple[int, ...] = (4, 4),
        own: dict[int, tuple[object, ...]] | None = None,
    ):
        where = ("--coordinator", f"localhost:{free_port()}", "--processes", len(devices))
        self.started = [
            subprocess.Popen(
                command(*options, *where, "--process", index, *(own or {}).get(index, ())),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(count),
            )
            for index, count in enumerate(devices)
        ]

    def ended(self, within: float = 240) -> list[tuple[int, str, str]]:
        """The exit code and what was written, of each."""
        until = time.monotonic() + within
        found = []
        for process in self.started:
            out, err = process.communicate(timeout=until - time.monotonic())
            found.append((process.returncode, out, err))
        return found


@contextlib.contextmanager
def processes(*options: object, **how) -> Iterator[Processes]:
    started = Processes(*options, **how)
    try:
        yield started
    finally:
        for process in started.started:
            process.kill()
            process.wait()


def train(*options: object, **how) -> list[tuple[int, str, str]]:
    with processes(*options, **how) as started:
        return started.ended()


def train_alone(*options: object, devices: int = 8) -> str:
    done = subprocess.run(
        command(*options), env=environment(devices), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(started: Processes, path: Path) -> None:
    until = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in started.started), started.ended()
        time.sleep(0.02)


def losses(run: Path) -> np.ndarray:
    lines = RunDirectory(run).metrics()
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return np.array([[line["loss"], line.get("validation_loss", 0)] for line in lines[1:]])


@pytest.fixture
def options(poem, tmp_path) -> tuple[object, ...]:
    return "--data", poem, "--out", tmp_path / "run"


@pytest.mark.parametrize("terminal", [True, False])
def test_without_gloo_s_lines_a_terminal_still_sees_each_line_at_once(terminal):
    code = "import sys; from jgpt.runs.processes import _silence_gloo as silence; silence(); "
    code += "print('kept', flush=True); print(sys.stdout.line_buffering, file=sys.stderr)"
    reads, writes = pty.openpty() if terminal else os.pipe()
    ran = subprocess.run(
        [sys.executable, "-c", code], stdout=writes, stderr=subprocess.PIPE, check=True
    )
    os.close(writes)
    assert os.read(reads, 100).split() == [b"kept"]
    os.close(reads)
    assert ran.stderr.split()[-1] == str(terminal).encode()


@pytest.mark.parametrize(
    ("error", "before"),
    [(JaxRuntimeError("Gloo: closed"), [("sleep", 10)]), (ValueError("Gloo: closed"), [])],
)
def test_one_that_hears_of_a_death_from_jax_lets_the_message_come_first(monkeypatch, error, before):
    """For twice as long as an error that all have may take to end each of them."""
    events = []

    class Others:
        def __init__(self, *_):
            pass

        def end(self, message):
            events.append(("end", message))

        def tell(self, message):
            pass

    def leave(message):
        events.append(("leave", message))
        raise SystemExit(2)

    nothing = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr(jax.config, "update", nothing)
    monkeypatch.setattr(jax.distributed, "initialize", nothing)
    monkeypatch.setattr(jax.distributed, "shutdown", nothing)
    monkeypatch.setattr(module, "_silence_gloo", nothing)
    monkeypatch.setattr(module, "_Others", Others)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: events.append(("sleep", seconds)))
    with pytest.raises(SystemExit), module.joined(None, None, None, leave):
        raise error
    after = [("end", "process 0: Gloo: closed"), ("leave", "Gloo: closed")]
    assert events == before + after


def test_a_process_alone_agrees_with_itself():
    assert gather({"a": [1]}) == [{"a": [1]}]
    require_same({"a": 1})
    vote = Vote()
    assert [vote(wanted) for wanted in (False, True, False)] == [False, True, False]
    failure = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised, together():
        raise failure
    assert raised.value is failure


@pytest.mark.slow
def test_two_processes_train_as_one(options, tmp_path):
    (code, said, warned), other = train(*options, "--steps", 6)
    assert (code, warned) == (0, "")
    assert other == (0, "", "")
    assert re.search(r"^validation loss \d", said, re.MULTILINE)
    assert "Gloo" not in said
    run = RunDirectory(tmp_path / "run")
    assert run.checkpoint_steps() == [6]
    assert len(run.provenance()) == 1
    assert {"loss.png", "samples.txt"} < {path.name for path in run.path.iterdir()}

    train_alone(*options[:-1], tmp_path / "one", "--steps", 6, "--mesh", "data=8")
    one, two = losses(tmp_path / "one"), losses(run.path)
    assert one.shape == two.shape == (6, 2)
    assert np.abs(one - two).max() < 1e-12
    assert np.ptp(one[:, 0]) > 1e-3


@pytest.mark.slow
def test_a_run_goes_on_in_two_processes_and_back(options, tmp_path):
    train_alone(*options[:-1], tmp_path / "one", "--steps", 18, devices=1)
    schedule = "--resume", "--schedule-steps", 18
    train_alone(*options, *schedule, "--steps", 6, devices=1)
    for code, _, _ in train(*options, *schedule, "--steps", 12, "--mesh", "fsdp=4,tensor=2"):
        assert code == 0
    train_alone(*options, *schedule, "--steps", 18, "--mesh", "data=4,fsdp=2")
    one, moved = losses(tmp_path / "one"), losses(tmp_path / "run")
    assert one.shape == moved.shape == (18, 2)
    assert np.abs(one - moved).max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("number", "index"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_to_one_stops_all_at_the_same_step(options, tmp_path, number, index):
    with processes(*options, *FOREVER) as started:
        wait_for(started, tmp_path / "run" / "checkpoints" / "6")
        started.started[index].send_signal(number)
        ended = started.ended(60)
    assert [code for code, _, _ in ended] == [128 + number] * 2
    assert [err for _, _, err in ended] == ["", ""]
    stopped = re.search(r"^stopped after step (\d+)", ended[0][1], re.MULTILINE)
    assert stopped is not None
    assert ended[1][1] == ""
    run = RunDirectory(tmp_path / "run")
    assert run.checkpoint_steps()[-1] == int(stopped[1])
    assert len(losses(run.path)) == int(stopped[1])


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_one_that_dies_ends_the_other(options, tmp_path, index):
    with processes(*options, *FOREVER) as started:
        wait_for(started, tmp_path / "run" / "checkpoints" / "6")
        started.started[index].kill()
        code, _, err = started.ended(60)[1 - index]
    if index == 1 and code == 2:
        line = "process 1 has ended: see its messages; --resume goes on from the last checkpoint"
        assert err == f"jgpt: {line}\n"
    else:  # who is first to say so is a race, which gloo is in, and of process 0 JAX's own service
        assert code in (2, -signal.SIGABRT)
        of_jax = ("process 0 has ended", "another task died") if index == 0 else ()
        assert any(words in err for words in ("gloo::EnforceNotMet", *of_jax))
        assert len(err.splitlines()) < 40


@pytest.mark.slow
def test_an_error_of_one_ends_the_other_with_its_message(options, tmp_path):
    with processes(*options, *FOREVER) as started:
        wait_for(started, tmp_path / "run" / "checkpoints" / "6")
        metrics = tmp_path / "run" / "metrics.jsonl"
        metrics.unlink()
        metrics.mkdir()
        ended = started.ended(60)
    assert [code for code, _, _ in ended] == [2, 2]
    assert re.fullmatch(r"jgpt: .*metrics.jsonl.*\n", ended[0][2])
    assert ended[1][2] == ended[0][2].replace("jgpt: ", "jgpt: process 0: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "first", "second", "message"),
    [
        ("--batch-size", 8, 16, r"process 1 differs: --batch-size is 16, in process 0 8; .*"),
        ("--seed", 1, 7, r"process 1 differs: seed is 7, in process 0 1; they must agree"),
        ("--mesh", "tensor=9", "tensor=9", "--mesh tensor=9 is of 9 devices, and there are 8"),
        ("--data", "poem.txt", "missing.txt", r"(process 1: )?.*missing\.txt.*"),
        ("--data", "poem.txt", "other.txt", r"process 1 differs: .*corpus_sha256 is .*"),
    ],
)
def test_what_differs_is_refused_by_name(
    poem, tmp_path, monkeypatch, option, first, second, message
):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    shutil.copy(poem, "poem.txt")
    Path("other.txt").write_text(poem.read_text().replace("eyes", "yees"))
    data = () if option == "--data" else ("--data", "poem.txt")
    own = {0: (option, first), 1: (option, second)}
    for code, out, err in train(*data, "--out", "run", own=own):
        assert (code, out) == (2, "")
        assert re.fullmatch(rf"jgpt: {message}\n", err)
    assert not Path("run").exists()


@pytest.mark.slow
def test_another_number_of_devices_is_refused_by_name(options, tmp_path):
    for code, out, err in train(*options, devices=(4, 2)):
        assert (code, out) == (2, "")
        cause = "process 1 has 2 devices, process 0 has 4"
        assert err.startswith(f"jgpt: the processes can't be joined ({cause}): start all")
        assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_open_mpi_is_found(options, tmp_path):
    if (launcher := shutil.which("mpirun")) is None:
        pytest.skip("there is no mpirun: apt-get install openmpi-bin")
    launch = [launcher, "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*launch, *command(*options, "--steps", 6, "--distributed")],
        env=environment(4),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", total time") == 1  # mpirun gives it a terminal, with colours
    assert len(RunDirectory(tmp_path / "run").provenance()[0]["devices"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--distributed", "--dry-run"), r"a plan is one process's: leave out --distributed .*"),
        (("--processes", 2), r"give --coordinator HOST:PORT, --processes N and --process I, .*"),
        (("--distributed",), r"the processes can't be joined \(coordinator_address .*"),
    ],
)
def test_a_wrong_launch_is_an_error(options, given, message):
    done = subprocess.run(
        command(*options, *given), env=environment(1), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"jgpt: {message}\n", done.stderr)


@pytest.mark.slow
def test_processes_that_are_not_all_started_are_an_error(options):
    alone = [
        subprocess.Popen(
            command(*options, "--coordinator", where, "--processes", 2, "--process", index),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(1),
        )
        for index in (0, 1)
        for where in [f"localhost:{free_port()}"]
    ]
    for process in alone:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (2, "")
        cause = "some were not started"
        assert err.startswith(f"jgpt: the processes can't be joined ({cause}): start all of them ")
        assert err.count("\n") == 1
