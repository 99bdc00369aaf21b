"""Ahead-of-time compilation of the train step for other hardware, and its costs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgpt.config import TrainConfig
from jgpt.hardware import Chip, Machine, topology
from jgpt.nn.costs import flops_per_token
from jgpt.nn.precision import run_for_platform
from jgpt.parallel.mesh import default_mesh, make_mesh
from jgpt.training.memory import TrainingMemory, compile_steps, memory_of, with_micro_batches
from jgpt.training.placement import bytes_of
from jgpt.training.state import abstract_state


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step, and the least time that its arithmetic and its memory take."""

    on: str
    chip: Chip
    chips: int
    mesh: str
    micro_batches: int | str
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
    mesh = config.mesh
    if mesh is None:
        state_bytes = bytes_of(abstract_state(config))
        mesh = default_mesh(machine.devices, state_bytes, machine.device_memory)
    # The mesh is part of the config, so that a batch which the mesh doesn't divide raises an error.
    config = dataclasses.replace(run_for_platform(config, chip.platform), mesh=mesh)
    with jax.set_mesh(make_mesh(mesh, devices)), _without_compilation_cache():
        try:
            config = with_micro_batches(config, machine)
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
