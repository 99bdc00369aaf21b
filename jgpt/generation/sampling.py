"""Sampling the next token: temperature, top-k, top-p, min-p."""

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
    greedy = jnp.argmax(logits, axis=-1)
    # below the smallest normal number, division overflows
    warm = sampling.temperature >= jnp.finfo(sampling.temperature.dtype).tiny
    # shifted to a maximum of 0, logits can't overflow at any temperature
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits = logits / jnp.where(warm, sampling.temperature, 1)
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
    sampled = jax.random.categorical(key, logits)
    return jnp.where(warm, sampled, greedy).astype(jnp.int32)
