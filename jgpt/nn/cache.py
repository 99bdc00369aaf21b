"""The KV cache: append, positions, mask."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from jgpt.nn.module import Module
from jgpt.shapes.contract import typed
from jgpt.words import counted


class LayerCache(Module):
    """The KV cache of one layer: a ring buffer that is updated in place.

    Sequences are left-padded to a common end. Slot s of a sequence is at index s modulo the
    buffer's size, and the newest slot is `end - 1`. With n slots of padding, a sequence's length
    starts at -n.
    """

    @typed
    def __init__(
        self,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.batch = batch
        self.capacity = capacity
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        # Batch and heads share an axis, since XLA copies a cache with an axis of size 1 at each
        # write.
        shape = (batch * num_kv_heads, capacity, head_dim)
        self.keys = nnx.Cache(jnp.zeros(shape, dtype))
        self.values = nnx.Cache(jnp.zeros(shape, dtype))
        # Two counts: `length` is without padding, for each sequence; `end` includes it and is
        # common to all.
        self.length = nnx.Cache(jnp.zeros(batch, jnp.int32))
        self.end = nnx.Cache(jnp.zeros((), jnp.int32))

    @typed
    def positions(
        self, new: Shaped[Array, "{self.batch} time *features"]
    ) -> Int[Array, "{self.batch} time"]:
        """Return the positions of the next tokens in their sequences; negative for left padding."""
        first = self.length[...][:, None]  # batch 1
        return first + jnp.arange(new.shape[1])[None]

    @typed
    def append(
        self,
        key: Float[Array, "{self.batch} {self.num_kv_heads} time {self.head_dim}"],
        value: Float[Array, "{self.batch} {self.num_kv_heads} time {self.head_dim}"],
    ) -> None:
        """Append keys and values; a single position replaces the oldest one of a full buffer.

        Raises ValueError for several positions that don't fit. Under a trace, where the number of
        cached positions is unknown, only those that an empty buffer has no room for are noticed.
        """
        time = key.shape[2]
        self._require_room(time)
        start = self.end[...] % self.capacity
        for buffer, new in ((self.keys, key), (self.values, value)):
            # batch*num_kv_heads time head_dim
            rows = new.reshape(-1, time, self.head_dim).astype(buffer.dtype)
            # JAX moves a slice that would pass the end, so under a trace callers append only up to
            # the end.
            updated = jax.lax.dynamic_update_slice_in_dim(buffer[...], rows, start, axis=1)
            buffer[...] = updated
        self.length[...] = self.length[...] + time
        self.end[...] = self.end[...] + time

    @typed
    def _require_room(self, time: int) -> None:
        """Raise ValueError for positions that would pass the end or replace keys of one another."""
        length = self.length.get_value()
        cached = 0
        start = 0
        if not isinstance(length, Tracer):
            cached = int(np.asarray(length).max())
            start = int(self.end.get_value()) % self.capacity
        if max(cached, start) + time > self.capacity and time > 1:
            raise ValueError(
                f"{time} positions don't fit into a KV cache of `capacity` {self.capacity} that "
                f"has {cached}: make a larger one, or append one position at a time"
            )

    @typed
    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions, before the buffer wraps around."""
        more = capacity - self.capacity
        for buffer in (self.keys, self.values):
            # At the end: before the buffer wraps around, slot s is at index s.
            padded = jnp.pad(buffer[...], ((0, 0), (0, more), (0, 0)))
            buffer.set_value(padded)  # its shape differs, so it can't be written in place
        self.capacity = capacity

    @typed
    def mask(
        self, time: int, window: int | None = None
    ) -> Bool[Array, "{self.batch} {time} {self.capacity}"]:
        """Return True where one of the last `time` queries (row) may attend to a cached key
        (column)."""
        capacity = self.capacity
        newest = self.end[...] - 1
        # Slots count all positions ever appended, and indices those of the buffer. The key at an
        # index is the newest one whose slot has that remainder.
        age = (newest - jnp.arange(capacity)[None]) % capacity  # 1 capacity: 0 for the newest key
        slot = newest - age  # 1 capacity
        first_query = newest + 1 - time
        query = first_query + jnp.arange(time)[:, None]  # time 1
        is_past = slot <= query  # time capacity
        # Left padding and unwritten slots lie before a sequence's first slot.
        last_before = newest - self.length[...][:, None, None]  # batch 1 1
        has_begun = slot[None] > last_before  # batch 1 capacity
        mask = is_past[None] & has_begun  # batch time capacity
        if window is None:
            return mask
        in_window = slot > query - window  # time capacity
        return mask & in_window[None]


class KVCache(Module):
    """The KV caches of a model's layers, and the last tokens, which n-grams need."""

    @typed
    def __init__(self, layers: tuple[LayerCache, ...], *, batch: int, lookback: int = 0) -> None:
        self.layers = nnx.List(layers)
        self.batch = batch
        self.lookback = lookback
        self.tokens = nnx.Cache(jnp.full((batch, lookback), -1, jnp.int32))

    @typed
    def set_lengths(self, length: Int[Array, "{self.batch}"]) -> None:
        """Set the lengths of an empty cache: -n for a sequence with n tokens of left padding."""
        for layer in self.layers:
            layer.length[...] = length

    @typed
    def require_room(self, time: int, block_size: int, *, rolls: bool) -> None:
        """Raise ValueError if `time` more tokens don't fit into the cache and the block.

        If it `rolls`, a full cache of a whole block takes one token at a time, in place of the
        oldest one. Under a trace, where lengths are unknown, nothing is raised.
        """
        first = self.layers[0]  # all layers have the same positions
        length = first.length.get_value()
        if isinstance(length, Tracer) or (rolls and time == 1 and first.capacity == block_size):
            return
        cached = int(np.asarray(length).max())
        if cached + time > min(first.capacity, block_size):
            raise ValueError(
                f"{counted(time, 'token')} after {cached} don't fit into a KV cache of `capacity` "
                f"{first.capacity} and `block_size` {block_size}: a cache of `block_size` "
                "positions takes one token at a time past its end, if positions are rotary"
            )

    @typed
    def append_tokens(
        self, tokens: Int[Array, "{self.batch} time"]
    ) -> Int[Array, "{self.batch} {self.lookback}+time"]:
        """Return `tokens` with the `lookback` tokens before them; -1 for padding.

        Call this before the layers append.
        """
        # All layers have the same positions, and n-grams treat padding as missing tokens.
        has_begun = self.layers[0].positions(tokens) >= 0  # batch time
        tokens = jnp.where(has_begun, tokens, -1)
        earlier = self.tokens[...].astype(tokens.dtype)  # batch lookback
        known = jnp.concatenate([earlier, tokens], axis=1)
        # The last `lookback` tokens, even if fewer are appended.
        self.tokens[...] = known[:, tokens.shape[1] :].astype(jnp.int32)
        return known
