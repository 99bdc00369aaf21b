"""jgpt runs for whoever switches on JAX's checks of ranks and of dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jgpt.presets import preset
from jgpt.training.state import abstract_state
from jgpt.training.step import make_eval_step, make_train_steps


@pytest.fixture
def _strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize("name", ["bigram", "lecture", "gpt2", "modern-cpu"])
def test_steps_and_evaluations_of_a_preset_are_traced(name: str) -> None:
    config = preset(name)
    model = dataclasses.replace(config.model, dtype="bfloat16")
    if model.architecture == "gpt":
        model = dataclasses.replace(model, num_layers=2)
    config = dataclasses.replace(config, model=model, micro_batches=2, batch_size=4)
    state = abstract_state(config)
    windows = jax.ShapeDtypeStruct((3, 4, model.block_size + 1), jnp.int32)
    counts = jax.ShapeDtypeStruct((3, 4, model.block_size), jnp.bool_)
    key = jax.eval_shape(lambda: jax.random.key(0))
    number = jax.ShapeDtypeStruct((), jnp.int32)

    stepped, losses = jax.eval_shape(make_train_steps(config), state, windows, key, number, number)
    evaluated = jax.eval_shape(make_eval_step(config.model), state["model"], windows, counts)

    assert jax.tree.map(lambda leaf: leaf.dtype, stepped) == jax.tree.map(
        lambda leaf: leaf.dtype, state
    )
    assert all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves((losses, evaluated)))
