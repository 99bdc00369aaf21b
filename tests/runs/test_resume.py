"""Killed, stopped or preempted: the run that goes on is the run that never stopped."""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jgpt import fit
from jgpt.runs.directory import RunDirectory, read_config
from jgpt.runs.loop import TrainingStopped
from jgpt.runs.progress import Progress
from tests.models import config_of

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
kill_resume = importlib.import_module("kill_resume")


@pytest.mark.slow
def test_a_killed_process_loses_nothing(tmp_path):
    """A shorter benchmarks/kill_resume.py: SIGKILL at random moments, and inside saves."""
    result = kill_resume.kill_and_resume(tmp_path, kills=4, seed=1)
    assert result["kills"] == 4
    assert result["in_a_save"] > 0
    assert (result["lost"], result["differing"]) == (0, 0)


def test_a_stop_that_is_asked_for_saves_and_goes_on(trained, small_run, tmp_path):
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"))
    asked = []

    def should_stop() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(TrainingStopped) as stopped:
        fit(config, should_stop=should_stop)
    assert stopped.value.step == 4  # not where it would have been evaluated alone
    assert str(stopped.value) == f"stopped after step 4; its checkpoint is in {tmp_path / 'run'}"
    resumed = fit(config, resume=True)
    assert kill_resume.fingerprint(resumed.directory) == kill_resume.fingerprint(trained.directory)
    assert [line["step"] for line in resumed_sessions(resumed.directory)] == [0, 4]


def test_muon_s_state_goes_on_too(small_run, tmp_path):
    sizes = ("vocab_size", "block_size", "num_layers", "num_heads", "embed_dim", "dropout")
    small = {name: getattr(small_run.model, name) for name in sizes}
    model = config_of("modern", **small, num_kv_heads=1, attention_scale=0.5)
    muon = dataclasses.replace(
        small_run.optimizer, optimizer="muon", schedule="wsd", embedding_learning_rate=0.02
    )
    config = dataclasses.replace(small_run, model=model, optimizer=muon)
    whole = fit(dataclasses.replace(config, out=str(tmp_path / "whole")))
    config = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    calls = iter([False, True])
    with pytest.raises(TrainingStopped):
        fit(config, should_stop=lambda: next(calls))
    resumed = fit(config, resume=True)
    assert kill_resume.fingerprint(resumed.directory) == kill_resume.fingerprint(whole.directory)
    assert resumed.validation_loss < 2.9  # of ln 21 = 3.04 at the start


def resumed_sessions(directory):
    return RunDirectory.open(directory).provenance()


TRAIN = ("train", "tiny", "--steps", "100000", "--eval-interval", "50000", "--eval-tokens", "500")


def begin(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jgpt.cli", *TRAIN, "--out", str(out), "--sample-tokens", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )


def wait_for_steps(process: subprocess.Popen[str], out: Path) -> None:
    while process.poll() is None and not (out / "metrics.jsonl").exists():
        time.sleep(0.02)
    assert process.poll() is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_call_saves_and_says_so(tmp_path, number, code):
    out = tmp_path / "run"
    process = begin(out)
    wait_for_steps(process, out)
    process.send_signal(number)
    said, complained = process.communicate(timeout=120)
    assert process.returncode == code, complained
    assert (
        "finishing the current call and saving a checkpoint; a second signal exits at once" in said
    )
    (saved,) = (out / "checkpoints").iterdir()
    assert f"stopped after step {saved.name}; its checkpoint is in {out}\nresume with: " in said
    assert complained == ""
    assert RunDirectory.open(out).metrics()[-1]["step"] == int(saved.name)


def test_a_second_signal_leaves_at_once(tmp_path):
    out = tmp_path / "run"
    process = begin(out)
    wait_for_steps(process, out)
    process.send_signal(signal.SIGSTOP)  # so that both are there before either is acted on
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=120)
    assert process.returncode in (130, 143)
    assert not list((out / "checkpoints").glob("[0-9]*"))


def test_the_saved_config_repeats_the_run_bit_by_bit(trained, tmp_path):
    config = read_config(trained.directory / "config.json")
    again = fit(dataclasses.replace(config, out=str(tmp_path / "again")))
    assert kill_resume.fingerprint(again.directory) == kill_resume.fingerprint(trained.directory)
    assert again.sample == trained.sample


def test_damage_in_the_metrics_is_cut_off_and_no_step_is_taken_twice(trained, small_run, tmp_path):
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"))

    class Killed(Exception):
        pass

    class KillAfterFirstSave(Progress):
        def stepped(self, step, loss, tokens_per_second):
            if step > 6:
                raise Killed

    with pytest.raises(Killed):
        fit(config, progress=KillAfterFirstSave())
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    with (tmp_path / "run" / "provenance.jsonl").open("a") as file:
        file.write('{"step"')
    resumed = fit(config, resume=True)
    assert kill_resume.fingerprint(resumed.directory) == kill_resume.fingerprint(trained.directory)
    assert [line["step"] for line in resumed_sessions(resumed.directory)] == [0, 4]


def test_a_changed_text_is_not_gone_on_with(trained, small_run, poem, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(poem.read_text())
    dataset = dataclasses.replace(small_run.dataset, data=(str(text),))
    config = dataclasses.replace(small_run, dataset=dataset, out=str(tmp_path / "run"), steps=4)
    fit(config)
    text.write_text(poem.read_text()[::-1])
    with pytest.raises(ValueError, match="the text has changed since"):
        fit(dataclasses.replace(config, steps=8), resume=True)
