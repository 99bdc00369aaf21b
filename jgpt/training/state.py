"""The train state: its first value, shapes and shardings."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh
from jaxtyping import Array, Bool, Inexact, Key, PyTree

from jgpt.config import TrainConfig
from jgpt.nn import stacking
from jgpt.nn.models import (
    Weights,
    abstract_model,
    create_model,
    weight_dimensions,
    weights_of,
)
from jgpt.nn.precision import at_least_float32
from jgpt.parallel import rules
from jgpt.parallel.mesh import current_mesh, require_mesh
from jgpt.shapes.contract import typed
from jgpt.training.loss_scale import first_loss_scale, has_loss_scale
from jgpt.training.optimizer import make_optimizer

# One key for each purpose, from the same seed. Batches fold the step into the seed's key itself, so
# that the batches of a run don't depend on other random numbers.
_INIT_STREAM = 1
_DROPOUT_STREAM = 2


State = dict[str, Any]
"""The train state by part: the `model`'s parameters, the state of the `optimizer`, and with
products in float16 the `loss_scale`. With `scan_layers`, the arrays of the blocks are stacked."""


@typed
def init_state(config: TrainConfig, initial: dict[str, Any] | None = None) -> State:
    """Make the initial parameters and optimizer state from the config's seed.

    `initial` are arrays by the paths of the parameters that they replace. If a mesh is set, each
    device makes its own shards. Raises ValueError for a config with a mesh that is not set.
    """
    require_mesh(config.mesh)
    replacements = initial or {}

    def make(replacements: dict[str, Any]) -> State:
        rngs = nnx.Rngs(_stream(config.seed, _INIT_STREAM))
        weights = weights_of(create_model(config.model, rngs=rngs))

        def replace(path, leaf):
            found = replacements.get(jax.tree_util.keystr(path, simple=True, separator="."))
            if found is None:
                return leaf
            return jnp.array(found, leaf.dtype)  # a copy, since the state is donated

        return first_state(config, jax.tree_util.tree_map_with_path(replace, weights))

    if current_mesh().empty:
        # Not under one jit: small programs, one per shape, compile faster.
        return make(replacements)
    return jax.jit(make, out_shardings=state_specs(config))(replacements)


@typed
def first_state(config: TrainConfig, weights: Weights) -> State:
    """Return the state before the first step of weights, whose blocks are apart."""
    dimensions = weight_dimensions(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps, dimensions, config.model)
    optimizer_state = jax.jit(optimizer.init)(weights)
    if config.optimizer.ema_decay > 0:
        # In 16 bits, the average's change in a step would be rounded to nothing.
        weights = jax.tree.map(at_least_float32, weights)
    state: State = {"model": weights, "optimizer": optimizer_state}
    if has_loss_scale(config.model):
        state["loss_scale"] = first_loss_scale()
    if stacking.uses_stacked_blocks(config.model):
        return stacking.stack_blocks(state)
    return state


@typed
def dropout_stream(seed: int) -> Key[Array, ""]:
    """Return the dropout key of a seed; each step folds in its number.

    The key is an argument of the steps, so that another seed needs no new compilation.
    """
    return _stream(seed, _DROPOUT_STREAM)


def abstract_state(config: TrainConfig) -> State:
    """Return the shapes and dtypes of the train state."""
    weights = weights_of(abstract_model(config.model))
    return jax.eval_shape(functools.partial(first_state, config), weights)


def state_specs(config: TrainConfig, mesh: AbstractMesh | None = None) -> State:
    """Return the sharding of the train state over `mesh`, by default the one that is set."""
    if mesh is None:
        mesh = current_mesh()
    state = abstract_state(config)
    weight_specs = rules.weight_specs(abstract_model(config.model), mesh)
    forms = [weight_specs]
    if stacking.uses_stacked_blocks(config.model):  # a user's own optimizer sees them apart
        forms.append(stacking.stack_specs(weight_specs))
    # Moments are sharded like their weights: the optimizer state contains trees like that of the
    # weights.
    specs = rules.specs_like(state, *forms)
    # Compiled programs return specs in this form. With both forms, the train steps would be
    # compiled twice.
    return jax.tree.map(rules.without_trailing_none, specs)


def placed_state(config: TrainConfig) -> State:
    """Return the shapes, dtypes and shardings of the train state over the mesh that is set."""
    return rules.abstract_arrays(abstract_state(config), state_specs(config))


def is_finite(tree: Any) -> bool:
    """Return whether all numbers of a tree are finite."""
    floats = []
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):  # counts and keys are always finite
            floats.append(leaf)
    return bool(_all_finite(floats))


# One program returns one answer; a question for each array would wait for the device each time.
@jax.jit
@typed
def _all_finite(leaves: PyTree[Inexact[Array, "..."]]) -> Bool[Array, ""]:
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(leaves)]
    return jnp.stack(finite).all()


@typed
def _stream(seed: int, stream: int) -> Key[Array, ""]:
    # `jit` makes an int32 of a Python number, and seeds from 2**31 on would overflow.
    key = jax.random.key(np.uint32(seed))
    return jax.random.fold_in(key, stream)
