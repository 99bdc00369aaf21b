"""The loss: cross entropy per token, and what that is per character."""

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


@typed
def bits_per_character(loss: float, characters_per_token: float) -> float:
    """A loss in nats per token as bits per character of the text that the tokens stand for."""
    return loss / (characters_per_token * math.log(2))
