"""The lecture's first language model: what comes next, from the last token alone."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jgpt.contracts import typed
from jgpt.layers import Embedding, Module


class BigramLM(Module):
    """A table whose row of a token holds the logits of the next one, drawn from N(0, 1)."""

    block_size = 1  # it reads the last token alone, however many it is given
    slides = True
    lookback = 0

    @typed
    def __init__(
        self,
        vocab_size: int,
        *,
        init_std: float = 1.0,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.vocab_size = vocab_size
        self.table = Embedding(
            vocab_size, vocab_size, init_std=init_std, param_dtype=param_dtype, rngs=rngs
        )

    @typed
    def __call__(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """Each token's row; `rngs` is there for the interface alone."""
        return self.table(tokens)

    @typed
    def hidden(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """Each token's row, which its logits are already."""
        return self.table(tokens)

    @typed
    def logits(
        self, x: Float[Array, "batch time {self.vocab_size}"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The same: there is no head on top of the table."""
        return x

    @typed
    def empty_cache(self, batch: int) -> tuple[()]:
        """Nothing: a bigram remembers nothing."""
        return ()

    @typed
    def continued(
        self,
        tokens: Int[Array, "batch time"],
        length: Int[Array, " batch"],
        cache: tuple[()],
        before: Int[Array, "batch {self.lookback}"] | None = None,
    ) -> tuple[Float[Array, "batch {self.vocab_size}"], tuple[()]]:
        """The last token's row, and nothing to remember."""
        return self.table(tokens[:, -1]), cache
