"""A run: its folder as a piece that a training holds in its hands, and the model that it leaves.

    with jgpt.Run.start(OUT, config, dataset) as run:
        state, step = run.restore(init)
        while step < STEPS:
            state, loss = train_step(state)
            step += 1
            run.log(step, loss=loss)
            ...

`start` locks the folder and compares. `restore` is the first call that writes or deletes, so that
a training that fails before it leaves an earlier run as it was.
"""

import collections
import contextlib
import json
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax
import numpy as np

from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset, require_same_text, require_same_tokenizer
from jgpt.data.encode import Tokenizer
from jgpt.fields import to_json
from jgpt.files import append, locked, make_directory, write_file
from jgpt.generation.text import Texts, generate_text
from jgpt.machine import process_count, process_index
from jgpt.nn.models import LanguageModel
from jgpt.nn.module import describe_model
from jgpt.parallel.processes import Vote, gather, raise_in_all_processes
from jgpt.runs.checkpoints import Checkpoints, Which, by_loss, clean, load_checkpoint
from jgpt.runs.directory import (
    CHECKPOINTS,
    CODE,
    CONFIG,
    IMPORTED,
    LOCK,
    LOSS_PICTURE,
    METRICS,
    PROVENANCE,
    SAMPLES,
    TENSORBOARD,
    TOKENIZER,
    WANDB,
    WANDB_ID,
    RunDirectory,
    lines_in,
)
from jgpt.runs.provenance import provenance
from jgpt.runs.resume import require_same_run
from jgpt.training.state import is_finite
from jgpt.user_code import custom_code, files_of_code, require_all_code, with_code
from jgpt.words import counted

SECONDS_BETWEEN_SAVES = 30.0
"""The least age of a checkpoint at which the next one is due, if saving is quick."""
SAVING_SHARE = 0.01
"""The largest share of the time that these checkpoints take."""
UNREAD_CALLS = 64
"""The calls of `log` whose values may be unread."""
LOSSES = ("loss", "validation_loss")
"""The metrics that must be finite. Others are written as null if they aren't."""
State = dict[str, Any]
Request = Literal["save", "stop"] | None


@dataclass(frozen=True, eq=False)
class Run:
    """A model with its tokenizer and config, and the folder that it came from, if there is one."""

    path: Path | None
    """The run directory; None for a model of another program."""
    model: LanguageModel
    tokenizer: Tokenizer
    config: TrainConfig
    """The config with which the model was trained, or can be trained further."""
    validation_loss: float | None = None
    """The loss of its checkpoint in nats per token; None for a state that wasn't evaluated."""

    @staticmethod
    def start(
        out: str | Path,
        config: TrainConfig,
        dataset: Dataset,
        *,
        resume: bool = False,
        overwrite: bool = False,
        code: str | Path | Sequence[str | Path] = (),
    ) -> "OpenRun":
        """Return the run in folder `out` to train, as a context manager that locks it.

        `config` is a TrainConfig, whose model may be a class of your own. `resume` continues from
        the last checkpoint, or starts if there is none; `overwrite` starts again. `code` names
        files of your own to keep copies of, beside those of the config. The context raises
        ValueError or OSError, naming what differs, before anything is written.
        """
        if isinstance(code, (str, Path)):
            code = (code,)
        return OpenRun(Path(out), config, dataset, resume, overwrite, [Path(file) for file in code])

    def __iter__(self) -> Iterator[Any]:
        yield from (self.model, self.tokenizer, self.config)

    def __repr__(self) -> str:
        loss = ""
        if self.validation_loss is not None:
            loss = f"    validation_loss: {self.validation_loss:.4f}\n"
        return (
            f"Run(\n    path: {self.path}\n"
            f"    model: {describe_model(self.model)}\n"
            f"    tokenizer: {type(self.tokenizer).__name__} with "
            f"{counted(self.tokenizer.vocab_size, 'token')}\n"
            f"    config: {self.config.name}, {counted(self.config.steps, 'step')} of "
            f"{counted(self.config.batch_size, 'sequence')}\n{loss})"
        )

    @property
    def metrics(self) -> dict[str, list[float]]:
        """The columns of `metrics.jsonl`, for `pandas.DataFrame`; NaN where a step has no value."""
        if self.path is None:
            return {}
        lines = RunDirectory.open(self.path).metrics()
        columns: dict[str, list[float]] = {name: [] for line in lines for name in line}
        for name, column in columns.items():
            for line in lines:
                value = line.get(name)
                column.append(math.nan if value is None else value)
        return columns

    def generate(self, prompts: Texts = "", max_new_tokens: int = 200, **options: Any) -> Texts:
        """Return what `jgpt.generate_text` returns: the continuation, without the prompt.

        `options` are the keyword arguments of `jgpt.generate_text`: `key`, `stop` and the sampling
        parameters. Raises the errors of `generate_text`.
        """
        return generate_text(self.model, self.tokenizer, prompts, max_new_tokens, **options)


