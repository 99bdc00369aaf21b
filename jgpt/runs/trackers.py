"""Metric trackers: TensorBoard and Weights & Biases, both extras."""

import contextlib
import functools
import importlib
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self, assert_never

from jgpt.config import TrackerName, TrainConfig
from jgpt.fields import as_dict
from jgpt.files import append
from jgpt.hardware import process_index
from jgpt.parallel.processes import raise_in_all_processes
from jgpt.runs.directory import TENSORBOARD, WANDB_ID
from jgpt.runs.run import OpenRun

LOG_SECONDS = 30
"""The seconds that training waits for a tracker to accept the metrics of a step."""
CLOSE_SECONDS = 60
"""The seconds that the end of training waits for a tracker to write or upload its metrics."""


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the metrics of a step."""
        ...

    def close(self) -> None:
        """Write all pending metrics."""
        ...


Open = Callable[[Path, int, TrainConfig, bool], Tracker]
"""A function that opens a tracker in a run's directory, to continue after a step; True for a new
run."""


def require_tracker(name: TrackerName) -> Open:
    """Return a function that opens a tracker. Raises ModuleNotFoundError without its extra."""
    match name:
        case "tensorboard":
            module = "tensorboardX"
            tracker = _TensorBoard
        case "wandb":
            module = "wandb"
            tracker = _Wandb
        case _:
            assert_never(name)
    try:
        return functools.partial(tracker, importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`trackers={(name,)!r}` needs {error.name}: pip install 'jgpt[{name}]'"
        ) from None


class Trackers:
    """The open trackers of a run. Each has its own thread, so that none can block training for
    ever.

    A tracker that raises an error, or that takes too long, is not called again.
    """

    def __init__(self) -> None:
        self._threads: dict[str, _Thread] = {}
        self.failure: OSError | None = None
        """The first error of a tracker, which doesn't prevent the state from being saved."""

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, config: TrainConfig, run: OpenRun, *, is_new: bool, warn: Callable[[str], None]
    ) -> Iterator[Self]:
        """Open the trackers of a run in process 0. Raises OSError if one can't be opened."""
        trackers = cls()
        with raise_in_all_processes():
            if process_index() == 0:
                for name in config.trackers:
                    trackers._open(name, run, config, is_new=is_new)
        try:
            yield trackers
        finally:
            trackers._close(warn)

    def _open(self, name: TrackerName, run: OpenRun, config: TrainConfig, *, is_new: bool) -> None:
        opener = require_tracker(name)
        step = max((line["step"] for line in run.metrics()), default=0)
        try:
            # In this thread: Weights & Biases may ask for a key, and has its own time limit.
            tracker = opener(run.path, step, config, is_new)
        except Exception as error:  # each package raises its own kinds
            raise _failure(name, error) from error
        self._threads[name] = _Thread(name, tracker)

    def log(self, line: dict[str, Any]) -> None:
        """Log a line of metrics; a tracker that fails is not called again."""
        values = {name: value for name, value in line.items() if value is not None}
        step = values.pop("step")
        for name, thread in list(self._threads.items()):
            try:
                thread.call(lambda tracker: tracker.log(values, step), LOG_SECONDS)
            except OSError as error:
                del self._threads[name]
                self.failure = self.failure or error

    def _close(self, warn: Callable[[str], None]) -> None:
        """Close the trackers. A failure is only a warning, since training has ended."""
        for thread in self._threads.values():
            try:
                thread.call(lambda tracker: tracker.close(), CLOSE_SECONDS)
            except OSError as error:
                warn(str(error))
        self._threads.clear()


def _failure(name: str, error: Exception) -> OSError:
    reason = str(error) or repr(error)
    if isinstance(error, OSError) and error.strerror is not None:
        reason = error.strerror
    return OSError(
        f"`trackers={(name,)!r}` has failed ({reason}); the run is intact: use `resume=True`, "
        "with an empty list of trackers to go on without"
    )


class _Thread:
    """A daemon thread that calls a tracker, so that the process can end even if a call never
    returns."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._calls: queue.SimpleQueue[Callable[[Tracker], None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="tracker").start()

    def call(self, function: Callable[[Tracker], None], seconds: float) -> None:
        """Call a function of the tracker. Raises OSError for its errors, and after `seconds`."""
        self._calls.put(function)
        try:
            error = self._results.get(timeout=seconds)
        except queue.Empty:
            # The caller doesn't call this thread again, so a late result is never taken for that of
            # another call.
            error = TimeoutError(f"it has not answered for {seconds} seconds")
        if error is not None:
            raise _failure(self._name, error) from error

    def _work(self) -> None:
        while True:
            function = self._calls.get()
            try:
                function(self._tracker)
            except Exception as error:
                self._results.put(error)
            else:
                self._results.put(None)


class _TensorBoard:
    """Scalars for `tensorboard --logdir RUN/tensorboard`; events of later steps are purged.

    The package makes the events, and this class appends them to the file. The package's own writer
    has a thread and a queue: on a full disk the thread dies, and the next call waits for ever for
    room in the queue.
    """

    def __init__(
        self, tensorboard: Any, run: Path, first_step: int, config: TrainConfig, new: bool
    ) -> None:
        package = tensorboard.__name__
        self._event = importlib.import_module(f"{package}.proto.event_pb2")
        self._scalar = importlib.import_module(f"{package}.summary").scalar
        self._checksum = importlib.import_module(f"{package}.record_writer").masked_crc32c
        # The time in whole seconds, and a random part: a run may stop and resume within one second.
        name = f"events.out.tfevents.{int(time.time())}.{secrets.token_hex(4)}"
        (run / TENSORBOARD).mkdir(exist_ok=True)
        self._path = run / TENSORBOARD / name
        version = self._record(0, file_version="brain.Event:2")
        status = self._event.SessionLog(status=self._event.SessionLog.START)
        append(self._path, version + self._record(first_step + 1, session_log=status))

    def log(self, values: dict[str, Any], step: int) -> None:
        """Append an event for each value."""
        records = b""
        for field, value in values.items():
            records += self._record(step, summary=self._scalar(field, value))
        append(self._path, records)  # all values of a step or none

    def close(self) -> None:
        """Do nothing, since everything is written already."""

    def _record(self, step: int, **content: Any) -> bytes:
        """Return an event as a record of TensorFlow: its length, a checksum, the event, a
        checksum."""
        event = self._event.Event(step=step, wall_time=time.time(), **content)
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))

        def checksum(part: bytes) -> bytes:
            return struct.pack("<I", self._checksum(part))

        return length + checksum(length) + data + checksum(data)


class _Wandb:
    """Weights & Biases; with `WANDB_MODE=offline`, its run stays in `RUN/wandb`."""

    def __init__(
        self, wandb: Any, run: Path, first_step: int, config: TrainConfig, new: bool
    ) -> None:
        self._file = run / WANDB_ID
        self._identity = secrets.token_hex(4)
        self._saved = False
        if self._file.is_file() and not new:  # continues the run of Weights & Biases, too
            self._identity = self._file.read_text()
            self._saved = True
        self._run = wandb.init(
            dir=str(run),
            project="jgpt",
            name=run.name,
            id=self._identity,
            resume="allow",
            config=as_dict(config),
            # A resumed run may have another config, for example more steps.
            allow_val_change=True,
        )

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log a step; the first one records the identity of the run at Weights & Biases."""
        if not self._saved:
            self._file.write_text(self._identity)
            self._saved = True
        self._run.log(values, step=step)

    def close(self) -> None:
        """Upload all pending metrics."""
        self._run.finish()
