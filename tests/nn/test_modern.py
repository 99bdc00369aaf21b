"""What the modern family adds to the transformer, field by field, and reading with a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import GPT
from jgpt.nn.layers import LayerNorm, RMSNorm
from tests.models import GROUPS, config_of, random_gpt, tokens_of


def test_rotary_positions_tell_the_order_of_what_was_read():
    model = random_gpt("modern", num_layers=1)
    assert model.position_embedding is None
    first, second = (model(jnp.array([tokens]))[0, -1] for tokens in ([1, 2, 3], [2, 1, 3]))
    assert float(jnp.abs(first - second).max()) > 0.1
    # without them what was read would be a bag of words
    for block in model.blocks:
        block.attention.rotary = False
    first, second = (model(jnp.array([tokens]))[0, -1] for tokens in ([1, 2, 3], [2, 1, 3]))
    np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_zero_initialised_the_residual_stream_is_the_embedding(tie_embeddings):
    config = config_of("modern", tie_embeddings=tie_embeddings)
    model, tokens = GPT(config, rngs=nnx.Rngs(0)), tokens_of(1)
    x = embedded = model.embed(tokens)
    assert jnp.array_equal(embedded, model.token_embedding(tokens))
    assert float(jnp.abs(embedded).min()) > 0
    for block in model.blocks:
        x = block(x)
    assert jnp.array_equal(x, embedded)
    assert bool((model(tokens) == 0).all()) != tie_embeddings
    if tie_embeddings:
        usual = GPT(dataclasses.replace(config, zero_init=False), rngs=nnx.Rngs(0))
        assert float(jnp.abs(model(tokens) - usual(tokens)).max()) > 0.01
    # what writes into the stream is zero, and nothing else
    zero = {
        ".".join(map(str, path))
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if not leaf[...].any()
    }
    projections = {"attention.projection.kernel", "feed_forward.projection.kernel"}
    assert zero == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in projections} | {
        "shortcut"
    } | (set() if tie_embeddings else {"head.kernel"})


def test_each_block_reads_the_embeddings_again_by_its_own_number():
    model, tokens = random_gpt("modern"), tokens_of(1)
    assert model.shortcut is not None
    assert model.shortcut.shape == (2,)
    first, second = 3.0, -0.5
    model.shortcut[...] = jnp.array([first, second])
    embedded = model.embed(tokens)
    x = model.blocks[0]((1 + first) * embedded)
    x = model.blocks[1](x + second * embedded)
    np.testing.assert_allclose(model(tokens), model.logits(model.final_norm(x)), atol=1e-5)
    model.shortcut[...] = jnp.zeros(2)
    plain = model.blocks[1](model.blocks[0](embedded))
    np.testing.assert_allclose(model(tokens), model.logits(model.final_norm(plain)), atol=1e-5)
    assert float(jnp.abs(x - plain).max()) > 0.1


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_logits_are_softly_capped(tie_embeddings):
    capped = random_gpt("modern", tie_embeddings=tie_embeddings, logit_softcap=2.0)
    free = random_gpt("modern", tie_embeddings=tie_embeddings, logit_softcap=None)
    x = 3 * jax.random.normal(jax.random.key(0), (2, 5, GROUPS["embed_dim"]))
    logits = np.asarray(free.logits(x))
    assert np.abs(logits).max() > 4
    np.testing.assert_allclose(capped.logits(x), 2 * np.tanh(logits / 2), rtol=1e-4, atol=1e-5)
    assert float(jnp.abs(capped.logits(1000 * x)).max()) <= 2
    assert (jnp.argsort(capped.logits(x / 50)) == jnp.argsort(free.logits(x / 50))).all()


def test_the_norms_are_the_config_s():
    tokens = tokens_of(1)
    model = random_gpt("modern", norm_scale=True)
    norms = [model.final_norm, model.blocks[1].attention_norm, model.blocks[1].feed_forward_norm]
    assert all(type(norm) is RMSNorm and norm.scale is not None for norm in norms)
    assert all(norm.epsilon == 1e-5 for norm in norms)
    before = model(tokens)
    for norm in norms:
        norm.epsilon = 10.0
    assert float(jnp.abs(model(tokens) - before).max()) > 0.01
    plain = GPT(config_of("gpt2", norm_scale=False, norm_epsilon=0.1), rngs=nnx.Rngs(0)).final_norm
    assert type(plain) is LayerNorm
    assert plain.scale is None
    assert plain.bias is not None
    assert plain.epsilon == 0.1
