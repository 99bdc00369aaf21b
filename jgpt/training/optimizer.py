"""AdamW and Muon, schedules, what is decayed, and clipping: one `make_optimizer`."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, PyTree

from jgpt.config import OptimizerConfig
from jgpt.contracts import typed
from jgpt.nn.models import Weights

OptimizerGroup = Literal["muon", "embedding", "adamw"]


def learning_rate_schedule(
    config: OptimizerConfig, steps: int, peak: float | None = None
) -> optax.Schedule:
    """The learning rate at each step, up to `peak`, the config's learning rate by default.

    Linear warmup, then flat, or a half cosine to the end, or flat and then a line to the end
    (warmup-stable-decay: Hu et al. 2024, section 4).
    """
    peak = config.learning_rate if peak is None else peak
    first = peak / (config.warmup_steps + 1)  # the first step is a step too
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
    # optax divides an integer step in float32, whatever the precision of the rest
    return lambda step: schedule(jnp.asarray(step, jnp.result_type(float)))


@typed
def decay_mask(weights: PyTree[Float[Array, "..."], "Weights"]) -> PyTree[bool, "Weights"]:
    """True for what weight decay shrinks: matrices and tables, never biases and scales."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, weights)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scale all gradients down together when their joint norm is above `limit`.

    As `torch.nn.utils.clip_grad_norm_` does it, 1e-6 in the divisor included.
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

    Muon is for matrices that multiply activations inside the blocks; embeddings and the head, whose
    rows are tokens, are Adam's (Jordan et al. 2024).
    """

    def group(path, leaf):
        if path[-1].key == "embedding" and config.embedding_learning_rate is not None:
            return "embedding"
        is_muon = config.optimizer == "muon" and path[0].key == "blocks" and leaf.ndim == 2
        return "muon" if is_muon else "adamw"

    return jax.tree_util.tree_map_with_path(group, weights)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """What the config says, for a run of `steps` steps.

    AdamW is Loshchilov and Hutter 2019, Muon is Jordan et al. 2024 as optax has it.
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

    if config.optimizer == "adamw" and config.embedding_learning_rate is None:
        optimizer = adamw(config.learning_rate)
    else:
        muon = optax.contrib.muon(
            learning_rate_schedule(config, steps, config.muon_learning_rate),
            beta=config.muon_momentum,
            weight_decay=config.muon_weight_decay,
        )
        optimizer = optax.partition(
            {
                "muon": muon,
                "embedding": adamw(config.embedding_learning_rate or config.learning_rate),
                "adamw": adamw(config.learning_rate),
            },
            functools.partial(partition, config),
        )
    if config.gradient_clip == 0:
        return optimizer
    return optax.chain(clip_by_global_norm(config.gradient_clip), optimizer)
