"""The machine: platform, peak FLOP/s and memory. No other file queries them."""

import contextlib
import ctypes
import gc
import importlib
import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import platformdirs

from jgpt.words import did_you_mean


@dataclass(frozen=True)
class Platform:
    """A platform to compile for, which need not be the current one."""

    name: str
    """cpu, gpu or tpu."""
    cuda_capability: float | None = None
    """The compute capability of a CUDA GPU, such as 9.0; None elsewhere."""


@dataclass(frozen=True)
class Chip:
    """A kind of accelerator with its published figures, per chip."""

    kind: str
    """The name that JAX uses."""
    platform: Platform
    peak_flops: float
    """Dense 16-bit FLOP/s."""
    memory: int
    """Memory in bytes."""
    memory_bandwidth: float
    """Memory bandwidth in bytes/s."""


_TPU = Platform("tpu")
_HOPPER = Platform("gpu", 9.0)
CHIPS = {
    "v5e": Chip("TPU v5 lite", _TPU, 197e12, 16 << 30, 0.82e12),
    "v5p": Chip("TPU v5", _TPU, 459e12, 95 << 30, 2.77e12),
    "v6e": Chip("TPU v6 lite", _TPU, 918e12, 32 << 30, 1.64e12),
    "h100": Chip("NVIDIA H100 80GB HBM3", _HOPPER, 989e12, 80 * 10**9, 3.35e12),
}
"""The chips that jgpt can compile for without having them."""
_PEAK_FLOPS = {chip.kind: chip.peak_flops for chip in CHIPS.values()} | {
    "TPU v4": 275e12,
    "TPU v5p": 459e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
}
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472  l2_cache_size: 52428800
  device_memory_size: 80000000000  memory_bandwidth: 3350000000000
}
"""  # XLA's description of a GPU, from the data sheet and CUDA's table of compute capabilities
_COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""Environment variables that libtpu needs without a TPU, and that reduce its log messages."""


def topology(on: str) -> tuple[Chip, list[Any]]:
    """Parse chips such as `v5e:4x4` or `h100:8` into compile-only devices.

    Raises ModuleNotFoundError if their compiler is not installed.
    """
    name, _, shape = on.partition(":")
    if name not in CHIPS or not re.fullmatch(r"\d{1,4}(x\d{1,4})*", shape):
        raise ValueError(
            f"`on={on!r}` must be a chip and its arrangement, such as v5e:4x4 or h100:8; the "
            f"chips are {', '.join(CHIPS)}{did_you_mean(name, CHIPS)}"
        )
    from jax.experimental.topologies import get_topology_desc

    chip = CHIPS[name]
    for variable, value in _COMPILE_ONLY.items():
        os.environ.setdefault(variable, value)
    try:
        if chip.platform.name == "gpu":
            found = get_topology_desc(platform="cuda", target_config=_H100, topology=f"1x{shape}x1")
        else:
            found = get_topology_desc(on, platform="tpu")
    except (NotImplementedError, RuntimeError) as error:
        if "not installed" in str(error) or isinstance(error, NotImplementedError):
            extra = "tpu"
            if chip.platform.name == "gpu":
                extra = "cuda12"
            install = f"pip install 'jgpt[{extra}]'"
            raise ModuleNotFoundError(f"compiling for {on} needs its compiler: {install}") from None
        raise ValueError(f"`on={on!r}`: {str(error).splitlines()[0]}") from None
    return chip, list(found.devices)


def peak_flops() -> float | None:
    """Return the dense 16-bit FLOP/s of one device, or None if unknown."""
    kind = device_kinds()[0]
    matching = []
    for name in _PEAK_FLOPS:
        # A GPU's kind ends with its form factor and memory. A TPU's kind is exact: "TPU v5 lite" is
        # another chip than "TPU v5".
        is_variant = kind.startswith(f"{name}-")
        if "TPU" not in name:
            is_variant = is_variant or kind.startswith(f"{name} ")
        if kind == name or is_variant:
            matching.append(name)
    if not matching:
        return None
    return _PEAK_FLOPS[max(matching, key=len)]  # "NVIDIA H100 PCIe" before "NVIDIA H100"


