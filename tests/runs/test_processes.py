"""Training in many processes, which are real ones: 2 of 4 devices each, over gloo."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jgpt import TrainConfig
from jgpt.files import sha256_of
from jgpt.parallel import processes as module
from jgpt.parallel.mesh import use_mesh
from jgpt.parallel.processes import Vote, gather, raise_in_all_processes, require_same
from jgpt.runs.directory import RunDirectory
from jgpt.user_code import code_facts, with_code
from tests.commands import worked

TRAIN = (
    *("tiny", "--num-layers", "1", "--embed-dim", "16", "--num-heads", "2", "--block-size", "8"),
    *("--batch-size", "8", "--dropout", "0.1", "--eval-interval", "6", "--steps-per-call", "3"),
    *("--dtype", "float64", "--param-dtype", "float64", "--activation-dtype", "float64"),
    *("--eval-tokens", "200", "--sample-tokens", "5", "--learning-rate", "0.01"),
)
FOREVER = ("--steps", "100000", "--keep-last", "3")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "jgpt", "train", *TRAIN, *map(str, arguments)]


def environment(devices: int) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_ENABLE_X64": "1",
    }


@contextlib.contextmanager
def processes(
    *options: object,
    devices: tuple[int, ...] = (4, 4),
    own: dict[int, tuple[object, ...]] | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]  # which is free again
    started = []
    where = ("--coordinator", f"localhost:{port}", "--processes", len(devices), "--process")
    with contextlib.ExitStack() as stack:
        for index, count in enumerate(devices):
            process = subprocess.Popen(
                command(*options, *where, index, *(own or {}).get(index, ())),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(count),
            )
            stack.enter_context(process)  # which closes its pipes
            stack.callback(process.kill)
            started.append(process)
        yield started


def ended(started: list[subprocess.Popen[str]], within: float = 240) -> list[tuple[int, str, str]]:
    """The exit code and what was written, of each."""
    until = time.monotonic() + within
    found = []
    for process in started:
        out, err = process.communicate(timeout=until - time.monotonic())
        found.append((process.returncode, out, err))
    return found


def train(*options: object, **how) -> list[tuple[int, str, str]]:
    with processes(*options, **how) as started:
        return ended(started)


def train_alone(*options: object) -> None:
    """In this process, on one of its eight devices or on a mesh of all."""
    jax.config.update("jax_enable_x64", True)  # also in the threads that read a checkpoint
    try:
        worked("train", *TRAIN, *options)
    finally:
        jax.config.update("jax_enable_x64", False)


def wait_for(started: list[subprocess.Popen[str]], path: Path) -> None:
    until = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in started), ended(started)
        time.sleep(0.02)


def losses(run: Path) -> np.ndarray:
    lines = RunDirectory(run).metrics()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return np.array([[line["loss"], line.get("validation_loss", 0)] for line in lines])


@pytest.fixture
def options(poem, tmp_path) -> tuple[object, ...]:
    return "--data", poem, "--out", tmp_path / "run"


def leave(message: str) -> NoReturn:
    raise SystemExit(message)


@pytest.fixture
def unjoined(monkeypatch):
    """`joined` without JAX's part: what JAX would be given."""
    seen = {}
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **given: seen.update(given))
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: seen.update(shut_down=True))
    return seen


@pytest.mark.parametrize(
    ("index", "error", "said"),
    [
        (0, OSError("disk full"), r"disk full"),
        (1, OSError("disk full"), r"disk full"),
        (0, JaxRuntimeError("no memory"), r"no memory"),
        (
            1,
            ValueError("Gloo AllGather\nfailed"),
            r"another .* `resume=True` .* \(Gloo AllGather failed\)",
        ),
        (1, KeyboardInterrupt(), r"KeyboardInterrupt\(\)"),
    ],
)
def test_an_error_leaves_with_one_line_and_process_0_last(
    unjoined, monkeypatch, index, error, said
):
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(module, "process_index", lambda: index)
    with pytest.raises(SystemExit) as left, module.joined(None, None, None, leave):
        raise error

    assert re.fullmatch(said, str(left.value))
    assert slept == ([3] if index == 0 else [])
    assert unjoined == {"heartbeat_timeout_seconds": 10, "shut_down": True}


def test_a_process_alone_agrees_with_itself():
    assert gather({"a": [1]}) == [{"a": [1]}]
    require_same({"a": 1})
    vote = Vote()
    assert [vote(wanted) for wanted in (0, 2, 1)] == [0, 2, 1]
    failure = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised, raise_in_all_processes():
        raise failure
    assert raised.value is failure


@pytest.mark.parametrize("mesh", [None, "data=4,fsdp=2"])
def test_votes_are_read_one_call_late_whatever_mesh_is_set(monkeypatch, mesh):
    monkeypatch.setattr(module, "process_count", lambda: 2)
    vote = Vote()
    with use_mesh(mesh):
        assert [vote(wanted) for wanted in (1, 0, 2, 2, 0)] == [0, 1, 0, 2, 0]


