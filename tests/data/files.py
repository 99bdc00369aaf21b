"""Files to read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jgpt.data.sources import find_files, text_chunks


def write(folder: Path, name: str, data: bytes | str) -> str:
    """The path of a new file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


def read_text(words: list[str], warn: Any = lambda message: None, **options: Any) -> str:
    return "".join(text_chunks(find_files(words, warn), **options))


def chunks_of(words: list[str], size: int, **options: Any) -> Iterator[str]:
    return text_chunks(find_files(words), size, **options)


SLOW_AFTER = """
import sys, time
from pathlib import Path
from jgpt import DataConfig
from jgpt.data import dataset, prepared
prepared.SECONDS_BETWEEN_SAVES = 0.0
prepared.PIECE = 5000
chunks = prepared.text_chunks
def slowly(files, size, **how):
    for number, chunk in enumerate(chunks(files, size, **how)):
        if number > int(sys.argv[1]) and size == 5000:
            time.sleep(600)
        yield chunk
prepared.text_chunks = slowly
"""
"""The beginning of a program in which a text ends after so many chunks, for ten minutes."""
