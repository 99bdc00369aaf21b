"""What the values of an array are like: mean, standard deviation, and what is not finite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


@dataclass(frozen=True)
class Statistics:
    """The mean and the standard deviation of the finite values of arrays, and counts of others."""

    mean: float | None
    """None if no value is finite."""
    std: float | None
    values: int
    nan: int
    positive_infinity: int
    negative_infinity: int

    @property
    def is_alarming(self) -> bool:
        """Whether there are NaN or inf. A mask sets scores to -inf on purpose, so they are not."""
        return self.nan + self.positive_infinity > 0


def statistics_of(arrays: Sequence[Any]) -> Statistics | None:
    """Return the statistics of all values of some arrays, or None if they have no values.

    Arrays inside a transformation and random keys have none.
    """
    parts = []
    for array in arrays:
        is_abstract = isinstance(array, (Tracer, jax.ShapeDtypeStruct))
        if is_abstract or jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return None
        # NumPy can't reduce the 16-bit and 8-bit floats of accelerators.
        parts.append(np.asarray(array).astype(np.float64).ravel())
    if not parts:
        return None
    values = np.concatenate(parts)
    finite = values[np.isfinite(values)]
    mean = None
    std = None
    if finite.size:
        mean = _in_json(finite.mean())
        std = _in_json(finite.std())
    return Statistics(
        mean=mean,
        std=std,
        values=values.size,
        nan=int(np.isnan(values).sum()),
        positive_infinity=int(np.isposinf(values).sum()),
        negative_infinity=int(np.isneginf(values).sum()),
    )


def _in_json(number: Any) -> float | None:
    # The square of a large number may be infinite, and JSON has no word for it.
    if math.isfinite(number):
        return float(number)
    return None


def describe_statistics(calls: Sequence[Statistics]) -> str:
    """Return the statistics of the same array in one or several calls: `mean 0.1, std 1 to 1.2`."""
    parts = []
    for name in ("mean", "std"):
        found = [getattr(call, name) for call in calls]
        numbers = [number for number in found if number is not None]
        if not numbers:
            continue
        least = f"{min(numbers):.3g}"
        most = f"{max(numbers):.3g}"
        text = f"{name} {least}"
        if least != most:
            text += f" to {most}"
        parts.append(text)
    values = sum(call.values for call in calls)
    counts = {
        "NaN": sum(call.nan for call in calls),
        "inf": sum(call.positive_infinity for call in calls),
        "-inf": sum(call.negative_infinity for call in calls),
    }
    for name, count in counts.items():
        if count:
            parts.append(f"{count} of {values} {name}")
    return ", ".join(parts)
