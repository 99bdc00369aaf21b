"""Optimizers: AdamW, Muon, schedules, weight decay, clipping and averaged weights."""

import fnmatch
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, Int, PyTree

from jgpt.config import ModelConfig, OptimizerConfig
from jgpt.nn.models import Weights
from jgpt.nn.precision import at_least_float32
from jgpt.nn.stacking import (
    STACKED,
    UnstackedState,
    stack_blocks,
    unstack_blocks,
    uses_stacked_blocks,
)
from jgpt.parallel.rules import Dimensions, replicate
from jgpt.shapes.contract import typed
from jgpt.training.schedule import learning_rate_schedule
from jgpt.user_code import require_code, takes_model

OptimizerGroup = Literal["muon", "embedding", "adamw"]
LikeWeights = PyTree[Float[Array, "?*shape"], "Weights"]
"""Weights, gradients or updates: trees with the weights' structure and the shape of each leaf."""
Updates = PyTree[Float[Array, "..."], "Weights"]
"""Updates with the structure of the weights. Their shapes may differ: on a mesh, Muon's updates are
replicated while the weights are sharded, and the train step shards the new weights."""


@typed
def decay_mask(weights: PyTree[Float[Array, "..."], "Weights"]) -> PyTree[bool, "Weights"]:
    """Return True for each parameter with weight decay: matrices and embeddings, not biases and
    scales."""

    def decays(path, leaf):  # the same groups as in nanoGPT
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
        # one norm over all gradients, so that their direction stays
        norm = optax.tree.norm(gradients)
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
    2024). Muon takes no array of three dimensions, such as the matrices of several experts, since
    it is unknown which two are a matrix. `dimensions`, the names of `weight_dimensions`, tell which
    parameters are embeddings.
    """
    known_dimensions = dimensions or {}

    def group(path, leaf):
        # Without their own rate, embeddings have the same optimizer as the rest and are part of it.
        if config.embedding_learning_rate is not None and _is_embedding(path, known_dimensions):
            return "embedding"
        is_block_matrix = path[0].key == "blocks" and dimensions_in_block(path, leaf) == 2
        if config.optimizer == "muon" and is_block_matrix:
            return "muon"
        return "adamw"

    return jax.tree_util.tree_map_with_path(group, weights)


def _is_embedding(path: tuple[Any, ...], dimensions: Mapping[str, Dimensions]) -> bool:
    """Return whether a parameter is a table whose rows are looked up, by its dimension names.

    A table of positions or n-grams has no name for its rows. Inside a block, such a parameter
    counts as a matrix of a product.
    """
    names = []
    for key in path:
        name = str(key.key)
        if key == STACKED:
            name = "0"  # stacked arrays have the dimension names of any block
        names.append(name)
    parameter_dimensions = dimensions.get(".".join(names), ())
    if len(parameter_dimensions) != 2:
        return False
    rows, columns = parameter_dimensions
    if columns != "embed_dim":
        return False
    return rows == "vocab_size" or (rows is None and names[0] != "blocks")


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    dimensions: Mapping[str, Dimensions] | None = None,
    model: ModelConfig | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make the optimizer of a config for a run of `steps` steps.

    It is AdamW (Loshchilov and Hutter 2019), Muon as in optax (Jordan et al. 2024), or a custom
    optimizer. Each receives clipped gradients and keeps its state in at least float32. With
    `ema_decay`, it also updates the average of the weights; gradients are then taken at the
    `trained_weights`. An embedding_learning_rate needs `dimensions`, the names of
    `weight_dimensions`. A custom optimizer may ask for the config of the `model`.
    """
    if config.make is not None:
        made = _custom(config, steps, model)
    else:
        made = _built_in(config, steps, dimensions)
    optimizer = _in_float32(_trained_alone(made, config.trainable))
    if config.ema_decay > 0:
        return average_weights(optimizer, config.ema_decay)
    return optimizer


