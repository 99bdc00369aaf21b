"""Corpora: the built-in one, tiny Shakespeare, and the user's files."""

import codecs
import hashlib
import http.client
import io
import os
import platform
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import platformdirs

from jgpt.config import did_you_mean
from jgpt.durable import write_file

SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
CORPORA = {
    "pydocs": "the Python language reference, which CPython includes",
    "shakespeare": "tiny Shakespeare, 1,115,394 characters",
}

Warn = Callable[[str], None]
"""Called with a message for the user."""


def read_text(
    sources: Sequence[str], *, universal_newlines: bool = True, warn: Warn = lambda message: None
) -> str:
    """The text of corpora, files and folders of .txt, concatenated.

    With `universal_newlines`, CR LF and CR are read as newlines, and a file's byte-order mark is
    dropped, with one warning.
    """
    return "".join(_read_sources(sources, 1 << 30, universal_newlines, warn))


def read_stream(file: BinaryIO, name: str, *, universal_newlines: bool = True) -> str:
    """The text of an open file; errors use this name."""
    return "".join(_decode(file, name, 1 << 30, universal_newlines))


def corpus_versions(sources: Sequence[str]) -> dict[str, str]:
    """The versions of the corpora among the sources: `pydocs` differs between Pythons."""
    versions = {"shakespeare": f"SHA-256 {SHAKESPEARE_SHA256[:12]}…"}
    versions["pydocs"] = f"Python {platform.python_version()}"
    return {name: versions[name] for name in sources if name in versions}


def text_chunks(
    sources: Sequence[str],
    chunk_size: int = 1 << 22,
    *,
    universal_newlines: bool = True,
    warn: Warn = lambda message: None,
) -> Iterator[str]:
    """The text of `read_text` in chunks of about `chunk_size` characters."""
    pending = ""
    for chunk in _read_sources(sources, chunk_size, universal_newlines, warn):
        pending += chunk
        if len(pending) >= chunk_size and (split := _last_split_point(pending)):
            yield pending[:split]
            pending = pending[split:]
    if pending:
        yield pending


def _last_split_point(text: str) -> int:
    """The last index after a single newline between words, where all tokenizers split, or 0."""
    end = len(text) - 1
    while (newline := text.rfind("\n", 1, end)) > 0:
        if not (text[newline - 1].isspace() or text[newline + 1].isspace()):
            return newline + 1
        end = newline
    return 0


def _read_sources(
    sources: Sequence[str], chunk_size: int, universal_newlines: bool, warn: Warn
) -> Iterator[str]:
    changed = []
    for source in sources:
        if source in CORPORA and Path(source).exists():
            warn(f"{source} is the corpus of that name; the file or folder here is ./{source}")
        if source == "pydocs":
            yield python_reference()
            continue
        for path in [shakespeare_file(warn)] if source == "shakespeare" else _files(source):
            with path.open("rb") as file:
                text = _decode(file, str(path), chunk_size, universal_newlines)
                length, is_changed = yield from text
            if not length:
                raise ValueError(f"{path} is empty")
            changed += [path] * is_changed
    if changed:
        others = f" and {len(changed) - 1} more" * (len(changed) > 1)
        warn(
            f"{changed[0]}{others}: carriage returns are read as newlines and byte-order marks "
            "dropped; what is read with universal_newlines=False keeps them"
        )


def python_reference() -> str:
    """The topics of `help()`, in alphabetical order: about 0.47 million characters."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise FileNotFoundError(
            "this Python has no pydoc_data, the source of the corpus pydocs: name a file"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def shakespeare_file(warn: Warn = lambda message: None) -> Path:
    """Tiny Shakespeare: in `$JGPT_DATA_DIR`, else in the user's cache, else downloaded there."""
    cached = Path(platformdirs.user_cache_dir("jgpt"), SHAKESPEARE_FILE)
    for path in (Path(os.environ.get("JGPT_DATA_DIR") or cached.parent, SHAKESPEARE_FILE), cached):
        if path.is_file():
            if wrong := _wrong_checksum(path.read_bytes()):
                raise ValueError(
                    f"{path} is not tiny Shakespeare ({wrong}): delete it to download it again"
                )
            return path
    warn(f"downloading tiny Shakespeare from {SHAKESPEARE_URL}")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            data = response.read()
        if wrong := _wrong_checksum(data):
            raise ConnectionError(wrong)
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_file(cached, data)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection open
        raise ConnectionError(
            f"tiny Shakespeare could not be downloaded from {SHAKESPEARE_URL} ({error}): name a "
            f"file with a copy of it, or put it as {SHAKESPEARE_FILE} into a folder that "
            "JGPT_DATA_DIR names, or use the corpus pydocs, which needs no network"
        ) from None
    return cached


def _wrong_checksum(data: bytes) -> str:
    found = hashlib.sha256(data).hexdigest()
    return f"SHA-256 {found[:12]}…, not {SHAKESPEARE_SHA256[:12]}…" * (found != SHAKESPEARE_SHA256)


def _files(source: str) -> list[Path]:
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file {source!r}, and no corpus of that name "
            f"({' and '.join(CORPORA)} are){did_you_mean(source, CORPORA)}"
        )
    if not path.is_dir():
        return [path]
    # files of runs, such as samples.txt, are left out
    runs = {
        file.parent
        for file in path.glob("**/config.json")
        if file.with_name("tokenizer.json").is_file() and file.with_name("checkpoints").is_dir()
    }
    texts = (file for file in path.glob("**/*.txt") if file.is_file())
    files = sorted(file for file in texts if runs.isdisjoint(file.parents))
    if not files:
        raise FileNotFoundError(
            f"{path} is a folder without any .txt file{' outside of its runs' * bool(runs)}"
        )
    return files


def _decode(
    file: BinaryIO, name: str, chunk_size: int, universal_newlines: bool
) -> Generator[str, None, tuple[int, bool]]:
    """Decode UTF-8 in chunks, strictly; return the length, and whether anything was replaced."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(utf8, translate=True)
    decoder = newlines if universal_newlines else utf8
    received = length = 0
    marked, block = False, None
    while block != b"":
        block = file.read(chunk_size)
        received += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:  # its object is this block, after the last one's rest
            place = received - len(error.object) + error.start
            raise ValueError(
                f"{name} is not UTF-8 text: byte {place} can't be read; convert it to UTF-8"
            ) from None
        if (nul := block.find(b"\0")) >= 0:
            place = received - len(block) + nul
            raise ValueError(
                f"{name} is binary, or UTF-16: byte {place} is NUL; convert it to UTF-8 text"
            )
        if universal_newlines and not (length or marked) and text.startswith("\ufeff"):
            marked, text = True, text[1:]
        length += len(text)
        if text:
            yield text
    return length, marked or newlines.newlines not in (None, "\n")
