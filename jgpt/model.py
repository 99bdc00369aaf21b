"""The whole transformer: Head, MultiHeadAttention, FeedForward, Block, GPT, and a bigram.

Modules hold parameters only. `module(x)` is evaluation; `module(x, rngs=nnx.Rngs(dropout=key))`
is training. Models map tokens to logits; the loss is a function beside them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jgpt.attention import (
    attend,
    attention_weights,
    cache_mask,
    causal_mask,
    dropped,
    merge_heads,
    split_heads,
    write_to_cache,
)
from jgpt.config import Activation, ModelConfig
from jgpt.contracts import check, typed
from jgpt.layers import INIT_STD, Embedding, LayerNorm, Linear, project

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

KeyValueCache = PyTree[Float[Array, "batch heads positions head_dim"]]
"""For each layer, the keys and the values of the positions that were read already."""


class _Attention(nnx.Module):
    """What one head and many share: whom a query may look at."""

    embed_dim: int
    causal: bool
    dropout: float

    @typed
    def _source_length(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None,
    ) -> int:
        return (x if context is None else context).shape[1]

    @typed
    def _mask(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None,
    ) -> Bool[Array, "time time"] | None:
        # no mask where there is no order: across sequences, or when the future may be seen
        return causal_mask(x.shape[1]) if self.causal and context is None else None


class Head(_Attention):
    """One attention head; over `x` itself, or from `x` to a context of another length.

    "Attention Is All You Need", section 3.2.1. Kernels are (in, out).
    """

    @typed
    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        *,
        causal: bool = True,
        use_bias: bool = False,
        dropout: float = 0.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim, self.head_dim = embed_dim, head_dim
        self.causal, self.dropout = causal, dropout
        linear = functools.partial(
            Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query = linear(embed_dim, head_dim)
        self.key = linear(embed_dim, head_dim)
        self.value = linear(embed_dim, head_dim)

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.head_dim}"]:
        """Each position's mean of the values it may see, weighted."""
        source = x if context is None else context
        return attend(
            self.query(x),
            self.key(source),
            self.value(source),
            self._mask(x, context),
            dropout=self.dropout,
            dropout_key=_dropout_key(rngs),
        )

    @typed
    def weights(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
    ) -> Float[Array, "batch time {self._source_length(x,context)}"]:
        """How much each position of `x` reads from each of the source's."""
        source = x if context is None else context
        return attention_weights(self.query(x), self.key(source), self._mask(x, context))


