"""What a run writes down of itself, and who is told."""

import dataclasses
import math
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt import ModelConfig, TrainConfig, fit
from jgpt.data.batches import batches, evaluation_windows
from jgpt.data.dataset import load_dataset
from jgpt.data.mixture import Share
from jgpt.fitting import fit as fit_module
from jgpt.fitting.metrics import MetricsLogger
from jgpt.hardware import peak_flops
from jgpt.nn.loss import token_losses
from jgpt.runs.directory import RunDirectory
from jgpt.training import evaluation
from jgpt.training.evaluation import Evaluator
from jgpt.training.step import Metrics
from tests.models import compiled, weights_of
from tests.runs.harness import BIGRAM, with_changes

ROOT = Path(__file__).parents[2]


def test_metrics_have_the_fields_that_the_documentation_explains(trained):
    lines = RunDirectory.open(trained.directory).metrics()

    found = set().union(*lines)
    documented = documented_fields()
    assert found <= documented
    # all targets are evaluated each time, and the peak of a CPU is unknown
    assert documented - found == {"exact_validation_loss", "model_flops_utilisation"}
    assert peak_flops() is None  # nobody knows a CPU's, so nothing is made up
    last = lines[-1]
    assert last["tokens"] == 11 * 5 * 7
    assert last["memory_bytes"] > 1 << 20
    seconds = column(lines, "seconds")
    assert seconds == sorted(seconds)
    speeds = column(lines, "tokens_per_second")
    assert speeds
    for speed in speeds:
        assert 1 < speed < 1e7


def documented_fields() -> set[str]:
    """The names in the first column of the documentation's table."""
    page = (ROOT / "docs" / "runs.md").read_text()
    (table,) = re.findall(r"(?m)^\| `step`.*\n(?:\|.*\n)*", page)
    names = set()
    for first_cell in re.findall(r"(?m)^\| (`.*?) \|", table):
        names.update(re.findall(r"`(\w+)`", first_cell))
    return names


