"""Train and evaluation steps: pure functions of (state, batch), compiled with jit."""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jgpt.config import ModelConfig, TrainConfig
from jgpt.data.batch import Batch
from jgpt.nn import stacking
from jgpt.nn.models import Weights, weight_dimensions
from jgpt.nn.precision import at_least_float32
from jgpt.parallel import rules
from jgpt.parallel.mesh import current_mesh
from jgpt.shapes.contract import record, typed
from jgpt.training.custom_objective import as_loss, make_objective, split_arrays
from jgpt.training.objective import loss_dtype, target_losses
from jgpt.training.optimizer import LikeWeights, make_optimizer, trained_weights, with_frozen
from jgpt.training.schedule import learning_rate_schedule
from jgpt.training.state import TrainState, state_specs
from jgpt.training.statistics import make_statistics


@record
@dataclass(frozen=True)
class Metrics:
    """Metrics of each step in a call; only the first `count` entries are valid."""

    loss: Float[Array, " steps"]
    gradient_norm: Float[Array, " steps"]
    learning_rate: Float[Array, " steps"]
    extra: PyTree[Float[Array, " steps"]] = None
    """The metrics of the objective and of `log` by name; None without any."""


@typed
def make_train_steps(config: TrainConfig) -> jax.stages.Wrapped:
    """Make a jitted function that takes `count` steps, on the first `count` windows.

    It maps (state, windows, key, count, first_step=None) to (state, metrics); the windows may be a
    Batch of all steps. One program serves every count. The state is donated. If the loss or
    gradient of a step is not finite, this step and all later ones are skipped, so the state's step
    stays behind. A later call skips its steps too if its `first_step` is ahead of the state's step.
    """
    micro_batches = config.micro_batches
    if micro_batches == "auto":
        raise ValueError("micro_batches=auto has to be decided first, by plan.with_micro_batches")
    # Made once, outside of the traced function. The seed enters only as the key, so that another
    # seed needs no other program.
    merge = stacking.model_merger(config.model)
    dimensions = weight_dimensions(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps, dimensions, config.model)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    statistics = None
    if config.log:
        statistics = make_statistics(config)

    with_arrays, objective_arrays = split_arrays(make_objective(config))
    dtype = loss_dtype(config.model)

    def loss_of(weights, arrays, batch, key):
        objective = with_arrays(arrays)
        model = merge(with_frozen(weights, config.optimizer.trainable))
        loss = as_loss(objective(model, batch, nnx.Rngs(dropout=key)), dtype)
        if isinstance(loss.weight, (int, float)):  # the same for each micro-batch
            return loss.value, (None, loss.metrics)
        return loss.value, (loss.weight, loss.metrics)

    def in_parts(batch):
        """Return the micro-batches of a batch; each array: micro_batches batch window."""
        return jax.tree.map(lambda leaf: rules.split_batch(leaf, micro_batches), batch)

    def measure(weights, arrays, batch, key):
        """Return the batch's weight, and its loss, gradients and metrics."""
        loss_and_gradients = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (weight, metrics)), gradients = loss_and_gradients(weights, arrays, batch, key)
        return weight, (loss, gradients, metrics)

    @typed
    def gradients_of(
        weights: LikeWeights, arrays: Any, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], LikeWeights, PyTree[Float[Array, ""]]]:
        if micro_batches == 1:  # no scan, and the step's key unchanged
            _, (loss, gradients, metrics) = measure(weights, arrays, batch, key)
            return loss, jax.tree.map(at_least_float32, gradients), metrics
        parts = in_parts(batch)
        keys = jax.random.split(key, micro_batches)

        def add(total, part):
            batch, key = part
            weight, measured = measure(weights, arrays, batch, key)
            if weight is not None:
                measured = jax.tree.map(lambda leaf: weight * leaf, measured)
            return jax.tree.map(jnp.add, total, (weight, measured)), None

        weight = None
        metrics = None
        if config.objective is not None:
            # What the user's objective returns is known only from a trace.
            def loss_of_first():
                first = jax.tree.map(operator.itemgetter(0), parts)
                return loss_of(weights, arrays, first, keys[0])

            _, (weight, metrics) = jax.eval_shape(loss_of_first)

        def zeros(tree):
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

        loss = jnp.zeros((), dtype)
        # A sum of 16-bit gradients in 16 bits was 6% off with 128 micro-batches.
        sums = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
        start = (zeros(weight), (loss, sums, zeros(metrics)))
        (weight, total), _ = jax.lax.scan(add, start, (parts, keys))
        # Micro-batches without weights have equal sizes, so that the mean over them is the mean
        # over the batch.
        if weight is None:
            weight = micro_batches
        return jax.tree.map(lambda leaf: leaf / weight, total)

    def value_of(weights, arrays, batch, key):
        """Return the loss alone, which an optimizer may differentiate once more."""
        if micro_batches == 1:
            value, _ = loss_of(weights, arrays, batch, key)
            return value
        parts = in_parts(batch)
        keys = jax.random.split(key, micro_batches)

        def weighted(part):
            batch, key = part
            value, (weight, _) = loss_of(weights, arrays, batch, key)
            if weight is None:
                weight = jnp.ones_like(value)
            return weight * value, weight

        values, part_weights = jax.lax.map(weighted, (parts, keys))
        return values.sum() / part_weights.sum()

    @typed
    def step(
        state: TrainState, arrays: Any, batch: Batch, key: Key[Array, ""]
    ) -> tuple[TrainState, PyTree[Float[Array, ""]]]:
        batch = jax.tree.map(lambda leaf: rules.shard_by_name(leaf, "batch", None), batch)
        # folded in, so that a step can be replayed and a run resumed
        step_key = jax.random.fold_in(key, state.step)
        # With `ema_decay`, the state's weights are an average, at which no gradient is taken.
        trained = trained_weights(state.weights, state.optimizer)
        loss, gradients, extra = gradients_of(trained, arrays, batch, step_key)
        norm = optax.tree.norm(gradients)
        extra_arguments = {}
        if config.optimizer.make is not None:
            # Line searches pass on the arguments that they don't know, but only by name.
            def value_fn(weights, obj_fn=None):
                return value_of(weights, arrays, batch, step_key)

            # By the names that optax's optimizers have for them: L-BFGS takes the first three.
            extra_arguments = {
                "value": loss,
                "grad": gradients,
                "value_fn": value_fn,
                "obj_fn": value_fn,  # as Sophia calls it
            }
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer, state.weights, **extra_arguments
        )
        weights = optax.apply_updates(state.weights, updates)
        stepped = TrainState(weights, optimizer_state, state.step + 1)
        if not current_mesh().empty:
            # Updates may be replicated, as Muon's are, but the state stays sharded.
            stepped = rules.constrain(stepped, state_specs(config))
        if statistics is not None:
            trained_next = trained_weights(stepped.weights, stepped.optimizer)
            logged = statistics(stepped.step, trained, trained_next, gradients, batch, step_key)
            extra = {**(extra or {}), **logged}
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        # A step that is not finite leaves the state and its step unchanged, so that `steps` ends
        # there.
        def new_if_finite(new, old):
            return jnp.where(finite, new, old)

        state = jax.tree.map(new_if_finite, stepped, state)
        learning_rate = jnp.asarray(schedule(stepped.step - 1), loss.dtype)
        return state, (loss, norm, learning_rate, extra)

    @typed
    def steps(
        state: TrainState,
        windows: Int[Array, "steps batch window"] | Batch,
        key: Key[Array, ""],
        count: Int[Array, ""],
        first_step: Int[Array, ""] | None = None,
        arrays: Any = (),
    ) -> tuple[TrainState, Metrics]:
        first = state.step
        if first_step is not None:
            # A call is dispatched before it is known whether the call before ended with finite
            # values.
            first = first_step

        def batch_of(i):
            if isinstance(windows, Batch):
                return jax.tree.map(operator.itemgetter(i), windows)
            return Batch(windows[i])

        # The trip count is dynamic, so that one program serves every count, and steps are bitwise
        # equal however they are grouped into calls.
        def unfinished(carry):
            i, state, _ = carry
            # After a step that was not finite, the state's step lags behind and the loop ends.
            return (i < count) & (state.step == first + i)

        def body(carry):
            i, state, metrics = carry
            state, measured = step(state, arrays, batch_of(i), key)
            filled = jax.tree.map(lambda row, value: row.at[i].set(value), metrics, measured)
            return i + 1, state, filled

        most_steps, *_ = jax.tree.leaves(windows)[0].shape
        empty = jnp.zeros(most_steps, dtype)
        extra = None
        if config.objective is not None or statistics is not None:
            # The names of these metrics are known only from a trace.
            _, (*_, extra) = jax.eval_shape(step, state, arrays, batch_of(0), key)
        metrics = (empty, empty, empty, jax.tree.map(lambda _: empty, extra))
        carry = (jnp.zeros((), jnp.int32), state, metrics)
        _, state, metrics = jax.lax.while_loop(unfinished, body, carry)
        return state, Metrics(*metrics)

    jitted = jax.jit(steps, donate_argnums=0)
    if not objective_arrays:
        return jitted
    return StepsWithArrays(jitted, objective_arrays)


