"""Metric trackers: TensorBoard and Weights & Biases, both extras."""

import importlib
import secrets
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jgpt.config import TrackerName
from jgpt.runs.directory import TENSORBOARD, WANDB_ID


@runtime_checkable
class Tracker(Protocol):
    """A sink for metrics besides metrics.jsonl."""

    def log(self, line: dict[str, Any]) -> None:
        """Log one step's metrics."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


def open_tracker(name: TrackerName, run: Path, run_name: str, first_step: int) -> Tracker:
    """Open a tracker."""
    kinds = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return kinds[name](run, run_name, first_step)


def require_tracker(name: TrackerName) -> None:
    """Raise ModuleNotFoundError if a tracker's extra is not installed."""
    try:
        importlib.import_module({"tensorboard": "tensorboardX", "wandb": "wandb"}[name])
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"trackers={name} needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


class TensorBoard:
    """Scalars for `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, run: Path, run_name: str, first_step: int) -> None:
        """Continue after `first_step`; events of later steps are purged."""
        writer = importlib.import_module("tensorboardX").SummaryWriter
        self._writer = writer(str(run / TENSORBOARD), purge_step=first_step + 1)

    def log(self, line: dict[str, Any]) -> None:
        """Log one step's metrics as scalars."""
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A run in the project jgpt; with `WANDB_MODE=offline` it stays in `RUN/wandb`."""

    def __init__(self, run: Path, run_name: str, first_step: int) -> None:
        """Start a run, or continue the one of this directory."""
        wandb = importlib.import_module("wandb")
        file = run / WANDB_ID
        identity = file.read_text() if file.is_file() else secrets.token_hex(4)
        file.write_text(identity)
        self._run = wandb.init(
            project="jgpt", name=run_name, dir=str(run), id=identity, resume="allow"
        )

    def log(self, line: dict[str, Any]) -> None:
        """Log one step's metrics."""
        values = {name: value for name, value in line.items() if name != "step"}
        self._run.log(values, step=line["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
