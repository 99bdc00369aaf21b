"""The record of a batch: windows of tokens, and what is known about them."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from jgpt.shapes.contract import record, typed


@record
@dataclass(frozen=True)
class Batch:
    """A batch of windows, each of `block_size` inputs and one more token.

    The batches of many steps are one Batch, whose arrays have the steps as their first axis.
    """

    tokens: Int[Array, "batch window"]
    """The tokens of the windows."""
    weights: Float[Array, "batch window-1"] | None = None
    """The weight of each target in the mean loss; None means that all weigh the same."""
    documents: Int[Array, "batch window"] | None = None
    """The number of each token's document; None means that a window is one document."""

    @property
    @typed
    def inputs(self) -> Int[Array, "{self.tokens.shape[0]} {self.tokens.shape[1]-1}"]:
        """All tokens but the last."""
        return self.tokens[:, :-1]

    @property
    @typed
    def targets(self) -> Int[Array, "{self.tokens.shape[0]} {self.tokens.shape[1]-1}"]:
        """The token after each input."""
        return self.tokens[:, 1:]
