"""Texts that are mixed by weights. Nothing here imports jax, which `jgpt prepare` does not need."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Share:
    """A text in a mixture."""

    source: str
    tokens: int
    """The number of its training tokens, which follow those of the text before."""
    weight: float
    """The weight with which a window is drawn from this text."""


def weights_of(words: Sequence[str]) -> dict[str, float] | None:
    """Return the weights of words such as a.txt=0.7, or None if they have none."""
    weights: dict[str, float] = {}
    for word in words:
        name, equals, weight = word.rpartition("=")
        if not equals or Path(word).exists():  # a file may have such a name
            continue
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = math.nan
        if not 0 < weights[name] < math.inf:
            raise ValueError(
                f"{weight!r} is no weight of {name}: give a positive number, as in {name}=0.3"
            )
    if not weights:
        return None
    if len(weights) < len(words):
        raise ValueError(
            f"`data={tuple(words)!r}` must have a weight for each text, as in a.txt=0.7 b.txt=0.3, "
            "and each text once"
        )
    return weights
