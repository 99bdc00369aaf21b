"""What is appended to a run directory's files and cut off, and who began it."""

import os
import re
from pathlib import Path

import pytest

from jgpt import CharTokenizer
from jgpt.config import TrainConfig
from jgpt.runs.directory import RunDirectory
from jgpt.runs.target import choose_target
from tests.runs.harness import contents


def test_lines_are_appended_and_cut_off_after_a_step_and_half_a_line_is_none(tmp_path):
    run = RunDirectory(tmp_path)
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 3, "loss": 2.0}]
    run.append("metrics.jsonl", lines[:2])
    run.append("metrics.jsonl", lines[2:], durable=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.5}')  # not even the end of the line may be missing
    assert run.metrics() == lines
    for step in (3, 1):
        run.truncate("metrics.jsonl", step)
        assert run.metrics() == lines[:step]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 3.0}\n'
    run.truncate("metrics.jsonl", 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_run_that_another_process_has_begun_meanwhile_is_kept(tmp_path):
    run = RunDirectory.create(tmp_path / "run", TrainConfig(), CharTokenizer("ab"))
    run.append("metrics.jsonl", [{"step": 1, "loss": 2.5}])
    with pytest.raises(FileExistsError, match="run was created by another process: choose another"):
        run.begin(TrainConfig(steps=7), CharTokenizer("ab"), "new")
    assert run.config() == TrainConfig()
    run.truncate("metrics.jsonl", 0)  # nothing was trained, so nothing is lost
    run.begin(TrainConfig(steps=7), CharTokenizer("ab"), "new")
    assert run.config() == TrainConfig(steps=7)


STARTS = {
    "new": {"resume": False, "overwrite": False},
    "resume": {"resume": True, "overwrite": False},
    "overwrite": {"resume": False, "overwrite": True},
}
NO_RUN = "folder is not a run directory: it has files, but no config.json; choose another, such as "
OTHER_CONFIG = "model/config.json is damaged, or of another program: TrainConfig has no field"
DAMAGED = "damaged/config.json is damaged, or of another program: "


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("folder", f"{NO_RUN}{os.path.join('folder', 'tiny')}"),
        ("model", OTHER_CONFIG),
        ("damaged", DAMAGED),
    ],
)
def test_no_run_goes_where_something_else_is(out, reason, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {
        "folder/notes.txt": "mine",
        "model/config.json": '{"model_type": "gpt2"}',
        "damaged/config.json": "{",
    }
    for name, text in files.items():
        Path(name).parent.mkdir()
        Path(name).write_text(text)
    before = contents(tmp_path)

    with pytest.raises((ValueError, OSError), match=f"^{re.escape(reason)}"):
        choose_target(TrainConfig(name="tiny", out=out), **STARTS[start])

    assert contents(tmp_path) == before


def test_what_is_resumed_must_be_named():
    message = "`resume=True` needs the run's `out=DIRECTORY`"
    with pytest.raises(ValueError, match=f"^{message}$"):
        choose_target(TrainConfig(), resume=True, overwrite=False)


@pytest.mark.parametrize("path", ["run/checkpoints/newest", "nowhere"])
def test_a_path_that_is_no_run_s_is_not_opened(path, tmp_path):
    RunDirectory.create(tmp_path / "run", TrainConfig(), CharTokenizer("ab"))
    (tmp_path / "run" / "checkpoints").mkdir()
    reason = f"{path} is not a run directory: it has no config.json"

    with pytest.raises(FileNotFoundError, match=f"{re.escape(reason)}$"):
        RunDirectory.open(tmp_path / path)


def test_a_hugging_face_model_is_named_as_one(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    reason = f"{tmp_path} is a Hugging Face model, not a run: make a run of it with jgpt import"
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(reason)}$"):
        RunDirectory.open(tmp_path)


def test_the_latest_run_is_the_one_that_was_written_to_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="the folder runs has no run"):
        RunDirectory.latest()
    for seconds, file in enumerate(("one/config.json", "two/config.json", "other/notes.txt"), 1):
        path = tmp_path / "runs" / file
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (seconds, seconds))
    assert str(RunDirectory.latest()) == os.path.join("runs", "two")
    metrics = tmp_path / "runs" / "one" / "metrics.jsonl"
    metrics.write_text("")  # the first run goes on
    assert str(RunDirectory.latest()) == os.path.join("runs", "one")
