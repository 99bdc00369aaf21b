"""Evaluations within a run: after the state is saved, between signals, of targets that compare."""

import dataclasses
import json
import math
import time
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


@pytest.mark.usefixtures("many_calls")
@pytest.mark.parametrize("step", only([11], [4, 11]))
def test_a_signal_ends_an_evaluation_and_whoever_resumes_evaluates_that_step_again(
    quick, whole, step
):
    asked: list[bool] = []
    progress = Interrupting(lambda: asked.append(True), at=6 * [4, 8, 11].index(step) + 3)
    with pytest.raises(TrainingStopped) as stopped:
        fit(quick, progress=progress, should_stop=lambda: bool(asked))
    # after two of six batches of 35 targets, not at the end of the evaluation
    assert (stopped.value.step, progress.heard[-1]) == (step, (70, 191))
    # nothing is lost: the state and all lines are there, without the loss
    assert [*lines_of(quick.out)][-1] == step
    assert "validation_loss" not in lines_of(quick.out)[step]
    assert manifest(quick.out, step).validation_loss is None
    again = Interrupting(lambda: None, at=1)
    run = fit(quick, resume=True, progress=again)
    assert again.heard[0] == (0, 191)
    assert next(heard for heard in again.heard if isinstance(heard, int)) == step
    assert fingerprint(run.directory) == fingerprint(whole.directory)
    assert run.validation_loss == whole.validation_loss
    assert manifest(quick.out, 11).unevaluated is None


class Killed(BaseException):
    pass


def die() -> None:
    raise Killed


@pytest.mark.slow
@pytest.mark.usefixtures("many_calls")
def test_a_process_that_dies_at_any_moment_of_an_evaluation_loses_nothing(
    quick, whole, tmp_path, monkeypatch
):
    def raise_killed(*_: Any, **__: Any) -> None:
        raise Killed

    def before_the_metrics(patched):
        patched.setattr(loop.MetricsLogger, "add_evaluation", raise_killed)

    def before_the_manifest(patched):
        patched.setattr(Checkpoints, "evaluated", raise_killed)

    def in_the_evaluation(patched):
        patched.setattr(Heard, "evaluating", lambda *_: die(), raising=False)

    for moment in (in_the_evaluation, before_the_metrics, before_the_manifest):
        out = str(tmp_path / moment.__name__)
        config = dataclasses.replace(quick, out=out)
        with monkeypatch.context() as patched:
            moment(patched)
            # an estimate of step 0 has one line, which ends with the next call
            patched.setattr(loop.Training, "_estimate", lambda self: None)
            with pytest.raises(Killed):
                fit(config, progress=Heard())
        assert RunDirectory.open(out).checkpoint_steps()[-1] == 4, moment
        assert manifest(out, 4).validation_loss is None
        run = fit(config, resume=True)
        steps = lines_of(out)
        assert [*steps][-11:] == list(range(1, 12))
        assert steps[4]["validation_loss"] == lines_of(str(whole.directory))[4]["validation_loss"]
        assert run.validation_loss == whole.validation_loss
        assert run.best_step == whole.best_step


@pytest.mark.usefixtures("many_calls")
def test_the_state_is_on_disk_while_it_is_evaluated(quick):
    found = []

    def look():
        until = time.monotonic() + 20  # it is saved in the background
        while not (Path(quick.out) / "checkpoints" / "4").is_dir():
            assert time.monotonic() < until
            time.sleep(0.01)
        found.append(manifest(quick.out, 4))

    fit(quick, progress=Interrupting(look, at=2))
    assert found[0].validation_loss is None
    assert found[0].unevaluated is not None
    assert found[0].unevaluated["step"] == 4
    losses = {step: line.get("validation_loss") for step, line in lines_of(quick.out).items()}
    with Checkpoints(RunDirectory(Path(quick.out)), read_only=True) as checkpoints:
        for step in checkpoints.steps():
            assert manifest(quick.out, step).validation_loss == losses[step]
            assert manifest(quick.out, step).unevaluated is None


def test_metrics_are_on_disk_before_the_checkpoint_that_needs_them(quick, monkeypatch):
    """After a power cut a run goes on from any checkpoint with the metrics of all steps before."""
    durable: dict[int, dict[str, Any]] = {}
    saved = []
    evaluated = []
    append = RunDirectory.append
    save = Checkpoints.save
    add_loss = Checkpoints.evaluated

    def appended(self, name, lines, **options):
        append(self, name, lines, **options)
        if name == METRICS and options.get("durable"):
            durable.update(lines_of(quick.out))

    def saving(self, state, loss, **options):
        saved.append((int(state.step), max(durable, default=None)))
        save(self, state, loss, **options)

    def evaluated_with(self, step, loss):
        evaluated.append((step, durable.get(step, {}).get("validation_loss") == loss))
        add_loss(self, step, loss)

    monkeypatch.setattr(RunDirectory, "append", appended)
    monkeypatch.setattr(Checkpoints, "save", saving)
    monkeypatch.setattr(Checkpoints, "evaluated", evaluated_with)
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
    path = trained.directory / "checkpoints" / "11"
    text = json.loads((path / "manifest.json").read_text())
    del text["sha256"], text["unevaluated"]

    assert Manifest(**text).unevaluated is None


