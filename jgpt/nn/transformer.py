"""The transformer: feed-forward network, block, GPT.

Modules hold only parameters. `module(x)` is evaluation, and `module(x, rngs=nnx.Rngs(dropout=key))`
is training; after `train()`, dropout without `rngs` is an error. Models map tokens to logits; the
loss is a separate function.
"""

import functools
from collections.abc import Callable
from typing import assert_never

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from jgpt.config import Activation, ModelConfig
from jgpt.nn.attention import document_mask, positions_in_documents
from jgpt.nn.cache import KVCache, LayerCache
from jgpt.nn.depth import run_blocks
from jgpt.nn.heads import MultiHeadAttention
from jgpt.nn.layers import (
    Embedding,
    Linear,
    apply_dropout,
    linear_options,
    make_norm,
    residual_std,
    vocabulary_head,
)
from jgpt.nn.module import Module, describe_model
from jgpt.nn.ngrams import NGramEmbedding
from jgpt.nn.precision import portable, wider_dtype
from jgpt.nn.products import project_to_tied_vocabulary
from jgpt.parallel.gather import gather_once, gather_parameter
from jgpt.shapes.contract import check, typed


def activation(name: Activation) -> Callable[[Array], Array]:
    """Return the activation function of this name."""
    match name:
        case "relu":
            return jax.nn.relu
        case "gelu":  # exact, as PyTorch's default; JAX's default is the approximation
            return functools.partial(jax.nn.gelu, approximate=False)
        case "gelu_tanh":  # GPT-2's; on a CPU it takes half the time of the exact one
            return functools.partial(jax.nn.gelu, approximate=True)
        case "silu":
            return jax.nn.silu
        case "relu_squared":  # So et al. 2021, section 4
            return lambda x: jnp.square(jax.nn.relu(x))
        case _:
            assert_never(name)


