"""The objective of training, the cross-entropy by default, and the losses of evaluations.

A window has `block_size` inputs and one more token. The inputs are all tokens but the last, and the
target of each input is the token after it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt.config import ModelConfig
from jgpt.data.batch import Batch
from jgpt.nn.loss import cross_entropy_from, rows_at_once, token_losses_from
from jgpt.nn.models import GatheredHead, LanguageModel
from jgpt.nn.precision import portable, wider_dtype
from jgpt.shapes.contract import record, typed


@record
@dataclass(frozen=True)
class Loss:
    """What an objective returns: the mean loss of a batch, and metrics beside it.

    Micro-batches average the value and the metrics by their weights.
    """

    value: Float[Array, ""]
    """The mean over the batch, which training minimises."""
    weight: Float[Array, ""] | Int[Array, ""] | float | int = 1
    """The weight of this batch among others, such as the sum of its targets' weights."""
    metrics: Mapping[str, Any] | None = None
    """Scalars by name, which are logged at each step."""


Objective = Callable[[LanguageModel, Batch, nnx.Rngs | None], Float[Array, ""] | Loss]
"""A function of the model, the batch and the random keys of a step, whose stream is `dropout`."""


def next_token_loss(model: LanguageModel, batch: Batch, rngs: nnx.Rngs | None = None) -> Loss:
    """Return the cross-entropy of a batch, the built-in objective, to which terms can be added.

    It never materialises all logits of a large batch: the head and the loss take turns on chunks.
    Dropout is applied if there are `rngs`. With weights of targets, it is their weighted mean, and
    its weight is their sum. With documents, each is computed as if it were alone. Raises ValueError
    if the model takes no documents.
    """
    x = final_hidden(model, batch, rngs)  # batch time embed_dim
    max_rows = _max_rows(model, batch.targets.size)
    if batch.weights is None:
        return Loss(cross_entropy_from(x, batch.targets, model.logits, max_rows))
    losses = token_losses_from(x, batch.targets, model.logits, max_rows)  # batch time
    weight = batch.weights.sum()
    # In a micro-batch without counted targets, the mean is 0 and not NaN.
    divisor = jnp.where(weight > 0, weight, 1)
    return Loss((losses * batch.weights).sum() / divisor, weight)


@typed
def final_hidden(
    model: LanguageModel, batch: Batch, rngs: nnx.Rngs | None
) -> Float[Array, "{batch.tokens.shape[0]} {batch.tokens.shape[1]-1} features"]:
    """Return the final hidden states of a batch's inputs."""
    if batch.documents is None:
        return model.hidden(batch.inputs, rngs=rngs)
    if "documents" not in inspect.signature(model.hidden).parameters:
        raise ValueError(
            f"the hidden of a {type(model).__name__} takes no documents: make batches without them"
        )
    hidden: Any = model.hidden
    return hidden(batch.inputs, rngs=rngs, documents=batch.documents[:, :-1])


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
    widest = wider_dtype(portable(config).dtype, config.param_dtype)
    return wider_dtype(widest)
