"""Dropout: how much is dropped, what is left, and that the key alone decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.nn.attention import attend
from jgpt.nn.kernels import attend_windowed
from jgpt.nn.layers import apply_dropout
from tests.models import compiled, normal, random_gpt

RATE = 0.3
PLAIN = jgpt.ModelConfig(embed_dim=6, num_heads=3, hidden_dim=13)
CONFIG = dataclasses.replace(PLAIN, dropout=RATE)


def rngs(seed):
    return nnx.Rngs(dropout=jax.random.key(seed))


def test_what_is_kept_is_scaled_and_the_rest_is_zero():
    x = jnp.full((200, 500), 2.0)

    y = np.asarray(apply_dropout(x, RATE, jax.random.key(0)))

    assert set(np.unique(y)) == {np.float32(0), np.float32(2.0) / np.float32(1 - RATE)}
    # within four standard deviations of a share of so many numbers
    deviation = (RATE * (1 - RATE) / x.size) ** 0.5
    assert abs((y > 0).mean() - (1 - RATE)) < 4 * deviation
    assert abs(y.mean() - 2.0) < 4 * 2.0 / (1 - RATE) * deviation
    assert apply_dropout(x, RATE, None) is x
    assert apply_dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize("rate", [1.0, 1.5, -0.5, float("nan")])
def test_a_rate_is_at_least_0_and_below_1(rate):
    x = jnp.ones((3, 4))
    for call in (
        lambda: apply_dropout(x, rate, jax.random.key(0)),
        lambda: attend(x, x, x, dropout=rate),
    ):
        with pytest.raises(ValueError, match=f"dropout={rate} must be at least 0 and below 1"):
            call()


def test_keys_of_another_stream_are_refused():
    module = jgpt.FeedForward(CONFIG, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 7, 6))

    with pytest.raises(ValueError, match=r"no stream for dropout: nnx.Rngs\(dropout=key\) has"):
        module(x, rngs=nnx.Rngs(params=0))
    assert not jnp.array_equal(module(x, rngs=nnx.Rngs(0)), module(x))  # the default stream


def test_nothing_is_dropped_half():
    """With a cache a block can't, so the embedding must not either."""
    config = jgpt.ModelConfig(num_layers=1, num_heads=3, embed_dim=6, block_size=5, dropout=RATE)
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 5), jnp.int32)

    with pytest.raises(ValueError, match="a KV cache is for causal self-attention in evaluation"):
        model(tokens, cache=model.empty_cache(1), rngs=rngs(1))


MODULES = [
    jgpt.Head(6, 5, dropout=RATE, window=3, rngs=nnx.Rngs(0)),
    jgpt.FeedForward(CONFIG, rngs=nnx.Rngs(0)),
    jgpt.Block(CONFIG, rngs=nnx.Rngs(0)),
]
EVERY = pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
X = normal(3, 2, 7, 6)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_drops_weights_before_heads_are_merged(window):
    config = dataclasses.replace(CONFIG, attention_window=window)
    module = jgpt.MultiHeadAttention(config, rngs=nnx.Rngs(0))
    heads = jgpt.capture(module, "attend_windowed")
    whole = heads(X)["attend_windowed"]
    dropped = heads(X, rngs=rngs(1))["attend_windowed"]

    assert not jnp.array_equal(whole, dropped)


@EVERY
def test_evaluation_has_none_and_training_is_by_the_key_and_the_rate(module):
    """After `train()` as before; without a rate, a key drops nothing."""
    plain = nnx.clone(module)
    plain.set_attributes(dropout=0.0, raise_if_not_found=False)
    training = nnx.clone(module)
    training.train()

    @jax.jit
    def train(x, key):
        return [each(x, rngs=nnx.Rngs(dropout=key)) for each in (module, training, plain)]

    evaluated, without = jax.jit(lambda x: (module(x), plain(x)))(X)
    first, trained, kept = train(X, jax.random.key(1))
    other, _, _ = train(X, jax.random.key(2))

    assert jnp.abs(evaluated).max() > 0
    assert jnp.array_equal(without, evaluated)
    assert jnp.array_equal(kept, evaluated)
    assert jnp.array_equal(trained, first)
    assert not jnp.array_equal(first, other)
    assert not jnp.array_equal(first, evaluated)


