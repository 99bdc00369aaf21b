"""The transformer: feed-forward network, block, GPT.

Modules hold parameters only. `module(x)` is evaluation; `module(x, rngs=nnx.Rngs(dropout=key))`
is training; after `train()`, dropout without `rngs` is an error. Models map tokens to logits; the
loss is a function beside them.
"""

import functools
import math
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jgpt.config import Activation, AttentionKernel, ModelConfig, NormKind
from jgpt.contracts import check, typed
from jgpt.nn.cache import KVCache, LayerCache
from jgpt.nn.heads import MultiHeadAttention
from jgpt.nn.layers import (
    INIT_STD,
    Embedding,
    Linear,
    Module,
    NGramEmbedding,
    ToVocabulary,
    apply_dropout,
    make_norm,
    project,
    project_to_vocabulary,
)
from jgpt.nn.precision import ANYWHERE, for_platform
from jgpt.sharding import placed, stacked, with_gathered

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, section 4
}


SAME_NAMES = (
    "activation", "gated", "num_kv_heads", "head_dim", "qkv_bias", "use_bias", "rotary_base",
    "qk_norm", "qk_norm_scale", "norm", "norm_scale", "norm_epsilon", "dropout", "attention_kernel",
    "dtype", "activation_dtype", "param_dtype",
)  # fmt: skip
"""A block's parameters that are fields of a config."""


