"""The choice of a run's directory: a new one, or that of a run to resume or to overwrite."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jgpt.config import TrainConfig
from jgpt.data.encode import Tokenizer
from jgpt.runs.directory import CONFIG, RUNS, Mode, RunDirectory
from jgpt.runs.provenance import known_digest, known_micro_batches


@dataclass(frozen=True)
class SavedRun:
    """The contents of a run's directory. Training reads them once, before anything is decided."""

    path: Path
    config: TrainConfig
    tokenizer: Tokenizer
    checkpoints: list[int]
    """The steps of the checkpoints, oldest first."""
    provenance: list[dict[str, Any]]
    """A line for the start and for each resumption."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a run. Raises ValueError for files that are damaged or of another program."""
        run = RunDirectory.open(path)
        return cls(path, run.config(), run.tokenizer(), run.checkpoint_steps(), run.provenance())

    @property
    def tokens_digest(self) -> str | None:
        """The SHA-256 of the tokens of the run's first start; None for an imported run."""
        return known_digest(self.provenance)

    @property
    def micro_batches(self) -> int | None:
        """The number of micro-batches in the last start, or None if it wasn't recorded."""
        return known_micro_batches(self.provenance)


@dataclass(frozen=True)
class Target:
    """The directory of a run that starts, and the run in it."""

    path: Path
    mode: Mode
    saved: SavedRun | None = None
    """The run to resume."""
    checkpoints: tuple[int, ...] = ()
    """The steps of the existing checkpoints."""


def choose_target(config: TrainConfig, *, resume: bool, overwrite: bool) -> Target:
    """Choose the directory of a config's run. Nothing is written.

    If the run to resume or to overwrite doesn't exist, it is started. Raises ValueError or OSError
    for a directory that is in use, or not a run's.
    """
    if resume and overwrite:
        raise ValueError("give `resume=True` or `overwrite=True`, not both")
    if config.out is None:
        if resume:
            raise ValueError("`resume=True` needs the run's `out=DIRECTORY`")
        return Target(_unused_path(config.name), "new")
    path = Path(config.out)
    if not path.is_dir():
        return Target(path, "new")
    if not RunDirectory.exists(path):
        if not RunDirectory.is_unused(path):
            raise FileExistsError(
                f"{path} is not a run directory: it has files, but no {CONFIG}; choose another, "
                f"such as {path / config.name}"
            )
        return Target(path, "new")
    saved = SavedRun.read(path)
    checkpoints = tuple(saved.checkpoints)
    if overwrite:
        return Target(path, "overwrite", checkpoints=checkpoints)
    if resume:
        return Target(path, "resume", saved, checkpoints)
    # A run that failed before its first step has nothing to lose.
    if RunDirectory(path).has_trained():
        raise FileExistsError(
            f"{path} already exists: `resume=True` continues it, `overwrite=True` starts again"
        )
    return Target(path, "new")


def _unused_path(name: str) -> Path:
    """Return runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that does not exist."""
    path = RUNS / name
    # Another process may take the same name meanwhile; the lock of the directory decides.
    number = 1
    while path.exists():
        number += 1
        path = RUNS / f"{name}-{number}"
    return path
