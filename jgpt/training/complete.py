"""What a config leaves open, decided once before training: dtypes, kernel, mesh, micro-batches."""

from dataclasses import replace

import jax

from jgpt.config import ModelConfig, TrainConfig, mesh_sizes
from jgpt.machine import Machine
from jgpt.nn.precision import for_platform
from jgpt.parallel.mesh import abstract_mesh, default_mesh
from jgpt.training.memory import TrainingMemory
from jgpt.training.placement import bytes_of, bytes_on_each
from jgpt.training.state import abstract_state, state_specs
from jgpt.words import format_bytes


def complete(config: TrainConfig, machine: Machine) -> TrainConfig:
    """Return the config that is trained on a machine, with everything decided; compile nothing.

    The mesh is by default all devices. The micro-batches are divided by its data x fsdp, rounded up
    to the next number that leaves whole rows to each device. Raises ValueError if the devices are
    too small, or don't divide the batch.
    """
    config = replace(config, model=for_platform(config.model, machine.platform))
    _require_wide_numbers(config.model)
    if config.mesh is None and machine.devices > 1:
        state_bytes = bytes_of(abstract_state(config))
        # Checked by the config itself, which names the batch size that the mesh doesn't divide.
        config = replace(
            config, mesh=default_mesh(machine.devices, state_bytes, machine.device_memory)
        )
    _require_room(config, machine.device_memory)
    return replace(config, micro_batches=_divided(config))


def _divided(config: TrainConfig) -> int:
    """Return the micro-batches of each device."""
    sizes = mesh_sizes(config.mesh or "data=1")
    parts = sizes["data"] * sizes["fsdp"]
    rows = config.batch_size // parts
    count = -(-config.micro_batches // parts)
    while rows % count:
        count += 1
    return count


def _require_wide_numbers(config: ModelConfig) -> None:
    for name in ("dtype", "param_dtype"):
        if getattr(config, name) == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"`{name}='float64'` needs JAX_ENABLE_X64=1 in the environment")


def _require_room(config: TrainConfig, device_memory: int | None) -> None:
    """Raise ValueError if a device can't hold its share of the state alone."""
    if device_memory is None:
        return
    mesh = abstract_mesh(config.mesh)
    state = bytes_on_each(abstract_state(config), state_specs(config, mesh), mesh)
    if state > device_memory:
        raise ValueError(
            f"parameters and optimizer need {format_bytes(state)}, the device has "
            f"{format_bytes(device_memory)}: choose a smaller model, or shard it over N devices "
            "with `mesh=fsdp=N`"
        )


def require_memory(memory: TrainingMemory | None, config: TrainConfig, machine: Machine) -> None:
    """Raise ValueError if the compiled steps don't fit into a device, or into the host of CPUs.

    A CPU's system would kill the process without a word.
    """
    if memory is None:
        return
    needed = memory.state + memory.working
    room = machine.device_memory
    if room is None:
        needed *= abstract_mesh(config.mesh).size // machine.processes  # they share the host's
        room = machine.host_memory
    if needed > room:
        raise ValueError(
            f"a step needs {format_bytes(needed)} and there are {format_bytes(room)}: raise "
            f"`micro_batches={config.micro_batches!r}`, which `batch_size={config.batch_size!r}` "
            "is split into, or use a smaller model"
        )
