"""Parameters gathered over fsdp, and what is kept of them for the backward pass."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jgpt.parallel.mesh import current_mesh
from jgpt.parallel.rules import (
    Dimensions,
    axes_of,
    constrain,
    dimensions_of,
    shard_by_name,
    spec_of,
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def gather_parameter(parameter: nnx.Param, dtype: DTypeLike | None = None) -> Any:
    """Return the value of a parameter, gathered over fsdp in `dtype` if a mesh is set.

    The gradient is sharded as the parameter (ZeRO stage 3, Rajbhandari et al. 2020, section 5.3).
    """
    value = parameter[...]
    if current_mesh().empty:  # one device has all of it
        return value
    return _gathered(dimensions_of(parameter), dtype or value.dtype, value)


def remat(
    function: Callable[Parameters, Result], *, full: bool = False, scanned: bool = False
) -> Callable[Parameters, Result]:
    """Rematerialise: in `full`, or store all but gathered parameters for the backward pass.

    Common subexpression elimination must not undo this; the two loops of a `scanned` function
    share no subexpressions. Without fsdp nothing is gathered, but a scan would store a copy of the
    weights.
    """
    # blocks change no state that would have to be carried out of the transformation
    if full:
        return nnx.remat(function, graph_updates=False)
    mesh = current_mesh()
    if mesh.empty:
        return function
    is_gathered = bool(axes_of("embed_dim", mesh))  # the dimension that fsdp shards
    if not is_gathered and not scanned:
        return function
    # else the forward pass would keep each gathered weight for the backward pass, and each device
    # so all weights at once: the backward pass gathers them again
    return nnx.remat(
        function,
        policy=_is_kept,
        prevent_cse=not scanned,
        graph_updates=False,
    )


def _is_kept(operation: Any, *_: Any, **parameters: Any) -> bool:
    """Return the policy of rematerialisation: store all results but those of casts and moves.

    `_gathered` is one operation with a jaxpr of its own.
    """
    if "call_jaxpr" in parameters:
        equations = parameters["call_jaxpr"].eqns
        return any(_is_kept(equation.primitive) for equation in equations)
    # all that a gather is made of: cheap to do again, and as large as the weight to keep
    moves = ("convert_element_type", "optimization_barrier", "sharding_constraint")
    return operation.name not in moves


def gather_once(parameter: nnx.Param, dtype: DTypeLike) -> None:
    """Gather a parameter once, for every later `gather_parameter`.

    The gradient keeps the sharding of the parameter.
    """
    # as for the head of a loss in chunks, which each chunk would gather
    if not current_mesh().empty:
        parameter.set_value(gather_parameter(parameter, dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(dimensions: Dimensions, dtype: DTypeLike, parameter: Any) -> Any:
    """Return a parameter cast and gathered over fsdp, in its own dtype again.

    It is moved in the narrow dtype: half the bytes in bfloat16. The result has the parameter's
    dtype, as the gradient must.
    """
    # the barrier keeps XLA from gathering first and narrowing afterwards
    narrow = lax.optimization_barrier(parameter.astype(dtype))
    spec = spec_of(dimensions, parameter.shape, current_mesh(), exclude="fsdp")
    return constrain(narrow, spec).astype(parameter.dtype)


def _forward(dimensions: Dimensions, dtype: DTypeLike, parameter: Any) -> tuple[Any, None]:
    # linear in the parameter: the backward pass needs nothing of it
    return _gathered(dimensions, dtype, parameter), None


def _backward(
    dimensions: Dimensions, dtype: DTypeLike, residuals: None, gradient: Any
) -> tuple[Any]:
    # sharded again, so that XLA adds up the devices' gradients by a reduce-scatter
    return (shard_by_name(gradient, *dimensions),)


_gathered.defvjp(_forward, _backward)
