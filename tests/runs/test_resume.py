"""Killed, stopped or preempted: the run that goes on is the run that never stopped."""

import dataclasses
import logging
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jgpt import DataConfig, OptimizerConfig, TrainConfig, evaluate, fit, load
from jgpt.fields import to_json
from jgpt.runs import checkpoints
from jgpt.runs import fit as fit_module
from jgpt.runs.directory import RunDirectory
from jgpt.runs.fit import TrainingStopped
from jgpt.runs.progress import Progress
from jgpt.runs.resume import describe_learning_rate, require_same_run
from tests.models import config_of
from tests.quick import only
from tests.runs import faults
from tests.runs.harness import BIGRAM, Heard, kill_resume, path_of, stopping, with_changes


@pytest.mark.slow
def test_a_killed_process_loses_nothing(poem, tmp_path):
    """A shorter benchmarks/kill_resume.py: SIGKILL inside a save, and at a random moment."""
    train = f"train bigram --data {poem} --steps 60 --steps-per-call 4 --eval-interval 15"
    setting = kill_resume.Setting(
        f"{train} --eval-tokens 200 --sample-tokens 0",
        range(15, 61, 15),
        (kill_resume.Layout(),),
        x64=False,
    )

    result = kill_resume.kill_and_resume(tmp_path, kills=2, seed=6, setting=setting)

    assert result["kills"] == 2
    assert result["in_a_save"] > 0
    assert (result["lost"], result["differing"]) == (0, 0)


class Killed(BaseException):
    """What ends a run from outside."""


class KillAt(Progress):
    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, step, loss, tokens_per_second):
        if step >= self.step:
            raise Killed

    def evaluated(self, step, validation_loss):
        if step >= self.step:
            raise Killed


MODERN = config_of("modern", num_kv_heads=1, attention_scale=0.5)
MUON = {"optimizer": "muon", "schedule": "wsd", "embedding_learning_rate": 0.02, "ema_decay": 0.7}
SIZES = ("vocab_size", "block_size", "num_layers", "num_heads", "embed_dim", "dropout")
OTHERS = {name: value for name, value in vars(MODERN).items() if name not in SIZES}
RUNS: dict[str, dict[str, Any]] = {
    "small": {},
    "bigram": BIGRAM | {"steps": 64, "eval_interval": 32, "keep_best": 3, "keep_last": 1},
    "muon, averaged": {"model": OTHERS, "optimizer": MUON},
    "scanned": {"model": {"num_layers": 2, "scan_layers": True}},
}


@pytest.mark.parametrize(
    ("run", "killed_at", "last", "kept"),
    only(
        lambda case: case[:2] == ("bigram", 8),
        [
            ("small", None, 4, [8, 11]),
            ("bigram", 8, 4, [4, 32, 64]),
            ("muon, averaged", None, 4, [8, 11]),
            ("scanned", 7, 4, [8, 11]),
        ],
    ),
)
def test_a_run_that_ended_early_goes_on_as_if_it_had_not(
    run, killed_at, last, kept, trained, small_run, tmp_path, caplog
):
    """Its last checkpoint is of step `last`; a run that is never killed keeps those of `kept`."""
    out = tmp_path / "run"
    config = with_changes(small_run, **RUNS[run], out=str(out))
    other_calls = dataclasses.replace(config, steps_per_call=5)
    whole = trained
    if RUNS[run]:
        whole = fit(dataclasses.replace(config, out=str(tmp_path / "whole")))
    assert RunDirectory(path_of(whole)).checkpoint_steps() == kept
    out.mkdir()  # killed before, while it made the directory
    faults.leave_all(out, faults.LEFTOVERS_OF_A_START)

    if killed_at is None:
        with pytest.raises(TrainingStopped) as stopped:
            fit(config, resume=True, should_stop=stopping(out))
        assert str(stopped.value) == f"stopped after step {last}; its checkpoint is in {out}"
    else:
        with pytest.raises(Killed):
            fit(config, resume=True, progress=KillAt(killed_at))
    assert max(RunDirectory(out).checkpoint_steps(), default=0) == last
    if last:
        load(out)

    faults.leave_all(out)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        resumed = fit(other_calls, resume=True)

    compilations = [line for line in caplog.messages if "XLA compilation of jit(steps)" in line]
    assert len(compilations) == 1
    assert kill_resume.fingerprint(out) == kill_resume.fingerprint(path_of(whole))
    assert (out / "samples.txt").read_text() == (path_of(whole) / "samples.txt").read_text()
    assert resumed.validation_loss == whole.validation_loss
    begun_at = [line["step"] for line in RunDirectory(out).provenance()]
    assert begun_at == ([0, last] if last else [0])


