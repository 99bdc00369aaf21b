"""jgpt runs for whoever switches on JAX's checks of ranks and of dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.nn.int8 import with_int8_weights
from jgpt.presets import preset
from jgpt.training.state import abstract_state, init_state
from jgpt.training.step import make_eval_step, make_train_steps
from tests.models import random_gpt

WINDOWS = jnp.arange(2 * 3 * 9, dtype=jnp.int32).reshape(2, 3, 9) % 17


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


def test_losses_are_those_without_the_checks() -> None:
    model = jgpt.ModelConfig(
        vocab_size=17, block_size=8, embed_dim=8, num_heads=2, num_layers=1, positions="rotary"
    )
    config = jgpt.TrainConfig(model=model, batch_size=3)

    def losses():
        trained, measured = make_train_steps(config)(
            init_state(config), WINDOWS, jax.random.key(0), jnp.int32(2), jnp.int32(0)
        )
        return trained["model"], measured

    expected = losses()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = losses()

    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.usefixtures("_strict")
def test_sampling_is_computed() -> None:
    model = random_gpt("modern", num_layers=2, vocab_size=17, block_size=8)
    prompt = jnp.arange(6).reshape(2, 3)
    options = {"key": jax.random.key(0), "top_k": 5, "top_p": 0.9, "min_p": 0.1}

    for sampled in (model, with_int8_weights(model)):
        assert jgpt.generate(sampled, prompt, 4, **options).shape == (2, 7)
    assert nnx.eval_shape(lambda: jgpt.Head(6, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3, 6)))).shape == (
        2,
        3,
        4,
    )
