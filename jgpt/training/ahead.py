"""Ahead-of-time compilation of the train step for other hardware, and its costs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgpt.config import TrainConfig
from jgpt.hardware import Chip, Machine, topology
from jgpt.nn.costs import flops_per_token
from jgpt.parallel.mesh import make_mesh
from jgpt.training.complete import complete
from jgpt.training.memory import TrainingMemory, compile_steps, memory_of


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
