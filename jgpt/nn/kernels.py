"""Faster attention: sliding windows in blocks, cuDNN, and queries in blocks over a KV cache."""

import functools
from typing import Literal, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Shaped

from jgpt.config import AttentionKernel
from jgpt.nn.attention import attend, causal_mask
from jgpt.nn.cache import LayerCache
from jgpt.shapes.contract import typed

MIN_QUERY_BLOCK = 128
"""The fewest queries in a block of attention over a KV cache, so that weights fit a CPU's cache."""
MAX_QUERY_BLOCKS = 8
"""The most blocks, since each is unrolled in the program."""


def uses_fused_kernel(kernel: AttentionKernel) -> bool:
    """Return whether to use `fused_attend`; False for an `auto` that no platform has decided."""
    match kernel:
        case "cudnn":
            return True
        case "xla" | "auto":
            return False
        case _:
            assert_never(kernel)


@typed
def query_groups(heads: int, kv_heads: int) -> int:
    """Return the number of query heads that share a key-value head."""
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads must be divisible by {kv_heads} key-value heads")
    return heads // kv_heads


@typed
def repeat_heads(
    x: Shaped[Array, "batch kv_heads key head_dim"], heads: int
) -> Shaped[Array, "batch {heads} key head_dim"]:
    """Repeat key-value heads for the query heads that share them (Ainslie et al. 2023)."""
    groups = query_groups(heads, x.shape[1])
    if groups == 1:
        return x
    return jnp.repeat(x, groups, axis=-3)


@typed
def attend_windowed(
    query: Float[Array, "*batch query head_dim"],
    key: Float[Array, "*batch key head_dim"],
    value: Float[Array, "*batch key value_dim"],
    mask: Bool[Array, "query key"] | None,
    window: int | None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "*batch query value_dim"]:
    """Compute `attend` under `causal_mask(time, window)` or no mask, linear in `time` if `window`
    is short.

    Then each block of `window` queries attends to its own keys and to those of the block before
    (Beltagy et al. 2020, section 3.1).
    """
    time = query.shape[-2]
    options = {"scale": scale, "dropout": dropout}
    if mask is None or window is None or window >= time:
        return attend(query, key, value, mask, dropout_key=dropout_key, **options)
    # A query then has scores for 2 * window keys instead of all keys.
    windows = -(-time // window)  # rounded up
    padded_time = windows * window

    def split_windows(x):
        # The padding is at the end, so no query of the text attends to it.
        padding = [(0, 0)] * (x.ndim - 2) + [(0, padded_time - time), (0, 0)]
        return jnp.pad(x, padding).reshape(*x.shape[:-2], windows, window, x.shape[-1])

    # These take arrays of *batch windows window features.
    def first_window(x):
        return x[..., :1, :, :]

    def other_windows(x):
        return x[..., 1:, :, :]

    def with_previous_window(x):
        return jnp.concatenate([x[..., :-1, :, :], x[..., 1:, :, :]], axis=-2)

    # Over two windows of keys: a query of the second window reaches back into the first.
    mask = causal_mask(2 * window, window)
    query = split_windows(query)  # *batch windows window head_dim
    key = split_windows(key)
    value = split_windows(value)
    dropout_keys = (None, None)
    if dropout_key is not None:
        dropout_keys = jax.random.split(dropout_key)
    # No window precedes the first one.
    first = attend(
        first_window(query),
        first_window(key),
        first_window(value),
        mask[:window, :window],
        dropout_key=dropout_keys[0],
        **options,
    )
    others = attend(
        other_windows(query),
        with_previous_window(key),
        with_previous_window(value),
        mask[window:],
        dropout_key=dropout_keys[1],
        **options,
    )
    heads = jnp.concatenate([first, others], axis=-3)  # *batch windows window value_dim
    merged = heads.reshape(*heads.shape[:-3], padded_time, heads.shape[-1])
    return merged[..., :time, :]


@typed
def fused_attend(
    query: Float[Array, "batch heads query head_dim"],
    key: Float[Array, "batch kv_heads key head_dim"],
    value: Float[Array, "batch kv_heads key head_dim"],
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch heads query head_dim"]:
    """Compute `attend` in a fused kernel that never stores the weights (FlashAttention, Dao et al.
    2022).

    The mask is `causal_mask` or none. Query heads share key-value heads in groups (Ainslie et al.
    2023); raises ValueError if the groups don't divide. `cudnn_attends` says where cuDNN supports
    it.
    """
    query_groups(query.shape[1], key.shape[1])  # raises for heads that can't be grouped
    dtype = query.dtype

    def time_before_heads(x):  # JAX requires this order, and one dtype
        return x.astype(dtype).swapaxes(1, 2)

    keys_before_and_after = None
    if causal and window is not None:
        keys_before_and_after = (window - 1, 0)  # JAX's windows exclude the query's own position
    # JAX's function computes its softmax in float32, and relies on promotion.
    with jax.numpy_dtype_promotion("standard"):
        heads = jax.nn.dot_product_attention(
            time_before_heads(query),
            time_before_heads(key),
            time_before_heads(value),
            scale=scale,
            is_causal=causal,
            local_window_size=keys_before_and_after,
            implementation=implementation,
        )
    return heads.swapaxes(1, 2)


@typed
def attend_over_cache(
    query: Float[Array, "{cache.batch} heads time {cache.head_dim}"],
    cache: LayerCache,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "{cache.batch} heads time {cache.head_dim}"]:
    """Attend from the newest positions over a KV cache, in blocks of queries.

    If the new positions fill the cache, a block skips the keys after it and before the window.
    """
    heads, time, head_dim = query.shape[1:]
    groups = query_groups(heads, cache.num_kv_heads)
    mask = cache.mask(time, window)
    at_most_eight = -(-time // MAX_QUERY_BLOCKS)  # rounded up
    block_size = max(MIN_QUERY_BLOCK, at_most_eight)
    # If these positions fill the buffer, they are in order. Otherwise all of it is read, since XLA
    # would copy a slice of the filled part, which was no faster.
    in_order = time == cache.capacity
    # The cache has batch and heads in one axis: batch*num_kv_heads groups time head_dim.
    query = query.reshape(-1, groups, time, head_dim).astype(cache.keys.dtype)
    # Mapped over the rows of batch*num_kv_heads, since each has its own mask.
    attend_rows = jax.vmap(functools.partial(attend, scale=scale))
    blocks = []
    # Not a range of steps: in a proof, where `time` has no number, each start becomes a branch.
    for i in range(MAX_QUERY_BLOCKS):
        start = i * block_size
        if start >= time:
            break
        end = min(start + block_size, time)
        keys = slice(None)
        if in_order:
            first = 0
            if window is not None:
                # every key that the block's first query attends to
                first = max(0, start + 1 - window)
            keys = slice(first, end)
        # Query heads that share a key-value head are folded into the time axis: one product of more
        # rows instead of a copy of the keys for each head.
        queries = query[:, :, start:end].reshape(query.shape[0], -1, head_dim)
        tiled_mask = jnp.tile(mask[:, start:end, keys], (1, groups, 1))  # batch groups*query key
        attended = attend_rows(
            queries,
            cache.keys[:, keys],
            cache.values[:, keys],
            jnp.repeat(tiled_mask, cache.num_kv_heads, axis=0),
        )
        blocks.append(attended.reshape(query.shape[0], groups, end - start, head_dim))
    attended = jnp.concatenate(blocks, axis=2)  # batch*num_kv_heads groups time head_dim
    return attended.reshape(-1, heads, time, head_dim)
