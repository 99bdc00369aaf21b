"""Pictures: what they draw is what the model computes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jgpt import MultiHeadAttention, preset
from jgpt.nn.attention import merge_heads, split_heads
from jgpt.nn.models import abstract_model
from tests.models import TRANSFORMERS, config_of, loud, tokens_of

CONFIGS = {
    **{family: config_of(family) for family in TRANSFORMERS},
    "window": config_of("nanogpt", attention_window=2),
    "default preset": dataclasses.replace(
        preset("modern-cpu").model, vocab_size=17, block_size=11, attention_window=3, ngram_rows=13
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_drawn_weights_are_those_of_the_forward_pass(config, monkeypatch):
    """Each layer's weighted values, projected, are what its attention gave in the forward pass."""
    model, tokens = loud(abstract_model(config), size=0.5), tokens_of(1)
    given, computed = [], []
    call = MultiHeadAttention.__call__

    def spy(self, x, context=None, **options):
        given.append(x)
        computed.append(call(self, x, context, **options))
        return computed[-1]

    monkeypatch.setattr(MultiHeadAttention, "__call__", spy)
    model(tokens)
    monkeypatch.undo()
    maps = model.attention_weights(tokens)
    assert maps.shape == (len(model.blocks), 2, config.num_heads, 11, 11)
    np.testing.assert_allclose(maps.sum(-1), 1, rtol=1e-6)
    for block, x, expected, weights in zip(model.blocks, given, computed, maps, strict=True):
        attention = block.attention
        value = split_heads(attention.value(x), attention.num_kv_heads)
        value = jnp.repeat(value, attention.num_heads // attention.num_kv_heads, axis=1)
        found = attention.projection(merge_heads(weights @ value))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
