"""The machine: platform, peak FLOP/s, memory. No other file asks for them."""

import sys
from dataclasses import dataclass

import jax
import jax.monitoring

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


def peak_flops() -> float | None:
    """A device's dense 16-bit peak in FLOP/s, or None if it is not in the table."""
    kind = device_kinds()[0]
    # a GPU's kind ends with its form factor and memory, a TPU's is exact
    known = [name for name in _PEAK_FLOPS if kind == name or kind.startswith(f"{name}-")]
    known += [name for name in _PEAK_FLOPS if "TPU" not in name and kind.startswith(f"{name} ")]
    return _PEAK_FLOPS[max(known, key=len)] if known else None


@dataclass(frozen=True)
class Platform:
    """A platform to compile for, which need not be the current one."""

    name: str
    """cpu, gpu or tpu."""
    cuda_capability: float | None = None
    """The compute capability of a CUDA GPU, such as 9.0; None elsewhere."""


@typed
def current_platform() -> Platform:
    """The platform that JAX computes on. Raises OSError if it can't use the one it is told to."""
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # an assertion: CUDA without its plugin
        named = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise OSError(
            f"JAX can't use JAX_PLATFORMS={named} on this machine: unset it, or set it to cpu"
        ) from error
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version
    capability = float(device.compute_capability) if is_cuda else None
    return Platform(jax.default_backend(), capability)


def device_kinds() -> list[str]:
    """The kind of each device."""
    return [device.device_kind for device in jax.devices()]


def accelerators() -> int:
    """The number of devices to train on if none are named: one on a CPU, whose cores they share."""
    return 1 if jax.default_backend() == "cpu" else len(jax.devices())


def memory_in_use() -> int | None:
    """Peak memory in bytes: of the device, or on a CPU of this process."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics:
        return statistics.get("peak_bytes_in_use")
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def memory_limit() -> int | None:
    """A device's memory in bytes, or None if it doesn't report it."""
    statistics = jax.local_devices()[0].memory_stats()
    return statistics.get("bytes_limit") if statistics else None
