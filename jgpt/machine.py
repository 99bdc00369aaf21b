"""The machine: platform, peak FLOP/s and memory. No other file queries them."""

import contextlib
import ctypes
import gc
import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.monitoring
import platformdirs


@dataclass(frozen=True)
class Platform:
    """A platform to compile for, which need not be the current one."""

    name: str
    """cpu, gpu or tpu."""
    cuda_capability: float | None = None
    """The compute capability of a CUDA GPU, such as 9.0; None elsewhere."""


PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v6 lite": 918e12,
    "Tesla T4": 65e12,
    "Tesla V100": 125e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
}
"""Dense 16-bit FLOP/s of a device, by the name that JAX uses."""


def peak_flops() -> float | None:
    """Return the dense 16-bit FLOP/s of one device, or None if unknown."""
    kind = device_kinds()[0]
    matching = []
    for name in PEAK_FLOPS:
        # A GPU's kind ends with its form factor and memory. A TPU's kind is exact: "TPU v5 lite" is
        # another chip than "TPU v5".
        is_variant = kind.startswith(f"{name}-")
        if "TPU" not in name:
            is_variant = is_variant or kind.startswith(f"{name} ")
        if kind == name or is_variant:
            matching.append(name)
    if not matching:
        return None
    return PEAK_FLOPS[max(matching, key=len)]  # "NVIDIA H100 PCIe" before "NVIDIA H100"


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


# The last one is on Windows' Linux. `nvidia-smi` on PATH is no sign: images have it without a GPU.
NVIDIA_PATHS = ("/proc/driver/nvidia", "/dev/nvidia0", "/usr/lib/wsl/lib/nvidia-smi")
"""Where a system shows that it has an NVIDIA GPU."""


def describe_unused_gpu() -> str | None:
    """Return what to install if there is an NVIDIA GPU and JAX uses the CPU; None otherwise.

    None, too, if the user has chosen the CPU.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
    if chosen is not None or is_hidden or jax.default_backend() != "cpu":
        return None
    if not any(Path(path).exists() for path in NVIDIA_PATHS):
        return None
    # Of the same version as jaxlib, or JAX ignores the plugin for CUDA.
    return (
        "this machine has an NVIDIA GPU, but JAX uses the CPU: "
        f"pip install 'jax[cuda12]=={jax.__version__}' and restart, or set JAX_PLATFORMS=cpu"
    )


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


def release_memory() -> None:
    """Give the memory that compiling took back to the system.

    glibc would keep it: 35 MiB of the peak of `tiny`, and 104 MiB of that of `modern-cpu`.
    """
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


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
