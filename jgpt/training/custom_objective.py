"""A custom objective: made, called with its arrays as arguments, and checked before training."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from jgpt.config import TrainConfig
from jgpt.data.batch import Batch
from jgpt.nn.models import abstract_model, weights_of
from jgpt.nn.stacking import model_merger
from jgpt.shapes.describe import describe_value
from jgpt.training.objective import Loss, Objective, loss_dtype, next_token_loss
from jgpt.training.optimizer import is_trainable, path_name
from jgpt.training.statistics import is_statistic
from jgpt.user_code import require_call, require_code

TAKEN_METRICS = (
    "step",
    "loss",
    "gradient_norm",
    "learning_rate",
    "validation_loss",
    "validation_estimate",
    "exact_validation_loss",
    "tokens",
    "seconds",
    "tokens_per_second",
    "model_flops_utilisation",
    "memory_bytes",
)
"""The metrics of every run, whose names an objective's metrics can't have."""
LARGE_CONSTANT = 1 << 20
"""The bytes from which a NumPy array is too large for a constant of a program."""


def make_objective(config: TrainConfig) -> Objective:
    """Make the objective of a config. Raises ValueError for one that can't be called."""
    if config.objective is None:
        return next_token_loss
    objective: Any = require_code(config.objective, "objective")(config)
    require_call(objective, "the objective must take (model, batch, rngs)", None, None, None)
    return objective  # type: ignore[return-value]


def split_arrays(objective: Any) -> tuple[Callable[[Any], Any], list[Any]]:
    """Return a function from arrays to an objective, and the arrays that this objective holds.

    They are those of a teacher, for example: the leaves of an `nnx.Module` or another pytree, and
    of the variables that a function closes over. As constants of the program they would be compiled
    into it, and copied for each program.
    """
    closure: tuple[types.CellType, ...] = ()
    if isinstance(objective, types.FunctionType):
        closure = objective.__closure__ or ()
    holding = [cell for cell in closure if _holds_arrays(cell)]
    contents = [cell.cell_contents for cell in holding]
    leaves, structure = jax.tree.flatten((objective, contents))
    held = []
    for leaf in leaves:
        if _is_argument(leaf):
            held.append(jnp.asarray(leaf))

    def with_arrays(arrays: Any) -> Any:
        remaining = iter(arrays)
        replaced = []
        for leaf in leaves:
            if _is_argument(leaf):
                leaf = next(remaining)
            replaced.append(leaf)
        called, values = structure.unflatten(replaced)
        if not values:
            return called
        # By identity, since equal cells are those with equal contents.
        new_cells = {}
        for cell, value in zip(holding, values, strict=True):
            new_cells[id(cell)] = types.CellType(value)
        cells = tuple(new_cells.get(id(cell), cell) for cell in closure)
        # The same code with other closed-over variables.
        function = types.FunctionType(
            called.__code__, called.__globals__, called.__name__, called.__defaults__, cells
        )
        function.__kwdefaults__ = called.__kwdefaults__
        return function

    if not held:
        return lambda _: objective, []
    return with_arrays, held


def _holds_arrays(cell: types.CellType) -> bool:
    """Return whether the variable of a cell is a pytree with arrays for arguments."""
    try:
        leaves = jax.tree.leaves(cell.cell_contents)
    except (TypeError, ValueError):
        # A deleted variable has no contents, and JAX can't sort the keys of every dict.
        return False
    return any(_is_argument(leaf) for leaf in leaves)


def _is_argument(leaf: Any) -> bool:
    """Return whether a leaf becomes an argument of the program.

    A small NumPy array stays what it is: as in any traced function, it may be a mask, a size or a
    list of names, whose values Python reads.
    """
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes >= LARGE_CONSTANT and jnp.issubdtype(leaf.dtype, np.number)
    return isinstance(leaf, jax.Array)


def as_loss(result: Any, dtype: Any) -> Loss:
    """Return an objective's result as a Loss whose value and metrics have a dtype.

    Raises ValueError for a result that is no mean, and for metrics that can't be logged.
    """
    if not isinstance(result, Loss):
        if not _is_scalar(result):
            raise ValueError(
                "the objective must return a scalar, the mean over the batch, or jgpt.Loss, not "
                f"{describe_value(result)}"
            )
        result = Loss(jnp.asarray(result))
    metrics = {}
    for name, value in (result.metrics or {}).items():
        if name in TAKEN_METRICS or is_statistic(name):
            raise ValueError(f"the objective's metric {name!r} is one of jgpt's: rename it")
        if jnp.shape(value) != ():
            raise ValueError(
                f"the objective's metric {name!r} must be a scalar, not {describe_value(value)}"
            )
        metrics[name] = jnp.asarray(value, dtype)
    weight = result.weight
    if isinstance(weight, jax.Array) and jnp.issubdtype(weight.dtype, jnp.integer):
        weight = weight.astype(dtype)
    return Loss(result.value.astype(dtype), weight, metrics or None)


def _is_scalar(result: Any) -> bool:
    """Return whether an array is one floating-point number."""
    if not isinstance(result, (jax.Array, np.generic)):
        return False
    return result.shape == () and jnp.issubdtype(result.dtype, jnp.floating)