@pytest.mark.parametrize(("dropout", "ngram_dropout"), [(RATE, 0.0), (0.0, RATE)])
def test_so_it_is_of_a_model_and_inside_a_gradient(dropout, ngram_dropout):
    config = jgpt.ModelConfig(
        num_layers=1,
        num_heads=3,
        embed_dim=6,
        block_size=5,
        ngram_sizes=(2,),
        dropout=dropout,
        ngram_dropout=ngram_dropout,
    )
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 5), jnp.int32)

    def loss(model):
        return jgpt.cross_entropy(model(tokens), tokens)

    model.train()
    for call in (loss, nnx.value_and_grad(loss), nnx.jit(loss)):
        with pytest.raises(ValueError, match=rf"after train\(\), dropout={RATE} needs"):
            nnx.eval_shape(call, model)
    with pytest.raises(ValueError, match="eval method switches back to evaluation"):
        jgpt.generate(model, tokens, 2, key=jax.random.key(0))
    model.eval()
    nnx.eval_shape(loss, model)


def test_training_drops_the_n_grams_of_whole_positions():
    sizes = {"vocab_size": 17, "block_size": 64, "num_layers": 1, "num_heads": 3, "embed_dim": 6}
    ngrams = {"ngram_sizes": (2, 4), "ngram_rows": 19, "ngram_dropout": RATE}
    model = random_gpt("nanogpt", **sizes, **ngrams)
    tokens = jnp.asarray(np.random.default_rng(2).integers(17, size=(40, 64)))
    assert model.ngram_embedding is not None
    added = np.asarray(compiled(model.ngram_embedding, tokens))
    bare = np.asarray(compiled(model.embed, tokens)) - added
    train = jax.jit(lambda key: model.embed(tokens, rngs=nnx.Rngs(dropout=key)))

    def kept(seed):
        """What is left of the n-grams, as a part of them."""
        left = np.asarray(train(jax.random.key(seed))) - bare
        ratio = (left * added).sum(-1) / (added * added).sum(-1)
        # all of a position's features are scaled alike
        assert abs(left - ratio[..., None] * added).max() < 1e-5
        return ratio

    ratio = kept(3)
    is_kept = ratio > 0.5
    np.testing.assert_allclose(ratio, np.where(is_kept, 1 / (1 - RATE), 0), atol=1e-3)
    assert abs(is_kept.mean() - (1 - RATE)) < 4 * (RATE * (1 - RATE) / ratio.size) ** 0.5
    assert not np.array_equal(is_kept[0], is_kept[1])
    np.testing.assert_allclose(kept(3), ratio, atol=1e-6)
    assert not np.array_equal(kept(4) > 0.5, is_kept)


def test_no_dropout_is_the_default():
    assert jgpt.ModelConfig().dropout == jgpt.Head(6, 5, rngs=nnx.Rngs(0)).dropout == 0


def test_attention_drops_nothing_unless_it_is_asked_to():
    """A key alone is no rate: the default rate is zero."""
    query, key, value = (normal(seed, 2, 7, 6) for seed in range(3))

    def attended(query, key, value, dropout_key):
        mask = jgpt.causal_mask(7, 3)
        return {
            "plain": attend(query, key, value),
            "plain with a key": attend(query, key, value, dropout_key=dropout_key),
            "windowed": attend_windowed(query, key, value, mask, 3),
            "windowed with a key": attend_windowed(
                query, key, value, mask, 3, dropout_key=dropout_key
            ),
        }

    found = compiled(attended, query, key, value, jax.random.key(3))

    assert jnp.array_equal(found["plain with a key"], found["plain"])
    assert jnp.array_equal(found["windowed with a key"], found["windowed"])


def test_each_place_drops_for_itself():
    config = jgpt.ModelConfig(num_layers=2, num_heads=3, embed_dim=6, block_size=5, dropout=RATE)
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    stream = rngs(4)
    nnx.jit(lambda model, rngs: model(jnp.zeros((1, 5), jnp.int32), rngs=rngs))(model, stream)

    # the embedding, and in each block the attention weights and two residual branches
    assert stream.dropout.count[...] == 1 + 2 * 3
