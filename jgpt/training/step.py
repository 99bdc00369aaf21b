"""Train and evaluation steps: pure functions of (state, batch), jit-compiled."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jgpt import sharding
from jgpt.config import ModelConfig, TrainConfig
from jgpt.contracts import record, typed
from jgpt.nn.loss import cross_entropy_from, rows_at_once, token_losses_from
from jgpt.nn.models import (
    LanguageModel,
    Weights,
    abstract_model,
    create_model,
    weight_dimensions,
    weights_of,
)
from jgpt.nn.precision import at_least_float32, portable
from jgpt.nn.transformer import GPT
from jgpt.training import stacking
from jgpt.training.optimizer import (
    LikeWeights,
    learning_rate_schedule,
    make_optimizer,
    trained_weights,
)

_INIT_STREAM, _DROPOUT_STREAM = 1, 2  # batches fold the step into the seed's key itself


@record
@dataclass(frozen=True)
class TrainState:
    """The train state. With `scan_layers`, the arrays of the blocks are stacked."""

    weights: Weights
    optimizer: PyTree[
        Float[Array, "..."] | Int[Array, "..."] | Bool[Array, "..."] | Key[Array, "..."]
    ]
    step: Int[Array, ""]


@record
@dataclass(frozen=True)
class Metrics:
    """Metrics of each step in a call; only the first `count` entries are valid."""

    loss: Float[Array, " steps"]
    gradient_norm: Float[Array, " steps"]
    learning_rate: Float[Array, " steps"]


def init_state(config: TrainConfig) -> TrainState:
    """Initial parameters, optimizer state and step 0 from the config's seed.

    If a mesh is set, each device makes its own shards.
    """

    def make() -> TrainState:
        rngs = nnx.Rngs(_stream(config.seed, _INIT_STREAM))
        return _first_state(config, weights_of(create_model(config.model, rngs=rngs)))

    if sharding.current_mesh().empty:
        return make()  # not under one jit: a small program per shape compiles faster, to less code
    return jax.jit(make, out_shardings=state_specs(config))()


@typed
def _first_state(config: TrainConfig, weights: Weights) -> TrainState:
    dimensions = weight_dimensions(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps, dimensions)
    optimizer_state = jax.jit(optimizer.init)(weights)
    if config.optimizer.ema_decay > 0:
        # the average: in 16 bits, what it moves by in a step would be rounded to nothing
        weights = jax.tree.map(at_least_float32, weights)
    state = TrainState(weights, optimizer_state, jnp.zeros((), jnp.int32))
    return stacking.stack_blocks(state) if stacking.uses_stacked_blocks(config.model) else state


@typed
def dropout_stream(seed: int) -> Key[Array, ""]:
    """The dropout key of a seed; each step folds in its number.

    It is an argument of the steps, so that another seed needs no new compilation.
    """
    return _stream(seed, _DROPOUT_STREAM)


def abstract_state(config: TrainConfig) -> TrainState:
    """The shapes and dtypes of the train state."""
    weights = weights_of(abstract_model(config.model))
    return jax.eval_shape(functools.partial(_first_state, config), weights)


def state_specs(config: TrainConfig, mesh: AbstractMesh | None = None) -> TrainState:
    """How the train state is sharded over a mesh, by default the one that is set."""
    mesh = sharding.current_mesh() if mesh is None else mesh
    state, model = abstract_state(config), abstract_model(config.model)
    specs = sharding.weight_specs(model, mesh)
    specs = sharding.specs_like(state, stacking.stack_specs(specs) if _is_stacked(state) else specs)
    # as compiled programs return them, or the train steps would be compiled for both spellings
    return jax.tree.map(sharding.without_trailing_none, specs)


def stack_state(config: TrainConfig, state: TrainState) -> TrainState:
    """The state of train steps, from a state with each block's own arrays."""
    if not stacking.uses_stacked_blocks(config.model):
        return state
    specs = None if sharding.current_mesh().empty else state_specs(config)
    return jax.jit(stacking.stack_blocks, out_shardings=specs)(state)


def unstack_state(state: TrainState) -> TrainState:
    """The state with each block's own arrays, as in checkpoints."""
    return jax.jit(stacking.unstack_blocks)(state) if _is_stacked(state) else state


def is_finite(config: TrainConfig, state: TrainState) -> bool:
    """Whether all values of a state are finite; in one of a custom optimizer, all parameters.

    Optax has optimizers whose state begins at infinity, such as `reduce_on_plateau`.
    """
    tree = state.weights if config.optimizer.make is not None else state
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return bool(_all_finite(leaves))


@jax.jit
@typed
def _all_finite(leaves: PyTree[Float[Array, "..."]]) -> Bool[Array, ""]:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(leaves)]).all()


def _is_stacked(state: TrainState) -> bool:
    blocks = state.weights.get("blocks")
    return isinstance(blocks, dict) and stacking.STACKED.key in blocks


