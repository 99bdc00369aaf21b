"""Optimizers: AdamW, Muon, schedules, weight-decay mask, clipping, averaged weights."""

import functools
from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, Int, PyTree

from jgpt.config import OptimizerConfig
from jgpt.nn.models import Weights
from jgpt.nn.precision import at_least_float32
from jgpt.nn.stacking import STACKED
from jgpt.parallel.rules import Dimensions, replicate
from jgpt.shapes.contract import typed
from jgpt.training.schedule import learning_rate_schedule
from jgpt.user_code import require_code

OptimizerGroup = Literal["muon", "embedding", "adamw"]
LikeWeights = PyTree[Float[Array, "?*shape"], "Weights"]
"""Weights, gradients, updates: alike in structure and in the shape of each leaf."""
Updates = PyTree[Float[Array, "..."], "Weights"]
"""Alike in structure alone: on a mesh, Muon's updates are replicated while the weights are sharded.
The train step shards the new weights."""


@typed
def decay_mask(weights: PyTree[Float[Array, "..."], "Weights"]) -> PyTree[bool, "Weights"]:
    """True where weight decay applies: matrices and embeddings, not biases and scales."""

    def decays(path, leaf):  # as nanoGPT groups them
        return dimensions_in_block(path, leaf) >= 2

    return jax.tree_util.tree_map_with_path(decays, weights)


