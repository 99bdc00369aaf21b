"""Small models of our own in the manner of public ones are traced and proven.

They are a model of functions and dataclasses, as Marin's grug; a port of nanoGPT to Flax NNX; and
a GPT of Equinox, whose modules take one sequence or one token.

PYTEST_DONT_REWRITE: an `assert` that pytest has rewritten asks a size for its text.
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
from jgpt.shapes.proofs import prove
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


# --- modules of Flax NNX -------------------------------------------------------------------------


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
        if tokens.shape[0] > self.block_size:
            raise ValueError(f"{tokens.shape[0]} tokens are more than {self.block_size}")
        x = jax.vmap(self.tokens)(tokens) + self.positions.weight[: tokens.shape[0]]
        return jax.vmap(self.head)(self.block(x))


def equinox() -> Callable[..., Any]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    attention = EquinoxAttention(
        eqx.nn.Linear(EMBED, 3 * EMBED, key=next(keys)),
        eqx.nn.Linear(EMBED, EMBED, key=next(keys)),
        EMBED,
        HEADS,
    )
    mlp = eqx.nn.MLP(EMBED, EMBED, HIDDEN, depth=1, key=next(keys))
    model = EquinoxGPT(
        eqx.nn.Embedding(VOCAB, EMBED, key=next(keys)),
        eqx.nn.Embedding(BLOCK, EMBED, key=next(keys)),
        EquinoxBlock(eqx.nn.LayerNorm(EMBED), attention, mlp, EMBED),
        eqx.nn.Linear(EMBED, VOCAB, key=next(keys)),
        VOCAB,
        BLOCK,
    )
    return jax.vmap(model)


@typed
def of_heads_with_heads_first(
    self: EquinoxAttention, heads: Float[Array, "3 time {self.num_heads} head_dim"]
) -> Float[Array, "time {self.num_heads} head_dim"]:
    query, key, value = heads
    return jax.vmap(self.attend, in_axes=1)(query, key, value)


# --- tests ---------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A model, its trace, the cases of its proof, and wrong parts, each with its place."""

    make: Callable[[], Callable[..., Any]]
    trace: str
    cases: list[tuple[tuple[str, ...], str]]
    mistakes: list[tuple[Any, str, Callable[..., Any]]]


MODULE = sys.modules[__name__]
UP_TO_BLOCK = [(("t <= 8",), "proven"), (("t >= 9",), "rejected")]
MODELS = {
    "functional": Model(
        functional,
        """
        logits(tokens: int32[batch=2 time=5])
          block          float32[batch=2 time=5 embed=24]
            normalise    float32[batch=2 time=5 embed=24]
            rotate_both  float32[batch=2 time=5 heads=6 head_dim=4]
                         float32[batch=2 time=5 kv_heads=3 head_dim=4]
              rotate     float32[batch=2 time=5 heads=6 head_dim=4]
              rotate     float32[batch=2 time=5 heads=3 head_dim=4]
            attend       float32[batch=2 time=5 heads=6 head_dim=4]
            normalise    float32[batch=2 time=5 embed=24]
          normalise      float32[batch=2 time=5 embed=24]
        result           float32[batch=2 time=5 vocab=11]
        """,
        [((), "proven")],
        [
            (MODULE, "rotate_both", rotate_both_as_one),
            (MODULE, "attend", attend_with_heads_before_time),
        ],
    ),
    "nnx": Model(
        lambda: NNXGPT(rngs=nnx.Rngs(0)),
        """
        NNXGPT(tokens: int32[batch=2 time=5])
          block        float32[batch=2 time=5 embed_dim=24]
            attention  float32[batch=2 time=5 embed_dim=24]
              split    float32[batch=2 num_heads=6 time=5 embed_dim//num_heads=4]
              split    float32[batch=2 num_heads=6 time=5 embed_dim//num_heads=4]
              split    float32[batch=2 num_heads=6 time=5 embed_dim//num_heads=4]
              merge    float32[batch=2 time=5 embed_dim=24]
        result         float32[batch=2 time=5 vocab_size=11]
        """,
        UP_TO_BLOCK,
        [
            (NNXAttention, "split", split_without_transpose),
            (NNXAttention, "merge", merge_with_heads_as_time),
        ],
    ),
    "equinox": Model(
        equinox,
        """
        EquinoxGPT(tokens: int32[time=5])
          EquinoxBlock        float32[time=5 embed_dim=24]
            EquinoxAttention  float32[time=5 embed_dim=24]
              of_heads        float32[time=5 num_heads=6 head_dim=4]
                attend        float32[time=5 head_dim=4]
        result                float32[time=5 vocab_size=11]
        """,
        UP_TO_BLOCK,
        [(EquinoxAttention, "of_heads", of_heads_with_heads_first)],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_traced(name: str):
    model = MODELS[name].make()

    assert model(TOKENS).shape == (2, 5, VOCAB)
    assert f"{shape_trace(model, TOKENS)}\n" == textwrap.dedent(MODELS[name].trace).lstrip()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_proven_for_any_batch_and_length(name: str):
    proof = prove(MODELS[name].make(), "int32[b t]")

    assert [(case.where, case.verdict) for case in proof.cases] == MODELS[name].cases
    assert proof


MISTAKES = [(name, *mistake) for name, model in MODELS.items() for mistake in model.mistakes]


@pytest.mark.parametrize(("name", "owner", "part", "wrong"), MISTAKES)
def test_a_model_with_a_mistake_is_violated(name, owner, part, wrong, monkeypatch):
    monkeypatch.setattr(owner, part, wrong)
    proof = prove(MODELS[name].make(), "int32[b t]")

    assert not proof
    assert proof.cases[0].verdict == "violated"
    assert wrong.__name__ in proof.cases[0].detail