def current_platform() -> Platform:
    """Return JAX's platform. Raises OSError if JAX_PLATFORMS names a missing one."""
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # AssertionError: CUDA without its plugin
        named = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise OSError(
            f"JAX can't use JAX_PLATFORMS={named} on this machine: unset it, or set it to cpu"
        ) from error
    capability = None
    if device.platform == "gpu" and "cuda" in device.client.platform_version:  # not ROCm
        capability = float(device.compute_capability)
    return Platform(jax.default_backend(), capability)


def device_kinds() -> list[str]:
    """Return the kind of each device."""
    return [device.device_kind for device in jax.devices()]


def accelerators() -> int:
    """Return the number of devices to train on by default: all, or one in a single CPU process.

    Several CPU devices would share its cores.
    """
    if jax.default_backend() == "cpu" and process_count() == 1:
        return 1
    return len(jax.devices())


process_count = jax.process_count
process_index = jax.process_index
"""Process 0 owns the run directory and the console."""


def devices_of_processes() -> list[int]:
    """Return the number of devices of each process."""
    owners = [device.process_index for device in jax.devices()]
    return [owners.count(index) for index in range(process_count())]


def memory_in_use() -> int | None:
    """Return the peak memory of the device in bytes; on a CPU, that of this process under Linux."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics:
        return statistics.get("peak_bytes_in_use")
    status = Path("/proc/self/status")
    if not status.exists():  # as on a Mac
        return None
    # On Linux, ru_maxrss begins with the memory of the parent when it started this process: 1.4 GB
    # in a child of a large notebook. VmHWM is only that of this program.
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    if found is None:
        return None
    return 1024 * int(found[1])


def memory_limit() -> int | None:
    """Return a device's memory in bytes, or None if unknown."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics is None:  # as on a CPU
        return None
    return statistics.get("bytes_limit")


def host_memory() -> int:
    """Return the machine's memory in bytes; 8 GiB if the system doesn't report it."""
    if not hasattr(os, "sysconf"):
        return 8 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide the open choices of a config.

    `fit` reads them once; a plan for other hardware, or a test, makes its own.
    """

    platform: Platform
    devices: int
    """The number of devices to train on by default."""
    device_memory: int | None
    """The memory of each device in bytes; None if unknown, as on CPUs, where devices share the
    host's."""
    host_memory: int
    """The memory of the machine in bytes."""
    processes: int = 1
    """The processes of the run. On CPUs, the devices of each share its host's memory."""


def this_machine(platform: Platform | None = None) -> Machine:
    """Describe the machine of this process, or the same machine with another platform."""
    return Machine(
        platform=platform or current_platform(),
        devices=accelerators(),
        device_memory=memory_limit(),
        host_memory=host_memory(),
        processes=process_count(),
    )


_LOWERING_CACHES = (
    ("jax._src.pjit", "_pjit_lower"),
    ("jax._src.interpreters.pxla", "_cached_lowering_to_hlo"),
)
"""JAX's private caches of lowered programs; no public function clears only these."""


def release_memory() -> None:
    """Give the memory that compiling took back to the system.

    glibc would keep 50 MiB of freed memory, and JAX 1 MiB for each lowered program, which compiled
    programs don't need.
    """
    for cache in _lowering_caches():
        cache.cache_clear()
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _lowering_caches() -> list[Any]:
    """Return the caches that this version of JAX has.

    A missing cache only wastes memory, so there is no warning for users; a test fails with its
    name.
    """
    caches = []
    for module_name, name in _LOWERING_CACHES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        cache = getattr(module, name, None)
        if hasattr(cache, "cache_clear"):
            caches.append(cache)
    return caches


def enable_compilation_cache() -> None:
    """Use a persistent compilation cache in the user's cache directory.

    Does nothing if JAX has one already (`JAX_COMPILATION_CACHE_DIR`). Each machine has its own
    folder: a program compiled for one processor may not run on another.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = Path(platformdirs.user_cache_dir("jgpt")) / "compiled" / platform.node()
        with contextlib.suppress(OSError):
            _remove_incomplete_entries(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Small programs, too, since a start compiles many of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_compilation_cache_max_size", 1 << 30)
        # If the folder can't be written there is no cache, which is not an error.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def _remove_incomplete_entries(folder: Path) -> None:
    """Remove the programs whose time of use is missing.

    JAX writes a program, and then the time of its use in a separate file. If a process is killed in
    between, or the disk is full, the program may be truncated: JAX would fail to read it in each
    later process and would not replace it. A cleaner of old files may remove only the time. JAX
    reads the times of all programs before it stores one, so without one of them it would never
    store again.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            program.unlink()