class FeedForward(Module):
    """Position-wise MLP (Vaswani et al. 2017, section 3.3), gated or not (Shazeer 2020)."""

    @typed
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.embed_dim = config.embed_dim
        self.dropout = config.dropout
        self.hidden_dim = config.hidden_dim or 4 * config.embed_dim  # 4 as in section 3.3
        self.activation: Activation = config.activation
        linear = functools.partial(Linear, **linear_options(config), rngs=rngs)
        expanding_linear = functools.partial(
            linear, self.embed_dim, self.hidden_dim, dimensions=("embed_dim", "hidden_dim")
        )
        self.expansion = expanding_linear()
        self.gate = expanding_linear() if config.gated else None
        self.projection = linear(
            self.hidden_dim,
            self.embed_dim,
            init_std=residual_std(config),
            dimensions=("hidden_dim", "embed_dim"),
        )

    @typed
    def __call__(
        self, x: Float[Array, "batch time {self.embed_dim}"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Apply the MLP to each position."""
        activate = activation(self.activation)
        hidden = self.expansion(x)
        if self.gate is None:
            hidden = activate(hidden)
        else:
            # the activation is the gate's alone: with SiLU this is SwiGLU (Shazeer 2020, section 2)
            gate = activate(self.gate(x))  # batch time hidden_dim
            hidden = gate * hidden
        check(hidden, Float[Array, "batch time {self.hidden_dim}"])
        y = self.projection(hidden)  # batch time embed_dim
        return apply_dropout(y, self.dropout, self.next_dropout_key(rngs, self.dropout))


class Block(Module):
    """Pre-norm attention and MLP with residual connections (Radford et al. 2019, section 2.3)."""

    @typed
    def __init__(self, config: ModelConfig, *, causal: bool = True, rngs: nnx.Rngs) -> None:
        self.embed_dim = config.embed_dim
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(config, causal=causal, rngs=rngs)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config, rngs=rngs)

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        *,
        mask: Bool[Array, "*leading time time"] | None = None,
        cache: LayerCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Apply the block. With a `cache`, append keys and values of `x`, and attend over it. A
        `mask` is that of its attention."""
        # Norms are on the branches: from the embeddings to the head, the residual stream has only
        # additions, and gradients flow back the same way.
        masked = {}
        if mask is not None:  # a user's own attention need not have this argument
            masked["mask"] = mask
        attended = self.attention(self.attention_norm(x), cache=cache, rngs=rngs, **masked)
        x = x + attended.astype(x.dtype)  # the stream may be wider than products
        transformed = self.feed_forward(self.feed_forward_norm(x), rngs=rngs)
        return x + transformed.astype(x.dtype)


class GPT(Module):
    """Decoder-only transformer: tokens to next-token logits.

    Weights are initialised as in GPT-2: N(0, 0.02), with output projections of the residual
    branches divided by sqrt(2 * num_layers) (Radford et al. 2019, section 2.3). In a model that is
    built directly, `auto` is float32 with XLA kernels.
    """

    @typed
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config  # unchanged, with its `auto`: an import records it like this
        config = portable(config)
        self.dtype = config.dtype
        self.activation_dtype = config.activation_dtype
        self.vocab_size = config.vocab_size
        self.embed_dim = config.embed_dim
        self.block_size = config.block_size
        embedding = functools.partial(Embedding, param_dtype=config.param_dtype, rngs=rngs)
        self.token_embedding = embedding(
            config.vocab_size, config.embed_dim, dimension="vocab_size"
        )
        match config.positions:
            case "learned":
                self.position_embedding = embedding(config.block_size, config.embed_dim)
            case "rotary":  # attention rotates queries and keys
                self.position_embedding = None
            case _:
                assert_never(config.positions)
        # Learned positions move with the context, so past `block_size` every key would change.
        # Rotary positions are relative, so cached keys stay valid.
        self.supports_rolling_cache = config.positions == "rotary"
        # Each in a single assignment: NNX rejects a module in an attribute that began as None.
        self.ngram_embedding = NGramEmbedding(config, rngs=rngs) if config.ngram_sizes else None
        # Zeros, so that a model begins without the shortcut and learns how much of it each block
        # needs.
        shortcut_scales = jnp.zeros(config.num_layers, config.param_dtype)
        self.shortcut = nnx.Param(shortcut_scales) if config.embedding_shortcut else None
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.num_layers))
        # Blocks normalise their inputs, but the stream is a sum that grows with the depth.
        self.final_norm = make_norm(config)
        # If tied, the token embedding's table is also the head.
        self.head = None if config.tie_embeddings else vocabulary_head(config, rngs=rngs)

    def __repr__(self) -> str:
        """Describe the model in one line; `print` and `nnx.display` show all its parts."""
        return describe_model(self)

    @typed
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """Return next-token logits.

        With a `cache`, `tokens` continue the sequences in it and are appended to it. Raises
        ValueError past `block_size`, for tokens that don't fit into the cache, and for a token
        outside the vocabulary.
        """
        return self.logits(self.hidden(tokens, cache=cache, rngs=rngs))

    @typed
    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        documents: Int[Array, "batch time"] | None = None,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Return final hidden states, the input of `logits`.

        With the number of each token's `documents`, they are those of each document alone.
        """
        of_documents = {}
        if documents is not None:  # a subclass need not have this argument
            of_documents["documents"] = documents
        states = self.hidden_states(tokens, cache=cache, rngs=rngs, **of_documents)
        return self.final_norm(states[-1])

    @typed
    def hidden_states(
        self,
        tokens: Int[Array, "batch time"],
        *,
        documents: Int[Array, "batch time"] | None = None,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> PyTree[Float[Array, "batch time {self.embed_dim}"]]:
        """Return the residual stream: the input of each block, then the output of the last.

        Raises ValueError past `block_size`, and for tokens that don't fit into the cache. With a
        cache of `block_size` positions that are rotary, decoding may continue past `block_size`,
        one token at a time: each layer then attends to its last `block_size` positions. With the
        number of each token's `documents`, neither attention nor n-grams cross documents, and
        learned positions begin again in each; a cache has no documents.

        Under a trace, the number of tokens in a cache is unknown, and how many more fit is not
        checked.
        """
        mask = None
        of_documents = {}
        if documents is not None:  # a subclass need not have this argument of `embed`
            mask = document_mask(documents)
            of_documents["documents"] = documents
        if cache is not None:
            rolls = self.supports_rolling_cache
            cache.require_room(tokens.shape[1], self.block_size, rolls=rolls)
        x = self.embed(tokens, cache=cache, rngs=rngs, **of_documents)
        return run_blocks(
            self.config, self.blocks, x, self.shortcut, cache=cache, mask=mask, rngs=rngs
        )

    @typed
    def embed(
        self,
        tokens: Int[Array, "batch time"],
        *,
        documents: Int[Array, "batch time"] | None = None,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Return the sum of token, position and n-gram embeddings. Raises ValueError past
        `block_size`."""
        time = tokens.shape[1]
        if time > self.block_size:
            raise ValueError(
                f"{time} tokens are more than `block_size={self.block_size}`: "
                "crop the input to its last block_size tokens"
            )
        x = self.token_embedding(tokens)  # batch time embed_dim
        if self.position_embedding is not None:
            position = jnp.arange(time)  # time
            if cache is not None:
                # Left padding has negative positions; any row is fine, since no query attends to
                # it.
                position = jnp.maximum(cache.layers[0].positions(tokens), 0)  # batch time
            elif documents is not None:
                position = positions_in_documents(documents)  # batch time
            positions = self.position_embedding(position)  # time embed_dim, or batch time embed_dim
            x = x + jax.lax.broadcast_to_rank(positions, x.ndim)
        if self.ngram_embedding is not None:
            # All features of a position at once: the table can memorise the training text, so in
            # training some positions have to do without it.
            ones = jnp.ones((*tokens.shape, 1), x.dtype)  # batch time 1
            ngram_rate = self.config.ngram_dropout
            keep = apply_dropout(ones, ngram_rate, self.next_dropout_key(rngs, ngram_rate))
            known_tokens = tokens
            if cache is not None:
                # N-grams of the first tokens begin in the tokens before them, which a cache stores.
                known_tokens = cache.append_tokens(tokens)  # batch lookback+time
            ngrams = self.ngram_embedding(known_tokens, documents)[:, -time:]
            x = x + keep * ngrams
        # The residual stream is at least float32: it is a sum over all blocks, and 16 bits lose a
        # small addition to a large number.
        x = x.astype(wider_dtype(self.dtype))
        rate = self.config.dropout
        return apply_dropout(x, rate, self.next_dropout_key(rngs, rate))

    @typed
    def logits(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        """Apply the language-model head, with a softcap of `cap * tanh(logits / cap)` if there is
        one."""
        if self.head is None:
            table = gather_parameter(self.token_embedding.embedding, self.dtype)  # vocab embed_dim
            logits = project_to_tied_vocabulary(x, table, self.dtype, self.activation_dtype)
        else:
            logits = self.head(x)
        cap = self.config.logit_softcap
        if cap is None:
            return logits
        # Nearly the identity near 0, and never beyond the cap.
        return cap * jnp.tanh(logits / cap)

    def gather_head(self) -> None:
        """Gather the head's weights once, so that each call of `logits` need not gather them."""
        if self.head is None:
            gather_once(self.token_embedding.embedding, self.dtype)
        else:
            gather_once(self.head.kernel, self.dtype)

    @typed
    def empty_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """Return an empty KV cache for `batch` sequences of `capacity` positions, or of
        `block_size`."""
        if capacity is None:
            capacity = self.block_size
        layers = []
        for block in self.blocks:
            layer = LayerCache(
                batch,
                capacity,
                num_kv_heads=block.attention.num_kv_heads,
                head_dim=block.attention.head_dim,
                dtype=self.activation_dtype,
            )
            layers.append(layer)
        # An n-gram ends at a new token, so n - 1 of its tokens are earlier ones.
        longest_ngram = max(self.config.ngram_sizes, default=1)
        return KVCache(tuple(layers), batch=batch, lookback=longest_ngram - 1)

    @typed
    def attention_weights(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "{len(self.blocks)} batch {self.config.num_heads} time time"]:
        """Return the attention weights of every layer and head in the forward pass of `tokens`."""
        # Computed again from the inputs of the blocks, since fused and windowed kernels never hold
        # the weights of a whole sequence in memory.
        inputs = self.hidden_states(tokens)[:-1]  # the last state is the output of all blocks
        weights = []
        for block, x in zip(self.blocks, inputs, strict=True):
            normalised = block.attention_norm(x)  # batch time embed_dim
            weights.append(block.attention.weights(normalised))  # batch num_heads time time
        return jnp.stack(weights)
