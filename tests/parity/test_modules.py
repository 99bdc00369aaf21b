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
from tests.models import GROUPS, randomised, to_torch, weights_of
from tests.parity import torch_gpt
from tests.parity.ladder import TOLERANCE, errors
from tests.quick import only

BATCH, TIME, KEYS, EMBED, HEADS = 2, 5, 13, 21, 3


@pytest.fixture(params=only(["float64"], TOLERANCE))
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def inputs(dtype, time=TIME, seed=3, size=0.3, embed=EMBED):
    values = size * np.random.default_rng(seed).standard_normal((BATCH, time, embed))
    return values.astype(dtype)


def close(mine, its, dtype):
    mine = np.asarray(mine)
    its = its.detach().numpy()
    assert mine.shape == its.shape
    assert mine.dtype == its.dtype == dtype
    return errors({"": mine}, {"": its})[1] < TOLERANCE[dtype]


def tensors_of(module):
    return {name: torch.tensor(array) for name, array in to_torch(weights_of(module)).items()}


def attention(dtype, causal=True, **options) -> tuple[Any, Any]:
    """Attention with random weights, and the port's with the same; one head is a `Head`."""
    sizes = {"embed_dim": EMBED, "num_heads": HEADS}
    dtypes = {"dtype": dtype, "param_dtype": dtype}
    config = jgpt.ModelConfig(**{**sizes, **dtypes, **options})
    module: Any = jgpt.MultiHeadAttention(config, causal=causal, rngs=nnx.Rngs(0))
    nnx.update(module, randomised(weights_of(module)))
    port: Any = torch_gpt.MultiHeadAttention(config, causal=causal)
    if config.num_heads == 1:
        module = module.head(0)
        port = torch_gpt.Head(config, causal=causal)
    port.to(getattr(torch, dtype)).load_state_dict(tensors_of(module))
    return module, port


HEAD = {"num_heads": 1, "head_dim": 8}
MODERN = {"positions": "rotary", "qk_norm": True, "attention_scale": 0.7}
WRONG = {"scale": 0.5}
WRONG_MODERN = {**WRONG, "base": 100.0, "epsilon": 1e-4}


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({**HEAD, **MODERN, "qkv_bias": True}, WRONG_MODERN),
        ({"qkv_bias": True}, WRONG),
        pytest.param(
            {**GROUPS, **MODERN, "qkv_bias": True, "use_bias": True},
            WRONG_MODERN,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", only([True], [False, True]))
def test_attention(options, wrong, causal, dtype):
    module, port = attention(dtype, causal, **options)
    x, context = (inputs(dtype, time, time, embed=module.embed_dim) for time in (TIME, KEYS))

    def agrees() -> list[bool]:
        """In self-attention and in cross-attention."""
        mine = module(jnp.asarray(x)), module(jnp.asarray(x), jnp.asarray(context))
        its = port(torch.tensor(x)), port(torch.tensor(x), torch.tensor(context))
        return [close(*outputs, dtype) for outputs in zip(mine, its, strict=True)]

    assert agrees() == [True, True]
    weights = np.asarray(module.weights(jnp.asarray(x)))
    weights = weights[:, None] if isinstance(module, jgpt.Head) else weights
    assert close(weights, port.weights(torch.tensor(x)), dtype)
    port.causal = not causal
    assert agrees() == [False, True]  # in cross-attention there is no future
    port.causal = causal
    for attribute, value in wrong.items():
        right = getattr(port, attribute)
        setattr(port, attribute, value)
        assert agrees() == [False, False], attribute
        setattr(port, attribute, right)


def test_torchs_multi_head_attention_is_ours_with_its_packed_weights(dtype):
    reference = torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    reference = reference.to(getattr(torch, dtype))
    random = torch.Generator().manual_seed(6)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=random)
    tensors: dict[str, torch.Tensor] = dict(reference.named_parameters())
    names = ("query", "key", "value", "projection")
    kernels = (*tensors["in_proj_weight"].chunk(3), tensors["out_proj.weight"])
    biases = (*tensors["in_proj_bias"].chunk(3), tensors["out_proj.bias"])
    weights = {
        name: {"kernel": kernel.T, "bias": bias}
        for name, kernel, bias in zip(names, kernels, biases, strict=True)
    }
    module, _ = attention(dtype, qkv_bias=True, use_bias=True)
    nnx.update(module, jax.tree.map(lambda tensor: jnp.asarray(tensor.detach()), weights))

    x = inputs(dtype)
    context = inputs(dtype, KEYS, seed=4)
    query = torch.tensor(x)
    source = torch.tensor(context)
    future = torch.ones(TIME, TIME).triu(1).bool()
    for mask, agrees in ((future, True), (None, False)):
        its = reference(query, query, query, attn_mask=mask, need_weights=False)[0]
        assert close(module(jnp.asarray(x)), its, dtype) == agrees
    its, weights = reference(query, source, source, average_attn_weights=False)

    assert close(module(jnp.asarray(x), jnp.asarray(context)), its, dtype)
    assert close(module.weights(jnp.asarray(x), jnp.asarray(context)), weights, dtype)
