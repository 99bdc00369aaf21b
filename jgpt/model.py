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
    rotate,
    split_heads,
    write_to_cache,
)
from jgpt.config import Activation, ModelConfig, NormKind
from jgpt.contracts import check, typed
from jgpt.layers import INIT_STD, Embedding, LayerNorm, Linear, RMSNorm, project, rms_normed

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, section 4
}

KeyValueCache = PyTree[Float[Array, "batch heads places head_dim"]]
"""For each layer, the keys and the values of the positions that were read already."""


class _Attention(nnx.Module):
    """What one head and many share: whom a query may look at."""

    embed_dim: int
    causal: bool
    rotary: bool
    qk_norm: bool
    dropout: float

    @typed
    def _placed(
        self,
        x: Float[Array, "*batch time head_dim"],
        position: Int[Array, " time"] | None = None,
    ) -> Float[Array, "*batch time head_dim"]:
        """Queries or keys as affinities take them: normed, and turned by where they stand."""
        if self.qk_norm:
            x = rms_normed(x, 1e-6).astype(x.dtype)
        if self.rotary:
            x = rotate(x, jnp.arange(x.shape[-2]) if position is None else position)
        return x

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
        rotary: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim, self.head_dim = embed_dim, head_dim
        self.causal, self.dropout = causal, dropout
        self.rotary, self.qk_norm, self.scale = rotary, qk_norm, scale
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
            self._placed(self.query(x)),
            self._placed(self.key(source)),
            self.value(source),
            self._mask(x, context),
            scale=self.scale,
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
        return attention_weights(
            self._placed(self.query(x)),
            self._placed(self.key(source)),
            self._mask(x, context),
            scale=self.scale,
        )


