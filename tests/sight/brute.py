"""What outputs depend on, found by derivatives and by changed inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHAPE = (2, 5, 3)


def dependences(*programs: Callable[[Any], Any], seeds: int = 3) -> list[np.ndarray]:
    """Return for (batch, time) of each output and of the input whether a change was seen."""
    batch, time, _ = SHAPE
    found = np.zeros((len(programs), batch, time, batch, time), bool)

    def outputs(x):
        found = [program(x).astype(jnp.float32) for program in programs]
        return found, jax.tree.map(jnp.nan_to_num, found)

    # One program for all and for both: compiling each took nine tenths of the time.
    run = jax.jit(jax.jacfwd(outputs, has_aux=True))
    for seed in range(seeds):
        numbers = np.random.default_rng(seed)
        x = numbers.normal(size=SHAPE).astype(np.float32)
        derivatives, plain = run(x)
        for index, derivative in enumerate(derivatives):
            found[index] |= (np.nan_to_num(derivative) != 0).any(axis=(2, 5))
        for place in np.ndindex(batch, time):
            for size in (1.0, 30.0):
                changed = x.copy()
                changed[place] = size * numbers.normal(size=SHAPE[2])
                _, values = run(changed)
                for index, value in enumerate(values):
                    differs = np.asarray(value) != np.asarray(plain[index])
                    found[index, :, :, *place] |= differs.any(axis=2)
    return list(found)


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
