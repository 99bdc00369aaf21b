"""The manifest of a checkpoint: its model, and size and checksum of every file."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_type_hints

from beartype.door import is_bearable

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint contains."""

    step: int
    validation_loss: float | None
    model: dict[str, Any]
    """The model's config."""
    tokenizer: str
    """SHA-256 of the run's tokenizer."""
    files: dict[str, tuple[int, str]]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a checkpoint's manifest. Raises ValueError if it is missing or damaged."""
        path = directory / MANIFEST
        try:
            if path.is_symlink():
                raise ValueError("it is a symbolic link")
            values = json.loads(path.read_text(encoding="utf-8"))
            digest = values.pop("sha256")
            if digest != hashlib.sha256(json.dumps(values).encode()).hexdigest():
                raise ValueError("its SHA-256 does not match")
            files = {name: (size, sha) for name, (size, sha) in values["files"].items()}
            manifest = cls(**values | {"files": files})
            for name, hint in get_type_hints(cls).items():
                if not is_bearable(getattr(manifest, name), hint):
                    raise ValueError(f"{name} is not {hint}")
            if directory.name != str(manifest.step):
                raise ValueError(f"it belongs to step {manifest.step}")
            return manifest
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def write(self, directory: Path) -> None:
        """Write it durably, with its own SHA-256."""
        values = dataclasses.asdict(self)
        values["sha256"] = hashlib.sha256(json.dumps(values).encode()).hexdigest()
        write_new(directory / MANIFEST, json.dumps(values, indent=1) + "\n")


def verify(directory: Path) -> Manifest:
    """A checkpoint's manifest. Raises ValueError naming its first missing or damaged file."""
    manifest = Manifest.read(directory)
    found = {name: path for name, path in files_below(directory) if name != MANIFEST}
    for name in sorted({*manifest.files, *found}):
        path = directory / name
        if name not in found:
            raise ValueError(f"{path} is missing")
        if name not in manifest.files:
            raise ValueError(f"{path} is not in the manifest")
        size, sha = manifest.files[name]
        if path.stat().st_size != size:
            raise ValueError(f"{path} is damaged: it has {path.stat().st_size} bytes, not {size}")
        if sha256_of(path) != sha:
            raise ValueError(f"{path} is damaged: its SHA-256 does not match")
    return manifest


def files_below(directory: Path) -> Iterator[tuple[str, Path]]:
    """All files below a directory by relative name. Raises ValueError for a link."""
    for path in directory.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link: a run only reads its own files")
        if path.is_file():
            yield path.relative_to(directory).as_posix(), path


def sha256_of(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_below(directory: Path) -> None:
    """fsync all files and directories below a directory."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("r+b") as file:  # Windows syncs only what is open for writing
                os.fsync(file.fileno())


def write_new(path: Path, text: str) -> None:
    """Write a new file durably; its name is durable when its directory is synced."""
    with path.open("xb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents durably."""
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(new):
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that its entries are durable."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
