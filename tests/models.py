"""The models that tests are about, once: families, sizes, and parameters that hide no mistake."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jgpt import GPT, ModelConfig, MultiHeadAttention
from jgpt.nn.models import LanguageModel, abstract_model

# no two sizes alike, not even those of products: a wrong transposition has nowhere to hide
SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "block_size": 11,
    "num_layers": 2,
    "num_heads": 3,
    "embed_dim": 21,
    "hidden_dim": 29,
}
GROUPS = {"num_heads": 6, "embed_dim": 24, "num_kv_heads": 3}  # heads of an even size, in pairs
FAMILIES: dict[str, dict[str, Any]] = {
    "lecture": {"activation": "relu", "use_bias": True, "head_bias": True, "tie_embeddings": False},
    "nanogpt": {"activation": "gelu"},
    "gpt2": {"activation": "gelu_tanh", "qkv_bias": True, "use_bias": True},
    "modern": {
        **GROUPS,
        "activation": "relu_squared",
        "tie_embeddings": False,
        "positions": "rotary",
        "norm": "rms",
        "norm_scale": False,
        "qk_norm": True,
        "attention_scale": 0.7,
        "zero_init": True,
        "embedding_shortcut": True,
        "logit_softcap": 15.0,
    },
    "qwen3": {
        **GROUPS,
        "activation": "silu",
        "gated": True,
        "head_dim": 10,
        "positions": "rotary",
        "rotary_base": 500.0,
        "norm": "rms",
        "norm_epsilon": 1e-6,
        "qk_norm": True,
        "qk_norm_scale": True,
    },
    "bigram": {"architecture": "bigram"},
}
TRANSFORMERS = [family for family in FAMILIES if family != "bigram"]


def config_of(family: str, **changes: Any) -> ModelConfig:
    """A family's small config."""
    return ModelConfig(**{**SIZES, **FAMILIES[family], **changes})


def normal(seed: int, *shape: int, dtype: Any = None) -> Array:
    """Numbers as NumPy draws them, so that none of it is compiled: float64 where JAX has that."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def tokens_of(seed: int, batch: int = 2, time: int = SIZES["block_size"]) -> Array:
    random = np.random.default_rng(seed)
    return jnp.asarray(random.integers(SIZES["vocab_size"], size=(batch, time), dtype=np.int32))


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result from one program: eagerly, each operation is compiled alone."""
    return jax.jit(function)(*arguments)


def attention(embed_dim: int, num_heads: int, *, causal: bool = True, **options: Any) -> Any:
    """Loud attention with options called as a head's, and with biases in the projection."""
    names = {"window": "attention_window", "scale": "attention_scale"}
    if options.pop("rotary", False):
        options["positions"] = "rotary"
    options = {"use_bias": True} | {names.get(name, name): of for name, of in options.items()}
    config = ModelConfig(embed_dim=embed_dim, num_heads=num_heads, **options)
    make = functools.partial(MultiHeadAttention, config, causal=causal)
    return loud(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))


def loud(module: Any, size: float = 1.0, seed: int = 5) -> Any:
    """The module with parameters large enough to matter, none of them what it begins as."""
    random = np.random.default_rng(seed)

    def drawn(path: Any, leaf: Any) -> Array:
        draw = size * random.standard_normal(leaf.shape)
        if path[-1].key == "scale":
            draw += 1
        elif path[-1].key == "bias":
            draw *= 0.3  # or logits would hardly depend on what was read
        return jnp.asarray(draw, leaf.dtype)

    weights = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    nnx.update(module, jax.tree_util.tree_map_with_path(drawn, weights))
    return module


def random_model(family: str, **changes: Any) -> LanguageModel:
    """A family's model, loud."""
    return loud(abstract_model(config_of(family, **changes)), size=0.5)


def random_gpt(family: str, **changes: Any) -> GPT:
    """The same, of a family that has blocks."""
    model = random_model(family, **changes)
    assert isinstance(model, GPT)
    return model


def randomised(abstract: Any, seed: int = 1) -> Any:
    """Values for every leaf: no bias is zero and no scale is one.

    Kernels keep the size of what passes. Embeddings are small, so that a norm's epsilon matters,
    and the last norm's scales are large, so that all of it matters to the loss.
    """
    random = np.random.default_rng(seed)

    def value(path, leaf):
        name = path[-1].key
        draw = random.standard_normal(leaf.shape)
        if name == "kernel":
            draw /= math.sqrt(leaf.shape[0])
        elif name == "embedding":
            draw *= 0.1
        elif name == "bias":
            draw *= 0.3
        else:
            draw = (5 if path[0].key == "final_norm" else 1) * (1 + 0.5 * draw)
        return jnp.asarray(draw, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, abstract)


def weights_of(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def to_torch(weights: Any) -> dict[str, np.ndarray]:
    """Weights, or gradients, with the names and layouts of PyTorch modules."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaf = np.ascontiguousarray(leaf.T if name.endswith("kernel") else leaf)
        tensors[re.sub(r"(kernel|scale|embedding)$", "weight", name)] = leaf
    return tensors


def nanogpt_rate(
    step: int, warmup: int = 10, steps: int = 110, peak: float = 0.6, least: float = 0.06
) -> float:
    """`get_lr` of nanoGPT's train.py."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step > steps:
        return least
    ratio = (step - warmup) / (steps - warmup)
    return least + 0.5 * (1 + math.cos(math.pi * ratio)) * (peak - least)


def equations(jaxpr: Any, primitive: str) -> list[Any]:
    """The operations of one kind in a program."""
    return [equation for equation in jaxpr.eqns if equation.primitive.name == primitive]
