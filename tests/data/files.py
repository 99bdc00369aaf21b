"""Files to read."""

from pathlib import Path


def write(folder: Path, name: str, data: bytes | str) -> str:
    """The path of a new file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)
