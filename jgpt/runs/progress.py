"""Callbacks of training, and their displays outside the command line."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.runs.directory import RunDirectory
from jgpt.words import counted


class Progress:
    """Training callbacks; the default does nothing."""

    def tokenized(self, fraction: float) -> None:
        """Report the tokenized `fraction` of the text: 0 while it is read, 1 at the end."""

    def started(
        self, config: TrainConfig, dataset: Dataset, weights: Any, step: int, out: Path
    ) -> None:
        """Report that training starts, or is resumed, at a step."""

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Report steps; `loss` is that of the last step."""

    def evaluating(self, done: int, targets: int) -> None:
        """Report that a long evaluation has covered `done` of its `targets`."""

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Report the validation loss over the planned targets."""

    def warned(self, message: str) -> None:
        """Report a warning; training continues."""


class LineProgress(Progress):
    """One line on standard error for the current step, and a line for each evaluation."""

    def started(
        self, config: TrainConfig, dataset: Dataset, weights: Any, step: int, out: Path
    ) -> None:
        """Print the run's directory."""
        self._steps = config.steps
        self.warned(f"{counted(config.steps, 'step')} into {out}")

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Replace the line."""
        self._write(f"step {step}/{self._steps}  loss {loss:.3f}")

    def evaluating(self, done: int, targets: int) -> None:
        """Replace the line."""
        self._write(f"evaluation {done / targets:.0%}")

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Print a line."""
        self.warned(f"step {step}: validation loss {validation_loss:.4f}")

    def warned(self, message: str) -> None:
        """Print a line."""
        self._write(f"{message}\n")

    def _write(self, text: str) -> None:
        # Return to the beginning of the line, overwrite it with spaces, and return again.
        erase = f"\r{' ' * 40}\r"
        print(f"{erase}{text}", end="", file=sys.stderr, flush=True)


class NotebookProgress(LineProgress):
    """The display of `LineProgress`, and the loss curve, redrawn at each evaluation."""

    def started(
        self, config: TrainConfig, dataset: Dataset, weights: Any, step: int, out: Path
    ) -> None:
        """Print the run's directory."""
        super().started(config, dataset, weights, step, out)
        self._run = RunDirectory(out)
        self._picture = None

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Print a line, and replace the drawn curve."""
        from IPython.display import SVG, display  # pyright: ignore[reportMissingImports]

        super().evaluated(step, validation_loss)
        drawn = draw_losses(self._run, "svg", self.warned)
        if drawn is None:
            return
        picture = SVG(drawn)
        if self._picture is None:
            self._picture = display(picture, display_id=True)
        else:
            self._picture.update(picture)


def draw_losses(run: RunDirectory, format: str, warn: Callable[[str], None]) -> bytes | None:
    """Return a picture of a run's losses, or None with a warning.

    A `matplotlibrc` may ask for LaTeX or a missing backend, which raises errors of any kind. They
    must not interrupt the end of training.
    """
    try:
        from jgpt.runs.plots import losses_image  # 40 MiB that training doesn't need

        return losses_image(run.metrics(), run.path.absolute().name, format)
    except Exception as error:
        lines = str(error).splitlines()
        if not lines:
            lines = [repr(error)]
        warn(f"no picture of the losses: {lines[0]}")
        return None


def default_progress() -> Progress:
    """Return a display for a terminal or a notebook, and a silent one elsewhere."""
    # A notebook has imported IPython; a plain shell of IPython has no kernel.
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return NotebookProgress()
    # None under pythonw, or where standard error is closed.
    if sys.stderr is not None and sys.stderr.isatty():
        return LineProgress()
    return Progress()
