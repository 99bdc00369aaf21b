"""Killed, stopped or preempted: the run that goes on is the run that never stopped."""

import concurrent.futures
import dataclasses
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jgpt import DataConfig, fit, load
from jgpt.runs import loop
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory, read_config
from jgpt.runs.loop import TrainingStopped, evaluate, plan
from jgpt.runs.progress import Progress
from tests.models import config_of
from tests.quick import only

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
        return len(asked) == 4

    with pytest.raises(TrainingStopped) as stopped:
        fit(config, should_stop=should_stop)
    assert stopped.value.step == 4  # not where it would have been evaluated alone
    assert str(stopped.value) == f"stopped after step 4; its checkpoint is in {tmp_path / 'run'}"
    resumed = fit(config, resume=True)
    assert kill_resume.fingerprint(resumed.directory) == kill_resume.fingerprint(trained.directory)
    assert [line["step"] for line in resumed_sessions(resumed.directory)] == [0, 4]


@pytest.mark.slow
def test_muon_s_state_and_averaged_weights_go_on_too(small_run, tmp_path):
    sizes = ("vocab_size", "block_size", "num_layers", "num_heads", "embed_dim", "dropout")
    small = {name: getattr(small_run.model, name) for name in sizes}
    model = config_of("modern", **small, num_kv_heads=1, attention_scale=0.5)
    muon = dataclasses.replace(
        small_run.optimizer,
        optimizer="muon",
        schedule="wsd",
        embedding_learning_rate=0.02,
        ema_decay=0.7,
    )
    config = dataclasses.replace(small_run, model=model, optimizer=muon)
    whole = fit(dataclasses.replace(config, out=str(tmp_path / "whole")))
    config = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    calls = iter([False, False, True])
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


