"""Is a run normal? The losses of five seeds of presets, measured by `benchmarks/bands.py`."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgpt.config import TrainConfig, from_json
from jgpt.runs.directory import RunDirectory
from jgpt.runs.provenance import known_text
from jgpt.runs.resume import fields_of

BANDS = Path(__file__).with_name("bands.json")
_MAY_DIFFER = ("seed", "name", "out", "dataset.data", "eval_interval")
"""How often a run is evaluated changes none of its losses, only which of them are known."""


@dataclass(frozen=True)
class Band:
    """The losses of several seeds of a preset on a text."""

    name: str
    config: TrainConfig
    tokens_digest: str
    """SHA-256 of the text's tokens."""
    best: tuple[float, ...]
    """Each seed's best validation loss."""
    curves: dict[str, dict[str, list[float]]]
    """By metric: `step`, and the `low`, `median` and `high` of the seeds; training is smoothed."""

    def place(self, loss: float) -> str:
        """Where a validation loss lies among those of the seeds, in words."""
        loss, low, high = (round(value, 3) for value in (loss, min(self.best), max(self.best)))
        apart = f"{loss - high:.3f} above" if loss > high else f"{low - loss:.3f} below"
        where = "within" if low <= loss <= high else apart
        return f"{where} the {len(self.best)} seeds of {self.name}, {low:.3f} to {high:.3f}"


def band_of(run: RunDirectory) -> Band | None:
    """The band of the preset that a run repeats, with any seed and the same text, or None."""
    known = known_text(run.provenance())
    if known is None:
        return None
    config = run.config()
    own = config.model.make is not None or config.optimizer.make is not None
    for band in _bands():
        same = known.tokens_digest == band.tokens_digest and not own
        if same and _compared(config) == _compared(band.config):
            return band
    return None


def _compared(config: TrainConfig) -> dict[str, Any]:
    values = {name: value for name, value in fields_of(config) if name not in _MAY_DIFFER}
    if values["eval_tokens"] == "auto":  # all targets of a text as small as tiny Shakespeare
        values["eval_tokens"] = None
    return values


@functools.cache
def _bands() -> tuple[Band, ...]:
    presets = json.loads(BANDS.read_text(encoding="utf-8"))["presets"]
    return tuple(
        Band(
            name,
            from_json(TrainConfig, json.dumps(each["config"])),
            each["tokens_sha256"],
            tuple(each["best"]),
            each["curves"],
        )
        for name, each in presets.items()
    )
