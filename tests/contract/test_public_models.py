"""Small models in the manner of public ones, traced and proven: functional, Flax NNX, Equinox.

They are written for this test. Each has a style of its own: dataclasses of arrays and einsum, as in
Marin's grug; `nnx.Linear` with reshapes and transposes, as in ports of nanoGPT to NNX; and modules
of one sequence under `vmap`, as in GPTs of Equinox.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt.shapes.contract import typed
from jgpt.shapes.proofs import Proof, prove
from jgpt.shapes.trace import shape_trace

VOCAB, BLOCK = 11, 8
EMBED, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 24, 6, 3, 4, 10
TOKENS = jnp.zeros((2, 5), int)  # batch time


# --- functions of dataclasses --------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed kv_heads head_dim"]
    value: Float[Array, "embed kv_heads head_dim"]
    out: Float[Array, "heads head_dim embed"]
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    embedding: Float[Array, "vocab embed"]
    layers: list[Layer]


@typed
def normalise(x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-5)


@typed
def rotate(
    x: Float[Array, "batch time heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    _, time, _, head_dim = x.shape
    half = head_dim // 2
    angle = jnp.arange(time)[:, None] * 100.0 ** -(jnp.arange(half) / half)  # time head_dim/2
    cosine, sine = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]  # time 1 head_dim/2
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, first * sine + second * cosine], axis=-1
    )


@typed
def attend(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
    value: Float[Array, "batch time kv_heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    _, time, heads, head_dim = query.shape
    repeats = heads // key.shape[2]
    key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * head_dim**-0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


@typed
def block(layer: Layer, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
    y = normalise(x)
    query = rotate(jnp.einsum("bte,ehd->bthd", y, layer.query))
    key = rotate(jnp.einsum("bte,ehd->bthd", y, layer.key))
    value = jnp.einsum("bte,ehd->bthd", y, layer.value)
    x = x + jnp.einsum("bthd,hde->bte", attend(query, key, value), layer.out)
    hidden = jax.nn.relu(jnp.einsum("bte,eh->bth", normalise(x), layer.up))
    return x + jnp.einsum("bth,he->bte", hidden, layer.down)


@typed
def logits(weights: Weights, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time vocab"]:
    x = weights.embedding[tokens]
    for layer in weights.layers:
        x = block(layer, x)
    return jnp.einsum("bte,ve->btv", normalise(x), weights.embedding)


def functional() -> Callable[..., Any]:
    layer = Layer(
        query=jnp.ones((EMBED, HEADS, HEAD_DIM)),
        key=jnp.ones((EMBED, KV_HEADS, HEAD_DIM)),
        value=jnp.ones((EMBED, KV_HEADS, HEAD_DIM)),
        out=jnp.ones((HEADS, HEAD_DIM, EMBED)),
        up=jnp.ones((EMBED, HIDDEN)),
        down=jnp.ones((HIDDEN, EMBED)),
    )
    weights = Weights(jnp.ones((VOCAB, EMBED)), [layer])
    return lambda tokens: logits(weights, tokens)


@typed
def attend_with_one_number_of_heads(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time heads head_dim"],
    value: Float[Array, "batch time heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    return attend(query, key, value)


@typed
def attend_with_heads_before_time(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
    value: Float[Array, "batch time kv_heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    return attend(query, key, value).swapaxes(1, 2)


# --- modules of Flax NNX -------------------------------------------------------------------------


class NNXAttention(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed_dim, self.num_heads = EMBED, HEADS
        self.projections = nnx.Linear(EMBED, 3 * EMBED, rngs=rngs)
        self.out = nnx.Linear(EMBED, EMBED, rngs=rngs)

    @typed
    def split(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch {self.num_heads} time {self.embed_dim//self.num_heads}"]:
        batch, time, _ = x.shape
        return x.reshape(batch, time, self.num_heads, -1).transpose(0, 2, 1, 3)

    @typed
    def merge(
        self, x: Float[Array, "batch {self.num_heads} time head_dim"]
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        batch, _, time, _ = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, time, self.embed_dim)

    @typed
    def __call__(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        query, key, value = map(self.split, jnp.split(self.projections(x), 3, axis=-1))
        scores = query @ key.transpose(0, 1, 3, 2) / jnp.sqrt(key.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return self.out(self.merge(weights @ value))


class NNXBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed_dim = EMBED
        self.attention_norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = NNXAttention(rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, EMBED, rngs=rngs)

    @typed
    def __call__(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class NNXGPT(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.vocab_size, self.block_size = VOCAB, BLOCK
        self.tokens = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.positions = nnx.Embed(BLOCK, EMBED, rngs=rngs)
        self.block = NNXBlock(rngs=rngs)
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)

    @typed
    def __call__(
        self, tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time {self.vocab_size}"]:
        time = tokens.shape[1]
        assert time <= self.block_size, f"{time} tokens are longer than the block"
        x = self.tokens(tokens) + self.positions(jnp.arange(time))
        return self.tokens.attend(self.norm(self.block(x)))


@typed
def split_without_transpose(
    self: NNXAttention, x: Float[Array, "batch time {self.embed_dim}"]
) -> Float[Array, "batch {self.num_heads} time {self.embed_dim//self.num_heads}"]:
    batch, time, _ = x.shape
    return x.reshape(batch, time, self.num_heads, -1)


@typed
def merge_with_heads_as_time(
    self: NNXAttention, x: Float[Array, "batch {self.num_heads} time head_dim"]
) -> Float[Array, "batch time {self.embed_dim}"]:
    batch, heads, _, _ = x.shape
    return x.reshape(batch, heads, -1)


# --- modules of Equinox --------------------------------------------------------------------------


class EquinoxAttention(eqx.Module):
    projections: eqx.nn.Linear
    out: eqx.nn.Linear
    embed_dim: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)

    @typed
    def attend(
        self,
        query: Float[Array, "time head_dim"],
        key: Float[Array, "time head_dim"],
        value: Float[Array, "time head_dim"],
    ) -> Float[Array, "time head_dim"]:
        scores = query @ key.T / jnp.sqrt(key.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1) @ value

    @typed
    def of_heads(
        self, heads: Float[Array, "3 time {self.num_heads} head_dim"]
    ) -> Float[Array, "time {self.num_heads} head_dim"]:
        query, key, value = heads
        return jax.vmap(self.attend, in_axes=1, out_axes=1)(query, key, value)

    @typed
    def __call__(
        self, x: Float[Array, "time {self.embed_dim}"]
    ) -> Float[Array, "time {self.embed_dim}"]:
        projected = jax.vmap(self.projections)(x)
        heads = projected.reshape(x.shape[0], 3, self.num_heads, -1).swapaxes(0, 1)
        return jax.vmap(self.out)(self.of_heads(heads).reshape(x.shape))


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: EquinoxAttention
    mlp: eqx.nn.MLP
    embed_dim: int = eqx.field(static=True)

    @typed
    def __call__(
        self, x: Float[Array, "time {self.embed_dim}"]
    ) -> Float[Array, "time {self.embed_dim}"]:
        x = x + self.attention(jax.vmap(self.norm)(x))
        return x + jax.vmap(self.mlp)(x)


class EquinoxGPT(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    block: EquinoxBlock
    head: eqx.nn.Linear
    vocab_size: int = eqx.field(static=True)
    block_size: int = eqx.field(static=True)

    @typed
    def __call__(self, tokens: Int[Array, " time"]) -> Float[Array, "time {self.vocab_size}"]:
        (time,) = tokens.shape
        assert time <= self.block_size, f"{time} tokens are longer than the block"
        x = jax.vmap(self.tokens)(tokens) + self.positions.weight[:time]
        return jax.vmap(self.head)(self.block(x))
