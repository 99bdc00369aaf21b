"""A model's parts, their parameters and bytes, and its FLOPs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jgpt.config import ModelConfig
from jgpt.nn.models import abstract_model, named_parameters


@dataclass(frozen=True)
class Part:
    """A part of a model, summed over all blocks."""

    name: str
    parameters: int
    size: int
    """The size in bytes."""


def parts_of(config: ModelConfig) -> tuple[Part, ...]:
    """Return a model's parts and their parameter counts, in the order of the forward pass."""
    leaves: dict[str, list[nnx.Variable]] = {}
    for path, leaf in named_parameters(abstract_model(config)).items():
        leaves.setdefault(_part_name(path), []).append(leaf)
    parts = []
    for name, part_leaves in leaves.items():
        parameters = 0
        size = 0
        for leaf in part_leaves:
            parameters += leaf.size
            size += leaf.size * leaf.dtype.itemsize
        parts.append(Part(name, parameters=parameters, size=size))
    return tuple(sorted(parts, key=_place))


def _part_name(path: str) -> str:
    """Return the part of a parameter: blocks.3.attention.query.kernel belongs to
    blocks.attention."""
    names = path.split(".")
    if names[0] == "blocks" and len(names) > 2:
        return f"{names[0]}.{names[2]}"
    return names[0]


def _place(part: Part) -> int:
    """Return a part's place in the forward pass; custom parts count as blocks."""
    # First words of attributes, since a state sorts its parameters alphabetically.
    order = ("token", "position", "ngram", "shortcut", "blocks", "final", "head", "table")
    first_word = part.name.split("_")[0]
    if first_word not in order:
        return order.index("blocks")
    return order.index(first_word)


def flops_per_token(config: ModelConfig) -> int:
    """Return the FLOPs of a forward pass per token, at full context.

    For a GPT, these are the matrix products; attention counts without the causal mask but within
    its window (Chowdhery et al. 2022, appendix B). For a custom model, they are all operations, as
    XLA counts them. A training step takes three times that.
    """
    if config.make is not None:
        return _counted_flops(config)
    if config.architecture == "bigram":  # a look-up has no products
        return 0
    multiplications = 0
    for name, leaf in named_parameters(abstract_model(config)).items():
        # Each kernel is multiplied by each token; a table only if it is also the head.
        is_tied_head = name == "token_embedding.embedding" and config.tie_embeddings
        if name.endswith(".kernel") or is_tied_head:
            multiplications += leaf.size
    reach = config.block_size
    if config.attention_window is not None:
        reach = min(reach, config.attention_window)
    # Scores and averages of values: one product each over the keys in reach.
    features = config.num_heads * config.head_size
    multiplications += 2 * config.num_layers * reach * features
    return 2 * multiplications  # each has an addition


def _counted_flops(config: ModelConfig) -> int:
    """Return the FLOPs of a custom model per token, as XLA counts them in the unoptimised program.

    Unlike in a GPT, it is unknown what its parameters are multiplied by.
    """
    graph, weights = nnx.split(abstract_model(config))
    tokens = jax.ShapeDtypeStruct((1, config.block_size), jnp.int32)

    def forward(weights, tokens):
        return nnx.merge(graph, weights)(tokens)

    costs = jax.jit(forward).lower(weights, tokens).cost_analysis()
    if costs is None:  # a backend may not count them
        return 0
    return round(costs.get("flops", 0) / config.block_size)
