"""Compute dtypes, activation dtypes and attention kernels by platform."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jgpt.config import ModelConfig
from jgpt.machine import Platform
from jgpt.shapes.contract import typed


def for_platform(config: ModelConfig, platform: Platform) -> ModelConfig:
    """Return the config with each `auto` decided for a platform.

    Products are in bfloat16 on TPUs and on CUDA GPUs since Ampere, and in float16 on Volta and
    Turing, whose tensor cores have no bfloat16. Activations are in the same dtype, except on CPUs,
    where they are float32: 16-bit products are fast there, but element-wise operations on 16-bit
    numbers are slow because XLA converts each operand.
    """
    # In this order, since each choice depends on those before it.
    dtype = config.dtype
    if dtype == "auto":
        capability = platform.cuda_capability or 0.0  # None on other platforms
        dtype = "float32"
        if platform.name == "tpu" or capability >= 8.0:
            dtype = "bfloat16"
        elif capability >= 7.0:
            dtype = "float16"
    activation_dtype = config.activation_dtype
    if activation_dtype == "auto":
        narrowest = jnp.float32 if platform.name == "cpu" else dtype
        activation_dtype = wider_dtype(dtype, narrowest).name
    kernel = config.attention_kernel
    if kernel == "auto":
        kernel = "xla"
        if cudnn_attends(activation_dtype, config.head_size, platform):
            kernel = "cudnn"
    return dataclasses.replace(
        config, dtype=dtype, activation_dtype=activation_dtype, attention_kernel=kernel
    )


def portable(config: ModelConfig) -> ModelConfig:
    """Return the config with each `auto` decided as for a CPU, which works on every platform."""
    return for_platform(config, Platform("cpu"))


def cudnn_attends(dtype: DTypeLike, head_dim: int, platform: Platform) -> bool:
    """Return whether cuDNN's fused attention supports a dtype and head size on a platform.

    It needs 16-bit operands and compute capability 8.0 (Ampere), or 9.0 (Hopper) for head sizes
    above 128.
    """
    capability = platform.cuda_capability or 0.0  # None on other platforms
    if capability < 8.0 or jnp.finfo(dtype).bits != 16:
        return False
    largest = 256 if capability >= 9.0 else 128
    return head_dim <= largest and head_dim % 8 == 0


def wider_dtype(dtype: DTypeLike, other: DTypeLike = jnp.float32) -> Any:
    """Return the narrowest dtype that holds the numbers of both."""
    # Whoever has switched on strict promotion still gets a wider dtype, which is asked for here.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


@typed
def at_least_float32(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Cast an array to float32 unless it is wider; sums and averages use this dtype."""
    return x.astype(wider_dtype(x.dtype))


def supported_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype. Raises ValueError for float64 if JAX_ENABLE_X64 is off."""
    # JAX would use float32 instead, with only a warning.
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(f"dtype {jnp.dtype(dtype)} needs JAX_ENABLE_X64=1 in the environment")
    return dtype
