"""The run directory's files: who holds it, and what is appended to it."""

import os

import pytest

from jgpt.runs.directory import RunDirectory


def test_the_lock_names_its_holder_and_nobody_before(tmp_path):
    (tmp_path / "lock").write_text("4194304999\n")  # longer than any process's
    with RunDirectory(tmp_path).locked():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_one_holder_at_a_time(tmp_path):
    run = RunDirectory(tmp_path)
    with (
        run.locked(),
        pytest.raises(BlockingIOError, match=rf"\b{os.getpid()}\b"),
        RunDirectory(tmp_path).locked(),
    ):
        pass
    with run.locked():
        pass


def test_lines_are_appended_and_cut_off_after_a_step(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_metrics([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}])
    run.append_metrics([{"step": 3, "loss": 2.0}], durable=True)
    assert run.metrics() == [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.5},
        {"step": 3, "loss": 2.0},
    ]
    run.truncate_metrics(3)
    assert len(run.metrics()) == 3
    run.truncate_metrics(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 3.0}\n'
    run.truncate_metrics(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_damaged_provenance_is_cut_off_before_more_is_appended(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_provenance({"step": 0})
    with (tmp_path / "provenance.jsonl").open("a") as file:
        file.write('{"st')
    run.append_provenance({"step": 4})
    assert (tmp_path / "provenance.jsonl").read_text() == '{"step": 0}\n{"step": 4}\n'
