"""Killed, stopped or preempted: the run that goes on is the run that never stopped."""

import concurrent.futures
import dataclasses
import logging
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jgpt import DataConfig, OptimizerConfig, TrainConfig, fit, load
from jgpt.fitting import loop
from jgpt.fitting.evaluate import evaluate
from jgpt.fitting.progress import Progress
from jgpt.fitting.resume import describe_learning_rate
from jgpt.fitting.stopping import TrainingStopped
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from jgpt.runs.manifest import Manifest
from tests.models import config_of
from tests.quick import only
from tests.runs import faults
from tests.runs.harness import BIGRAM, Heard, kill_resume, with_changes


@pytest.mark.slow
def test_a_killed_process_loses_nothing(tmp_path):
    """A shorter benchmarks/kill_resume.py: SIGKILL inside a save, and at a random moment."""
    result = kill_resume.kill_and_resume(tmp_path, kills=2, seed=6)
    assert result["kills"] == 2
    assert result["in_a_save"] > 0
    assert (result["lost"], result["differing"]) == (0, 0)


class Killed(Exception):
    """What ends a run from outside."""


class KillAt(Progress):
    def __init__(self, step):
        self.step = step

    def stepped(self, step, loss, tokens_per_second):
        if step >= self.step:
            raise Killed

    def evaluated(self, step, validation_loss):
        # at this moment the evaluation is written down and the checkpoint is not
        if step >= self.step:
            raise Killed


class StopAtCall(Progress):
    """Asks for a stop when training asks for the fourth time; a text that is read asks, too."""

    def __init__(self):
        self.is_training = False
        self.calls = 0

    def planned(self, evaluations):
        self.is_training = True

    def should_stop(self):
        if self.is_training:
            self.calls += 1
        return self.calls == 4


class KillBeforeTheFirstCheckpoint(Progress):
    def estimated(self, step, validation_loss):
        if step > 0:  # the estimate of step 0 is written down
            raise Killed


