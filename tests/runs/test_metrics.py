"""What a run writes down of itself, and who is told."""

import dataclasses
import json

import jax
import pytest

from jgpt import fit
from jgpt.hardware import peak_flops
from jgpt.runs.directory import RunDirectory
from jgpt.runs.metrics import SCHEMA


def test_metrics_say_what_the_schema_says_and_no_more(trained):
    lines = RunDirectory.open(trained.directory).metrics()
    assert set().union(*lines) <= set(SCHEMA)
    last = lines[-1]
    assert last["tokens"] == 11 * 5 * 7
    assert last["memory_bytes"] > 1 << 20
    assert peak_flops() is None  # nobody knows a CPU's, so nothing is made up
    assert not any("model_flops_utilisation" in line for line in lines)
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    assert seconds == sorted(seconds)
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    assert speeds
    assert all(1 < speed < 1e7 for speed in speeds)


def test_provenance_tells_what_a_run_was_made_with(trained):
    (line,) = RunDirectory.open(trained.directory).provenance()
    assert line["step"] == 0
    assert line["seed"] == trained.config.seed
    assert line["versions"]["jax"] == jax.__version__
    assert line["devices"] == ["cpu"] * jax.device_count()
    assert len(line["corpus_sha256"]) == len(line["tokenizer_sha256"]) == 64
    assert line["command"]


class FakeTracker:
    def __init__(self):
        self.logged, self.closed = [], False

    def log(self, line):
        self.logged.append(line)

    def close(self):
        self.closed = True


def test_trackers_are_given_every_line_and_closed(small_run, tmp_path, monkeypatch):
    tracker = FakeTracker()
    monkeypatch.setattr("jgpt.runs.loop.open_tracker", lambda *_: tracker)
    run = fit(dataclasses.replace(small_run, out=str(tmp_path / "run"), trackers=("wandb",)))
    written = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert tracker.logged == [json.loads(line) for line in written]
    assert tracker.closed


def test_tensorboard_writes_events_into_the_run(small_run, tmp_path):
    config = dataclasses.replace(
        small_run, out=str(tmp_path / "run"), trackers=("tensorboard",), sample_tokens=0
    )
    run = fit(config)
    (events,) = (run.directory / "tensorboard").iterdir()
    assert b"validation_loss" in events.read_bytes()


def test_a_missing_tracker_names_its_extra(small_run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"), trackers=("wandb",))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jgpt\[wandb\]'"):
        fit(config)
