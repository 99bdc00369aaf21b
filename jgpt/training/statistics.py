"""Statistics of a step for each part of the model, which `log` adds to the metrics of a run.

A part is a name such as `blocks.0.attention`: the path of a parameter or a module, up to the first
name after a number.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, assert_never, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, Int, Key, PyTree

from jgpt.config import StatisticName, TrainConfig
from jgpt.data.batch import Batch
from jgpt.nn import stacking
from jgpt.nn.models import Weights
from jgpt.nn.precision import at_least_float32
from jgpt.parallel import rules
from jgpt.parallel.gather import without_remat
from jgpt.shapes.calls import TypedCall, watching
from jgpt.shapes.contract import typed
from jgpt.training.objective import final_hidden, loss_dtype
from jgpt.training.optimizer import LikeWeights

STATISTICS: tuple[StatisticName, ...] = get_args(StatisticName)
ByPart = PyTree[Float[Array, ""]]
"""A dictionary with a number for each part of the model, or for each statistic of one."""


def part_of(names: Iterable[str]) -> str:
    """Return the part of a path: up to the first name after a number, or else its first name."""
    names = list(names)
    for position, name in enumerate(names):
        if name.isdigit():
            return ".".join(names[: position + 2])
    return names[0]


def is_statistic(metric: str) -> bool:
    """Return whether a metric has the name of a statistic, such as gradient_norms/final_norm."""
    return metric.partition("/")[0] in STATISTICS


def make_statistics(config: TrainConfig) -> Callable[..., Any]:
    """Make a function that returns the statistics of a step in `config.log`, by name.

    Its arguments are the step's number, the weights before and after it, its gradients, its batch
    and its key. At the steps between those that are logged, it computes nothing and returns zeros.
    """
    mean_squares = None
    if "activation_rms" in config.log:
        mean_squares = _make_mean_squares(config)
    dtype = loss_dtype(config.model)

    def compute(before, after, gradients, batch, key):
        values = {}
        for name in config.log:
            match name:
                case "gradient_norms":
                    squares = sum_of_squares(gradients)
                case "update_ratios":
                    squares = _squared_ratios(before, after)
                case "activation_rms":
                    assert mean_squares is not None
                    squares = mean_squares(before, batch, key)
                case _:
                    assert_never(name)
            for part, square in squares.items():
                values[f"{name}/{part}"] = jnp.sqrt(square).astype(dtype)
        return values

    @typed
    def statistics(
        step: Int[Array, ""],
        before: LikeWeights,
        after: LikeWeights,
        gradients: LikeWeights,
        batch: Batch,
        key: Key[Array, ""],
    ) -> ByPart:
        arguments = (before, after, gradients, batch, key)
        shapes = jax.eval_shape(compute, *arguments)

        def nothing(*_):
            return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        is_logged = step % config.log_interval == 0
        return jax.lax.cond(is_logged, compute, nothing, *arguments)

    return statistics


@typed
def _squared_ratios(before: LikeWeights, after: LikeWeights) -> ByPart:
    """Return the mean square of each part's update over that of its parameters.

    The update is the difference of the weights, to which the learning rate and the decay belong.
    """

    def difference(after_leaf, before_leaf):
        return at_least_float32(after_leaf) - at_least_float32(before_leaf)

    of_updates = sum_of_squares(jax.tree.map(difference, after, before))
    of_parameters = sum_of_squares(before)
    ratios = {}
    for part, squares in of_updates.items():
        ratios[part] = squares / of_parameters[part]  # both are sums over equally many numbers
    return ratios


@typed
def sum_of_squares(tree: Weights) -> ByPart:
    """Return the sum of squares of each part of a tree that is like the weights."""
    sums: dict[str, Any] = {}

    def add(names, squares):
        part = part_of(names)
        sums[part] = sums.get(part, 0) + squares

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        squares = jnp.square(at_least_float32(leaf))
        names = [str(key.key) for key in path]
        if stacking.STACKED not in path:
            add(names, squares.sum())
            continue
        # The first axis is that of the blocks.
        position = path.index(stacking.STACKED)
        of_blocks = squares.reshape(len(squares), -1).sum(axis=1)
        for block, of_block in enumerate(of_blocks):
            names[position] = str(block)
            add(names, of_block)
    return sums


def _make_mean_squares(config: TrainConfig) -> Callable[..., Any]:
    """Make a function of (weights, batch, key) to the mean square of what each part returns.

    The forward pass is computed once more, with the same dropout: a train step keeps the results
    inside a scan over the blocks, or drops them to compute them again.
    """
    model_config = dataclasses.replace(config.model, scan_layers=False, remat=False)
    merge = stacking.model_merger(model_config)
    is_stacked = stacking.uses_stacked_blocks(config.model)
    micro_batches = config.micro_batches
    assert isinstance(micro_batches, int)

    def of_micro_batch(weights, batch, key):
        if is_stacked:
            weights = stacking.unstack_blocks(weights)
        model = merge(weights)
        results: dict[str, list[Any]] = {}
        inside: set[str] = set()
        outside = get_opaque_trace_state()

        def watch(call: TypedCall) -> Callable[[Any], Any] | None:
            # The path of a module's own call is that of the module.
            is_part = call.path and part_of(call.path.split(".")) == call.path
            if call.function.__name__ != "__call__" or not is_part:
                return None

            def keep(result: Any) -> Any:
                # What a transformation inside the model computes can't leave its trace.
                if get_opaque_trace_state() == outside:
                    results.setdefault(call.path, []).extend(_floats_in(result))
                else:
                    inside.add(call.path)
                return result

            return keep

        with watching(watch), without_remat():
            final_hidden(model, batch, nnx.Rngs(dropout=key))
        _require_results(results, inside)
        return {part: _mean_square(arrays) for part, arrays in results.items()}

    def mean_squares(weights, batch, key):
        if micro_batches == 1:
            return of_micro_batch(weights, batch, key)
        # The keys are those of the gradients, so that dropout is the same.
        keys = jax.random.split(key, micro_batches)
        parts = jax.tree.map(lambda leaf: rules.split_batch(leaf, micro_batches), batch)

        def of_part(part):
            batch, key = part
            return of_micro_batch(weights, batch, key)

        by_part = jax.lax.map(of_part, (parts, keys))
        return jax.tree.map(jnp.mean, by_part)

    return mean_squares


def _require_results(results: dict[str, list[Any]], inside: set[str]) -> None:
    """Raise ValueError for parts of which only a transformation has the results, or for no
    part."""
    hidden = sorted(inside - set(results))
    if hidden or not results:
        why = "this model has no part whose __call__ has @jgpt.typed, or the checks are off"
        if hidden:
            why = (
                f"the model calls {hidden[0]} inside a transformation such as nnx.remat, nnx.scan "
                "or vmap"
            )
        raise ValueError(
            f"`log={('activation_rms',)!r}` reads what the parts of a model return: {why}; leave "
            "it out"
        )


def _floats_in(result: Any) -> list[Any]:
    """Return the floating-point arrays in a result, which may be a tuple."""
    arrays = jax.tree.leaves(result)
    return [array for array in arrays if jnp.issubdtype(array.dtype, jnp.floating)]


@typed
def _mean_square(arrays: Weights) -> Float[Array, ""]:
    """Return the mean square over all elements of a tree of arrays."""
    total = jnp.zeros(())
    count = 0
    for array in jax.tree.leaves(arrays):
        total += jnp.square(at_least_float32(array)).sum()
        count += math.prod(array.shape)
    return total / max(count, 1)
