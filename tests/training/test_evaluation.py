"""Evaluations: of how many targets, which ones, and in calls whose number changes no bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jgpt import ModelConfig, TrainConfig
from jgpt.data.batches import evaluation_windows
from jgpt.training import evaluation
from jgpt.training.evaluation import Evaluator, targets_of
from jgpt.training.state import init_state
from jgpt.training.step import make_eval_step
from tests.runs.harness import Unread

TOKENS = np.random.default_rng(3).integers(0, 11, 400).astype(np.uint16)
SMALL = TrainConfig(
    model=ModelConfig(architecture="bigram", vocab_size=11, block_size=6), batch_size=4
)
# twice the table's 121 weights for each target, and four windows of six targets in a batch
WORK_OF_A_BATCH = 2 * 121 * 4 * 6
FIVE_BATCHES = 5 * WORK_OF_A_BATCH


@pytest.mark.parametrize(
    ("eval_tokens", "split", "targets"),
    [
        (131_072, 11_801_144, 131_072),
        (131_072, 131_072, 131_072),
        (None, 11_801_144, 11_801_144),
        (5000, 11_801_144, 19 * 256),  # whole windows
        (5000, 3000, 3000),
        (100, 11_801_144, 256),  # one at least
        (100, 200, 200),
    ],
)
def test_an_evaluation_is_of_as_many_targets_as_are_asked_for(eval_tokens, split, targets):
    model = ModelConfig(block_size=256)
    config = TrainConfig(model=model, eval_tokens=eval_tokens)

    assert targets_of(config, split + 1) == targets


@pytest.fixture
def weights() -> Any:
    return init_state(SMALL)["model"]


def test_calls_of_bounded_work_change_no_bit_and_compile_one_program(weights, monkeypatch):
    """Seventeen batches of four windows: all at once, or five in each of four calls."""
    seen: list[Any] = []

    def make(config):
        step = make_eval_step(config)

        def call(weights, windows, counts, total):
            seen.append((step, windows))
            return step(weights, windows, counts, total)

        return call

    monkeypatch.setattr(evaluation, "make_eval_step", make)
    # all in one call, as the compiled function itself gives it
    in_one_call = Evaluator(SMALL, TOKENS)
    expected = in_one_call.mean(weights)
    assert len(seen) == 1
    windows, counts = evaluation_windows(TOKENS, 6, 4)
    total = make_eval_step(SMALL.model)(weights, windows, counts)
    assert expected == float(total) / 399

    # in four calls
    seen.clear()
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", FIVE_BATCHES)
    progress: list[Any] = []
    evaluator = Evaluator(SMALL, TOKENS)
    found = evaluator.mean(weights, lambda *done: progress.append(done))
    assert found == expected
    assert progress == [(0, 399), (120, 399), (240, 399), (360, 399)]
    assert [windows.shape for _, windows in seen] == [(5, 4, 7)] * 4
    assert evaluator.mean(weights) == expected
    for step, _ in seen:
        assert step._cache_size() == 1


def test_a_sum_over_many_batches_goes_on_in_float64(weights, monkeypatch):
    in_one_sum = Evaluator(SMALL, TOKENS).mean(weights)
    windows, counts = evaluation_windows(TOKENS, 6, 4)
    evaluate = make_eval_step(SMALL.model)
    total = 0.0  # Python's numbers are float64
    for batch in range(17):
        total += float(evaluate(weights, windows[batch : batch + 1], counts[batch : batch + 1]))

    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 1)
    monkeypatch.setattr(evaluation, "BATCHES_PER_SUM", 1)
    found = Evaluator(SMALL, TOKENS).mean(weights)

    assert found == total / 399
    assert found == pytest.approx(in_one_sum, rel=1e-6)


def test_the_windows_of_the_next_call_alone_are_read_while_the_last_one_computes(
    weights, monkeypatch
):
    events: list[str] = []
    windows_by_number = evaluation.windows_by_number

    def recorded(tokens, numbers, block_size):
        events.append(f"read {numbers.size}")
        return windows_by_number(tokens, numbers, block_size)

    def make(config):
        step = make_eval_step(config)

        def call(*arguments):
            events.append("dispatched")
            return Unread(step(*arguments), events)

        return call

    monkeypatch.setattr(evaluation, "windows_by_number", recorded)
    monkeypatch.setattr(evaluation, "make_eval_step", make)
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", FIVE_BATCHES)

    evaluator = Evaluator(SMALL, TOKENS)
    assert events == []
    evaluator.mean(weights)

    three_times = 3 * ["read 20", "waited", "dispatched"]
    assert events == ["read 20", "dispatched", *three_times, "waited"]


def test_an_evaluation_holds_no_more_rows_than_a_micro_batch(monkeypatch):
    rows = []

    def noting(weights, windows, counts, partial):
        rows.append(windows.shape[1])
        return partial

    monkeypatch.setattr(evaluation, "make_eval_step", lambda model: noting)
    Evaluator(replace(SMALL, micro_batches=2), TOKENS).mean(init_state(SMALL)["model"])

    assert set(rows) == {2}
