"""Train and evaluation steps: pure functions of (state, batch), compiled with jit."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from jgpt.config import ModelConfig, TrainConfig
from jgpt.nn import stacking
from jgpt.nn.models import Weights, weight_dimensions
from jgpt.nn.precision import at_least_float32
from jgpt.parallel import rules
from jgpt.parallel.mesh import current_mesh
from jgpt.shapes.contract import record, typed
from jgpt.training.objective import loss_dtype, mean_loss, target_losses
from jgpt.training.optimizer import LikeWeights, make_optimizer, trained_weights
from jgpt.training.schedule import learning_rate_schedule
from jgpt.training.state import TrainState, state_specs


@record
@dataclass(frozen=True)
class Metrics:
    """Metrics of each step in a call; only the first `count` entries are valid."""

    loss: Float[Array, " steps"]
    gradient_norm: Float[Array, " steps"]
    learning_rate: Float[Array, " steps"]


@typed
def make_train_steps(config: TrainConfig) -> jax.stages.Wrapped:
    """Make a jitted function that takes `count` steps, on the first `count` windows.

    It maps (state, windows, key, count, first_step=None) to (state, metrics). One program serves
    every count. The state is donated. If the loss or gradient of a step is not finite, this step
    and all later ones are skipped, so the state's step stays behind. A later call skips its steps
    too if its `first_step` is ahead of the state's step.
    """
    micro_batches = config.micro_batches
    if micro_batches == "auto":
        raise ValueError("micro_batches=auto has to be decided first, by plan.with_micro_batches")
    # Made once, outside of the traced function. The seed enters only as the key, so that another
    # seed needs no other program.
    merge = stacking.model_merger(config.model)
    dimensions = weight_dimensions(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps, dimensions)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    @typed
    def loss_of(
        weights: Weights, window: Int[Array, "batch window"], key: Key[Array, ""]
    ) -> Float[Array, ""]:
        return mean_loss(merge(weights), window, key)

    @typed
    def gradients_of(
        weights: LikeWeights, window: Int[Array, "batch window"], key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], LikeWeights]:
        if micro_batches == 1:  # no scan, and the step's key unchanged
            loss, gradients = jax.value_and_grad(loss_of)(weights, window, key)
            return loss, jax.tree.map(at_least_float32, gradients)
        parts = rules.split_batch(window, micro_batches)  # micro_batches batch window
        keys = jax.random.split(key, micro_batches)

        def add(total, part):
            window, key = part
            loss_and_gradients = jax.value_and_grad(loss_of)(weights, window, key)
            return jax.tree.map(jnp.add, total, loss_and_gradients), None

        loss = jnp.zeros((), loss_dtype(config.model))
        # A sum of 16-bit gradients in 16 bits was 6% off with 128 micro-batches.
        sums = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
        total, _ = jax.lax.scan(add, (loss, sums), (parts, keys))
        # Micro-batches have equal sizes, so that the mean over them is the mean over the batch.
        return jax.tree.map(lambda leaf: leaf / micro_batches, total)

    @typed
    def step(
        state: TrainState, window: Int[Array, "batch window"], key: Key[Array, ""]
    ) -> tuple[TrainState, tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]]:
        window = rules.shard_by_name(window, "batch", None)
        # folded in, so that a step can be replayed and a run resumed
        step_key = jax.random.fold_in(key, state.step)
        # With `ema_decay`, the state's weights are an average, at which no gradient is taken.
        trained = trained_weights(state.weights, state.optimizer)
        loss, gradients = gradients_of(trained, window, step_key)
        norm = optax.tree.norm(gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        stepped = TrainState(weights, optimizer_state, state.step + 1)
        if not current_mesh().empty:
            # Updates may be replicated, as Muon's are, but the state stays sharded.
            stepped = rules.constrain(stepped, state_specs(config))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        # A step that is not finite leaves the state and its step unchanged, so that `steps` ends
        # there.
        def new_if_finite(new, old):
            return jnp.where(finite, new, old)

        state = jax.tree.map(new_if_finite, stepped, state)
        learning_rate = jnp.asarray(schedule(stepped.step - 1), loss.dtype)
        return state, (loss, norm, learning_rate)

    @typed
    def steps(
        state: TrainState,
        windows: Int[Array, "steps batch window"],
        key: Key[Array, ""],
        count: Int[Array, ""],
        first_step: Int[Array, ""] | None = None,
    ) -> tuple[TrainState, Metrics]:
        first = state.step
        if first_step is not None:
            # A call is dispatched before it is known whether the call before ended with finite
            # values.
            first = first_step

        # The trip count is dynamic, so that one program serves every count, and steps are bitwise
        # equal however they are grouped into calls.
        def unfinished(carry):
            i, state, _ = carry
            # After a step that was not finite, the state's step lags behind and the loop ends.
            return (i < count) & (state.step == first + i)

        def body(carry):
            i, state, metrics = carry
            state, measured = step(state, windows[i], key)
            filled = []
            for row, value in zip(metrics, measured, strict=True):
                filled.append(row.at[i].set(value))
            return i + 1, state, filled

        empty = jnp.zeros(windows.shape[0], loss_dtype(config.model))  # steps
        carry = (jnp.zeros((), jnp.int32), state, [empty, empty, empty])
        _, state, metrics = jax.lax.while_loop(unfinished, body, carry)
        return state, Metrics(*metrics)

    return jax.jit(steps, donate_argnums=0)


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
