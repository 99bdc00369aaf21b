"""Layers: linear, embeddings, norms, dropout."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from jgpt.config import NormKind
from jgpt.contracts import typed
from jgpt.nn.precision import supported_dtype
from jgpt.sharding import Dimension, Dimensions, parameter, product_spec, sharded_as, with_gathered

INIT_STD = 0.02


MANY_FEATURES, MANY_ROWS, TILE = 1024, 128, 128
"""Products of more rows with more features are padded to a multiple of the tile size."""


SIZES = (
    "batch", "block_size", "capacity", "embed_dim", "head_dim", "hidden_dim", "in_features",
    "num_embeddings", "num_heads", "num_kv_heads", "num_rows", "out_features", "rotary_base",
    "vocab_size", "window",
)  # fmt: skip
"""The attributes of modules that are positive, or None."""


class Module(nnx.Module):
    """An NNX module whose class keeps its own signature, which NNX's metaclass hides.

    Setting one of `SIZES` to 0 or less, `dropout` outside [0, 1), or a negative `epsilon` raises
    ValueError.
    """

    deterministic = True  # `train()` sets it to False, `eval()` to True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dropout" and not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1")
        if name == "epsilon" and not value >= 0:
            raise ValueError(f"{name}={value} must not be negative")
        if name in SIZES and value is not None and not value > 0:
            raise ValueError(f"{name}={value} must be positive")
        super().__setattr__(name, value)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        signature = inspect.signature(cls.__init__)
        shown = list(signature.parameters.values())[1:]  # without self
        cls.__signature__ = inspect.Signature(shown)

    @typed
    def next_dropout_key(self, rngs: nnx.Rngs | None, rate: float) -> Key[Array, ""] | None:
        """The next key of the `dropout` stream, or None in evaluation.

        Raises ValueError if `rngs` lack the stream, and after `train()` if dropout lacks `rngs`.
        """
        if rngs is not None:
            if "dropout" not in rngs and "default" not in rngs:
                raise ValueError("rngs has no stream for dropout: nnx.Rngs(dropout=key) has one")
            return rngs.dropout()
        if rate > 0 and not self.deterministic:
            raise ValueError(
                f"after train(), dropout={rate} needs the call's rngs=nnx.Rngs(dropout=key); "
                "the model's eval method switches back to evaluation"
            )
        return None


class Linear(Module):
    """Affine layer `x @ kernel + bias` with operands in `dtype`, accumulated in at least float32.

    The result is cast to `activation_dtype`; by default it keeps the accumulation's dtype.
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
        dtype: DTypeLike = jnp.float32,
        activation_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.activation_dtype = supported_dtype(dtype), activation_dtype
        shape = (in_features, out_features)
        param_dtype = supported_dtype(param_dtype)
        kernel = init_std * jax.random.normal(rngs.params(), shape, param_dtype)
        bias = jnp.zeros(out_features, param_dtype)
        self.kernel = parameter(kernel, *dimensions)
        self.bias = parameter(bias, dimensions[1]) if use_bias else None

    @typed
    def __call__(
        self, x: Float[Array, "*rows {self.in_features}"]
    ) -> Float[Array, "*rows {self.out_features}"]:
        """Apply the layer to the last axis."""
        dtypes = {"dtype": self.dtype, "activation_dtype": self.activation_dtype}
        into = functools.partial(self._projection(), **dtypes)
        y = with_gathered(into, x, self.kernel, self.dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def _projection(self) -> Callable[..., Any]:
        return project


class ToVocabulary(Linear):
    """A `Linear` into a vocabulary, which may be large."""

    def _projection(self) -> Callable[..., Any]:
        return project_to_vocabulary


@typed
def project(
    x: Float[Array, "*rows in_features"],
    kernel: Float[Array, "in_features out_features"],
    dtype: DTypeLike,
    activation_dtype: DTypeLike | None = None,
) -> Float[Array, "*rows out_features"]:
    """`x @ kernel` with operands in `dtype` and the result in `activation_dtype`.

    Leading axes are flattened: XLA's CPU backend has no fast path for the gradient of a batched
    product.
    """
    rows, in_features = x.shape[:-1], x.shape[-1]
    wide = jnp.promote_types(dtype, jnp.float32)
    flat = x.reshape(math.prod(rows), in_features).astype(wide)
    product = _low_precision_product if jnp.finfo(dtype).bits < 32 else _product
    y = product(flat, kernel.astype(wide), dtype, activation_dtype)
    return y.reshape(*rows, kernel.shape[-1])


@typed
def project_to_vocabulary(
    x: Float[Array, "*rows in_features"],
    kernel: Float[Array, "in_features out_features"],
    dtype: DTypeLike,
    activation_dtype: DTypeLike | None = None,
) -> Float[Array, "*rows out_features"]:
    """`project` to a vocabulary: output features are padded to a multiple of 128 inside.

    GPT-2's 50,257 is slow to multiply. Up to 1,024 features, and for the few rows of a decode step,
    padding costs more than it saves.
    """
    rows, features = math.prod(x.shape[:-1]), kernel.shape[1]
    padding = -features % TILE if features > MANY_FEATURES and rows > MANY_ROWS else 0
    padded = jnp.pad(kernel, ((0, 0), (0, padding)))
    return project(x, padded, dtype, activation_dtype)[..., :features]


@typed
def _product(
    x: Float[Array, "rows in_features"],
    kernel: Float[Array, "in_features out_features"],
    dtype: DTypeLike,
    activation_dtype: DTypeLike | None,
) -> Float[Array, "rows out_features"]:
    """`x @ kernel` of operands in `dtype`, accumulated in at least float32."""
    accumulate = jnp.promote_types(dtype, jnp.float32)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    where = product_spec(x, kernel)
    y = jnp.matmul(x, kernel, preferred_element_type=accumulate, out_sharding=where)
    return y.astype(accumulate if activation_dtype is None else activation_dtype)


# Autodiff would multiply 16-bit operands by a 32-bit cotangent, which has no fast path.
_low_precision_product = jax.custom_vjp(_product, nondiff_argnums=(2, 3))


_low_precision_product.defvjp(
    lambda x, kernel, dtype, activation_dtype: (
        _product(x, kernel, dtype, activation_dtype),
        (x.astype(dtype), kernel.astype(dtype)),
    ),
    lambda dtype, activation_dtype, saved, gradient: tuple(
        _product(*operands, dtype, activation_dtype).astype(jnp.float32)  # the primals are float32
        for operands in ((gradient, saved[1].T), (saved[0].T, gradient))
    ),
)


@typed
def require_in_vocabulary(
    tokens: Int[Array, "*rows"], vocab_size: int, what: str = "token"
) -> None:
    """Raise ValueError, with its place, for the first token outside the vocabulary.

    Not under a trace, where values aren't known: there an embedding and a loss are NaN for a token
    outside, and the tokens from -vocab_size to -1 count from the vocabulary's end.
    """
    if isinstance(tokens, Tracer):
        return
    values = np.asarray(tokens)
    outside = np.argwhere((values < 0) | (values >= vocab_size))
    if len(outside):
        *batch, position = outside[0].tolist() or [0]
        place = "".join(f"batch index {index}, " for index in batch) + f"position {position}"
        raise ValueError(
            f"{what} {values[tuple(outside[0])]} at {place} is outside the vocabulary of "
            f"{vocab_size}: 0 to {vocab_size - 1}"
        )


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
        self.num_embeddings, self.embed_dim = num_embeddings, embed_dim
        shape = (num_embeddings, embed_dim)
        param_dtype = supported_dtype(param_dtype)
        table = init_std * jax.random.normal(rngs.params(), shape, param_dtype)
        self.embedding = parameter(table, dimension, "embed_dim")

    @typed
    def __call__(self, index: Int[Array, "*rows"]) -> Float[Array, "*rows {self.embed_dim}"]:
        """Look up each index. Raises ValueError as `require_in_vocabulary`."""
        require_in_vocabulary(index, self.num_embeddings)
        look = sharded_as(index, lambda index, table: jnp.take(table, index, axis=0))
        return with_gathered(look, index, self.embedding)


class NGramEmbedding(Module):
    """Hashed n-gram embeddings: the sum over sizes of the n-gram that ends at each position.

    N-grams share `num_rows` rows per size through a hash. Before the start of the text the token
    is -1, which hashes like one more token (Pagnoni et al. 2024, section 3.2.1).
    """

    @typed
    def __init__(
        self,
        sizes: tuple[int, ...],
        num_rows: int,
        embed_dim: int,
        *,
        init_std: float = INIT_STD,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if not sizes or list(sizes) != sorted({size for size in sizes if size > 0}):
            raise ValueError(f"sizes={sizes} must be positive and ascending")
        self.sizes, self.num_rows, self.embed_dim = sizes, num_rows, embed_dim
        self.table = Embedding(
            len(sizes) * num_rows, embed_dim, init_std=init_std, param_dtype=param_dtype, rngs=rngs
        )

    @typed
    def __call__(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Embed the n-grams that end at each position; -1 is a missing token."""
        return self.table(self.rows(tokens)).sum(axis=-2)

    @typed
    def rows(self, tokens: Int[Array, "batch time"]) -> Int[Array, "batch time {len(self.sizes)}"]:
        """The table row of each size's n-gram, by hash."""
        longest = max(self.sizes)
        padded = jnp.pad(tokens, ((0, 0), (longest - 1, 0)), constant_values=-1)
        mixed = jnp.zeros(tokens.shape, jnp.uint32)
        rows = []
        for size in range(1, longest + 1):
            ago = padded[:, longest - size : padded.shape[1] - size + 1]
            # Fibonacci hashing: multiply by 2**32 / golden ratio, then fold high bits into low ones
            mixed = (mixed + (ago + 1).astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
            mixed = mixed ^ (mixed >> 15)
            if size in self.sizes:
                row = (mixed % jnp.uint32(self.num_rows)).astype(jnp.int32)
                rows.append(len(rows) * self.num_rows + row)
        return jnp.stack(rows, axis=-1)


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
        self.embed_dim, self.epsilon = embed_dim, epsilon
        self.scale = nnx.Param(jnp.ones(embed_dim, param_dtype)) if use_scale else None

    @typed
    def __call__(
        self, x: Float[Array, "*rows {self.embed_dim}"]
    ) -> Float[Array, "*rows {self.embed_dim}"]:
        """Normalise the last axis."""
        y = rms_norm(x, self.epsilon)
        return y if self.scale is None else y * self.scale[...].astype(y.dtype)


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
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = super().__call__(x - x.mean(axis=-1, keepdims=True))
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def make_norm(
    kind: NormKind,
    embed_dim: int,
    epsilon: float,
    use_scale: bool,
    use_bias: bool,
    param_dtype: DTypeLike,
) -> LayerNorm | RMSNorm:
    """Layer norm or RMS norm, with or without learned scale and bias."""
    shared = {"epsilon": epsilon, "use_scale": use_scale, "param_dtype": param_dtype}
    if kind == "rms":
        return RMSNorm(embed_dim, **shared)
    return LayerNorm(embed_dim, use_bias=use_bias, **shared)


@typed
def rms_norm(x: Float[Array, "*rows features"], epsilon: float) -> Float[Array, "*rows features"]:
    """Divide the last axis by its root mean square, in at least float32."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + epsilon)


@typed
def apply_dropout(
    x: Float[Array, "*rows"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "*rows"]:
    """Inverted dropout (Srivastava et al. 2014, section 4); the identity without a key.

    Raises ValueError for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout={rate} must be at least 0 and below 1")
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
