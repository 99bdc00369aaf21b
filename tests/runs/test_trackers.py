"""What trackers are told, and where a resumed run goes on in them."""

import dataclasses
import importlib
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from jgpt import OptimizerConfig, TrainConfig, fit
from jgpt.fields import as_dict
from jgpt.runs import trackers
from jgpt.runs.directory import RunDirectory
from jgpt.runs.trackers import open_trackers, require_tracker
from tests.runs import faults
from tests.runs.harness import BIGRAM, Heard, contents, with_changes

events = importlib.import_module("tensorboardX.proto.event_pb2")


def events_of(folder):
    """A file's records: a length, its checksum, the event, its checksum."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield events.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def opened(folder, name, *, is_new=True, config=None, warn=lambda _: None):
    config = dataclasses.replace(config or TrainConfig(), trackers=(name,))
    return open_trackers(config, folder, is_new=is_new, warn=warn)


def test_tensorboard_gets_each_value_and_forgets_what_is_trained_again(tmp_path):
    """TensorBoard hides what is at or after the step of a start: here 5, and not 4."""
    with opened(tmp_path, "tensorboard", is_new=False) as log:
        log({"step": 5, "loss": 2.5, "validation_loss": 2.25, "undefined": None})
        log({"step": 6, "loss": 1.5})
    written = list(events_of(tmp_path / "tensorboard"))
    assert written[0].file_version == "brain.Event:2"
    starts = [each.step for each in written if each.session_log.status == events.SessionLog.START]
    assert starts == [5]
    values = [
        (event.step, value.tag, value.simple_value)
        for event in written
        for value in event.summary.value
    ]
    assert values == [(5, "loss", 2.5), (5, "validation_loss", 2.25), (6, "loss", 1.5)]


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package: what it was given."""
    seen = types.SimpleNamespace(begun=[], logged=[])
    run = types.SimpleNamespace(
        log=lambda values, step: seen.logged.append((step, values)),
        finish=lambda: seen.logged.append("end"),
    )

    def init(**options):
        seen.begun.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    return seen


def test_wandb_goes_on_with_the_run_of_the_directory_and_gets_its_config(tmp_path, wandb):
    config = TrainConfig(steps=70, optimizer=OptimizerConfig(beta1=0.8), trackers=("wandb",))
    for first_step in (0, 4):
        is_new = first_step == 0
        with opened(tmp_path, "wandb", is_new=is_new, config=config) as log:
            log({"step": first_step + 1, "loss": 2.5})
    assert wandb.logged == [(1, {"loss": 2.5}), "end", (5, {"loss": 2.5}), "end"]
    assert wandb.begun[0] == wandb.begun[1]
    assert wandb.begun[0] == {
        "project": "jgpt",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "id": (tmp_path / "wandb.id").read_text(),
        "resume": "allow",
        "config": as_dict(config),
        "allow_val_change": True,
    }
    assert wandb.begun[0]["config"]["optimizer"]["beta1"] == 0.8
    with opened(tmp_path, "wandb"):  # overwritten
        pass
    assert wandb.begun[2]["id"] != wandb.begun[0]["id"]


@pytest.fixture
def use(monkeypatch):
    def use(open_tracker: Callable[..., Any]) -> None:
        monkeypatch.setattr(trackers, "_open", open_tracker)
        monkeypatch.setattr("jgpt.runs.fit.require_tracker", lambda name: None)

    return use


def test_a_tracker_that_fails_is_warned_of_and_training_goes_on_without_it(
    small_run, tmp_path, use
):
    steps: list[int] = []

    def log(values, step):
        steps.append(step)
        if step >= 3:
            faults.full_disk()

    use(lambda *_, **__: types.SimpleNamespace(log=log, close=faults.full_disk))
    config = with_changes(small_run, **BIGRAM, steps=8, out=str(tmp_path / "run"))
    heard = Heard()

    fit(dataclasses.replace(config, trackers=("wandb",)), progress=heard)

    reason = "[Errno 28] No space left on device"
    first, *_ = heard.messages
    assert first == f"`trackers=('wandb',)` has failed ({reason}): training goes on without it"
    assert steps == [1, 2, 3]
    assert len(RunDirectory(tmp_path / "run").metrics()) == 8


def test_a_tracker_is_given_every_line_and_told_whether_the_run_is_resumed(
    small_run, tmp_path, use
):
    """By that W&B goes on with the run that it has, or begins another one."""
    told: list[Any] = []

    def open_tracker(name, run, config, *, is_new):
        told.append(is_new)
        return types.SimpleNamespace(
            log=lambda values, step: told.append({"step": step, **values}),
            close=lambda: told.append("closed"),
        )

    use(open_tracker)
    config = with_changes(small_run, **BIGRAM, steps=3, out=str(tmp_path / "run"))
    config = dataclasses.replace(config, trackers=("wandb",))
    fit(config, progress=None)
    fit(dataclasses.replace(config, steps=5), resume=True, progress=None)

    lines = RunDirectory(tmp_path / "run").metrics()
    assert len(lines) == 5
    assert told == [True, *lines[:3], "closed", False, *lines[3:], "closed"]
    told.clear()
    fit(config, overwrite=True, progress=None)
    assert told[0] is True


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_names_its_extra(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'jgpt\[{name}\]'"):
        require_tracker(name)


def test_a_tracker_that_cannot_be_opened_leaves_the_run_that_was_to_be_overwritten(
    small_run, tmp_path, use
):
    """As without a key for W&B: the old run was gone by then."""
    config = with_changes(small_run, **BIGRAM, steps=2, out=str(tmp_path / "run"))
    fit(config, progress=None)
    before = contents(tmp_path / "run")
    use(lambda *_, **__: faults.full_disk())

    with pytest.raises(OSError, match="No space left"):
        fit(dataclasses.replace(config, trackers=("wandb",)), overwrite=True, progress=None)

    assert contents(tmp_path / "run") == before
