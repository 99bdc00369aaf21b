"""The objective of training and evaluation: the cross-entropy of a batch of windows.

A window has `block_size` inputs and one more token. The inputs are all tokens but the last, and the
target of each input is the token after it.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jgpt.config import ModelConfig
from jgpt.nn.loss import cross_entropy_from, rows_at_once, token_losses_from
from jgpt.nn.models import GatheredHead, LanguageModel
from jgpt.nn.precision import portable
from jgpt.shapes.contract import typed


@typed
def mean_loss(
    model: LanguageModel, window: Int[Array, "batch window"], key: Key[Array, ""]
) -> Float[Array, ""]:
    """Return the mean loss of all targets, with dropout; `key` is its PRNG key."""
    inputs = window[:, :-1]  # batch time
    x = model.hidden(inputs, rngs=nnx.Rngs(dropout=key))  # batch time embed_dim
    max_rows = _max_rows(model, window[:, 1:].size)
    return cross_entropy_from(x, window[:, 1:], model.logits, max_rows)


@typed
def target_losses(
    model: LanguageModel, window: Int[Array, "batch window"]
) -> Float[Array, "batch window-1"]:
    """Return the loss of each target, without dropout."""
    inputs = window[:, :-1]  # batch time
    x = model.hidden(inputs)  # batch time embed_dim
    max_rows = _max_rows(model, window[:, 1:].size)
    return token_losses_from(x, window[:, 1:], model.logits, max_rows)


def _max_rows(model: LanguageModel, rows: int) -> int:
    """Return the number of rows of logits that a loss materialises at once."""
    max_rows = rows_at_once(model.vocab_size)
    if rows > max_rows and isinstance(model, GatheredHead):
        # Gathered once, here: otherwise each chunk of rows would gather the head over the mesh.
        model.gather_head()
    return max_rows


def loss_dtype(config: ModelConfig) -> jnp.dtype:
    """Return the dtype of losses: the widest of the dtypes of parameters, logits and loss."""
    widest = jnp.promote_types(portable(config).dtype, config.param_dtype)
    return jnp.promote_types(widest, jnp.float32)
