"""Metric trackers: TensorBoard and Weights & Biases, both extras."""

import contextlib
import importlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self, assert_never

from jgpt.config import TrackerName, TrainConfig
from jgpt.fields import as_dict
from jgpt.machine import process_index
from jgpt.parallel.processes import raise_in_all_processes
from jgpt.runs.directory import TENSORBOARD, WANDB_ID


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the metrics of a step."""
        ...

    def close(self) -> None:
        """Write all pending metrics."""
        ...


def require_tracker(name: TrackerName) -> Any:
    """Return the package of a tracker. Raises ModuleNotFoundError without its extra."""
    match name:
        case "tensorboard":
            module = "tensorboardX"
        case "wandb":
            module = "wandb"
        case _:
            assert_never(name)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`trackers={(name,)!r}` needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


class Trackers:
    """The open trackers of a run. One that fails is not called again."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}
        self.failure: OSError | None = None
        """The first error of a tracker, which doesn't prevent the state from being saved."""

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls,
        config: TrainConfig,
        run: Path,
        *,
        is_new: bool,
        warn: Callable[[str], None],
    ) -> Iterator[Self]:
        """Open the trackers of a run in process 0. Raises OSError if one can't be.

        They write no file of their own before the first line, since a run that is overwritten is
        there until then.
        """
        trackers = cls()
        try:
            with raise_in_all_processes():
                if process_index() == 0:
                    for name in config.trackers:
                        # Weights & Biases may ask for a key, and has its own time limit.
                        with _named(name):
                            trackers._open[name] = _open(name, run, config, is_new=is_new)
            yield trackers
        finally:
            for name, tracker in trackers._open.items():
                try:
                    with _named(name):
                        tracker.close()
                except OSError as error:  # training has ended
                    warn(str(error))

    def log(self, line: dict[str, Any]) -> None:
        """Log a line of metrics."""
        values = {name: value for name, value in line.items() if value is not None}
        step = values.pop("step")
        for name, tracker in list(self._open.items()):
            try:
                with _named(name):
                    tracker.log(values, step)
            except OSError as error:
                del self._open[name]
                self.failure = self.failure or error


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise OSError, naming the tracker, for the errors of its package, which has its own kinds."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"`trackers={(name,)!r}` has failed ({str(error) or repr(error)}); the run is intact: "
            "use `resume=True`, with an empty list of trackers to go on without"
        ) from error


def _open(name: TrackerName, run: Path, config: TrainConfig, *, is_new: bool) -> Tracker:
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
