"""What outputs depend on, found by derivatives and by changed inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHAPE = (2, 5, 3)


def dependences(program: Callable[[Any], Any], seeds: int = 3) -> np.ndarray:
    """Return for (batch, time) of the output and of the input whether a change was seen."""
    batch, time, _ = SHAPE
    found = np.zeros((batch, time, batch, time), bool)
    run = jax.jit(lambda x: jnp.nan_to_num(program(x).astype(jnp.float32)))
    differentiate = jax.jit(jax.jacfwd(lambda x: program(x).astype(jnp.float32)))
    for seed in range(seeds):
        numbers = np.random.default_rng(seed)
        x = numbers.normal(size=SHAPE).astype(np.float32)
        found |= (np.nan_to_num(differentiate(x)) != 0).any(axis=(2, 5))
        plain = np.asarray(run(x))
        for place in np.ndindex(batch, time):
            for size in (1.0, 30.0):
                changed = x.copy()
                changed[place] = size * numbers.normal(size=SHAPE[2])
                found[:, :, *place] |= (np.asarray(run(changed)) != plain).any(axis=2)
    return found


def outside(hull: Any, found: np.ndarray) -> np.ndarray:
    """Dependences that were seen and are not between the first and the last position of a hull."""
    wrong = []
    for axis, size in enumerate(SHAPE[:2]):
        seen = found.any(axis=3 - axis)  # output batch, output time, positions along the axis
        position = np.arange(size)
        first = hull.first("bt"[axis]).min(axis=2)[..., None]
        last = hull.last("bt"[axis]).max(axis=2)[..., None]
        wrong.append(np.argwhere(seen & ((position < first) | (position > last))))
    return np.concatenate(wrong)
