"""Plans: the memory and compute of a run before it starts, and whether it is feasible."""

import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, PyTree, Shaped

from jgpt import sharding
from jgpt.config import ModelConfig, TrainConfig
from jgpt.contracts import typed
from jgpt.data.dataset import Dataset
from jgpt.hardware import host_memory
from jgpt.nn.models import abstract_model, flops_per_token, named_parameters, parts_of
from jgpt.training.evaluation import EvaluationPlan
from jgpt.training.step import abstract_state, dropout_stream, make_train_steps, state_specs


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of the train steps on each device, in bytes, by XLA's analysis."""

    state: int
    """Parameters and optimizer state; on one device also the size of a checkpoint."""
    working: int
    """Activations, gradients and batches."""

    def __str__(self) -> str:
        state, working = format_bytes(self.state), format_bytes(self.working)
        total = format_bytes(self.state + self.working)
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
    evaluations: EvaluationPlan
    process_memory: int | None = None
    """The peak memory of the process on a CPU, in bytes: that of its devices, and what Python, JAX,
    compiling and the data take; None on other hardware."""


def compile_steps(config: TrainConfig) -> jax.stages.Compiled:
    """The train steps of a config, compiled for the mesh that is set, or the default device."""
    state = sharding.abstract_arrays(abstract_state(config), state_specs(config))
    shape = (config.steps_per_call, config.batch_size, config.model.block_size + 1)
    windows = jax.ShapeDtypeStruct(shape, jnp.int32)
    key = jax.eval_shape(lambda: dropout_stream(config.seed))
    return make_train_steps(config).lower(state, windows, key, 0, 0).compile()


def memory_of(steps: jax.stages.Compiled, config: TrainConfig) -> TrainingMemory | None:
    """The memory of compiled train steps; None if the backend doesn't report it."""
    analysis = steps.memory_analysis()
    if analysis is None:
        return None
    total = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    total += analysis.temp_size_in_bytes - analysis.alias_size_in_bytes  # the state is donated
    mesh = sharding.current_mesh()
    mesh = sharding.abstract_mesh(None) if mesh.empty else mesh
    on_each = bytes_on_each(abstract_state(config), state_specs(config, mesh), mesh)
    return TrainingMemory(on_each, max(total - on_each, 0))


def training_memory(config: TrainConfig) -> TrainingMemory | None:
    """Compile the train steps and analyse their memory; None if the backend doesn't report it."""
    return memory_of(compile_steps(config), config)


def with_micro_batches(config: TrainConfig, memory_limit: int | None) -> TrainConfig:
    """The config with `micro_batches=auto` decided for the mesh that is set.

    The fewest whose steps leave a tenth of `memory_limit` free, for evaluation, the data and
    fragmentation; found by bisection, each compiled. Without a limit, as on CPUs, all devices have
    half of the machine's memory. If none fits, a micro-batch is one sequence for each device.
    """
    if config.micro_batches != "auto":
        return config
    limit = host_memory() // (2 * max(sharding.current_mesh().size, 1))
    if memory_limit is not None:
        limit = memory_limit * 9 // 10
    rows = config.batch_size // sharding.shards_of("batch", sharding.current_mesh())
    counts = [count for count in range(1, rows + 1) if rows % count == 0]

    def fits(count: int) -> bool:
        try:
            memory = training_memory(dataclasses.replace(config, micro_batches=count))
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what doesn't fit
            if "RESOURCE_EXHAUSTED" in str(error):
                return False
            raise
        return memory is None or memory.state + memory.working <= limit

    chosen = counts[bisect_left(counts[:-1], True, key=fits)]
    return dataclasses.replace(config, micro_batches=chosen)


def make_plan(
    config: TrainConfig, dataset: Dataset, out: Path, evaluations: EvaluationPlan
) -> Plan:
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
        evaluations=evaluations,
    )


def with_process_memory(plan: Plan, used: int | None) -> Plan:
    """The plan for a CPU, where `used` is what the process takes without a state and its steps."""
    if used is None or plan.memory is None:
        return plan
    devices = sharding.abstract_mesh(plan.config.mesh).size
    on_devices = devices * (plan.memory.state + plan.memory.working)
    return dataclasses.replace(plan, process_memory=used + on_devices)


