"""Each module against the port with the same weights, and against PyTorch's own code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional as F

import jgpt
from jgpt.nn.layers import LayerNorm, RMSNorm
from jgpt.training.optimizer import clip_by_global_norm
from tests import models
from tests.models import randomised, to_torch, weights_of
from tests.parity import torch_gpt
from tests.parity.ladder import TOLERANCE, errors
from tests.quick import only

BATCH, TIME, KEYS, EMBED, HEADS, HIDDEN = 2, 5, 13, 21, 3, 29


@pytest.fixture(params=only(["float64"], TOLERANCE))
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def inputs(dtype, time=TIME, seed=3, size=0.3, embed=EMBED):
    values = size * np.random.default_rng(seed).standard_normal((BATCH, time, embed))
    return values.astype(dtype)


def close(mine, its, dtype):
    mine, its = np.asarray(mine), its.detach().numpy()
    assert mine.shape == its.shape
    assert mine.dtype == its.dtype == dtype
    return errors({"": mine}, {"": its})[1] < TOLERANCE[dtype]


def of_config(kind, embed_dim, *sizes, param_dtype, rotary=False, scale=None, **options):
    """A module with the port's arguments: heads, if it has them, and hidden features."""
    *heads, hidden_dim = sizes
    config = jgpt.ModelConfig(
        **{"use_bias": True, **options},
        embed_dim=embed_dim,
        num_heads=heads[0] if heads else 1,
        hidden_dim=hidden_dim,
        positions="rotary" if rotary else "learned",
        attention_scale=scale,
        dtype=param_dtype,
        param_dtype=param_dtype,
    )
    return kind(config, rngs=nnx.Rngs(0))


def in_dtype(make):
    return lambda *sizes, param_dtype, **options: make(
        *sizes, dtype=param_dtype, param_dtype=param_dtype, **options
    )


MODULES = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
    "Head": in_dtype(models.head),
    "MultiHeadAttention": in_dtype(models.attention),
    "FeedForward": functools.partial(of_config, jgpt.FeedForward),
    "Block": functools.partial(of_config, jgpt.Block),
}


def pair(name, dtype, *sizes, **options) -> tuple[Any, Any]:
    """A module of jgpt with random weights, and the port's with the same."""
    module = MODULES[name](*sizes, **options, param_dtype=dtype)
    nnx.update(module, randomised(weights_of(module)))
    port = getattr(torch_gpt, name)(*sizes, **options).to(getattr(torch, dtype))
    tensors = to_torch(weights_of(module))
    port.load_state_dict({name: torch.tensor(tensor) for name, tensor in tensors.items()})
    return module, port


ATTENTION = [("Head", (EMBED, 7)), ("MultiHeadAttention", (EMBED, HEADS))]


@pytest.mark.parametrize(("name", "sizes"), ATTENTION)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(name, sizes, biases, causal, dtype):
    options = {"use_bias": biases, "causal": causal}
    if name == "MultiHeadAttention":
        options["qkv_bias"] = biases
    module, port = pair(name, dtype, *sizes, **options)
    x, context = inputs(dtype), inputs(dtype, KEYS, seed=4)
    assert close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)
    cross = module(jnp.asarray(x), jnp.asarray(context))
    assert close(cross, port(torch.tensor(x), torch.tensor(context)), dtype)
    weights = np.asarray(module.weights(jnp.asarray(x)))
    if name == "Head":
        weights = weights[:, None]
    assert close(weights, port.weights(torch.tensor(x)), dtype)

    port.scale = 1.0
    assert not close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)


@pytest.mark.parametrize(("name", "sizes"), ATTENTION)
def test_attention_sees_a_future_leak(name, sizes, dtype):
    module, port = pair(name, dtype, *sizes)
    port.causal = False
    x = inputs(dtype)
    assert not close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)


