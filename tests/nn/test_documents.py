"""Document masks: several documents in one window, each as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt.nn.attention import document_mask, positions_in_documents
from tests.models import compiled, random_gpt, tokens_of
from tests.quick import only

LENGTHS = (4, 2, 5)


def test_masks_and_positions_of_documents():
    documents = jnp.asarray([[5, 5, 9, 9, 9, 5]])

    positions = positions_in_documents(documents)
    mask = document_mask(documents)

    assert positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    of_the_fifth = mask[0, 0, 4]
    assert of_the_fifth.tolist() == [False, False, True, True, True, False]


QUICK = {("modern", None)}


@pytest.mark.parametrize(
    ("family", "change"),
    only(QUICK, [("modern", None), ("modern", "scan_layers"), ("qwen3", "remat")]),
)
def test_each_document_is_computed_as_if_it_were_alone(family, change):
    """States and gradients; with numbers that rise, as a cumulative sum gives them."""
    changes = {change: True} if change else {}
    model = random_gpt(family, **changes)
    tokens = tokens_of(1, batch=1)
    numbers = np.repeat([0, 1, 2], LENGTHS)
    documents = jnp.asarray(numbers[None])
    graph, weights = nnx.split(model)

    def in_one_window(weights):
        model = nnx.merge(graph, weights)
        return model.hidden(tokens, documents=documents)

    def crossing_documents(weights):
        model = nnx.merge(graph, weights)
        return model.hidden(tokens)

    def one_by_one(weights):
        model = nnx.merge(graph, weights)
        states = []
        start = 0
        for length in LENGTHS:
            document = tokens[:, start : start + length]
            states.append(model.hidden(document))
            start += length
        return jnp.concatenate(states, axis=1)

    expected, expected_gradients = with_gradients(one_by_one, weights)
    found, gradients = with_gradients(in_one_window, weights)

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    leaves = jax.tree.leaves(gradients)
    expected_leaves = jax.tree.leaves(expected_gradients)
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=2e-3, atol=2e-4)
    # the control: attention that crosses documents computes something else after the first
    crossing = compiled(crossing_documents, weights)
    after_the_first = np.abs(crossing - expected)[:, LENGTHS[0] :]
    assert after_the_first.max() > 1e-2


def with_gradients(states_of, weights):
    """States, and the gradients of the sum of their sines."""

    def summed(weights):
        states = states_of(weights)
        return jnp.sin(states).sum(), states

    differentiate = jax.value_and_grad(summed, has_aux=True)
    (_, states), gradients = compiled(differentiate, weights)
    return states, gradients


def test_dropout_of_attention_leaves_documents_apart():
    """With dropout another kernel computes the weights, which must take the mask, too."""
    model = random_gpt("modern", dropout=0.3)
    documents = jnp.asarray(np.repeat([0, 1, 2], LENGTHS)[None])
    tokens = tokens_of(1, batch=1)
    first, *_ = LENGTHS
    others = tokens.at[0, :first].set((tokens[0, :first] + 1) % model.vocab_size)

    def states(tokens):
        rngs = nnx.Rngs(dropout=jax.random.key(3))
        return model.hidden(tokens, documents=documents, rngs=rngs)

    np.testing.assert_array_equal(states(tokens)[0, first:], states(others)[0, first:])
    assert not np.array_equal(states(tokens)[0, :first], states(others)[0, :first])
