"""The models of lesson 20: a bigram, and what the lecture adds to it.

Each rung adds one thing to the rung before; `size` leaves dropout out again.
All rungs take the same number of steps, of the same number of characters, with
the same learning rate.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

import jgpt
from jgpt.nn.layers import Embedding, LayerNorm, Linear

VOCAB_SIZE = 65
STEPS = 5000
LEARNING_RATE = 1e-3
"""Constant; that of the lecture from the first head to layer norm."""


# --- blocks -------------------------------------------------------------------


class Attending(nnx.Module):
    """Attention alone, whose output replaces the stream."""

    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention = jgpt.MultiHeadAttention(config, rngs=rngs)

    @jgpt.typed
    def __call__(
        self,
        x: Float[Array, "batch time embed_dim"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time embed_dim"]:
        """Apply the block."""
        return self.attention(x, rngs=rngs)


class Replacing(nnx.Module):
    """Attention and an MLP; the output of each replaces the stream."""

    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention = jgpt.MultiHeadAttention(config, rngs=rngs)
        self.feed_forward = jgpt.FeedForward(config, rngs=rngs)

    @jgpt.typed
    def __call__(
        self,
        x: Float[Array, "batch time embed_dim"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time embed_dim"]:
        """Apply the block."""
        attended = self.attention(x, rngs=rngs)
        return self.feed_forward(attended, rngs=rngs)


class Adding(nnx.Module):
    """Attention and an MLP; the output of each is added to the stream."""

    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention = jgpt.MultiHeadAttention(config, rngs=rngs)
        self.feed_forward = jgpt.FeedForward(config, rngs=rngs)

    @jgpt.typed
    def __call__(
        self,
        x: Float[Array, "batch time embed_dim"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time embed_dim"]:
        """Apply the block."""
        attended = x + self.attention(x, rngs=rngs)
        return attended + self.feed_forward(attended, rngs=rngs)


# --- the rungs ----------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """What a model is made of."""

    name: str
    block: type[nnx.Module] = Attending
    num_layers: int = 1
    num_heads: int = 4
    dropout: float = 0.0
    embed_dim: int = 32
    block_size: int = 8
    batch_size: int = 32


RUNGS = (
    Rung("bigram", num_layers=0),
    Rung("one head", num_heads=1),
    Rung("many heads"),
    Rung("MLP", Replacing),
    Rung("three blocks", Replacing, num_layers=3),
    Rung("residual", Adding, num_layers=3),
    Rung("norm", jgpt.Block, num_layers=3),
    Rung("depth", jgpt.Block, num_layers=6),
    Rung("dropout", jgpt.Block, num_layers=6, dropout=0.2),
    Rung(
        "size",
        jgpt.Block,
        num_layers=6,
        embed_dim=64,
        block_size=32,
        batch_size=8,
    ),
)


def rung_named(name: str) -> Rung:
    """The rung of this name."""
    for rung in RUNGS:
        if rung.name == name:
            return rung
    raise ValueError(f"there is no rung {name!r}")


class Model(nnx.Module):
    """Embeddings, blocks of one kind, and a head."""

    def __init__(self, rung: Rung, *, rngs: nnx.Rngs) -> None:
        config = jgpt.ModelConfig(
            vocab_size=VOCAB_SIZE,
            block_size=rung.block_size,
            num_layers=max(rung.num_layers, 1),
            num_heads=rung.num_heads,
            embed_dim=rung.embed_dim,
            activation="relu",
            use_bias=True,
            dropout=rung.dropout,
        )
        self.token_embedding = Embedding(
            VOCAB_SIZE, rung.embed_dim, init_std=1.0, rngs=rngs
        )
        self.position_embedding = Embedding(
            rung.block_size, rung.embed_dim, init_std=1.0, rngs=rngs
        )
        self.blocks = nnx.List(
            rung.block(config, rngs=rngs) for _ in range(rung.num_layers)
        )
        self.final_norm = nnx.List()
        if rung.block is jgpt.Block:
            self.final_norm.append(LayerNorm(rung.embed_dim))
        self.head = Linear(rung.embed_dim, VOCAB_SIZE, rngs=rngs)
        _draw_as_pytorch(self, rngs)

    @jgpt.typed
    def __call__(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time vocab"]:
        """Compute logits."""
        positions = jnp.arange(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, rngs=rngs)
        for norm in self.final_norm:
            x = norm(x)
        return self.head(x)


def _draw_as_pytorch(model: nnx.Module, rngs: nnx.Rngs) -> None:
    """Draw the weights of linear layers again, as PyTorch does by default.

    The lecture keeps this default. With the smaller weights of GPT-2, blocks
    without residual connections would learn nothing.
    """
    for _, layer in nnx.iter_modules(model):
        if not isinstance(layer, Linear):
            continue
        bound = layer.in_features**-0.5
        for weights in (layer.kernel, layer.bias):
            if weights is not None:
                weights[...] = jax.random.uniform(
                    rngs.params(), weights.shape, minval=-bound, maxval=bound
                )


# --- training -----------------------------------------------------------------


def train(
    rung: Rung, seed: int, text: Int[Array, " length"], steps: int = STEPS
) -> tuple[Model, Float[Array, " {steps}"]]:
    """A trained model, and the loss of each step."""
    graph, weights = nnx.split(Model(rung, rngs=nnx.Rngs(seed)))
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)
    window = jnp.arange(rung.block_size + 1)

    def loss_of(weights, windows, key):
        model = nnx.merge(graph, weights)
        logits = model(windows[:, :-1], rngs=nnx.Rngs(dropout=key))
        return jgpt.cross_entropy(logits, windows[:, 1:])

    def one_step(carried, step):
        weights, state = carried
        key = jax.random.fold_in(jax.random.key(seed), step)
        starts_key, dropout_key = jax.random.split(key)
        starts = jax.random.randint(
            starts_key, (rung.batch_size, 1), 0, len(text) - rung.block_size
        )
        loss, gradient = jax.value_and_grad(loss_of)(
            weights, text[starts + window], dropout_key
        )
        updates, state = optimizer.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state), loss

    @jax.jit
    def all_steps(weights):
        start = (weights, optimizer.init(weights))
        return jax.lax.scan(one_step, start, jnp.arange(steps))

    (weights, _), losses = all_steps(weights)
    return nnx.merge(graph, weights), losses


def validation_loss(
    model: Model, text: Int[np.ndarray, " length"], block_size: int
) -> float:
    """The loss on a whole text, in windows one after the other."""
    rows = (len(text) - 1) // block_size
    starts = block_size * np.arange(rows)[:, None]
    windows = jnp.asarray(text[starts + np.arange(block_size + 1)], int)

    @nnx.jit
    def mean_loss(model, windows):
        return jgpt.cross_entropy(model(windows[:, :-1]), windows[:, 1:])

    return float(mean_loss(model, windows))


def write(
    model: Model, prompt: Int[np.ndarray, " block_size"], count: int
) -> Int[np.ndarray, " {count}"]:
    """Continue a whole window by `count` tokens, drawn at temperature 1."""
    call = nnx.jit(model)
    context = jnp.asarray(prompt, int)[None]
    written = []
    for step in range(count):
        key = jax.random.fold_in(jax.random.key(0), step)
        drawn = jax.random.categorical(key, call(context)[:, -1])
        written.append(int(drawn[0]))
        context = jnp.concatenate([context[:, 1:], drawn[:, None]], axis=1)
    return np.array(written)