class MultiHeadAttention(_Attention):
    """All heads in one computation, side by side, projected back ("Attention", section 3.2.2)."""

    @typed
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = True,
        qkv_bias: bool = False,
        use_bias: bool = True,
        rotary: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must be divisible by num_kv_heads={num_kv_heads}"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.causal, self.dropout = causal, dropout
        self.rotary, self.qk_norm, self.scale = rotary, qk_norm, scale
        self.dtype, self.param_dtype = dtype, param_dtype
        linear = functools.partial(
            Linear, embed_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query = linear(embed_dim, use_bias=qkv_bias)
        self.key = linear(num_kv_heads * self.head_dim, use_bias=qkv_bias)
        self.value = linear(num_kv_heads * self.head_dim, use_bias=qkv_bias)
        self.projection = linear(embed_dim, use_bias=use_bias, init_std=projection_std)

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
                self._placed(split_heads(self.query(x), self.num_heads)),
                self._shared(self._placed(split_heads(self.key(source), self.num_kv_heads))),
                self._shared(split_heads(self.value(source), self.num_kv_heads)),
                self._mask(x, context),
                scale=self.scale,
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
            self._placed(split_heads(self.query(x), self.num_heads)),
            self._shared(self._placed(split_heads(self.key(source), self.num_kv_heads))),
            self._mask(x, context),
            scale=self.scale,
        )

    @typed
    def _shared(
        self, x: Float[Array, "*batch {self.num_kv_heads} key value_dim"]
    ) -> Float[Array, "*batch {self.num_heads} key value_dim"]:
        """Keys or values for each query head: each is read by a group (Ainslie et al. 2023)."""
        groups = self.num_heads // self.num_kv_heads
        return x if groups == 1 else jnp.repeat(x, groups, axis=-3)

    @typed
    def continued(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        position: Int[Array, "batch time"],
        keys: Float[Array, "batch {self.num_kv_heads} places {self.head_dim}"],
        values: Float[Array, "batch {self.num_kv_heads} places {self.head_dim}"],
    ) -> tuple[
        Float[Array, "batch time {self.embed_dim}"],
        Float[Array, "batch {self.num_kv_heads} places {self.head_dim}"],
        Float[Array, "batch {self.num_kv_heads} places {self.head_dim}"],
    ]:
        """The same for new positions, one after the other, that join a cache and read it."""

        @jax.vmap
        @typed
        def row(
            query: Float[Array, "heads time head_dim"],
            key: Float[Array, "kv_heads time head_dim"],
            value: Float[Array, "kv_heads time head_dim"],
            position: Int[Array, " time"],
            keys: Float[Array, "kv_heads places head_dim"],
            values: Float[Array, "kv_heads places head_dim"],
        ) -> tuple[
            Float[Array, "heads time head_dim"],
            Float[Array, "kv_heads places head_dim"],
            Float[Array, "kv_heads places head_dim"],
        ]:
            keys = write_to_cache(keys, self._placed(key, position), position)
            values = write_to_cache(values, value, position)
            heads = attend(
                self._placed(query, position),
                self._shared(keys),
                self._shared(values),
                cache_mask(position, keys.shape[1]),
                scale=self.scale,
            )
            return heads, keys, values

        heads, keys, values = row(
            split_heads(self.query(x), self.num_heads),
            split_heads(self.key(x), self.num_kv_heads),
            split_heads(self.value(x), self.num_kv_heads),
            position,
            keys,
            values,
        )
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
            rotary=self.rotary,
            qk_norm=self.qk_norm,
            scale=self.scale,
            dropout=self.dropout,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=nnx.Rngs(0),
        )
        shared = index * self.num_kv_heads // self.num_heads
        for name, place in (("query", index), ("key", shared), ("value", shared)):
            mine, its = getattr(self, name), getattr(head, name)
            columns = slice(place * self.head_dim, (place + 1) * self.head_dim)
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
        num_kv_heads: int | None = None,
        causal: bool = True,
        qkv_bias: bool = False,
        use_bias: bool = True,
        rotary: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        norm: NormKind = "layer",
        norm_scale: bool = True,
        norm_epsilon: float = 1e-5,
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim = embed_dim
        make_norm = functools.partial(
            _norm, norm, embed_dim, norm_epsilon, norm_scale, use_bias, param_dtype
        )
        shared = {"dropout": dropout, "projection_std": projection_std, "dtype": dtype}
        self.attention_norm = make_norm()
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            causal=causal,
            qkv_bias=qkv_bias,
            use_bias=use_bias,
            rotary=rotary,
            qk_norm=qk_norm,
            scale=scale,
            param_dtype=param_dtype,
            rngs=rngs,
            **shared,
        )
        self.feed_forward_norm = make_norm()
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
        position: Int[Array, "batch time"],
        keys: Float[Array, "batch heads places head_dim"],
        values: Float[Array, "batch heads places head_dim"],
    ) -> tuple[
        Float[Array, "batch time {self.embed_dim}"],
        Float[Array, "batch heads places head_dim"],
        Float[Array, "batch heads places head_dim"],
    ]:
        """The same for new positions that join a cache and read it."""
        read, keys, values = self.attention.continued(
            self.attention_norm(x), position, keys, values
        )
        x = x + read
        return x + self.feed_forward(self.feed_forward_norm(x)), keys, values


