"""Metric trackers: TensorBoard and Weights & Biases, both extras."""

import importlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgpt.config import TrackerName, missing_case
from jgpt.runs.directory import TENSORBOARD, WANDB_ID


@dataclass(frozen=True)
class Tracker:
    """Logs the metrics of a step."""

    log: Callable[[dict[str, Any], int], None]
    close: Callable[[], None]


def require_tracker(name: TrackerName) -> Any:
    """A tracker's module. Raises ModuleNotFoundError if its extra is not installed."""
    match name:
        case "tensorboard":
            module = "tensorboardX"
        case "wandb":
            module = "wandb"
        case _:
            missing_case("trackers", name, __file__)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"trackers={name} needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


def open_tracker(name: TrackerName, run: Path, first_step: int) -> Tracker:
    """Open a tracker that continues after `first_step`.

    `tensorboard --logdir RUN/tensorboard` shows scalars; events of later steps are purged. With
    `WANDB_MODE=offline`, a run of Weights & Biases stays in `RUN/wandb`.
    """
    module = require_tracker(name)
    match name:
        case "tensorboard":
            writer = module.SummaryWriter(str(run / TENSORBOARD), purge_step=first_step + 1)

            def log(values: dict[str, Any], step: int) -> None:
                for field, value in values.items():
                    writer.add_scalar(field, value, step)

            return Tracker(log, writer.close)
        case "wandb":
            file = run / WANDB_ID
            identity = file.read_text() if file.is_file() else secrets.token_hex(4)
            file.write_text(identity)
            how = {"project": "jgpt", "name": run.name, "id": identity, "resume": "allow"}
            its = module.init(dir=str(run), **how)
            return Tracker(lambda values, step: its.log(values, step=step), its.finish)
        case _:
            missing_case("trackers", name, __file__)
