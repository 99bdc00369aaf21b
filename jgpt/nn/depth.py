"""Running the blocks: in turn or by a scan, and what they keep for the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jgpt.config import ModelConfig
from jgpt.nn.cache import KVCache
from jgpt.parallel.gather import remat
from jgpt.parallel.rules import shard_by_name, stacked
from jgpt.shapes.calls import place
from jgpt.shapes.contract import typed


@typed
def run_blocks(
    config: ModelConfig,
    blocks: Any,
    x: Float[Array, "batch time {config.embed_dim}"],
    shortcut: nnx.Param | None = None,
    *,
    cache: KVCache | None = None,
    rngs: nnx.Rngs | None = None,
) -> PyTree[Float[Array, "batch time {config.embed_dim}"]]:
    """The residual stream: the input of each block, then the output of the last.

    A `shortcut` adds the embeddings to each input, times a learned scalar. Raises ValueError for a
    cache with another number of layers.
    """
    x = shard_by_name(x, "batch", "time", None)
    if config.scan_layers and cache is None:
        return _scanned(config, blocks, x, shortcut, rngs)
    caches = [None] * len(blocks) if cache is None else list(cache.layers)
    if len(caches) != len(blocks):
        raise ValueError(
            f"the cache has {len(caches)} layers and the model {len(blocks)}: "
            "make the cache with empty_cache"
        )

    def call(block, x, rngs):  # not Block.__call__: a subclass may override it
        with place("blocks.*"):  # a copy that rematerialisation makes, once for all blocks
            return block(x, rngs=rngs)

    run = remat(call, full=config.rematerialise)
    embedded = x
    states = []
    for i, (block, layer) in enumerate(zip(blocks, caches, strict=True)):
        if shortcut is not None:
            x = x + shortcut[i].astype(x.dtype) * embedded
        states.append(x)
        x = run(block, x, rngs) if layer is None else block(x, cache=layer, rngs=rngs)
        x = shard_by_name(x, "batch", "time", None)
    return *states, x


@typed
def _scanned(
    config: ModelConfig,
    blocks: Any,
    x: Float[Array, "batch time {config.embed_dim}"],
    shortcut: nnx.Param | None,
    rngs: nnx.Rngs | None,
) -> PyTree[Float[Array, "batch time {config.embed_dim}"]]:
    """`run_blocks` as a scan over the stacked weights of the blocks.

    Train steps keep them stacked: then there is one block, which holds all weights. Raises
    ValueError for blocks that differ in more than their weights.
    """
    x = embedded = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # as blocks return it
    graph = nnx.graphdef(blocks[0])
    if any(nnx.graphdef(block) != graph for block in blocks):
        raise ValueError("scan_layers=True needs blocks that differ in their weights alone")
    layers = [nnx.to_pure_dict(nnx.state(block, nnx.Param)) for block in blocks]
    whole = len(layers) == config.num_layers
    weights = stacked(layers, blocks[0]) if whole else layers[0]
    scales = None if shortcut is None else shortcut[...].astype(x.dtype)
    streams = nnx.graphdef(rngs)  # the counts of the streams are carried along

    def call(carry, layer):
        x, drawn = carry
        weights, scale = layer
        x = x if scale is None else x + scale * embedded
        rngs = nnx.merge(streams, drawn)
        with place("blocks.*"):
            y = nnx.merge(graph, weights)(x, rngs=rngs)
        y = shard_by_name(y, "batch", "time", None)
        return (y, nnx.to_pure_dict(nnx.state(rngs))), x

    call = remat(call, full=config.rematerialise, scanned=True)
    drawn = nnx.to_pure_dict(nnx.state(rngs))
    (x, drawn), states = jax.lax.scan(call, (x, drawn), (weights, scales))
    nnx.update(rngs, drawn)
    return *states, x
