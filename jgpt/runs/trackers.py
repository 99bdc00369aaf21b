"""Metric trackers: TensorBoard and Weights & Biases, both extras."""

import importlib
import secrets
from pathlib import Path
from typing import Any

from jgpt.config import TrackerName
from jgpt.runs.directory import TENSORBOARD, WANDB_ID


class TensorBoard:
    """Scalars for `tensorboard --logdir RUN/tensorboard`; events of later steps are purged."""

    def __init__(self, module: Any, run: Path, first_step: int) -> None:
        self._writer = module.SummaryWriter(str(run / TENSORBOARD), purge_step=first_step + 1)

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

    def __init__(self, module: Any, run: Path, first_step: int) -> None:
        file = run / WANDB_ID
        identity = file.read_text() if file.is_file() else secrets.token_hex(4)
        file.write_text(identity)
        self._run = module.init(
            project="jgpt", name=run.name, dir=str(run), id=identity, resume="allow"
        )

    def log(self, line: dict[str, Any]) -> None:
        """Log one step's metrics."""
        values = {name: value for name, value in line.items() if name != "step"}
        self._run.log(values, step=line["step"])

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


Tracker = TensorBoard | WeightsAndBiases
_TRACKERS = {"tensorboard": ("tensorboardX", TensorBoard), "wandb": ("wandb", WeightsAndBiases)}


def require_tracker(name: TrackerName) -> None:
    """Raise ModuleNotFoundError if a tracker's extra is not installed."""
    try:
        importlib.import_module(_TRACKERS[name][0])
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"trackers={name} needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


def open_tracker(name: TrackerName, run: Path, first_step: int) -> Tracker:
    """Open a tracker that continues after `first_step`."""
    module, tracker = _TRACKERS[name]
    return tracker(importlib.import_module(module), run, first_step)
