"""The parts of a GPT, as the lessons solve them: for who has not written one.

Each is the solution of an exercise in lessons 1, 3, 4 and 5.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

SMALL = nnx.initializers.normal(0.02)


def cross_entropy(logits, targets):
    """The mean loss of predicting the targets."""
    log_probability = jax.nn.log_softmax(logits, axis=-1)
    of_targets = jnp.take_along_axis(
        log_probability, targets[..., None], axis=-1
    )
    return -of_targets.mean()


class Embedding(nnx.Module):
    """A table with a row of features for each token or position."""

    def __init__(self, rows, features, *, deviation=0.02, rngs):
        numbers = jax.random.normal(rngs.params(), (rows, features))
        self.table = nnx.Param(deviation * numbers)

    def __call__(self, tokens):
        return self.table[...][tokens]


def train_loop(loss_of, optimizer, weights, batch_at, steps):
    """Take steps from these weights; return the new weights and the losses."""

    @jax.jit
    def train_step(weights, state, batch):
        loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    state = optimizer.init(weights)
    losses = []
    for step in range(steps):
        weights, state, loss = train_step(weights, state, batch_at(step))
        losses.append(loss)
    return weights, losses


class Head(nnx.Module):
    """One causal attention head."""

    def __init__(self, embed_dim, head_dim, *, rngs):
        options = {"use_bias": False, "kernel_init": SMALL, "rngs": rngs}
        self.query = nnx.Linear(embed_dim, head_dim, **options)
        self.key = nnx.Linear(embed_dim, head_dim, **options)
        self.value = nnx.Linear(embed_dim, head_dim, **options)

    def __call__(self, x):
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        head_dim = query.shape[-1]
        scores = query @ key.transpose(0, 2, 1) * head_dim**-0.5
        time = x.shape[1]
        mask = jnp.tril(jnp.ones((time, time), bool))
        masked = jnp.where(mask, scores, -jnp.inf)
        weights = jax.nn.softmax(masked, axis=-1)
        return weights @ value


class MultiHeadAttention(nnx.Module):
    """Several heads beside each other, and a projection."""

    def __init__(self, embed_dim, num_heads, *, rngs):
        head_dim = embed_dim // num_heads
        self.heads = nnx.List(
            Head(embed_dim, head_dim, rngs=rngs) for _ in range(num_heads)
        )
        self.projection = nnx.Linear(
            embed_dim, embed_dim, kernel_init=SMALL, rngs=rngs
        )

    def __call__(self, x):
        outputs = [head(x) for head in self.heads]
        return self.projection(jnp.concatenate(outputs, axis=-1))


class LayerNorm(nnx.Module):
    """Mean 0 and deviation 1 at each position, then a scale and a bias."""

    def __init__(self, features, *, rngs):
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))

    def __call__(self, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        normed = centred / jnp.sqrt(variance + 1e-5)
        return normed * self.scale[...] + self.bias[...]


class FeedForward(nnx.Module):
    """Two layers at each position."""

    def __init__(self, embed_dim, *, rngs):
        options = {"kernel_init": SMALL, "rngs": rngs}
        self.expansion = nnx.Linear(embed_dim, 4 * embed_dim, **options)
        self.projection = nnx.Linear(4 * embed_dim, embed_dim, **options)

    def __call__(self, x):
        hidden = jax.nn.relu(self.expansion(x))
        return self.projection(hidden)


class Block(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual."""

    def __init__(self, embed_dim, num_heads, *, rngs):
        self.attention_norm = LayerNorm(embed_dim, rngs=rngs)
        self.attention = MultiHeadAttention(embed_dim, num_heads, rngs=rngs)
        self.feed_forward_norm = LayerNorm(embed_dim, rngs=rngs)
        self.feed_forward = FeedForward(embed_dim, rngs=rngs)

    def __call__(self, x):
        attended = x + self.attention(self.attention_norm(x))
        normed = self.feed_forward_norm(attended)
        return attended + self.feed_forward(normed)
