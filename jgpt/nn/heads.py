"""Head and MultiHeadAttention: self-attention, cross-attention, and attention over a KV cache."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from jgpt.config import AttentionKernel
from jgpt.contracts import check, typed
from jgpt.nn.attention import (
    apply_rotary,
    attend,
    attend_locally,
    attention_weights,
    causal_mask,
    fused_attend,
    merge_heads,
    split_heads,
)
from jgpt.nn.cache import LayerCache
from jgpt.nn.layers import INIT_STD, Linear, Module, RMSNorm, apply_dropout
from jgpt.sharding import with_placed

MIN_QUERY_BLOCK, MAX_QUERY_BLOCKS = 128, 8
"""Long inputs attend over a KV cache in blocks of queries, whose weights then fit a CPU's cache."""


class _Attention(Module):
    """What Head and MultiHeadAttention share: mask, QK-norm, rotary embedding, choice of kernel."""

    embed_dim: int
    head_dim: int
    causal: bool
    window: int | None
    rotary: bool
    rotary_base: float
    scale: float | None
    dropout: float

    def _make_qk_norms(self, qk_norm: bool, scale: bool, param_dtype: DTypeLike) -> None:
        """Raises ValueError for options that contradict each other, and an odd rotary head size."""
        if self.window is not None and not self.causal:
            raise ValueError(
                f"window={self.window} needs causal=True: it limits how far back a query attends"
            )
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary position embedding")
        if scale and not qk_norm:
            raise ValueError("qk_norm_scale=True needs qk_norm=True, which it scales")
        norm = functools.partial(
            RMSNorm, self.head_dim, epsilon=1e-6, use_scale=scale, param_dtype=param_dtype
        )
        self.query_norm = norm() if qk_norm else None
        self.key_norm = norm() if qk_norm else None

    @typed
    def _normalise_and_rotate(
        self,
        x: Float[Array, "*batch time {self.head_dim}"],
        norm: RMSNorm | None,
        position: Int[Array, " time"] | None = None,
    ) -> Float[Array, "*batch time {self.head_dim}"]:
        """QK-norm, then rotary embedding, if the module has them."""
        if norm is not None:
            x = norm(x).astype(x.dtype)
        if self.rotary:
            position = jnp.arange(x.shape[-2]) if position is None else position
            x = apply_rotary(x, position, self.rotary_base)
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
        # cross-attention and encoders have no causal order
        return causal_mask(x.shape[1], self.window) if self.causal and context is None else None

    @typed
    def _attend(
        self,
        query: Float[Array, "*batch query {self.head_dim}"],
        key: Float[Array, "*batch key {self.head_dim}"],
        value: Float[Array, "*batch key {self.head_dim}"],
        mask: Bool[Array, "query key"] | None,
        dropout_key: Key[Array, ""] | None,
    ) -> Float[Array, "*batch query {self.head_dim}"]:
        """Attention in blocks where a sliding window allows it, else in full."""
        options = {"scale": self.scale, "dropout": self.dropout, "dropout_key": dropout_key}
        if mask is not None and self.window is not None and self.window < key.shape[-2]:
            return attend_locally(query, key, value, self.window, **options)
        return attend(query, key, value, mask, **options)


