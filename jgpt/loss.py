"""The loss: cross entropy, and what it means per token and per character."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jgpt.contracts import typed


@typed
def token_losses(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Each target's negative log likelihood in nats, in at least float32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@typed
def cross_entropy(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, ""]:
    """The mean negative log likelihood of the targets in nats, in at least float32."""
    return token_losses(logits, targets).mean()


def perplexity(loss: float) -> float:
    """How many equally likely tokens a loss in nats amounts to."""
    return math.exp(loss)


def bits_per_character(loss: float, tokens: int, characters: int) -> float:
    """A loss in nats per token as bits per character of the text that the tokens stand for."""
    return loss * tokens / (characters * math.log(2))