@pytest.fixture
def begin(poem, tmp_path):
    """Starts the command, and returns when it has taken steps."""
    out = tmp_path / "run"
    endless = ("--steps", "1000000", "--eval-interval", "1000000", "--sample-tokens", "0")
    command = [sys.executable, "-m", "jgpt", "train", "bigram", "--data", poem, "--out", out]
    process = subprocess.Popen(
        [*command, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (out / "metrics.jsonl").exists():
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    yield process, out
    with process:
        process.kill()


@pytest.mark.parametrize("presses", only([2], [1, 2]))
def test_a_signal_finishes_the_call_saves_and_says_so(begin, presses):
    """Pressed twice in a hurry, too."""
    process, out = begin
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 130, complained
    assert "stopping, and saving what is done; a second signal exits at once" in said
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


# --- what a run is resumed with ------------------------------------------------------------------

OPTIMIZER = OptimizerConfig(learning_rate=2e-3, muon_learning_rate=0.02, weight_decay=0.2)
BEGUN = TrainConfig(optimizer=dataclasses.replace(OPTIMIZER, embedding_learning_rate=0.02))
FREE = {"steps": 9, "eval_interval": 3, "steps_per_call": 2, "sample_tokens": 1, "patience": 3}
PLACE = {"out": "x", "name": "y", "mesh": "data=2", "micro_batches": 4, "trackers": ("wandb",)}


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize(
    ("part", "changes", "refused", "of_the_state"),
    [
        ("", {"seed": 8}, True, False),
        ("", {"batch_size": 3}, True, False),
        ("", {"eval_tokens": 500}, True, False),
        ("", FREE, False, False),
        ("", PLACE, False, False),
        ("", {"keep_best": 3, "keep_last": 5, "keep_every": 7}, False, False),
        ("dataset", {"data_field": "body"}, True, False),
        ("dataset", {"data": ("moved.txt",)}, False, False),
        ("model", {"embed_dim": 256}, True, True),
        ("model", {"dtype": "bfloat16"}, True, True),
        ("model", {"attention_kernel": "xla"}, False, False),
        ("model", {"activation_dtype": "float32"}, False, False),
        ("optimizer", {"schedule_steps": 70}, False, False),
        ("optimizer", {"optimizer": "muon"}, True, True),
        ("optimizer", {"gradient_clip": 0.0}, True, True),
        ("optimizer", {"ema_decay": 0.7}, True, True),
        ("optimizer", {"trainable": ("blocks.*",)}, True, True),
        ("optimizer", {"embedding_learning_rate": None}, True, True),
        ("optimizer", {"embedding_learning_rate": 0.03}, True, True),
        ("optimizer", {"embedding_learning_rate": 0.01}, False, False),
        ("optimizer", {"learning_rate": 1.5e-3}, False, False),
        ("optimizer", {"learning_rate": 2.5e-3}, True, False),
        ("optimizer", {"min_learning_rate": 0.0}, True, False),
        ("optimizer", {"learning_rate": 1e-3, "min_learning_rate": 0.0}, False, False),
        ("optimizer", {"muon_learning_rate": 0.01}, False, False),
        ("optimizer", {"muon_learning_rate": 0.03}, True, False),
        ("optimizer", {"weight_decay": 0.1}, True, False),
        ("optimizer", {"warmup_steps": 7}, True, False),
    ],
    ids=str,
)
def test_what_a_run_goes_on_with(part, changes, refused, of_the_state, imported):
    """An imported run, with what its state was made with: arrays that it has, or lacks."""
    field = next(iter(changes))
    config = with_changes(BEGUN, **({part: changes} if part else changes))
    if part:
        field = f"{part}.{field}"
    checkpoints_of_run = [0, 1]
    if imported:
        checkpoints_of_run = [0]
        refused = of_the_state

    if not refused:
        require_same_run(BEGUN, config, checkpoints_of_run)
        return
    with pytest.raises(ValueError, match=f"run to resume: `{field}` is .* in the run, .* in the"):
        require_same_run(BEGUN, config, checkpoints_of_run)


def test_all_that_differs_is_named_and_a_rate_may_not_come_where_none_was():
    other = with_changes(BEGUN, seed=8, model={"embed_dim": 256})
    with_rate = dataclasses.replace(OPTIMIZER, embedding_learning_rate=1e-5)

    with pytest.raises(ValueError, match=r"`model\.embed_dim` is 128 in .*, 256 in .*; `seed`"):
        require_same_run(BEGUN, other, [1])
    with pytest.raises(ValueError, match=r"optimizer\.embedding_learning_rate` is None in the run"):
        require_same_run(TrainConfig(optimizer=OPTIMIZER), TrainConfig(optimizer=with_rate), [1])


def test_as_many_steps_as_were_taken_are_done_already_and_fewer_are_refused(copy, trained):
    lines = RunDirectory(Path(copy.out)).metrics()

    again = fit(copy, resume=True)

    assert again.validation_loss == trained.validation_loss
    assert RunDirectory(Path(copy.out)).metrics() == lines
    with pytest.raises(ValueError, match=r"`steps=10` is below the 11 steps that .* has"):
        fit(dataclasses.replace(copy, steps=10), resume=True)


def test_a_text_may_move_but_not_change(copy, poem, tmp_path):
    text = tmp_path / "text.txt"
    moved = tmp_path / "moved.txt"
    run = RunDirectory(Path(copy.out))
    config = with_changes(run.config(), dataset={"data": (str(text),)}, out=copy.out)
    (run.path / "config.json").write_text(to_json(config))
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
    with pytest.raises(ValueError, match=r"`data=\('pydocs',\)` has other tokens than"):
        fit(other, resume=True)
    moved.write_text(poem.read_text() + "!")
    with pytest.raises(ValueError, match=r"has other tokens than the run .*unknown character '!'"):
        fit(elsewhere, resume=True)


def test_training_stops_when_a_save_has_failed(small_run, tmp_path, monkeypatch):
    """At the next request, and not at the next save."""
    save = checkpoints.Checkpoints.save

    def save_and_see_it_fail(self, *arguments):
        save(self, *arguments)
        until = time.monotonic() + 60
        while not self.has_failed():
            assert time.monotonic() < until

    monkeypatch.setattr(checkpoints, "sync_below", faults.full_disk)
    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_see_it_fail)
    config = with_changes(small_run, **RUNS["bigram"], out=str(tmp_path / "run"))
    progress = Heard()

    with pytest.raises(OSError, match="the checkpoint of step 4 could not be written"):
        fit(config, progress=progress)
    assert max(progress.steps) == 4


# --- the learning rate ---------------------------------------------------------------------------

RATES = {"learning_rate": 0.4, "min_learning_rate": 0.1, "warmup_steps": 0}
WSD = RATES | {"min_learning_rate": 0.0, "schedule": "wsd", "decay_fraction": 0.4}


@pytest.mark.parametrize(
    ("begun", "given", "done", "said"),
    [
        (
            (20, RATES),
            (40, RATES),
            20,
            "40 steps instead of 20: the learning rate jumps from 0.102 to 0.25 at step 21; "
            "`schedule_steps=20` keeps the schedule",
        ),
        ((20, RATES), (40, RATES), 0, None),  # nothing was trained
        ((50, WSD), (100, WSD), 20, None),  # a decay moves to the new end
    ],
)
def test_what_resuming_says_of_the_learning_rate(begun, given, done, said):
    saved, other = (TrainConfig(steps=n, optimizer=OptimizerConfig(**o)) for n, o in (begun, given))
    assert describe_learning_rate(saved, other, done) == said


def test_a_run_that_diverged_goes_on_with_a_lower_rate(small_run, tmp_path, monkeypatch):
    """Its floor is lowered by the same factor."""
    config = with_changes(small_run, **BIGRAM, steps=20, eval_interval=8, out=str(tmp_path / "run"))
    config = with_changes(config, optimizer={"min_learning_rate": 0.2})
    losses = iter([2.0, math.nan, math.nan])
    with monkeypatch.context() as patched:
        patched.setattr(fit_module.Evaluator, "mean", lambda *_: next(losses))
        with pytest.raises(FloatingPointError) as error:
            fit(config)
    assert re.search(r"lower `learning_rate`; checkpoint 1 is kept$", str(error.value))
    progress = Heard()

    fit(with_changes(config, optimizer={"learning_rate": 0.3}), resume=True, progress=progress)

    assert progress.messages == []
    run = RunDirectory.open(tmp_path / "run")
    rates = [line["learning_rate"] for line in run.metrics()]
    by_hand = [0.225 + 0.075 * math.cos(math.pi * step / 20) for step in range(20)]
    assert rates == pytest.approx([0.4, *by_hand[1:]], rel=1e-5)
    recorded = [line["optimizer"]["learning_rate"] for line in run.provenance()]
    assert recorded == [0.4, 0.3]
    assert run.config().optimizer.min_learning_rate == pytest.approx(0.15)