class StepsWithArrays:
    """Jitted train steps that get an objective's arrays as their last argument.

    On a mesh, every device has a copy of them.
    """

    def __init__(self, steps: jax.stages.Wrapped, arrays: list[Any]) -> None:
        self._steps = steps
        self._arrays = arrays

    def __call__(self, *args: Any) -> Any:
        """Take the steps."""
        return self._steps(*args, arrays=self._placed)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Trace the steps for these arguments."""
        return self._steps.trace(*args, arrays=self._abstract())

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lower the steps for these arguments."""
        return self._steps.lower(*args, arrays=self._abstract())

    def eval_shape(self, *args: Any) -> Any:
        """Return the shapes of the result for these arguments."""
        return self._steps.eval_shape(*args, arrays=self._abstract())  # type: ignore[attr-defined]

    # Once, not in each call, and only for devices that exist: others are compiled for ahead.
    @functools.cached_property
    def _placed(self) -> list[Any]:
        if current_mesh().empty:
            return self._arrays
        replicated = rules.shardings([PartitionSpec()] * len(self._arrays))
        return jax.device_put(self._arrays, replicated)

    def _abstract(self) -> list[Any]:
        return rules.abstract_arrays(self._arrays, [PartitionSpec()] * len(self._arrays))


def make_eval_step(config: ModelConfig) -> jax.stages.Wrapped:
    """Make a jitted function that sums the losses of counted targets over batches of windows.

    It maps (weights, windows, counts, total=None) to the sum, which includes `total` if there is
    one. If the batches are split over calls, the sum stays the same to the last bit. A batch
    without counted targets is skipped at run time.
    """
    merge = stacking.model_merger(config)

    @jax.jit
    @typed
    def evaluate(
        weights: Weights,
        windows: Int[Array, "batches batch window"],
        counts: Bool[Array, "batches batch window-1"],
        total: Float[Array, ""] | None = None,
    ) -> Float[Array, ""]:
        def add(total, batch):
            window, counted = batch
            window = rules.shard_by_name(window, "batch", None)
            counted = rules.shard_by_name(counted, "batch", None)

            def added():
                # merged inside, since the head may be replaced by a gathered one
                model = merge(weights)
                losses = target_losses(model, window)  # batch time
                return total + jnp.where(counted, losses, 0).sum()

            def unchanged():
                return total

            # Every call has the same number of batches, some of which may be padding.
            return jax.lax.cond(counted.any(), added, unchanged), None

        if total is None:
            total = jnp.zeros((), loss_dtype(config))
        total = total.astype(loss_dtype(config))  # both branches of the condition need this dtype
        total, _ = jax.lax.scan(add, total, (windows, counts))
        return total

    return evaluate
