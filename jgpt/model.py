"""The transformer: GPT, and a model of whichever kind a config describes.

Modules hold parameters only. `module(x)` is evaluation; `module(x, rngs=nnx.Rngs(dropout=key))`
is training. Models map tokens to logits; the loss is a function beside them.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jgpt.attention import dropped
from jgpt.bigram import BigramLM
from jgpt.blocks import Block
from jgpt.config import ModelConfig
from jgpt.contracts import typed
from jgpt.device import activation_dtype, with_dtype
from jgpt.heads import KeyValueCache
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
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.embed_dim // config.num_heads
        self.slides = config.positions == "rotary"  # a cache goes on past block_size
        self.lookback = max(config.ngram_sizes, default=1) - 1
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
            Block(
                config.embed_dim,
                config.num_heads,
                config.hidden_dim,
                activation=config.activation,
                num_kv_heads=config.num_kv_heads,
                window=config.attention_window,
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
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """The logits of each position's next token. Raises ValueError past `block_size`."""
        return self.logits(self.hidden(tokens, rngs=rngs))

    @typed
    def hidden(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """What the head makes `logits` of. Raises ValueError past `block_size`."""

        def through(block, x, rngs):  # a subclass has a call of its own
            return block(x, rngs=rngs)

        run = nnx.remat(through) if self.config.rematerialise else through
        x = embedded = self.embed(tokens, rngs=rngs)
        for layer, block in enumerate(self.blocks):
            x = run(block, self._with_shortcut(x, embedded, layer), rngs)
        return self.final_norm(x)

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
        if self.ngram_embedding is not None:
            whole = jnp.ones((*tokens.shape, 1), x.dtype)
            kept = dropped(whole, self.config.ngram_dropout, dropout_key(rngs))
            x = x + kept * self.ngram_embedding(tokens)
        # the residual stream is never below float32
        x = x.astype(jnp.promote_types(self.config.dtype, jnp.float32))
        return dropped(x, self.config.dropout, dropout_key(rngs))

    @typed
    def empty_cache(
        self, batch: int
    ) -> PyTree[
        Float[Array, "{batch}*{self.num_kv_heads} {self.block_size} {self.head_dim}"],
        "KeyValueCache",
    ]:
        """A cache for `batch` sequences of `block_size` positions, none of them read yet."""
        shape = (batch * self.num_kv_heads, self.block_size, self.head_dim)
        dtype = activation_dtype(self.config.dtype)
        return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in self.blocks)

    @typed
    def continued(
        self,
        tokens: Int[Array, "batch time"],
        length: Int[Array, " batch"],
        cache: PyTree[
            Float[Array, "batch*{self.num_kv_heads} {self.block_size} {self.head_dim}"],
            "KeyValueCache",
        ],
        before: Int[Array, "batch {self.lookback}"] | None = None,
    ) -> tuple[
        Float[Array, "batch {self.vocab_size}"],
        PyTree[
            Float[Array, "batch*{self.num_kv_heads} {self.block_size} {self.head_dim}"],
            "KeyValueCache",
        ],
    ]:
        """What comes after each sequence's newest tokens, and a cache that holds them too.

        With them the sequences have `length` tokens, and they end at one slot of the cache,
        `max(length) - 1`: a shorter one begins later, and what is in `tokens` before it is not
        read. `before` are the `lookback` tokens in front of the newest, if there are any. The
        logits equal the last of the whole sequence. Rotary positions may pass `block_size`, one
        token at a time: each layer then reads the last `block_size` positions. For learned ones the
        caller stays below it. Raises ValueError for another number of layers.
        """
        if len(cache) != len(self.blocks):
            raise ValueError(
                f"the cache has {len(cache)} layers and the model {len(self.blocks)}: "
                "begin with empty_cache"
            )
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            time = tokens.shape[1]
            position = jnp.maximum(length[:, None] - time + jnp.arange(time), 0)
            x = x + self.position_embedding(position)
        if self.ngram_embedding is not None:
            missing = jnp.full((tokens.shape[0], self.lookback), -1, tokens.dtype)
            known = jnp.concatenate([missing if before is None else before, tokens], axis=1)
            begun = jnp.arange(known.shape[1]) >= known.shape[1] - length[:, None]
            x = x + self.ngram_embedding(jnp.where(begun, known, -1))[:, self.lookback :]
        x = embedded = x.astype(jnp.promote_types(self.config.dtype, jnp.float32))
        layers = []
        for layer, (block, (keys, values)) in enumerate(zip(self.blocks, cache, strict=True)):
            x = self._with_shortcut(x, embedded, layer)
            x, keys, values = block.continued(x, length, keys, values)
            layers.append((keys, values))
        return self.logits(self.final_norm(x[:, -1:]))[:, 0], tuple(layers)

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
