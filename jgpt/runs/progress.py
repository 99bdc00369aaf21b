"""The Progress protocol: callbacks of training."""

from pathlib import Path

from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.training.step import TrainState


class Progress:
    """Training callbacks; the default does nothing."""

    most_steps: int | None = None
    """The most steps between calls of `stepped`; None: `steps_per_call`."""

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Training starts, or is resumed, at the state's step."""

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Steps were taken; `loss` is of the last step."""

    def evaluated(self, step: int, validation_loss: float) -> None:
        """The validation split was evaluated."""

    def estimated(self, step: int, validation_loss: float) -> None:
        """The validation loss was estimated on a part of the split."""

    def warned(self, message: str) -> None:
        """A warning; training continues."""
