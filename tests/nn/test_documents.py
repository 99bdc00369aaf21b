"""Document masks: several documents in one window, each as if it were alone."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import MultiHeadAttention, attend, attention_weights
from jgpt.nn.attention import document_mask, positions_in_documents
from tests.models import TRANSFORMERS, compiled, config_of, normal, random_gpt, tokens_of
from tests.quick import only

LENGTHS = (4, 2, 5)


def test_a_mask_may_have_any_leading_axes():
    query, key, value = (normal(seed, 3, 2, 5, 7) for seed in range(3))
    masks = np.asarray(jax.random.bernoulli(jax.random.key(3), 0.6, (3, 1, 5, 5)))
    masks = masks | np.eye(5, dtype=bool)

    found = attend(query, key, value, jnp.asarray(masks))

    for row in range(3):
        alone = attend(query[row], key[row], value[row], jnp.asarray(masks[row, 0]))
        np.testing.assert_allclose(found[row], alone, rtol=1e-6)
    first = attend(query, key, value, jnp.asarray(masks[0, 0]))
    assert not np.allclose(found, first, rtol=1e-3)  # the control
    expected = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)), mask=jnp.asarray(masks)
    )
    np.testing.assert_allclose(found, expected.swapaxes(1, 2), rtol=1e-5, atol=1e-6)
    with pytest.raises((TypeError, ValueError)):
        attention_weights(query, key, jnp.ones((2, 1, 5, 5), bool))


@pytest.mark.parametrize("leading", [(4, 1), (1, 3, 1), (2,)])
def test_a_mask_whose_leading_axes_do_not_fit_is_named(leading):
    x = jnp.ones((3, 7, 5, 4))
    message = rf"^mask has the leading axes {re.escape(str(leading))}, .* queries, \(3, 7\)$"

    with pytest.raises(ValueError, match=message):
        attend(x, x, x, jnp.ones((*leading, 5, 5), bool))


def test_masks_and_positions_of_documents():
    documents = jnp.asarray([[5, 5, 9, 9, 9, 5]])

    assert positions_in_documents(documents).tolist() == [[0, 1, 0, 1, 2, 0]]
    same = np.asarray(document_mask(documents))[0, 0]
    assert same[4].tolist() == [False, False, True, True, True, False]


QUICK = {("modern", None)}


@pytest.mark.parametrize(
    ("family", "change"),
    only(QUICK, itertools.product(TRANSFORMERS, (None, "scan_layers", "remat"))),
)
def test_each_document_is_computed_as_if_it_were_alone(family, change):
    """States and gradients; with numbers that rise, as a cumulative sum gives them."""
    changes = {change: True} if change else {}
    model = random_gpt(family, **changes)
    tokens = tokens_of(1, batch=1)
    documents = jnp.asarray(np.repeat(range(3), LENGTHS)[None])
    graph, weights = nnx.split(model)

    def packed(weights, documents):
        return nnx.merge(graph, weights).hidden(tokens, documents=documents)

    def apart(weights):
        states = []
        start = 0
        for length in LENGTHS:
            document = tokens[:, start : start + length]
            states.append(nnx.merge(graph, weights).hidden(document))
            start += length
        return jnp.concatenate(states, axis=1)

    def with_gradients(states, weights):
        def summed(weights):
            found = states(weights)
            return jnp.sin(found).sum(), found

        (_, found), gradients = compiled(jax.value_and_grad(summed, has_aux=True), weights)
        return found, gradients

    expected, of_apart = with_gradients(apart, weights)
    found, of_packed = with_gradients(lambda weights: packed(weights, documents), weights)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # the control: attention that crosses documents computes something else
    crossing = compiled(packed, weights, None)
    assert np.abs(crossing - expected)[:, LENGTHS[0] :].max() > 1e-2
    for one, other in zip(jax.tree.leaves(of_packed), jax.tree.leaves(of_apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


def test_attention_takes_a_mask_beside_its_causal_one():
    config = config_of("gpt2")
    attention = MultiHeadAttention(config, rngs=nnx.Rngs(0))
    x = normal(1, 2, 6, config.embed_dim)
    everything = jnp.ones((6, 6), bool)

    np.testing.assert_allclose(attention(x, mask=everything), attention(x), rtol=1e-5, atol=1e-6)
    itself = attention(x, mask=jnp.eye(6, dtype=bool))
    alone = attention(x.reshape(12, 1, -1)).reshape(x.shape)
    np.testing.assert_allclose(itself, alone, rtol=1e-5, atol=1e-6)
    assert not np.allclose(itself, attention(x), rtol=1e-3)


def test_a_cache_has_no_documents():
    model = random_gpt("gpt2")
    tokens = tokens_of(1, batch=1)[:, :3]

    with pytest.raises(ValueError, match="continues one document: give cache or documents"):
        model.hidden(tokens, cache=model.empty_cache(1), documents=jnp.zeros((1, 3), jnp.int32))


def test_without_documents_a_block_of_one_s_own_needs_no_mask():
    """And the program is the same as with a block that takes one."""
    plain = random_gpt("gpt2")

    class Plain(nnx.Module):
        def __init__(self, block):
            self.block = block

        def __call__(self, x, *, cache=None, rngs=None):
            return self.block(x, cache=cache, rngs=rngs)

    own: Any = random_gpt("gpt2")
    own.blocks = nnx.List(Plain(block) for block in own.blocks)
    tokens = tokens_of(1, batch=1)

    assert np.array_equal(own(tokens), plain(tokens))
    with pytest.raises(TypeError, match="mask"):
        own.hidden(tokens, documents=jnp.zeros(tokens.shape, jnp.int32))
