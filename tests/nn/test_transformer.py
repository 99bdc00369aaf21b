"""The transformer: causal, as small and as large as promised, and able to learn."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import GPT, cross_entropy, preset
from tests.models import (
    SIZES,
    TRANSFORMERS,
    compiled,
    config_of,
    equations,
    normal,
    random_gpt,
    tokens_of,
)
from tests.quick import only

VOCAB = SIZES["vocab_size"]
BLOCK_SIZE = SIZES["block_size"]
EMBED_DIM = SIZES["embed_dim"]


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_another_future_changes_nothing_before_it(family):
    """In one batch: a text, and the same with another token at each time."""
    model = random_gpt(family)
    text = np.asarray(tokens_of(1, batch=1))
    tokens = np.repeat(text, BLOCK_SIZE + 1, axis=0)
    for time in range(BLOCK_SIZE):
        tokens[time + 1, time] = (tokens[time + 1, time] + 1) % VOCAB

    before, *others = np.asarray(compiled(model, tokens))

    for time, after in enumerate(others):
        assert np.array_equal(after[:time], before[:time])
        # from that time on all logits change: nothing is hidden from a token that should see it
        assert (np.abs(after[time:] - before[time:]).max(-1) > 0).all()


def test_initial_parameters_are_those_of_gpt2():
    # large enough that the spread of each kernel is known to a percent
    config = dataclasses.replace(preset("gpt2").model, vocab_size=999, embed_dim=192, num_layers=3)
    model = GPT(config, rngs=nnx.Rngs(0))

    state = nnx.to_flat_state(nnx.state(model, nnx.Param))

    assert len(state) == 2 + 3 * 16 + 2  # two tables, 16 arrays in a block, the last norm
    for path, parameter in state:
        values = np.asarray(parameter[...])
        if path[-1] == "bias":
            assert not values.any()
        elif path[-1] == "scale":
            assert (values == 1).all()
        else:
            std = 0.02
            if "projection" in path:
                # what writes into the residual stream does so twice in each of 3 layers
                std = 0.02 / math.sqrt(6)
            assert values.std() == pytest.approx(std, rel=0.01), path
            assert abs(values.mean()) < 0.05 * std, path
            # of a normal distribution 68.3 % are within a standard deviation, of a uniform one 58 %
            within = (abs(values) < std).mean()
            assert within == pytest.approx(0.683, abs=0.02), path


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_zero_initialised_is_what_writes_into_the_residual_stream(tie_embeddings):
    """And an untied head; nothing else."""
    model = GPT(config_of("modern", tie_embeddings=tie_embeddings), rngs=nnx.Rngs(0))

    zero = set()
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if not leaf[...].any():
            zero.add(".".join(str(part) for part in path))

    expected = {"shortcut"}
    for layer in (0, 1):
        expected.add(f"blocks.{layer}.attention.projection.kernel")
        expected.add(f"blocks.{layer}.feed_forward.projection.kernel")
    if not tie_embeddings:
        expected.add("head.kernel")
    assert zero == expected


# --- scan over the blocks ------------------------------------------------------------------------


@pytest.mark.parametrize("between", only(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("family", ["lecture", "modern"])
def test_a_narrow_model_keeps_its_softmax_norms_and_residuals_wide(family, between):
    # logits that begin at zero would be the same in any precision
    narrow = config_of(family, zero_init=False, dtype="bfloat16", activation_dtype=between)
    model = GPT(narrow, rngs=nnx.Rngs(0))
    wide = GPT(config_of(family, zero_init=False), rngs=nnx.Rngs(0))
    block = model.blocks[0]

    def wide_parts(tokens):
        x = model.embed(tokens)
        narrow_x = x.astype(jnp.bfloat16)
        loss = cross_entropy(model(tokens), tokens)
        return x, block.attention_norm(narrow_x), block(x), loss

    def attended(tokens):
        return block.attention(model.embed(tokens))

    def narrow_and_wide(tokens):
        return model(tokens), wide(tokens)

    tokens = tokens_of(1)
    found, expected = compiled(narrow_and_wide, tokens)

    for part in jax.eval_shape(wide_parts, tokens):
        assert part.dtype == jnp.float32
    assert jax.eval_shape(attended, tokens).dtype == between
    assert jax.tree.leaves(nnx.state(model))[0].dtype == jnp.float32
    # the same parameters, and bfloat16 has 8 bits: a few hundredths of the spread of the logits
    tolerance = 0.03 * float(jnp.std(expected))
    np.testing.assert_allclose(np.float32(found), expected, atol=tolerance)


@pytest.mark.parametrize("tied", [True, False])
def test_a_padded_vocabulary_is_not_seen_from_outside(tied):
    """1030 tokens, padded to 1152 inside the product."""
    model = random_gpt("lecture", vocab_size=1030, tie_embeddings=tied, head_bias=not tied)
    x = normal(1, 2, 5, EMBED_DIM)
    gradient = normal(2, 2, 5, 1030)
    kernel = model.token_embedding.embedding[...].T
    bias = jnp.zeros(1030)
    if model.head is not None:
        assert model.head.bias is not None
        kernel = model.head.kernel[...]
        bias = model.head.bias[...]

    def by_hand(x):
        return x @ kernel + bias

    def logits_and_gradient(function, x):
        logits, pull_back = jax.vjp(function, x)
        (x_gradient,) = pull_back(gradient)
        return logits, x_gradient

    def found_and_expected(x):
        return logits_and_gradient(model.logits, x), logits_and_gradient(by_hand, x)

    found, expected = compiled(found_and_expected, x)

    logits, x_gradient = found
    expected_logits, expected_x_gradient = expected
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        assert 1152 not in leaf.shape
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x_gradient, expected_x_gradient, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("batch", "time", "table_stands"), [(1, 1, 0), (1, 3, 1), (2, 1, 1)])
def test_a_tied_head_is_not_copied_for_one_row(batch, time, table_stands):
    """XLA's CPU backend transposes a table on the right of a product of one row."""
    model = random_gpt("nanogpt")
    x = jnp.ones((batch, time, EMBED_DIM))

    jaxpr = jax.make_jaxpr(model.logits)(x)

    (product,) = equations(jaxpr, "dot_general")
    assert VOCAB in product.invars[table_stands].aval.shape
    assert VOCAB not in product.invars[1 - table_stands].aval.shape


