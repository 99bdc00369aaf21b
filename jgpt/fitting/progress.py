"""Callbacks of training: what `fit` reports, and the displays of it outside the command line."""

import sys
from collections.abc import Callable
from pathlib import Path

from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.runs.directory import RunDirectory
from jgpt.training.evaluation import EvaluationPlan
from jgpt.training.state import TrainState
from jgpt.words import counted


class Progress:
    """Training callbacks; the default does nothing."""

    most_steps: int | None = None
    """The most steps between calls of `stepped`, in a single process; None: `steps_per_call`."""

    def tokenized(self, fraction: float) -> None:
        """This fraction of the text was tokenized: 0 while it is read, 1 at the end."""

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Training starts, or is resumed, at the state's step."""

    def planned(self, evaluations: EvaluationPlan) -> None:
        """How many evaluations there will be, and of which targets. Called before `started`."""

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Steps were taken; `loss` is of the last step."""

    def evaluating(self, done: int, targets: int) -> None:
        """A long evaluation has covered `done` of its `targets` so far."""

    def evaluated(self, step: int, validation_loss: float) -> None:
        """The validation split was evaluated, on the targets that were planned."""

    def evaluated_exactly(self, step: int, validation_loss: float) -> None:
        """The last step was evaluated on the whole validation split, too."""

    def estimated(self, step: int, validation_loss: float) -> None:
        """The validation loss was estimated on a part of the split."""

    def warned(self, message: str) -> None:
        """A warning; training continues."""


class LineProgress(Progress):
    """One line on standard error that follows the steps, and a line for each evaluation."""

    _over = ""

    def planned(self, evaluations: EvaluationPlan) -> None:
        """Keep what is said after a loss."""
        self._over = evaluations.over

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Print where the run goes."""
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
        self.warned(f"step {step}: validation loss {validation_loss:.4f}{self._over}")

    def evaluated_exactly(self, step: int, validation_loss: float) -> None:
        """Print a line."""
        self.warned(f"step {step}: validation loss {validation_loss:.4f} over all tokens")

    def warned(self, message: str) -> None:
        """Print a line."""
        self._write(f"{message}\n")

    def _write(self, text: str) -> None:
        # back to the beginning of the line, over what stands there, and back again
        erase = f"\r{' ' * 40}\r"
        print(f"{erase}{text}", end="", file=sys.stderr, flush=True)


class NotebookProgress(LineProgress):
    """The same, and the loss curve, drawn again at each evaluation."""

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Print where the run goes."""
        super().started(config, dataset, state, out)
        self._run = RunDirectory(out)
        self._picture = None

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Print a line, and draw the curve in the place of the one before."""
        from IPython.display import SVG, display

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
    """Return the picture of a run's losses, or None with a warning.

    A `matplotlibrc` may ask for LaTeX or a backend that is not there, in errors of any kind; that
    must not cost the end of training.
    """
    try:
        from jgpt.pictures.plots import losses_image  # 40 MiB that training doesn't need

        return losses_image(run.metrics(), run.path.absolute().name, format)
    except Exception as error:
        lines = str(error).splitlines()
        if not lines:
            lines = [repr(error)]
        warn(f"no picture of the losses: {lines[0]}")
        return None


def default_progress() -> Progress:
    """Shown on a terminal and in a notebook, silent elsewhere."""
    # a notebook has imported IPython, and a shell of IPython has no kernel
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return NotebookProgress()
    # None under pythonw, and where standard error is closed
    if sys.stderr is not None and sys.stderr.isatty():
        return LineProgress()
    return Progress()
