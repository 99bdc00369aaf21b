"""The mesh of devices, and which dimension names are sharded over which of its axes."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jgpt import contracts
from jgpt.config import MESH_AXES, mesh_sizes
from jgpt.hardware import device_kinds

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed_dim": ("fsdp",),
    "hidden_dim": ("tensor",),
    "num_heads": ("tensor",),
    "num_kv_heads": ("tensor",),
    "vocab_size": ("tensor",),
}
"""The axes of the mesh over which a dimension is sharded, by its name; no others are."""
Dimension = str | tuple[str, int] | None
"""A dimension's name, and into how many equal pieces it may be split if not its entries."""
Dimensions = tuple[Dimension, ...]


def make_mesh(mesh: str, devices: Sequence[Any] | None = None, *, explicit: bool = False) -> Mesh:
    """A mesh from text such as `data=2,fsdp=4`, to use with `jax.set_mesh`; of all devices.

    With `explicit` axes an array's sharding is part of its type, and `@typed` checks it.
    """
    sizes, found = mesh_sizes(mesh), len(device_kinds() if devices is None else devices)
    if (product := math.prod(sizes.values())) != found:
        raise ValueError(f"mesh={mesh} is of {product} devices, and there are {found}")
    # automatic axes: XLA's partitioner decides what the rules leave open
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * len(MESH_AXES)
    try:
        return jax.make_mesh(tuple(sizes.values()), MESH_AXES, kinds, devices=devices)
    except NotImplementedError as error:  # a torus of chips has axes of its own
        raise ValueError(f"mesh={mesh} doesn't fit the chips' arrangement: {error}") from None


def use_mesh(mesh: str | None) -> contextlib.AbstractContextManager:
    """Set the mesh that a text describes; nothing for None."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh))


def abstract_mesh(mesh: str | None) -> AbstractMesh:
    """The same without devices, to see how arrays would be sharded; of one device for None."""
    sizes = mesh_sizes(mesh or "data=1")
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def current_mesh() -> AbstractMesh:
    """The mesh that is set, while tracing too; empty if there is none."""
    return jax.sharding.get_abstract_mesh()


def axes_of(dimension: Dimension, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh that a dimension is to be sharded over, without those of size 1."""
    name = dimension[0] if isinstance(dimension, tuple) else dimension
    return tuple(axis for axis in RULES.get(name or "", ()) if mesh.shape.get(axis, 1) > 1)


def shards_of(dimension: Dimension, mesh: Mesh | AbstractMesh) -> int:
    """Into how many shards a mesh is to split a dimension."""
    return math.prod(mesh.shape[axis] for axis in axes_of(dimension, mesh))


def spec_of(
    dimensions: Dimensions, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, but: str = ""
) -> PartitionSpec:
    """How the rules shard an array, over all axes `but` one.

    A dimension that its axes don't divide evenly is replicated. So is a vector over fsdp, which
    costs more to gather than to store.
    """
    parts: list[tuple[str, ...] | None] = []
    for dimension, size in zip(dimensions, shape, strict=True):
        pieces = dimension[1] if isinstance(dimension, tuple) else size
        without = "fsdp" if len(shape) == 1 and dimension != "batch" else but
        axes = tuple(axis for axis in axes_of(dimension, mesh) if axis != without)
        divides = pieces % math.prod(mesh.shape[axis] for axis in axes) == 0
        parts.append(axes if axes and divides else None)
    return PartitionSpec(*parts)


def sharded(tree: Any, specs: Any) -> Any:
    """The same arrays, sharded so."""
    explicit = current_mesh().explicit_axes
    return (jax.sharding.reshard if explicit else lax.with_sharding_constraint)(tree, specs)


def placed(x: Any, *dimensions: Dimension) -> Any:
    """The same array, sharded by the rules if a mesh is set."""
    mesh = current_mesh()
    return x if mesh.empty else sharded(x, spec_of(dimensions, x.shape, mesh))


def gathered(tree: Any) -> Any:
    """The arrays of a tree, replicated if a mesh is set."""
    return tree if current_mesh().empty else sharded(tree, PartitionSpec())


def with_placed(function: Callable[[Any], Any], x: Any, *dimensions: Dimension) -> Any:
    """`placed(function(x), *dimensions)`, also where JAX can't infer the result's sharding."""
    mesh = current_mesh()
    if not mesh.explicit_axes:
        return placed(function(x), *dimensions)
    shape = jax.eval_shape(function, jax.ShapeDtypeStruct(x.shape, x.dtype)).shape
    return jax.sharding.auto_axes(function, out_sharding=spec_of(dimensions, shape, mesh))(x)


