"""The blocks' arrays of weights or of a train state, stacked for steps that scan over the blocks.

Then a program has as many arrays however many blocks there are. Weights that a user sees and
checkpoints have each block's own.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from jgpt.config import ModelConfig
from jgpt.contracts import typed
from jgpt.nn.models import LanguageModel, Weights, abstract_model
from jgpt.nn.transformer import GPT

STACKED = jax.tree_util.DictKey("stacked")
"""Where the stacked arrays are, among the blocks, which are numbered."""


def stacks(config: ModelConfig) -> bool:
    """Whether train steps keep a model's blocks stacked."""
    return config.architecture == "gpt" and config.scan_layers and config.num_layers > 1


@typed
def stack_blocks(tree: PyTree[Shaped[Array, "..."]]) -> PyTree[Shaped[Array, "..."]]:
    """The tree with the arrays of all blocks stacked on a new first axis."""

    def stack(blocks):
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *map(blocks.get, sorted(blocks)))

    return _at_blocks(lambda blocks: {STACKED.key: stack(blocks)}, tree)


@typed
def unstack_blocks(tree: PyTree[Shaped[Array, "..."]], count: int) -> PyTree[Shaped[Array, "..."]]:
    """The tree with the own arrays of each of `count` blocks again."""

    def unstack(blocks):
        take = (operator.itemgetter(i) for i in range(count))
        return dict(enumerate(jax.tree.map(its, blocks[STACKED.key]) for its in take))

    return _at_blocks(unstack, tree)


def stack_specs(specs: Any) -> Any:
    """How stacked arrays are sharded: like each block's own."""
    whole = lambda spec: PartitionSpec(None, *spec)  # noqa: E731
    return _at_blocks(lambda blocks: {STACKED.key: jax.tree.map(whole, blocks[0])}, specs)


def model_of(config: ModelConfig) -> Callable[[Weights], LanguageModel]:
    """A function from weights, whose blocks may be stacked, to the model that has them."""
    model = abstract_model(config)
    graph = nnx.graphdef(model)
    if not (isinstance(model, GPT) and stacks(config)):
        return lambda weights: nnx.merge(graph, weights)
    model.blocks = nnx.List(model.blocks[:1])
    of_one = nnx.graphdef(model)

    def merged(weights: Weights) -> LanguageModel:
        stacked = weights["blocks"].get(STACKED.key)
        if stacked is None:
            return nnx.merge(graph, weights)
        return nnx.merge(of_one, {**weights, "blocks": {0: stacked}})

    return merged


def _at_blocks(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with what the function makes of the blocks, in weights and what is like them."""
    is_weights = lambda node: isinstance(node, dict) and "blocks" in node  # noqa: E731
    return jax.tree.map(
        lambda node: {**node, "blocks": function(node["blocks"])} if is_weights(node) else node,
        tree,
        is_leaf=is_weights,
    )
