"""The exceptions of `fit` when it is asked to stop."""

from pathlib import Path


class TrainingStopped(Exception):
    """Raised when training was asked to stop, after a checkpoint was saved."""

    def __init__(self, step: int, directory: Path) -> None:
        super().__init__(f"stopped after step {step}; its checkpoint is in {directory}")
        self.step = step
        self.directory = directory


class StoppedBeforeTraining(TrainingStopped):
    """Raised when a stop was requested while the text was tokenized. The tokens so far are kept."""

    def __init__(self, directory: Path) -> None:
        super().__init__(0, directory)
        # There is no checkpoint, which the message of the other class names.
        self.args = ("stopped before training began, while the text was tokenized",)