def column(lines, name):
    """A field's values, of the lines that have it."""
    return [line[name] for line in lines if name in line]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set, and a machine whose numbers are known."""
    clock = types.SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("jgpt.fitting.metrics.time", clock)
    monkeypatch.setattr("jgpt.fitting.metrics.peak_flops", lambda: 1e6)
    monkeypatch.setattr("jgpt.fitting.metrics.memory_in_use", lambda: 12345)
    return clock


MODEL = ModelConfig(vocab_size=21, block_size=7, num_layers=1, num_heads=2, embed_dim=12)
# FLOPs of a token: twice the weights of attention, MLP and head, 2 * (4*12*12 + 2*12*48 + 12*21),
# and twice the keys and values met, 2 * 2*7*12: 4,296 forward, 12,888 with a backward pass; 35 of
# them in two seconds are 0.05638 of four devices of 1e6 a second


def test_operations_are_counted_where_the_peak_is_known(clock, monkeypatch, tmp_path):
    counted = []

    def count(config):
        counted.append(config)
        return 7

    monkeypatch.setattr("jgpt.fitting.metrics.flops_per_token", count)
    config = TrainConfig()

    monkeypatch.setattr("jgpt.fitting.metrics.peak_flops", lambda: None)
    MetricsLogger(config, RunDirectory(tmp_path), (), 100)
    assert counted == []

    monkeypatch.setattr("jgpt.fitting.metrics.peak_flops", lambda: 1e6)
    MetricsLogger(config, RunDirectory(tmp_path), (), 100)
    assert counted == [config.model]


def metrics_of(*losses: float) -> Metrics:
    """Those of a call of steps, with room for one step more."""
    loss = jnp.array([*losses, -1.0])
    metrics = Metrics(loss, loss / 2, loss / 4)
    return jax.block_until_ready(metrics)


def test_every_number_by_hand(clock, tmp_path):
    config = TrainConfig(model=MODEL, batch_size=5)  # 35 tokens a step
    logger = MetricsLogger(config, RunDirectory(tmp_path), [], 1000, devices=4)
    logger.add_evaluation(validation_estimate=4.5)
    clock.now = 107.5
    logger.add(0, 3, metrics_of(4.0, 3.5, 3.25))  # the call that compiled
    clock.now = 110.0
    logger.start_clock()
    clock.now = 112.0
    logger.add(3, 1, metrics_of(3.0))
    logger.wait()
    logger.add_evaluation(validation_loss=2.5)
    logger.finish()
    clock.now = 122.0
    logger.start_clock()  # the evaluation took ten seconds
    clock.now = 125.0
    logger.add(4, 2, metrics_of(2.75, 2.625))
    clock.now = 127.0
    logger.add(6, 1, metrics_of(2.25))
    logger.finish()

    columns = ("tokens", "seconds", "memory_bytes", "tokens_per_second", "model_flops_utilisation")

    def step(number, loss, *measured, **more):
        always = {
            "step": number,
            "loss": loss,
            "gradient_norm": loss / 2,
            "learning_rate": loss / 4,
        }
        return always | dict(zip(columns, measured, strict=False)) | more

    lines = [
        {"step": 0, "validation_estimate": 4.5},
        step(1, 4.0),
        step(2, 3.5),
        step(3, 3.25, 105, 7.5, 12345),
        step(4, 3.0, 140, 12.0, 12345, 17.5, 0.05638, validation_loss=2.5),
        step(5, 2.75),
        step(6, 2.625, 210, 25.0, 12345, 23.3, 0.07518),
        step(7, 2.25, 245, 27.0, 12345, 21.0, 0.06766),
    ]
    assert RunDirectory(tmp_path).metrics() == lines

    # a day later the run is resumed; its seconds go on
    clock.now = 90_000.0
    logger = MetricsLogger(config, RunDirectory(tmp_path), [], 1000, devices=4)
    clock.now = 90_004.0
    logger.add(7, 1, metrics_of(2.0))
    logger.finish()
    assert RunDirectory(tmp_path).metrics() == [*lines, step(8, 2.0, 280, 31.0, 12345)]


def message_of_nan(config, path, **options) -> str:
    """What is said of a second step whose loss is not a number."""
    logger = MetricsLogger(config, RunDirectory(path), [], **options)
    with pytest.raises(FloatingPointError) as stopped:
        logger.add(0, 2, metrics_of(4.0, math.nan))
    return str(stopped.value)


def test_the_windows_of_a_step_that_is_not_finite_are_those_that_it_took(clock, tmp_path):
    """Also of a mixture, whose windows are drawn in another way, and of batches of one's own."""
    config = TrainConfig(model=MODEL, batch_size=5, steps_per_call=3)
    shares = (Share("a", 600, 0.3), Share("b", 400, 0.7))
    tokens = np.arange(1000)
    own = dataclasses.replace(config, batches=lambda dataset, seed, step: None)

    options: dict[str, Any]
    for options in ({}, {"shares": shares}):
        windows = batches(tokens, config.seed, 1, 1, 5, 7, **options)
        starts = ", ".join(map(str, windows[0, :, 0].tolist()))
        said = message_of_nan(config, tmp_path, training_tokens=1000, **options)
        assert f"the batch's windows start at tokens {starts} of the training text" in said
    said = message_of_nan(own, tmp_path, training_tokens=1000)
    assert "the batch is what `batches` returns for step 1)" in said
    assert "tokens" not in said


def test_what_can_t_be_written_is_raised_where_all_processes_are(clock, tmp_path):
    """Not where process 0 writes alone, for which the others would wait."""
    config = TrainConfig(model=MODEL)
    logger = MetricsLogger(config, RunDirectory(tmp_path), [], 1000)
    (tmp_path / "metrics.jsonl").mkdir()

    logger.add(0, 2, metrics_of(4.0, 3.5))

    assert logger.failure is not None
    with pytest.raises(OSError, match=r"Is a directory.*metrics\.jsonl"):
        logger.finish()


