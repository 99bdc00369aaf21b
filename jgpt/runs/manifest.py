"""The manifest of a checkpoint: its model, and the checksum of every file."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from jgpt.durable import read_file, write_file

Parsed = TypeVar("Parsed")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    validation_loss: float | None
    """None for a state that has not been evaluated."""
    model: dict[str, Any]
    """The model's config."""
    tokenizer: str
    """SHA-256 of the run's tokenizer."""
    files: dict[str, str]
    """The SHA-256 of each file, by its name."""
    unevaluated: dict[str, Any] | None = None
    """The step's line of metrics, until the loss of its evaluation completes it. A state is saved
    before its evaluation, and the line is written after it."""

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a checkpoint's manifest. Raises ValueError if it is missing or damaged."""
        path = directory / MANIFEST
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        return parse_file(path, cls._parse)

    @classmethod
    def _parse(cls, text: str) -> Self:
        values = json.loads(text)
        digest = values.pop("sha256")  # of all other fields
        if digest != _digest_of(values):
            raise ValueError("its SHA-256 does not match")
        return cls(**values)

    def write(self, directory: Path) -> None:
        """Write the manifest durably, with its own SHA-256."""
        values = dataclasses.asdict(self)
        values["sha256"] = _digest_of(values)
        write_file(directory / MANIFEST, json.dumps(values, indent=1) + "\n")


def _digest_of(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's other fields, as JSON without its line breaks."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def verify(directory: Path) -> Manifest:
    """Verify a checkpoint and return its manifest.

    Raises ValueError naming the first missing or damaged file.
    """
    manifest = Manifest.read(directory)
    for name, digest in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if sha256_of(path) != digest:
            raise ValueError(f"{path} is damaged: its SHA-256 does not match")
    return manifest


def files_below(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield all files below a directory by relative name."""
    for path in directory.rglob("*"):
        if path.is_file():
            yield path.relative_to(directory).as_posix(), path


def parse_file(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    """Parse a text file of a run. Raises ValueError naming it if it is damaged."""
    try:
        return parse(read_file(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or of another program: {error}") from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
