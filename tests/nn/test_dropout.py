"""Dropout: how much is dropped, what is left, and that the key alone decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.nn.layers import apply_dropout
from tests.models import compiled, normal, random_gpt, tokens_of

RATE = 0.3
PLAIN = jgpt.ModelConfig(embed_dim=6, num_heads=3, hidden_dim=13)
CONFIG = dataclasses.replace(PLAIN, dropout=RATE)
FIVE_TOKENS = jnp.zeros((1, 5), jnp.int32)


def share_deviation(count):
    """The standard deviation of the share that is kept of so many numbers."""
    variance = RATE * (1 - RATE) / count
    return variance**0.5


def test_what_is_kept_is_scaled_and_the_rest_is_zero():
    x = jnp.full((200, 500), 2.0)

    y = np.asarray(apply_dropout(x, RATE, jax.random.key(0)))

    scaled = np.float32(2.0) / np.float32(1 - RATE)
    assert set(np.unique(y)) == {np.float32(0), scaled}
    # within four standard deviations of a share of so many numbers
    deviation = share_deviation(x.size)
    deviation_of_mean = deviation * 2.0 / (1 - RATE)
    kept_share = (y > 0).mean()
    assert abs(kept_share - (1 - RATE)) < 4 * deviation
    assert abs(y.mean() - 2.0) < 4 * deviation_of_mean


MODULES = [
    jgpt.Head(6, 5, dropout=RATE, window=3, rngs=nnx.Rngs(0)),
    jgpt.FeedForward(CONFIG, rngs=nnx.Rngs(0)),
    jgpt.Block(CONFIG, rngs=nnx.Rngs(0)),
]
X = normal(3, 2, 7, 6)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_evaluation_has_none_and_training_is_by_the_key_and_the_rate(module):
    """After `train()` as before; without a rate, a key drops nothing."""
    plain = nnx.clone(module)
    plain.set_attributes(dropout=0.0, raise_if_not_found=False)
    training = nnx.clone(module)
    training.train()

    @jax.jit
    def with_key(x, key):
        return {
            "module": module(x, rngs=nnx.Rngs(dropout=key)),
            "after train()": training(x, rngs=nnx.Rngs(dropout=key)),
            "without a rate": plain(x, rngs=nnx.Rngs(dropout=key)),
        }

    @jax.jit
    def without_key(x):
        return {"module": module(x), "without a rate": plain(x)}

    evaluated = without_key(X)
    first = with_key(X, jax.random.key(1))
    second = with_key(X, jax.random.key(2))

    assert jnp.abs(evaluated["module"]).max() > 0
    assert jnp.array_equal(evaluated["without a rate"], evaluated["module"])
    assert jnp.array_equal(first["without a rate"], evaluated["module"])
    assert jnp.array_equal(first["after train()"], first["module"])
    assert not jnp.array_equal(first["module"], second["module"])
    assert not jnp.array_equal(first["module"], evaluated["module"])


@pytest.mark.parametrize(("dropout", "ngram_dropout"), [(RATE, 0.0), (0.0, RATE)])
def test_so_it_is_of_a_model_and_inside_a_gradient(dropout, ngram_dropout):
    rates = {"dropout": dropout, "ngram_dropout": ngram_dropout}
    model = random_gpt("nanogpt", num_layers=1, ngram_sizes=(2,), **rates)

    def loss(model):
        logits = model(FIVE_TOKENS)
        return jgpt.cross_entropy(logits, FIVE_TOKENS)

    model.train()
    for call in (loss, nnx.value_and_grad(loss), nnx.jit(loss)):
        with pytest.raises(ValueError, match=rf"after train\(\), `dropout={RATE}` needs"):
            nnx.eval_shape(call, model)
    with pytest.raises(ValueError, match="eval method switches back to evaluation"):
        jgpt.generate(model, FIVE_TOKENS, 2, key=jax.random.key(0))

    model.eval()  # and after it nothing needs a key
    nnx.eval_shape(loss, model)


def test_training_drops_the_n_grams_of_whole_positions():
    ngrams = {"ngram_sizes": (2, 4), "ngram_rows": 19, "ngram_dropout": RATE}
    model = random_gpt("nanogpt", block_size=64, num_layers=1, **ngrams)
    tokens = tokens_of(2, batch=40, time=64)  # enough for a share to be seen
    assert model.ngram_embedding is not None
    added = np.asarray(compiled(model.ngram_embedding, tokens))
    embedded = np.asarray(compiled(model.embed, tokens))
    without_ngrams = embedded - added

    @jax.jit
    def train(key):
        return model.embed(tokens, rngs=nnx.Rngs(dropout=key))

    def kept_ratio(seed):
        """What is left of the n-grams at each position, as a part of them."""
        trained = np.asarray(train(jax.random.key(seed)))
        left = trained - without_ngrams
        ratio = (left * added).sum(-1) / (added * added).sum(-1)
        # all of a position's features are scaled alike
        difference = left - ratio[..., None] * added
        assert abs(difference).max() < 1e-5
        return ratio

    ratio = kept_ratio(3)
    is_kept = ratio > 0.5
    expected = np.where(is_kept, 1 / (1 - RATE), 0)
    np.testing.assert_allclose(ratio, expected, atol=1e-3)
    # within four standard deviations of a share of so many positions
    kept_share = is_kept.mean()
    assert abs(kept_share - (1 - RATE)) < 4 * share_deviation(ratio.size)
    assert not np.array_equal(is_kept[0], is_kept[1])
    assert not np.array_equal(kept_ratio(4) > 0.5, is_kept)
