"""Training callbacks."""

from pathlib import Path

from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.training.step import TrainState


class Progress:
    """Someone who wants to know how training goes; this one doesn't care."""

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Training begins, or goes on, at the state's step."""

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Steps were taken, the last of them with this loss."""

    def evaluated(self, step: int, validation_loss: float) -> None:
        """The whole held-out split was evaluated."""

    def warned(self, message: str) -> None:
        """Something is not as it should be, and training goes on."""

    def downloaded(self, received: int, total: int | None) -> None:
        """So many bytes of a corpus have come."""
