"""Optimizers of one's own that need more than gradients: values, other weights to evaluate, muP."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jgpt
from jgpt.runs.fit import TrainingStopped
from jgpt.training.optimizer import evaluated_weights, make_optimizer
from tests.runs.harness import path_of, stopping


def plateau(config: jgpt.OptimizerConfig, steps: int) -> Any:
    adam = optax.adam(config.learning_rate)
    return optax.chain(adam, optax.contrib.reduce_on_plateau(factor=0.5, patience=2))


def lbfgs(config: jgpt.OptimizerConfig, steps: int) -> Any:
    return optax.lbfgs(memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(5))


def schedule_free(config: jgpt.OptimizerConfig, steps: int) -> Any:
    return optax.contrib.schedule_free_adamw(config.learning_rate, warmup_steps=3)


@dataclasses.dataclass(frozen=True)
class WidthConfig(jgpt.OptimizerConfig):
    base_width: int = 4
    """The width whose learning rate is given."""


def mup(config: WidthConfig, steps: int, model: jgpt.ModelConfig) -> Any:
    return optax.adam(config.learning_rate * config.base_width / model.embed_dim)


def scaled(config: jgpt.OptimizerConfig, steps: int) -> Any:
    return optax.scale(-config.learning_rate)  # whose state is empty


def counted(config: jgpt.OptimizerConfig, steps: int) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        rate = config.learning_rate / (1 + state)
        return jax.tree.map(lambda leaf: -rate * leaf, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


MAKES = {make.__name__: make for make in (plateau, lbfgs, schedule_free, mup)}
OF_ONE_ARRAY = {make.__name__: make for make in (scaled, counted)}
"""Those whose state is one array, or none."""


def config_for(small_run, out):
    optimizer = dataclasses.replace(small_run.optimizer, gradient_clip=0.0)
    model = dataclasses.replace(small_run.model, dropout=0.0)
    return dataclasses.replace(
        small_run,
        optimizer=optimizer,
        model=model,
        batch_size=8,
        sample_tokens=0,
        steps=6,
        out=str(out),
    )


@pytest.fixture
def config(small_run, tmp_path):
    return config_for(small_run, tmp_path / "run")


@pytest.fixture(scope="module")
def run_of(small_run, tmp_path_factory):
    @functools.cache
    def train(name: str) -> jgpt.Run:
        config = config_for(small_run, tmp_path_factory.mktemp(name) / "run")
        return jgpt.fit(config, optimizer=(MAKES | OF_ONE_ARRAY)[name], progress=None)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES | OF_ONE_ARRAY)
def test_an_optimizer_trains_and_is_resumed_bitwise(name, run_of, config, tmp_path):
    run = run_of(name)
    stopped = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    given = {"optimizer": (MAKES | OF_ONE_ARRAY)[name], "progress": None}

    with pytest.raises(TrainingStopped):
        jgpt.fit(stopped, **given, should_stop=stopping(tmp_path / "stopped"))
    resumed = jgpt.fit(stopped, **given, resume=True)

    losses = run.metrics["loss"]
    assert losses[-1] != losses[0]
    np.testing.assert_array_equal(losses, resumed.metrics["loss"])
    assert run.validation_loss == resumed.validation_loss


def test_a_schedule_free_optimizer_evaluates_x_and_trains_y():
    y: Any = {"a": jnp.array([1.0, -2.0, 3.0])}
    config = jgpt.OptimizerConfig(make=schedule_free, gradient_clip=0, learning_rate=0.1)
    optimizer = make_optimizer(config, 9)
    state = optimizer.init(y)

    for _ in range(3):
        updates, state = optimizer.update({"a": 2 * y["a"]}, state, y)
        y = optax.apply_updates(y, updates)

    x = evaluated_weights(y, state)
    expected: Any = optax.contrib.schedule_free_eval_params(state, y)
    np.testing.assert_array_equal(x["a"], expected["a"])
    assert abs(x["a"] - y["a"]).max() > 1e-3
    plain = make_optimizer(jgpt.OptimizerConfig(), 9)
    assert evaluated_weights(y, plain.init(y)) is None


def trained_as(make: Any, weights: Any, value_of: Any, **options: Any) -> Any:
    """The weights that an optimizer evaluates after three steps."""
    config = jgpt.OptimizerConfig(make=make, gradient_clip=0, learning_rate=0.1, **options)
    optimizer = make_optimizer(config, 9)
    state = optimizer.init(weights)
    for _ in range(3):
        value, gradients = jax.value_and_grad(value_of)(weights)
        extra: Any = {"value": value, "grad": gradients, "value_fn": value_of, "obj_fn": value_of}
        updates, state = optimizer.update(gradients, state, weights, **extra)
        weights = optax.apply_updates(weights, updates)
    return evaluated_weights(weights, state) or weights


@pytest.mark.parametrize("name", ["plateau", "lbfgs", "schedule_free"])
def test_beside_frozen_parameters_the_others_are_trained_as_if_alone(name):
    """Also by what an optimizer gets beside the gradients."""
    frozen = jnp.array([1.0, -2.0, 3.0])
    moving = jnp.array([0.5, 0.25, -0.75])

    def value_of(weights, obj_fn=None):
        return jnp.square(weights["a"] * weights["b"] - 1).sum()

    def value_of_alone(weights, obj_fn=None):
        return value_of({"a": frozen, "b": weights["b"]})

    both = trained_as(MAKES[name], {"a": frozen, "b": moving}, value_of, trainable=("b",))
    alone = trained_as(MAKES[name], {"b": moving}, value_of_alone)
    all_trained = trained_as(MAKES[name], {"a": frozen, "b": moving}, value_of)

    np.testing.assert_array_equal(both["a"], frozen)
    np.testing.assert_allclose(both["b"], alone["b"], rtol=1e-6)
    assert abs(both["b"] - moving).max() > 1e-3
    assert abs(all_trained["a"] - frozen).max() > 1e-3


@pytest.mark.slow
def test_mup_gets_the_models_width_and_a_field_of_its_own(config):
    config = dataclasses.replace(config, steps=1)
    run = jgpt.fit(config, optimizer=mup, progress=None)
    saved = jgpt.load(path_of(run), optimizer=mup).config.optimizer

    assert isinstance(run.config.optimizer, WidthConfig)
    assert isinstance(saved, WidthConfig)
    assert saved == run.config.optimizer
    weights = {"a": jnp.ones(3)}
    narrow, wide = (
        make_optimizer(saved, 1, model=dataclasses.replace(config.model, embed_dim=width))
        for width in (12, 24)
    )
    gradients = {"a": jnp.full(3, 0.5)}
    step: Any
    half: Any
    step, _ = narrow.update(gradients, narrow.init(weights), weights)
    half, _ = wide.update(gradients, wide.init(weights), weights)
    np.testing.assert_allclose(step["a"], 2 * half["a"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plateau", "lbfgs", "schedule_free"])
def test_an_optimizer_trains_on_a_mesh(name, run_of, config):
    """None of them has a rate that depends on the number of steps."""
    run = run_of(name)
    sharded = dataclasses.replace(config, mesh="data=4,fsdp=2", steps=3)

    sharded_run = jgpt.fit(sharded, optimizer=MAKES[name], progress=None)

    losses = run.metrics["loss"][:3]
    np.testing.assert_allclose(sharded_run.metrics["loss"], losses, rtol=2e-3)


@pytest.mark.slow
def test_the_average_of_a_schedule_free_optimizer_is_what_is_evaluated_and_loaded(config):
    run = jgpt.fit(config, optimizer=schedule_free, progress=None)

    assert (path_of(run) / "checkpoints" / "6" / "average").is_dir()
    loss = jgpt.evaluate(path_of(run)).loss
    assert loss == pytest.approx(run.validation_loss, rel=1e-6)