def _custom(
    config: OptimizerConfig, steps: int, model: ModelConfig | None
) -> optax.GradientTransformationExtraArgs:
    """Make the user's optimizer, which receives clipped gradients."""
    make = require_code(config.make, "optimizer")
    if takes_model(make):
        optimizer = make(config, steps, model=model)
    else:
        optimizer = make(config, steps)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer= must make an optax.GradientTransformation, not {kind}")
    # One without them ignores the extra arguments.
    optimizer = optax.with_extra_args_support(optimizer)
    if model is not None and uses_stacked_blocks(model):
        optimizer = _for_each_block(optimizer)
    if config.gradient_clip == 0:
        return optimizer
    clip = clip_by_global_norm(config.gradient_clip)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        # optax.chain would make the state a pair; a checkpoint has the optimizer's own.
        clipped, _ = clip.update(updates, clip.init(params), params)
        return optimizer.update(clipped, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _for_each_block(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it sees the blocks apart in `update`, as it does in `init`.

    A mask such as ndim >= 2 would take the stacked scales of norms for matrices. Its state stays
    apart, too.
    """

    def init(params: Any) -> UnstackedState:
        return UnstackedState(optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        apart = (unstack_blocks(updates), state.of_blocks, unstack_blocks(params))
        seen = _extra_as_seen(extra, unstack_blocks, stack_blocks)
        changes, next_state = optimizer.update(*apart, **seen)
        return stack_blocks(changes), UnstackedState(next_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _extra_as_seen(
    extra: dict[str, Any], seen: Callable[[Any], Any], whole: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the extra arguments of an update for an optimizer that sees other weights.

    `seen` maps weights or gradients to those that it sees, and `whole` maps weights back.
    """

    def of_seen(function: Any) -> Any:
        def value_fn(weights: Any, obj_fn: Any = None) -> Any:
            return function(whole(weights))

        return value_fn

    converters = {"grad": seen, "value_fn": of_seen, "obj_fn": of_seen}
    converted = {}
    for name, value in extra.items():
        if name in converters:
            value = converters[name](value)
        converted[name] = value
    return converted


def _trained_alone(
    optimizer: optax.GradientTransformation, trainable: tuple[str, ...]
) -> optax.GradientTransformation:
    """Wrap an optimizer so that it sees only the parameters to train, and the rest has no state."""
    if not trainable:
        return optimizer
    transforms: dict[Hashable, optax.GradientTransformation] = {
        "trained": optimizer,
        "frozen": optax.set_to_zero(),
    }

    def labels(weights: Any) -> Any:
        def label(path: tuple[Any, ...], _: Any) -> str:
            if is_trainable(path_name(path), trainable):
                return "trained"
            return "frozen"

        return jax.tree_util.tree_map_with_path(label, weights)

    def trained_alone(tree: Any) -> Any:
        """Mask the leaves of frozen parameters, as optax does in what the optimizer sees."""

        def masked(label: str, leaf: Any) -> Any:
            if label == "trained":
                return leaf
            return optax.MaskedNode()

        return jax.tree.map(masked, labels(tree), tree)

    partitioned = optax.partition(transforms, labels)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        # optax masks the updates and the parameters, but no other arguments.
        seen = _extra_as_seen(extra, trained_alone, lambda tree: _with_masked_from(tree, params))
        return partitioned.update(updates, state, params, **seen)

    return optax.GradientTransformationExtraArgs(partitioned.init, update)


def _with_masked_from(tree: Any, other: Any) -> Any:
    """Return a tree with the leaves of another one where it is masked."""

    def chosen(leaf: Any, other_leaf: Any) -> Any:
        if _is_masked(leaf):
            return other_leaf
        return leaf

    return jax.tree.map(chosen, tree, other, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a parameter's path as `named_parameters` has it, such as blocks.0.attention.query."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_trainable(name: str, trainable: tuple[str, ...]) -> bool:
    """Return whether a parameter is trained: whether a pattern fits its path, if there are any."""
    if not trainable:
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in trainable)


@typed
def with_frozen(weights: LikeWeights, trainable: tuple[str, ...]) -> LikeWeights:
    """Stop the gradients of the parameters that are not trained, so that none are computed."""
    if not trainable:
        return weights

    def stopped(path, leaf):
        if is_trainable(path_name(path), trainable):
            return leaf
        return jax.lax.stop_gradient(leaf)

    return jax.tree_util.tree_map_with_path(stopped, weights)


def _in_float32(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it receives parameters and gradients in at least float32.

    Its moments are then in float32: the nearest bfloat16 to a decay rate of 0.999 is 1.
    """
    with_extra = optax.with_extra_args_support(optimizer)

    @typed
    def init(params: Weights) -> Any:
        return optimizer.init(jax.tree.map(at_least_float32, params))

    @typed
    def update(
        updates: LikeWeights, state: Any, params: LikeWeights | None = None, **extra: Any
    ) -> tuple[Updates, Any]:
        wide_updates = jax.tree.map(at_least_float32, updates)
        wide_params = jax.tree.map(at_least_float32, params)  # None stays None
        # Optax raises a decay rate, a float, to the power of the step, an integer.
        with jax.numpy_dtype_promotion("standard"):
            return with_extra.update(wide_updates, state, wide_params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _built_in(
    config: OptimizerConfig, steps: int, dimensions: Mapping[str, Dimensions] | None
) -> optax.GradientTransformation:
    """Make AdamW or Muon, which receives clipped gradients."""

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
        # A single group is not partitioned, since that would nest the state in checkpoints.
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
    """Make optax's Muon with support for a mesh and for the stacked matrices of a scan over blocks.

    A Newton-Schulz iteration works on one matrix, so the matrices in a stack take turns.
    """
    muon = optax.contrib.muon(
        learning_rate_schedule(config, steps, config.muon_learning_rate),
        weight_decay=config.muon_weight_decay,
    )

    def muon_update(updates, state, params):
        # Otherwise each product of each Newton-Schulz iteration would gather the sharded matrix
        # again.
        return muon.update(replicate(updates), replicate(state), params)

    def update(updates, state, params=None):
        leaves, structure = jax.tree_util.tree_flatten_with_path((updates, state, params))
        stacked = [leaf for path, leaf in leaves if STACKED in path]
        if not stacked:
            return muon_update(updates, state, params)

        # One layer's matrices at a time, since all of them gathered would be too large.
        def update_layer(layer):
            matrices = iter(layer)
            layer_leaves = []
            for path, leaf in leaves:
                # Leaves that are not stacked, such as the step count, are the same for all layers.
                if STACKED in path:
                    leaf = next(matrices)
                layer_leaves.append(leaf)
            return muon_update(*structure.unflatten(layer_leaves))

        def merge_layers(path, leaf):
            if STACKED in path:
                return leaf
            return leaf[-1]  # each layer computed the same value

        by_layer = jax.lax.map(update_layer, stacked)
        return jax.tree_util.tree_map_with_path(merge_layers, by_layer)

    return optax.GradientTransformation(muon.init, update)


class AverageState(NamedTuple):
    """The state of `average_weights`."""

    trained: Weights
    """The weights that are trained, whose average the train state has."""
    optimizer: Any
    """The state of the optimizer that trains them."""
    step: Int[Array, ""]
    """The number of steps taken."""


def average_weights(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that the train state holds the moving average of the trained weights.

    The average is exponential and bias-corrected like Adam's moments (Kingma and Ba 2015, section
    3).
    """

    with_extra = optax.with_extra_args_support(optimizer)

    def init(params: Weights) -> AverageState:
        # both are donated, so that they can't share memory
        trained = jax.tree.map(jnp.copy, params)
        return AverageState(trained, optimizer.init(params), jnp.zeros((), jnp.int32))

    @typed
    def update(
        updates: LikeWeights, state: Any, params: LikeWeights | None = None, **extra: Any
    ) -> tuple[LikeWeights, Any]:
        # The optimizer gets the trained weights, never the average.
        updates, optimizer_state = with_extra.update(
            updates, state.optimizer, state.trained, **extra
        )
        step = state.step + 1
        # The weight of the newest value in a mean of `step` values: 1 at first, then towards 1 -
        # decay.
        # Weights may be narrower than updates, and the rate is a float to the power of an integer.
        with jax.numpy_dtype_promotion("standard"):
            trained = optax.apply_updates(state.trained, updates)
            rate = (1 - decay) / (1 - decay**step)
            # Checkpoints and evaluations use the average as the weights.
            average_updates = jax.tree.map(
                lambda new, average: (rate * (new - average)).astype(average.dtype), trained, params
            )
        return average_updates, AverageState(trained, optimizer_state, step)

    return optax.GradientTransformationExtraArgs(init, update)


def evaluated_weights(weights: Any, state: Any) -> Any:
    """Return the weights to evaluate in place of those that a train state has; None for the same.

    A schedule-free optimizer takes gradients at y and evaluates x, an average of the iterates
    (Defazio et al. 2024, section 2). Only its state tells it apart from others.
    """
    schedule_free = _schedule_free_state(state)
    if schedule_free is None:
        return None

    # Frozen parameters, of which the state has no z, are the same in both.
    def masked_as_state(z: Any, y: Any) -> Any:
        if _is_masked(z):
            return z
        return y

    y = jax.tree.map(masked_as_state, schedule_free.z, weights, is_leaf=_is_masked)
    x = optax.contrib.schedule_free_eval_params(schedule_free, y)
    whole = _with_masked_from(x, weights)
    return jax.tree.map(lambda leaf, of_y: leaf.astype(of_y.dtype), whole, weights)


def _schedule_free_state(state: Any) -> Any:
    """Return the state of optax's `schedule_free` inside an optimizer's state, or None."""

    def is_schedule_free(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    for node in jax.tree.leaves(state, is_leaf=is_schedule_free):
        if is_schedule_free(node):
            return node
    return None


@typed
def trained_weights(weights: LikeWeights, state: Any) -> LikeWeights:
    """Return the weights to differentiate at: the trained ones if `weights` is an average, else
    `weights`."""
    if isinstance(state, AverageState):
        return state.trained
    return weights