PLACED = {"rotary": True, "qk_norm": True, "scale": 0.7}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("name", "sizes", "groups"),
    [
        ("Head", (EMBED, 8), {}),
        ("MultiHeadAttention", (24, 6), {"num_kv_heads": 3}),
        ("MultiHeadAttention", (24, 6), {"num_kv_heads": 1}),
    ],
)
def test_attention_with_rotary_positions_norms_and_groups(name, sizes, groups, biases, dtype):
    options = {**PLACED, **groups, "use_bias": biases}
    if name == "MultiHeadAttention":
        options["qkv_bias"] = biases
    module, port = pair(name, dtype, *sizes, **options)
    x, context = (inputs(dtype, time, time, embed=sizes[0]) for time in (TIME, KEYS))

    def agrees():
        mine = module(jnp.asarray(x)), module(jnp.asarray(x), jnp.asarray(context))
        its = port(torch.tensor(x)), port(torch.tensor(x), torch.tensor(context))
        same = [close(*outputs, dtype) for outputs in zip(mine, its, strict=True)]
        assert same[0] == same[1]
        return same[0]

    assert agrees()
    weights = np.asarray(module.weights(jnp.asarray(x)))
    if name == "Head":
        weights = weights[:, None]
    assert close(weights, port.weights(torch.tensor(x)), dtype)
    for attribute, broken in (("base", 100.0), ("epsilon", 1e-4), ("scale", 0.6)):
        right = getattr(port, attribute)
        setattr(port, attribute, broken)
        assert not agrees(), attribute
        setattr(port, attribute, right)


@pytest.mark.parametrize(("name", "sizes"), ATTENTION)
@pytest.mark.parametrize("window", only([1, 3], [1, 2, 3, TIME]))
def test_attention_in_a_window(name, sizes, window, dtype):
    module, port = pair(name, dtype, *sizes, window=window)
    x, context = inputs(dtype), inputs(dtype, KEYS, seed=4)
    assert close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)
    cross = module(jnp.asarray(x), jnp.asarray(context))  # across sequences there is none
    assert close(cross, port(torch.tensor(x), torch.tensor(context)), dtype)
    port.window = window % TIME + 1
    assert not close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_grouped_heads_are_torchs(num_kv_heads, dtype):
    module, port = pair("MultiHeadAttention", dtype, 24, 6, num_kv_heads=num_kv_heads)
    x = torch.tensor(inputs(dtype, embed=24))
    query = port.split(port.query(x), 6)
    key, value = (port.split(part(x), num_kv_heads) for part in (port.key, port.value))
    for causal in (True, False):
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        its = port.projection(heads.transpose(1, 2).flatten(-2))
        assert close(module(jnp.asarray(x)), its, dtype) == causal


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "relu_squared"])
@pytest.mark.parametrize("biases", [False, True])
def test_feed_forward(activation, biases, dtype):
    options = {"activation": activation, "use_bias": biases}
    module, port = pair("FeedForward", dtype, EMBED, HIDDEN, **options)
    x = inputs(dtype)
    assert close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)
    wrong = {"relu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu_squared": "relu"}
    port.activation = wrong[activation]
    assert not close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)


@pytest.mark.parametrize("biases", [False, True])
def test_block(biases, dtype):
    options = {"qkv_bias": biases, "use_bias": biases, "activation": "relu"}
    module, port = pair("Block", dtype, EMBED, HEADS, HIDDEN, **options)
    x = inputs(dtype)
    assert close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)
    port.attention_norm.epsilon = 1e-6
    assert not close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)


def test_layer_norm_is_torchs(dtype):
    module, port = pair("LayerNorm", dtype, EMBED)
    x = torch.tensor(inputs(dtype))
    norm = torch.nn.LayerNorm(EMBED).to(x.dtype)
    norm.load_state_dict(port.state_dict())
    y = module(jnp.asarray(x))
    assert close(y, port(x), dtype)
    assert close(y, norm(x), dtype)
    norm.eps = 1e-6
    assert not close(y, norm(x), dtype)


@pytest.mark.parametrize("norm_scale", [False, True])
def test_a_block_of_the_modern_family(norm_scale, dtype):
    options = {**PLACED, "num_kv_heads": 3, "activation": "relu_squared", "use_bias": False}
    options |= {"norm": "rms", "norm_scale": norm_scale}
    module, port = pair("Block", dtype, 24, 6, HIDDEN, **options)
    x = inputs(dtype, embed=24)
    assert close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)
    port.feed_forward_norm.epsilon = 1e-6
    assert not close(module(jnp.asarray(x)), port(torch.tensor(x)), dtype)


