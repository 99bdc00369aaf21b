"""What tests of runs share: configs that differ in a few fields, and folders before and after."""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jgpt import Run, TrainConfig
from jgpt.runs.progress import Progress

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
kill_resume = importlib.import_module("kill_resume")


def with_changes(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Changes of fields, and of fields of a part where they are a dict."""
    parts = {
        name: dataclasses.replace(getattr(config, name), **value)
        for name, value in changes.items()
        if isinstance(value, dict)
    }
    return dataclasses.replace(config, **changes | parts)


BIGRAM: dict[str, Any] = {
    "model": {"architecture": "bigram", "dropout": 0.0},
    "optimizer": {"learning_rate": 0.4, "min_learning_rate": 0.1, "warmup_steps": 0},
    "sample_tokens": 0,
}
"""A run that compiles at once."""


def contents(folder: Path) -> dict[str, bytes | None]:
    """All files, and folders without bytes, by their place."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def path_of(run: Run) -> Path:
    """The folder of a run that was trained."""
    assert run.path is not None
    return run.path


def stopping(out: Path, after: int = 1) -> Callable[[], bool]:
    """`should_stop` that asks for a stop after so many calls of steps into a folder."""
    stops = iter(after * [False] + [True])
    # a text that is read asks, too
    return lambda: (out / "checkpoints").exists() and next(stops, True)


class Heard(Progress):
    """Keeps the warnings, and the steps that it was told of."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps: list[int] = []

    def warned(self, message: str) -> None:
        self.messages.append(message)

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        self.steps.append(step)


class Unread:
    """What the device still computes; reading it is noted, since it waits for that."""

    def __init__(self, array: Any, events: list[Any], name: Any = "waited") -> None:
        self._array = array
        self._events = events
        self._name = name

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self._events[-1:] != [self._name]:
            self._events.append(self._name)
        return np.asarray(self._array, dtype)
