"""Train and evaluation steps: pure functions of (state, batch), compiled with jit.

Read `train_step` first, which is one step, then its stages below it. `make_train_steps` compiles a
loop over it.
"""

import functools
import operator
from collections.abc import Callable
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

LossFunction = Callable[[Any, Any, Batch, Any], tuple[Any, tuple[Any, Any]]]
"""From (weights, arrays, batch, key) to the loss, and beside it its weight and its metrics."""


@record
@dataclass(frozen=True)
class Metrics:
    """Metrics of each step in a call; only the first `count` entries are valid."""

    loss: Float[Array, " steps"]
    gradient_norm: Float[Array, " steps"]
    learning_rate: Float[Array, " steps"]
    extra: PyTree[Float[Array, " steps"]] = None
    """The metrics of the objective and of `log` by name; None without any."""


@dataclass(frozen=True)
class StepSetup:
    """What a config says about every step, made once, outside of the traced functions."""

    config: TrainConfig
    micro_batches: int
    """Those of the config, which are no longer `auto`."""
    loss_of: LossFunction
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    statistics: Callable[..., Any] | None
    """What computes the statistics of `log`; None without any."""


# --- one step -------------------------------------------------------------------------------------


@typed
def train_step(
    setup: StepSetup, state: TrainState, arrays: Any, batch: Batch, key: Key[Array, ""]
) -> tuple[TrainState, PyTree[Float[Array, ""]]]:
    """Take one step: from a state and a batch to the next state and the metrics.

    `arrays` are those of the objective. The metrics are the fields of `Metrics`, for one step.
    """
    batch = jax.tree.map(lambda leaf: rules.shard_by_name(leaf, "batch", None), batch)
    # folded in, so that a step can be replayed and a run resumed
    step_key = jax.random.fold_in(key, state.step)
    # With `ema_decay`, the state's weights are an average, at which no gradient is taken.
    weights = trained_weights(state.weights, state.optimizer)
    loss, gradients, extra = gradients_of(setup, weights, arrays, batch, step_key)
    norm = optax.tree.norm(gradients)

    def loss_at(other_weights):
        return _loss_alone(setup, other_weights, arrays, batch, step_key)

    stepped = _update(setup, state, loss, gradients, loss_at)
    if setup.statistics is not None:
        next_weights = trained_weights(stepped.weights, stepped.optimizer)
        logged = setup.statistics(stepped.step, weights, next_weights, gradients, batch, step_key)
        of_objective = extra or {}
        extra = of_objective | logged

    # A step that is not finite leaves the state and its step unchanged, at which the loop over
    # steps ends.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def new_if_finite(new, old):
        return jnp.where(finite, new, old)

    next_state = jax.tree.map(new_if_finite, stepped, state)
    learning_rate = jnp.asarray(setup.schedule(stepped.step - 1), loss.dtype)
    return next_state, (loss, norm, learning_rate, extra)


@typed
def gradients_of(
    setup: StepSetup, weights: LikeWeights, arrays: Any, batch: Batch, key: Key[Array, ""]
) -> tuple[Float[Array, ""], LikeWeights, PyTree[Float[Array, ""]]]:
    """Return the loss of a batch, its gradients and its metrics."""
    if setup.micro_batches > 1:
        return _accumulate(setup, weights, arrays, batch, key)
    # A single one needs no scan, and gets the step's key itself.
    _, (loss, gradients, metrics) = _measure(setup, weights, arrays, batch, key)
    return loss, jax.tree.map(at_least_float32, gradients), metrics


