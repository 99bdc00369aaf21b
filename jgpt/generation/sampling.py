"""Sampling the next token: temperature, top-k, top-p, min-p."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jgpt.contracts import record, typed


@record
@dataclass(frozen=True)
class Sampling:
    """Sampling parameters that are traced: changing them needs no new compilation."""

    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None = None
    min_p: Float[Array, ""] | None = None


@typed
def next_token(
    logits: Float[Array, "batch vocab"],
    key: Key[Array, ""],
    sampling: Sampling,
    top_k: int | None = None,
) -> Int[Array, " batch"]:
    """Sample a token for each row, independently.

    After temperature, `top_k` keeps the k most likely tokens, `top_p` the nucleus (Holtzman et al.
    2020, section 3.1), and `min_p` tokens with at least that fraction of the highest probability
    (Nguyen et al. 2024, section 3). Temperature 0 is greedy.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # below the smallest normal number, division overflows
    warm = sampling.temperature >= jnp.finfo(sampling.temperature.dtype).tiny
    drawn = functools.partial(_sample, key=key, sampling=sampling, top_k=top_k)
    return jax.lax.cond(warm, drawn, lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32), logits)


@typed
def _sample(
    logits: Float[Array, "batch vocab"], key: Key[Array, ""], sampling: Sampling, top_k: int | None
) -> Int[Array, " batch"]:
    # shifted to a maximum of 0, logits can't overflow at any temperature
    logits = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampling.top_p is not None:
        descending = jnp.sort(logits, axis=-1)[:, ::-1]
        probability = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = (before < sampling.top_p).at[:, 0].set(True)
        smallest = jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampling.min_p is not None:
        logits = jnp.where(logits < jnp.log(sampling.min_p), -jnp.inf, logits)  # the maximum is 0
    # by inverse transform, a block of tokens and then one of its tokens: two random numbers for a
    # row, where the Gumbel trick of `jax.random.categorical` takes one for each token
    batch, vocab = logits.shape
    size = math.isqrt(vocab)
    blocks = jnp.pad(jnp.exp(logits), ((0, 0), (0, -vocab % size))).reshape(batch, -1, size)
    uniform = jax.random.uniform(key, (batch, 2), logits.dtype)
    block = _inverse_transform(blocks.sum(axis=-1), uniform[:, 0])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * size + _inverse_transform(within, uniform[:, 1])


@typed
def _inverse_transform(
    weights: Float[Array, "batch choices"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """A choice for each row, by weight, from a number in [0, 1); one of weight 0 never."""
    # as sums over a tree may round, what has no weight is told by its weight
    total = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), -1)
    reached = total >= (1 - uniform[:, None]) * total.max(axis=-1, keepdims=True)
    return jnp.argmax(reached, axis=-1).astype(jnp.int32)
