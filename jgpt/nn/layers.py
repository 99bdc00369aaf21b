"""Layers: linear, embeddings, norms, dropout."""

import math
from collections.abc import Callable
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jgpt.config import ModelConfig
from jgpt.nn.module import Module, require_in_vocabulary
from jgpt.nn.precision import at_least_float32, portable, supported_dtype, wider_dtype
from jgpt.nn.products import project, project_to_vocabulary
from jgpt.parallel.gather import gather_parameter
from jgpt.parallel.rules import Dimension, Dimensions, parameter
from jgpt.shapes.contract import typed

INIT_STD = 0.02
"""The initial std of GPT-2, independent of a layer's sizes."""


class Linear(Module):
    """Affine layer `x @ kernel + bias` with operands in `dtype`, accumulated in at least float32.

    The result is cast to `activation_dtype`; by default it keeps the dtype of the accumulation.
    """

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        init_std: float = INIT_STD,
        dimensions: Dimensions = (None, None),
        product: Callable[..., Any] = project,
        dtype: DTypeLike = jnp.float32,
        activation_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.product = product
        self.dtype = supported_dtype(dtype)
        self.activation_dtype = activation_dtype
        shape = (in_features, out_features)
        param_dtype = supported_dtype(param_dtype)
        kernel = init_std * jax.random.normal(rngs.params(), shape, param_dtype)
        bias = jnp.zeros(out_features, param_dtype)
        # The mesh axes that shard a parameter follow from its dimension names.
        self.kernel = parameter(kernel, *dimensions)
        if use_bias:
            _, out_dimension = dimensions
            self.bias = parameter(bias, out_dimension)
        else:
            self.bias = None

    @typed
    def __call__(
        self, x: Float[Array, "*rows {self.in_features}"]
    ) -> Float[Array, "*rows {self.out_features}"]:
        """Apply the layer to the last axis."""
        kernel = gather_parameter(self.kernel, self.dtype)
        y = self.product(x, kernel, self.dtype, self.activation_dtype)
        if self.bias is None:
            return y
        # a float32 bias would widen 16-bit activations
        return y + jax.lax.broadcast_to_rank(self.bias[...], y.ndim).astype(y.dtype)


@typed
def columns(layer: Linear, start: int, stop: int) -> Linear:
    """Return a copy with the output features from `start` to `stop`."""
    part = nnx.clone(layer)
    part.out_features = stop - start
    part.kernel = nnx.Param(layer.kernel[:, start:stop])
    if layer.bias is not None:
        part.bias = nnx.Param(layer.bias[start:stop])
    return part


