"""Where each parameter lies, and the bytes on each device."""

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
        spec = rules.spec_of(rules.dimensions_of(variable), variable.shape, mesh)
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
        if len(variable.shape) > 1 and not any(rules.dimensions_of(variable))
    ]


def replicated_dimensions(config: ModelConfig, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Dimensions of parameters that a mesh doesn't divide, and the memory it costs."""
    costs: Counter[str] = Counter()
    for variable in named_parameters(abstract_model(config)).values():
        dimensions = rules.dimensions_of(variable)
        shape = variable.shape
        spec = rules.spec_of(dimensions, shape, mesh)
        size = bytes_on_each(variable.get_value(), spec, mesh)
        for dimension, entries, axes in zip(dimensions, shape, spec, strict=True):
            wanted = rules.axes_of(dimension, mesh)
            if len(shape) > 1 and wanted and not axes:
                name, pieces = dimension if isinstance(dimension, tuple) else (dimension, entries)
                over = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in wanted)
                saved = size - size // rules.shards_of(dimension, mesh)
                costs[f"{name}={pieces} is not divided by {over}"] += saved
    return tuple(
        f"{reason} and is replicated: {format_bytes(cost)} more parameters on each device"
        for reason, cost in costs.items()
    )