class OpenRun:
    """A run that this process trains: its lock, its metrics and its checkpoints.

    Several processes start the same run, and call the same methods in the same order; process 0
    writes.
    """

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        dataset: Dataset,
        resume: bool,
        overwrite: bool,
        code: Sequence[Path],
    ) -> None:
        if resume and overwrite:
            raise ValueError("give `resume=True` or `overwrite=True`, not both")
        self.path = path
        self.config = config
        self.dataset = dataset
        self.report: Callable[[dict[str, Any]], None] = lambda line: None
        """Called in process 0 with each line of metrics when it is written."""
        self.facts: dict[str, Any] = {}
        """What the provenance of this start records beside what it always has."""
        self._directory = RunDirectory(path)
        self.resume = resume
        self.overwrite = overwrite
        self._code = list(dict.fromkeys([*code, *files_of_code(config)]))
        self._writes = process_index() == 0
        self._inode: int | None = None
        self._checkpoints: Checkpoints | None = None
        self._pending: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
        self._logged = 0
        self._saved: int | None = None
        self._seconds_before = 0.0
        self._began = self._last_save = time.monotonic()
        self._stops = 0
        self._vote = Vote()
        self._stack = contextlib.ExitStack()

    # --- start and end -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            with raise_in_all_processes():
                if self._writes:
                    stack.enter_context(self._locked())
                    self._require_startable()
            stack.enter_context(quiet_orbax())
            stack.enter_context(_signals_handled(self._on_signal))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with self._stack:
            try:
                if kind is None or issubclass(kind, SystemExit):
                    self._write_pending()
            finally:
                self._close_checkpoints(error)

    def _close_checkpoints(self, error: BaseException | None) -> None:
        """Wait for the last save, whose failure would be lost otherwise."""
        if self._checkpoints is None:
            return
        # After an error, other processes may not come here, or may have ended.
        if error is not None and process_count() > 1:
            return
        try:
            self._checkpoints.close()
        except OSError as failure:
            if error is None or isinstance(error, SystemExit):
                raise
            error.add_note(f"and {failure}")  # the first error is the cause

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; a folder in which no run was begun goes again."""
        folders = [self.path, *self.path.parents]
        missing = [folder for folder in folders if not folder.exists()]
        make_directory(self.path)
        lock = self.path / LOCK
        had_lock = lock.exists()
        with locked(lock, self.path):
            self._inode = lock.stat().st_ino
            try:
                yield
            finally:
                if self._checkpoints is None and not had_lock and self._is_in_place():
                    lock.unlink()
                    for folder in missing:
                        with contextlib.suppress(OSError):  # another process has filled it
                            folder.rmdir()

    def _is_in_place(self) -> bool:
        """Return whether the folder is still the one that was locked.

        A lock belongs to a file and not to its name: whoever deletes a folder under a training and
        begins another one in its place would have two writers.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self.path / LOCK).stat().st_ino == self._inode
        return False

    def _require_in_place(self) -> None:
        if self._writes and not self._is_in_place():
            raise OSError(
                f"{self.path} was deleted or moved while this run was trained in it, and nothing "
                "more is written there"
            )

    def _require_startable(self) -> None:
        """Raise ValueError or OSError unless this run may begin or continue in its folder."""
        if not RunDirectory.exists(self.path):
            others = [entry.name for entry in self.path.iterdir() if not _is_remains(entry.name)]
            if others:
                raise FileExistsError(
                    f"{self.path} is not a run directory, and has other files: choose another, "
                    f"such as {self.path / self.config.name}"
                )
            return
        self._directory.config()  # raises for a config.json of another program, which stays
        if self.resume and self._directory.checkpoint_steps():
            self._require_same()
        elif self._directory.has_trained() and not (self.resume or self.overwrite):
            raise FileExistsError(
                f"{self.path} already exists: `resume=True` continues it, `overwrite=True` starts "
                "again"
            )

    def _require_same(self) -> None:
        # with the fields of config classes of one's own
        saved = with_code(self._directory.config(), **custom_code(self.config))
        require_all_code(saved)
        require_same_run(saved, self.config, self._directory.checkpoint_steps())
        digest = self._directory.recorded("tokens_sha256")
        require_same_text(self.dataset, self.config.dataset, digest)
        require_same_tokenizer(str(self.path), self._directory.tokenizer(), self.dataset)

    def changed_code(self) -> list[str]:
        """Return a line for each file of one's own that has changed since the run began."""
        if not (self.resume and RunDirectory.exists(self.path)):
            return []
        return self._directory.changed_code(self._code)

    # --- state -------------------------------------------------------------------------------

    def restore(
        self, init: Callable[[], State], like: State | None = None, first: int = 0
    ) -> tuple[State, int]:
        """Return the last checkpoint's state and step, or those of `init()` at step `first`.

        `init` makes a state: a dict of pytrees, of which "model" is `nnx.state(model)`. `like` has
        its shapes and shardings; by default they are those of `jax.eval_shape(init)` on one device.
        """
        last = None
        with raise_in_all_processes():
            if self._writes and self.resume:
                last = max(self.steps(), default=None)
        (last, *_) = gather(last)
        if last is None:
            step = first
            state = init()  # one that fails leaves an earlier run as it was
        else:
            step = last
            expected = like or jax.eval_shape(init)
            _, state = load_checkpoint(self._directory.checkpoints, step, expected)
            self._saved = step
        checkpoints = Checkpoints(
            self._directory.checkpoints,
            self.config.keep_last,
            self.config.keep_best,
            self.config.keep_every,
        )
        with raise_in_all_processes():
            if self._writes:
                self._begin(step)
                checkpoints.delete_old()  # a kill may have come between a save and this
        self._checkpoints = checkpoints
        self._logged = step
        for line in self.metrics():
            self._seconds_before = line.get("seconds", self._seconds_before)
        self._began = self._last_save = time.monotonic()
        return state, step

    def _begin(self, step: int) -> None:
        """Write the run's first files, or its new config. The config makes the folder a run."""
        folder = self._directory.checkpoints
        clean(folder)  # first of all: it may free the space that is needed
        is_new = self._saved is None
        if is_new:
            _clear(self.path)
        make_directory(folder)
        if is_new:
            write_file(self.path / TOKENIZER, self.dataset.tokenizer.to_json())
        copy_code(self._code, self.path)
        cut(self.path / METRICS, step)
        cut(self.path / PROVENANCE, math.inf)
        line = {"step": step} | provenance(self.config, self.dataset) | self.facts
        self._append(PROVENANCE, [line], durable=True)
        write_file(self.path / CONFIG, to_json(self.config))

    def save(self, step: int, state: State, validation_loss: Any = None) -> None:
        """Save the state after `step`, in the background, unless that step is saved already.

        The loss is written into the step's line of metrics first. Raises FloatingPointError for a
        loss or a model that isn't finite, and OSError if this or the last save failed.
        """
        checkpoints = self._open_checkpoints()
        if validation_loss is not None:
            if not self._pending or self._pending[-1][0] != step:
                self._pending.append((step, {}))
            self._pending[-1][1]["validation_loss"] = validation_loss
        with raise_in_all_processes():
            self._write_pending()
            self._require_in_place()
        if step == self._saved:
            return
        if not is_finite(state["model"]):  # a finite loss may have had a gradient that wasn't
            raise FloatingPointError(f"the model isn't finite after step {step}")
        loss = None
        if validation_loss is not None:
            loss = float(validation_loss)
        with raise_in_all_processes():
            checkpoints.save(step, state, loss)
        self._saved = step
        self._last_save = time.monotonic()

    def wait(self) -> None:
        """Wait for the last save. Raises OSError if it failed."""
        with raise_in_all_processes():
            self._open_checkpoints().wait()

    def _open_checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            raise ValueError("call `restore` of the run before it is written to")
        return self._checkpoints

    def best(self) -> int | None:
        """Return the step with the lowest validation loss, or None while none is evaluated."""
        return next(iter(by_loss(self._directory.checkpoints)), None)

    def steps(self) -> list[int]:
        """Return the steps that are saved."""
        return self._directory.checkpoint_steps()

    def load(self, which: Which, like: State) -> State:
        """Return the state of a checkpoint, with the shapes and shardings of `like`."""
        self.wait()
        _, state = load_checkpoint(self._directory.checkpoints, which, like)
        return state

    # --- metrics -----------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics that are written."""
        return self._directory.metrics()

    def log(self, step: int, *, loss: Any, **others: Any) -> None:
        """Record the metrics of the steps since the last call, up to `step`.

        Each is a number, which is that of the last step, or an array with a value for each of the
        steps. It never waits for the device: values that are computed are written, the rest at a
        save and at the end. A loss that isn't finite raises FloatingPointError then.
        """
        self._open_checkpoints()
        if step <= self._logged:
            raise ValueError(f"step {step} is logged after step {self._logged}")
        metrics = {"loss": loss, **others}
        for name, value in metrics.items():
            if getattr(value, "ndim", 0) and len(value) != step - self._logged:
                raise ValueError(
                    f"`{name}` has {len(value)} values for {step - self._logged} steps"
                )
        self._logged = step
        self._pending.append((step, metrics))
        # The newest line waits, since a validation loss may be added to it.
        while len(self._pending) > 1:
            if len(self._pending) <= UNREAD_CALLS and not _is_ready(self._pending[0][1]):
                break
            self._write_oldest()

    def _write_pending(self) -> None:
        """Write all lines durably, and wait for their values."""
        while self._pending:
            self._write_oldest(durable=len(self._pending) == 1)

    def _write_oldest(self, *, durable: bool = False) -> None:
        lines = []
        try:
            for line in _lines_of(*self._pending.popleft()):
                lines.append(line)
            seconds = self._seconds_before + time.monotonic() - self._began
            lines[-1]["seconds"] = round(seconds, 3)
        finally:
            if self._writes:
                self._append(METRICS, lines, durable=durable)
        if self._writes:
            for line in lines:
                self.report(line)

    def _append(self, name: str, lines: list[dict[str, Any]], *, durable: bool) -> None:
        self._require_in_place()
        text = ""
        for line in lines:
            text += json.dumps(line, allow_nan=False) + "\n"
        try:
            append(self.path / name, text.encode(), durable=durable)
        except OSError as error:
            advice = "nothing was saved yet: free some space and start again"
            if self.steps():
                advice = "the checkpoints are intact: free some space and use `resume=True`"
            raise OSError(f"{error}; {advice}") from error

    # --- requests ----------------------------------------------------------------------------

    def request(self) -> Request:
        """Return "stop" after a signal, "save" if it is time for a checkpoint, else None.

        Several processes ask at the same place, and are answered alike, one call late. Raises
        OSError if the last save has failed.
        """
        has_failed = self._open_checkpoints().has_failed()
        if has_failed and process_count() == 1:
            self.wait()  # raises now, and not an interval later
        wanted = 0
        if self._writes:
            waited = time.monotonic() - self._last_save
            interval = max(SECONDS_BETWEEN_SAVES, self._open_checkpoints().seconds / SAVING_SHARE)
            wanted = int(waited >= interval)
        if self._stops or has_failed:
            wanted = 2
        return (None, "save", "stop")[self._vote(wanted)]

    def stop(self) -> None:
        """Ask for a stop, as a signal does."""
        self._stops += 1

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop()
        # A closed terminal is reported twice; only a person who presses again wants to leave.
        if self._stops > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._stops == 1:
            os.write(2, b"stopping after this step; Ctrl-C again leaves without saving\n")