@pytest.mark.parametrize(
    ("number", "code"), only([(signal.SIGINT, 130)], [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
)
def test_a_signal_finishes_the_call_saves_and_says_so(tmp_path, number, code):
    out = tmp_path / "run"
    process = begin(out)
    wait_for_steps(process, out)
    process.send_signal(number)
    said, complained = process.communicate(timeout=120)
    assert process.returncode == code, complained
    assert "finishing this call and saving a checkpoint; a second signal exits without it" in said
    saved = RunDirectory.open(out).checkpoint_steps()[-1]
    assert f"stopped after step {saved}; its checkpoint is in {out}\nresume with: " in said
    assert complained == ""
    assert RunDirectory.open(out).metrics()[-1]["step"] == saved


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


class Warned(Progress):
    """Keeps the warnings."""

    def __init__(self):
        self.messages = []

    def warned(self, message):
        self.messages.append(message)


def bigram(small_run, out, steps, **optimizer):
    """A run that compiles at once, which evaluates and saves every tenth step."""
    model = dataclasses.replace(small_run.model, architecture="bigram", dropout=0.0)
    schedule = {"learning_rate": 0.4, "min_learning_rate": 0.1, "warmup_steps": 0, **optimizer}
    return dataclasses.replace(
        small_run,
        model=model,
        optimizer=dataclasses.replace(small_run.optimizer, **schedule),
        out=str(out),
        steps=steps,
        eval_interval=10,
        sample_tokens=0,
    )


def with_optimizer(config, steps, **changes):
    optimizer = dataclasses.replace(config.optimizer, **changes)
    return dataclasses.replace(config, steps=steps, optimizer=optimizer)


def resumed(config):
    """What resuming said of the learning rate, and the learning rates of all steps."""
    progress = Warned()
    fit(config, resume=True, progress=progress)
    lines = RunDirectory.open(config.out).metrics()
    return progress.messages, [line["learning_rate"] for line in lines if "loss" in line]


def test_a_longer_cosine_jumps_and_its_end_can_be_kept(small_run, tmp_path):
    config = bigram(small_run, tmp_path / "run", 20)
    fit(config)
    shutil.copytree(config.out, tmp_path / "kept")
    said, rates = resumed(with_optimizer(config, 40))
    assert said == [
        "40 steps instead of 20: the learning rate jumps from 0.102 to 0.25 at step 21. Without a "
        "jump: schedule_steps=20 keeps the schedule (0.1 at the last step)"
    ]
    assert (rates[19], rates[20]) == (pytest.approx(0.102, abs=5e-4), pytest.approx(0.25))

    kept = dataclasses.replace(config, out=str(tmp_path / "kept"))
    said, rates = resumed(with_optimizer(kept, 40, schedule_steps=20))
    assert said == [
        "40 steps instead of 20: the learning rate goes on from 0.102 to 0.1, without a jump"
    ]
    assert rates[19:] == [pytest.approx(0.102, abs=5e-4), *[pytest.approx(0.1)] * 20]
    # the run's own config keeps it too, and says no more
    assert resumed(read_config(tmp_path / "kept" / "config.json"))[0] == []


def test_a_cosine_in_its_middle_is_kept_too(small_run, tmp_path):
    config = bigram(small_run, tmp_path / "run", 40, min_learning_rate=0.0)
    steps = []

    class Evaluated(Progress):
        def evaluated(self, step, validation_loss):
            steps.append(step)

    with pytest.raises(TrainingStopped):
        fit(config, progress=Evaluated(), should_stop=lambda: steps == [10])
    done = read_config(tmp_path / "run" / "config.json")
    progress = Warned()
    plan(with_optimizer(done, 30), resume=True, progress=progress)
    assert progress.messages == [
        "30 steps instead of 40: the learning rate jumps from 0.352 to 0.3 at step 11. Without a "
        "jump: schedule_steps=40 keeps the schedule (0.0701 at the last step)"
    ]
    said, rates = resumed(with_optimizer(done, 30, schedule_steps=40))
    assert "without a jump" in said[0]
    by_hand = [0.2 * (1 + math.cos(math.pi * step / 40)) for step in range(30)]
    assert rates == pytest.approx(by_hand, rel=1e-5)


def test_a_run_that_diverged_goes_on_with_a_lower_learning_rate(small_run, tmp_path, monkeypatch):
    config = bigram(small_run, tmp_path / "run", 20, min_learning_rate=0.2)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "_evaluators", lambda *_: (lambda _: math.nan, lambda _: 3.0))
        with pytest.raises(FloatingPointError, match=r"lower learning_rate; checkpoint 1 is kept$"):
            fit(config)
    said, rates = resumed(with_optimizer(config, 20, learning_rate=0.3, min_learning_rate=0.1))
    assert said == [
        "learning_rate=0.3 instead of 0.4, min_learning_rate=0.1 instead of 0.2: the learning "
        "rate goes from 0.4 to 0.299 at step 2"
    ]
    by_hand = [0.2 + 0.1 * math.cos(math.pi * step / 20) for step in range(20)]
    assert rates == pytest.approx([0.4, *by_hand[1:]], rel=1e-5)
    recorded = [line["optimizer"]["learning_rate"] for line in resumed_sessions(config.out)]
    assert recorded == [0.4, 0.3]
    assert read_config(tmp_path / "run" / "config.json").optimizer.learning_rate == 0.3


def test_a_run_that_is_killed_before_its_first_evaluation_goes_on_from_its_first_estimate(
    small_run, tmp_path
):
    """And its checkpoint without a validation loss is neither the best nor among the best."""
    config = bigram(small_run, tmp_path / "whole", 64)
    config = dataclasses.replace(config, eval_interval=32, keep_best=3, keep_last=1)
    whole = fit(config)
    assert RunDirectory(whole.directory).checkpoint_steps() == [32, 64]

    class Killed(Exception):
        pass

    class Listening(Progress):
        def stepped(self, step, loss, tokens_per_second):
            if step > 7:
                raise Killed

    killed = dataclasses.replace(config, out=str(tmp_path / "killed"))
    with pytest.raises(Killed):
        fit(killed, progress=Listening())
    assert RunDirectory(tmp_path / "killed").checkpoint_steps() == [2]
    load(tmp_path / "killed")
    fit(killed, resume=True)
    assert kill_resume.fingerprint(tmp_path / "killed") == kill_resume.fingerprint(whole.directory)
    assert [line["step"] for line in resumed_sessions(tmp_path / "killed")] == [0, 2]


def test_training_stops_when_a_save_has_failed(small_run, tmp_path, monkeypatch):
    save, steps = Checkpoints.save, []

    def failing(manifest, directory):
        raise OSError(28, "No space left on device")

    def save_and_see_it_fail(self, *arguments):
        save(self, *arguments)
        concurrent.futures.wait([self._saving])

    class Listening(Progress):
        def stepped(self, step, loss, tokens_per_second):
            steps.append(step)

    monkeypatch.setattr("jgpt.runs.checkpoints.Manifest.write", failing)
    monkeypatch.setattr(Checkpoints, "save", save_and_see_it_fail)
    config = dataclasses.replace(bigram(small_run, tmp_path / "run", 64), eval_interval=32)
    with pytest.raises(OSError, match="the checkpoint of step 2 could not be written"):
        fit(config, progress=Listening())
    assert max(steps) == 2


def test_wsd_is_extended_before_it_decays(small_run, tmp_path):
    """Its decay moves to the new end; from a checkpoint of then, afterwards too."""
    wsd = {"schedule": "wsd", "min_learning_rate": 0.0, "decay_fraction": 0.4}
    config = bigram(small_run, tmp_path / "run", 50, **wsd)
    config = dataclasses.replace(config, keep_every=20)
    fit(config)
    shutil.copytree(config.out, tmp_path / "early")
    for step in (40, 50):
        shutil.rmtree(tmp_path / "early" / "checkpoints" / str(step))

    early = dataclasses.replace(config, out=str(tmp_path / "early"))
    said, rates = resumed(with_optimizer(early, 100))
    assert said == [
        "100 steps instead of 50: the learning rate goes on from 0.4 to 0.4, without a jump"
    ]
    assert rates[:61] == pytest.approx([0.4] * 61)
    assert rates[61:] == pytest.approx([0.4 * left / 40 for left in range(39, 0, -1)], rel=1e-4)

    longer = Warned()
    plan(with_optimizer(config, 100), resume=True, progress=longer)
    assert longer.messages == [
        "100 steps instead of 50: the learning rate jumps from 0.02 to 0.4 at step 51. Without a "
        "jump: delete the checkpoints after 20 to resume from that one"
    ]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "20")
    plan(with_optimizer(config, 100), resume=True, progress=longer)
    assert longer.messages[1].endswith(
        "Without a jump: nothing, for the schedule ends at 0; wsd can be extended from a "
        "checkpoint before its decay, which keep_every keeps"
    )


