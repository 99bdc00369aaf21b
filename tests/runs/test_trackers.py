"""What trackers are told, and where a resumed run goes on in them."""

import contextlib
import importlib
import struct
import sys
import types

import pytest

from jgpt.runs.trackers import require_tracker

events = importlib.import_module("tensorboardX.proto.event_pb2")


def events_of(folder):
    """A file's records: a length, its checksum, the event, its checksum."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield events.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def test_tensorboard_gets_each_value_and_forgets_what_is_trained_again(tmp_path):
    """TensorBoard hides what is at or after the step of a start: here 5, and not 4."""
    with contextlib.ExitStack() as stack:
        log = require_tracker("tensorboard")(tmp_path, 4, stack)
        log({"loss": 2.5, "validation_loss": 2.25}, 5)
        log({"loss": 1.5}, 6)
    written = list(events_of(tmp_path / "tensorboard"))
    starts = [each.step for each in written if each.session_log.status == events.SessionLog.START]
    assert starts == [5]
    values = [
        (event.step, value.tag, value.simple_value)
        for event in written
        for value in event.summary.value
    ]
    assert values == [(5, "loss", 2.5), (5, "validation_loss", 2.25), (6, "loss", 1.5)]


def test_wandb_goes_on_with_the_run_of_the_directory(tmp_path, monkeypatch):
    begun, logged = [], []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end")
    )

    def init(**options):
        begun.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    for first_step in (0, 4):
        with contextlib.ExitStack() as stack:
            log = require_tracker("wandb")(tmp_path, first_step, stack)
            log({"loss": 2.5}, first_step + 1)
    assert logged == [(1, {"loss": 2.5}), "end", (5, {"loss": 2.5}), "end"]
    assert begun[0] == begun[1]
    assert begun[0] == {
        "project": "jgpt",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "id": (tmp_path / "wandb.id").read_text(),
        "resume": "allow",
    }


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_names_its_extra(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'jgpt\[{name}\]'"):
        require_tracker(name)
