"""Learning-rate schedules."""

from typing import assert_never

import jax.numpy as jnp
import optax
import optax.contrib

from jgpt.config import OptimizerConfig


def learning_rate_schedule(
    config: OptimizerConfig, steps: int, peak: float | None = None
) -> optax.Schedule:
    """Make the learning-rate schedule, whose highest rate is `peak` (default: the config's rate).

    It is a linear warmup, then a constant rate, cosine decay, or warmup-stable-decay with a linear
    decay (wsd: Hu et al. 2024, section 4). The decay is shorter if the warmup would overlap it.
    """
    if peak is None:
        peak = config.learning_rate
    if config.schedule_steps is not None:  # a run that is trained further keeps its schedule
        steps = config.schedule_steps
    warmup = config.warmup_steps
    after_warmup = max(steps - warmup, 1)
    first = peak / (warmup + 1)  # not 0, since the first step would change nothing
    # As a fraction, so that groups with other peaks decay in proportion.
    lowest = config.min_learning_rate / config.learning_rate
    constant = optax.constant_schedule(peak)
    # Each piece counts its steps from its own beginning.
    pieces = [optax.linear_schedule(first, peak, warmup)]
    boundaries = [warmup]
    match config.schedule:
        case "constant":
            pieces.append(constant)
        case "cosine":
            pieces.append(optax.cosine_decay_schedule(peak, after_warmup, alpha=lowest))
        case "wsd":
            decay = round(steps * config.decay_fraction)
            decay = max(decay, 1)
            # Otherwise the run would end above its minimum: at 0.62 of the peak after 80% of
            # warmup.
            decay = min(decay, after_warmup)
            pieces.append(constant)
            pieces.append(optax.linear_schedule(peak, peak * lowest, decay))
            boundaries.append(warmup + after_warmup - decay)
        case _:
            assert_never(config.schedule)
    schedule = optax.join_schedules(pieces, boundaries)
    # optax divides an integer step in float32 even with x64 enabled
    return lambda step: schedule(jnp.asarray(step, jnp.result_type(float)))
