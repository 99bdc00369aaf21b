"""Tokens and targets outside the vocabulary: refused where they can be seen, else as documented."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.nn.layers import Embedding
from jgpt.nn.module import require_in_vocabulary
from tests.models import SIZES, random_model

VOCAB = SIZES["vocab_size"]
OUTSIDE = [VOCAB, VOCAB + 1, 1000, -1, -VOCAB, -1000]


@pytest.mark.parametrize("token", OUTSIDE)
@pytest.mark.parametrize("family", ["nanogpt", "bigram"])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(family, token):
    model = random_model(family)
    tokens = jnp.array([[0] * 5, [0, 0, 0, token, -7]])
    where = f"{token} at batch index 1, position 3 is outside the vocabulary of 17: 0 to 16"
    for call in (model, model.hidden):
        with pytest.raises(ValueError, match=f"^token {where}$"):
            call(tokens)
    with pytest.raises(ValueError, match=f"^target {where}$"):
        jgpt.cross_entropy(jnp.zeros((2, 5, VOCAB)), tokens)
    require_in_vocabulary(jnp.array([[0, VOCAB - 1]]), VOCAB)


def test_the_place_of_a_target_follows_its_axes():
    for targets, place in (
        (jnp.array(9), "position 0"),
        (jnp.array([2, 9]), "position 1"),
        (jnp.zeros((2, 3, 4), int).at[1, 2, 3].set(9), "batch index 1, batch index 2, position 3"),
    ):
        with pytest.raises(ValueError, match=f"target 9 at {place} is outside"):
            jgpt.cross_entropy(jnp.zeros((*targets.shape, 9)), targets)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_a_mean_of_no_losses_is_refused(shape):
    with pytest.raises(ValueError, match="there are no targets"):
        jgpt.cross_entropy(jnp.zeros((*shape, 9)), jnp.zeros(shape, int))


def test_compiled_embedding_and_loss_treat_it_alike():
    """As documented: NaN outside, and from the end for what counts from there."""
    tokens = jnp.array(OUTSIDE)
    table = jnp.arange(1.0, VOCAB + 1)[:, None]
    embedding = Embedding(VOCAB, 1, rngs=nnx.Rngs(0))
    embedding.embedding[...] = table
    looked_up = jax.jit(lambda tokens: embedding(tokens)[:, 0])(tokens)
    losses = jax.vmap(lambda token: jgpt.cross_entropy(-table[:, 0], token))(tokens)
    chosen = losses - jax.nn.logsumexp(-table)
    expected = [np.nan, np.nan, np.nan, VOCAB, 1, np.nan]
    np.testing.assert_allclose(looked_up, expected)
    np.testing.assert_allclose(chosen, expected, rtol=1e-5)