class MultiHeadAttention(_Attention):
    """All heads in one computation, side by side, projected back ("Attention", section 3.2.2)."""

    @typed
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        causal: bool = True,
        qkv_bias: bool = False,
        use_bias: bool = True,
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={num_heads}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.causal, self.dropout = causal, dropout
        self.dtype, self.param_dtype = dtype, param_dtype
        linear = functools.partial(
            Linear, embed_dim, embed_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query = linear(use_bias=qkv_bias)
        self.key = linear(use_bias=qkv_bias)
        self.value = linear(use_bias=qkv_bias)
        self.projection = linear(use_bias=use_bias, init_std=projection_std)

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """What all heads gather, projected; dropped out in training."""
        source = x if context is None else context
        heads = check(
            attend(
                split_heads(self.query(x), self.num_heads),
                split_heads(self.key(source), self.num_heads),
                split_heads(self.value(source), self.num_heads),
                self._mask(x, context),
                dropout=self.dropout,
                dropout_key=_dropout_key(rngs),
            ),
            Float[Array, "batch {self.num_heads} time {self.head_dim}"],
        )
        return dropped(self.projection(merge_heads(heads)), self.dropout, _dropout_key(rngs))

    @typed
    def weights(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
    ) -> Float[Array, "batch {self.num_heads} time {self._source_length(x,context)}"]:
        """Each head's attention weights."""
        source = x if context is None else context
        return attention_weights(
            split_heads(self.query(x), self.num_heads),
            split_heads(self.key(source), self.num_heads),
            self._mask(x, context),
        )

    @typed
    def continued(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        start: Int[Array, " batch"],
        keys: Float[Array, "batch {self.num_heads} positions {self.head_dim}"],
        values: Float[Array, "batch {self.num_heads} positions {self.head_dim}"],
    ) -> tuple[
        Float[Array, "batch time {self.embed_dim}"],
        Float[Array, "batch {self.num_heads} positions {self.head_dim}"],
        Float[Array, "batch {self.num_heads} positions {self.head_dim}"],
    ]:
        """The same for new positions, from each row's `start` on, that read a cache and join it."""
        keys = write_to_cache(keys, split_heads(self.key(x), self.num_heads), start)
        values = write_to_cache(values, split_heads(self.value(x), self.num_heads), start)
        mask = cache_mask(start, x.shape[1], keys.shape[2])
        heads = attend(split_heads(self.query(x), self.num_heads), keys, values, mask)
        return self.projection(merge_heads(heads)), keys, values

    @typed
    def head(self, index: int) -> Head:
        """The `Head` that computes what this module's head `index` computes, parameters copied."""
        if not 0 <= index < self.num_heads:
            raise ValueError(f"head {index} is not one of the {self.num_heads} heads, from 0 on")
        head = Head(
            self.embed_dim,
            self.head_dim,
            causal=self.causal,
            use_bias=self.query.bias is not None,
            dropout=self.dropout,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=nnx.Rngs(0),
        )
        columns = slice(index * self.head_dim, (index + 1) * self.head_dim)
        for name in ("query", "key", "value"):
            mine, its = getattr(self, name), getattr(head, name)
            its.kernel[...] = mine.kernel[:, columns]
            if mine.bias is not None and its.bias is not None:
                its.bias[...] = mine.bias[columns]
        return head


class FeedForward(nnx.Module):
    """Two projections with a non-linearity between, each position for itself (section 3.3)."""

    @typed
    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int | None = None,
        *,
        activation: Activation = "gelu",
        use_bias: bool = True,
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim = embed_dim
        self.hidden_dim = 4 * embed_dim if hidden_dim is None else hidden_dim
        self.activation, self.dropout = activation, dropout
        linear = functools.partial(
            Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.expansion = linear(embed_dim, self.hidden_dim)
        self.projection = linear(self.hidden_dim, embed_dim, init_std=projection_std)

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Each position's features, thought over."""
        hidden = check(
            ACTIVATIONS[self.activation](self.expansion(x)),
            Float[Array, "batch time {self.hidden_dim}"],
        )
        return dropped(self.projection(hidden), self.dropout, _dropout_key(rngs))


class Block(nnx.Module):
    """Communication, then computation: pre-norm attention and feed-forward, both residual.

    Pre-norm is GPT-2's order (Radford et al. 2019, section 2.3).
    """

    @typed
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden_dim: int | None = None,
        *,
        activation: Activation = "gelu",
        causal: bool = True,
        qkv_bias: bool = False,
        use_bias: bool = True,
        norm_epsilon: float = 1e-5,
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim = embed_dim
        norm = functools.partial(
            LayerNorm, embed_dim, epsilon=norm_epsilon, use_bias=use_bias, param_dtype=param_dtype
        )
        shared = {"dropout": dropout, "projection_std": projection_std, "dtype": dtype}
        self.attention_norm = norm()
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            causal=causal,
            qkv_bias=qkv_bias,
            use_bias=use_bias,
            param_dtype=param_dtype,
            rngs=rngs,
            **shared,
        )
        self.feed_forward_norm = norm()
        self.feed_forward = FeedForward(
            embed_dim,
            hidden_dim,
            activation=activation,
            use_bias=use_bias,
            param_dtype=param_dtype,
            rngs=rngs,
            **shared,
        )

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """The residual stream, both branches added."""
        x = x + self.attention(self.attention_norm(x), rngs=rngs)
        return x + self.feed_forward(self.feed_forward_norm(x), rngs=rngs)

    @typed
    def continued(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        start: Int[Array, " batch"],
        keys: Float[Array, "batch heads positions head_dim"],
        values: Float[Array, "batch heads positions head_dim"],
    ) -> tuple[
        Float[Array, "batch time {self.embed_dim}"],
        Float[Array, "batch heads positions head_dim"],
        Float[Array, "batch heads positions head_dim"],
    ]:
        """The same for new positions that read a cache and join it."""
        read, keys, values = self.attention.continued(self.attention_norm(x), start, keys, values)
        x = x + read
        return x + self.feed_forward(self.feed_forward_norm(x)), keys, values


class GPT(nnx.Module):
    """Tokens to the logits of each next token.

    Initialised as GPT-2 is: N(0, 0.02), and the projections that write into the residual stream
    divided by sqrt(2 * num_layers) (Radford et al. 2019, section 2.3).
    """

    @typed
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.vocab_size, self.embed_dim = config.vocab_size, config.embed_dim
        self.block_size = config.block_size
        self.token_embedding = Embedding(
            config.vocab_size, config.embed_dim, param_dtype=config.param_dtype, rngs=rngs
        )
        self.position_embedding = Embedding(
            config.block_size, config.embed_dim, param_dtype=config.param_dtype, rngs=rngs
        )
        self.blocks = nnx.List(
            Block(
                config.embed_dim,
                config.num_heads,
                config.hidden_dim,
                activation=config.activation,
                qkv_bias=config.qkv_bias,
                use_bias=config.use_bias,
                norm_epsilon=config.norm_epsilon,
                dropout=config.dropout,
                projection_std=INIT_STD / math.sqrt(2 * config.num_layers),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = LayerNorm(
            config.embed_dim,
            epsilon=config.norm_epsilon,
            use_bias=config.use_bias,
            param_dtype=config.param_dtype,
        )
        self.head = (
            None
            if config.tie_embeddings
            else Linear(
                config.embed_dim,
                config.vocab_size,
                use_bias=config.head_bias,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )
        )

    @typed
    def __call__(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The logits of each position's next token. Raises ValueError past `block_size`."""

        def through(block, x, rngs):  # a subclass has a call of its own
            return block(x, rngs=rngs)

        run = nnx.remat(through) if self.config.rematerialise else through
        x = self.embed(tokens, rngs=rngs)
        for block in self.blocks:
            x = run(block, x, rngs)
        return self.logits(self.final_norm(x))

    @typed
    def embed(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """What each token is plus where it stands. Raises ValueError past `block_size`."""
        time = tokens.shape[1]
        if time > self.block_size:
            raise ValueError(
                f"{time} tokens are more than block_size={self.block_size}: "
                "crop the input to its last block_size tokens"
            )
        x = self._embedded(tokens, jnp.arange(time))
        return dropped(x, self.config.dropout, _dropout_key(rngs))

    @typed
    def _embedded(
        self, tokens: Int[Array, "batch time"], position: Int[Array, "*#batch time"]
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        x = self.token_embedding(tokens) + self.position_embedding(position)
        # the residual stream is never below float32
        return x.astype(jnp.promote_types(self.config.dtype, jnp.float32))

    @typed
    def empty_cache(self, batch: int) -> KeyValueCache:
        """A cache for `batch` sequences of up to `block_size` positions, none of them read yet."""
        heads = self.config.num_heads
        shape = (batch, heads, self.block_size, self.embed_dim // heads)
        zeros = jnp.zeros(shape, self.config.dtype)
        return tuple((zeros, zeros) for _ in self.blocks)

    @typed
    def continued(
        self, tokens: Int[Array, "batch time"], start: Int[Array, " batch"], cache: KeyValueCache
    ) -> tuple[Float[Array, "batch time {self.vocab_size}"], KeyValueCache]:
        """The logits of new tokens, from each row's position `start` on, and the cache with them.

        Equal to the last logits of the whole sequence. The caller keeps below `block_size`.
        """
        x = self._embedded(tokens, start[:, None] + jnp.arange(tokens.shape[1]))
        layers = []
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x, keys, values = block.continued(x, start, keys, values)
            layers.append((keys, values))
        return self.logits(self.final_norm(x)), tuple(layers)

    @typed
    def logits(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The language-model head."""
        if self.head is not None:
            return self.head(x)
        return project(x, self.token_embedding.embedding[...].T, self.config.dtype)


class BigramLM(nnx.Module):
    """A table whose row of a token holds the logits of the next one, drawn from N(0, 1)."""

    block_size = 1  # it reads the last token alone, however many it is given

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
    def empty_cache(self, batch: int) -> KeyValueCache:
        """Nothing: a bigram remembers nothing."""
        return ()

    @typed
    def continued(
        self, tokens: Int[Array, "batch time"], start: Int[Array, " batch"], cache: KeyValueCache
    ) -> tuple[Float[Array, "batch time {self.vocab_size}"], KeyValueCache]:
        """Each token's row, and nothing to remember."""
        return self.table(tokens), cache


LanguageModel = GPT | BigramLM


@typed
def create_model(config: ModelConfig, *, rngs: nnx.Rngs) -> LanguageModel:
    """The model that a config describes."""
    if config.architecture == "bigram":
        return BigramLM(config.vocab_size, param_dtype=config.param_dtype, rngs=rngs)
    return GPT(config, rngs=rngs)


@typed
def abstract_model(config: ModelConfig) -> LanguageModel:
    """The same without its numbers: shapes and dtypes to count, or to restore into."""
    return nnx.eval_shape(lambda: create_model(config, rngs=nnx.Rngs(0)))


@typed
def _dropout_key(rngs: nnx.Rngs | None) -> Key[Array, ""] | None:
    return None if rngs is None else rngs.dropout()