def test_what_any_process_was_given_must_be_that_of_process_0(monkeypatch):
    first = {"seed": 1, "model.rank": 4}
    third = {"seed": 2, "layers.py of the model": "ab"}
    said = (
        r"process 2 differs: `seed` is 2, in process 0 1; `model\.rank` is None, in process 0 4; "
        r"`layers\.py of the model` is 'ab', in process 0 None; they must agree"
    )
    monkeypatch.setattr(module, "gather", lambda _: [first, first, third])
    with pytest.raises(ValueError, match=f"^{said}$"):
        require_same(first)
    monkeypatch.setattr(module, "gather", lambda facts: [facts] * 3)
    require_same(first)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_two_and_back(options, tmp_path):
    train_alone(*options[:-1], tmp_path / "one", "--steps", 18)
    options = *options, "--resume", "--schedule-steps", 18, "--steps"
    train_alone(*options, 6, "--mesh", "data=4,fsdp=2")
    run = RunDirectory(tmp_path / "run")
    (run.path / "samples.txt").unlink()

    (code, said, warned), (other_code, _, other_warned) = train(*options, 12, "--mesh", "fsdp=8")

    assert (code, warned) == (other_code, other_warned) == (0, "")
    assert re.search(r"^best validation loss \d", said, re.MULTILINE)
    assert run.checkpoint_steps()[-1] == 12
    assert len(run.provenance()) == 2
    assert {"loss.png", "samples.txt"} < {path.name for path in run.path.iterdir()}
    train_alone(*options, 18)
    one = losses(tmp_path / "one")
    moved = losses(run.path)
    assert one.shape == moved.shape == (18, 2)
    assert np.abs(one - moved).max() < 1e-12
    assert np.ptp(one[:, 0]) > 1e-3


@pytest.mark.slow
def test_a_signal_to_one_stops_all_at_the_same_step(options, tmp_path):
    with processes(*options, *FOREVER) as started:
        wait_for(started, tmp_path / "run" / "checkpoints" / "6")
        started[1].send_signal(signal.SIGTERM)
        found = ended(started, 60)
    assert [code for code, _, _ in found] == [143] * 2
    assert [err for _, _, err in found] == ["", ""]
    stopped = re.search(r"^stopped after step (\d+)", found[0][1], re.MULTILINE)
    assert stopped is not None
    assert "stopped" not in found[1][1]
    run = RunDirectory(tmp_path / "run")
    assert run.checkpoint_steps()[-1] == int(stopped[1])
    assert len(losses(run.path)) == int(stopped[1])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "index"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
def test_one_that_dies_ends_the_other(options, tmp_path, number, index):
    with processes(*options, *FOREVER) as started:
        wait_for(started, tmp_path / "run" / "checkpoints" / "6")
        started[index].send_signal(number)
        other = started[1 - index]
        _, err = other.communicate(timeout=60)  # heartbeats are of 10 s, and JAX's own of 100
    ours = "another process has ended: see its messages; --resume goes on from the last checkpoint"
    if number == signal.SIGKILL and other.returncode == 2:
        assert re.search(rf"^jgpt: {ours} \(.*Gloo.*\)$", err, re.MULTILINE)
        assert err.count("jgpt: ") == 1
    else:  # a race between gloo, which has a thread of its own, and JAX's service in process 0
        assert other.returncode == -signal.SIGABRT
        assert "another task died" in err or "gloo::EnforceNotMet" in err

    assert len(err.splitlines()) < 40


@pytest.mark.slow
def test_an_error_of_writing_is_told_and_ends_the_others(options, tmp_path):
    with processes(*options, *FOREVER) as started:
        wait_for(started, tmp_path / "run" / "checkpoints" / "6")
        metrics = tmp_path / "run" / "metrics.jsonl"
        metrics.unlink()
        metrics.mkdir()
        (code, _, said), (other_code, _, _) = ended(started, 60)
    assert code == 2
    assert re.match(r"jgpt: .*metrics\.jsonl.*; the checkpoints are intact: free some space", said)
    assert other_code in (2, -signal.SIGABRT)


@pytest.mark.slow
def test_what_differs_is_rejected_by_name(poem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(poem, "poem.txt")
    Path("other.txt").write_text(poem.read_text().replace("eyes", "yees"))
    own = {0: ("--data", "poem.txt"), 1: ("--data", "other.txt", "--batch-size", 16, "--seed", 7)}
    message = r"process 1 differs: .*seed`? is 7, in process 0 1337; .*tokens_sha256`? is .*"

    for code, _, err in train("--out", "run", own=own):
        assert code == 2
        assert re.fullmatch(rf"jgpt: {message}\n", err)
        assert "--batch-size is 16, in process 0 8; " in err
    assert not Path("run").exists()


def test_other_code_is_another_fact(tmp_path):
    facts = []
    for text in ("", "# changed"):
        (tmp_path / "a.py").write_text(f"def loss(model, tokens, rngs): ...\n{text}")
        facts.append(code_facts(with_code(TrainConfig(), objective=f"{tmp_path}/a.py:loss")))
    first, second = (fact.pop("objective_code") for fact in facts)
    assert facts[0] == facts[1] == {"model_code": None, "optimizer_code": None}
    assert first != second
    assert second == f"a.py:loss of SHA-256 {sha256_of(tmp_path / 'a.py')}"


def test_another_number_of_devices_is_rejected_by_name(unjoined, monkeypatch):
    monkeypatch.setattr(module, "devices_of_processes", lambda: [4, 2])
    monkeypatch.setattr(module, "process_index", lambda: 1)
    with (
        pytest.raises(SystemExit, match=r"^process 1 has 2 devices, process 0 has 4$"),
        module.joined(None, None, None, leave),
    ):
        pass