@pytest.mark.parametrize(
    ("family", "capacity", "cached", "time"),
    [("nanogpt", 7, 7, 1), ("nanogpt", BLOCK_SIZE, BLOCK_SIZE, 1), ("modern", 7, 5, 3)],
)
def test_a_cache_refuses_tokens_that_it_has_no_room_for(family, capacity, cached, time):
    """They would replace keys that are still read. The refused call leaves the cache as it was."""
    model = random_gpt(family, num_layers=1)
    cache = model.empty_cache(2, capacity)
    tokens = tokens_of(1, batch=2, time=14)
    expected = compiled(model, tokens[:, :cached])

    model(tokens[:, : cached - 2], cache=cache)
    with pytest.raises(ValueError, match=f"`capacity` {capacity}"):
        model(tokens[:, cached - 2 : cached + time], cache=cache)
    last = model(tokens[:, cached - 2 : cached], cache=cache)
    with pytest.raises(ValueError, match=f"`capacity` {capacity}"):
        model(tokens[:, cached : cached + time], cache=cache)

    np.testing.assert_allclose(last, expected[:, -2:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["nanogpt", "modern"])
def test_longer_inputs_than_the_block_are_rejected(family):
    model = random_gpt(family)
    tokens = tokens_of(0, time=BLOCK_SIZE + 1)

    with pytest.raises(ValueError, match="12 tokens are more than `block_size=11`"):
        model(tokens)