def trace_objective(config: TrainConfig, batch: Batch) -> ClosedJaxpr:
    """Return the program of an objective, a jaxpr of the weights, the batch and a key.

    Raises ValueError for an objective that gives another program, or other metrics, each time. It
    is traced once for all steps, so a clock, a counter or NumPy's random numbers would stay as they
    were then, and a resumed run would differ.
    """
    program = _program(config, make_objective(config))
    weights = weights_of(abstract_model(config.model))
    key = jax.eval_shape(lambda: jax.random.key(0))

    def traced() -> tuple[ClosedJaxpr, str]:
        # Another function each time, or JAX would return the first trace.
        again = functools.partial(program)
        closed, (_, _, shapes) = jax.make_jaxpr(again, return_shape=True)(weights, batch, key)
        return closed, ", ".join(sorted(shapes or ())) or "none"

    first, first_metrics = traced()
    second, second_metrics = traced()
    if first_metrics != second_metrics:
        raise ValueError(
            "the objective must return the same metrics at each step: it returned "
            f"{first_metrics}, then {second_metrics}"
        )
    if str(first) != str(second):
        raise ValueError(
            "the objective must be a pure function of (model, batch, rngs): it gave another "
            "program when it was traced again, as one that reads a clock or counts its calls does"
        )
    return first


def require_gradient(program: ClosedJaxpr, config: TrainConfig) -> None:
    """Raise ValueError for the program of an objective that has no gradient for what is trained."""
    weights = weights_of(abstract_model(config.model))
    trained = set()
    # The weights are the first arguments of the program.
    of_program = zip(
        jax.tree_util.tree_leaves_with_path(weights), program.jaxpr.invars, strict=False
    )
    for (path, _), variable in of_program:
        if is_trainable(path_name(path), config.optimizer.trainable):
            trained.add(id(variable))
    value, *_ = program.jaxpr.outvars
    if _lead_to(program.jaxpr, {id(value)}).isdisjoint(trained):
        weights_in_words = "the model's weights"
        if config.optimizer.trainable:
            weights_in_words = f"the weights of `trainable={config.optimizer.trainable!r}`"
        raise ValueError(
            "the objective has no gradient: no floating-point numbers lead from "
            f"{weights_in_words} to its value, so nothing would be trained"
        )


def _lead_to(jaxpr: Any, values: set[int]) -> set[int]:
    """Return the identities of the variables from which a gradient may reach one of the values."""
    reached = set(values)
    for equation in reversed(jaxpr.eqns):
        results = {id(variable) for variable in equation.outvars}
        if equation.effects:
            # What changes a reference has no result: it takes the reference as an argument.
            results.update(id(variable) for variable in equation.invars)
        if equation.primitive.name == "stop_gradient" or reached.isdisjoint(results):
            continue
        for variable in _differentiated(equation, reached):
            # Integers and booleans, such as those of an argmax, end a gradient.
            if jnp.issubdtype(variable.aval.dtype, jnp.inexact):
                reached.add(id(variable))
    return reached


def _differentiated(equation: Any, reached: set[int]) -> list[Any]:
    """Return the arguments of an equation from which a gradient may reach one of its results."""
    if equation.primitive.name != "jit":
        return equation.invars
    called = equation.params["jaxpr"].jaxpr
    values = set()
    # Arguments, too, since they may be references that are changed inside.
    inner_variables = [*called.outvars, *called.invars]
    outer_variables = [*equation.outvars, *equation.invars]
    for inner, outer in zip(inner_variables, outer_variables, strict=True):
        if id(outer) in reached:
            values.add(id(inner))
    reached_inside = _lead_to(called, values)
    arguments = []
    for inner, outer in zip(called.invars, equation.invars, strict=True):
        if id(inner) in reached_inside:
            arguments.append(outer)
    return arguments


def unread_arrays(program: ClosedJaxpr, batch: Batch) -> list[str]:
    """Return the names of a batch's arrays that the program of a custom objective does not read.

    An objective that computes a mean of its own forgets the weights of targets easily, and then
    the model learns what it should not.
    """
    read = set()
    for equation in program.jaxpr.eqns:
        read.update(id(variable) for variable in equation.invars)
    read.update(id(variable) for variable in program.jaxpr.outvars)
    arguments, _ = jax.tree_util.tree_flatten_with_path({"batch": batch})
    # weights come before the batch, and the key after it
    end = len(program.jaxpr.invars) - 1
    variables = program.jaxpr.invars[end - len(arguments) : end]
    unread = []
    for (path, _), variable in zip(arguments, variables, strict=True):
        if id(variable) not in read:
            unread.append(path[-1].name)
    return unread


def _program(config: TrainConfig, objective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (weights, batch, key) to a loss, its weight and its metrics."""
    merge = model_merger(config.model)

    def program(weights: Any, batch: Batch, key: Any) -> tuple[Any, Any, Any]:
        result = objective(merge(weights), batch, nnx.Rngs(dropout=key))
        loss = as_loss(result, loss_dtype(config.model))
        return loss.value, jnp.asarray(loss.weight), loss.metrics

    return program
