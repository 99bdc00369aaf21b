"""Which folder is a run, and what is written of its text files."""

import os
import re

import pytest

from jgpt import CharTokenizer
from jgpt.config import TrainConfig
from jgpt.fields import to_json
from jgpt.files import append
from jgpt.runs.directory import RunDirectory
from jgpt.runs.run import cut


def make_run(path) -> RunDirectory:
    (path / "checkpoints").mkdir(parents=True)
    (path / "tokenizer.json").write_text(CharTokenizer("ab").to_json())
    (path / "config.json").write_text(to_json(TrainConfig()))
    return RunDirectory(path)


def test_lines_are_cut_off_after_a_step_and_half_a_line_is_none(tmp_path):
    run = RunDirectory(tmp_path)
    path = tmp_path / "metrics.jsonl"
    append(path, b'{"step": 1, "loss": 3.0}\n{"step": 2, "los\n{"step": 3, "loss": 2.0}\n')
    append(path, b'{"step": 4, "loss": 1.5}')  # not even the end of the line may be missing
    assert [line["step"] for line in run.metrics()] == [1, 3]
    cut(path, 3)
    assert [line["step"] for line in run.metrics()] == [1, 3]
    cut(path, 2)
    assert path.read_text() == '{"step": 1, "loss": 3.0}\n'
    cut(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere", "nowhere is not a run directory: it has no config.json"),
        ("run/checkpoints", "checkpoints is not a run directory: it has no config.json"),
        ("one", "one is not a run directory: it has no config.json (did you mean runs/one?)"),
        ("run/checkpoints/11", "is a checkpoint, not a run directory: give run and `which=11`"),
        ("model", "model is not a run: jgpt import makes a run of a Hugging Face model"),
    ],
)
def test_a_path_that_is_no_run_s_is_not_opened(path, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "run" / "checkpoints" / "11").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')

    with pytest.raises(FileNotFoundError, match=f"{re.escape(reason)}$"):
        RunDirectory.open(path)


def test_the_latest_run_is_the_one_that_was_saved_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="the folder runs has no run"):
        RunDirectory.latest()
    for seconds, name in enumerate(("one", "two"), 1):
        run = make_run(tmp_path / "runs" / name)
        os.utime(run.checkpoints, (seconds, seconds))
    (tmp_path / "runs" / "other").mkdir()
    assert str(RunDirectory.latest()) == os.path.join("runs", "two")
    (tmp_path / "runs" / "one" / "checkpoints" / "8").mkdir()  # the first run goes on
    assert str(RunDirectory.latest()) == os.path.join("runs", "one")
