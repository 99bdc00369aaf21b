"""Head and MultiHeadAttention: self-attention, cross-attention, and attention over a KV cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jgpt.config import ModelConfig
from jgpt.nn import kernels
from jgpt.nn.attention import (
    apply_rotary,
    attend,
    attention_weights,
    causal_mask,
    merge_heads,
    split_heads,
)
from jgpt.nn.cache import LayerCache
from jgpt.nn.layers import Linear, RMSNorm, apply_dropout, columns, linear_options, residual_std
from jgpt.nn.module import Module
from jgpt.shapes.contract import check, typed


class _Attention(Module):
    """The common part of Head and MultiHeadAttention: QK-norm, rotary embedding, mask."""

    causal: bool
    window: int | None
    rotary: bool
    rotary_base: float

    @typed
    def _normalise_and_rotate(
        self,
        x: Float[Array, "*batch time {self.head_dim}"],
        norm: RMSNorm | None,
        position: Int[Array, " time"] | None = None,
    ) -> Float[Array, "*batch time {self.head_dim}"]:
        """Apply QK-norm, then rotary embedding, if the module has them."""
        if norm is not None:
            x = norm(x).astype(x.dtype)  # norms return float32, but attention uses the dtype of x
        # A rotation keeps a vector's length, so normalised vectors stay normalised.
        if self.rotary:
            if position is None:
                position = jnp.arange(x.shape[-2])
            x = apply_rotary(x, position, self.rotary_base)
        return x

    @typed
    def _mask(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None,
    ) -> Bool[Array, "time time"] | None:
        """Return the causal mask of self-attention, or None if each query may attend to every
        key."""
        # Without a causal order, the window would be silently ignored.
        if self.window is not None and not self.causal:
            raise ValueError(
                f"`window={self.window}` needs `causal=True`: a window has only past positions"
            )
        if not self.causal or context is not None:
            return None  # encoders and cross-attention have no causal order
        return causal_mask(x.shape[1], self.window)

    def source_length(self, x: Any, context: Any) -> int:
        """Return the number of keys, which is a size in the annotations of `weights`."""
        if context is None:
            return x.shape[1]
        return context.shape[1]


class Head(_Attention):
    """One attention head (Vaswani et al. 2017, section 3.2.1); cross-attention with a context.

    With a context no mask is applied, also if `causal` is True: every query attends to the whole
    context, since its positions are not those of the queries.
    """

    @typed
    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        *,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        rotary: bool = False,
        qk_norm: bool = False,
        use_bias: bool = False,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim = embed_dim
        self.head_dim = head_dim
        self.dropout = dropout
        self.causal = causal
        self.window = window
        self.scale = scale
        self.rotary = rotary
        self.rotary_base = ModelConfig.rotary_base
        # the defaults of ModelConfig.qk_norm_epsilon and qk_norm_scale
        norm = functools.partial(RMSNorm, head_dim, epsilon=1e-6, use_scale=False)
        if qk_norm:
            self.query_norm = norm()
            self.key_norm = norm()
        else:
            self.query_norm = None
            self.key_norm = None
        self.query = Linear(embed_dim, head_dim, use_bias=use_bias, rngs=rngs)
        self.key = Linear(embed_dim, head_dim, use_bias=use_bias, rngs=rngs)
        self.value = Linear(embed_dim, head_dim, use_bias=use_bias, rngs=rngs)

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.head_dim}"]:
        """Attend from `x` to itself, or to the whole `context`."""
        source = x if context is None else context
        query = self._normalise_and_rotate(self.query(x), self.query_norm)  # batch time head_dim
        key = self._normalise_and_rotate(self.key(source), self.key_norm)  # batch key head_dim
        value = self.value(source)  # batch key head_dim
        return kernels.attend_windowed(
            query,
            key,
            value,
            self._mask(x, context),
            self.window,
            scale=self.scale,
            dropout=self.dropout,
            dropout_key=self.next_dropout_key(rngs, self.dropout),
        )

    @typed
    def weights(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
    ) -> Float[Array, "batch time {self.source_length(x,context)}"]:
        """Return the attention weights of `x` over itself, or over `context`."""
        source = x if context is None else context
        query = self._normalise_and_rotate(self.query(x), self.query_norm)
        key = self._normalise_and_rotate(self.key(source), self.key_norm)
        return attention_weights(query, key, self._mask(x, context), scale=self.scale)


class MultiHeadAttention(_Attention):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), with all heads in one
    computation."""

    @typed
    def __init__(self, config: ModelConfig, *, causal: bool = True, rngs: nnx.Rngs) -> None:
        self.embed_dim = config.embed_dim
        self.head_dim = config.head_size
        self.num_heads = config.num_heads
        # fewer key-value heads than query heads: grouped-query attention (Ainslie et al. 2023)
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.causal = causal
        self.dropout = config.dropout
        self.window = config.attention_window
        self.scale = config.attention_scale
        self.fused = kernels.uses_fused_kernel(config.attention_kernel)
        self.rotary = config.positions == "rotary"
        self.rotary_base = config.rotary_base
        norm = functools.partial(
            RMSNorm,
            self.head_dim,
            epsilon=config.qk_norm_epsilon,
            use_scale=config.qk_norm_scale,
            param_dtype=config.param_dtype,
        )
        if config.qk_norm:
            self.query_norm = norm()
            self.key_norm = norm()
        else:
            self.query_norm = None
            self.key_norm = None
        features = self.num_heads * self.head_dim
        kv_features = self.num_kv_heads * self.head_dim
        # Whole heads are sharded: each device of a mesh has some heads with all their features.
        heads = ("num_heads", self.num_heads)
        kv_heads = ("num_kv_heads", self.num_kv_heads)
        linear = functools.partial(Linear, **linear_options(config), rngs=rngs)
        input_linear = functools.partial(linear, self.embed_dim, use_bias=config.qkv_bias)
        self.query = input_linear(features, dimensions=("embed_dim", heads))
        self.key = input_linear(kv_features, dimensions=("embed_dim", kv_heads))
        self.value = input_linear(kv_features, dimensions=("embed_dim", kv_heads))
        self.projection = linear(
            features,
            self.embed_dim,
            init_std=residual_std(config),
            dimensions=(heads, "embed_dim"),
        )

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
        *,
        mask: Bool[Array, "*leading time {self.source_length(x,context)}"] | None = None,
        cache: LayerCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Apply multi-head attention with output projection.

        With a `cache`, keys and values of `x` are appended to it, and `x` attends over it. A
        `mask`, such as a `document_mask`, excludes keys in addition to the causal mask. Its leading
        axes are broadcast to those of the batch and the heads.
        """
        drops_weights = rngs is not None and self.dropout > 0
        # A cache has keys of the past alone, each computed once for all later queries.
        fits_cache = self.causal and context is None and mask is None and not drops_weights
        if cache is not None and not fits_cache:
            raise ValueError(
                "a KV cache needs causal self-attention without dropout: give no context, mask or "
                "rngs"
            )
        source = x if context is None else context
        position = None  # from 0 on
        if cache is not None:
            # Left padding has negative positions; any rotation is fine, since no query attends to
            # it.
            position = jnp.maximum(cache.positions(x), 0)  # batch time
        query, key, value = self._project(x, source, position)  # batch heads time head_dim
        causal = self._mask(x, context)
        # Drawn even if the weights are never materialised, so that the later keys stay the same.
        weights_key = self.next_dropout_key(rngs, self.dropout)
        if cache is not None:
            cache.append(key, value)
            heads = kernels.attend_over_cache(query, cache, window=self.window, scale=self.scale)
        elif mask is not None:
            # Plain attention over all keys: the other kernels have masks of their own.
            heads = attend(
                query,
                kernels.repeat_heads(key, self.num_heads),
                kernels.repeat_heads(value, self.num_heads),
                mask if causal is None else mask & jax.lax.broadcast_to_rank(causal, mask.ndim),
                scale=self.scale,
                dropout=self.dropout,
                dropout_key=weights_key,
            )
        elif self.fused and not drops_weights:  # the kernel has no dropout
            heads = kernels.fused_attend(
                query,
                key,
                value,
                causal=causal is not None,
                window=self.window,
                scale=self.scale,
            )
        else:
            # The two other kernels share key-value heads without copying them.
            heads = kernels.attend_windowed(
                query,
                kernels.repeat_heads(key, self.num_heads),
                kernels.repeat_heads(value, self.num_heads),
                causal,
                self.window,
                scale=self.scale,
                dropout=self.dropout,
                dropout_key=weights_key,
            )
        check(heads, Float[Array, "batch {self.num_heads} time {self.head_dim}"])
        y = self.projection(merge_heads(heads))  # batch time embed_dim
        return apply_dropout(y, self.dropout, self.next_dropout_key(rngs, self.dropout))

    @typed
    def _project(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        source: Float[Array, "batch key {self.embed_dim}"],
        position: Int[Array, "batch time"] | None = None,
    ) -> tuple[
        Float[Array, "batch {self.num_heads} time {self.head_dim}"],
        Float[Array, "batch {self.num_kv_heads} key {self.head_dim}"],
        Float[Array, "batch {self.num_kv_heads} key {self.head_dim}"],
    ]:
        """Compute queries, keys and values, split into heads."""

        def prepare(heads, norm):  # values are neither normalised nor rotated
            if position is None:
                return self._normalise_and_rotate(heads, norm)

            # With a cache, each sequence of the batch has its own positions. Keys are cached
            # rotated, so that a decoding step rotates only the new ones.
            def prepare_sequence(heads, position):
                return self._normalise_and_rotate(heads, norm, position)

            return jax.vmap(prepare_sequence)(heads, position)

        query = split_heads(self.query(x), self.num_heads)  # batch num_heads time head_dim
        query = prepare(query, self.query_norm)
        key = split_heads(self.key(source), self.num_kv_heads)  # batch num_kv_heads key head_dim
        key = prepare(key, self.key_norm)
        value = split_heads(self.value(source), self.num_kv_heads)
        return query, key, value

    @typed
    def weights(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
    ) -> Float[Array, "batch {self.num_heads} time {self.source_length(x,context)}"]:
        """Return the attention weights of each head."""
        source = x if context is None else context
        query, key, _ = self._project(x, source)
        key = kernels.repeat_heads(key, self.num_heads)  # batch num_heads key head_dim
        return attention_weights(query, key, self._mask(x, context), scale=self.scale)

    @typed
    def head(self, index: int) -> Head:
        """Return a copy of head `index` as a `Head`."""
        head = Head(
            self.embed_dim,
            self.head_dim,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            rotary=self.rotary,
            qk_norm=self.query_norm is not None,
            dropout=self.dropout,
            rngs=nnx.Rngs(0),  # these weights are replaced below
        )
        head.rotary_base = self.rotary_base
        if self.query_norm is not None:
            head.query_norm = nnx.clone(self.query_norm)
            head.key_norm = nnx.clone(self.key_norm)

        # The features of a projection are those of head 0, then those of head 1, and so on.
        def columns_of_head(layer, index):
            start = index * self.head_dim
            return columns(layer, start, start + self.head_dim)

        # Neighbours share a key-value head: with 6 heads and 2 key-value heads, the first three use
        # number 0.
        kv_index = index * self.num_kv_heads // self.num_heads
        head.query = columns_of_head(self.query, index)
        head.key = columns_of_head(self.key, kv_index)
        head.value = columns_of_head(self.value, kv_index)
        return head
