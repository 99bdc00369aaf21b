"""Evaluations: of how many targets, which ones, and in calls whose number changes no bit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jgpt import ModelConfig, TrainConfig
from jgpt.data.batches import evaluation_windows
from jgpt.training import evaluation
from jgpt.training.evaluation import Evaluator, plan_evaluations
from jgpt.training.state import init_state
from jgpt.training.step import make_eval_step

# 4,096 tokens a step, and so 12,288 times a forward pass over a token
LARGE = TrainConfig(model=ModelConfig(block_size=256), batch_size=16, steps=60, eval_interval=30)
TOKENS = np.random.default_rng(3).integers(0, 11, 400).astype(np.uint16)
SMALL = TrainConfig(
    model=ModelConfig(architecture="bigram", vocab_size=11, block_size=6),
    batch_size=4,
    steps=20,
    eval_interval=10,
    eval_tokens=None,
)


@pytest.mark.parametrize(
    ("changes", "split", "targets", "spread", "exact_last"),
    [
        # the budget is 60 * 12,288 // 19 = 38,804; half of it is 75 windows and a part
        ({}, 11_801_144, 75 * 256, True, False),
        ({"eval_interval": 31}, 11_801_144, 75 * 256, True, False),
        ({"eval_interval": 60}, 11_801_144, 151 * 256, True, False),
        ({}, 131_072, 131_072, False, False),
        ({}, 131_073, 75 * 256, True, False),
        # 3,880,421: less than 60 times the split, but more than twice
        ({"steps": 6000, "eval_interval": 100}, 200_000, 239 * 256, True, True),
        ({"steps": 6000, "eval_interval": 100}, 1_940_211, 252 * 256, True, False),
        ({"steps": 6000, "eval_interval": 3000}, 1_940_210, 1_940_210, False, False),
        # two windows, and not even one
        ({"eval_interval": 1}, 150_000, 2 * 256, True, False),
        ({"steps": 2, "eval_interval": 1, "batch_size": 1}, 150_000, 256, True, False),
        # what is given is done
        ({"eval_tokens": None}, 11_801_144, 11_801_144, False, False),
        ({"eval_tokens": 5000}, 11_801_144, 4999, False, False),
        ({"eval_tokens": 5000}, 3000, 3000, False, False),
    ],
)
def test_evaluations_take_as_many_targets_as_5_percent_of_the_flops(
    changes, split, targets, spread, exact_last
):
    plan = plan_evaluations(dataclasses.replace(LARGE, **changes), split + 1)
    assert (plan.targets, plan.spread, plan.exact_last) == (targets, spread, exact_last)
    assert plan.split_targets == split
    said = f" over {targets:,} of {split:,} tokens"
    assert plan.over == ("" if targets == split else said)
    if plan.spread and targets > 256:
        assert plan.share <= 0.05


def test_a_share_counts_each_evaluation_and_the_exact_one():
    config = dataclasses.replace(LARGE, steps=6000, eval_interval=100)
    plan = plan_evaluations(config, 200_001)
    evaluated = 60 * 239 * 256 + 200_000

    assert plan.share == pytest.approx(evaluated / (evaluated + 6000 * 12_288), rel=1e-12)
    assert plan.evaluations == 60


def test_more_steps_do_not_change_the_targets_of_a_run_that_has_begun():
    config = dataclasses.replace(LARGE, steps=90, eval_interval=45)
    plan = plan_evaluations(config, 11_801_145, targets=75 * 256, comparable_after=7)

    assert (plan.targets, plan.evaluations, plan.comparable_after) == (75 * 256, 2, 7)
    assert plan_evaluations(config, 11_801_145).targets == 113 * 256


@pytest.fixture
def weights() -> Any:
    return init_state(SMALL).weights


def losses_by_window(weights: Any) -> np.ndarray:
    """The summed loss of each of the 67 windows of six targets, the last one of three."""
    windows, counts = evaluation_windows(TOKENS, 6, 1)
    evaluate = make_eval_step(SMALL.model)
    return np.array(
        [evaluate(weights, windows[i : i + 1], counts[i : i + 1]) for i in range(len(windows))]
    )


def test_a_part_is_whole_windows_spread_evenly(weights):
    sums = losses_by_window(weights)
    assert len(sums) == 67
    evaluator = Evaluator(SMALL, TOKENS, 121, spread_targets=60)
    spread = [0, 6, 13, 20, 26, 33, 40, 46, 53, 60]
    assert evaluator.exact(weights) == pytest.approx(sums[spread].sum() / 60, rel=1e-6)
    assert sums[spread].sum() != pytest.approx(sums[:10].sum(), rel=1e-4)
    whole = Evaluator(SMALL, TOKENS, 121)
    assert whole.exact(weights) == pytest.approx(sums.sum() / 399, rel=1e-6)


@pytest.fixture
def seen(monkeypatch) -> Iterator[list[Any]]:
    """The windows of each call, and the compiled functions."""
    calls: list[Any] = []

    def make(config):
        step = make_eval_step(config)

        def call(weights, windows, counts, total):
            calls.append((step, windows))
            return step(weights, windows, counts, total)

        return call

    monkeypatch.setattr(evaluation, "make_eval_step", make)
    return calls  # type: ignore[return-value]


@pytest.mark.parametrize("resident", [True, False])
def test_calls_of_bounded_work_change_no_bit_and_compile_one_program(
    weights, seen, resident, monkeypatch
):
    """Seventeen batches of four windows: all at once, or five in each of four calls."""
    once = Evaluator(SMALL, TOKENS, 121)
    expected = once.exact(weights)
    estimate = once.estimate(weights)
    assert len(seen) == 2
    windows, counts = evaluation_windows(TOKENS, 6, 4)
    total = make_eval_step(SMALL.model)(weights, windows, counts)
    assert expected == float(total) / 399  # as before there were several calls
    seen.clear()
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 2 * 121 * 4 * 6 * 5)
    if not resident:
        monkeypatch.setattr(evaluation, "RESIDENT_WINDOWS", 100)
    heard: list[Any] = []
    evaluator = Evaluator(SMALL, TOKENS, 121)
    found = evaluator.exact(weights, lambda *done: heard.append(done))
    assert found == expected
    assert heard == [(0, 399), (120, 399), (240, 399), (360, 399)]
    assert [windows.shape for _, windows in seen] == [(5, 4, 7)] * 4
    assert evaluator.estimate(weights) == estimate
    # windows that are small stay on the device, and no call of either kind is compiled again
    first = [windows for _, windows in seen]
    seen.clear()
    assert evaluator.exact(weights) == expected
    again = [windows for _, windows in seen]
    assert [a is b for a, b in zip(first, again, strict=False)] == [resident] * 4
    # an estimate is of some of the same windows, which are not on the device twice
    of_the_estimate = first[4:]
    assert of_the_estimate
    for windows in of_the_estimate:
        assert any(windows is other for other in first[:4]) == resident
    assert {step._cache_size() for step, _ in seen} == {1}


def test_an_evaluation_ends_between_calls(weights, seen, monkeypatch):
    class Stopped(Exception):
        pass

    def stop(done, targets):
        if done == 240:
            raise Stopped

    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 2 * 121 * 4 * 6 * 5)

    with pytest.raises(Stopped):
        Evaluator(SMALL, TOKENS, 121).exact(weights, stop)
    assert len(seen) == 2


def test_of_a_large_split_only_the_windows_of_a_call_are_read(weights, monkeypatch):
    read: list[int] = []

    def windows_by_number(tokens, numbers, block_size):
        read.append(numbers.size)
        return made(tokens, numbers, block_size)

    made = evaluation.windows_by_number
    monkeypatch.setattr(evaluation, "windows_by_number", windows_by_number)
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 2 * 121 * 4 * 6 * 5)
    monkeypatch.setattr(evaluation, "RESIDENT_WINDOWS", 100)
    evaluator = Evaluator(SMALL, TOKENS, 121)
    assert read == []
    # no more than the call that is computed and the next one
    evaluator.exact(weights, lambda done, _: read.append(-done))
    assert read == [20, 0, 20, -120, 20, -240, 20, -360]


class Unread:
    """A sum of losses that is still computed; converting it waits for it."""

    def __init__(self, total: Any, events: list[str]) -> None:
        self._total = total
        self._events = events

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._events.append("waited")
        return np.asarray(self._total, dtype)


def test_the_windows_of_the_next_call_are_read_while_the_last_one_computes(weights, monkeypatch):
    events: list[str] = []
    read = evaluation.windows_by_number

    def windows_by_number(*arguments):
        events.append("read")
        return read(*arguments)

    def make(config):
        step = make_eval_step(config)

        def call(*arguments):
            events.append("dispatched")
            return Unread(step(*arguments), events)

        return call

    monkeypatch.setattr(evaluation, "windows_by_number", windows_by_number)
    monkeypatch.setattr(evaluation, "make_eval_step", make)
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 2 * 121 * 4 * 6 * 9)
    monkeypatch.setattr(evaluation, "RESIDENT_WINDOWS", 100)
    Evaluator(SMALL, TOKENS, 121).exact(weights)

    assert events == ["read", "dispatched", "read", "waited", "dispatched", "waited"]


def test_a_sum_over_many_batches_goes_on_in_float64(weights, monkeypatch):
    whole = Evaluator(SMALL, TOKENS, 121).exact(weights)
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 1)
    monkeypatch.setattr(evaluation, "BATCHES_PER_SUM", 1)
    windows, counts = evaluation_windows(TOKENS, 6, 4)
    evaluate = make_eval_step(SMALL.model)
    parts = [evaluate(weights, windows[i : i + 1], counts[i : i + 1]) for i in range(17)]
    found = Evaluator(SMALL, TOKENS, 121).exact(weights)

    assert found == sum(map(float, parts)) / 399
    assert found == pytest.approx(whole, rel=1e-6)
