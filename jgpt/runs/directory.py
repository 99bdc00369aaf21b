"""The run directory, as it is read: its files, and which folder is one."""

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jgpt.config import TrainConfig
from jgpt.data.encode import Tokenizer, tokenizer_from_json
from jgpt.fields import from_json
from jgpt.files import parse_file

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
CODE = "code"
"""The folder with copies of the user's files."""
IMPORTED = "imported"
"""The folder with the files about text of an imported model."""
TENSORBOARD = "tensorboard"
WANDB = "wandb"
WANDB_ID = "wandb.id"


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

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
            return None
        if (path / CONFIG).is_file():
            return "not a run: jgpt import makes a run of a Hugging Face model"
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
        """Return whether there is a run at `path`. A Hugging Face model has a config.json, too."""
        return (path / CONFIG).is_file() and (path / CHECKPOINTS).is_dir()

    @classmethod
    def latest(cls) -> Path:
        """Return the run in runs/ that has the newest checkpoint. Raises FileNotFoundError if there
        is none."""
        runs = [path for path in RUNS.glob("*") if cls.exists(path)]
        if not runs:
            raise FileNotFoundError(
                "the folder runs has no run: give the directory of a run, or train one"
            )
        return max(runs, key=lambda run: (run / CHECKPOINTS).stat().st_mtime_ns)

    @property
    def checkpoints(self) -> Path:
        """The folder with the checkpoints."""
        return self.path / CHECKPOINTS

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first."""
        return steps_in(self.checkpoints)

    def has_trained(self) -> bool:
        """Return whether the run has a checkpoint or a step, so that only `overwrite` replaces it.

        A run whose model failed in compilation or at its first step has neither.
        """
        return bool(self.checkpoint_steps() or self.metrics())

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

    def changed_code(self, files: Iterable[Path]) -> list[str]:
        """Return a line for each of the user's files that differs from the copy in the run."""
        lines = []
        for file in files:
            copy = self.path / CODE / file.name
            if copy.is_file() and copy.read_bytes() != file.read_bytes():
                lines.append(f"{file.name} has changed since the run began")
        return lines

    def metrics(self) -> list[dict[str, Any]]:
        """Read the metrics so far, without truncated or damaged lines."""
        return [line for line, _ in lines_in(self.path / METRICS)]

    def provenance(self) -> list[dict[str, Any]]:
        """Read the provenance of the start and of each resumption."""
        return [line for line, _ in lines_in(self.path / PROVENANCE)]

    def recorded(self, name: str) -> Any:
        """Return what the first start recorded in the provenance; None if it recorded nothing.

        A resumed run must have the first start's `tokens_sha256`, whatever later lines say.
        """
        for line in self.provenance():
            if name in line:
                return line[name]
        return None


def run_and_step(word: str | Path) -> tuple[Path, int | None]:
    """Return the folder and the step of RUN@STEP; None for a run without a step."""
    path = Path(word)
    before, _, step = str(word).rpartition("@")
    if before and step.isdecimal() and not path.exists():
        return Path(before), int(step)
    return path, None


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def lines_in(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each complete line of a file that has a step, and its end offset."""
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