@pytest.mark.parametrize("use_scale", [False, True])
def test_rms_norm_is_torchs(use_scale, dtype):
    module, port = pair("RMSNorm", dtype, EMBED, epsilon=1e-3, use_scale=use_scale)
    x = torch.tensor(inputs(dtype))
    norm = torch.nn.RMSNorm(EMBED, eps=1e-3, elementwise_affine=use_scale).to(x.dtype)
    norm.load_state_dict(port.state_dict())
    y = module(jnp.asarray(x))
    assert close(y, port(x), dtype)
    assert close(y, norm(x), dtype)
    norm.eps = 1e-4
    assert not close(y, norm(x), dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_scaled_dot_product_attention(causal, dtype):
    random = np.random.default_rng(5)
    query, key, value = (
        torch.tensor(random.standard_normal((BATCH, HEADS, TIME, width)).astype(dtype))
        for width in (7, 7, 11)
    )
    mask = jgpt.causal_mask(TIME) if causal else None
    mine = jgpt.attend(jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), mask)
    its = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    assert close(mine, its, dtype)
    its = F.scaled_dot_product_attention(query, key, value, is_causal=not causal)
    assert not close(mine, its, dtype)


@pytest.mark.parametrize("biases", [False, True])
def test_torchs_multi_head_attention_is_ours_with_its_packed_weights(biases, dtype):
    reference = torch.nn.MultiheadAttention(EMBED, HEADS, bias=biases, batch_first=True)
    reference = reference.to(getattr(torch, dtype))
    random = torch.Generator().manual_seed(6)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=random)
    tensors: dict[str, torch.Tensor] = dict(reference.named_parameters())
    names = ("query", "key", "value", "projection")
    kernels = (*tensors["in_proj_weight"].chunk(3), tensors["out_proj.weight"])
    weights = {name: {"kernel": kernel.T} for name, kernel in zip(names, kernels, strict=True)}
    if biases:
        values = (*tensors["in_proj_bias"].chunk(3), tensors["out_proj.bias"])
        for name, bias in zip(names, values, strict=True):
            weights[name]["bias"] = bias
    options = {"qkv_bias": biases, "use_bias": biases}
    module = models.attention(EMBED, HEADS, param_dtype=dtype, dtype=dtype, **options)
    nnx.update(module, jax.tree.map(lambda tensor: jnp.asarray(tensor.detach()), weights))

    x, context = inputs(dtype), inputs(dtype, KEYS, seed=4)
    future = torch.ones(TIME, TIME).triu(1).bool()
    its = reference(*[torch.tensor(x)] * 3, attn_mask=future, need_weights=False)[0]
    assert close(module(jnp.asarray(x)), its, dtype)
    query, source = torch.tensor(x), torch.tensor(context)
    its, weights = reference(query, source, source, average_attn_weights=False)
    assert close(module(jnp.asarray(x), jnp.asarray(context)), its, dtype)
    assert close(module.weights(jnp.asarray(x), jnp.asarray(context)), weights, dtype)


def test_cross_entropy_is_torchs(dtype):
    random = np.random.default_rng(7)
    logits = 10 * random.standard_normal((BATCH, TIME, 17)).astype(dtype)
    targets = random.integers(17, size=(BATCH, TIME))
    mine = jgpt.cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    its = F.cross_entropy(torch.tensor(logits).mT, torch.tensor(targets))
    assert close(mine, its, dtype)


@pytest.mark.parametrize("limit", [1.0, 1e9])
def test_clipping_is_torchs(limit, dtype):
    gradients = [3 * inputs(dtype), inputs(dtype, seed=8)]
    clip = clip_by_global_norm(limit)
    mine: Any = clip.update([jnp.asarray(gradient) for gradient in gradients], clip.init([]))[0]
    parameters = [torch.nn.Parameter(torch.zeros(gradient.shape)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data = parameter.data.to(getattr(torch, dtype))
        parameter.grad = torch.tensor(gradient)
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    assert norm > 1  # so that a limit of 1 clips
    for array, parameter in zip(mine, parameters, strict=True):
        assert parameter.grad is not None
        assert close(array, parameter.grad, dtype)