def sharded_as(x: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its result sharded as `x` where axes are explicit and JAX can't infer it."""
    if not current_mesh().explicit_axes:
        return function
    return jax.sharding.auto_axes(function, out_sharding=jax.typeof(x).sharding.spec)


def product_spec(x: Any, y: Any) -> PartitionSpec | None:
    """How a product of matrices is sharded, which JAX wants to be told where axes are explicit."""
    if not current_mesh().explicit_axes:
        return None
    return PartitionSpec(jax.typeof(x).sharding.spec[0], jax.typeof(y).sharding.spec[1])


def with_gathered(
    function: Callable[[Any, Any], Any],
    x: Any,
    parameter: nnx.Param,
    dtype: DTypeLike | None = None,
) -> Any:
    """`function(x, parameter)`, the parameter gathered over fsdp in `dtype` if a mesh is set.

    It is gathered again for the backward pass, rather than kept, and its gradient is sharded as it
    is (ZeRO stage 3, Rajbhandari et al. 2020, section 5.3).
    """
    if current_mesh().empty:
        return function(x, parameter[...])
    dimensions = dimensions_of(parameter)

    def with_whole(x, value):
        return function(x, _gathered(dimensions, dtype or value.dtype, value))

    return jax.checkpoint(with_whole)(x, parameter[...])


def gather_once(parameter: nnx.Param, dtype: DTypeLike) -> None:
    """Gather a parameter as `with_gathered` does, for all that reads it from here on.

    Its gradient is still sharded as it is: so not where axes are explicit, whose types agree.
    """
    mesh = current_mesh()
    if not (mesh.empty or mesh.explicit_axes):
        parameter.set_value(_gathered(dimensions_of(parameter), dtype, parameter[...]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(dimensions: Dimensions, dtype: DTypeLike, parameter: Any) -> Any:
    # the barrier keeps XLA from gathering first and narrowing afterwards
    narrow = lax.optimization_barrier(parameter.astype(dtype))
    spec = spec_of(dimensions, parameter.shape, current_mesh(), but="fsdp")
    return sharded(narrow, spec).astype(parameter.dtype)


_gathered.defvjp(
    lambda dimensions, dtype, parameter: (_gathered(dimensions, dtype, parameter), None),
    lambda dimensions, dtype, _, gradient: (placed(gradient, *dimensions),),
)


def parameter(value: Any, *dimensions: Dimension) -> nnx.Param:
    """A parameter that knows its dimensions' names."""
    return nnx.Param(value, dimensions=dimensions)


def dimensions_of(variable: nnx.Variable) -> Dimensions:
    """The names of a parameter's dimensions."""
    return variable.get_metadata().get("dimensions", (None,) * len(variable.shape))


def weight_specs(model: Any, mesh: Mesh | AbstractMesh) -> Any:
    """How each parameter of a model is sharded, in the structure of its weights."""

    def spec(_: Any, variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(spec_of(dimensions_of(variable), variable.shape, mesh))

    return nnx.to_pure_dict(nnx.map_state(spec, nnx.state(model, nnx.Param)))


def stacked(layers: Sequence[Any], module: Any) -> Any:
    """The weights of modules like this one, stacked on a new first axis, sharded as they are."""
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    mesh = current_mesh()
    if mesh.empty:
        return stack
    specs = weight_specs(module, mesh)
    return jax.tree.map(lambda leaf, spec: sharded(leaf, PartitionSpec(None, *spec)), stack, specs)


def specs_like(tree: Any, weights: Any) -> Any:
    """How the arrays of a tree are sharded, from the specs of weights.

    An array whose path ends with a parameter's is sharded like it, as an optimizer's moments are;
    any other is replicated.
    """
    known = dict(jax.tree_util.tree_leaves_with_path(weights))

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        ends = (path[start:] for start in range(len(path)))
        found = next((known[end] for end in ends if end in known), PartitionSpec())
        return found if len(found) == len(leaf.shape) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(specs: Any) -> Any:
    """Specs as shardings over the devices of the mesh that is set, or on the default device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        here = jnp.zeros(()).sharding
        return jax.tree.map(lambda _: here, specs)
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs)


def abstract_arrays(tree: Any, specs: Any) -> Any:
    """The shapes and dtypes of a tree's arrays, to be sharded so."""
    abstract = jax.ShapeDtypeStruct
    return jax.tree.map(
        lambda leaf, where: abstract(leaf.shape, leaf.dtype, sharding=where), tree, shardings(specs)
    )


def _rule(name: str, size: int) -> tuple[str, ...] | None:
    """The axes for a dimension in an annotation, where parameters are gathered already."""
    mesh = current_mesh()
    for known in (name, f"num_{name}", f"{name}_size"):  # of `heads`: `num_heads`
        if known in RULES:
            axes = jax.tree.leaves(spec_of((known,), (size,), mesh)[0])
            return tuple(axis for axis in axes if axis in mesh.explicit_axes)
    return None


contracts.sharding_rules = _rule