def dimensions_in_block(path: tuple[Any, ...], leaf: Any) -> int:
    """Return the number of dimensions of a parameter in one block."""
    if STACKED in path:
        return leaf.ndim - 1
    return leaf.ndim


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Clip gradients to a global norm of `limit`.

    Equals `torch.nn.utils.clip_grad_norm_`, with its 1e-6 in the divisor.
    """

    @typed
    def clip(gradients: LikeWeights, weights: LikeWeights | None = None) -> LikeWeights:
        norm = optax.tree.norm(gradients)  # of all gradients together: their direction stays
        scale = jnp.minimum(limit / (norm + 1e-6), 1.0)  # small gradients are never scaled up

        def scaled(leaf):
            return leaf * scale.astype(leaf.dtype)

        return jax.tree.map(scaled, gradients)

    return optax.stateless(clip)


@typed
def partition(
    config: OptimizerConfig,
    weights: PyTree[Float[Array, "..."], "Weights"],
    dimensions: Mapping[str, Dimensions] | None = None,
) -> PyTree[OptimizerGroup, "Weights"]:
    """Return the optimizer group of each parameter: muon, embedding, or adamw.

    Muon is for the weight matrices of the blocks, Adam for embeddings and head (Jordan et al.
    2024). Muon takes no array of three dimensions, such as the matrices of several experts: which
    two are a matrix isn't known. Embeddings are known by `dimensions`, the names of
    `weight_dimensions`. Raises ValueError for an embedding_learning_rate without them.
    """
    if config.embedding_learning_rate is not None and dimensions is None:
        raise ValueError(
            "embedding_learning_rate needs the dimension names of the weights: "
            "give dimensions=weight_dimensions(config.model)"
        )
    known_dimensions = dimensions or {}

    def group(path, leaf):
        # without a rate of their own embeddings are among the rest, which has the same optimizer
        if config.embedding_learning_rate is not None and _is_embedding(path, known_dimensions):
            return "embedding"
        is_block_matrix = path[0].key == "blocks" and dimensions_in_block(path, leaf) == 2
        if config.optimizer == "muon" and is_block_matrix:
            return "muon"
        return "adamw"

    return jax.tree_util.tree_map_with_path(group, weights)


def _is_embedding(path: tuple[Any, ...], dimensions: Mapping[str, Dimensions]) -> bool:
    """Return whether a parameter is a table whose rows are looked up, by its dimension names.

    A table of positions or n-grams has no name for its rows. Such a parameter of a block is taken
    for a matrix of a product.
    """
    names = []
    for key in path:
        # stacked arrays have the dimension names of the first block, as all blocks have the same
        names.append("0" if key == STACKED else str(key.key))
    parameter_dimensions = dimensions.get(".".join(names), ())
    if len(parameter_dimensions) != 2:
        return False
    rows, columns = parameter_dimensions
    if columns != "embed_dim":
        return False
    return rows == "vocab_size" or (rows is None and names[0] != "blocks")


def make_optimizer(
    config: OptimizerConfig, steps: int, dimensions: Mapping[str, Dimensions] | None = None
) -> optax.GradientTransformation:
    """Return the optimizer of a config for a run of `steps` steps.

    `dimensions`, the names of `weight_dimensions`, are needed with an embedding_learning_rate.

    AdamW (Loshchilov and Hutter 2019), or Muon as in optax (Jordan et al. 2024), or a custom one.
    Each is given clipped gradients and keeps its state in at least float32. With `ema_decay` it
    updates the average, from gradients at the `trained_weights`.
    """
    if config.make is not None:
        optimizer = _in_float32(_custom(config, steps))
    else:
        optimizer = _in_float32(_built_in(config, steps, dimensions))
    if config.ema_decay > 0:
        return average_weights(optimizer, config.ema_decay)
    return optimizer


def _custom(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Return the user's optimizer, given clipped gradients."""
    make = require_code(config.make, "optimizer")
    optimizer = make(config, steps)
    if not isinstance(optimizer, optax.GradientTransformation):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer= must make an optax.GradientTransformation, not {kind}")
    if config.gradient_clip == 0:
        return optimizer
    clip = clip_by_global_norm(config.gradient_clip)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        # not optax.chain, whose state is a pair: runs from before have the optimizer's own state
        clipped, _ = clip.update(updates, clip.init(params), params)
        return optimizer.update(clipped, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer that sees parameters and gradients in at least float32.

    Its moments are then in float32: the nearest bfloat16 to a decay rate of 0.999 is 1.
    """

    @typed
    def init(params: Weights) -> Any:
        return optimizer.init(jax.tree.map(at_least_float32, params))

    @typed
    def update(
        updates: LikeWeights, state: Any, params: LikeWeights | None = None
    ) -> tuple[Updates, Any]:
        wide_updates = jax.tree.map(at_least_float32, updates)
        wide_params = jax.tree.map(at_least_float32, params)  # None stays None
        return optimizer.update(wide_updates, state, wide_params)

    return optax.GradientTransformation(init, update)


def _built_in(
    config: OptimizerConfig, steps: int, dimensions: Mapping[str, Dimensions] | None
) -> optax.GradientTransformation:
    """AdamW or Muon, given clipped gradients."""

    def adamw(peak: float) -> optax.GradientTransformation:
        return optax.adamw(
            learning_rate_schedule(config, steps, peak),
            b1=config.beta1,
            b2=config.beta2,
            eps=1e-8,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )

    match config.optimizer:
        # one group alone is not partitioned, which would nest the state that checkpoints have
        case "adamw" if config.embedding_learning_rate is None:
            optimizer = adamw(config.learning_rate)
        case "adamw" | "muon":
            groups: dict[Hashable, optax.GradientTransformation] = {
                "muon": _muon(config, steps),
                "embedding": adamw(config.embedding_learning_rate or config.learning_rate),
                "adamw": adamw(config.learning_rate),
            }
            optimizer = optax.partition(
                groups, functools.partial(partition, config, dimensions=dimensions)
            )
        case _:
            assert_never(config.optimizer)
    if config.gradient_clip > 0:
        optimizer = optax.chain(clip_by_global_norm(config.gradient_clip), optimizer)
    return optimizer


def _muon(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Optax's Muon on a mesh, and for the stacked matrices of a scan over blocks.

    Newton-Schulz iterations are of one matrix: a stack of all blocks' goes through them in turn.
    """
    muon = optax.contrib.muon(
        learning_rate_schedule(config, steps, config.muon_learning_rate),
        beta=config.muon_momentum,
        weight_decay=config.muon_weight_decay,
    )

    def muon_update(updates, state, params):
        # or each product of each Newton-Schulz iteration would gather the sharded matrix again
        return muon.update(replicate(updates), replicate(state), params)

    def update(updates, state, params=None):
        leaves, structure = jax.tree_util.tree_flatten_with_path((updates, state, params))
        stacked = [leaf for path, leaf in leaves if STACKED in path]
        if not stacked:
            return muon_update(updates, state, params)

        # one layer's matrices at a time: all of them gathered are too large
        def update_layer(layer):
            matrices = iter(layer)
            layer_leaves = []
            for path, leaf in leaves:
                # what is not stacked, such as the count of steps, is the same for all layers
                layer_leaves.append(next(matrices) if STACKED in path else leaf)
            return muon_update(*structure.unflatten(layer_leaves))

        def merge_layers(path, leaf):
            if STACKED in path:
                return leaf
            return leaf[-1]  # each layer has made the same one

        by_layer = jax.lax.map(update_layer, stacked)
        return jax.tree_util.tree_map_with_path(merge_layers, by_layer)

    return optax.GradientTransformation(muon.init, update)


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
    """Return an optimizer that trains weights with another one, and updates their moving average.

    The average is exponential and bias-corrected like Adam's moments (Kingma and Ba 2015, section
    3).
    """

    def init(params: Weights) -> AverageState:
        trained = jax.tree.map(jnp.copy, params)  # both are donated
        return AverageState(trained, optimizer.init(params), jnp.zeros((), jnp.int32))

    @typed
    def update(
        updates: LikeWeights, state: Any, params: LikeWeights | None = None
    ) -> tuple[LikeWeights, Any]:
        # the optimizer sees the weights that are trained, and never the average
        updates, optimizer_state = optimizer.update(updates, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        step = state.step + 1
        # the weight of the newest in a mean of `step` weights: 1 at first, then towards 1 - decay
        rate = (1 - decay) / (1 - decay**step)

        def move_average(trained_leaf, average_leaf):
            return (rate * (trained_leaf - average_leaf)).astype(average_leaf.dtype)

        # the average is what checkpoints and evaluations take for the weights
        average_updates = jax.tree.map(move_average, trained, params)
        return average_updates, AverageState(trained, optimizer_state, step)

    return optax.GradientTransformation(init, update)


@typed
def trained_weights(weights: LikeWeights, state: Any) -> LikeWeights:
    """Return the weights to differentiate at: `weights`, or the trained ones if these are an
    average."""
    if isinstance(state, AverageState):
        return state.trained
    return weights