def snapshot(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_fewer_steps_than_were_taken_are_refused_and_as_many_are_done(small_run, tmp_path):
    config = bigram(small_run, tmp_path / "run", 20)
    run = fit(config)
    before = snapshot(tmp_path)
    refusal = (
        rf"steps=19 is below the 20 steps that {tmp_path}/run has taken: give steps=20 or more, "
        "or another directory"
    )
    for start in (fit, plan):
        with pytest.raises(ValueError, match=refusal):
            start(with_optimizer(config, 19), resume=True)
    assert snapshot(tmp_path) == before
    again = fit(config, resume=True)
    assert (again.best_step, again.validation_loss) == (run.best_step, run.validation_loss)
    assert read_config(tmp_path / "run" / "config.json") == run.config


def test_a_run_from_before_universal_newlines_keeps_its_text(small_run, tmp_path):
    """With its carriage returns, which its tokenizer has: evaluated, and resumed."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xef\xbb\xbf" + b"So long as men can breathe\r\nor eyes can see\r\n" * 30)
    data = {"data": (str(text),), "universal_newlines": False}
    config = bigram(small_run, tmp_path / "run", 10)
    config = dataclasses.replace(config, dataset=dataclasses.replace(config.dataset, **data))
    run = fit(config)
    assert {"\r", "\ufeff"} < set(run.tokenizer.decode(range(run.tokenizer.vocab_size)))
    path = tmp_path / "run" / "config.json"
    old = json.loads(path.read_text())
    del old["dataset"]["universal_newlines"], old["optimizer"]["schedule_steps"]
    path.write_text(json.dumps(old))

    assert evaluate(run.directory).loss == pytest.approx(run.validation_loss, rel=1e-6)
    today = dataclasses.replace(config, dataset=dataclasses.replace(config.dataset, **data))
    today = dataclasses.replace(
        today, steps=20, dataset=dataclasses.replace(today.dataset, universal_newlines=True)
    )
    progress = Warned()
    again = fit(today, resume=True, progress=progress)
    assert not again.config.dataset.universal_newlines
    assert not any("newlines" in message for message in progress.messages)
    digests = {line["text_sha256"] for line in resumed_sessions(run.directory)}
    assert len(digests) == 1


def test_a_text_may_move_but_not_change(small_run, poem, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(poem.read_text())
    config = bigram(small_run, tmp_path / "run", 2)
    config = dataclasses.replace(config, dataset=DataConfig(data=(str(text),)))
    fit(config)
    moved = text.rename(tmp_path / "moved.txt")
    hint = (
        r"no file .*text\.txt.*; if the run's text has moved, train it with resume=True data=PLACE"
    )
    with pytest.raises(FileNotFoundError, match=hint):
        evaluate(tmp_path / "run")
    config = dataclasses.replace(config, steps=3)
    elsewhere = dataclasses.replace(config, dataset=DataConfig(data=(str(moved),)))
    assert fit(elsewhere, resume=True).config.dataset.data == (str(moved),)
    assert evaluate(tmp_path / "run").loss > 0
    other = dataclasses.replace(elsewhere, dataset=DataConfig(data=("pydocs",)))
    with pytest.raises(ValueError, match=r"the text has changed .* \(pydocs: SHA-256 "):
        fit(other, resume=True)
    # nobody knows the text of a run without provenance
    (tmp_path / "run" / "provenance.jsonl").unlink()
    text.write_text(poem.read_text()[::-1])
    with pytest.raises(ValueError, match=r"dataset\.data is .*moved\.txt',\) in the run"):
        fit(config, resume=True)
