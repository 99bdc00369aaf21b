"""What the device can do and does: types, peak speed, memory in use, unwanted compilations."""

import dataclasses
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.monitoring
import jax.numpy as jnp
import platformdirs
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree, Shaped

from jgpt.config import ModelConfig
from jgpt.contracts import typed

_PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
}
_MAX_COMPILED_BYTES = 1 << 30


@typed
def peak_flops() -> float | None:
    """A device's dense 16-bit peak, or None where the maker's figure is unknown."""
    kind = jax.devices()[0].device_kind
    # a GPU's kind goes on with its form and memory, a TPU's is exact
    known = [name for name in _PEAK_FLOPS if kind == name or kind.startswith(f"{name}-")]
    known += [name for name in _PEAK_FLOPS if "TPU" not in name and kind.startswith(f"{name} ")]
    return _PEAK_FLOPS[max(known, key=len)] if known else None


@typed
def cuda_capability() -> float | None:
    """The compute capability of the GPU that JAX computes on, or None where it is no CUDA GPU."""
    device = jax.devices()[0]
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version
    return float(device.compute_capability) if is_cuda else None


@typed
def with_dtype(config: ModelConfig) -> ModelConfig:
    """The config with what `auto` stands for on this device in its place."""
    if config.dtype != "auto":
        return config
    is_narrow = computes_narrow(jax.default_backend(), cuda_capability())
    return dataclasses.replace(config, dtype="bfloat16" if is_narrow else "float32")


@typed
def computes_narrow(platform: str, cuda_capability: float | None) -> bool:
    """Whether a device multiplies in bfloat16 faster than in float32: TPUs, and GPUs since Ampere.

    A CPU may, too, but then it depends on which one it is.
    """
    return platform == "tpu" or (cuda_capability is not None and cuda_capability >= 8.0)


@typed
def memory_in_use() -> int | None:
    """The most bytes that were in use so far: on the device, or on a CPU by this process."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics:
        return statistics.get("peak_bytes_in_use")
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@typed
def memory_limit() -> int | None:
    """The bytes that a device has for arrays, or None where it doesn't say."""
    statistics = jax.local_devices()[0].memory_stats()
    return statistics.get("bytes_limit") if statistics else None


@typed
def keep_compilations() -> None:
    """Read compiled programs from the user's cache, and put new ones there.

    Nothing changes where JAX was told already what to do (`JAX_COMPILATION_CACHE_DIR`). A machine
    has a folder of its own: what is compiled for one processor may not run on another.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = Path(platformdirs.user_cache_dir("jgpt")) / "compiled" / platform.node()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_compilation_cache_max_size", _MAX_COMPILED_BYTES)


@typed
def activation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """What is kept of a computation in `dtype`: the same, but on a CPU at least float32.

    There a product of narrow numbers is fast, and all else with them is not: XLA widens each of
    them before, and narrows it after.
    """
    narrowest = jnp.float32 if jax.default_backend() == "cpu" else dtype
    return jnp.promote_types(dtype, narrowest)


class CompilationWatch:
    """Hears JAX compile something after warm-up, and tells of it once.

    Use it as a context manager, and `arm` it when all that a run needs has been compiled. It
    listens to JAX's monitoring events; where a JAX has none of that name it hears nothing.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    @typed
    def __init__(self, tell: Callable[[str], None]) -> None:
        """Tell through a function, which is called at most once."""
        self._tell: Callable[[str], None] | None = tell
        self._armed = False

    def __enter__(self) -> Self:
        """Listen."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._hear)

    @typed
    def arm(self) -> None:
        """From now on, whatever is compiled is one compilation too many."""
        self._armed = True

    def _hear(self, event: str, duration_secs: float, **details: Any) -> None:
        if self._armed and event == self.EVENT and self._tell is not None:
            tell, self._tell = self._tell, None
            tell(
                f"compiled again after warm-up: {details.get('fun_name', 'a function')}; "
                "JAX_EXPLAIN_CACHE_MISSES=1 says why"
            )


class Profiler:
    """Traces some steps after the first, which compiles; use it as a context manager."""

    @typed
    def __init__(self, directory: Path, steps: int) -> None:
        """Trace so many steps, or none, into a directory."""
        self._directory, self._left = directory, steps
        self._warm = self._tracing = False

    def __enter__(self) -> Self:
        """Nothing to do before the first steps."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write the trace, if training ended before all of its steps."""
        if self._tracing:
            jax.profiler.stop_trace()

    @typed
    def limit(self, count: int) -> int:
        """How many of these steps to take at once; the trace begins where they do."""
        if self._left == 0:
            return count
        if not self._warm:
            return 1
        if not self._tracing:
            self._tracing = True
            jax.profiler.start_trace(self._directory)
        return min(count, self._left)

    @typed
    def stepped(self, count: int, result: PyTree[Shaped[Array, "..."]]) -> None:
        """The steps were started, with this result; the trace ends when its last one is done."""
        if self._tracing:
            self._left -= count
            if self._left == 0:
                jax.block_until_ready(result)
                jax.profiler.stop_trace()
                self._tracing = False
        self._warm = True
