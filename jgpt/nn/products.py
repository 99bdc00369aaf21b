"""Matrix products: dtypes, accumulation, and shapes that hardware multiplies fast."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jgpt.nn.precision import wider_dtype
from jgpt.shapes.contract import typed
from jgpt.shapes.matching import SYMBOLS

PAD_MIN_FEATURES = 1024
PAD_MIN_ROWS = 128
TILE = 128
"""The size of a tile: large products are padded to a multiple of it."""


@typed
def project(
    x: Float[Array, "*rows in_features"],
    kernel: Float[Array, "in_features out_features"],
    dtype: DTypeLike,
    activation_dtype: DTypeLike | None = None,
) -> Float[Array, "*rows out_features"]:
    """Compute `x @ kernel` with operands in `dtype` and the result in `activation_dtype`.

    Leading axes are flattened, since XLA's CPU backend has no fast path for the gradient of a
    batched product.
    """
    rows = x.shape[:-1]
    in_features = x.shape[-1]
    wide = wider_dtype(dtype)
    # The backward pass of a batched product recomputes the activation's gradient in a loop that is
    # not vectorised. Flattened, that of an MLP took 4 ms instead of 12.
    flat = x.reshape(math.prod(rows), in_features).astype(wide)  # rows in_features
    product = _product
    if jnp.finfo(dtype).bits < 32:
        product = _low_precision_product
    y = product(flat, kernel.astype(wide), dtype, activation_dtype)  # rows out_features
    return y.reshape(*rows, kernel.shape[-1])


@typed
def project_to_vocabulary(
    x: Float[Array, "*rows in_features"],
    kernel: Float[Array, "in_features out_features"],
    dtype: DTypeLike,
    activation_dtype: DTypeLike | None = None,
) -> Float[Array, "*rows out_features"]:
    """Apply `project` to a vocabulary, with output features padded to a multiple of 128 inside.

    GPT-2's 50,257 is slow to multiply. With up to 1,024 features, or the few rows of a decoding
    step, padding takes more time than it saves.
    """
    rows = math.prod(x.shape[:-1])
    features = kernel.shape[1]
    padding = 0
    if features > PAD_MIN_FEATURES and _are_many(rows):
        padding = -features % TILE
    padded = jnp.pad(kernel, ((0, 0), (0, padding)))  # in_features vocab+padding
    y = project(x, padded, dtype, activation_dtype)  # *rows vocab+padding
    return y[..., :features]


def _are_many(rows: int) -> bool:
    """Return whether there are enough rows for padding to pay; True if their number is unknown."""
    # `jax.export` makes one program for all numbers of rows; a proof covers both branches.
    if jax.export.is_symbolic_dim(rows) and not SYMBOLS.get():
        return True
    return rows > PAD_MIN_ROWS


@typed
def project_to_tied_vocabulary(
    x: Float[Array, "batch time in_features"],
    embedding: Float[Array, "vocab in_features"],
    dtype: DTypeLike,
    activation_dtype: DTypeLike | None = None,
) -> Float[Array, "batch time vocab"]:
    """Apply `project_to_vocabulary` with a transposed embedding table."""
    # For one token of one sequence, the table times its column: otherwise XLA's CPU backend copies
    # the table.
    if x.shape[:2] == (1, 1):
        column = x[0].T  # in_features 1
        return project(embedding, column, dtype, activation_dtype).T[None]  # 1 1 vocab
    return project_to_vocabulary(x, embedding.T, dtype, activation_dtype)


@typed
def _product(
    x: Float[Array, "rows in_features"],
    kernel: Float[Array, "in_features out_features"],
    dtype: DTypeLike,
    activation_dtype: DTypeLike | None,
) -> Float[Array, "rows out_features"]:
    """Compute `x @ kernel` of operands in `dtype`, accumulated in at least float32."""
    # On CPUs with bfloat16 this is twice as fast as float32. A product that also returns bfloat16
    # is slower than either, since XLA has no fast path for it.
    accumulate = wider_dtype(dtype)
    y = jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=accumulate)
    if activation_dtype is None:
        return y.astype(accumulate)
    return y.astype(activation_dtype)


# Autodiff would multiply 16-bit operands by a 32-bit cotangent, which has no fast path. Here both
# products of the backward pass have operands in `dtype`, too.
_low_precision_product = jax.custom_vjp(_product, nondiff_argnums=(2, 3))


def _forward(x, kernel, dtype, activation_dtype):
    """Return the product, and its operands in `dtype`, which take half the memory to store."""
    saved = (x.astype(dtype), kernel.astype(dtype))
    return _product(x, kernel, dtype, activation_dtype), saved


def _backward(dtype, activation_dtype, saved, gradient):
    """Return the gradients of both operands, in float32 like the operands."""
    x, kernel = saved
    x_gradient = _product(gradient, kernel.T, dtype, activation_dtype)  # rows in_features
    # in_features out_features
    kernel_gradient = _product(x.T, gradient, dtype, activation_dtype)
    return x_gradient.astype(jnp.float32), kernel_gradient.astype(jnp.float32)


_low_precision_product.defvjp(_forward, _backward)
