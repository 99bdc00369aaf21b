"""The run directory's files: who holds it, and what is appended to it."""

import json
import os

import pytest

from jgpt import CharTokenizer
from jgpt.config import TrainConfig, to_json
from jgpt.runs.directory import RunDirectory, read_config
from jgpt.runs.plots import plot_losses


def test_one_holder_at_a_time_who_is_named(tmp_path):
    (tmp_path / "lock").write_text("4194304999\n")  # longer than any process's
    run = RunDirectory(tmp_path)
    with run.locked():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with (
            pytest.raises(BlockingIOError, match=rf"\b{os.getpid()}\b"),
            RunDirectory(tmp_path).locked(),
        ):
            pass
    with run.locked():
        pass


def test_lines_are_appended_and_cut_off_after_a_step_and_half_a_line_is_none(tmp_path):
    run = RunDirectory(tmp_path)
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 3, "loss": 2.0}]
    run.append_metrics(lines[:2])
    run.append_metrics(lines[2:], durable=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.5}')  # not even the end of the line may be missing
    assert run.metrics() == lines
    for step in (3, 1):
        run.truncate_metrics(step)
        assert run.metrics() == lines[:step]
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


@pytest.mark.parametrize(
    "damage",
    [
        *('"step": 2, "loss": 1e300', '"step": 2, "loss": true', '"step": 2, "loss": NaN'),
        *(f'"step": 2, "loss": {"9" * 20}', f'"step": {"9" * 20}, "loss": 1.5'),
    ],
)
def test_a_number_that_no_run_has_is_damage(tmp_path, damage):
    run, text = RunDirectory(tmp_path), '{"step": 1, "loss": 1e+299}\n'
    (tmp_path / "metrics.jsonl").write_text(f"{text}{{{damage}}}\n")
    assert run.metrics() == [{"step": 1, "loss": 1e299}]
    plot_losses(run.metrics(), tmp_path / "loss.png")
    run.truncate_metrics(1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_a_folder_in_place_of_a_file_is_refused_and_a_run_s_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path} is not a file$"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"^{tmp_path} is not a file: give {tmp_path}/config.json"):
        read_config(tmp_path)


def test_a_field_of_a_newer_version_is_no_damage(tmp_path):
    config = json.loads(to_json(TrainConfig()))
    config["model"]["mixture"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="by a newer version") as refused:
        RunDirectory.open(tmp_path).config()
    assert str(refused.value) == (
        f"{tmp_path / 'config.json'} was written by a newer version of jgpt, or by another "
        "program: ModelConfig has no field 'mixture'"
    )


def test_a_checkpoint_is_no_run_directory_and_its_run_is_named(tmp_path):
    (tmp_path / "config.json").write_text(to_json(TrainConfig()))
    inside = tmp_path / "checkpoints" / "300"
    inside.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=f"give {tmp_path} and which=300$"):
        RunDirectory.open(inside)
    with pytest.raises(FileNotFoundError, match="it has no config"):
        RunDirectory.open(tmp_path / "checkpoints" / "newest")


def test_a_run_that_another_process_has_begun_meanwhile_is_kept(tmp_path):
    run = RunDirectory.create(tmp_path / "run", TrainConfig(), CharTokenizer("ab"))
    with pytest.raises(FileExistsError, match="run was created by another process: choose another"):
        run.begin(TrainConfig(steps=7), CharTokenizer("ab"), resume=False, overwrite=False)
    assert run.config() == TrainConfig()