class Head(_Attention):
    """One attention head (Vaswani et al. 2017, section 3.2.1): `head(x)`, or `head(x, context)`
    for cross-attention. Kernels are (in, out).

    Dropout needs the call's `rngs`; after `train()`, a call without them raises ValueError.
    """

    @typed
    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        *,
        causal: bool = True,
        window: int | None = None,
        use_bias: bool = False,
        rotary: bool = False,
        rotary_base: float = 10_000.0,
        qk_norm: bool = False,
        qk_norm_scale: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        dtype: DTypeLike = jnp.float32,
        activation_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed_dim, self.head_dim, self.dropout = embed_dim, head_dim, dropout
        self.causal, self.window, self.scale = causal, window, scale
        self.rotary, self.rotary_base = rotary, rotary_base
        self._make_qk_norms(qk_norm, qk_norm_scale, param_dtype)
        linear = functools.partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            activation_dtype=activation_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
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
        """Attend from `x` to itself, or to `context`."""
        source = x if context is None else context
        return self._attend(
            self._normalise_and_rotate(self.query(x), self.query_norm),
            self._normalise_and_rotate(self.key(source), self.key_norm),
            self.value(source),
            self._mask(x, context),
            self.next_dropout_key(rngs, self.dropout),
        )

    @typed
    def weights(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
    ) -> Float[Array, "batch time {self._source_length(x,context)}"]:
        """The attention weights of `x` over itself, or over `context`."""
        source = x if context is None else context
        query = self._normalise_and_rotate(self.query(x), self.query_norm)
        key = self._normalise_and_rotate(self.key(source), self.key_norm)
        return attention_weights(query, key, self._mask(x, context), scale=self.scale)


