"""The loss scale of float16, which has no numbers between 0 and 6e-8, where many gradients are.

The loss is multiplied by a factor before it is differentiated, and the gradients are divided by it
afterwards, in float32. The factor is as large as the gradients allow (Micikevicius et al. 2018).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jgpt.config import ModelConfig
from jgpt.shapes.contract import typed

FIRST_FACTOR = 2.0**15
STEPS_UNTIL_DOUBLED = 2000

LossScale = PyTree[Float[Array, ""] | Int[Array, ""]]
"""The `factor`, the `good_steps` since it last changed, and the `skipped_steps` of the run."""


def has_loss_scale(model: ModelConfig) -> bool:
    """Return whether the train state of a model has a loss scale: with products in float16."""
    return model.dtype == "float16"


@typed
def first_loss_scale() -> LossScale:
    """Return the loss scale before the first step."""
    return {
        "factor": jnp.asarray(FIRST_FACTOR, jnp.float32),
        "good_steps": jnp.zeros((), jnp.int32),
        "skipped_steps": jnp.zeros((), jnp.int32),
    }


@typed
def next_loss_scale(loss_scale: LossScale, overflowed: Bool[Array, ""]) -> LossScale:
    """Return the loss scale after a step, which is skipped if its gradients overflowed."""
    factor = loss_scale["factor"]
    good_steps = loss_scale["good_steps"] + 1
    is_doubled = good_steps == STEPS_UNTIL_DOUBLED
    raised = jnp.where(is_doubled, 2 * factor, factor)
    return {
        "factor": jnp.where(overflowed, factor / 2, raised),
        "good_steps": jnp.where(overflowed | is_doubled, 0, good_steps),
        "skipped_steps": loss_scale["skipped_steps"] + overflowed.astype(jnp.int32),
    }