@typed
def _norm(
    kind: NormKind,
    embed_dim: int,
    epsilon: float,
    use_scale: bool,
    use_bias: bool,
    param_dtype: DTypeLike,
) -> LayerNorm | RMSNorm:
    shared = {"epsilon": epsilon, "use_scale": use_scale, "param_dtype": param_dtype}
    if kind == "rms":
        return RMSNorm(embed_dim, **shared)
    return LayerNorm(embed_dim, use_bias=use_bias, **shared)


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
        self.slides = config.positions == "rotary"  # a cache goes on past block_size
        self.token_embedding = Embedding(
            config.vocab_size, config.embed_dim, param_dtype=config.param_dtype, rngs=rngs
        )
        self.position_embedding = (
            Embedding(
                config.block_size, config.embed_dim, param_dtype=config.param_dtype, rngs=rngs
            )
            if config.positions == "learned"
            else None
        )
        self.shortcut = (
            nnx.Param(jnp.zeros(config.num_layers, config.param_dtype))
            if config.embedding_shortcut
            else None
        )
        self.blocks = nnx.List(
            Block(
                config.embed_dim,
                config.num_heads,
                config.hidden_dim,
                activation=config.activation,
                num_kv_heads=config.num_kv_heads,
                qkv_bias=config.qkv_bias,
                use_bias=config.use_bias,
                rotary=config.positions == "rotary",
                qk_norm=config.qk_norm,
                scale=config.attention_scale,
                norm=config.norm,
                norm_scale=config.norm_scale,
                norm_epsilon=config.norm_epsilon,
                dropout=config.dropout,
                projection_std=0.0
                if config.zero_init
                else INIT_STD / math.sqrt(2 * config.num_layers),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = _norm(
            config.norm,
            config.embed_dim,
            config.norm_epsilon,
            config.norm_scale,
            config.use_bias,
            config.param_dtype,
        )
        self.head = (
            None
            if config.tie_embeddings
            else Linear(
                config.embed_dim,
                config.vocab_size,
                use_bias=config.head_bias,
                init_std=0.0 if config.zero_init else INIT_STD,
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
        x = embedded = self.embed(tokens, rngs=rngs)
        for layer, block in enumerate(self.blocks):
            x = run(block, self._with_shortcut(x, embedded, layer), rngs)
        return self.logits(self.final_norm(x))

    @typed
    def _with_shortcut(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        embedded: Float[Array, "batch time {self.embed_dim}"],
        layer: int,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        return x if self.shortcut is None else x + self.shortcut[layer].astype(x.dtype) * embedded

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
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(jnp.arange(time))
        # the residual stream is never below float32
        x = x.astype(jnp.promote_types(self.config.dtype, jnp.float32))
        return dropped(x, self.config.dropout, _dropout_key(rngs))

    @typed
    def empty_cache(self, batch: int) -> KeyValueCache:
        """A cache for `batch` sequences of up to `block_size` positions, none of them read yet."""
        heads = self.config.num_kv_heads or self.config.num_heads
        shape = (batch, heads, self.block_size, self.embed_dim // self.config.num_heads)
        zeros = jnp.zeros(shape, self.config.dtype)
        return tuple((zeros, zeros) for _ in self.blocks)

    @typed
    def continued(
        self,
        tokens: Int[Array, "batch time"],
        position: Int[Array, "batch time"],
        cache: KeyValueCache,
    ) -> tuple[Float[Array, "batch time {self.vocab_size}"], KeyValueCache]:
        """The logits of new tokens at positions one after the other, and the cache with them.

        Equal to the last logits of the whole sequence. Rotary positions may pass `block_size`:
        each token then reads the last `block_size`. For learned ones the caller keeps below it.
        """
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(position)
        x = embedded = x.astype(jnp.promote_types(self.config.dtype, jnp.float32))
        layers = []
        for layer, (block, (keys, values)) in enumerate(zip(self.blocks, cache, strict=True)):
            x = self._with_shortcut(x, embedded, layer)
            x, keys, values = block.continued(x, position, keys, values)
            layers.append((keys, values))
        return self.logits(self.final_norm(x)), tuple(layers)

    @typed
    def logits(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The language-model head, its logits softly capped if the config says so."""
        if self.head is not None:
            logits = self.head(x)
        else:
            logits = project(x, self.token_embedding.embedding[...].T, self.config.dtype)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class BigramLM(nnx.Module):
    """A table whose row of a token holds the logits of the next one, drawn from N(0, 1)."""

    block_size = 1  # it reads the last token alone, however many it is given
    slides = True

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
        self,
        tokens: Int[Array, "batch time"],
        position: Int[Array, "batch time"],
        cache: KeyValueCache,
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
