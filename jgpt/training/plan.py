"""Plans: the memory and compute of a run before it starts, and whether it is feasible."""

import math
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from jgpt.config import TrainConfig
from jgpt.contracts import typed
from jgpt.data.dataset import Dataset
from jgpt.nn.models import flops_per_token, parts_of
from jgpt.training.step import abstract_state, dropout_stream, make_train_steps


@dataclass(frozen=True)
class TrainingMemory:
    """The device memory of the train steps in bytes, by XLA's analysis."""

    state: int
    """Parameters and optimizer state, which is a checkpoint's size too."""
    working: int
    """Activations, gradients and batches."""

    def __str__(self) -> str:
        sizes = (self.state + self.working, self.state, self.working)
        total, state, working = map(format_bytes, sizes)
        return f"{total} ({state} parameters and optimizer, {working} activations and gradients)"


@dataclass(frozen=True)
class Plan:
    """The size and cost of a run."""

    config: TrainConfig
    out: Path
    training_tokens: int
    validation_tokens: int
    parameters: int
    memory: TrainingMemory | None
    flops: int
    """For all steps."""


def training_memory(config: TrainConfig) -> TrainingMemory | None:
    """Compile the train steps and analyse their memory; None if the backend doesn't report it."""
    state = abstract_state(config)
    shape = (config.steps_per_call, config.batch_size, config.model.block_size + 1)
    windows = jax.ShapeDtypeStruct(shape, jnp.int32)
    key = dropout_stream(config.seed)
    compiled = make_train_steps(config).lower(state, windows, key, 0, 0).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    total = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes  # the donated state is counted once
        + analysis.temp_size_in_bytes
    )
    return TrainingMemory(bytes_of(state), max(total - bytes_of(state), 0))


def make_plan(config: TrainConfig, dataset: Dataset, out: Path) -> Plan:
    """The plan of a run on a dataset."""
    tokens = config.steps * config.batch_size * config.model.block_size
    return Plan(
        config=config,
        out=out,
        training_tokens=len(dataset.train),
        validation_tokens=len(dataset.validation),
        parameters=sum(part.parameters for part in parts_of(config.model)),
        memory=training_memory(config),
        flops=3 * flops_per_token(config.model) * tokens,
    )


def require_feasible(config: TrainConfig, memory_limit: int | None) -> None:
    """Raise ValueError if a device with `memory_limit` bytes can't run it; nothing is compiled."""
    for name in ("dtype", "param_dtype"):
        if getattr(config.model, name) == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{name}=float64 needs JAX_ENABLE_X64=1 in the environment")
    state = bytes_of(abstract_state(config))
    if memory_limit is not None and state > memory_limit:
        raise ValueError(
            f"parameters and optimizer need {format_bytes(state)}, the device has "
            f"{format_bytes(memory_limit)}: choose a smaller model"
        )


def format_bytes(size: int) -> str:
    """A size in the largest binary unit that it reaches, such as 1.5 MiB."""
    units = "bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size / 1024**power:,.{min(power, 1)}f} {units[power]}"


@typed
def bytes_of(tree: PyTree[Shaped[Array | jax.ShapeDtypeStruct, "..."]]) -> int:
    """The bytes of a tree's arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