class FeedForward(Module):
    """Position-wise MLP (Vaswani et al. 2017, section 3.3), gated or not (Shazeer 2020).

    Dropout needs the call's `rngs`; after `train()`, a call without them raises ValueError.
    """

    @typed
    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int | None = None,
        *,
        activation: Activation = "gelu",
        gated: bool = False,
        use_bias: bool = True,
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        dtype: DTypeLike = jnp.float32,
        activation_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim = embed_dim
        self.hidden_dim = 4 * embed_dim if hidden_dim is None else hidden_dim
        self.activation, self.dropout = activation, dropout
        linear = functools.partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            activation_dtype=activation_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        sizes, names = (embed_dim, self.hidden_dim), ("embed_dim", "hidden_dim")
        self.expansion = linear(*sizes, dimensions=names)
        self.gate = linear(*sizes, dimensions=names) if gated else None
        self.projection = linear(*sizes[::-1], init_std=projection_std, dimensions=names[::-1])

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Apply the MLP to each position."""
        activate, hidden = ACTIVATIONS[self.activation], self.expansion(x)
        hidden = activate(hidden) if self.gate is None else activate(self.gate(x)) * hidden
        check(hidden, Float[Array, "batch time {self.hidden_dim}"])
        y = self.projection(hidden)
        return apply_dropout(y, self.dropout, self.next_dropout_key(rngs, self.dropout))


class Block(Module):
    """Transformer block: pre-norm attention and MLP with residual connections.

    Pre-norm as in GPT-2 (Radford et al. 2019, section 2.3). Dropout needs the call's `rngs`; after
    `train()`, a call without them raises ValueError.
    """

    @typed
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden_dim: int | None = None,
        *,
        activation: Activation = "gelu",
        gated: bool = False,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        qkv_bias: bool = False,
        use_bias: bool = True,
        rotary: bool = False,
        rotary_base: float = 10_000.0,
        qk_norm: bool = False,
        qk_norm_scale: bool = False,
        scale: float | None = None,
        norm: NormKind = "layer",
        norm_scale: bool = True,
        norm_epsilon: float = 1e-5,
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        attention_kernel: AttentionKernel = "xla",
        dtype: DTypeLike = jnp.float32,
        activation_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim = embed_dim
        new_norm = functools.partial(
            make_norm, norm, embed_dim, norm_epsilon, norm_scale, use_bias, param_dtype
        )
        shared = {
            "use_bias": use_bias,
            "dropout": dropout,
            "projection_std": projection_std,
            "dtype": dtype,
            "activation_dtype": activation_dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.attention_norm = new_norm()
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            qkv_bias=qkv_bias,
            rotary=rotary,
            rotary_base=rotary_base,
            qk_norm=qk_norm,
            qk_norm_scale=qk_norm_scale,
            scale=scale,
            attention_kernel=attention_kernel,
            **shared,
        )
        self.feed_forward_norm = new_norm()
        self.feed_forward = FeedForward(
            embed_dim, hidden_dim, activation=activation, gated=gated, **shared
        )

    @classmethod
    def from_config(cls, config: ModelConfig, *, rngs: nnx.Rngs) -> Self:
        """A block with a config's hyper-parameters."""
        config = for_platform(config, ANYWHERE)
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
        return cls(
            config.embed_dim,
            config.num_heads,
            config.hidden_dim,
            window=config.attention_window,
            rotary=config.positions == "rotary",
            scale=config.attention_scale,
            projection_std=0.0 if config.zero_init else residual_std,
            rngs=rngs,
            **{name: getattr(config, name) for name in SAME_NAMES},
        )

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        *,
        cache: LayerCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Apply the block; a `cache` is appended to and attended over."""
        x = x + self.attention(self.attention_norm(x), cache=cache, rngs=rngs)
        return x + self.feed_forward(self.feed_forward_norm(x), rngs=rngs)


class GPT(Module):
    """Decoder-only transformer: tokens to next-token logits.

    Initialised as GPT-2: N(0, 0.02), output projections of the residual branches divided by
    sqrt(2 * num_layers) (Radford et al. 2019, section 2.3). A config's `auto` means what it means
    on a CPU; `for_platform` decides it for another platform. Dropout needs the call's `rngs`; after
    `train()`, a call without them raises ValueError.
    """

    @typed
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config, config = config, for_platform(config, ANYWHERE)
        self.dtype, self.activation_dtype = config.dtype, config.activation_dtype
        self.vocab_size, self.embed_dim = config.vocab_size, config.embed_dim
        self.block_size = config.block_size
        self.supports_rolling_cache = config.positions == "rotary"
        new = {"param_dtype": config.param_dtype, "rngs": rngs}
        sizes, learned = (config.vocab_size, config.embed_dim), config.positions == "learned"
        self.token_embedding = Embedding(*sizes, dimension="vocab_size", **new)
        self.position_embedding = (
            Embedding(config.block_size, config.embed_dim, **new) if learned else None
        )
        self.ngram_embedding = (
            NGramEmbedding(config.ngram_sizes, config.ngram_rows, config.embed_dim, **new)
            if config.ngram_sizes
            else None
        )
        scales = jnp.zeros(config.num_layers, config.param_dtype)
        self.shortcut = nnx.Param(scales) if config.embedding_shortcut else None
        self.blocks = nnx.List(
            Block.from_config(config, rngs=rngs) for _ in range(config.num_layers)
        )
        norm = config.norm_epsilon, config.norm_scale, config.use_bias, config.param_dtype
        self.final_norm = make_norm(config.norm, config.embed_dim, *norm)
        self.head = (
            None
            if config.tie_embeddings
            else ToVocabulary(
                config.embed_dim,
                config.vocab_size,
                use_bias=config.head_bias,
                dimensions=("embed_dim", "vocab_size"),
                init_std=0.0 if config.zero_init else INIT_STD,
                dtype=config.dtype,
                activation_dtype=config.activation_dtype,
                **new,
            )
        )

    @typed
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """Next-token logits.

        Raises ValueError past `block_size`, and as `require_in_vocabulary`.

        With a `cache`, `tokens` continue the sequences in it and are appended to it.
        """
        return self.logits(self.hidden(tokens, cache=cache, rngs=rngs))

    @typed
    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Final hidden states, the input of `logits`."""
        return self.final_norm(self.hidden_states(tokens, cache=cache, rngs=rngs)[-1])

    @typed
    def hidden_states(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> PyTree[Float[Array, "batch time {self.embed_dim}"]]:
        """The residual stream: the input of each block, then the output of the last.

        Raises ValueError past `block_size`, and for a cache with another number of layers. With a
        cache and rotary positions decoding may go past `block_size`, one token at a time: each
        layer then attends to its last `block_size` positions.
        """
        layers = [None] * len(self.blocks) if cache is None else [*cache.layers]
        if len(layers) != len(self.blocks):
            raise ValueError(
                f"the cache has {len(layers)} layers and the model {len(self.blocks)}: "
                "make the cache with empty_cache"
            )

        def call(block, x, rngs):  # not Block.__call__: a subclass may override it
            return block(x, rngs=rngs)

        run = nnx.remat(call) if self.config.rematerialise else call
        x = embedded = placed(self.embed(tokens, cache=cache, rngs=rngs), "batch", "time", None)
        if self.config.scan_layers and cache is None:
            return self._scanned_states(x, rngs)
        states = []
        for index, (block, layer) in enumerate(zip(self.blocks, layers, strict=True)):
            if self.shortcut is not None:
                x = x + self.shortcut[index].astype(x.dtype) * embedded
            states.append(x)
            x = run(block, x, rngs) if layer is None else block(x, cache=layer, rngs=rngs)
            x = placed(x, "batch", "time", None)
        return *states, x

    @typed
    def _scanned_states(
        self, x: Float[Array, "batch time {self.embed_dim}"], rngs: nnx.Rngs | None
    ) -> PyTree[Float[Array, "batch time {self.embed_dim}"]]:
        """`hidden_states` by a scan over the blocks, whose weights are stacked for it.

        Train steps keep them stacked: then the model has one block, with the weights of all.
        Raises ValueError for blocks that differ in more than their weights.
        """
        x = embedded = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # as blocks return it
        graph = nnx.graphdef(self.blocks[0])
        if any(nnx.graphdef(block) != graph for block in self.blocks):
            raise ValueError("scan_layers=True needs blocks that differ in their weights alone")
        layers = [nnx.to_pure_dict(nnx.state(block, nnx.Param)) for block in self.blocks]
        whole = len(layers) == self.config.num_layers
        weights = stacked(layers, self.blocks[0]) if whole else layers[0]
        scales = None if self.shortcut is None else self.shortcut[...].astype(x.dtype)
        streams, drawn = nnx.split(rngs)  # the streams' counts are carried along

        def call(carry, layer):
            (x, drawn), (weights, scale) = carry, layer
            x = x if scale is None else x + scale * embedded
            rngs = nnx.merge(streams, drawn)
            y = placed(nnx.merge(graph, weights)(x, rngs=rngs), "batch", "time", None)
            return (y, nnx.state(rngs)), x

        run = jax.checkpoint(call) if self.config.rematerialise else call
        (x, drawn), states = jax.lax.scan(run, (x, drawn), (weights, scales))
        nnx.update(rngs, drawn)
        return *states, x

    @typed
    def attention_weights(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "{len(self.blocks)} batch {self.config.num_heads} time time"]:
        """The attention weights of every layer and head in the forward pass of `tokens`."""
        inputs = self.hidden_states(tokens)[:-1]
        pairs = zip(self.blocks, inputs, strict=True)
        return jnp.stack([its.attention.weights(its.attention_norm(x)) for its, x in pairs])

    @typed
    def embed(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Sum of token, position and n-gram embeddings. Raises ValueError past `block_size`."""
        time = tokens.shape[1]
        if time > self.block_size:
            raise ValueError(
                f"{time} tokens are more than block_size={self.block_size}: "
                "crop the input to its last block_size tokens"
            )
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            position = jnp.arange(time)
            if cache is not None:
                position = jnp.maximum(cache.layers[0].positions(tokens), 0)
            x = x + self.position_embedding(position)
        if self.ngram_embedding is not None:
            whole = jnp.ones((*tokens.shape, 1), x.dtype)
            rate = self.config.ngram_dropout
            kept = apply_dropout(whole, rate, self.next_dropout_key(rngs, rate))
            known = tokens if cache is None else cache.append_tokens(tokens)
            x = x + kept * self.ngram_embedding(known)[:, -time:]
        # the residual stream is never below float32
        x = x.astype(jnp.promote_types(self.dtype, jnp.float32))
        rate = self.config.dropout
        return apply_dropout(x, rate, self.next_dropout_key(rngs, rate))

    @typed
    def empty_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty KV cache for `batch` sequences of `capacity` positions, or of `block_size`."""
        attention = self.blocks[0].attention
        capacity = self.block_size if capacity is None else capacity
        sizes = (batch, capacity, attention.num_kv_heads, attention.head_dim)
        layers = tuple(LayerCache(*sizes, dtype=self.activation_dtype) for _ in self.blocks)
        lookback = max(self.config.ngram_sizes, default=1) - 1
        return KVCache(layers, batch=batch, lookback=lookback)

    @typed
    def logits(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The language-model head, with a softcap of `cap * tanh(logits / cap)` if there is one."""
        if self.head is None:
            dtypes = self.dtype, self.activation_dtype

            def project_by(x, table):
                if x.shape[:2] == (1, 1):  # else XLA's CPU backend copies the table for one row
                    return project(table, x[0].T, *dtypes).T[None]
                return project_to_vocabulary(x, table.T, *dtypes)

            logits = with_gathered(project_by, x, self.token_embedding.embedding, self.dtype)
        else:
            logits = self.head(x)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
