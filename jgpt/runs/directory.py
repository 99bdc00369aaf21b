"""The run directory: its files, written atomically by one process at a time."""

import contextlib
import functools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from jgpt.config import TrainConfig, UnknownField, from_json, to_json
from jgpt.data.tokenizers import Tokenizer, tokenizer_from_json
from jgpt.runs.manifest import make_directory, sync_directory, write_new

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Parsed = TypeVar("Parsed")
CONFIG, TOKENIZER, METRICS = "config.json", "tokenizer.json", "metrics.jsonl"
PROVENANCE, LOCK, PROFILE = "provenance.jsonl", "lock", "profile"
CHECKPOINTS, SAMPLES, LOSS_PICTURE = "checkpoints", "samples.txt", "loss.png"
TENSORBOARD, WANDB, WANDB_ID = "tensorboard", "wandb", "wandb.id"
_OWN_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: TrainConfig, tokenizer: Tokenizer) -> Self:
        """Create a run: its tokenizer, and last its config, which makes the directory a run."""
        make_directory(path)
        _write(path / TOKENIZER, tokenizer.to_json())
        run = cls(path)
        run.write_config(config)
        return run

    def write_config(self, config: TrainConfig) -> None:
        """Write the config, which may change when a run is resumed."""
        _write(self.path / CONFIG, to_json(config))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing run. Raises FileNotFoundError if there is none."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            run, step = path.parent.parent, path.name
            if path.parent.name == CHECKPOINTS and step.isdecimal() and cls.exists(run):
                raise FileNotFoundError(
                    f"{path} is a checkpoint, not a run directory: give {run} and which={step}"
                )
            raise FileNotFoundError(f"{path} is not a run directory: it has no {CONFIG}")
        for entry in path.iterdir():
            if entry.is_symlink():
                raise ValueError(
                    f"{entry} is a symbolic link: a run only reads and writes its own files"
                )
        return cls(path)

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether there is a run."""
        return (path / CONFIG).is_file()

    @staticmethod
    def is_unused(path: Path) -> bool:
        """Whether a directory is empty, except for what a run killed during `create` leaves."""
        return all(
            entry.name in (LOCK, TOKENIZER) or entry.name.endswith(".partial")
            for entry in path.iterdir()
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, which ends with this process.

        Raises BlockingIOError if another process holds it.
        """
        make_directory(self.path)
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | _OWN_FILE, 0o666)
        try:
            try:
                if sys.platform == "win32":
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                else:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
                raise BlockingIOError(
                    f"{self.path} is in use by process {holder}: wait for it, or choose another "
                    "directory"
                ) from None
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(descriptor)

    def config(self) -> TrainConfig:
        """The config, with the tokenizer's vocabulary size."""
        return read_config(self.path / CONFIG)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return _read(self.path / TOKENIZER, tokenizer_from_json)

    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        if not (self.path / CHECKPOINTS).is_dir():
            return []
        names = [entry.name for entry in (self.path / CHECKPOINTS).iterdir() if entry.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

    def append_metrics(self, lines: list[dict[str, Any]], *, durable: bool = False) -> None:
        """Append lines to the metrics: all of them or none."""
        self._append(METRICS, lines, durable=durable)

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics so far, without truncated or damaged lines."""
        plain = lambda value: type(value) in (int, float) and abs(value) < 1e300  # noqa: E731
        return [line for line, _ in self._lines(METRICS) if all(map(plain, line.values()))]

    def truncate_metrics(self, step: int) -> None:
        """Truncate the metrics after a step that training is resumed from."""
        self._truncate(METRICS, step)

    def append_provenance(self, line: dict[str, Any]) -> None:
        """Append the provenance of a start or resumption."""
        self._truncate(PROVENANCE, math.inf)
        self._append(PROVENANCE, [line], durable=True)

    def provenance(self) -> list[dict[str, Any]]:
        """The provenance of the start and of each resumption."""
        return [line for line, _ in self._lines(PROVENANCE)]

    def write_samples(self, text: str) -> None:
        """Write the sample of the end of training."""
        _write(self.path / SAMPLES, text)

    def clear(self) -> None:
        """Delete the run's own files, except those that `create` replaces.

        Its config makes the directory a run, which can be overwritten if this is interrupted.
        """
        for name in (CHECKPOINTS, PROFILE, TENSORBOARD, WANDB):
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)
        for name in (METRICS, PROVENANCE, SAMPLES, LOSS_PICTURE, WANDB_ID):
            (self.path / name).unlink(missing_ok=True)

    def _append(self, name: str, lines: list[dict[str, Any]], *, durable: bool) -> None:
        """Append to a file; a failed write leaves it unchanged."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _OWN_FILE
        descriptor = os.open(self.path / name, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            try:
                while text:
                    text = text[os.write(descriptor, text) :]
                if durable:
                    os.fsync(descriptor)
                    sync_directory(self.path)
            except OSError as error:
                os.truncate(descriptor, size)
                raise OSError(
                    f"{self.path / name} can't be written: {error.strerror}; the checkpoints are "
                    "intact: free some space and use resume=True"
                ) from error
        finally:
            os.close(descriptor)

    def _truncate(self, name: str, step: float) -> None:
        """Truncate a file after its last complete line up to `step`."""
        ends = (end for line, end in self._lines(name) if line["step"] <= step)
        end, path = max(ends, default=0), self.path / name
        if path.is_file():
            os.truncate(path, end)

    def _lines(self, name: str) -> Iterator[tuple[dict[str, Any], int]]:
        """Each complete line with a step, and its end offset."""
        path = self.path / name
        if not path.is_file():
            return
        end = 0
        with path.open("rb") as file:
            for text in file:
                end += len(text)
                if not text.endswith(b"\n"):
                    return
                with contextlib.suppress(ValueError, RecursionError):
                    line = json.loads(text)
                    if isinstance(line, dict) and type(line.get("step")) is int:
                        yield line, end


def read_config(path: Path) -> TrainConfig:
    """Read a run's config. Raises ValueError if it is damaged."""
    return _read(path, functools.partial(from_json, TrainConfig))


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    write_new(partial, text)
    os.replace(partial, path)
    sync_directory(path.parent)


def _read(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    if path.exists() and not path.is_file():
        hint = f": give {path / CONFIG}" * RunDirectory.exists(path)
        raise ValueError(f"{path} is not a file{hint}")
    try:
        return parse(path.read_text(encoding="utf-8-sig"))  # an editor may have added a mark
    except UnknownField as error:
        raise ValueError(
            f"{path} was written by a newer version of jgpt, or by another program: {error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
