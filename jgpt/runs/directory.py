"""The run directory: its files, written atomically by one process at a time."""

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from jgpt.config import TrainConfig
from jgpt.data.encode import Tokenizer, tokenizer_from_json
from jgpt.durable import (
    Lock,
    append,
    locked,
    make_directory,
    sync_directory,
    write_file,
)
from jgpt.fields import from_json, to_json
from jgpt.interop.text_files import TextFiles, delete_text_files, write_text_files
from jgpt.runs.manifest import parse_file

RUNS = Path("runs")
"""Where runs are written by default, in the current folder."""
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
PROVENANCE = "provenance.jsonl"
LOCK = "lock"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples.txt"
LOSS_PICTURE = "loss.png"
IMPORTED = "imported"
"""The folder with the files about text of an imported model."""
TENSORBOARD = "tensorboard"
WANDB = "wandb"
WANDB_ID = "wandb.id"
# A new run that replaces an old one starts these files afresh; `create` replaces config and
# tokenizer.
_REPLACED = (METRICS, PROVENANCE, SAMPLES, LOSS_PICTURE, WANDB_ID)
_BY_TRACKERS = ("tensorboard/events.out.tfevents.*",)
_BY_WANDB = ("wandb/run-*", "wandb/offline-run-*", "wandb/latest-run", "wandb/debug*.log")