class MultiHeadAttention(_Attention):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), all heads in one computation.

    `precision` is Linear's `dtype`, `activation_dtype` and `param_dtype`. Dropout needs the call's
    `rngs`; after `train()`, a call without them raises ValueError.
    """

    @typed
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
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
        dropout: float = 0.0,
        projection_std: float = INIT_STD,
        attention_kernel: AttentionKernel = "xla",
        dtype: DTypeLike = jnp.float32,
        activation_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must be divisible by num_kv_heads={num_kv_heads}"
            )
        self.head_dim = head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.causal, self.window, self.dropout = causal, window, dropout
        self.rotary, self.rotary_base, self.scale = rotary, rotary_base, scale
        self.attention_kernel = attention_kernel
        self._make_qk_norms(qk_norm, qk_norm_scale, param_dtype)
        linear = functools.partial(
            Linear,
            dtype=dtype,
            activation_dtype=activation_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        heads, kv_heads = ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)
        kv = {"use_bias": qkv_bias, "dimensions": ("embed_dim", kv_heads)}
        self.query = linear(
            embed_dim, num_heads * head_dim, use_bias=qkv_bias, dimensions=("embed_dim", heads)
        )
        self.key = linear(embed_dim, num_kv_heads * head_dim, **kv)
        self.value = linear(embed_dim, num_kv_heads * head_dim, **kv)
        self.projection = linear(
            num_heads * head_dim,
            embed_dim,
            use_bias=use_bias,
            init_std=projection_std,
            dimensions=(heads, "embed_dim"),
        )

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
        *,
        cache: LayerCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Multi-head attention with output projection.

        With a `cache`, keys and values of `x` are appended to it, and `x` attends over it.
        """
        trains = rngs is not None and self.dropout > 0
        if cache is not None and (context is not None or trains or not self.causal):
            raise ValueError("a KV cache is for causal self-attention in evaluation")
        position = None if cache is None else jnp.maximum(cache.positions(x), 0)
        query, key, value = self._project(x, x if context is None else context, position)
        mask = self._mask(x, context)
        dropout_key = self.next_dropout_key(rngs, self.dropout)
        if cache is not None:
            cache.append(key, value)
            heads = self._attend_over(cache, query)
        elif self.attention_kernel == "cudnn" and not trains:  # the kernel has no dropout
            options = {"window": self.window, "scale": self.scale}
            heads = fused_attend(query, key, value, causal=mask is not None, **options)
        else:
            key, value = self._repeat_kv(key), self._repeat_kv(value)
            heads = self._attend(query, key, value, mask, dropout_key)
        check(heads, Float[Array, "batch {self.num_heads} time {self.head_dim}"])
        y = self.projection(merge_heads(heads))
        return apply_dropout(y, self.dropout, self.next_dropout_key(rngs, self.dropout))

    @typed
    def weights(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        context: Float[Array, "batch key {self.embed_dim}"] | None = None,
    ) -> Float[Array, "batch {self.num_heads} time {self._source_length(x,context)}"]:
        """The attention weights of each head."""
        query, key, _ = self._project(x, x if context is None else context)
        mask = self._mask(x, context)
        return attention_weights(query, self._repeat_kv(key), mask, scale=self.scale)

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
        """Queries, keys and values, split into heads."""

        def prepared(x, norm):
            if position is None:
                return self._normalise_and_rotate(x, norm)
            # positions of each sequence
            return jax.vmap(lambda x, at: self._normalise_and_rotate(x, norm, at))(x, position)

        return (
            prepared(split_heads(self.query(x), self.num_heads), self.query_norm),
            prepared(split_heads(self.key(source), self.num_kv_heads), self.key_norm),
            split_heads(self.value(source), self.num_kv_heads),
        )

    @typed
    def _repeat_kv(
        self, x: Float[Array, "batch {self.num_kv_heads} key {self.head_dim}"]
    ) -> Float[Array, "batch {self.num_heads} key {self.head_dim}"]:
        """Repeat key-value heads for the query heads that share them (Ainslie et al. 2023)."""
        groups = self.num_heads // self.num_kv_heads
        repeat = functools.partial(jnp.repeat, repeats=groups, axis=-3)
        return x if groups == 1 else with_placed(repeat, x, "batch", "num_heads", None, None)

    @typed
    def _attend_over(
        self,
        cache: LayerCache,
        query: Float[Array, "{cache.batch} {self.num_heads} time {self.head_dim}"],
    ) -> Float[Array, "{cache.batch} {self.num_heads} time {self.head_dim}"]:
        """Attend from the newest positions over the KV cache, in blocks of queries.

        Where the new positions fill the cache, no block reads the keys after it, or those before
        its window.
        """
        time, groups = query.shape[2], self.num_heads // self.num_kv_heads
        mask = cache.mask(time, self.window)
        block, in_order = max(MIN_QUERY_BLOCK, -(-time // MAX_QUERY_BLOCKS)), time == cache.capacity
        query = query.reshape(-1, groups, time, self.head_dim).astype(cache.keys.dtype)
        heads = []
        for start in range(0, time, block):
            end = min(start + block, time)
            first = 0 if self.window is None else max(0, start + 1 - self.window)
            keys = slice(first, end) if in_order else slice(None)
            tiled = jnp.tile(mask[:, start:end, keys], (1, groups, 1))
            of_block = jax.vmap(functools.partial(attend, scale=self.scale))(
                # query heads that share a key-value head are folded into its time axis
                query[:, :, start:end].reshape(len(query), -1, self.head_dim),
                cache.keys[:, keys],
                cache.values[:, keys],
                jnp.repeat(tiled, self.num_kv_heads, axis=0),
            )
            heads.append(of_block.reshape(len(query), groups, end - start, self.head_dim))
        return jnp.concatenate(heads, axis=2).reshape(-1, self.num_heads, time, self.head_dim)

    @typed
    def head(self, index: int) -> Head:
        """A copy of head `index` as a `Head`. Raises ValueError if there is none."""
        if not 0 <= index < self.num_heads:
            raise ValueError(f"there is no head {index}: the heads are 0 to {self.num_heads - 1}")
        head = Head(
            self.embed_dim,
            self.head_dim,
            causal=self.causal,
            window=self.window,
            use_bias=self.query.bias is not None,
            rotary=self.rotary,
            rotary_base=self.rotary_base,
            qk_norm=self.query_norm is not None,
            qk_norm_scale=self.query_norm is not None and self.query_norm.scale is not None,
            scale=self.scale,
            dropout=self.dropout,
            dtype=self.query.dtype,
            activation_dtype=self.query.activation_dtype,
            param_dtype=self.query.kernel.dtype,
            rngs=nnx.Rngs(0),
        )
        kv_index = index * self.num_kv_heads // self.num_heads
        weights = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        del weights["projection"]
        for name, i in (("query", index), ("key", kv_index), ("value", kv_index)):
            columns = slice(i * self.head_dim, (i + 1) * self.head_dim)
            weights[name] = {kind: leaf[..., columns] for kind, leaf in weights[name].items()}
        nnx.update(head, weights)
        return head
