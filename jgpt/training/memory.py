"""The memory of the train steps, and whether it fits the device."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jgpt.config import TrainConfig
from jgpt.hardware import Machine
from jgpt.parallel import rules
from jgpt.parallel.mesh import abstract_mesh, current_mesh
from jgpt.training.placement import bytes_on_each
from jgpt.training.state import abstract_state, dropout_stream, state_specs
from jgpt.training.step import make_train_steps
from jgpt.words import format_bytes


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of the train steps on each device in bytes, as XLA's analysis reports it."""

    state: int
    """Parameters and optimizer state; on one device this is also the size of a checkpoint."""
    working: int
    """Activations, gradients and batches."""

    def __str__(self) -> str:
        state = format_bytes(self.state)
        working = format_bytes(self.working)
        total = format_bytes(self.state + self.working)
        return f"{total} ({state} parameters and optimizer, {working} activations and gradients)"


def compile_steps(config: TrainConfig) -> jax.stages.Compiled:
    """Compile the train steps of a config for the mesh that is set, or for the default device."""
    state = rules.abstract_arrays(abstract_state(config), state_specs(config))
    shape = (config.steps_per_call, config.batch_size, config.model.block_size + 1)
    windows = jax.ShapeDtypeStruct(shape, jnp.int32)
    key = jax.eval_shape(lambda: dropout_stream(config.seed))
    return make_train_steps(config).lower(state, windows, key, 0, 0).compile()


def memory_of(steps: jax.stages.Compiled, config: TrainConfig) -> TrainingMemory | None:
    """Return the memory of compiled train steps, or None if the backend doesn't report it."""
    analysis = steps.memory_analysis()
    if analysis is None:
        return None
    total = analysis.argument_size_in_bytes
    total += analysis.output_size_in_bytes
    total += analysis.temp_size_in_bytes
    # the state is donated, so that input and output share memory
    total -= analysis.alias_size_in_bytes
    mesh = current_mesh()
    if mesh.empty:
        mesh = abstract_mesh(None)
    state = bytes_on_each(abstract_state(config), state_specs(config, mesh), mesh)
    return TrainingMemory(state=state, working=max(total - state, 0))


def training_memory(config: TrainConfig) -> TrainingMemory | None:
    """Compile the train steps and analyse their memory; None if the backend doesn't report it."""
    return memory_of(compile_steps(config), config)


def with_micro_batches(config: TrainConfig, machine: Machine) -> TrainConfig:
    """Replace `micro_batches=auto` by a number for the mesh that is set.

    It is the least number whose steps leave a tenth of a device's memory free for evaluation, data
    and fragmentation. A bisection finds it, which compiles each candidate. Without a limit, as on
    CPUs, all devices share half of the machine's memory. If no number fits, a micro-batch is one
    sequence for each device.
    """
    if config.micro_batches != "auto":
        return config
    if machine.device_memory is None:
        limit = machine.host_memory // (2 * max(current_mesh().size, 1))
    else:
        limit = machine.device_memory * 9 // 10
    # Each device has this many sequences of the batch, and micro-batches have to divide them.
    rows = config.batch_size // rules.shards_of("batch", current_mesh())
    counts = [count for count in range(1, rows + 1) if rows % count == 0]

    def fits(count: int) -> bool:
        try:
            memory = training_memory(dataclasses.replace(config, micro_batches=count))
        except jax.errors.JaxRuntimeError as error:
            # A TPU's compiler raises for a program that doesn't fit.
            if "RESOURCE_EXHAUSTED" in str(error):
                return False
            raise
        return memory is None or memory.state + memory.working <= limit

    return dataclasses.replace(config, micro_batches=_first_that_fits(counts, fits))


def _first_that_fits(counts: list[int], fits: Callable[[int], bool]) -> int:
    """Return the first count that fits, by bisection: a larger count takes less memory.

    If no other count fits, the last one is returned untested, since each test is a compilation.
    """
    first = 0
    last = len(counts) - 1
    while first < last:
        middle = (first + last) // 2
        if fits(counts[middle]):
            last = middle
        else:
            first = middle + 1
    return counts[first]


def require_feasible(config: TrainConfig, device_memory: int | None) -> None:
    """Raise ValueError if a device with `device_memory` bytes can't run the config; compile
    nothing."""
    for name in ("dtype", "param_dtype"):
        if getattr(config.model, name) == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"`{name}='float64'` needs JAX_ENABLE_X64=1 in the environment")
    if device_memory is None:
        return
    # The state alone, which is known without compiling, is a lower bound for a step.
    mesh = abstract_mesh(config.mesh)
    state = bytes_on_each(abstract_state(config), state_specs(config, mesh), mesh)
    if state > device_memory:
        raise ValueError(
            f"parameters and optimizer need {format_bytes(state)}, the device has "
            f"{format_bytes(device_memory)}: choose a smaller model, or shard it over N devices "
            "with `mesh=fsdp=N`"
        )
