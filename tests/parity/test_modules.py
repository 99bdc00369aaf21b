"""Attention and norms, by themselves, against the port and PyTorch's own code.

The ladder compares them inside a model; here are cross-attention, weights and encoders too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `parity` is not installed")
import torch
from flax import nnx

import jgpt
from tests.parity.ladder import TOLERANCE, errors

BATCH, TIME, KEYS, EMBED, HEADS = 2, 5, 13, 21, 3


def inputs(time: int, seed: int) -> np.ndarray:
    return 0.3 * np.random.default_rng(seed).standard_normal((BATCH, time, EMBED))


def close(mine, its) -> bool:
    assert mine.dtype == "float64"
    return errors({"": np.asarray(mine)}, {"": its.detach().numpy()})[1] < TOLERANCE["float64"]


def packed_weights(reference: torch.nn.MultiheadAttention) -> dict[str, Any]:
    """PyTorch's weights of queries, keys and values, which are one array, under our names."""
    tensors: dict[str, torch.Tensor] = dict(reference.named_parameters())
    query, key, value = tensors["in_proj_weight"].chunk(3)
    query_bias, key_bias, value_bias = tensors["in_proj_bias"].chunk(3)
    weights = {
        "query": {"kernel": query.T, "bias": query_bias},
        "key": {"kernel": key.T, "bias": key_bias},
        "value": {"kernel": value.T, "bias": value_bias},
        "projection": {"kernel": tensors["out_proj.weight"].T, "bias": tensors["out_proj.bias"]},
    }
    return jax.tree.map(lambda tensor: jnp.asarray(tensor.detach()), weights)


@jax.enable_x64(True)
def test_torchs_multi_head_attention_is_ours_with_its_packed_weights():
    reference = torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True).double()
    random = torch.Generator().manual_seed(6)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=random)
    options = {"qkv_bias": True, "use_bias": True, "dtype": "float64", "param_dtype": "float64"}
    config = jgpt.ModelConfig(embed_dim=EMBED, num_heads=HEADS, **options)
    module = jgpt.MultiHeadAttention(config, causal=True, rngs=nnx.Rngs(0))
    nnx.update(module, packed_weights(reference))
    x = inputs(TIME, seed=3)
    context = inputs(KEYS, seed=4)
    query = torch.tensor(x)
    source = torch.tensor(context)
    future = torch.ones(TIME, TIME).triu(1).bool()

    found = module(jnp.asarray(x))
    found_across = module(jnp.asarray(x), jnp.asarray(context))
    found_weights = module.weights(jnp.asarray(x), jnp.asarray(context))

    causal, _ = reference(query, query, query, attn_mask=future, need_weights=False)
    assert close(found, causal)
    across, weights = reference(query, source, source, average_attn_weights=False)
    assert close(found_across, across)
    assert close(found_weights, weights)
    # the control: without the mask
    seeing_the_future, _ = reference(query, query, query, attn_mask=None, need_weights=False)
    assert not close(found, seeing_the_future)
