"""The bigram language model: next-token logits from the last token alone."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jgpt.nn.cache import KVCache
from jgpt.nn.layers import Embedding
from jgpt.nn.module import Module, describe_model
from jgpt.parallel.rules import shard_by_name
from jgpt.shapes.contract import typed


class BigramLM(Module):
    """A table of next-token logits, initialised from N(0, 1)."""

    block_size = 1
    """The context is one token."""
    supports_rolling_cache = True
    """Any number of tokens can be decoded."""

    @typed
    def __init__(
        self, vocab_size: int, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.vocab_size = vocab_size
        self.table = Embedding(
            vocab_size, vocab_size, init_std=1.0, param_dtype=param_dtype, rngs=rngs
        )

    def __repr__(self) -> str:
        return describe_model(self)

    @typed
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """Return next-token logits; `cache` and `rngs` are unused."""
        return self.logits(self.hidden(tokens))

    @typed
    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.table.embed_dim}"]:
        """Return each token's row of the table."""
        return self.table(tokens)

    @typed
    def logits(
        self, x: Float[Array, "batch time {self.table.embed_dim}"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """Return `x` unchanged, since the rows are logits already."""
        return shard_by_name(x, "batch", "time", "vocab_size")

    @typed
    def empty_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """Return a KV cache without layers."""
        return KVCache((), batch=batch)
