"""Hashed n-gram embeddings."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt.config import ModelConfig
from jgpt.nn.layers import Embedding
from jgpt.nn.module import Module
from jgpt.shapes.contract import typed


class NGramEmbedding(Module):
    """Hashed n-gram embeddings: the sum over sizes of the n-gram that ends at each position.

    N-grams share `num_rows` rows per size through a hash. Before the start of the text the token
    is -1, which hashes like one more token (Pagnoni et al. 2024, section 3.2.1).
    """

    @typed
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.sizes = config.ngram_sizes
        self.num_rows = config.ngram_rows
        self.embed_dim = config.embed_dim
        rows = len(self.sizes) * self.num_rows
        self.table = Embedding(rows, self.embed_dim, param_dtype=config.param_dtype, rngs=rngs)

    @typed
    def __call__(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Embed the n-grams that end at each position; -1 is a missing token."""
        return self.table(self.rows(tokens)).sum(axis=-2)

    @typed
    def rows(self, tokens: Int[Array, "batch time"]) -> Int[Array, "batch time {len(self.sizes)}"]:
        """The table row of each size's n-gram, by hash."""
        longest = max(self.sizes)
        padded = jnp.pad(tokens, ((0, 0), (longest - 1, 0)), constant_values=-1)
        # The hash of an n-gram is that of the last n - 1 tokens, with one more mixed in: one pass
        # backwards makes those of all sizes.
        hashed = jnp.zeros(tokens.shape, jnp.uint32)  # batch time
        rows = []
        for size in range(1, longest + 1):
            # the token `size - 1` before each position
            earlier = padded[:, longest - size : padded.shape[1] - size + 1]
            # Fibonacci hashing: multiply by 2**32 / golden ratio, then fold high bits into low ones
            hashed = (hashed + (earlier + 1).astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
            hashed = hashed ^ (hashed >> 15)
            if size in self.sizes:
                row = (hashed % jnp.uint32(self.num_rows)).astype(jnp.int32)
                # the rows of each size lie behind those of the sizes before
                rows.append(len(rows) * self.num_rows + row)
        return jnp.stack(rows, axis=-1)
