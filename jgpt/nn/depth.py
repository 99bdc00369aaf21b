"""Running the blocks in a loop or a scan, and the values stored for the backward pass."""

import operator
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from jgpt.config import ModelConfig
from jgpt.nn.cache import KVCache
from jgpt.nn.precision import wider_dtype
from jgpt.parallel.gather import remat
from jgpt.parallel.rules import shard_by_name, stacked
from jgpt.shapes.calls import keep_all, keeping_apart, place
from jgpt.shapes.contract import typed


@typed
def run_blocks(
    config: ModelConfig,
    blocks: Any,
    x: Float[Array, "batch time {config.embed_dim}"],
    shortcut: nnx.Param | None = None,
    *,
    cache: KVCache | None = None,
    mask: Bool[Array, "*leading time time"] | None = None,
    rngs: nnx.Rngs | None = None,
) -> PyTree[Float[Array, "batch time {config.embed_dim}"]]:
    """Return the residual stream: the input of each block, then the output of the last.

    A `shortcut` adds the embeddings to each input, times a learned scalar. A `mask` is that of each
    block's attention.
    """
    x = shard_by_name(x, "batch", "time", None)
    if config.scan_layers and cache is None:
        return _scanned(config, blocks, x, shortcut, mask, rngs)
    # A Python loop allows layers that differ, and a cache for each. On a CPU it is also faster than
    # a scan: a step took 34 ms instead of 38.
    caches = [None] * len(blocks)
    if cache is not None:
        caches = list(cache.layers)

    def call(block, x, rngs):  # not Block.__call__: a subclass may override it
        # Rematerialisation makes a single copy for all blocks.
        with place("blocks.*"), keeping_apart() as kept:
            x = block(x, rngs=rngs, **masked)
        return x, kept

    # A user's own block need not have this argument.
    masked = {}
    if mask is not None:
        masked["mask"] = mask
    run = remat(call, full=config.remat)
    embedded = x  # batch time embed_dim
    states = []
    for i, (block, layer_cache) in enumerate(zip(blocks, caches, strict=True)):
        if shortcut is not None:
            # Cast, since a wider parameter would widen the stream.
            x = x + shortcut[i].astype(x.dtype) * embedded
        states.append(x)
        if layer_cache is None:
            x, kept = run(block, x, rngs)
            keep_all(kept)
        else:  # decoding has no backward pass
            x = block(x, cache=layer_cache, rngs=rngs)
        x = shard_by_name(x, "batch", "time", None)  # only by batch, between any two blocks
    return *states, x


@typed
def _scanned(
    config: ModelConfig,
    blocks: Any,
    x: Float[Array, "batch time {config.embed_dim}"],
    shortcut: nnx.Param | None,
    mask: Bool[Array, "*leading time time"] | None,
    rngs: nnx.Rngs | None,
) -> PyTree[Float[Array, "batch time {config.embed_dim}"]]:
    """Run `run_blocks` as a scan over the stacked weights of the blocks.

    Train steps keep them stacked in a single block that holds all weights. Raises ValueError for
    blocks that differ in more than their weights.
    """
    # In the dtype that blocks return, since a scan's carry must keep its type.
    x = x.astype(wider_dtype(x.dtype))
    embedded = x
    graph = nnx.graphdef(blocks[0])
    # A graph has everything except arrays; one block's code then runs with each block's weights.
    if any(nnx.graphdef(block) != graph for block in blocks):
        raise ValueError("scan_layers=True needs blocks that differ only in their weights")
    layers = [nnx.to_pure_dict(nnx.state(block, nnx.Param)) for block in blocks]
    weights = layers[0]
    if len(layers) == config.num_layers:  # not stacked yet
        weights = stacked(layers, blocks[0])
    scales = None
    if shortcut is not None:
        scales = shortcut[...].astype(x.dtype)  # num_layers
    # Keys are drawn inside. The state of `rngs`, the counts of its streams, is carried from block
    # to block, so that a scan draws the same keys as the loop.
    rng_graph = nnx.graphdef(rngs)
    masked = {}
    if mask is not None:
        masked["mask"] = mask

    def call(carry, layer):
        x, rng_state = carry
        weights, scale = layer
        if scale is not None:
            x = x + scale * embedded
        rngs = nnx.merge(rng_graph, rng_state)
        with place("blocks.*"), keeping_apart() as kept:
            y = nnx.merge(graph, weights)(x, rngs=rngs, **masked)
        y = shard_by_name(y, "batch", "time", None)
        # The carry; then the block's input, and what was kept in the block.
        return (y, nnx.to_pure_dict(nnx.state(rngs))), (x, kept)

    call = remat(call, full=config.remat, scanned=True)
    rng_state = nnx.to_pure_dict(nnx.state(rngs))  # empty in evaluation
    # states: num_layers batch time embed_dim
    (x, rng_state), (states, kept) = jax.lax.scan(call, (x, rng_state), (weights, scales))
    # One layer after the other, as the loop over the blocks keeps them.
    for layer in range(config.num_layers):
        keep_all(jax.tree.map(operator.itemgetter(layer), kept))
    nnx.update(rngs, rng_state)  # the caller continues with the key after the last block's
    return *states, x
