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
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return self.nan + self.positive_infinity + self.negative_infinity == 0

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
        if isinstance(array, (Tracer, jax.ShapeDtypeStruct)):
            return None
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
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
        mean = float(finite.mean())
        std = float(finite.std())
        # The square of a large number may be infinite, and JSON has no word for it.
        if not math.isfinite(std):
            std = None
        if not math.isfinite(mean):
            mean = None
    return Statistics(
        mean=mean,
        std=std,
        values=values.size,
        nan=int(np.isnan(values).sum()),
        positive_infinity=int(np.isposinf(values).sum()),
        negative_infinity=int(np.isneginf(values).sum()),
    )


def describe_statistics(calls: Sequence[Statistics]) -> str:
    """Return the statistics of the same array in one or several calls: `mean 0.1, std 1 to 1.2`."""
    parts = []
    for name in ("mean", "std"):
        numbers = []
        for call in calls:
            number = getattr(call, name)
            if number is not None:
                numbers.append(number)
        if not numbers:
            continue
        least = f"{min(numbers):.3g}"
        most = f"{max(numbers):.3g}"
        text = f"{name} {least}"
        if least != most:
            text += f" to {most}"
        parts.append(text)
    values = 0
    counts = {"NaN": 0, "inf": 0, "-inf": 0}
    for call in calls:
        values += call.values
        counts["NaN"] += call.nan
        counts["inf"] += call.positive_infinity
        counts["-inf"] += call.negative_infinity
    for name, count in counts.items():
        if count:
            parts.append(f"{count} of {values} {name}")
    return ", ".join(parts)