def require_feasible(config: TrainConfig, memory_limit: int | None) -> None:
    """Raise ValueError if a device with `memory_limit` bytes can't run it; nothing is compiled."""
    for name in ("dtype", "param_dtype"):
        if getattr(config.model, name) == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{name}=float64 needs JAX_ENABLE_X64=1 in the environment")
    if memory_limit is None:
        return
    mesh = sharding.abstract_mesh(config.mesh)
    state = bytes_on_each(abstract_state(config), state_specs(config, mesh), mesh)
    if state > memory_limit:
        raise ValueError(
            f"parameters and optimizer need {format_bytes(state)}, the device has "
            f"{format_bytes(memory_limit)}: choose a smaller model, or "
            "shard it over N devices with mesh=fsdp=N"
        )


def format_bytes(size: int) -> str:
    """Format a size in a binary unit, such as 1.5 MiB."""
    units = "bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size / 1024**power:,.{min(power, 1)}f} {units[power]}"


def default_mesh(config: TrainConfig, devices: int, memory_limit: int | None) -> str | None:
    """A mesh of all devices: over data if each can hold the whole train state, else over fsdp."""
    if devices == 1:
        return None
    # activations and gradients need room too
    fits = memory_limit is None or 2 * bytes_of(abstract_state(config)) < memory_limit
    return f"data={devices}" if fits else f"fsdp={devices}"


@typed
def bytes_of(tree: PyTree[Shaped[Array | jax.ShapeDtypeStruct, "..."]]) -> int:
    """The total bytes of a tree of arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_on_each(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> int:
    """The bytes of a tree of arrays on each device of a mesh."""
    return sum(
        math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
    )


@dataclass(frozen=True)
class Placement:
    """How a parameter is sharded over a mesh."""

    name: str
    sharding: str
    """Dtype and shape with the mesh axes of each dimension, as JAX writes them."""
    on_each: int
    """Bytes on each device."""


def placements(config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[Placement]:
    """How each parameter of a model is sharded over a mesh."""
    found = []
    for name, variable in named_parameters(abstract_model(config)).items():
        spec = sharding.spec_of(sharding.dimensions_of(variable), variable.shape, mesh)
        parts = (
            f"{size}@{axes if isinstance(axes, str) else ','.join(axes)}" if axes else str(size)
            for size, axes in zip(variable.shape, spec, strict=True)
        )
        placed = f"{variable.dtype}[{', '.join(parts)}]"
        on_each = bytes_on_each(variable.get_value(), spec, mesh)
        found.append(Placement(name, placed, on_each))
    return found


def parameters_without_names(config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    """A user's own parameters that a mesh would split if their dimensions had names."""
    if config.make is None or mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return []
    return [
        name
        for name, variable in named_parameters(abstract_model(config)).items()
        if len(variable.shape) > 1 and not any(sharding.dimensions_of(variable))
    ]


def replicated_dimensions(config: ModelConfig, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Dimensions of parameters that a mesh doesn't divide, and the memory it costs."""
    costs: Counter[str] = Counter()
    for variable in named_parameters(abstract_model(config)).values():
        dimensions, shape = sharding.dimensions_of(variable), variable.shape
        spec = sharding.spec_of(dimensions, shape, mesh)
        size = bytes_on_each(variable.get_value(), spec, mesh)
        for dimension, entries, axes in zip(dimensions, shape, spec, strict=True):
            wanted = sharding.axes_of(dimension, mesh)
            if len(shape) > 1 and wanted and not axes:
                name, pieces = dimension if isinstance(dimension, tuple) else (dimension, entries)
                over = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in wanted)
                saved = size - size // sharding.shards_of(dimension, mesh)
                costs[f"{name}={pieces} is not divided by {over}"] += saved
    return tuple(
        f"{reason} and is replicated: {format_bytes(cost)} more parameters on each device"
        for reason, cost in costs.items()
    )
