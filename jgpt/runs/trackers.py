"""Metric trackers: TensorBoard and Weights & Biases, both extras."""

import functools
import importlib
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, assert_never

from jgpt.config import TrackerName
from jgpt.runs.directory import TENSORBOARD, WANDB_ID

Log = Callable[[dict[str, Any], int], None]
"""Logs the metrics of a step."""


def require_tracker(name: TrackerName) -> Callable[[Path, int, ExitStack], Log]:
    """How to open a tracker in a run's directory, to continue after a step; the stack closes it.

    Raises ModuleNotFoundError if its extra is not installed.
    """
    match name:
        case "tensorboard":
            module, opened = "tensorboardX", _open_tensorboard
        case "wandb":
            module, opened = "wandb", _open_wandb
        case _:
            assert_never(name)
    try:
        return functools.partial(opened, importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"trackers={name} needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


def _open_tensorboard(tensorboard: Any, run: Path, first_step: int, stack: ExitStack) -> Log:
    """Scalars for `tensorboard --logdir RUN/tensorboard`; events of later steps are purged."""
    writer = tensorboard.SummaryWriter(str(run / TENSORBOARD), purge_step=first_step + 1)
    stack.callback(writer.close)

    def log(values: dict[str, Any], step: int) -> None:
        for field, value in values.items():
            writer.add_scalar(field, value, step)

    return log


def _open_wandb(wandb: Any, run: Path, first_step: int, stack: ExitStack) -> Log:
    """With `WANDB_MODE=offline`, a run of Weights & Biases stays in `RUN/wandb`."""
    file = run / WANDB_ID
    identity = file.read_text() if file.is_file() else secrets.token_hex(4)
    file.write_text(identity)
    how = {"project": "jgpt", "name": run.name, "id": identity, "resume": "allow"}
    started = wandb.init(dir=str(run), **how)
    stack.callback(started.finish)
    return lambda values, step: started.log(values, step=step)
