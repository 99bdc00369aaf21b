"""Ahead-of-time compilation of the train step for other hardware, and its costs."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgpt.config import TrainConfig
from jgpt.hardware import Chip, Machine, topology
from jgpt.nn.costs import flops_per_token
from jgpt.nn.precision import run_for_platform
from jgpt.parallel.mesh import default_mesh, make_mesh
from jgpt.training.collectives import Collective, sum_by_kind
from jgpt.training.memory import TrainingMemory, compile_steps, memory_of, with_micro_batches
from jgpt.training.placement import bytes_of
from jgpt.training.state import abstract_state


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step, and the least time for each resource."""

    on: str
    chip: Chip
    chips: int
    mesh: str
    micro_batches: int | str
    """As decided for the chips."""
    memory: TrainingMemory
    fits: bool
    flops: int
    """Per chip, from the config."""
    collectives: tuple[Collective, ...]
    kernels: tuple[str, ...]
    """Custom calls in the program, such as cuDNN's attention."""
    compute_seconds: float
    """At the chip's peak."""
    memory_seconds: float
    """To read and write state and working memory once."""
    interconnect_seconds: float
    """For the collectives, without overlap."""
    bound: str
    """The slowest: compute, memory or interconnect."""


def compile_ahead(config: TrainConfig, on: str) -> CompiledStep:
    """Compile a train step for chips such as `v5e:4x4`, on the config's mesh or the default one.

    Raises ValueError if the step doesn't fit into a chip's memory.
    """
    chip, devices = topology(on)
    machine = Machine(chip.platform, len(devices), chip.memory, host_memory=0)
    mesh = config.mesh
    if mesh is None:
        state_bytes = bytes_of(abstract_state(config))
        mesh = default_mesh(machine.devices, state_bytes, machine.device_memory)
    # with the mesh in it, a config whose batch it doesn't divide is refused
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
        text = compiled.as_text()
    assert memory is not None and text is not None  # noqa: PT018  # these compilers report both
    by_kind = sum_by_kind(text)
    sent = sum(collective.sent for collective in by_kind)
    tokens = config.batch_size * config.model.block_size
    # the backward pass takes twice the forward pass: a gradient for each operand of a product
    flops = 3 * flops_per_token(config.model) * tokens // len(devices)
    # lower bounds: each as if the chip did nothing else, and what is held were moved once
    seconds = {
        "compute": flops / chip.peak_flops,
        "memory": 2 * (memory.state + memory.working) / chip.memory_bandwidth,
        "interconnect": sent / chip.interconnect,
    }
    kernels = set(re.findall(r'custom_call_target="([^"]+)"', text))
    return CompiledStep(
        on=on,
        chip=chip,
        chips=len(devices),
        mesh=mesh,
        micro_batches=config.micro_batches,
        memory=memory,
        fits=memory.state + memory.working <= chip.memory,
        flops=flops,
        collectives=by_kind,
        kernels=tuple(sorted(kernels)),
        compute_seconds=seconds["compute"],
        memory_seconds=seconds["memory"],
        interconnect_seconds=seconds["interconnect"],
        bound=max(seconds, key=lambda name: seconds[name]),
    )


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """The cache could be written, but not be read without the hardware."""
    was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()