def test_other_eval_tokens_are_said_and_the_best_is_of_losses_that_compare(quick, monkeypatch):
    """The losses after steps 4 and 8 are lower than all later ones, of other targets."""
    losses = iter([2.0, 1.9, 2.5, 2.2, 2.3, 2.4])
    monkeypatch.setattr(loop.Evaluator, "exact", lambda *_: next(losses))
    config = with_changes(quick, eval_tokens=50, steps=8)
    assert fit(config).best_step == 8
    progress = Heard()
    longer = dataclasses.replace(config, eval_tokens=None, steps=99, patience=2)
    assert plan(longer, resume=True, progress=progress).evaluations.comparable_after == 8
    (warning,) = (message for message in progress.messages if "eval_tokens" in message)
    assert warning == (
        "eval_tokens=None instead of 50: validation losses up to step 8 are over 49 tokens, the "
        "first of 191, later ones over all 191 tokens, and can't be compared with them. The best "
        "checkpoint and patience go by the later ones"
    )
    # `auto` keeps the recorded targets only where it chose them itself
    automatic = dataclasses.replace(longer, eval_tokens="auto")
    assert plan(automatic, resume=True).evaluations.targets == 191
    run = fit(longer, resume=True, progress=progress)
    assert (run.best_step, run.validation_loss) == (16, 2.2)
    # two evaluations after the best of them; two after the best of all would be at 16
    assert max(lines_of(quick.out)) == 24
    # resumed again, there is nothing new to say
    quiet = Heard()
    plan(longer, resume=True, progress=quiet)
    assert not [message for message in quiet.messages if "eval_tokens" in message]
    assert plan(longer, resume=True).evaluations.comparable_after == 8


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
    run = fit(with_changes(quick, steps=8, eval_interval=4))
    assert (run.evaluations.targets, run.evaluations.spread) == (21, True)
    assert run.evaluations.over == " over 21 of 191 tokens"
    longer = with_changes(quick, steps=80, eval_interval=20)
    assert (
        plan(dataclasses.replace(longer, out=str(Path(quick.out) / "x"))).evaluations.targets > 21
    )
    progress = Heard()
    again = fit(longer, resume=True, progress=progress)
    assert again.evaluations.targets == 21
    assert not [message for message in progress.messages if "eval_tokens" in message]


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
    assert run.evaluations.exact_last
    assert [(what, step) for what, step, _ in heard[-2:]] == [("part", 80), ("all", 80)]
    exact = evaluate(run.directory, which="last")
    assert exact.tokens == 191
    assert heard[-1][2] == exact.loss != heard[-2][2]
    assert lines_of(quick.out)[80]["exact_validation_loss"] == exact.loss
    assert [step for step, line in lines_of(quick.out).items() if "exact_validation_loss" in line]
    assert manifest(quick.out, 80).validation_loss == heard[-2][2]


@pytest.mark.parametrize(("seconds", "saved"), [(0.1, [3, 6, 9]), (0.5, [5, 10]), (2.0, [])])
def test_until_the_first_evaluation_a_checkpoint_is_half_a_minute_old_at_most(
    quick, monkeypatch, seconds, saved
):
    """Steps take ten seconds. Saving takes 0.1, or more than a hundredth of the time."""
    now = [1000.0]
    saves = []
    make = fit_module.make_train_steps

    def make_slow(config):
        steps = make(config)

        def run(*arguments):
            now[0] += 10 * arguments[3]
            return steps(*arguments)

        return run

    def save(self, state, loss, **_):
        saves.append(int(state.step))

    clock = type("Clock", (), {"monotonic": lambda: now[0], "perf_counter": time.perf_counter})
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_SAVES", 30.0)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(fit_module, "make_train_steps", make_slow)
    monkeypatch.setattr(Checkpoints, "seconds", lambda self: seconds)
    monkeypatch.setattr(loop.Training, "_estimate", lambda self: None)
    monkeypatch.setattr(Checkpoints, "save", save)
    stop = lambda: now[0] >= 1110  # noqa: E731
    config = dataclasses.replace(quick, steps=99, eval_interval=50, steps_per_call=1)

    with pytest.raises(TrainingStopped):
        fit(config, should_stop=stop)
    assert saves == [*saved, 11]


def test_a_call_reads_the_windows_of_its_steps_alone(quick, monkeypatch):
    """Progress that wants to hear of each step reads no more than its own windows."""

    class Each(Heard):
        most_steps = 1

    read = []
    taken = []
    make = fit_module.make_train_steps
    batches = loop.batches

    def recorded(config):
        steps = make(config)

        def run(*arguments):
            if arguments[3]:
                taken.append(arguments[3])
            return steps(*arguments)

        return run

    def reading(*arguments, **options):
        read.append(options["count"])
        return batches(*arguments, **options)

    monkeypatch.setattr(fit_module, "make_train_steps", recorded)
    monkeypatch.setattr(loop, "batches", reading)
    fit(quick, progress=Each())

    assert taken == read == [1] * 11


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
    make = fit_module.make_train_steps

    def recorded(config):
        steps = make(config)

        def run(state, windows, key, count, first):
            state, metrics = steps(state, windows, key, count, first)
            if count:
                events.append(("dispatched", first + count))
            names = ("loss", "gradient_norm", "learning_rate")
            unread = {name: Unread(events, first + count, getattr(metrics, name)) for name in names}
            return state, type("Metrics", (), {**unread, "extra": None})

        return run

    monkeypatch.setattr(fit_module, "make_train_steps", recorded)
    monkeypatch.setattr(loop.Training, "_estimate", lambda self: None)
    fit(with_changes(quick, steps=6, eval_interval=6, steps_per_call=2))
    waited = [event for event in events if event[0] == "waited"]
    assert len(waited) >= 3
    for event in waited[:-1]:  # the evaluation waits for the last one
        dispatched = [step for what, step in events[: events.index(event)] if what == "dispatched"]
        assert dispatched[-1] > event[1]