def make_train_steps(config: TrainConfig) -> jax.stages.Wrapped:
    """A jitted function that takes `count` steps, on the first `count` windows.

    It maps (state, windows, key, count, first_step=None) to (state, metrics). One program serves
    every count. The state is donated. A step whose loss or gradient is not finite is skipped, and
    so are all after it, in later calls too: their `first_step` is ahead of the state's step.
    """
    if (micro_batches := config.micro_batches) == "auto":
        raise ValueError("micro_batches=auto has to be decided first, by plan.with_micro_batches")
    merge = stacking.merge_with(config.model)
    dimensions = weight_dimensions(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps, dimensions)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    @typed
    def loss_of(
        weights: Weights, window: Int[Array, "batch window"], key: Key[Array, ""]
    ) -> Float[Array, ""]:
        model = merge(weights)
        x = model.hidden(window[:, :-1], rngs=nnx.Rngs(dropout=key))
        at_once = _rows_at_once(model, window[:, 1:].size)
        return cross_entropy_from(x, window[:, 1:], model.logits, at_once)

    @typed
    def gradients_of(
        weights: LikeWeights, window: Int[Array, "batch window"], key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], LikeWeights]:
        if micro_batches == 1:
            loss, gradients = jax.value_and_grad(loss_of)(weights, window, key)
            return loss, jax.tree.map(at_least_float32, gradients)
        parts = sharding.split_batch(window, micro_batches)
        keys = jax.random.split(key, micro_batches)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(weights, *part)), None

        loss = jnp.zeros((), loss_dtype(config.model))
        # a sum of 16-bit gradients in 16 bits was 6% off with 128 micro-batches
        sums = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
        total, _ = jax.lax.scan(add, (loss, sums), (parts, keys))
        return jax.tree.map(lambda leaf: leaf / micro_batches, total)

    @typed
    def step(
        state: TrainState, window: Int[Array, "batch window"], key: Key[Array, ""]
    ) -> tuple[TrainState, tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]]:
        window = sharding.shard_by_name(window, "batch", None)
        step_key = jax.random.fold_in(key, state.step)
        trained = trained_weights(state.weights, state.optimizer)
        loss, gradients = gradients_of(trained, window, step_key)
        norm = optax.tree.norm(gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        stepped = TrainState(weights, optimizer_state, state.step + 1)
        if not sharding.current_mesh().empty:
            stepped = sharding.constrain(stepped, state_specs(config))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, state)
        return state, (loss, norm, jnp.asarray(schedule(stepped.step - 1), loss.dtype))

    @typed
    def steps(
        state: TrainState,
        windows: Int[Array, "steps batch window"],
        key: Key[Array, ""],
        count: Int[Array, ""],
        first_step: Int[Array, ""] | None = None,
    ) -> tuple[TrainState, Metrics]:
        first = state.step if first_step is None else first_step

        # A dynamic trip count: one program for every count, and bitwise equal steps however they
        # are grouped into calls.
        def unfinished(carry):
            i, state, _ = carry
            return (i < count) & (state.step == first + i)

        def body(carry):
            i, state, metrics = carry
            state, measured = step(state, windows[i], key)
            metrics = [row.at[i].set(its) for row, its in zip(metrics, measured, strict=True)]
            return i + 1, state, metrics

        empty = jnp.zeros(windows.shape[0], loss_dtype(config.model))
        carry = jnp.zeros((), jnp.int32), state, [empty, empty, empty]
        _, state, metrics = jax.lax.while_loop(unfinished, body, carry)
        return state, Metrics(*metrics)

    return jax.jit(steps, donate_argnums=0)


def make_eval_step(config: ModelConfig) -> jax.stages.Wrapped:
    """A jitted function that sums the losses of counted targets over batches of windows.

    It maps (weights, windows, counts, total=None) to the sum, added to a total if there is one: the
    batches may be split over calls and the sum stays the same to the last bit. A batch without
    counted targets is skipped at run time.
    """
    merge = stacking.merge_with(config)

    @jax.jit
    @typed
    def evaluate(
        weights: Weights,
        windows: Int[Array, "batches batch window"],
        counts: Bool[Array, "batches batch window-1"],
        total: Float[Array, ""] | None = None,
    ) -> Float[Array, ""]:
        def add(total, batch):
            window, counted = (sharding.shard_by_name(each, "batch", None) for each in batch)

            def added():
                model = merge(weights)  # in here: the head may be set to a gathered one
                x = model.hidden(window[:, :-1])
                at_once = _rows_at_once(model, counted.size)
                losses = token_losses_from(x, window[:, 1:], model.logits, at_once)
                return total + jnp.where(counted, losses, 0).sum()

            return jax.lax.cond(counted.any(), added, lambda: total), None

        if total is None:
            total = jnp.zeros((), loss_dtype(config))
        before = total.astype(loss_dtype(config))  # of both branches of the condition
        return jax.lax.scan(add, before, (windows, counts))[0]

    return evaluate


def _rows_at_once(model: LanguageModel, rows: int) -> int:
    """How many of a loss's rows of logits to materialise at once.

    If that is not all of them, gather the head over the mesh here, or each chunk would.
    """
    at_once = rows_at_once(model.vocab_size)
    if rows > at_once and isinstance(model, GPT):
        head = model.token_embedding.embedding if model.head is None else model.head.kernel
        sharding.gather_once(head, model.dtype)
    return at_once


def loss_dtype(config: ModelConfig) -> jnp.dtype:
    """The dtype of losses: the widest of the dtypes of parameters, logits and loss."""
    dtype = portable(config).dtype
    return jnp.promote_types(jnp.promote_types(dtype, config.param_dtype), jnp.float32)


@typed
def _stream(seed: int, stream: int) -> Key[Array, ""]:
    return jax.random.fold_in(jax.random.key(np.uint32(seed)), stream)