def _measure(
    setup: StepSetup, weights: Any, arrays: Any, batch: Batch, key: Any
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return the weight of one micro-batch, and its loss, gradients and metrics."""
    loss_and_gradients = jax.value_and_grad(setup.loss_of, has_aux=True)
    (loss, (weight, metrics)), gradients = loss_and_gradients(weights, arrays, batch, key)
    return weight, (loss, gradients, metrics)


def _accumulate(
    setup: StepSetup, weights: Any, arrays: Any, batch: Batch, key: Any
) -> tuple[Any, Any, Any]:
    """Return the weighted means of the losses, gradients and metrics of the micro-batches.

    The activations of only one micro-batch are in memory at a time.
    """
    parts = _micro_batches(setup, batch)
    keys = jax.random.split(key, setup.micro_batches)

    def add(total, part):
        part_batch, part_key = part
        weight, measured = _measure(setup, weights, arrays, part_batch, part_key)
        if weight is not None:
            measured = jax.tree.map(lambda leaf: weight * leaf, measured)

        def add_leaf(sum_so_far, leaf):
            return sum_so_far + leaf.astype(sum_so_far.dtype)

        return jax.tree.map(add_leaf, total, (weight, measured)), None

    start = _zero_sums(setup, weights, arrays, parts, keys)
    (weight, total), _ = jax.lax.scan(add, start, (parts, keys))
    # Micro-batches without weights have equal sizes, so that the mean over them is the mean over
    # the batch.
    if weight is None:
        weight = setup.micro_batches
    return jax.tree.map(lambda leaf: leaf / weight, total)


def _zero_sums(
    setup: StepSetup, weights: Any, arrays: Any, parts: Batch, keys: Any
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return zeros like what `_measure` returns, to which that of each micro-batch is added."""
    weight = None
    metrics = None
    # The built-in loss has no metrics, and no weight unless the targets have weights. What another
    # objective returns is known only from a trace.
    is_built_in = setup.config.objective is None
    if not is_built_in or parts.weights is not None:

        def loss_of_first():
            first = jax.tree.map(operator.itemgetter(0), parts)
            return setup.loss_of(weights, arrays, first, keys[0])

        _, (weight, metrics) = jax.eval_shape(loss_of_first)

    def zeros(tree):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

    loss = jnp.zeros((), loss_dtype(setup.config.model))
    # A sum of 16-bit gradients in 16 bits was 6% off with 128 micro-batches.
    gradients = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
    return zeros(weight), (loss, gradients, zeros(metrics))


def _loss_alone(setup: StepSetup, weights: Any, arrays: Any, batch: Batch, key: Any) -> Any:
    """Return a batch's loss, which an optimizer may differentiate once more."""
    if setup.micro_batches == 1:
        loss, _ = setup.loss_of(weights, arrays, batch, key)
        return loss
    parts = _micro_batches(setup, batch)
    keys = jax.random.split(key, setup.micro_batches)

    def weighted(part):
        part_batch, part_key = part
        loss, (weight, _) = setup.loss_of(weights, arrays, part_batch, part_key)
        if weight is None:
            weight = jnp.ones_like(loss)
        return weight * loss, weight

    losses, part_weights = jax.lax.map(weighted, (parts, keys))
    return losses.sum() / part_weights.sum()


def _micro_batches(setup: StepSetup, batch: Batch) -> Batch:
    """Return the micro-batches of a batch, in arrays: micro_batches batch window."""
    return jax.tree.map(lambda leaf: rules.split_batch(leaf, setup.micro_batches), batch)


def _update(
    setup: StepSetup,
    state: TrainState,
    loss: Any,
    gradients: Any,
    loss_at: Callable[[Any], Any],
) -> TrainState:
    """Return the state after the optimizer's step.

    `loss_at` computes the loss of the same batch at other weights.
    """
    extra_arguments = {}
    if setup.config.optimizer.make is not None:
        # Line searches pass on the arguments that they don't know, but only by name.
        def value_fn(weights, obj_fn=None):
            return loss_at(weights)

        # By the names that optax's optimizers have for them: L-BFGS takes the first three.
        extra_arguments = {
            "value": loss,
            "grad": gradients,
            "value_fn": value_fn,
            "obj_fn": value_fn,  # as Sophia calls it
        }
    updates, optimizer_state = setup.optimizer.update(
        gradients, state.optimizer, state.weights, **extra_arguments
    )
    # Optax adds in the wider dtype, and casts to that of the weights.
    with jax.numpy_dtype_promotion("standard"):
        weights = optax.apply_updates(state.weights, updates)
    stepped = TrainState(weights, optimizer_state, state.step + 1)
    if current_mesh().empty:
        return stepped
    # Updates may be replicated, as Muon's are, but the state stays sharded.
    return rules.constrain(stepped, state_specs(setup.config))


# --- all steps of a call --------------------------------------------------------------------------


@typed
def make_train_steps(config: TrainConfig) -> jax.stages.Wrapped:
    """Make a jitted function that takes `count` steps, on the first `count` windows.

    It maps (state, windows, key, count, first_step=None) to (state, metrics); the windows may be a
    Batch of all steps. One program serves every count. The state is donated. If the loss or
    gradient of a step is not finite, this step and all later ones are skipped, so the state's step
    stays behind. A later call skips its steps too if its `first_step` is ahead of the state's step.
    """
    setup, objective_arrays = _set_up(config)

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
            state, measured = train_step(setup, state, arrays, batch_of(i), key)

            def fill(row, value):
                return row.at[i].set(value.astype(row.dtype))

            filled = jax.tree.map(fill, metrics, measured)
            return i + 1, state, filled

        most_steps, *_ = jax.tree.leaves(windows)[0].shape
        empty = jnp.zeros(most_steps, loss_dtype(config.model))
        extra = None
        if config.objective is not None or config.log:
            # The names of these metrics are known only from a trace.
            one_step = functools.partial(train_step, setup)
            _, (*_, extra) = jax.eval_shape(one_step, state, arrays, batch_of(0), key)
        metrics = (empty, empty, empty, jax.tree.map(lambda _: empty, extra))
        carry = (jnp.zeros((), jnp.int32), state, metrics)
        _, state, metrics = jax.lax.while_loop(unfinished, body, carry)
        return state, Metrics(*metrics)

    jitted = jax.jit(steps, donate_argnums=0)
    if not objective_arrays:
        return jitted
    return StepsWithArrays(jitted, objective_arrays)


def _set_up(config: TrainConfig) -> tuple[StepSetup, list[Any]]:
    """Return what a config says about every step, and the arrays that its objective holds."""
    assert config.micro_batches != "auto"  # `with_micro_batches` has chosen a number
    dimensions = weight_dimensions(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps, dimensions, config.model)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    statistics = None
    if config.log:
        statistics = make_statistics(config)
    loss_of, objective_arrays = _make_loss(config)
    setup = StepSetup(
        config=config,
        micro_batches=config.micro_batches,
        loss_of=loss_of,
        optimizer=optimizer,
        schedule=schedule,
        statistics=statistics,
    )
    return setup, objective_arrays


def _make_loss(config: TrainConfig) -> tuple[LossFunction, list[Any]]:
    """Make the function that is differentiated; also return the arrays that its objective holds.

    Those are an argument of it, as constants would be compiled into the program. The seed enters
    only as the key, so that another seed needs no other program.
    """
    merge = stacking.model_merger(config.model)
    with_arrays, objective_arrays = split_arrays(make_objective(config))
    dtype = loss_dtype(config.model)

    def loss_of(weights, arrays, batch, key):
        objective = with_arrays(arrays)
        model = merge(with_frozen(weights, config.optimizer.trainable))
        loss = as_loss(objective(model, batch, nnx.Rngs(dropout=key)), dtype)
        weight = loss.weight
        if isinstance(weight, (int, float)):  # the same for each micro-batch
            weight = None
        return loss.value, (weight, loss.metrics)

    return loss_of, objective_arrays


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
        return jax.device_put(self._arrays, rules.shardings(self._specs()))

    def _abstract(self) -> list[Any]:
        return rules.abstract_arrays(self._arrays, self._specs())

    def _specs(self) -> list[PartitionSpec]:
        return [PartitionSpec() for _ in self._arrays]  # replicated


# --- evaluation -----------------------------------------------------------------------------------


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
