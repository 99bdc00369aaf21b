"""Metric trackers: TensorBoard and Weights & Biases, both extras."""

import contextlib
import importlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jgpt.config import TrackerName, TrainConfig
from jgpt.fields import as_dict
from jgpt.machine import process_index
from jgpt.parallel.processes import raise_in_all_processes
from jgpt.runs.directory import TENSORBOARD, WANDB_ID

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def require_tracker(name: TrackerName) -> Any:
    """Return the package of a tracker. Raises ModuleNotFoundError without its extra."""
    try:
        return importlib.import_module(PACKAGES[name])
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`trackers={(name,)!r}` needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


@contextlib.contextmanager
def open_trackers(
    config: TrainConfig, run: Path, *, is_new: bool, warn: Callable[[str], None]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open the trackers of a run in process 0; yield a function that logs a line of metrics.

    One that fails is warned of and not called again: the run has all of its metrics itself. They
    write no file of their own before the first line, since a run that is overwritten is there until
    then. Raises OSError if one can't be opened.
    """
    opened: dict[str, Any] = {}
    failed: set[str] = set()

    def log(line: dict[str, Any]) -> None:
        values = {name: value for name, value in line.items() if value is not None}
        step = values.pop("step")
        for name, tracker in opened.items():
            if name in failed:
                continue
            try:
                tracker.log(values, step)
            except Exception as error:  # of the package's own kinds
                failed.add(name)
                warn(f"{_describe_failure(name, error)}: training goes on without it")

    try:
        with raise_in_all_processes():
            if process_index() == 0:
                for name in config.trackers:
                    # Weights & Biases may ask for a key, and has its own time limit.
                    try:
                        opened[name] = _open(name, run, config, is_new=is_new)
                    except Exception as error:
                        raise OSError(_describe_failure(name, error)) from error
        yield log
    finally:
        for name, tracker in opened.items():
            try:
                tracker.close()
            except Exception as error:
                warn(_describe_failure(name, error))


def _describe_failure(name: str, error: Exception) -> str:
    return f"`trackers={(name,)!r}` has failed ({str(error) or repr(error)})"


def _open(name: TrackerName, run: Path, config: TrainConfig, *, is_new: bool) -> Any:
    package = require_tracker(name)
    if name == "wandb":
        return _Wandb(package, run, config, is_new=is_new)
    return _TensorBoard(package, run)


class _TensorBoard:
    """Scalars for `tensorboard --logdir RUN/tensorboard`; events of later steps are purged.

    The package's SummaryWriter has a thread, which dies on a full disk; the next call would wait
    for it for ever.
    """

    def __init__(self, package: Any, run: Path) -> None:
        self._files = importlib.import_module(f"{package.__name__}.event_file_writer")
        self._event = importlib.import_module(f"{package.__name__}.proto.event_pb2")
        self._scalar = importlib.import_module(f"{package.__name__}.summary").scalar
        self._folder = run / TENSORBOARD
        self._writer: Any = None

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write an event for each value."""
        if self._writer is None:
            self._writer = self._opened()
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step, session_log=start)
        for field, value in values.items():
            self._write(step, summary=self._scalar(field, value))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        self._folder.mkdir(exist_ok=True)
        # A run may stop and resume within the second that is the name of its file.
        suffix = f".{secrets.token_hex(4)}"
        return self._files.EventsWriter(str(self._folder / "events"), suffix)

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event.Event(step=step, wall_time=time.time(), **content))


class _Wandb:
    """Weights & Biases; with `WANDB_MODE=offline`, its run stays in `RUN/wandb`."""

    def __init__(self, wandb: Any, run: Path, config: TrainConfig, *, is_new: bool) -> None:
        self._file = run / WANDB_ID
        self._id = secrets.token_hex(4)
        if not is_new and self._file.is_file():
            self._id = self._file.read_text()
        self._run = wandb.init(
            dir=str(run),
            project="jgpt",
            name=run.name,
            id=self._id,  # a resumed run continues that of Weights & Biases, too
            resume="allow",
            config=as_dict(config),
            # A resumed run may have another config, for example more steps.
            allow_val_change=True,
        )

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log a step."""
        if not self._file.is_file():
            self._file.write_text(self._id)
        self._run.log(values, step=step)

    def close(self) -> None:
        """Upload all pending metrics."""
        self._run.finish()
