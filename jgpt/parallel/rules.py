"""The mesh axes that each dimension name is sharded over."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgpt.parallel.mesh import current_mesh

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed_dim": ("fsdp",),
    "hidden_dim": ("tensor",),
    "num_heads": ("tensor",),
    "num_kv_heads": ("tensor",),
    "vocab_size": ("tensor",),
}
"""The mesh axes of each dimension name; unlisted dimensions are replicated."""
Dimension = str | tuple[str, int] | None
"""A dimension name, with the number of shardable units if these are not single elements (heads)."""
Dimensions = tuple[Dimension, ...]


def axes_of(dimension: Dimension, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes of a dimension, without axes of size 1."""
    name, _ = _name_and_units(dimension)
    if name is None:
        return ()
    axes = RULES.get(name, ())
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def _name_and_units(dimension: Dimension) -> tuple[str | None, int | None]:
    """Return the name, and the number of shardable units if these are not single elements."""
    if isinstance(dimension, tuple):
        return dimension
    return dimension, None


def shards_of(dimension: Dimension, mesh: Mesh | AbstractMesh) -> int:
    """Return the number of shards of a dimension."""
    return _product_of_sizes(axes_of(dimension, mesh), mesh)


def _product_of_sizes(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices along some axes of a mesh."""
    return math.prod(mesh.shape[axis] for axis in axes)


def spec_of(
    dimensions: Dimensions, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, exclude: str = ""
) -> PartitionSpec:
    """Return the spec of an array by the rules, without the axis to `exclude`.

    A dimension that the axes don't divide evenly is replicated. So is a vector over fsdp, which
    takes more time to gather than it saves in memory.
    """
    is_vector = len(shape) == 1  # such as a bias, or the scale of a norm
    parts: list[tuple[str, ...] | None] = []
    for dimension, size in zip(dimensions, shape, strict=True):
        excluded = exclude
        if is_vector and dimension != "batch":
            excluded = "fsdp"
        wanted_axes = axes_of(dimension, mesh)
        axes = tuple(axis for axis in wanted_axes if axis != excluded)
        _, units = _name_and_units(dimension)
        if units is None:
            units = size
        # By all axes of a dimension, or by none of them: 50,257 tokens have no half.
        is_divisible = units % _product_of_sizes(axes, mesh) == 0
        if axes and is_divisible:
            parts.append(axes)
        else:
            parts.append(None)
    return PartitionSpec(*parts)


def constrain(tree: Any, specs: Any) -> Any:
    """Give arrays other shardings."""
    return lax.with_sharding_constraint(tree, specs)


def shard_by_name(x: Any, *dimensions: Dimension) -> Any:
    """Shard an array by the rules if a mesh is set."""
    mesh = current_mesh()
    if mesh.empty:
        return x
    return constrain(x, spec_of(dimensions, x.shape, mesh))


def replicate(tree: Any) -> Any:
    """Replicate the arrays of a tree if a mesh is set."""
    if current_mesh().empty:
        return tree
    return constrain(tree, PartitionSpec())


def split_batch(x: Any, parts: int) -> Any:
    """Split a batch into `parts`, each sharded as a batch if a mesh is set."""
    rows = x.shape[0] // parts
    x = x.reshape(parts, rows, *x.shape[1:])
    unsharded = [None] * (x.ndim - 2)
    # As the second axis, so that all devices take part in each part.
    return shard_by_name(x, None, "batch", *unsharded)


def parameter(value: Any, *dimensions: Dimension) -> nnx.Param:
    """Make a parameter with named dimensions."""
    return nnx.Param(value, dimensions=dimensions)


def dimensions_of(variable: nnx.Variable) -> Dimensions:
    """Return the dimension names of a parameter."""
    nameless = (None,) * len(variable.shape)  # as in a custom module
    return variable.get_metadata().get("dimensions", nameless)


def weight_specs(model: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the spec of each parameter of a model, in the structure of the weights."""

    def spec(_: Any, variable: nnx.Variable) -> nnx.Variable:
        parameter_spec = spec_of(dimensions_of(variable), variable.shape, mesh)
        return variable.replace(parameter_spec)

    return nnx.to_pure_dict(nnx.map_state(spec, nnx.state(model, nnx.Param)))


def stacked(layers: Sequence[Any], module: Any) -> Any:
    """Stack the weights of modules like `module` on a new first axis, which is not sharded."""

    def stack(*leaves: Any) -> Any:
        return jnp.stack(leaves)

    def constrain_stack(leaf: Any, spec: PartitionSpec) -> Any:
        return constrain(leaf, PartitionSpec(None, *spec))

    stacks = jax.tree.map(stack, *layers)
    mesh = current_mesh()
    if mesh.empty:
        return stacks
    return jax.tree.map(constrain_stack, stacks, weight_specs(module, mesh))


def specs_like(tree: Any, *weights: Any) -> Any:
    """Return the specs of the arrays of a tree, from those of the weights, in one form or several.

    An array whose path ends with a parameter's path is sharded like it, as the moments of an
    optimizer are; any other array is replicated.
    """
    spec_by_path = {}
    for form in weights:
        spec_by_path.update(jax.tree_util.tree_leaves_with_path(form))

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        # The longest ending first: a moment's path is the optimizer's, then the parameter's.
        for start in range(len(path)):
            found = spec_by_path.get(path[start:])
            if found is None:
                continue
            # A statistic of a parameter, such as a factored moment, may have fewer dimensions.
            if len(found) == len(leaf.shape):
                return found
            return PartitionSpec()
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def without_trailing_none(spec: PartitionSpec) -> PartitionSpec:
    """Return the shortest spec of the same sharding: P("fsdp") for P("fsdp", None)."""
    # Compiled programs return this spelling. A state with another one makes the second call of the
    # train steps compile them again.
    axes = list(spec)
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def shardings(specs: Any) -> Any:
    """Convert specs to shardings over the mesh that is set, or over the default device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        # The device of `jax.default_device`; `jnp.zeros` would compile a program to say it.
        default = jax.device_put(0).sharding
        return jax.tree.map(lambda _: default, specs)
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs)


def abstract_arrays(tree: Any, specs: Any) -> Any:
    """Return the shapes, dtypes and shardings of a tree of arrays."""

    def abstract(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, tree, shardings(specs))