class Embedding(Module):
    """Embedding table."""

    @typed
    def __init__(
        self,
        num_embeddings: int,
        embed_dim: int,
        *,
        init_std: float = INIT_STD,
        dimension: Dimension = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_embeddings = num_embeddings
        self.embed_dim = embed_dim
        shape = (num_embeddings, embed_dim)
        param_dtype = supported_dtype(param_dtype)
        table = init_std * jax.random.normal(rngs.params(), shape, param_dtype)
        self.embedding = parameter(table, dimension, "embed_dim")

    @typed
    def __call__(self, index: Int[Array, "*rows"]) -> Float[Array, "*rows {self.embed_dim}"]:
        """Look up each index, in at least float32. Raises ValueError for one outside the table."""
        require_in_vocabulary(index, self.num_embeddings)
        return look_up(gather_parameter(self.embedding), index)


@typed
def look_up(
    table: Float[Array, "in_features embed_dim"], index: Int[Array, "*rows"]
) -> Float[Array, "*rows embed_dim"]:
    """Return the rows of an embedding table, in at least float32."""
    # Widened before the look-up, so that the backward pass sums the gradients of a row in float32.
    # In bfloat16 a token that occurs a thousand times counts 256 times.
    return jnp.take(at_least_float32(table), index, axis=0)


@typed
def rms_norm(x: Float[Array, "*rows features"], epsilon: float) -> Float[Array, "*rows features"]:
    """Divide the last axis by its root mean square, in at least float32."""
    # Widened first, since squares of large features overflow float16.
    x = x.astype(wider_dtype(x.dtype))
    mean_square = jnp.square(x).mean(axis=-1, keepdims=True)  # *rows 1
    # Epsilon is under the root, as in PyTorch: features that are all zero stay zero.
    return x * jax.lax.rsqrt(mean_square + epsilon)


class RMSNorm(Module):
    """Root mean square normalisation (Zhang and Sennrich 2019, section 4), in at least float32."""

    @typed
    def __init__(
        self,
        embed_dim: int,
        *,
        epsilon: float = 1e-5,
        use_scale: bool = True,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.embed_dim = embed_dim
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(embed_dim, param_dtype)) if use_scale else None

    @typed
    def __call__(
        self, x: Float[Array, "*rows {self.embed_dim}"]
    ) -> Float[Array, "*rows {self.embed_dim}"]:
        """Normalise the last axis."""
        y = rms_norm(x, self.epsilon)
        if self.scale is None:
            return y
        return y * jax.lax.broadcast_to_rank(self.scale[...], y.ndim).astype(y.dtype)


class LayerNorm(RMSNorm):
    """Layer normalisation (Ba et al. 2016), computed and returned in at least float32."""

    @typed
    def __init__(
        self,
        embed_dim: int,
        *,
        use_bias: bool = True,
        param_dtype: DTypeLike = jnp.float32,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, param_dtype=param_dtype, **options)
        self.bias = nnx.Param(jnp.zeros(embed_dim, param_dtype)) if use_bias else None

    @typed
    def __call__(
        self, x: Float[Array, "*rows {self.embed_dim}"]
    ) -> Float[Array, "*rows {self.embed_dim}"]:
        """Normalise the last axis."""
        x = x.astype(wider_dtype(x.dtype))
        # Two passes. The mean of squares minus the squared mean takes one pass, but loses digits if
        # the mean is large relative to the spread.
        centred = x - x.mean(axis=-1, keepdims=True)  # *rows embed_dim
        y = super().__call__(centred)  # the variance of values with mean 0 is their mean square
        if self.bias is None:
            return y
        return y + jax.lax.broadcast_to_rank(self.bias[...], y.ndim).astype(y.dtype)


@typed
def apply_dropout(
    x: Float[Array, "*rows"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "*rows"]:
    """Apply inverted dropout (Srivastava et al. 2014, section 4); without a key, return `x`
    unchanged."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    # Scaled up here, so that expectations equal those of evaluation, where nothing is dropped.
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def make_norm(config: ModelConfig) -> RMSNorm:
    """Make the norm that a config describes."""
    # learned scales are optional: `modern-cpu` has none
    options: dict[str, Any] = {
        "epsilon": config.norm_epsilon,
        "use_scale": config.norm_scale,
        "param_dtype": config.param_dtype,
    }
    match config.norm:
        case "layer":
            return LayerNorm(config.embed_dim, use_bias=config.use_bias, **options)
        case "rms":
            return RMSNorm(config.embed_dim, **options)
        case _:
            assert_never(config.norm)


def linear_options(config: ModelConfig) -> dict[str, Any]:
    """Return the options of `Linear` that a config decides for all layers."""
    # This only changes fields that are still `auto`; fit and load have decided them for the
    # platform.
    config = portable(config)
    return {
        "use_bias": config.use_bias,
        "dtype": config.dtype,
        "activation_dtype": config.activation_dtype,
        "param_dtype": config.param_dtype,
    }


def vocabulary_head(config: ModelConfig, *, rngs: nnx.Rngs) -> Linear:
    """Make the language-model head of a config without tied embeddings."""
    options: dict[str, Any] = linear_options(config)
    options["use_bias"] = config.head_bias
    options["init_std"] = INIT_STD
    if config.zero_init:  # equally likely tokens: the loss begins at log(vocab)
        options["init_std"] = 0.0
    return Linear(
        config.embed_dim,
        config.vocab_size,
        dimensions=("embed_dim", "vocab_size"),
        product=project_to_vocabulary,
        rngs=rngs,
        **options,
    )


def residual_std(config: ModelConfig) -> float:
    """Return the initial std of residual projections (Radford et al. 2019, section 2.3)."""
    if config.zero_init:  # each block begins as the identity
        return 0.0
    # Each block adds two branches to the stream, whose variance would grow with the depth.
    return INIT_STD / math.sqrt(2 * config.num_layers)
