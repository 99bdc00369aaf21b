"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, both extras."""

import importlib
import secrets
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jgpt.config import TrackerName
from jgpt.runs.directory import TENSORBOARD, WANDB_ID


@runtime_checkable
class Tracker(Protocol):
    """Someone who is given each line of the metrics as it is written."""

    def log(self, line: dict[str, Any]) -> None:
        """Take one step's metrics."""
        ...

    def close(self) -> None:
        """Have all of them where they belong."""
        ...


def open_tracker(name: TrackerName, run: Path, run_name: str, first_step: int) -> Tracker:
    """A tracker that writes into the run directory. Raises ModuleNotFoundError for its extra."""
    kinds = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    try:
        return kinds[name](run, run_name, first_step)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"trackers={name} needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


class TensorBoard:
    """Scalars for `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, run: Path, run_name: str, first_step: int) -> None:
        """Go on after `first_step`: what was written of later steps is purged."""
        writer = importlib.import_module("tensorboardX").SummaryWriter
        self._writer = writer(str(run / TENSORBOARD), purge_step=first_step + 1)

    def log(self, line: dict[str, Any]) -> None:
        """A scalar of each value."""
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project jgpt; with `WANDB_MODE=offline` it stays in `RUN/wandb`."""

    def __init__(self, run: Path, run_name: str, first_step: int) -> None:
        """Start it, or go on with the one that this directory has."""
        wandb = importlib.import_module("wandb")
        file = run / WANDB_ID
        identity = file.read_text() if file.is_file() else secrets.token_hex(4)
        file.write_text(identity)
        self._run = wandb.init(
            project="jgpt", name=run_name, dir=str(run), id=identity, resume="allow"
        )

    def log(self, line: dict[str, Any]) -> None:
        """All values under their step."""
        values = {name: value for name, value in line.items() if name != "step"}
        self._run.log(values, step=line["step"])

    def close(self) -> None:
        """Wait until it is sent, or on disk."""
        self._run.finish()