MODERN = config_of("modern", num_kv_heads=1, attention_scale=0.5)
MUON = {"optimizer": "muon", "schedule": "wsd", "embedding_learning_rate": 0.02, "ema_decay": 0.7}
SIZES = ("vocab_size", "block_size", "num_layers", "num_heads", "embed_dim", "dropout")
OTHERS = {name: value for name, value in vars(MODERN).items() if name not in SIZES}
RUNS: dict[str, dict[str, Any]] = {
    "small": {},
    # the checkpoint without a validation loss, of step 2, is neither the best nor among the best
    "bigram": BIGRAM | {"steps": 64, "eval_interval": 32, "keep_best": 3, "keep_last": 1},
    "muon, averaged": {"model": OTHERS, "optimizer": MUON},
    "scanned": {"model": {"num_layers": 2, "scan_layers": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "killed_at", "last", "kept"),
    only(
        lambda case: case[:2] == ("bigram", 8),
        [
            ("small", None, 4, [8, 11]),
            ("small", 1, 0, [8, 11]),
            ("small", 2, 1, [8, 11]),
            ("small", 8, 4, [8, 11]),
            ("bigram", 8, 2, [32, 64]),
            ("muon, averaged", None, 4, [8, 11]),
            ("scanned", 8, 4, [8, 11]),
        ],
    ),
)
def test_a_run_that_ended_early_goes_on_as_if_it_had_not(
    run, killed_at, last, kept, trained, small_run, tmp_path, caplog
):
    """Its last checkpoint is of step `last`; a run that is never killed keeps those of `kept`.

    Killed at step 1, it has none yet.
    """
    out = tmp_path / "run"
    config = with_changes(small_run, **RUNS[run], out=str(out))
    other_calls = dataclasses.replace(config, steps_per_call=5)
    whole = trained
    if RUNS[run]:
        whole = fit(dataclasses.replace(config, out=str(tmp_path / "whole")))
    assert RunDirectory(whole.directory).checkpoint_steps() == kept
    out.mkdir()  # killed before, while it made the directory
    faults.leave_all(out, faults.LEFTOVERS_OF_A_START)

    if killed_at is None:
        stop = StopAtCall()
        with pytest.raises(TrainingStopped) as stopped:
            fit(config, resume=True, progress=stop, should_stop=stop.should_stop)
        assert str(stopped.value) == f"stopped after step {last}; its checkpoint is in {out}"
        assert stopped.value.step == last
    else:
        kill = KillAt(killed_at) if last else KillBeforeTheFirstCheckpoint()
        with pytest.raises(Killed):
            fit(config, resume=True, progress=kill)

    saved = RunDirectory(out)
    if last:
        assert saved.checkpoint_steps()[-1] == last
        load(out)
    else:
        assert saved.checkpoint_steps() == []
    assert saved.metrics()[0]["step"] == 0

    faults.leave_all(out)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        resumed = fit(other_calls, resume=True)

    compilations = [line for line in caplog.messages if "XLA compilation of jit(steps)" in line]
    assert len(compilations) == 1
    assert kill_resume.fingerprint(out) == kill_resume.fingerprint(whole.directory)
    assert resumed.sample == whole.sample
    assert resumed.validation_loss == whole.validation_loss
    begun_at = [line["step"] for line in RunDirectory(out).provenance()]
    assert begun_at == [0, last]  # no step twice


ENDLESS = ("--steps", "1000000", "--eval-interval", "1000000", "--sample-tokens", "0")


@pytest.fixture
def begin(poem, tmp_path):
    """Starts the command, and returns when it has taken steps."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "jgpt.cli", "train", "bigram", "--data", poem, "--out", out]
    process = subprocess.Popen(
        [*command, *ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (out / "metrics.jsonl").exists():
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    yield process, out
    with process:
        process.kill()


@pytest.mark.parametrize("presses", [1, 2])
def test_a_signal_finishes_the_call_saves_and_says_so(begin, presses):
    """Pressed twice in a hurry, too."""
    process, out = begin
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 130, complained
    assert "saving a checkpoint after the current steps; a second signal exits without one" in said
    saved = RunDirectory.open(out).checkpoint_steps()[-1]
    assert f"stopped after step {saved}; its checkpoint is in {out}\nresume with: " in said
    assert complained == ""
    assert RunDirectory.open(out).metrics()[-1]["step"] == saved


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(begin):
    process, out = begin
    process.send_signal(signal.SIGSTOP)  # so that both are there before either is acted on
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=120)

    assert process.returncode in (130, 143)
    assert not list((out / "checkpoints").glob("[0-9]*"))


# --- the learning rate ---------------------------------------------------------------------------

RATES = {"learning_rate": 0.4, "min_learning_rate": 0.1, "warmup_steps": 0}
TO_ZERO = RATES | {"min_learning_rate": 0.0}
WSD = TO_ZERO | {"schedule": "wsd", "decay_fraction": 0.4}


@pytest.mark.parametrize(
    ("begun", "given", "checkpoints", "said"),
    [
        (
            (20, RATES),
            (40, RATES),
            [10, 20],
            "40 steps instead of 20: the learning rate jumps from 0.102 to 0.25 at step 21. "
            "Without a jump: `schedule_steps=20` keeps the schedule (0.1 at the last step)",
        ),
        (
            (20, RATES),
            (40, RATES | {"schedule_steps": 20}),
            [10, 20],
            "40 steps instead of 20: the learning rate goes on from 0.102 to 0.1, without a jump",
        ),
        # the run's own config keeps it too
        ((40, RATES | {"schedule_steps": 20}), (40, RATES | {"schedule_steps": 20}), [20], None),
        (
            (40, TO_ZERO),
            (30, TO_ZERO),
            [10],
            "30 steps instead of 40: the learning rate jumps from 0.352 to 0.3 at step 11. "
            "Without a jump: `schedule_steps=40` keeps the schedule (0.0701 at the last step)",
        ),
        (
            (40, TO_ZERO),
            (30, TO_ZERO | {"schedule_steps": 40}),
            [10],
            "30 steps instead of 40: the learning rate goes on from 0.352 to 0.341, without a jump",
        ),
        ((20, RATES), (40, RATES | {"learning_rate": 0.3}), [], None),  # nothing was trained
        # a decay moves to the new end; from a checkpoint of before, afterwards too
        (
            (50, WSD),
            (100, WSD),
            [20],
            "100 steps instead of 50: the learning rate goes on from 0.4 to 0.4, without a jump",
        ),
        (
            (50, WSD),
            (100, WSD),
            [20, 40, 50],
            "100 steps instead of 50: the learning rate jumps from 0.02 to 0.4 at step 51. "
            "Without a jump: delete the checkpoints after 20 to resume from that one",
        ),
        (
            (50, WSD),
            (100, WSD),
            [40, 50],
            "100 steps instead of 50: the learning rate jumps from 0.02 to 0.4 at step 51. "
            "Without a jump: nothing, for the schedule ends at 0; wsd can be extended from a "
            "checkpoint before its decay, which `keep_every` keeps",
        ),
    ],
)
def test_what_resuming_says_of_the_learning_rate(begun, given, checkpoints, said):
    saved, other = (TrainConfig(steps=n, optimizer=OptimizerConfig(**o)) for n, o in (begun, given))
    assert describe_learning_rate(saved, other, checkpoints) == said


def test_a_run_that_diverged_goes_on_with_lower_rates_and_more_steps(
    small_run, tmp_path, monkeypatch
):
    config = with_changes(
        small_run, **BIGRAM, steps=20, eval_interval=10, out=str(tmp_path / "run")
    )
    config = with_changes(config, optimizer={"min_learning_rate": 0.2})
    with monkeypatch.context() as patched:
        patched.setattr(loop.Evaluator, "exact", lambda *_: math.nan)
        with pytest.raises(
            FloatingPointError, match=r"lower `learning_rate`; checkpoint 1 is kept$"
        ):
            fit(config)
    lower = with_changes(
        config, optimizer={"learning_rate": 0.3, "min_learning_rate": 0.1}, steps=30
    )
    progress = Heard()
    fit(lower, resume=True, progress=progress)
    assert progress.messages == [
        "30 steps instead of 20, `learning_rate=0.3` instead of 0.4, `min_learning_rate=0.1` "
        "instead of 0.2: the learning rate goes from 0.4 to 0.299 at step 2"
    ]
    run = RunDirectory.open(tmp_path / "run")
    rates = [line["learning_rate"] for line in run.metrics() if "loss" in line]
    by_hand = [0.2 + 0.1 * math.cos(math.pi * step / 30) for step in range(30)]
    assert rates == pytest.approx([0.4, *by_hand[1:]], rel=1e-5)
    recorded = [line["optimizer"]["learning_rate"] for line in run.provenance()]
    assert recorded == [0.4, 0.3]
    assert run.config().optimizer == lower.optimizer


# --- what a run is resumed with ------------------------------------------------------------------


def test_training_stops_when_a_save_has_failed(small_run, tmp_path, monkeypatch):
    save = Checkpoints.save
    progress = Heard()

    def save_and_see_it_fail(self, *arguments):
        save(self, *arguments)
        concurrent.futures.wait([self._saving])

    monkeypatch.setattr(Manifest, "write", faults.write_on_a_full_disk)
    monkeypatch.setattr(Checkpoints, "save", save_and_see_it_fail)
    config = with_changes(small_run, **RUNS["bigram"], out=str(tmp_path / "run"))

    with pytest.raises(OSError, match="the checkpoint of step 2 could not be written"):
        fit(config, progress=progress)
    assert max(progress.steps) == 2


def test_as_many_steps_as_were_taken_are_done_already(copy, trained):
    again = fit(copy, resume=True)
    assert (again.best_step, again.validation_loss) == (trained.best_step, trained.validation_loss)
    assert RunDirectory(again.directory).metrics() == RunDirectory(trained.directory).metrics()


def test_a_text_may_move_but_not_change(copy, poem, tmp_path):
    text = tmp_path / "text.txt"
    moved = tmp_path / "moved.txt"
    config = with_changes(copy, dataset={"data": (str(text),)})
    run = RunDirectory(Path(copy.out))
    run.write_config(with_changes(run.config(), dataset={"data": (str(text),)}))
    moved.write_text(poem.read_text())
    hint = (
        r"text\.txt.* neither a file nor .*; if the run's text has moved, "
        r"train it with `resume=True` `data=PLACE`"
    )
    with pytest.raises(FileNotFoundError, match=hint):
        evaluate(copy.out)
    elsewhere = with_changes(config, dataset={"data": (str(moved),)}, steps=12)
    fit(elsewhere, resume=True)
    assert run.config().dataset.data == (str(moved),)
    other = dataclasses.replace(elsewhere, dataset=DataConfig(data=("pydocs",)))
    message = r"`data=\('pydocs',\)` has other tokens than .* \(unknown character .*; pydocs is an"
    with pytest.raises(ValueError, match=message):
        fit(other, resume=True)
    moved.write_text(poem.read_text() + "!")
    with pytest.raises(ValueError, match=r"has other tokens than the run .*unknown character '!'"):
        fit(elsewhere, resume=True)
    # nobody knows the text of a run without provenance
    (Path(copy.out) / "provenance.jsonl").unlink()
    text.write_text(poem.read_text()[::-1])
    with pytest.raises(ValueError, match=r"dataset\.data` is .*moved\.txt',\) in the run"):
        fit(dataclasses.replace(config, steps=12), resume=True)
