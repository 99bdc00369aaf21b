"""Train and evaluation steps: pure functions of (state, batch), compiled with jit.

Read `train_step` first, which is one step, then its stages below it. `make_train_steps` compiles a
loop over it.
"""

import functools
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
from jgpt.fields import Make
from jgpt.nn import stacking
from jgpt.nn.models import Weights, weight_dimensions
from jgpt.nn.precision import at_least_float32
from jgpt.parallel import rules
from jgpt.parallel.mesh import current_mesh, require_mesh
from jgpt.shapes.contract import record, typed
from jgpt.training.loss_scale import has_loss_scale, next_loss_scale
from jgpt.training.objective import as_loss, loss_dtype, objective_of, target_losses
from jgpt.training.optimizer import LikeWeights, make_optimizer, trained_weights, with_frozen
from jgpt.training.schedule import learning_rate_schedule
from jgpt.training.state import State, state_specs

LossFunction = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""From (weights, arrays, batch, key) to the loss and the objective's metrics."""


@record
@dataclass(frozen=True)
class Metrics:
    """Metrics of each step in a call; only the first `count` entries are valid."""

    loss: Float[Array, " steps"]
    gradient_norm: Float[Array, " steps"]
    learning_rate: Float[Array, " steps"]
    taken: Int[Array, ""]
    """The steps that the state has taken. Behind the call's steps if one was not finite."""
    extra: PyTree[Float[Array, " steps"]] = None
    """The metrics of the objective by name, and those of float16's loss scale; None without any."""


@dataclass(frozen=True)
class StepSetup:
    """What a config says about every step, made once, outside of the traced functions."""

    config: TrainConfig
    loss_of: LossFunction
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule


# --- one step -------------------------------------------------------------------------------------


@typed
def train_step(
    setup: StepSetup,
    state: State,
    arrays: Any,
    batch: Int[Array, "batch window"],
    key: Key[Array, ""],
    step: Int[Array, ""],
) -> tuple[State, Bool[Array, ""], PyTree[Float[Array, ""]]]:
    """Take one step: from a state and the windows of a batch to the next state and the metrics.

    `step` is the number of steps taken before, `arrays` are those of the objective. Also returns
    whether training goes on: a step that is not finite ends it. The metrics are the fields of
    `Metrics`, for one step.
    """
    batch = rules.shard_by_name(batch, "batch", None)
    # folded in, so that a step can be replayed and a run resumed
    step_key = jax.random.fold_in(key, step)
    # With `ema_decay`, the state's weights are an average, at which no gradient is taken.
    weights = trained_weights(state["model"], state["optimizer"])
    loss_scale = state.get("loss_scale")
    factor = None
    if loss_scale is not None:
        factor = loss_scale["factor"]
    loss, gradients, extra = gradients_of(setup, weights, arrays, batch, step_key, factor)
    norm = optax.tree.norm(gradients)

    def loss_at(other_weights):
        return _loss_alone(setup, other_weights, arrays, batch, step_key)

    stepped = _update(setup, state, loss, gradients, loss_at)
    # A step that is not finite leaves the state unchanged, and the loop over steps ends.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    next_state = _new_if(finite, stepped, state)
    goes_on = finite
    if loss_scale is not None:
        # Too large a factor is no fault of the model: the state is left as it is, and training goes
        # on. A gradient that is not finite without a factor is one.
        overflowed = jnp.isfinite(loss) & ~jnp.isfinite(norm) & (loss_scale["factor"] > 1)
        goes_on = finite | overflowed
        next_scale = next_loss_scale(loss_scale, overflowed)
        next_state["loss_scale"] = _new_if(goes_on, next_scale, loss_scale)
        measured = {
            "loss_scale": loss_scale["factor"],
            "skipped_steps": next_scale["skipped_steps"].astype(loss.dtype),
        }
        extra = {**(extra or {}), **measured}
        step -= loss_scale["skipped_steps"]  # as the optimizer counts, whose schedule it is
    learning_rate = jnp.asarray(setup.schedule(step), loss.dtype)
    return next_state, goes_on, (loss, norm, learning_rate, extra)


def _new_if(condition: Any, new: Any, old: Any) -> Any:
    """Return the leaves of one of two trees."""
    return jax.tree.map(lambda *leaves: jnp.where(condition, *leaves), new, old)


