"""Hashed n-gram embeddings."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jgpt.contracts import typed
from jgpt.nn.layers import INIT_STD, Embedding
from jgpt.nn.module import Module


class NGramEmbedding(Module):
    """Hashed n-gram embeddings: the sum over sizes of the n-gram that ends at each position.

    N-grams share `num_rows` rows per size through a hash. Before the start of the text the token
    is -1, which hashes like one more token (Pagnoni et al. 2024, section 3.2.1).
    """

    @typed
    def __init__(
        self,
        sizes: tuple[int, ...],
        num_rows: int,
        embed_dim: int,
        *,
        init_std: float = INIT_STD,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if not sizes or list(sizes) != sorted({size for size in sizes if size > 0}):
            raise ValueError(f"sizes={sizes} must be positive and ascending")
        self.sizes, self.num_rows, self.embed_dim = sizes, num_rows, embed_dim
        self.table = Embedding(
            len(sizes) * num_rows, embed_dim, init_std=init_std, param_dtype=param_dtype, rngs=rngs
        )

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
        mixed = jnp.zeros(tokens.shape, jnp.uint32)
        rows = []
        for size in range(1, longest + 1):
            ago = padded[:, longest - size : padded.shape[1] - size + 1]
            # Fibonacci hashing: multiply by 2**32 / golden ratio, then fold high bits into low ones
            mixed = (mixed + (ago + 1).astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
            mixed = mixed ^ (mixed >> 15)
            if size in self.sizes:
                row = (mixed % jnp.uint32(self.num_rows)).astype(jnp.int32)
                rows.append(len(rows) * self.num_rows + row)
        return jnp.stack(rows, axis=-1)