def test_the_speed_is_of_training_alone_and_the_seconds_are_of_all(
    clock, small_run, tmp_path, monkeypatch
):
    """A step takes a second, an evaluation a thousand."""

    make_train_steps = fit_module.make_train_steps
    make_eval_step = evaluation.make_eval_step

    def make_timed_steps(config):
        call = make_train_steps(config)

        def steps(state, windows, stream, count, first):
            clock.now += count
            return call(state, windows, stream, count, first)

        return steps

    def make_timed_evaluation(config):
        call = make_eval_step(config)

        def evaluate(*arguments):
            clock.now += 1000
            return call(*arguments)

        return evaluate

    monkeypatch.setattr(fit_module, "make_train_steps", make_timed_steps)
    monkeypatch.setattr(evaluation, "make_eval_step", make_timed_evaluation)
    # how long a call really takes must not matter
    monkeypatch.setattr(type(jnp.zeros(())), "is_ready", lambda _: True)
    config = with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"))

    run = fit(config)

    metrics = RunDirectory(run.directory).metrics()
    timed = [line for line in metrics if "seconds" in line]
    # calls of three steps, cut short where there is an estimate, after 0, 1 and 2, or an
    # evaluation, after 4, 8 and 11
    assert column(timed, "step") == [1, 2, 4, 7, 8, 11]
    assert column(timed, "seconds") == [1001.0, 2002.0, 3004.0, 4007.0, 4008.0, 5011.0]
    assert column(timed, "tokens") == [35, 70, 140, 245, 280, 385]
    assert column(timed, "tokens_per_second") == [35.0] * 6


def test_the_validation_loss_is_estimated_before_it_is_evaluated(small_run, tmp_path):
    """At step 0, and at a half, a quarter, ... of the first interval; a checkpoint is exact."""
    out = tmp_path / "run"
    changes = {**BIGRAM, "optimizer": {}}
    config = with_changes(
        small_run,
        **changes,
        out=str(out),
        steps=80,
        eval_interval=35,
        patience=1,
    )

    run = fit(config)

    lines = RunDirectory.open(run.directory).metrics()
    estimated = [line["step"] for line in lines if "validation_estimate" in line]
    evaluated = [line["step"] for line in lines if "validation_loss" in line]
    assert column(lines, "step") == list(range(81))
    assert estimated == [0, 2, 4, 8, 17]
    assert evaluated == [35, 70, 80]
    assert set(lines[0]) == {"step", "validation_estimate"}
    assert lines[0]["validation_estimate"] > lines[35]["validation_loss"] > 2
    checkpoints = [int(path.name) for path in (out / "checkpoints").iterdir()]
    assert sorted(checkpoints) == [70, 80]


def test_an_estimate_is_of_batches_that_are_spread_over_the_split(trained, monkeypatch):
    """Of six batches of 35 targets, the last with four, as many as 71 tokens need, or more."""
    config = trained.config
    dataset = load_dataset(config.dataset, 7)
    windows, counts = evaluation_windows(dataset.validation, 7, 5)
    assert len(windows) == 6
    weights = weights_of(trained.model)

    @jax.vmap
    def losses_of(batch):
        logits = trained.model(batch[:, :-1])
        return token_losses(logits, batch[:, 1:])

    losses = np.asarray(compiled(losses_of, windows))
    mean = losses[counts].mean()
    monkeypatch.setattr(evaluation, "ESTIMATE_TOKENS", 71)

    for steps, chosen in (
        (11, [0, 2, 5]),
        (1000, [0, 1, 2, 3, 5]),  # a longer run has time for more
        (9999, [0, 1, 2, 3, 4, 5]),
    ):
        longer = dataclasses.replace(config, steps=steps)
        evaluator = Evaluator(longer, dataset.validation, 2000)
        chosen_losses = losses[chosen]
        expected = chosen_losses[counts[chosen]].mean()
        assert evaluator.exact(weights) == pytest.approx(mean, rel=1e-5)
        assert evaluator.estimate(weights) == pytest.approx(expected, rel=1e-5)
