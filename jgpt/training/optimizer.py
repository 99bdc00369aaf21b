"""Optimizers: AdamW, Muon, schedules, weight-decay mask, clipping, averaged weights."""

import functools
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, Int, PyTree

from jgpt.config import OptimizerConfig
from jgpt.contracts import typed
from jgpt.nn.models import Weights
from jgpt.sharding import replicate
from jgpt.training.stacking import STACKED

OptimizerGroup = Literal["muon", "embedding", "adamw"]


def learning_rate_schedule(
    config: OptimizerConfig, steps: int, peak: float | None = None
) -> optax.Schedule:
    """The learning-rate schedule, with `peak` (the config's learning rate by default) at its top.

    Linear warmup, then constant, cosine decay, or warmup-stable-decay with a linear decay (wsd:
    Hu et al. 2024, section 4).
    """
    peak = config.learning_rate if peak is None else peak
    steps = config.schedule_steps or steps
    first = peak / (config.warmup_steps + 1)  # not 0: the first step would change nothing
    lowest = config.min_learning_rate / config.learning_rate
    pieces = [optax.linear_schedule(first, peak, config.warmup_steps)]
    boundaries = [config.warmup_steps]
    match config.schedule:
        case "constant":
            pieces.append(optax.constant_schedule(peak))
        case "cosine":
            span = max(steps - config.warmup_steps, 1)
            pieces.append(optax.cosine_decay_schedule(peak, span, alpha=lowest))
        case "wsd":
            decay = max(round(steps * config.decay_fraction), 1)
            line = optax.linear_schedule(peak, peak * lowest, decay)
            pieces += [optax.constant_schedule(peak), line]
            boundaries.append(max(steps - decay, config.warmup_steps))
    schedule = optax.join_schedules(pieces, boundaries)
    # optax divides an integer step in float32 even with x64 enabled
    return lambda step: schedule(jnp.asarray(step, jnp.result_type(float)))


@typed
def decay_mask(weights: PyTree[Float[Array, "..."], "Weights"]) -> PyTree[bool, "Weights"]:
    """True for what weight decay applies to: matrices and embeddings, not biases and scales."""
    return jax.tree_util.tree_map_with_path(lambda *leaf: _dimensions(*leaf) >= 2, weights)


def _dimensions(path: tuple[Any, ...], leaf: Any) -> int:
    """Of a parameter, or of one of those that are stacked."""
    return leaf.ndim - (STACKED in path)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Clip gradients to a global norm of `limit`.

    Equals `torch.nn.utils.clip_grad_norm_`, with its 1e-6 in the divisor.
    """

    @typed
    def clip(
        gradients: PyTree[Float[Array, "?*shape"], "Weights"],
        weights: PyTree[Float[Array, "?*shape"], "Weights"] | None = None,
    ) -> PyTree[Float[Array, "?*shape"], "Weights"]:
        scale = jnp.minimum(limit / (optax.tree.norm(gradients) + 1e-6), 1.0)
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)

    return optax.stateless(clip)


@typed
def partition(
    config: OptimizerConfig, weights: PyTree[Float[Array, "..."], "Weights"]
) -> PyTree[OptimizerGroup, "Weights"]:
    """The optimizer group of each parameter: muon, embedding, or adamw.

    Muon is for the weight matrices of the blocks, Adam for embeddings and head (Jordan et al.
    2024).
    """

    def group(path, leaf):
        if path[-1].key == "embedding" and config.embedding_learning_rate is not None:
            return "embedding"
        is_matrix = path[0].key == "blocks" and _dimensions(path, leaf) == 2
        return "muon" if config.optimizer == "muon" and is_matrix else "adamw"

    return jax.tree_util.tree_map_with_path(group, weights)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a config for a run of `steps` steps.

    AdamW (Loshchilov and Hutter 2019), or Muon as in optax (Jordan et al. 2024). With `ema_decay`
    it is of the average, and the gradients are to be those of the `trained_weights`.
    """

    def adamw(peak: float) -> optax.GradientTransformation:
        return optax.adamw(
            learning_rate_schedule(config, steps, peak),
            b1=config.beta1,
            b2=config.beta2,
            eps=1e-8,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )

    muon = optax.contrib.muon(
        learning_rate_schedule(config, steps, config.muon_learning_rate),
        beta=config.muon_momentum,
        weight_decay=config.muon_weight_decay,
    )

    def of_each(updates, state, params):
        # or each product of each Newton-Schulz iteration would gather the sharded matrix again
        return muon.update(replicate(updates), replicate(state), params)

    def update(updates, state, params=None):
        leaves, structure = jax.tree_util.tree_flatten_with_path((updates, state, params))
        stacked = [leaf for path, leaf in leaves if STACKED in path]
        if not stacked:
            return of_each(updates, state, params)

        def of_layer(stacked):  # one layer's matrices at a time: all of them gathered are too large
            its = iter(stacked)
            given = [next(its) if STACKED in path else leaf for path, leaf in leaves]
            return of_each(*structure.unflatten(given))

        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if STACKED in path else leaf[-1], jax.lax.map(of_layer, stacked)
        )

    optimizer = adamw(config.learning_rate)
    if config.optimizer == "muon" or config.embedding_learning_rate is not None:
        groups: dict[Hashable, optax.GradientTransformation] = {
            "muon": optax.GradientTransformation(muon.init, update),
            "embedding": adamw(config.embedding_learning_rate or config.learning_rate),
            "adamw": optimizer,
        }
        optimizer = optax.partition(groups, functools.partial(partition, config))
    if config.gradient_clip > 0:
        optimizer = optax.chain(clip_by_global_norm(config.gradient_clip), optimizer)
    return average_weights(optimizer, config.ema_decay) if config.ema_decay > 0 else optimizer


class AverageState(NamedTuple):
    """The state of `average_weights`."""

    trained: Weights
    """The weights that are averaged."""
    optimizer: Any
    """The state of their optimizer."""
    step: Int[Array, ""]
    """The number of steps taken."""


def average_weights(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """An optimizer whose weights are the moving average of those that another one trains.

    Exponential, and corrected for having begun at zero, as Adam's moments are (Kingma and Ba 2015,
    section 3).
    """

    def init(params: Weights) -> AverageState:
        trained = jax.tree.map(jnp.copy, params)  # both are donated
        return AverageState(trained, optimizer.init(params), jnp.zeros((), jnp.int32))

    @typed
    def update(
        updates: PyTree[Float[Array, "?*shape"], "Weights"],
        state: Any,
        params: PyTree[Float[Array, "?*shape"], "Weights"] | None = None,
    ) -> tuple[PyTree[Float[Array, "?*shape"], "Weights"], Any]:
        updates, inner = optimizer.update(updates, state.optimizer, state.trained)
        trained, step = optax.apply_updates(state.trained, updates), state.step + 1
        rate = (1 - decay) / (1 - decay**step)
        towards = lambda new, old: (rate * (new - old)).astype(old.dtype)  # noqa: E731
        return jax.tree.map(towards, trained, params), AverageState(trained, inner, step)

    return optax.GradientTransformation(init, update)


@typed
def trained_weights(
    weights: PyTree[Float[Array, "?*shape"], "Weights"], state: Any
) -> PyTree[Float[Array, "?*shape"], "Weights"]:
    """The weights that gradients are taken of: not the average, if there is one."""
    return state.trained if isinstance(state, AverageState) else weights
