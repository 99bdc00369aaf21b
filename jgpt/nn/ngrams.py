"""Hashed n-gram embeddings."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt.config import ModelConfig
from jgpt.nn.layers import Embedding
from jgpt.nn.module import Module
from jgpt.shapes.contract import typed

# 2**32 divided by the golden ratio (Fibonacci hashing; Knuth, The Art of Computer Programming,
# volume 3, section 6.4): neighbouring tokens land far apart.
_MULTIPLIER = 0x9E3779B1


class NGramEmbedding(Module):
    """Hashed n-gram embeddings: the sum over sizes of the n-gram that ends at each position.

    For each size, the n-grams share `num_rows` rows through a hash. Before the start of the text
    the token is -1, which hashes like one more token (Pagnoni et al. 2024, section 3.2.1).
    """

    @typed
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.sizes = config.ngram_sizes
        self.num_rows = config.ngram_rows
        self.embed_dim = config.embed_dim
        # One table for all sizes: one look-up, and one array for the optimizer.
        rows = len(self.sizes) * self.num_rows
        self.table = Embedding(rows, self.embed_dim, param_dtype=config.param_dtype, rngs=rngs)

    @typed
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        documents: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Embed the n-grams that end at each position; -1 is a missing token.

        With the number of each token's document, the tokens of another one are missing.
        """
        embeddings = self.table(self.rows(tokens, documents))  # batch time sizes embed_dim
        return embeddings.sum(axis=-2)

    @typed
    def rows(
        self,
        tokens: Int[Array, "batch time"],
        documents: Int[Array, "batch time"] | None = None,
    ) -> Int[Array, "batch time {len(self.sizes)}"]:
        """Return the table row of each size's n-gram, by hash."""
        time = tokens.shape[1]
        longest = max(self.sizes)
        padding = ((0, 0), (longest - 1, 0))
        padded = jnp.pad(tokens, padding, constant_values=-1)  # batch longest-1+time
        # The hash of an n-gram is that of its last n - 1 tokens with one more mixed in, so a single
        # pass backwards makes the hashes of all sizes.
        hashed = jnp.zeros(tokens.shape, jnp.uint32)  # batch time
        rows = []
        for size in range(1, longest + 1):
            start = longest - size
            end = start + time
            earlier = padded[:, start:end]  # batch time: the token `size - 1` before
            if documents is not None:
                padded_documents = jnp.pad(documents, padding, mode="edge")
                document_of_earlier = padded_documents[:, start:end]
                earlier = jnp.where(document_of_earlier == documents, earlier, -1)
            symbol = (earlier + 1).astype(jnp.uint32)  # 0 is a missing token
            hashed = (hashed + symbol) * jnp.uint32(_MULTIPLIER)
            # High bits are folded into low ones; otherwise the remainder below would depend only on
            # the low bits.
            hashed = hashed ^ (hashed >> 15)
            if size in self.sizes:
                remainder = hashed % jnp.uint32(self.num_rows)
                # The rows of each size follow those of the sizes before.
                offset = len(rows) * self.num_rows
                rows.append(offset + remainder.astype(jnp.int32))
        return jnp.stack(rows, axis=-1)  # batch time sizes