@typed
def gradients_of(
    setup: StepSetup,
    weights: LikeWeights,
    arrays: Any,
    batch: Int[Array, "batch window"],
    key: Key[Array, ""],
    factor: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], LikeWeights, PyTree[Float[Array, ""]]]:
    """Return the loss of a batch, its gradients and its metrics.

    `factor` is that of the loss scale. It changes nothing but the rounding.
    """
    if setup.config.micro_batches > 1:
        loss, gradients, metrics = _accumulate(setup, weights, arrays, batch, key, factor)
    else:
        # A single one needs no scan, and gets the step's key itself.
        loss, gradients, metrics = _measure(setup, weights, arrays, batch, key, factor)
        gradients = jax.tree.map(at_least_float32, gradients)
    if factor is not None:
        gradients = jax.tree.map(lambda leaf: leaf / factor.astype(leaf.dtype), gradients)
    return loss, gradients, metrics


def _measure(
    setup: StepSetup, weights: Any, arrays: Any, batch: Any, key: Any, factor: Any
) -> tuple[Any, Any, Any]:
    """Return the loss, gradients and metrics of one micro-batch; gradients are times the factor."""
    if factor is None:
        loss_and_gradients = jax.value_and_grad(setup.loss_of, has_aux=True)
        (loss, metrics), gradients = loss_and_gradients(weights, arrays, batch, key)
        return loss, gradients, metrics

    def scaled_loss(weights):
        loss, metrics = setup.loss_of(weights, arrays, batch, key)
        return loss * factor.astype(loss.dtype), (loss, metrics)

    gradients, (loss, metrics) = jax.grad(scaled_loss, has_aux=True)(weights)
    return loss, gradients, metrics


def _accumulate(
    setup: StepSetup, weights: Any, arrays: Any, batch: Any, key: Any, factor: Any
) -> tuple[Any, Any, Any]:
    """Return the means of the losses, gradients and metrics of the micro-batches.

    The activations of only one micro-batch are in memory at a time.
    """
    count = setup.config.micro_batches
    parts = rules.split_batch(batch, count)  # micro_batches batch window
    keys = jax.random.split(key, count)

    def add(total, part):
        measured = _measure(setup, weights, arrays, *part, factor=factor)

        def add_leaf(sum_so_far, leaf):
            return sum_so_far + leaf.astype(sum_so_far.dtype)

        return jax.tree.map(add_leaf, total, measured), None

    start = _zero_sums(setup, weights, arrays, parts, keys)
    total, _ = jax.lax.scan(add, start, (parts, keys))
    # Micro-batches have equal sizes, so that the mean over them is the mean over the batch.
    return jax.tree.map(lambda leaf: leaf / count, total)


def _zero_sums(
    setup: StepSetup, weights: Any, arrays: Any, parts: Any, keys: Any
) -> tuple[Any, Any, Any]:
    """Return zeros like what `_measure` returns, to which that of each micro-batch is added."""
    metrics = None
    if setup.config.objective is not None:  # its metrics are known only from a trace

        def loss_of_first():
            return setup.loss_of(weights, arrays, parts[0], keys[0])

        _, metrics = jax.eval_shape(loss_of_first)
    loss = jnp.zeros((), loss_dtype(setup.config.model))
    # A sum of 16-bit gradients in 16 bits was 6% off with 128 micro-batches.
    gradients = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
    no_metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)
    return loss, gradients, no_metrics


def _loss_alone(setup: StepSetup, weights: Any, arrays: Any, batch: Any, key: Any) -> Any:
    """Return a batch's loss, which an optimizer may differentiate once more."""
    count = setup.config.micro_batches
    if count == 1:
        loss, _ = setup.loss_of(weights, arrays, batch, key)
        return loss
    parts = rules.split_batch(batch, count)  # micro_batches batch window
    keys = jax.random.split(key, count)

    def loss_of_part(part):
        loss, _ = setup.loss_of(weights, arrays, *part)
        return loss

    return jax.lax.map(loss_of_part, (parts, keys)).mean()


def _update(
    setup: StepSetup,
    state: State,
    loss: Any,
    gradients: Any,
    loss_at: Callable[[Any], Any],
) -> State:
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
        gradients, state["optimizer"], state["model"], **extra_arguments
    )
    # Optax adds in the wider dtype, and casts to that of the weights.
    with jax.numpy_dtype_promotion("standard"):
        weights = optax.apply_updates(state["model"], updates)
    stepped = state | {"model": weights, "optimizer": optimizer_state}
    if current_mesh().empty:
        return stepped
    # Updates may be replicated, as Muon's are, but the state stays sharded.
    return rules.constrain(stepped, state_specs(setup.config))