Mode = Literal["new", "resume", "overwrite"]
"""What a start does with an existing run in its directory."""


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path
    lock: Lock | None = field(default=None, compare=False, repr=False)
    """The lock that this process holds; each write checks that the directory is still in place."""

    def require_in_place(self) -> None:
        """Raise MovedDirectory if the locked directory no longer has its name."""
        if self.lock is not None:
            self.lock.require_in_place()

    def is_in_place(self) -> bool:
        """Return whether the locked directory still has its name."""
        return self.lock is None or self.lock.is_in_place()

    @classmethod
    def create(
        cls,
        path: Path,
        config: TrainConfig,
        tokenizer: Tokenizer,
        text_files: TextFiles | None = None,
    ) -> Self:
        """Create a run; its config is written last, since the config makes the directory a run.

        `text_files` are the files about text of an imported model.
        """
        make_directory(path)
        write_file(path / TOKENIZER, tokenizer.to_json())
        if text_files:
            make_directory(path / IMPORTED)
            write_text_files(text_files, path / IMPORTED)
        run = cls(path)
        run.write_config(config)
        return run

    def begin(
        self,
        config: TrainConfig,
        tokenizer: Tokenizer,
        mode: Mode,
        *,
        earlier: Iterable[Path] | None = None,
    ) -> None:
        """Write a new run, which may replace one to overwrite, or the config of one to resume.

        `earlier` are the trackers' files of the run to overwrite, since those of the new run are
        open.
        """
        exists = self.exists(self.path)
        if mode == "resume" and exists:
            self.write_config(config)
            return
        # The name was chosen as unused before the lock was taken; another process may have been
        # faster.
        if mode == "new" and exists and self.has_trained():
            raise FileExistsError(
                f"{self.path} was created by another process: choose another directory"
            )
        if earlier is None:
            earlier = self.tracker_files()
        self.clear(earlier)
        self.create(self.path, config, tokenizer)

    def has_trained(self) -> bool:
        """Return whether the run has a checkpoint or a step, so that only `overwrite` replaces it.

        A run whose model failed in compilation or at its first step has neither.
        """
        if self.checkpoint_steps():
            return True
        # The line of step 0 is that of the evaluation before training.
        return any(line["step"] > 0 for line, _ in self._lines(METRICS))

    @contextlib.contextmanager
    def reserved(self) -> Iterator[Lock]:
        """Hold the lock while a run is checked, begun and trained.

        After an error, a directory that has not become a run is removed.
        """
        lock = self.path / LOCK
        had_lock = lock.exists()
        folders = (self.path, *self.path.parents)
        # The innermost folder comes first, so that they can be removed in this order.
        missing = [folder for folder in folders if not folder.exists()]
        with self.locked() as taken_lock:
            try:
                yield taken_lock
            except BaseException:
                # If the directory was replaced, the name can be that of another process's lock.
                if not had_lock and taken_lock.is_in_place():
                    lock.unlink()
                raise
            finally:
                if not self.exists(self.path):
                    for folder in missing:
                        with contextlib.suppress(OSError):  # another process has filled it
                            folder.rmdir()

    def write_config(self, config: TrainConfig) -> None:
        """Write the config, which may change when a run is resumed."""
        self.require_in_place()
        write_file(self.path / CONFIG, to_json(config))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing run. Raises FileNotFoundError if there is none."""
        path = Path(path)
        found = cls._what_is_at(path)
        if found is not None:
            raise FileNotFoundError(f"{path} is {found}")
        return cls(path)

    @classmethod
    def _what_is_at(cls, path: Path) -> str | None:
        """Return what a user has named in place of a run, and what to do; None for a run."""
        if cls.exists(path):
            if cls.is_run(path) or not any(path.glob("*.safetensors")):
                return None
            return "a Hugging Face model, not a run: make a run of it with jgpt import"
        run = path.parent.parent
        step = path.name
        if path.parent.name == CHECKPOINTS and step.isdecimal() and cls.exists(run):
            return f"a checkpoint, not a run directory: give {run} and `which={int(step)!r}`"
        meant = ""
        if cls.exists(RUNS / path):
            meant = f" (did you mean {RUNS / path}?)"
        return f"not a run directory: it has no {CONFIG}{meant}"

    @staticmethod
    def exists(path: Path) -> bool:
        """Return whether there is a run at `path`."""
        return (path / CONFIG).is_file()

    @classmethod
    def is_run(cls, path: Path) -> bool:
        """Return whether a folder is a run. That of a Hugging Face model has a config.json, too."""
        return cls.exists(path) and (path / CHECKPOINTS).is_dir()

    @classmethod
    def latest(cls) -> Path:
        """Return the run in runs/ that was written to last. Raises FileNotFoundError if there is
        none."""
        runs = [path for path in RUNS.glob("*") if cls.exists(path)]
        if not runs:
            raise FileNotFoundError(
                "the folder runs has no run: give the directory of a run, or train one"
            )
        return max(runs, key=cls._time_of_change)

    @staticmethod
    def _time_of_change(run: Path) -> int:
        # Not the time of the directory, which a lock or a picture changes, too.
        times = []
        for name in (CONFIG, METRICS, CHECKPOINTS):
            path = run / name
            if path.exists():
                times.append(path.stat().st_mtime_ns)
        return max(times)

    @staticmethod
    def is_unused(path: Path) -> bool:
        """Return whether a directory is empty, except for remains of a run killed during
        `create`."""
        for entry in path.iterdir():
            if entry.name not in (LOCK, TOKENIZER) and not entry.name.endswith(".partial"):
                return False
        return True

    def locked(self) -> contextlib.AbstractContextManager[Lock]:
        """Take the lock of the run, which ends at the latest with this process.

        Raises BlockingIOError if another process holds it.
        """
        make_directory(self.path)
        return locked(self.path / LOCK, self.path)

    def config(self) -> TrainConfig:
        """Read the config, with the tokenizer's vocabulary size."""
        return read_config(self.path / CONFIG)

    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer. Raises FileNotFoundError if the run has lost it."""
        path = self.path / TOKENIZER
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing, without which no text can be read or written: copy it back, "
                "or from another run on the same text"
            )
        return parse_file(path, tokenizer_from_json)

    def imported(self) -> Path | None:
        """Return the folder with the text files of the model that the run was imported from, or
        None."""
        folder = self.path / IMPORTED
        if not folder.is_dir():
            return None
        return folder

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first."""
        steps = []
        for entry in (self.path / CHECKPOINTS).glob("[0-9]*"):
            if entry.name.isdecimal() and entry.is_dir():
                steps.append(int(entry.name))
        return sorted(steps)

    def delete_checkpoints(self, steps: Iterable[int]) -> None:
        """Delete checkpoints, and the remains of others that a killed process left.

        They are renamed first, durably, so that a directory named by a step is never partial.
        """
        self.require_in_place()
        folder = self.path / CHECKPOINTS
        steps = list(steps)
        for step in steps:
            os.replace(folder / str(step), folder / f"deleting-{step}")
        if steps:
            sync_directory(folder)
        for entry in (*folder.glob("deleting-[0-9]*"), *folder.glob("saving-[0-9]*")):
            _delete(entry)

    def metrics(self) -> list[dict[str, Any]]:
        """Read the metrics so far, without truncated or damaged lines."""
        return [line for line, _ in self._lines(METRICS)]

    def append_provenance(self, line: dict[str, Any]) -> None:
        """Append the provenance of a start or resumption."""
        self.truncate(PROVENANCE, math.inf)
        self.append(PROVENANCE, [line], durable=True)

    def provenance(self) -> list[dict[str, Any]]:
        """Read the provenance of the start and of each resumption."""
        return [line for line, _ in self._lines(PROVENANCE)]

    def tracker_files(self) -> set[Path]:
        """Return the files and folders that trackers have written."""
        patterns: list[str] = list(_BY_TRACKERS)
        if (self.path / WANDB_ID).is_file():  # without this file, a folder wandb is not the run's
            patterns.extend(_BY_WANDB)
        found: set[Path] = set()
        for pattern in patterns:
            found.update(self.path.glob(pattern))
        return found

    def clear(self, by_trackers: Iterable[Path]) -> None:
        """Delete the files of a run, except those that `create` replaces. Other files stay.

        The config stays, so that the directory can still be overwritten if this is interrupted.
        """
        self.delete_checkpoints(self.checkpoint_steps())
        for entry in by_trackers:
            _delete(entry)
        for name in _REPLACED:
            _delete(self.path / name)
        delete_text_files(self.path / IMPORTED)
        for name in (CHECKPOINTS, TENSORBOARD, WANDB):
            with contextlib.suppress(OSError):  # it has other files or doesn't exist
                (self.path / name).rmdir()

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file, or replace it."""
        self.require_in_place()
        write_file(self.path / name, data)

    def append(self, name: str, lines: list[dict[str, Any]], *, durable: bool = False) -> None:
        """Append lines to a file: either all of them or none."""
        self.require_in_place()
        text = ""
        for line in lines:
            text += json.dumps(line, allow_nan=False) + "\n"
        try:
            append(self.path / name, text.encode(), durable=durable)
        except OSError as error:
            advice = "nothing was saved yet: free some space and start again"
            if self.checkpoint_steps():
                advice = "the checkpoints are intact: free some space and use `resume=True`"
            raise OSError(f"{error}; {advice}") from error

    def truncate(self, name: str, step: float) -> None:
        """Truncate a file after its last complete line up to `step`."""
        self.require_in_place()
        end = 0
        for line, end_of_line in self._lines(name):
            if line["step"] <= step:
                end = end_of_line
        path = self.path / name
        if path.is_file():
            os.truncate(path, end)

    def _lines(self, name: str) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each complete line that has a step, and its end offset."""
        path = self.path / name
        if not path.is_file():
            return
        end = 0
        with path.open("rb") as file:
            for text in file:
                end += len(text)
                if not text.endswith(b"\n"):  # the last line, which a crash has truncated
                    return
                with contextlib.suppress(ValueError):  # a damaged line is skipped
                    line = json.loads(text)
                    if isinstance(line, dict) and type(line.get("step")) is int:
                        yield line, end


def read_config(path: Path) -> TrainConfig:
    """Read a run's config. Raises ValueError if it is damaged."""
    return parse_file(path, functools.partial(from_json, TrainConfig))


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
