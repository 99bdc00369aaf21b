"""The train state: its first value, shapes, shardings, and its form in checkpoints."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree

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
from jgpt.parallel.mesh import current_mesh
from jgpt.shapes.contract import record, typed
from jgpt.training.optimizer import make_optimizer

# One key for each purpose, from the same seed. Batches fold the step into the seed's key itself, so
# that the batches of a run don't depend on other random numbers.
_INIT_STREAM = 1
_DROPOUT_STREAM = 2


@record
@dataclass(frozen=True)
class TrainState:
    """The train state. With `scan_layers`, the arrays of the blocks are stacked."""

    weights: Weights
    optimizer: PyTree[
        Float[Array, "..."] | Integer[Array, "..."] | Bool[Array, "..."] | Key[Array, "..."]
    ]
    step: Int[Array, ""]


@typed
def init_state(config: TrainConfig, initial: dict[str, Any] | None = None) -> TrainState:
    """Make the initial parameters, optimizer state and step 0 from the config's seed.

    `initial` are arrays by the paths of the parameters that they replace. If a mesh is set, each
    device makes its own shards.
    """
    replacements = initial or {}

    def make(replacements: dict[str, Any]) -> TrainState:
        rngs = nnx.Rngs(_stream(config.seed, _INIT_STREAM))
        weights = weights_of(create_model(config.model, rngs=rngs))

        def replace(path, leaf):
            found = replacements.get(jax.tree_util.keystr(path, simple=True, separator="."))
            if found is None:
                return leaf
            return jnp.array(found, leaf.dtype)  # a copy, since the state is donated

        return _first_state(config, jax.tree_util.tree_map_with_path(replace, weights))

    if current_mesh().empty:
        # Not under one jit: small programs, one per shape, compile faster.
        return make(replacements)
    return jax.jit(make, out_shardings=state_specs(config))(replacements)


@typed
def _first_state(config: TrainConfig, weights: Weights) -> TrainState:
    dimensions = weight_dimensions(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps, dimensions, config.model)
    optimizer_state = jax.jit(optimizer.init)(weights)
    if config.optimizer.ema_decay > 0:
        # In 16 bits, the average's change in a step would be rounded to nothing.
        weights = jax.tree.map(at_least_float32, weights)
    state = TrainState(weights, optimizer_state, jnp.zeros((), jnp.int32))
    if stacking.uses_stacked_blocks(config.model):
        return stacking.stack_blocks(state)
    return state


@typed
def dropout_stream(seed: int) -> Key[Array, ""]:
    """Return the dropout key of a seed; each step folds in its number.

    The key is an argument of the steps, so that another seed needs no new compilation.
    """
    return _stream(seed, _DROPOUT_STREAM)


def abstract_state(config: TrainConfig) -> TrainState:
    """Return the shapes and dtypes of the train state."""
    weights = weights_of(abstract_model(config.model))
    return jax.eval_shape(functools.partial(_first_state, config), weights)


def state_specs(config: TrainConfig, mesh: AbstractMesh | None = None) -> TrainState:
    """Return the sharding of the train state over `mesh`, by default the one that is set."""
    if mesh is None:
        mesh = current_mesh()
    state = abstract_state(config)
    weight_specs = rules.weight_specs(abstract_model(config.model), mesh)
    if _is_stacked(state):
        weight_specs = stacking.stack_specs(weight_specs)
    # Moments are sharded like their weights: the optimizer state contains trees like that of the
    # weights.
    specs = rules.specs_like(state, weight_specs)
    # Compiled programs return specs in this form. With both forms, the train steps would be
    # compiled twice.
    return jax.tree.map(rules.without_trailing_none, specs)


def stack_state(config: TrainConfig, state: TrainState) -> TrainState:
    """Stack the arrays of the blocks in a state, as the train steps need them."""
    if not stacking.uses_stacked_blocks(config.model):
        return state
    specs = None
    if not current_mesh().empty:
        specs = state_specs(config)
    return jax.jit(stacking.stack_blocks, out_shardings=specs)(state)


def unstack_state(state: TrainState) -> TrainState:
    """Unstack the arrays of the blocks in a state, as checkpoints store them."""
    if not _is_stacked(state):
        return state
    return jax.jit(stacking.unstack_blocks)(state)


def is_finite(config: TrainConfig, state: TrainState) -> bool:
    """Return whether all values of a state are finite; with a custom optimizer, only the
    parameters.

    Optax has optimizers whose state begins at infinity, such as `reduce_on_plateau`.
    """
    checked = state
    if config.optimizer.make is not None:
        checked = state.weights
    floats = []
    for leaf in jax.tree.leaves(checked):
        if jnp.issubdtype(leaf.dtype, jnp.floating):  # counts and keys are always finite
            floats.append(leaf)
    return bool(_all_finite(floats))


# One program returns one answer; a question for each array would wait for the device each time.
@jax.jit
@typed
def _all_finite(leaves: PyTree[Float[Array, "..."]]) -> Bool[Array, ""]:
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(leaves)]
    return jnp.stack(finite).all()


def _is_stacked(state: TrainState) -> bool:
    blocks = state.weights.get("blocks")
    return isinstance(blocks, dict) and stacking.STACKED.key in blocks


@typed
def _stream(seed: int, stream: int) -> Key[Array, ""]:
    # `jit` makes an int32 of a Python number, and seeds from 2**31 on would overflow.
    key = jax.random.key(np.uint32(seed))
    return jax.random.fold_in(key, stream)
