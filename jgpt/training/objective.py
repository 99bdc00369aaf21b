"""The objective of training, the cross-entropy by default, and the losses of evaluations.

A window has `block_size` inputs and one more token. The inputs are all tokens but the last, and the
target of each input is the token after it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt.config import ModelConfig
from jgpt.fields import Make
from jgpt.nn.loss import cross_entropy_from, rows_at_once, token_losses_from
from jgpt.nn.models import GatheredHead, LanguageModel
from jgpt.nn.precision import portable, wider_dtype
from jgpt.shapes.contract import record, typed
from jgpt.shapes.describe import describe_value
from jgpt.user_code import require_code

TAKEN_METRICS = (
    *("step", "loss", "gradient_norm", "learning_rate", "validation_loss", "tokens", "seconds"),
    *("tokens_per_second", "model_flops_utilisation", "memory_bytes"),
)
"""The metrics of every run, whose names an objective's metrics can't have."""


@record
@dataclass(frozen=True)
class Loss:
    """What an objective may return: the mean loss of a batch, and metrics beside it."""

    value: Float[Array, ""]
    """The mean over the batch, which training minimises."""
    metrics: Mapping[str, Any] | None = None
    """Scalars by name, which are logged at each step."""


Objective = Callable[
    [LanguageModel, Int[Array, "batch window"], nnx.Rngs | None], Float[Array, ""] | Loss
]
"""A function of the model, the windows of a batch and the random keys of a step, whose stream is
`dropout`."""


@typed
def next_token_loss(
    model: LanguageModel, tokens: Int[Array, "batch window"], rngs: nnx.Rngs | None = None
) -> Float[Array, ""]:
    """Return the mean cross-entropy of a batch, the built-in objective.

    It never materialises all logits of a large batch: the head and the loss take turns on chunks.
    Dropout is applied if there are `rngs`.
    """
    x = model.hidden(tokens[:, :-1], rngs=rngs)  # batch time embed_dim
    targets = tokens[:, 1:]
    return cross_entropy_from(x, targets, model.logits, _max_rows(model, targets.size))


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


# --- an objective of the user's own ---------------------------------------------------------------


def objective_of(objective: Make) -> tuple[Callable[[Any], Any], list[Any]]:
    """Return a function from arrays to the objective of a config, and the arrays that it holds.

    An `nnx.Module` or another pytree, such as one with a teacher, holds arrays. They become
    arguments of the steps: as constants they would be compiled into the program.
    """
    if objective is None:
        return lambda _: next_token_loss, []
    leaves, structure = jax.tree.flatten(require_code(objective, "objective"))
    held = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def with_arrays(arrays: Any) -> Any:
        remaining = iter(arrays)
        replaced = []
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf = next(remaining)
            replaced.append(leaf)
        return structure.unflatten(replaced)

    return with_arrays, held


def as_loss(result: Any, dtype: Any) -> Loss:
    """Return an objective's result as a Loss whose value and metrics have a dtype.

    Raises ValueError for a result that is no mean, and for metrics that can't be logged.
    """
    if not isinstance(result, Loss):
        if not _is_scalar(result):
            raise ValueError(
                "the objective must return a scalar, the mean over the batch, or jgpt.Loss, not "
                f"{describe_value(result)}"
            )
        result = Loss(jnp.asarray(result))
    metrics = {}
    for name, value in (result.metrics or {}).items():
        if name in TAKEN_METRICS:
            raise ValueError(f"the objective's metric {name!r} is one of jgpt's: rename it")
        if jnp.shape(value) != ():
            raise ValueError(
                f"the objective's metric {name!r} must be a scalar, not {describe_value(value)}"
            )
        metrics[name] = jnp.asarray(value, dtype)
    return Loss(result.value.astype(dtype), metrics or None)


def _is_scalar(result: Any) -> bool:
    """Return whether an array is one floating-point number."""
    if not isinstance(result, (jax.Array, np.generic)):
        return False
    return result.shape == () and jnp.issubdtype(result.dtype, jnp.floating)
