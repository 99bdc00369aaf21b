"""AdamW, its schedule, what it decays, and gradient clipping: one `make_optimizer`."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jgpt.config import OptimizerConfig
from jgpt.contracts import typed

Weights = PyTree[Float[Array, "..."]]


@typed
def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate at each step: linear warmup, then flat or a half cosine to the end."""
    first = config.learning_rate / (config.warmup_steps + 1)  # the first step is a step too
    after = (
        optax.constant_schedule(config.learning_rate)
        if config.schedule == "constant"
        else optax.cosine_decay_schedule(
            config.learning_rate,
            max(steps - config.warmup_steps, 1),
            alpha=config.min_learning_rate / config.learning_rate,
        )
    )
    warmup = optax.linear_schedule(first, config.learning_rate, config.warmup_steps)
    schedule = optax.join_schedules([warmup, after], [config.warmup_steps])
    # optax divides an integer step in float32, whatever the precision of the rest
    return lambda step: schedule(jnp.asarray(step, jnp.result_type(float)))


@typed
def decay_mask(weights: PyTree[Float[Array, "..."], "Weights"]) -> PyTree[bool, "Weights"]:
    """True for what weight decay shrinks: matrices and tables, never biases and scales."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, weights)


@typed
def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scale all gradients down together when their joint norm is above `limit`.

    As `torch.nn.utils.clip_grad_norm_` does it, 1e-6 in the divisor included.
    """

    @typed
    def clip(
        gradients: PyTree[Float[Array, "?*shape"], "Weights"],
        weights: PyTree[Float[Array, "?*shape"], "Weights"] | None = None,
    ) -> PyTree[Float[Array, "?*shape"], "Weights"]:
        scale = jnp.minimum(limit / (optax.tree.norm(gradients) + 1e-6), 1.0)
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)

    return optax.stateless(clip)


@typed
def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) as the config has it, for a run of `steps` steps."""
    adamw = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=1e-8,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if config.gradient_clip == 0:
        return adamw
    return optax.chain(clip_by_global_norm(config.gradient_clip), adamw)
