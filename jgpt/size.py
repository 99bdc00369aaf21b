"""How big a model is: parameters by part, bytes, and FLOPs, without making it."""

import math
from dataclasses import dataclass

import jax
from flax import nnx

from jgpt.config import ModelConfig
from jgpt.contracts import typed
from jgpt.model import abstract_model


@dataclass(frozen=True)
class Part:
    """A part of a model, all blocks together."""

    name: str
    parameters: int
    size: int
    """In bytes."""
    product_parameters: int
    """Those that multiply each token's features in a matrix product."""


@typed
def parts_of(config: ModelConfig) -> tuple[Part, ...]:
    """The parts of the model that a config describes, in the order of a forward pass."""
    weights = nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))
    leaves: dict[str, list[tuple[str, jax.ShapeDtypeStruct]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        names = [str(entry.key) for entry in path]
        part = f"{names[0]}.{names[2]}" if names[0] == "blocks" else names[0]
        leaves.setdefault(part, []).append((names[-1], leaf))
    tied = {"token_embedding"} if config.tie_embeddings else set()
    parts = (
        Part(
            name,
            parameters=sum(math.prod(leaf.shape) for _, leaf in its),
            size=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in its),
            product_parameters=sum(
                math.prod(leaf.shape) for kind, leaf in its if kind == "kernel" or name in tied
            ),
        )
        for name, its in leaves.items()
    )
    order = ("token", "position", "ngram", "shortcut", "blocks", "final", "head", "table")
    return tuple(sorted(parts, key=lambda part: order.index(part.name.split("_")[0].split(".")[0])))


@typed
def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations of a forward pass per token, at a full block.

    Two for each multiplication and addition in matrix products, attention's included as if it were
    not causal (Chowdhery et al. 2022, appendix B), but within its window. Training takes three
    times that.
    """
    if config.architecture == "bigram":
        return 0
    products = sum(part.product_parameters for part in parts_of(config))
    reach = min(config.block_size, config.attention_window or config.block_size)
    attention = 2 * config.num_layers * reach * config.embed_dim
    return 2 * (products + attention)
