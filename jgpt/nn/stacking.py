"""Stacked arrays of the blocks, for the train state of a config with `scan_layers`.

With them, the number of arrays in a program doesn't depend on the depth. Models that a user sees
keep separate arrays for each block, and so does a user's own optimizer.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from jgpt.config import ModelConfig
from jgpt.nn.models import LanguageModel, Weights, abstract_model
from jgpt.nn.transformer import GPT
from jgpt.shapes.contract import typed

STACKED = jax.tree_util.DictKey("stacked")
"""The key of the stacked arrays, in place of the numbers of the blocks."""


class UnstackedState(NamedTuple):
    """The state of an optimizer that sees the blocks apart, which is never stacked."""

    of_blocks: Any


def uses_stacked_blocks(config: ModelConfig) -> bool:
    """Return whether the train state of a model has stacked blocks."""
    if config.make is not None or config.architecture != "gpt":
        return False
    return config.scan_layers and config.num_layers > 1


@typed
def stack_blocks(tree: PyTree[Shaped[Array, "..."]]) -> PyTree[Shaped[Array, "..."]]:
    """Stack the arrays of all blocks on a new first axis."""

    def stack_arrays(*arrays):
        return jnp.stack(arrays)

    def stack(blocks):
        # In the order of their numbers, in which a scan runs them.
        in_order = [blocks[index] for index in sorted(blocks)]
        return {STACKED.key: jax.tree.map(stack_arrays, *in_order)}

    return _map_blocks(stack, tree)


@typed
def unstack_blocks(tree: PyTree[Shaped[Array, "..."]]) -> PyTree[Shaped[Array, "..."]]:
    """Invert `stack_blocks`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    stacks = [leaf for path, leaf in leaves if STACKED in path]
    count = len(stacks[0])  # each has a first axis of num_layers

    def unstack(blocks):
        stacked = blocks[STACKED.key]
        unstacked = {}
        for index in range(count):
            unstacked[index] = jax.tree.map(operator.itemgetter(index), stacked)
        return unstacked

    return _map_blocks(unstack, tree)


def stack_specs(specs: Any) -> Any:
    """Return the shardings of stacked arrays: those of each block, and a replicated first axis."""

    def stacked(spec):
        return PartitionSpec(None, *spec)

    def stack(blocks):  # all blocks are sharded equally
        return {STACKED.key: jax.tree.map(stacked, blocks[0])}

    return _map_blocks(stack, specs)


def model_merger(config: ModelConfig) -> Callable[[Weights], LanguageModel]:
    """Return a function from weights, with stacked blocks or without, to a model.

    The parameters get the dtypes of the config's model, since averages of 16-bit weights are wider.
    """
    model = abstract_model(config)
    merge_all = _merge_like(model)
    if not (isinstance(model, GPT) and uses_stacked_blocks(config)):
        return merge_all
    # A single block holds the stacked weights of all, and `run_blocks` scans over them.
    model.blocks = nnx.List(model.blocks[:1])
    merge_one = _merge_like(model)

    def merge(weights: Weights) -> LanguageModel:
        stacked = weights["blocks"].get(STACKED.key)
        if stacked is None:  # a model's own weights, as in evaluations of a loaded run
            return merge_all(weights)
        return merge_one({**weights, "blocks": {0: stacked}})

    return merge


def _merge_like(model: LanguageModel) -> Callable[[Weights], LanguageModel]:
    """Return a function from weights to a model with the structure and dtypes of an abstract
    one."""
    # Taken once, outside of the traced function, so that each `merge` depends only on weights.
    graph = nnx.graphdef(model)
    # All of its state: a model that another training made may hold more than parameters.
    model_weights = nnx.to_pure_dict(nnx.state(model))

    def as_in_model(leaf, model_leaf):
        return leaf.astype(model_leaf.dtype)

    def merge(weights: Weights) -> LanguageModel:
        narrowed = jax.tree.map(as_in_model, weights, model_weights)
        return nnx.merge(graph, narrowed)

    return merge


def _map_blocks(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the blocks of weights, and of similar trees in the optimizer state."""

    def is_unchanged_or_weights(node):
        return isinstance(node, UnstackedState) or _is_weights(node)

    def change(node):
        if not _is_weights(node):
            return node
        return {**node, "blocks": function(node["blocks"])}

    return jax.tree.map(change, tree, is_leaf=is_unchanged_or_weights)


def _is_weights(node: Any) -> bool:
    return isinstance(node, dict) and "blocks" in node
