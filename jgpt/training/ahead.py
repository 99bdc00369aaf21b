"""Ahead-of-time compilation of the train step for other hardware, and its costs."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgpt.config import TrainConfig
from jgpt.machine import PEAK_FLOPS, Machine, Platform
from jgpt.nn.costs import flops_per_token
from jgpt.parallel.mesh import make_mesh
from jgpt.training.complete import complete
from jgpt.training.memory import TrainingMemory, compile_steps, memory_of
from jgpt.words import did_you_mean


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
_TURING = Platform("gpu", 7.5)
_H100 = "NVIDIA H100 80GB HBM3"
CHIPS = {
    "v5e": Chip("TPU v5 lite", _TPU, PEAK_FLOPS["TPU v5 lite"], 16 << 30, 0.82e12),
    "v5p": Chip("TPU v5", _TPU, PEAK_FLOPS["TPU v5"], 95 << 30, 2.77e12),
    "v6e": Chip("TPU v6 lite", _TPU, PEAK_FLOPS["TPU v6 lite"], 32 << 30, 1.64e12),
    "h100": Chip(_H100, _HOPPER, PEAK_FLOPS[_H100], 80 * 10**9, 3.35e12),
    "t4": Chip("Tesla T4", _TURING, PEAK_FLOPS["Tesla T4"], 15 << 30, 0.32e12),
}
"""The chips that jgpt can compile for without having them."""
_TARGETS = {
    "h100": """
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
""",
    "t4": """
platform_name: "CUDA"
device_description_str: "Tesla T4"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
gpu_device_info {
  cuda_compute_capability { major: 7 minor: 5 }
  core_count: 40  fpus_per_core: 64  clock_rate_ghz: 1.59
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 1024
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 65536
  shared_memory_per_core: 65536  l2_cache_size: 4194304
  device_memory_size: 16106127360  memory_bandwidth: 320000000000
}
""",
}
"""XLA's descriptions of GPUs, from data sheets and CUDA's table of compute capabilities."""
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
            found = get_topology_desc(
                platform="cuda", target_config=_TARGETS[name], topology=f"1x{shape}x1"
            )
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


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step, and the least time that its arithmetic and its memory take."""

    on: str
    chip: Chip
    chips: int
    mesh: str
    micro_batches: int
    """The number of micro-batches, decided for these chips."""
    memory: TrainingMemory
    fits: bool
    flops: int
    """FLOPs per chip, computed from the config."""
    compute_seconds: float
    """Seconds to compute at the chip's peak."""
    memory_seconds: float
    """Seconds to read and write state and working memory once."""


def compile_ahead(config: TrainConfig, on: str) -> CompiledStep:
    """Compile a train step for chips `on`, such as `v5e:4x4`, on the config's mesh or the default
    mesh.

    Raises ValueError if the step doesn't fit into a chip's memory.
    """
    chip, devices = topology(on)
    machine = Machine(chip.platform, len(devices), chip.memory, host_memory=0)
    config = complete(config, machine)
    mesh = config.mesh or "data=1"
    with jax.set_mesh(make_mesh(mesh, devices)), _without_compilation_cache():
        try:
            compiled = compile_steps(config)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise ValueError(f"a step doesn't fit into {on}: {reason}") from None
        memory = memory_of(compiled, config)
    assert memory is not None  # these compilers report it
    tokens = config.batch_size * config.model.block_size
    # The backward pass takes twice the forward pass: each product has a gradient for each operand.
    flops = 3 * flops_per_token(config.model) * tokens // len(devices)
    moved = 2 * (memory.state + memory.working)  # all that it holds, written and read once
    return CompiledStep(
        on=on,
        chip=chip,
        chips=len(devices),
        mesh=mesh,
        micro_batches=config.micro_batches,
        memory=memory,
        fits=memory.state + memory.working <= chip.memory,
        flops=flops,
        compute_seconds=flops / chip.peak_flops,
        memory_seconds=moved / chip.memory_bandwidth,
    )


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """Disable the compilation cache: the program could be written, but not read without the
    hardware."""
    was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the cache remembers whether it is enabled
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()
