"""Sixteen-bit parameters: sums, averages and statistics of them are in float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgpt import GPT, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.nn.layers import look_up
from jgpt.nn.loss import cross_entropy_from
from jgpt.nn.ngrams import NGramEmbedding
from jgpt.training.optimizer import make_optimizer, trained_weights
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import StepSetup, gradients_of, make_train_steps

MODEL = ModelConfig(
    vocab_size=11, block_size=6, num_layers=1, num_heads=2, embed_dim=8, param_dtype="bfloat16"
)


def float64(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def dtypes_of(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


def test_an_average_of_weights_is_float32_and_what_is_trained_is_not():
    state = abstract_state(TrainConfig(MODEL, OptimizerConfig(ema_decay=0.9)))

    trained = jax.eval_shape(trained_weights, state["model"], state["optimizer"])

    assert dtypes_of(state["model"]) == {jnp.dtype("float32")}
    assert dtypes_of(trained) == {jnp.dtype("bfloat16")}


def test_a_second_moment_decays_by_what_was_asked():
    """The nearest bfloat16 to 0.999 is 1."""
    made = make_optimizer(OptimizerConfig(beta2=0.999, gradient_clip=0.0), 9)
    weights = {"head": jnp.ones((2, 3), jnp.bfloat16)}
    state = made.init(weights)
    gradients = {"head": jnp.full((2, 3), 0.5, jnp.bfloat16)}
    update = jax.jit(made.update)

    for _ in range(9):
        _, state = update(gradients, state, weights)

    second_moment = optax.tree.get(state, "nu")["head"]
    np.testing.assert_allclose(second_moment, 0.25 * (1 - 0.999**9), rtol=1e-5)


def test_a_row_s_gradients_are_summed_in_float32():
    """Of a token that occurs a thousand times: in bfloat16 256 + 1 is 256."""
    table = jnp.ones((2, 3), jnp.bfloat16)
    tokens = jnp.zeros(1000, jnp.int32)

    gradient = jax.grad(lambda table: look_up(table, tokens).sum())(table)

    np.testing.assert_array_equal(gradient, [[1000] * 3, [0] * 3])


def test_the_head_s_gradients_over_chunks_are_summed_in_float32():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((1, 600, 4)), jnp.float32)
    head = jnp.asarray(random.standard_normal((4, 7)), jnp.bfloat16)
    targets = jnp.asarray(random.integers(7, size=(1, 600)))

    def loss(head, at_once):
        return cross_entropy_from(x, targets, lambda x: x @ head.astype(x.dtype), at_once)

    gradient = jax.grad(loss)
    whole = np.asarray(gradient(head, 600), np.float64)
    chunked = gradient(head, 2)  # 300 chunks, so that errors of their sum would add up

    assert chunked.dtype == head.dtype
    tolerance = 2e-3 * np.abs(whole).max()
    np.testing.assert_allclose(np.asarray(chunked, np.float64), whole, rtol=0, atol=tolerance)


def test_embeddings_are_widened_before_they_are_added():
    """In an eager call too, where no compiler leaves a rounding out."""
    model = GPT(MODEL, rngs=nnx.Rngs(0))
    tokens = jnp.array([[3, 1, 4]])
    table = np.asarray(model.token_embedding.embedding[...], np.float32)
    positions = np.asarray(model.position_embedding.embedding[...], np.float32)  # type: ignore[union-attr]
    expected = table[np.asarray(tokens)] + positions[:3]

    eager = model.embed(tokens)
    compiled = jax.jit(lambda tokens: model.embed(tokens))(tokens)

    np.testing.assert_array_equal(eager, expected)
    np.testing.assert_array_equal(compiled, expected)
    # a sum in bfloat16 would be another
    rounded = np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float32)
    assert np.abs(expected - rounded).max() > 0


def test_n_grams_are_summed_in_float32():
    config = dataclasses.replace(MODEL, ngram_sizes=(2, 3, 4), ngram_rows=64)
    ngrams = NGramEmbedding(config, rngs=nnx.Rngs(0))
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    table = np.asarray(ngrams.table.embedding[...], np.float32)
    rows = np.asarray(ngrams.rows(tokens))

    found = ngrams(tokens)

    expected = table[rows].sum(axis=-2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def total(weights):
    """The sum of all weights, whose gradients are 1."""
    leaves = jax.tree.leaves(weights)
    return jnp.stack([leaf.astype(jnp.float32).sum() for leaf in leaves]).sum()


def test_the_gradients_of_one_micro_batch_have_a_norm_in_float32():
    """As where a compiler leaves no rounding out: a sum of squares in bfloat16 has three digits."""

    def loss_of(weights, arrays, batch, key):
        return total(weights), None

    config = TrainConfig(MODEL)
    weights = init_state(config)["model"]
    unused: Any = None
    setup = StepSetup(config, loss_of, optimizer=unused, schedule=unused)
    windows = jnp.zeros((1, 7), jnp.int32)

    _, gradients, _ = gradients_of(setup, weights, None, windows, dropout_stream(0))

    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    np.testing.assert_allclose(optax.tree.norm(gradients), count**0.5, rtol=1e-6)


def test_gradients_of_many_micro_batches_are_added_in_float32():
    """In bfloat16 512 times 1 is 256, since 257 is rounded to 256."""

    def objective(model, tokens, rngs):
        return total(nnx.state(model))

    optimizer = OptimizerConfig(make=lambda config, steps: optax.sgd(1.0), gradient_clip=0)
    bigram = ModelConfig(architecture="bigram", vocab_size=5, block_size=6, param_dtype="bfloat16")
    config = TrainConfig(
        model=bigram,
        optimizer=optimizer,
        objective=objective,
        batch_size=512,
        micro_batches=512,
    )
    before = float64(init_state(config)["model"])
    windows = jnp.zeros((1, 512, 7), jnp.int32)

    state, _ = make_train_steps(config)(init_state(config), windows, dropout_stream(0), 1, 0)

    for old, new in zip(before, float64(state["model"]), strict=True):
        np.testing.assert_allclose(old - new, 1, rtol=1e-2)
