"""Sampling the next token: temperature, top-k, top-p, min-p."""

import functools
import math
from dataclasses import dataclass, field
from typing import NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from jgpt.config import DEFAULT_TEMPERATURE
from jgpt.nn.precision import wider_dtype
from jgpt.shapes.contract import record, typed

PRNGKey = Key[Array, ""] | UInt32[Array, "words"]
"""A key of `jax.random.key`, or one of the older `jax.random.PRNGKey`."""


@typed
def typed_key(key: PRNGKey) -> Key[Array, ""]:
    """Return a key of `jax.random.key`, also for one of `jax.random.PRNGKey`."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)


@record
@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Under jit all but `top_k` are traced, so that new values compile
    nothing."""

    temperature: float = DEFAULT_TEMPERATURE
    top_k: int | None = field(default=None, metadata={"static": True})
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        # Written as what a value must be, so that NaN, which compares as false, is an error, too.
        if not 0 <= self.temperature < math.inf:
            self._raise("temperature", "0 or more")
        if self.top_k is not None and self.top_k < 1:
            self._raise("top_k", "at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            self._raise("top_p", "in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            self._raise("min_p", "in [0, 1]")

    def _raise(self, name: str, requirement: str) -> NoReturn:
        value = getattr(self, name)
        raise ValueError(f"`{name}={value!r}` must be {requirement}")


@typed
def next_token(
    logits: Float[Array, "batch vocab"], key: Key[Array, ""], sampling: Sampling
) -> Int[Array, " batch"]:
    """Sample a token for each row, independently.

    After temperature, `top_k` keeps the k most likely tokens, `top_p` the nucleus (Holtzman et al.
    2020, section 3.1), and `min_p` tokens with at least that fraction of the highest probability
    (Nguyen et al. 2024, section 3). Temperature 0 is greedy. Of equally likely tokens, `top_k`,
    `top_p` and temperature 0 prefer those of the lowest index.
    """
    # bfloat16 has too few digits for probabilities; float64 stays float64.
    logits = logits.astype(wider_dtype(logits.dtype))
    draw = functools.partial(_sample, key=key, sampling=sampling)
    # below the smallest normal number, division overflows
    is_warm = sampling.temperature >= jnp.finfo(jnp.float32).tiny
    # The condition is evaluated at run time, so that no temperature, not even 0, compiles a
    # program.
    return jax.lax.cond(is_warm, draw, _most_likely, logits)


@typed
def _most_likely(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@typed
def _sample(
    logits: Float[Array, "batch vocab"], key: Key[Array, ""], sampling: Sampling
) -> Int[Array, " batch"]:
    # With a maximum of 0, logits can't overflow at any temperature.
    highest = logits.max(axis=-1, keepdims=True)  # batch 1
    logits = (logits - highest) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits = _keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = _keep_nucleus(logits, sampling.top_p)
    if sampling.min_p is not None:
        # The highest logit is 0, so a probability divided by the highest one is exp(logit), and no
        # softmax is needed.
        is_unlikely = logits < jnp.log(sampling.min_p)
        logits = jnp.where(is_unlikely, -jnp.inf, logits)
    # These are weights rather than probabilities: the draw divides by their sum.
    weights = jnp.exp(logits)
    return _draw_by_weight(weights, key)


@typed
def _keep_top_k(logits: Float[Array, "batch vocab"], top_k: int) -> Float[Array, "batch vocab"]:
    largest, _ = jax.lax.top_k(logits, top_k)  # batch top_k, descending
    count = jnp.full(logits.shape[0], top_k)
    smallest_kept = largest[:, -1]  # batch
    return _keep_largest(logits, smallest_kept, count)


@typed
def _keep_nucleus(
    logits: Float[Array, "batch vocab"], top_p: Float[Array, ""] | float
) -> Float[Array, "batch vocab"]:
    ascending = jnp.sort(logits, axis=-1)  # batch vocab
    descending = ascending[:, ::-1]
    probabilities = jax.nn.softmax(descending, axis=-1)
    cumulative = jnp.cumsum(probabilities, axis=-1)  # batch vocab
    # A token is in the nucleus while the probabilities before it add up to less than `top_p`. That
    # sum is read from the cumulative one: `cumulative - probability` rounds, and 0.9 - 0.1 is below
    # 0.8.
    sum_before = cumulative[:, :-1]  # batch vocab-1: of each token but the first, always kept
    is_in_nucleus = sum_before < top_p
    count = 1 + is_in_nucleus.sum(axis=-1)  # batch
    last_kept = count[:, None] - 1  # batch 1
    smallest_kept = jnp.take_along_axis(descending, last_kept, axis=-1)  # batch 1
    return _keep_largest(logits, smallest_kept[:, 0], count)


@typed
def _draw_by_weight(
    weights: Float[Array, "batch vocab"], key: Key[Array, ""]
) -> Int[Array, " batch"]:
    """Draw a token for each row by inverse transform: first a block of tokens, then a token in it.

    This takes two random numbers for each row, where the Gumbel trick of `jax.random.categorical`
    takes one for each token.
    """
    batch, vocab = weights.shape
    # about as many blocks as tokens in a block, so that both sums are short
    block_size = math.isqrt(vocab)
    num_blocks = -(-vocab // block_size)  # rounded up
    # The padding has weight 0 and is never drawn.
    padding = num_blocks * block_size - vocab
    padded = jnp.pad(weights, ((0, 0), (0, padding)))
    blocks = padded.reshape(batch, num_blocks, block_size)
    uniform = jax.random.uniform(key, (batch, 2), weights.dtype)
    weight_of_block = blocks.sum(axis=-1)  # batch num_blocks
    block = _inverse_transform(weight_of_block, uniform[:, 0])  # batch
    drawn_block = jnp.take_along_axis(blocks, block[:, None, None], axis=1)  # batch 1 block_size
    weights_in_block = drawn_block[:, 0]  # batch block_size
    place_in_block = _inverse_transform(weights_in_block, uniform[:, 1])  # batch
    return block * block_size + place_in_block


@typed
def _keep_largest(
    logits: Float[Array, "batch vocab"],
    smallest: Float[Array, " batch"],
    count: Int[Array, " batch"],
) -> Float[Array, "batch vocab"]:
    """Keep the `count` largest logits of each row, down to `smallest`; the others become -inf.

    A threshold alone would keep every tie, and bfloat16 causes many. Among ties the first are kept:
    counting them takes a tenth of the time of a sort that also moves indices.
    """
    threshold = smallest[:, None]  # batch 1
    larger = logits > threshold  # batch vocab
    ties = logits == threshold  # batch vocab
    room = count - larger.sum(axis=-1)  # batch: the number of ties that are kept
    ties_so_far = jnp.cumsum(ties, axis=-1)  # batch vocab
    first_ties = ties & (ties_so_far <= room[:, None])
    return jnp.where(larger | first_ties, logits, -jnp.inf)


@typed
def _inverse_transform(
    weights: Float[Array, "batch choices"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """Draw a choice for each row by weight, from a number in [0, 1); never one of weight 0."""
    is_possible = weights > 0  # batch choices
    cumulative = jnp.cumsum(weights, axis=-1)  # batch choices
    # A weight of 0 would never be drawn if sums were exact, since they don't grow there. But each
    # sum is rounded on its own, so it may grow there, too: -1 is a sum that is never reached.
    total = jnp.where(is_possible, cumulative, -1)  # batch choices
    # In (0, 1], times the last sum, so that the largest number still reaches the last choice.
    last_total = total.max(axis=-1, keepdims=True)  # batch 1
    fraction = 1 - uniform[:, None]  # batch 1
    reached = total >= fraction * last_total  # batch choices
    return jnp.argmax(reached, axis=-1).astype(jnp.int32)  # the first sum that is reached
