"""What a step holds at once, and in which precision: the numbers stay, the memory doesn't."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.nn.models import abstract_model
from jgpt.training.plan import bytes_of, training_memory
from jgpt.training.step import abstract_state, dropout_stream, make_train_steps
from tests.models import random_model, tokens_of

MODEL = ModelConfig(vocab_size=11, block_size=6, num_layers=2, num_heads=2, embed_dim=8)


CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=3),
    steps=5,
    batch_size=12,
)


WINDOWS = np.random.default_rng(0).integers(0, 11, (5, 12, 7), np.int32)


def changed(config: TrainConfig, **model: object) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


@pytest.mark.parametrize(("micro_batches", "rows"), [(1, 12), (3, 4)])
def test_a_micro_batch_is_all_that_is_computed_at_once(micro_batches, rows):
    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    lowered = make_train_steps(config).lower(
        abstract_state(config), jax.ShapeDtypeStruct(WINDOWS.shape, jnp.int32), dropout_stream(0), 2
    )
    logits = set(re.findall(r"tensor<(\d+)x6x11xf32>", lowered.as_text()))
    assert logits == {str(rows)}


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="batch_size=12 must be divisible by micro_batches=5"):
        dataclasses.replace(CONFIG, micro_batches=5)


def test_bfloat16_computes_and_float32_remembers():
    config = changed(CONFIG, dtype="bfloat16")
    steps, state = make_train_steps(config), abstract_state(config)
    after, measured = jax.eval_shape(steps, state, jnp.asarray(WINDOWS), dropout_stream(0), 5)
    leaves = jax.tree.leaves((after, measured.loss))
    floats = {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {jnp.dtype("float32")}
    model = random_model("nanogpt", dtype="bfloat16")
    program = jax.make_jaxpr(model)(tokens_of(0)).pretty_print()
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", program)
    assert set(products) == {"f32"}
    assert "bf16" in program


def kept_for_the_backward_pass(**model: object) -> int:
    graph, weights = nnx.split(abstract_model(changed(CONFIG, **model).model))

    def loss(weights):
        return nnx.merge(graph, weights)(jnp.zeros((12, 6), jnp.int32)).sum()

    return bytes_of(jax.eval_shape(lambda weights: jax.vjp(loss, weights)[1], weights))


def test_rematerialised_blocks_keep_less_for_the_backward_pass():
    kept = kept_for_the_backward_pass()
    assert kept_for_the_backward_pass(rematerialise=True) < kept / 2


def test_memory_is_the_compiler_s_and_grows_with_the_batch():
    small = training_memory(CONFIG)
    large = training_memory(dataclasses.replace(CONFIG, batch_size=120))
    assert small is not None
    assert large is not None
    assert small.state == large.state == bytes_of(abstract_state(CONFIG))
    assert large.working > 2 * small.working
