"""What is computed and kept in which dtype, and by which attention kernel, on which platform."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgpt.config import ModelConfig, TrainConfig
from jgpt.contracts import typed
from jgpt.hardware import Platform

ANYWHERE = Platform("cpu")
"""What runs on a CPU runs everywhere."""


@typed
def for_platform(config: ModelConfig, platform: Platform) -> ModelConfig:
    """The config with what each `auto` stands for on a platform in its place.

    Products are in bfloat16 on TPUs, and on CUDA GPUs since Ampere. On a CPU what is kept between
    them is float32: products of narrow numbers are fast there and all else with them is not, for
    XLA widens each number before and narrows it after.
    """
    dtype, activation, kernel = config.dtype, config.activation_dtype, config.attention_kernel
    if dtype == "auto":
        dtype = "bfloat16" if _computes_narrow(platform) else "float32"
    if activation == "auto":
        is_cpu = platform.name == "cpu"
        activation = jnp.promote_types(dtype, jnp.float32 if is_cpu else dtype).name
    if kernel == "auto":
        head_dim = config.embed_dim // config.num_heads
        kernel = "cudnn" if cudnn_attends(activation, head_dim, platform) else "xla"
    return dataclasses.replace(
        config, dtype=dtype, activation_dtype=activation, attention_kernel=kernel
    )


def run_for_platform(config: TrainConfig, platform: Platform) -> TrainConfig:
    """The same of a run's config: what its programs are made of.

    What is saved of a run leaves to each platform what was left to it.
    """
    return dataclasses.replace(config, model=for_platform(config.model, platform))


def _computes_narrow(platform: Platform) -> bool:
    """Whether bfloat16 products are faster than float32; a CPU's depend on which one it is."""
    return platform.name == "tpu" or (platform.cuda_capability or 0.0) >= 8.0


def cudnn_attends(dtype: DTypeLike, head_dim: int, platform: Platform) -> bool:
    """Whether cuDNN's kernel takes queries of a dtype and a head size on a platform.

    It takes 16-bit numbers, on CUDA GPUs since Ampere (8.0), and before Hopper (9.0) heads of at
    most 128 features.
    """
    capability = platform.cuda_capability or 0.0
    return (
        capability >= 8.0
        and jnp.finfo(dtype).bits == 16
        and head_dim % 8 == 0
        and head_dim <= (256 if capability >= 9.0 else 128)
    )


def available(dtype: DTypeLike) -> DTypeLike:
    """The same dtype. Raises ValueError for float64 where JAX would make float32 of it."""
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(f"dtype {jnp.dtype(dtype)} needs JAX_ENABLE_X64=1 in the environment")
    return dtype
