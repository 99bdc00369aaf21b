"""The memory of the compiled train steps."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jgpt.config import TrainConfig
from jgpt.parallel import rules
from jgpt.parallel.mesh import abstract_mesh, current_mesh
from jgpt.training.objective import objective_of
from jgpt.training.placement import bytes_on_each
from jgpt.training.state import abstract_state, dropout_stream, placed_state, state_specs
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
    state = placed_state(config)
    shape = (config.steps_per_call, config.batch_size, config.model.block_size + 1)
    windows = jax.ShapeDtypeStruct(shape, jnp.int32)
    key = jax.eval_shape(lambda: dropout_stream(config.seed))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    _, held = objective_of(config.objective)
    arrays = rules.abstract_arrays(held, [PartitionSpec() for _ in held])  # on each device
    steps = make_train_steps(config)
    return steps.lower(state, windows, key, number, number, number, arrays=arrays).compile()


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
