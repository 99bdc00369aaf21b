"""Parameters gathered over fsdp, and the results stored for the backward pass."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
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
_REMATERIALISES: ContextVar[bool] = ContextVar("rematerialises", default=True)


def gather_parameter(parameter: nnx.Param, dtype: DTypeLike | None = None) -> Any:
    """Return the value of a parameter, gathered over fsdp in `dtype` if a mesh is set.

    The gradient is sharded like the parameter (ZeRO stage 3, Rajbhandari et al. 2020, section 5.3).
    """
    value = parameter[...]
    if current_mesh().empty:  # a single device has the whole parameter
        return value
    return _gathered(dimensions_of(parameter), dtype or value.dtype, value)


def remat(
    function: Callable[Parameters, Result], *, full: bool = False, scanned: bool = False
) -> Callable[Parameters, Result]:
    """Rematerialise a function; store all results but gathered parameters, or with `full` none.

    Common subexpression elimination must not undo this; the two loops of a `scanned` function share
    no subexpressions. Without fsdp nothing is gathered, but a scan would store a copy of the
    weights.
    """
    if not _REMATERIALISES.get():
        return function
    # Blocks change no state that the transformation would have to return.
    if full:
        return nnx.remat(function, graph_updates=False)
    mesh = current_mesh()
    if mesh.empty:
        return function
    is_gathered = bool(axes_of("embed_dim", mesh))  # fsdp shards this dimension
    if not is_gathered and not scanned:
        return function
    # Otherwise the forward pass would store each gathered weight for the backward pass, and each
    # device would hold all weights at once. The backward pass gathers them again.
    return nnx.remat(
        function,
        policy=_is_kept,
        prevent_cse=not scanned,
        graph_updates=False,
    )


@contextlib.contextmanager
def without_remat() -> Iterator[None]:
    """Rematerialise nothing in the block, which is for a forward pass whose results are read."""
    before = _REMATERIALISES.set(False)
    try:
        yield
    finally:
        _REMATERIALISES.reset(before)


def _is_kept(operation: Any, *_: Any, **parameters: Any) -> bool:
    """Return whether to store a result: all but those of casts and moves.

    `_gathered` is one operation with its own jaxpr.
    """
    if "call_jaxpr" in parameters:
        equations = parameters["call_jaxpr"].eqns
        return any(_is_kept(equation.primitive) for equation in equations)
    # The operations of a gather: they are cheap to repeat, and their results as large as the
    # weight.
    moves = ("convert_element_type", "optimization_barrier", "sharding_constraint")
    return operation.name not in moves


def gather_once(parameter: nnx.Param, dtype: DTypeLike) -> None:
    """Gather a parameter once, for every later `gather_parameter`.

    The gradient keeps the sharding of the parameter.
    """
    # Needed for the head of a loss in chunks, which each chunk would gather.
    if not current_mesh().empty:
        parameter.set_value(gather_parameter(parameter, dtype))


def _gather(dimensions: Dimensions, dtype: DTypeLike, parameter: Any) -> Any:
    """Cast a parameter, gather it over fsdp, and cast it back.

    It is moved in the narrow dtype, which is half the bytes in bfloat16. The result has the
    parameter's dtype, as the gradient must.
    """
    # The barrier keeps XLA from gathering before narrowing.
    narrow = lax.optimization_barrier(parameter.astype(dtype))
    spec = spec_of(dimensions, parameter.shape, current_mesh(), exclude="fsdp")
    return constrain(narrow, spec).astype(parameter.dtype)


_gathered = jax.custom_vjp(_gather, nondiff_argnums=(0, 1))


def _forward(dimensions: Dimensions, dtype: DTypeLike, parameter: Any) -> tuple[Any, None]:
    # The function is linear in the parameter, so the backward pass needs no value of it. With
    # `_gathered` here, a gradient would have no derivative: Sophia takes one by `jax.jvp`, which a
    # function with a `custom_vjp` lacks.
    return _gather(dimensions, dtype, parameter), None


def _backward(
    dimensions: Dimensions, dtype: DTypeLike, residuals: None, gradient: Any
) -> tuple[Any]:
    # Sharded again, so that XLA adds up the devices' gradients by a reduce-scatter. The transpose
    # of a plain sharding constraint replicates them, by an all-reduce.
    return (shard_by_name(gradient, *dimensions),)


_gathered.defvjp(_forward, _backward)
