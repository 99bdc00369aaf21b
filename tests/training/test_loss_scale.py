"""Products in float16: gradients are scaled, and a step whose gradients overflow is skipped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt import fit
from jgpt.data.batches import batches
from jgpt.parallel.mesh import use_mesh
from jgpt.runs.checkpoints import load_checkpoint
from jgpt.runs.directory import RunDirectory
from jgpt.runs.fit import TrainingStopped
from jgpt.training.loss_scale import first_loss_scale, next_loss_scale
from jgpt.training.objective import next_token_loss
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import make_train_steps
from tests.runs.harness import BIGRAM, with_changes
from tests.training.test_step import CONFIG, TOKENS, bits


def in_dtype(dtype, config=CONFIG, **changes):
    model = dataclasses.replace(config.model, dtype=dtype)
    return dataclasses.replace(config, model=model, **changes)


NARROW = in_dtype("float16")


def take(config, state, count, first=0):
    windows = batches(TOKENS, config.seed, first, 7, config.batch_size, config.model.block_size)
    return steps_of(config)(state, windows, dropout_stream(config.seed), count, first)


@functools.cache
def steps_of(config):
    return make_train_steps(config)


def with_factor(state, factor):
    """A state in which an overflow is planted, or in which gradients vanish."""
    factor = jnp.asarray(factor, jnp.float32)
    return state | {"loss_scale": state["loss_scale"] | {"factor": factor}}


def lines_of(run):
    return RunDirectory(run.path).metrics()


def copy(state):
    return jax.tree.map(jnp.array, state)


def test_the_scale_is_halved_at_an_overflow_and_doubled_after_2000_good_steps():
    scale = first_loss_scale()
    no, yes = jnp.asarray(False), jnp.asarray(True)
    assert float(scale["factor"]) == 2.0**15
    scale["good_steps"] = jnp.asarray(1998)
    scale = next_loss_scale(scale, no)
    assert float(scale["factor"]) == 2.0**15
    scale = next_loss_scale(scale, no)
    assert (float(scale["factor"]), int(scale["good_steps"])) == (2.0**16, 0)
    scale = next_loss_scale(next_loss_scale(scale, no), yes)
    assert (float(scale["factor"]), int(scale["good_steps"])) == (2.0**15, 0)
    assert int(scale["skipped_steps"]) == 1


@pytest.mark.parametrize(("mesh", "micro_batches"), [(None, 5), ("data=8", 1)], ids=str)
def test_a_step_that_overflows_is_skipped_and_the_next_ones_learn(mesh, micro_batches):
    batch_size = 8 if mesh else 5
    changes = {"mesh": mesh, "micro_batches": micro_batches, "batch_size": batch_size}
    config = dataclasses.replace(NARROW, **changes)
    with use_mesh(mesh):
        state, _ = take(config, init_state(config), 2)
        before = copy(state)
        # beyond any number of float16, as long as a gradient is above 2 ** -14
        state, metrics = take(config, with_factor(state, 2.0**31), 1, 2)
        for part in ("model", "optimizer"):
            assert bits(state[part]) == bits(before[part])
        assert int(metrics.taken) == 3  # training goes on
        assert np.isfinite(float(metrics.loss[0]))
        assert not np.isfinite(float(metrics.gradient_norm[0]))
        assert float(metrics.extra["skipped_steps"][0]) == 1
        assert float(state["loss_scale"]["factor"]) == 2.0**30

        state, metrics = take(config, with_factor(state, 2.0**10), 2, 3)
        assert float(metrics.extra["skipped_steps"][1]) == 1
        assert np.isfinite(metrics.gradient_norm[:2]).all()
        assert bits(state["model"]) != bits(before["model"])
        # the schedule is that of the steps that the optimizer took
        _, unskipped = take(config, with_factor(before, 2.0**10), 1, 2)
        assert metrics.learning_rate[0] == unskipped.learning_rate[0]


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_losses_and_gradients_are_near_those_of_float32(micro_batches):
    found = {}
    for dtype in ("float32", "float16"):
        config = in_dtype(dtype, micro_batches=micro_batches)
        _, metrics = take(config, init_state(config), 7)
        found[dtype] = np.asarray([metrics.loss, metrics.gradient_norm])
    np.testing.assert_allclose(found["float16"], found["float32"], rtol=5e-3)
    assert (found["float16"] != found["float32"]).any()


def test_gradients_that_float16_would_lose_are_kept():
    def small_loss(model, tokens, rngs):
        return 1e-6 * next_token_loss(model, tokens, rngs)

    norms = {}
    for dtype in ("float32", "float16"):
        config = in_dtype(dtype, objective=small_loss)
        _, metrics = take(config, init_state(config), 1)
        norms[dtype] = float(metrics.gradient_norm[0])
    assert norms["float16"] == pytest.approx(norms["float32"], rel=1e-2)
    state = with_factor(init_state(config), 1.0)  # the control
    _, metrics = take(config, state, 1)
    assert float(metrics.gradient_norm[0]) != pytest.approx(norms["float32"], rel=0.2)


def test_a_gradient_that_no_scale_mends_ends_training():
    def broken_gradient(model, tokens, rngs):
        weight = jax.tree.leaves(model.token_embedding.embedding.get_value())[0].sum()
        return next_token_loss(model, tokens, rngs) + jnp.sqrt(
            0 * weight
        )  # whose slope is infinite

    config = dataclasses.replace(NARROW, objective=broken_gradient)
    state, metrics = take(config, with_factor(init_state(config), 4.0), 6)
    assert int(metrics.taken) == 2
    assert float(state["loss_scale"]["factor"]) == 1


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr("jgpt.training.loss_scale.FIRST_FACTOR", 2.0**24)  # overflows at first
    config = in_dtype("float16", small_run)
    whole = fit(dataclasses.replace(config, out=str(tmp_path / "whole")))
    parts = dataclasses.replace(config, out=str(tmp_path / "parts"))
    with pytest.raises(TrainingStopped):
        fit(parts, should_stop=lambda: True)
    monkeypatch.undo()
    resumed = fit(parts, resume=True)

    lines = [[line["loss"] for line in lines_of(run)] for run in (whole, resumed)]
    assert lines[0] == lines[1]
    skipped = [line["skipped_steps"] for line in lines_of(resumed) if "skipped_steps" in line]
    assert 1 < skipped[-1] < config.steps - 1
    saved = []
    for run in (whole, resumed):
        assert run.path is not None
        like = abstract_state(run.config)
        _, state = load_checkpoint(run.path / "checkpoints", "last", like)
        saved.append(bits(state))
    assert saved[0] == saved[1]


def test_moments_of_a_run_in_another_dtype_are_taken(small_run, tmp_path):
    """A run of a CPU that goes on in float16 begins with a scale of its own."""
    first = with_changes(small_run, **BIGRAM, steps=4, out=str(tmp_path / "first"))
    fit(first)
    config = in_dtype("float16", first, steps=11, out=str(tmp_path / "second"))
    run = fit(config, initial=f"{tmp_path / 'first'}@4", with_optimizer=True)
    assert lines_of(run)[-1]["loss_scale"] == 2.0**15


def test_a_loss_that_is_not_finite_ends_training_and_changes_nothing():
    state = init_state(NARROW)
    state["model"] = jax.tree.map(lambda leaf: jnp.nan * leaf, state["model"])
    before = copy(state)
    state, metrics = take(NARROW, state, 2)
    assert int(metrics.taken) == 0
    assert bits(state) == bits(before)
