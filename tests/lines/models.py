"""Models as users write them, without an annotation: nanoGPT's in Flax NNX, and two of other
libraries."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx


class CausalSelfAttention(nnx.Module):
    def __init__(self, n_embd, n_head, rngs):
        self.n_head = n_head
        self.c_attn = nnx.Linear(n_embd, 3 * n_embd, rngs=rngs)
        self.c_proj = nnx.Linear(n_embd, n_embd, rngs=rngs)

    def __call__(self, x):
        B, T, C = x.shape
        q, k, v = jnp.split(self.c_attn(x), 3, axis=2)
        k = k.reshape(B, T, self.n_head, C // self.n_head).swapaxes(1, 2)
        q = q.reshape(B, T, self.n_head, C // self.n_head).swapaxes(1, 2)
        v = v.reshape(B, T, self.n_head, C // self.n_head).swapaxes(1, 2)
        att = (q @ k.swapaxes(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        att = jnp.where(jnp.tril(jnp.ones((T, T))) == 0, -jnp.inf, att)
        att = jax.nn.softmax(att, axis=-1)
        y = att @ v
        y = y.swapaxes(1, 2).reshape(B, T, C)
        y = self.c_proj(y)
        return y


class MLP(nnx.Module):
    def __init__(self, n_embd, rngs):
        self.c_fc = nnx.Linear(n_embd, 4 * n_embd, rngs=rngs)
        self.c_proj = nnx.Linear(4 * n_embd, n_embd, rngs=rngs)

    def __call__(self, x):
        x = self.c_fc(x)
        x = jax.nn.gelu(x)
        x = self.c_proj(x)
        return x


class Block(nnx.Module):
    def __init__(self, n_embd, n_head, rngs):
        self.ln_1 = nnx.LayerNorm(n_embd, rngs=rngs)
        self.attn = CausalSelfAttention(n_embd, n_head, rngs)
        self.ln_2 = nnx.LayerNorm(n_embd, rngs=rngs)
        self.mlp = MLP(n_embd, rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class NanoGPT(nnx.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, rngs):
        self.wte = nnx.Embed(vocab_size, n_embd, rngs=rngs)
        self.wpe = nnx.Embed(block_size, n_embd, rngs=rngs)
        self.h = nnx.List([Block(n_embd, n_head, rngs) for _ in range(n_layer)])
        self.ln_f = nnx.LayerNorm(n_embd, rngs=rngs)

    def __call__(self, idx, targets=None):
        _, t = idx.shape
        pos = jnp.arange(t)
        tok_emb = self.wte(idx)
        pos_emb = self.wpe(pos)
        x = tok_emb + pos_emb
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            logits = self.wte.attend(x[:, [-1], :])
            return logits, None
        logits = self.wte.attend(x)
        flat = logits.reshape(-1, logits.shape[-1])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(flat), targets.reshape(-1, 1), axis=1)
        loss = -chosen.mean()
        return logits, loss


class EquinoxMixer(eqx.Module):
    over_time: eqx.nn.Linear
    over_features: eqx.nn.MLP

    def __init__(self, time, features, key):
        first, second = jax.random.split(key)
        self.over_time = eqx.nn.Linear(time, time, key=first)
        self.over_features = eqx.nn.MLP(features, features, 3 * features, 1, key=second)

    def __call__(self, x):
        mixed = jax.vmap(jax.vmap(self.over_time, 1, 1))(x)
        x = x + mixed
        pairs = jnp.concatenate([x, x[::-1]], axis=0)
        y = jax.vmap(jax.vmap(self.over_features))(pairs)
        halves = jnp.split(y, 2)
        return halves[0] - halves[1]


class LinenCell(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x):
        gates = linen.Dense(2 * self.features)(x)
        opened, value = jnp.split(jax.nn.sigmoid(gates), 2, axis=-1)
        shifted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = opened * x + (1 - opened) * shifted * value
        first = x[:, ::2]
        return x, first.mean(axis=1)