# --- all steps of a call --------------------------------------------------------------------------


@typed
def make_train_steps(config: TrainConfig) -> jax.stages.Wrapped:
    """Make a jitted function that takes `count` steps, on the first `count` windows.

    It maps (state, windows, key, count, first_step, taken=None, arrays=None) to (state, metrics).
    `first_step` is the number of steps taken before the call, and one program serves every count.
    The state is donated. If the loss or gradient of a step is not finite, this step and all later
    ones are skipped; after an overflow in float16 only this one is, and the loss scale is halved. A
    later call skips its steps, too, if it is given the `metrics.taken` of the call before. The
    `arrays` that an objective holds, such as a teacher's, are those of `placed_arrays`; without
    them they are constants of the program. Raises ValueError for a config with a mesh that is not
    set.
    """
    require_mesh(config.mesh)
    setup, held = _set_up(config)

    @typed
    def steps(
        state: State,
        windows: Int[Array, "steps batch window"],
        key: Key[Array, ""],
        count: Int[Array, ""],
        first_step: Int[Array, ""],
        taken: Int[Array, ""] | None = None,
        arrays: Any = None,
    ) -> tuple[State, Metrics]:
        if arrays is None:
            arrays = held
        # A call is dispatched before it is known whether the call before ended with finite values.
        if taken is None:
            taken = first_step

        # The trip count is dynamic, so that one program serves every count, and steps are bitwise
        # equal however they are grouped into calls.
        def unfinished(carry):
            i, taken, _, _ = carry
            # After a step that was not finite, the count lags behind and the loop ends.
            return (i < count) & (taken == first_step + i)

        def body(carry):
            i, taken, state, metrics = carry
            state, finite, measured = train_step(setup, state, arrays, windows[i], key, taken)

            def fill(row, value):
                return row.at[i].set(value.astype(row.dtype))

            filled = jax.tree.map(fill, metrics, measured)
            return i + 1, jnp.where(finite, taken + 1, taken), state, filled

        empty = jnp.zeros(windows.shape[0], loss_dtype(config.model))
        extra = None
        if config.objective is not None or has_loss_scale(config.model):
            # The names of their metrics are known only from a trace.
            one_step = functools.partial(train_step, setup)
            _, _, (*_, extra) = jax.eval_shape(one_step, state, arrays, windows[0], key, taken)
        metrics = (empty, empty, empty, jax.tree.map(lambda _: empty, extra))
        carry = (jnp.zeros((), jnp.int32), taken, state, metrics)
        _, taken, state, metrics = jax.lax.while_loop(unfinished, body, carry)
        losses, norms, rates, extra = metrics
        return state, Metrics(losses, norms, rates, taken, extra)

    return jax.jit(steps, donate_argnums=0)


def _set_up(config: TrainConfig) -> tuple[StepSetup, list[Any]]:
    """Return what a config says about every step, and the arrays that its objective holds."""
    dimensions = weight_dimensions(config.model)
    loss_of, objective_arrays = _make_loss(config)
    setup = StepSetup(
        config=config,
        loss_of=loss_of,
        optimizer=make_optimizer(config.optimizer, config.steps, dimensions, config.model),
        schedule=learning_rate_schedule(config.optimizer, config.steps),
    )
    return setup, objective_arrays


def _make_loss(config: TrainConfig) -> tuple[LossFunction, list[Any]]:
    """Make the function that is differentiated; also return the arrays that its objective holds.

    The seed enters only as the key, so that another seed needs no other program.
    """
    merge = stacking.model_merger(config.model)
    with_arrays, objective_arrays = objective_of(config.objective)
    dtype = loss_dtype(config.model)

    def loss_of(weights, arrays, batch, key):
        objective = with_arrays(arrays)
        model = merge(with_frozen(weights, config.optimizer.trainable))
        loss = as_loss(objective(model, batch, nnx.Rngs(dropout=key)), dtype)
        return loss.value, loss.metrics

    return loss_of, objective_arrays


def placed_arrays(objective: Make) -> list[Any]:
    """Return the arrays that an objective holds; on a mesh, every device has a copy."""
    _, arrays = objective_of(objective)
    return jax.device_put(arrays, rules.shardings([PartitionSpec() for _ in arrays]))


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
