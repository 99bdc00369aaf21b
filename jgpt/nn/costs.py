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
    """In bytes."""


def parts_of(config: ModelConfig) -> tuple[Part, ...]:
    """A model's parts and their parameter counts, in the order of the forward pass."""
    leaves: dict[str, list[nnx.Variable]] = {}
    for path, leaf in named_parameters(abstract_model(config)).items():
        names = path.split(".")
        in_block = names[0] == "blocks" and len(names) > 2
        part = f"{names[0]}.{names[2]}" if in_block else names[0]
        leaves.setdefault(part, []).append(leaf)
    parts = (
        Part(
            name,
            parameters=sum(leaf.size for leaf in own),
            size=sum(leaf.size * leaf.dtype.itemsize for leaf in own),
        )
        for name, own in leaves.items()
    )
    order = ("token", "position", "ngram", "shortcut", "blocks", "final", "head", "table")

    def place(part):  # a user's own parts count as blocks
        word = part.name.split("_")[0]
        return order.index(word if word in order else "blocks")

    return tuple(sorted(parts, key=place))


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of a forward pass per token, at full context.

    Matrix products only, attention counted without the causal mask but within its window
    (Chowdhery et al. 2022, appendix B); all operations of a user's own model, as XLA counts them.
    A training step takes three times that.
    """
    if config.make is not None:
        graph, weights = nnx.split(abstract_model(config))
        tokens = jax.ShapeDtypeStruct((1, config.block_size), jnp.int32)
        forward = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))
        costs = forward.lower(weights, tokens).cost_analysis() or {}
        return round(costs.get("flops", 0) / config.block_size)
    if config.architecture == "bigram":
        return 0
    products = sum(
        leaf.size
        for name, leaf in named_parameters(abstract_model(config)).items()
        if name.endswith(".kernel")
        or (name == "token_embedding.embedding" and config.tie_embeddings)
    )
    reach = min(config.block_size, config.attention_window or config.block_size)
    attention = 2 * config.num_layers * reach * config.num_heads * config.head_size
    return 2 * (products + attention)
