"""Which dtype is computed in and which is kept, and where attention has a fused kernel."""

import dataclasses

import jax
import jax.monitoring
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgpt.config import ModelConfig
from jgpt.hardware import cuda_capability


def with_dtype(config: ModelConfig) -> ModelConfig:
    """The config with what `auto` stands for on this device in its place."""
    if config.dtype != "auto":
        return config
    is_narrow = computes_narrow(jax.default_backend(), cuda_capability())
    return dataclasses.replace(config, dtype="bfloat16" if is_narrow else "float32")


def computes_narrow(platform: str, cuda_capability: float | None) -> bool:
    """Whether a device multiplies in bfloat16 faster than in float32: TPUs, and GPUs since Ampere.

    A CPU may, too, but then it depends on which one it is.
    """
    return platform == "tpu" or (cuda_capability is not None and cuda_capability >= 8.0)


def activation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """What is kept of a computation in `dtype`: the same, but on a CPU at least float32.

    There a product of narrow numbers is fast, and all else with them is not: XLA widens each of
    them before, and narrows it after.
    """
    narrowest = jnp.float32 if jax.default_backend() == "cpu" else dtype
    return jnp.promote_types(dtype, narrowest)


def can_fuse(
    dtype: DTypeLike, head_dim: int, *, drops: bool, cuda_capability: float | None
) -> bool:
    """Whether cuDNN's kernel computes attention of such queries on such a device.

    It takes 16-bit numbers and drops no weights; a CUDA GPU before Ampere (8.0) doesn't have it,
    and before Hopper (9.0) it takes heads of at most 128 features. Elsewhere than on a CUDA GPU
    the capability is None.
    """
    return (
        cuda_capability is not None
        and cuda_capability >= 8.0
        and jnp.finfo(dtype).bits == 16
        and head_dim % 8 == 0
        and head_dim <= (256 if cuda_capability >= 9.0 else 128)
        and not drops
    )


def available(dtype: DTypeLike) -> DTypeLike:
    """The same dtype. Raises ValueError for float64 where JAX would make float32 of it."""
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(f"dtype {jnp.dtype(dtype)} needs JAX_ENABLE_X64=1 in the environment")
    return dtype
