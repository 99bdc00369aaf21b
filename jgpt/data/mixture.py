"""The texts of a mixture. Nothing here imports jax, which `jgpt prepare` does not need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A text in a mixture."""

    source: str
    tokens: int
    """The number of its training tokens, which follow those of the text before."""
    weight: float
    """The weight with which a window is drawn from this text."""