def _lines_of(last: int, metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a line for each step of a call of `log`, whose last step is `last`.

    Raises FloatingPointError at the first loss that isn't finite.
    """
    columns = {name: np.atleast_1d(np.asarray(value)) for name, value in metrics.items()}
    count = max(len(column) for column in columns.values())
    for row in range(count):
        line: dict[str, Any] = {"step": last - count + 1 + row}
        for name, column in columns.items():
            if len(column) < count - row:  # a number belongs to the last step
                continue
            value = column[row - count].item()
            if not math.isfinite(value):
                if name in LOSSES:
                    raise FloatingPointError(f"{name} is {value} at step {line['step']}")
                value = None  # JSON has no number for it
            line[name] = value
        yield line


def copy_code(files: Sequence[Path], run: Path) -> None:
    """Keep copies of the user's files in a run."""
    if files:
        make_directory(run / CODE)
    for file in files:
        write_file(run / CODE / file.name, file.read_bytes())


def _is_ready(metrics: dict[str, Any]) -> bool:
    arrays = [value for value in metrics.values() if isinstance(value, jax.Array)]
    return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]


def _is_remains(name: str) -> bool:
    """Return whether a file is what a run leaves that was killed before it began."""
    begun = LOCK, TOKENIZER, CHECKPOINTS, CODE, PROVENANCE, WANDB
    return name in begun or name.endswith(".partial")


