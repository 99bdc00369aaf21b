"""A small model of functions and dataclasses, in the manner of Marin's grug, is proven.

PYTEST_DONT_REWRITE: an `assert` that pytest has rewritten asks a size for its text.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int

from jgpt.shapes.contract import typed
from jgpt.shapes.proofs import prove

VOCAB = 11
EMBED, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 24, 6, 3, 4, 10


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
def rotate_both(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
) -> tuple[Float[Array, "batch time heads head_dim"], Float[Array, "batch time kv_heads head_dim"]]:
    return rotate(query), rotate(key)


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
    query = jnp.einsum("bte,ehd->bthd", y, layer.query)
    key = jnp.einsum("bte,ehd->bthd", y, layer.key)
    query, key = rotate_both(query, key)
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
def rotate_both_as_one(
    query: Float[Array, "batch time heads head_dim"], key: Float[Array, "batch time heads head_dim"]
) -> tuple[Float[Array, "batch time heads head_dim"], Float[Array, "batch time heads head_dim"]]:
    return rotate(query), rotate(key)


@typed
def attend_with_heads_before_time(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch time kv_heads head_dim"],
    value: Float[Array, "batch time kv_heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    repeats = query.shape[2] // key.shape[2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, repeats, axis=2))
    return jnp.einsum("bhqk,bkhd->bhqd", scores, jnp.repeat(value, repeats, axis=2))


MODULE = sys.modules[__name__]


def test_a_model_is_proven_for_any_batch_and_length():
    proof = prove(functional(), "int32[b t]")

    assert [(case.where, case.verdict) for case in proof.cases] == [((), "proven")]


@pytest.mark.parametrize(
    ("part", "wrong"),
    [("rotate_both", rotate_both_as_one), ("attend", attend_with_heads_before_time)],
)
def test_a_model_with_a_mistake_is_violated(part, wrong, monkeypatch):
    monkeypatch.setattr(MODULE, part, wrong)
    proof = prove(functional(), "int32[b t]")

    assert not proof
    assert proof.cases[0].verdict == "violated"
    assert wrong.__name__ in proof.cases[0].detail
