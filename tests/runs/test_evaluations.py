"""Evaluations within a run: after the state is saved, between signals, of targets that compare."""

import dataclasses
import json
import math
import time
import types
from pathlib import Path
from typing import Any

import pytest

from jgpt import fit
from jgpt.fitting import fit as fit_module
from jgpt.fitting import loop
from jgpt.fitting.evaluate import evaluate
from jgpt.fitting.fit import plan
from jgpt.fitting.stopping import TrainingStopped
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import METRICS, RunDirectory
from jgpt.runs.manifest import Manifest
from jgpt.training import evaluation
from tests.quick import only
from tests.runs.harness import BIGRAM, Heard, kill_resume, with_changes

fingerprint = kill_resume.fingerprint


@pytest.fixture
def quick(small_run, tmp_path):
    """Evaluations after steps 4, 8 and 11."""
    return with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def whole(small_run, tmp_path_factory):
    """The same run, uninterrupted."""
    out = str(tmp_path_factory.mktemp("whole") / "run")
    return fit(with_changes(small_run, **BIGRAM, out=out))


@pytest.fixture
def many_calls(monkeypatch):
    """Each batch of an evaluation is a call of its own."""
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 1)


def lines_of(out: str) -> dict[int, dict[str, Any]]:
    text = (Path(out) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def manifest(out: str, step: int) -> Manifest:
    return Manifest.read(Path(out) / "checkpoints" / str(step))


class Interrupting(Heard):
    """Counts the calls of evaluations, and does something at one of them."""

    def __init__(self, act: Any, at: int) -> None:
        super().__init__()
        self.calls = 0
        self._act = act
        self._at = at
        self.heard: list[Any] = []

    def evaluating(self, done, targets):
        self.calls += 1
        self.heard.append((done, targets))
        if self.calls == self._at:
            self._act()

    def evaluated(self, step, validation_loss):
        self.heard.append(step)


EVALUATED = (4, 8, 11)


def losses_of(out: str) -> dict[int, float | None]:
    return {step: line.get("validation_loss") for step, line in lines_of(out).items()}


def about(word: str, messages: list[str]) -> list[str]:
    return [message for message in messages if word in message]


@pytest.mark.usefixtures("many_calls")
@pytest.mark.parametrize("step", only([11], [4, 11]))
def test_a_signal_ends_an_evaluation_and_whoever_resumes_evaluates_that_step_again(
    quick, whole, step
):
    asked: list[bool] = []
    # each evaluation has six batches
    third_call = 6 * EVALUATED.index(step) + 3
    progress = Interrupting(lambda: asked.append(True), at=third_call)
    again = Interrupting(lambda: None, at=1)

    with pytest.raises(TrainingStopped) as stopped:
        fit(quick, progress=progress, should_stop=lambda: bool(asked))

    assert stopped.value.step == step
    # after two of six batches of 35 targets, not at the end of the evaluation
    assert progress.heard[-1] == (70, 191)
    # nothing is lost: the state and all lines are there, without the loss
    assert max(lines_of(quick.out)) == step
    assert "validation_loss" not in lines_of(quick.out)[step]
    assert manifest(quick.out, step).validation_loss is None

    run = fit(quick, resume=True, progress=again)

    assert again.heard[0] == (0, 191)
    evaluated = [event for event in again.heard if isinstance(event, int)]
    assert evaluated[0] == step
    assert fingerprint(run.directory) == fingerprint(whole.directory)
    assert run.validation_loss == whole.validation_loss
    assert manifest(quick.out, 11).unevaluated is None


class Killed(BaseException):
    pass


def raise_killed(*_: Any, **__: Any) -> None:
    raise Killed


MOMENTS = {
    "in the evaluation": (Heard, "evaluating"),
    "before the metrics": (loop.MetricsLogger, "add_evaluation"),
    "before the manifest": (Checkpoints, "evaluated"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("many_calls")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_that_dies_at_any_moment_of_an_evaluation_loses_nothing(
    quick, whole, monkeypatch, moment
):
    owner, method = MOMENTS[moment]
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, raise_killed, raising=False)
        # an estimate of step 0 has one line, which ends with the next call
        patched.setattr(loop.Training, "_estimate", lambda self: None)
        with pytest.raises(Killed):
            fit(quick, progress=Heard())

    assert RunDirectory.open(quick.out).checkpoint_steps()[-1] == 4
    assert manifest(quick.out, 4).validation_loss is None

    run = fit(quick, resume=True)

    losses = losses_of(quick.out)
    assert list(losses)[-11:] == list(range(1, 12))
    assert losses[4] == losses_of(str(whole.directory))[4]
    assert losses[4] is not None
    assert run.validation_loss == whole.validation_loss
    assert run.best_step == whole.best_step


@pytest.mark.usefixtures("many_calls")
def test_the_state_is_on_disk_while_it_is_evaluated(quick):
    checkpoints = Path(quick.out) / "checkpoints"
    found = []

    def look():
        until = time.monotonic() + 20  # it is saved in the background
        while not (checkpoints / "4").is_dir():
            assert time.monotonic() < until
            time.sleep(0.01)
        found.append(manifest(quick.out, 4))

    fit(quick, progress=Interrupting(look, at=2))

    (meanwhile,) = found
    assert meanwhile.validation_loss is None
    assert meanwhile.unevaluated is not None
    assert meanwhile.unevaluated["step"] == 4
    losses = losses_of(quick.out)
    steps = RunDirectory(Path(quick.out)).checkpoint_steps()
    assert steps
    for step in steps:
        afterwards = manifest(quick.out, step)
        assert afterwards.validation_loss == losses[step]
        assert afterwards.unevaluated is None


def test_metrics_are_on_disk_before_the_checkpoint_that_needs_them(quick, monkeypatch):
    """After a power cut a run goes on from any checkpoint with the metrics of all steps before."""
    durable: dict[int, dict[str, Any]] = {}
    saved = []
    evaluated = []
    append = RunDirectory.append
    save = Checkpoints.save
    add_loss = Checkpoints.evaluated

    def append_and_note(self, name, lines, **options):
        append(self, name, lines, **options)
        if name == METRICS and options.get("durable"):
            durable.update(lines_of(quick.out))

    def note_and_save(self, state, loss, **options):
        newest = max(durable, default=None)
        saved.append((int(state.step), newest))
        save(self, state, loss, **options)

    def note_and_add_loss(self, step, loss):
        line = durable.get(step, {})
        evaluated.append((step, line.get("validation_loss") == loss))
        add_loss(self, step, loss)

    monkeypatch.setattr(RunDirectory, "append", append_and_note)
    monkeypatch.setattr(Checkpoints, "save", note_and_save)
    monkeypatch.setattr(Checkpoints, "evaluated", note_and_add_loss)
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_SAVES", 1e9)  # the steps that are saved are fixed

    fit(quick)

    # the line of a step that is evaluated next is in its checkpoint
    assert saved == [(1, 1), (4, 3), (8, 7), (11, 10)]
    assert evaluated == [(4, True), (8, True), (11, True)]


def test_a_run_places_its_evaluation_windows_once(quick, monkeypatch):
    made = []

    class Counted(evaluation.Evaluator):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(loop, "Evaluator", Counted)
    fit(with_changes(quick, steps=4, eval_interval=2))

    assert len(made) == 1


def test_a_manifest_from_before_evaluations_were_interrupted_is_read(trained):
    path = trained.directory / "checkpoints" / "11" / "manifest.json"
    values = json.loads(path.read_text())
    del values["sha256"]
    del values["unevaluated"]

    read = Manifest(**values)

    assert read.unevaluated is None


def test_other_eval_tokens_are_said_and_the_best_is_of_losses_that_compare(quick, monkeypatch):
    """The losses after steps 4 and 8 are lower than all later ones, of other targets."""
    losses = iter([2.0, 1.9, 2.5, 2.2, 2.3, 2.4])
    monkeypatch.setattr(loop.Evaluator, "exact", lambda *_: next(losses))
    config = with_changes(quick, eval_tokens=50, steps=8)
    longer = dataclasses.replace(config, eval_tokens=None, steps=99, patience=2)
    automatic = dataclasses.replace(longer, eval_tokens="auto")
    progress = Heard()

    shorter_run = fit(config)
    planned = plan(longer, resume=True, progress=progress)
    planned_automatically = plan(automatic, resume=True)

    assert shorter_run.best_step == 8
    assert planned.evaluations.comparable_after == 8
    assert about("eval_tokens", progress.messages) == [
        "`eval_tokens=None` instead of 50: validation losses up to step 8 are over 49 tokens, the "
        "first of 191, later ones over all 191 tokens, and can't be compared with them. The best "
        "checkpoint and patience go by the later ones"
    ]
    # `auto` keeps the recorded targets only where it chose them itself
    assert planned_automatically.evaluations.targets == 191

    run = fit(longer, resume=True, progress=progress)

    assert run.best_step == 16
    assert run.validation_loss == 2.2
    # two evaluations after the best of them; two after the best of all would be at 16
    assert max(lines_of(quick.out)) == 24

    # resumed again, there is nothing new to say
    quiet = Heard()
    planned_again = plan(longer, resume=True, progress=quiet)
    assert about("eval_tokens", quiet.messages) == []
    assert planned_again.evaluations.comparable_after == 8


@pytest.mark.parametrize(("losses", "best_step"), [((2.0, 1.9), 8), ((1.9, 2.0), 4)])
def test_a_run_without_a_step_on_its_new_targets_has_a_loss_over_its_old_ones(
    quick, monkeypatch, losses, best_step
):
    """Losses up to step 8 are over all targets, whichever of them is the best."""
    each_loss = iter(losses)
    monkeypatch.setattr(loop.Evaluator, "exact", lambda *_: next(each_loss))
    config = with_changes(quick, eval_tokens=None, steps=8)
    fit(config)

    again = fit(dataclasses.replace(config, eval_tokens=50), resume=True)

    assert again.evaluations.comparable_after == 8
    assert again.best_step == best_step
    assert again.evaluations.targets == 191
    assert again.evaluations.over == ""


def test_a_state_whose_loss_is_unknown_takes_the_place_of_no_good_checkpoint(quick, monkeypatch):
    losses = iter([2.0, 2.5, math.nan])  # after steps 4, 8 and 11
    monkeypatch.setattr(loop.Evaluator, "exact", lambda *_: next(losses))

    with pytest.raises(FloatingPointError, match="checkpoint 8 is kept"):
        fit(with_changes(quick, keep_best=1, keep_last=1))

    assert RunDirectory.open(quick.out).checkpoint_steps() == [4, 8]


def test_the_targets_of_auto_stay_when_a_run_is_trained_further(quick, monkeypatch):
    """Eight steps allow a window, twenty-four would allow three."""
    monkeypatch.setattr(evaluation, "SMALL_SPLIT", 10)
    longer = with_changes(quick, steps=80, eval_interval=20)
    longer_from_the_start = dataclasses.replace(longer, out=str(Path(quick.out) / "x"))
    progress = Heard()

    run = fit(with_changes(quick, steps=8, eval_interval=4))
    resumed = fit(longer, resume=True, progress=progress)

    assert run.evaluations.targets == 21
    assert run.evaluations.spread
    assert run.evaluations.over == " over 21 of 191 tokens"
    assert resumed.evaluations.targets == 21
    assert about("eval_tokens", progress.messages) == []
    # the control
    assert plan(longer_from_the_start).evaluations.targets > 21


def test_the_last_evaluation_is_exact_where_that_fits(quick, monkeypatch):
    monkeypatch.setattr(evaluation, "SMALL_SPLIT", 10)
    heard: list[tuple[str, int, float]] = []

    class Exactly(Heard):
        def evaluated(self, step, validation_loss):
            heard.append(("part", step, validation_loss))

        def evaluated_exactly(self, step, validation_loss):
            heard.append(("all", step, validation_loss))

    config = with_changes(quick, steps=80, eval_interval=8)

    run = fit(config, progress=Exactly())
    exact = evaluate(run.directory, which="last")

    assert run.evaluations.exact_last
    assert exact.tokens == 191
    *_, of_part, of_all = heard
    assert of_part[:2] == ("part", 80)
    assert of_all == ("all", 80, exact.loss)
    assert of_part[2] != exact.loss
    lines = lines_of(quick.out)
    with_exact_losses = [step for step, line in lines.items() if "exact_validation_loss" in line]
    assert with_exact_losses == [80]
    assert lines[80]["exact_validation_loss"] == exact.loss
    assert manifest(quick.out, 80).validation_loss == of_part[2]


@pytest.mark.parametrize(("seconds", "saved"), [(0.1, [3, 6, 9]), (0.5, [5, 10]), (2.0, [])])
def test_until_the_first_evaluation_a_checkpoint_is_half_a_minute_old_at_most(
    quick, monkeypatch, seconds, saved
):
    """Steps take ten seconds. Saving takes 0.1, or more than a hundredth of the time."""
    now = [1000.0]
    saves = []
    make_steps = fit_module.make_train_steps

    def make_slow_steps(config):
        steps = make_steps(config)

        def run(state, windows, key, count, first):
            now[0] += 10 * count
            return steps(state, windows, key, count, first)

        return run

    def save(self, state, loss, **_):
        saves.append(int(state.step))

    def should_stop():
        return now[0] >= 1110

    clock = types.SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_SAVES", 30.0)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(fit_module, "make_train_steps", make_slow_steps)
    monkeypatch.setattr(Checkpoints, "seconds", lambda self: seconds)
    monkeypatch.setattr(loop.Training, "_estimate", lambda self: None)
    monkeypatch.setattr(Checkpoints, "save", save)
    config = dataclasses.replace(quick, steps=99, eval_interval=50, steps_per_call=1)

    with pytest.raises(TrainingStopped):
        fit(config, should_stop=should_stop)

    assert saves == [*saved, 11]


def test_a_call_reads_the_windows_of_its_steps_alone(quick, monkeypatch):
    """Progress that wants to hear of each step reads no more than its own windows."""

    class EachStep(Heard):
        most_steps = 1

    read = []
    taken = []
    make_steps = fit_module.make_train_steps
    batches = loop.batches

    def make_noted_steps(config):
        steps = make_steps(config)

        def run(state, windows, key, count, first):
            if count:
                taken.append(count)
            return steps(state, windows, key, count, first)

        return run

    def read_batches(*arguments, **options):
        read.append(options["count"])
        return batches(*arguments, **options)

    monkeypatch.setattr(fit_module, "make_train_steps", make_noted_steps)
    monkeypatch.setattr(loop, "batches", read_batches)

    fit(quick, progress=EachStep())

    assert taken == [1] * 11
    assert read == [1] * 11


class Unread:
    """A metric of steps that are still under way; converting it waits for them."""

    def __init__(self, events: list[Any], step: int, array: Any) -> None:
        self._events = events
        self._step = step
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.block_until_ready()
        return self._array.__array__(dtype)

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        if self._events[-1] != ("waited", self._step):
            self._events.append(("waited", self._step))


def test_the_next_call_is_dispatched_before_the_metrics_of_the_last_one_are_waited_for(
    quick, monkeypatch
):
    events: list[Any] = []
    make_steps = fit_module.make_train_steps

    def make_unread_steps(config):
        steps = make_steps(config)

        def run(state, windows, key, count, first):
            state, metrics = steps(state, windows, key, count, first)
            last = first + count
            if count:
                events.append(("dispatched", last))
            unread = types.SimpleNamespace(
                loss=Unread(events, last, metrics.loss),
                gradient_norm=Unread(events, last, metrics.gradient_norm),
                learning_rate=Unread(events, last, metrics.learning_rate),
                extra=None,
            )
            return state, unread

        return run

    monkeypatch.setattr(fit_module, "make_train_steps", make_unread_steps)
    monkeypatch.setattr(loop.Training, "_estimate", lambda self: None)

    fit(with_changes(quick, steps=6, eval_interval=6, steps_per_call=2))

    waited = [step for what, step in events if what == "waited"]
    assert len(waited) >= 3
    for step in waited[:-1]:  # the evaluation waits for the last one
        before = events[: events.index(("waited", step))]
        assert any(what == "dispatched" and other > step for what, other in before)
