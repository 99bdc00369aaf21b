"""What a transformer is a stack of: attention and a feed-forward network, each with a residual."""

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jgpt.attention import dropped
from jgpt.cache import LayerCache
from jgpt.config import Activation, ModelConfig, NormKind
from jgpt.contracts import check, typed
from jgpt.heads import MultiHeadAttention
from jgpt.layers import INIT_STD, Linear, Module, dropout_key, make_norm

_Block = TypeVar("_Block", bound="Block")
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, section 4
}


class FeedForward(Module):
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
        return dropped(self.projection(hidden), self.dropout, dropout_key(rngs))


class Block(Module):
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
        window: int | None = None,
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
        new_norm = functools.partial(
            make_norm, norm, embed_dim, norm_epsilon, norm_scale, use_bias, param_dtype
        )
        shared = {"dropout": dropout, "projection_std": projection_std, "dtype": dtype}
        self.attention_norm = new_norm()
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            causal=causal,
            window=window,
            qkv_bias=qkv_bias,
            use_bias=use_bias,
            rotary=rotary,
            qk_norm=qk_norm,
            scale=scale,
            param_dtype=param_dtype,
            rngs=rngs,
            **shared,
        )
        self.feed_forward_norm = new_norm()
        self.feed_forward = FeedForward(
            embed_dim,
            hidden_dim,
            activation=activation,
            use_bias=use_bias,
            param_dtype=param_dtype,
            rngs=rngs,
            **shared,
        )

    @classmethod
    @typed
    def from_config(cls: type[_Block], config: ModelConfig, *, rngs: nnx.Rngs) -> _Block:
        """A block of the transformer that a config describes."""
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
        return cls(
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
            projection_std=0.0 if config.zero_init else residual_std,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    @typed
    def __call__(
        self,
        x: Float[Array, "batch time {self.embed_dim}"],
        *,
        cache: LayerCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """Pre-norm attention and MLP with residual connections."""
        x = x + self.attention(self.attention_norm(x), cache=cache, rngs=rngs)
        return x + self.feed_forward(self.feed_forward_norm(x), rngs=rngs)
