"""The sharding of each parameter over a mesh, and the bytes on each device."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, PyTree, Shaped

from jgpt.config import ModelConfig
from jgpt.nn.models import abstract_model, named_parameters
from jgpt.parallel import rules
from jgpt.shapes.contract import typed
from jgpt.words import format_bytes


@typed
def bytes_of(tree: PyTree[Shaped[Array | jax.ShapeDtypeStruct, "..."]]) -> int:
    """Return the total bytes of a tree of arrays."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        # An abstract array has no `nbytes`.
        total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total


def bytes_on_each(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> int:
    """Return the bytes of a tree of arrays on each device of a mesh."""
    total = 0
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        # JAX computes this, and raises an error where the axes don't divide a dimension.
        shard = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        total += math.prod(shard) * leaf.dtype.itemsize
    return total


@dataclass(frozen=True)
class Placement:
    """How a parameter is sharded over a mesh."""

    name: str
    sharding: str
    """The dtype and shape, with the mesh axes of each dimension, in JAX's notation."""
    on_each: int
    """The bytes on each device."""


def placements(config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[Placement]:
    """Return the sharding of each parameter of a model over a mesh."""
    placed = []
    for name, variable in named_parameters(abstract_model(config)).items():
        spec = rules.spec_of(rules.dimensions_of(variable), variable.shape, mesh)
        sizes = []
        for size, axes in zip(variable.shape, spec, strict=True):
            sizes.append(_sharded_size(size, axes))
        sharding = f"{variable.dtype}[{', '.join(sizes)}]"
        on_each = bytes_on_each(variable.get_value(), spec, mesh)
        placed.append(Placement(name, sharding, on_each))
    return placed


def _sharded_size(size: int, axes: str | tuple[str, ...] | None) -> str:
    """Write a size with the mesh axes that shard it, such as `384@fsdp`."""
    if not axes:
        return str(size)
    if isinstance(axes, tuple):
        axes = ",".join(axes)
    return f"{size}@{axes}"


def parameters_without_names(config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    """Return the parameters of a custom model that a mesh could shard if their dimensions had
    names."""
    if config.make is None or mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return []
    nameless = []
    for name, variable in named_parameters(abstract_model(config)).items():
        # Vectors are small and always replicated.
        if len(variable.shape) > 1 and not any(rules.dimensions_of(variable)):
            nameless.append(name)
    return nameless


def replicated_dimensions(config: ModelConfig, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return a sentence for each reason why a mesh replicates dimensions, with its cost in
    memory."""
    # By reason and not by parameter, so that an undivided vocabulary takes one sentence.
    costs: Counter[str] = Counter()
    for variable in named_parameters(abstract_model(config)).values():
        dimensions = rules.dimensions_of(variable)
        shape = variable.shape
        if len(shape) == 1:  # vectors are small
            continue
        spec = rules.spec_of(dimensions, shape, mesh)
        on_each = bytes_on_each(variable.get_value(), spec, mesh)
        for dimension, size, axes in zip(dimensions, shape, spec, strict=True):
            is_sharded = axes is not None
            if is_sharded or not rules.axes_of(dimension, mesh):
                continue
            # The memory that each device would save if the dimension were sharded.
            saved = on_each - on_each // rules.shards_of(dimension, mesh)
            costs[_undivided(dimension, size, mesh)] += saved
    sentences = []
    for reason, cost in costs.items():
        sentences.append(
            f"{reason} and is replicated: {format_bytes(cost)} more parameters on each device"
        )
    return tuple(sentences)


def _undivided(dimension: rules.Dimension, size: int, mesh: Mesh | AbstractMesh) -> str:
    """Return such a reason as `num_heads=6 is not divided by tensor=4`."""
    name = dimension
    units = size
    if isinstance(dimension, tuple):  # whole heads are sharded
        name, units = dimension
    divisors = []
    for axis in rules.axes_of(dimension, mesh):
        divisors.append(f"{axis}={mesh.shape[axis]}")
    product = " x ".join(divisors)
    return f"{name}={units} is not divided by {product}"
