"""The transformer: GPT, and a model of whichever kind a config describes.

Modules hold parameters only. `module(x)` is evaluation; `module(x, rngs=nnx.Rngs(dropout=key))`
is training. Models map tokens to logits; the loss is a function beside them.
"""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jgpt.attention import dropped
from jgpt.bigram import BigramLM
from jgpt.blocks import Block
from jgpt.cache import KVCache, LayerCache
from jgpt.config import ModelConfig
from jgpt.contracts import typed
from jgpt.device import activation_dtype, with_dtype
from jgpt.layers import (
    INIT_STD,
    Embedding,
    Linear,
    Module,
    NGramEmbedding,
    dropout_key,
    make_norm,
    project_to_many,
)


class GPT(Module):
    """Tokens to the logits of each next token.

    Initialised as GPT-2 is: N(0, 0.02), and the projections that write into the residual stream
    divided by sqrt(2 * num_layers) (Radford et al. 2019, section 2.3).
    """

    @typed
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config = with_dtype(config)
        self.vocab_size, self.embed_dim = config.vocab_size, config.embed_dim
        self.block_size = config.block_size
        self.supports_rolling_cache = config.positions == "rotary"
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
        self.ngram_embedding = (
            NGramEmbedding(
                config.ngram_sizes,
                config.ngram_rows,
                config.embed_dim,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )
            if config.ngram_sizes
            else None
        )
        self.shortcut = (
            nnx.Param(jnp.zeros(config.num_layers, config.param_dtype))
            if config.embedding_shortcut
            else None
        )
        self.blocks = nnx.List(
            Block.from_config(config, rngs=rngs) for _ in range(config.num_layers)
        )
        self.final_norm = make_norm(
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
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The logits of each position's next token. Raises ValueError past `block_size`.

        With a `cache`, the tokens come after those in it, and join them.
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

        Raises ValueError past `block_size`, and for a cache of another number of layers. Rotary
        positions may pass `block_size` with a cache, one token at a time: each layer then attends
        to its last `block_size` positions. For learned ones the caller stays below it.
        """
        layers = [None] * len(self.blocks) if cache is None else [*cache.layers]
        if len(layers) != len(self.blocks):
            raise ValueError(
                f"the cache has {len(layers)} layers and the model {len(self.blocks)}: "
                "begin with empty_cache"
            )

        def call(block, x, rngs):  # a subclass has a call of its own
            return block(x, rngs=rngs)

        run = nnx.remat(call) if self.config.rematerialise else call
        x = embedded = self.embed(tokens, cache=cache, rngs=rngs)
        states = []
        for index, (block, layer) in enumerate(zip(self.blocks, layers, strict=True)):
            if self.shortcut is not None:
                x = x + self.shortcut[index].astype(x.dtype) * embedded
            states.append(x)
            x = run(block, x, rngs) if layer is None else block(x, cache=layer)
        return *states, x

    @typed
    def attention_weights(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "{len(self.blocks)} batch {self.config.num_heads} time time"]:
        """The attention weights of each layer and head, of what the forward pass computes."""
        inputs = self.hidden_states(tokens)[:-1]
        return jnp.stack(
            [
                block.attention.weights(block.attention_norm(x))
                for block, x in zip(self.blocks, inputs, strict=True)
            ]
        )

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
            kept = dropped(whole, self.config.ngram_dropout, dropout_key(rngs))
            known = tokens if cache is None else cache.append_tokens(tokens)
            x = x + kept * self.ngram_embedding(known)[:, -time:]
        # the residual stream is never below float32
        x = x.astype(jnp.promote_types(self.config.dtype, jnp.float32))
        return dropped(x, self.config.dropout, dropout_key(rngs))

    @typed
    def empty_cache(self, batch: int) -> KVCache:
        """A cache for `batch` sequences of `block_size` positions, none of them read yet."""
        attention = self.blocks[0].attention
        sizes = (batch, self.block_size, attention.num_kv_heads, attention.head_dim)
        dtype = activation_dtype(self.config.dtype)
        layers = tuple(LayerCache(*sizes, dtype=dtype) for _ in self.blocks)
        lookback = max(self.config.ngram_sizes, default=1) - 1
        return KVCache(layers, batch=batch, lookback=lookback)

    @typed
    def logits(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The language-model head, its logits softly capped if the config says so."""
        head = self.head
        kernel = self.token_embedding.embedding[...].T if head is None else head.kernel[...]
        logits = project_to_many(x, kernel, self.config.dtype)
        if head is not None and head.bias is not None:
            logits = logits + head.bias[...].astype(logits.dtype)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@runtime_checkable
class LanguageModel(Protocol):
    """What the steps and generation need of a model."""

    vocab_size: int
    block_size: int
    """The longest context, in tokens."""
    supports_rolling_cache: bool
    """Whether a cache may go on past `block_size`."""

    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time features"]:
        """Final hidden states."""
        ...

    def logits(self, x: Float[Array, "batch time features"]) -> Float[Array, "batch time vocab"]:
        """The language-model head."""
        ...

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """The head of the hidden states: the logits of each position's next token."""
        ...

    def empty_cache(self, batch: int) -> KVCache:
        """A cache for so many sequences, none of them begun."""
        ...


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