def _clear(path: Path) -> None:
    """Delete the files of an earlier run, except those that are replaced. Other files stay.

    The checkpoints are renamed first, so that a kill leaves none that is partial.
    """
    checkpoints = path / CHECKPOINTS
    for step in RunDirectory(path).checkpoint_steps():
        (checkpoints / str(step)).rename(checkpoints / f"deleted-{step}")
    clean(checkpoints)
    of_trackers = (TENSORBOARD, WANDB_ID)  # the folder wandb is that of the package
    for name in (METRICS, PROVENANCE, SAMPLES, LOSS_PICTURE, CODE, IMPORTED, *of_trackers):
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def cut(path: Path, step: float) -> None:
    """Cut a file after its last complete line up to `step`."""
    end = 0
    for line, end_of_line in lines_in(path):
        if line["step"] <= step:
            end = end_of_line
    if path.is_file():
        os.truncate(path, end)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Drop the log messages of Orbax alone, since its failures raise errors as well."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    logging.getLogger("absl").addFilter(is_of_others)
    try:
        yield
    finally:
        logging.getLogger("absl").removeFilter(is_of_others)


@contextlib.contextmanager
def _signals_handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP in the main thread, unless the program does so itself."""
    earlier = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is None:
                continue
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                earlier[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, of_before in earlier.items():
            signal.signal(number, of_before)
