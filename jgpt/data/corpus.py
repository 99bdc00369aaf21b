"""Corpora: the built-in one, tiny Shakespeare, and the user's files."""

import hashlib
import http.client
import io
import os
import platform
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import platformdirs

from jgpt.config import did_you_mean

SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
CORPORA = {
    "pydocs": "the Python language reference, which CPython includes",
    "shakespeare": "tiny Shakespeare, 1,115,394 characters",
}

BYTE_ORDER_MARK = "\ufeff"

Download = Callable[[int, int | None], None]
"""A callback: bytes received so far, and the total if it is known."""
Warn = Callable[[str], None]
"""A callback: a message for the user."""


def read_text(
    sources: Sequence[str],
    *,
    universal_newlines: bool = True,
    warn: Warn | None = None,
    on_download: Download | None = None,
) -> str:
    """The text of corpora, files and folders of .txt, concatenated.

    With `universal_newlines`, CR LF and CR are read as newlines, and a file's byte-order mark is
    dropped; `warn` is told of it once.
    """
    return "".join(_read_sources(sources, 1 << 30, universal_newlines, warn, on_download))


def read_stream(file: BinaryIO, name: str, *, universal_newlines: bool = True) -> str:
    """The text of one open file, which errors name so."""
    return "".join(_read_stream(file, name, 1 << 30, universal_newlines, []))


def corpus_versions(sources: Sequence[str]) -> dict[str, str]:
    """The versions of the corpora among the sources: `pydocs` is another in each Python."""
    versions = {
        "pydocs": f"Python {platform.python_version()}",
        "shakespeare": f"SHA-256 {SHAKESPEARE_SHA256[:12]}…",
    }
    return {name: versions[name] for name in sources if name in versions}


def text_chunks(
    sources: Sequence[str],
    chunk_size: int = 1 << 22,
    *,
    universal_newlines: bool = True,
    warn: Warn | None = None,
) -> Iterator[str]:
    """The same text in chunks of about `chunk_size` characters, for text larger than memory.

    Chunks end between a line end and a word, where tokenizers would split anyway.
    """
    pending = ""
    for chunk in _read_sources(sources, chunk_size, universal_newlines, warn):
        pending += chunk
        if len(pending) >= chunk_size:
            split = _last_split_point(pending)
            if split:
                yield pending[:split]
                pending = pending[split:]
    if pending:
        yield pending


def _last_split_point(text: str) -> int:
    """The last index after a single newline between two non-space characters, or 0."""
    end = len(text)
    while (newline := text.rfind("\n", 1, end)) > 0:
        if newline + 1 < len(text) and not (
            text[newline - 1].isspace() or text[newline + 1].isspace()
        ):
            return newline + 1
        end = newline
    return 0


def _read_sources(
    sources: Sequence[str],
    chunk_size: int,
    universal_newlines: bool,
    warn: Warn | None = None,
    on_download: Download | None = None,
) -> Iterator[str]:
    changed: list[str] = []
    for source in sources:
        if source in CORPORA and Path(source).exists() and warn:
            warn(f"{source} is the corpus of that name; the file or folder here is ./{source}")
        if source == "pydocs":
            yield python_reference()
        elif source == "shakespeare":
            path = shakespeare_file(on_download=on_download)
            yield from _read_file(path, chunk_size, universal_newlines, changed)
        else:
            for path in _files(source):
                yield from _read_file(path, chunk_size, universal_newlines, changed)
    if changed and warn:
        others = f" and {len(changed) - 1} more" * (len(changed) > 1)
        warn(
            f"{changed[0]}{others}: carriage returns are read as newlines and byte-order marks "
            "dropped; universal_newlines=False keeps them"
        )


def python_reference() -> str:
    """The topics that `help()` shows, in alphabetical order: about 0.47 million characters."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise FileNotFoundError(
            "this Python has no pydoc_data, the source of the corpus pydocs: name a file"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def shakespeare_file(*, on_download: Download | None = None) -> Path:
    """Tiny Shakespeare: in `$JGPT_DATA_DIR`, else in the user's cache, else downloaded there."""
    given = os.environ.get("JGPT_DATA_DIR")
    if given and (path := Path(given) / SHAKESPEARE_FILE).is_file():
        _require_checksum(path)
        return path
    cached = Path(platformdirs.user_cache_dir("jgpt")) / SHAKESPEARE_FILE
    if cached.is_file():
        _require_checksum(cached)
    else:
        _download(SHAKESPEARE_URL, cached, on_download)
    return cached


def _require_checksum(path: Path) -> None:
    if wrong := _wrong_checksum(path):
        raise ValueError(
            f"{path} is not tiny Shakespeare ({wrong}): delete it to download it again"
        )


def _wrong_checksum(path: Path) -> str:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"SHA-256 {found[:12]}…, not {SHAKESPEARE_SHA256[:12]}…" * (found != SHAKESPEARE_SHA256)


def _download(url: str, target: Path, on_download: Download | None) -> None:
    """Download to a temporary file and rename it: a broken download leaves nothing behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "wb") as file:
            _fetch(url, file, on_download)
        if wrong := _wrong_checksum(Path(partial)):
            raise ConnectionError(wrong)
        os.replace(partial, target)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"tiny Shakespeare could not be downloaded from {url} ({error}): name a file with a "
            f"copy of it, or put it as {SHAKESPEARE_FILE} into a folder that JGPT_DATA_DIR names, "
            "or use the corpus pydocs, which needs no network"
        ) from None
    finally:
        Path(partial).unlink(missing_ok=True)


def _fetch(url: str, file, on_download: Download | None) -> None:
    try:
        response = urllib.request.urlopen(url, timeout=30)
    except urllib.error.HTTPError as answer:
        with answer:  # it holds the connection open
            raise
    with response:
        length = response.headers.get("Content-Length")
        total, received = int(length) if length else None, 0
        while block := response.read(1 << 16):
            file.write(block)
            received += len(block)
            if on_download:
                on_download(received, total)
    if total is not None and received < total:
        raise ConnectionError(f"only {received} of {total} bytes were received")


def _files(source: str) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        # not what runs in it have written, such as their samples.txt
        runs = {file.parent for file in path.glob("**/config.json") if _is_run(file.parent)}
        files = sorted(
            file
            for file in path.glob("**/*.txt")
            if file.is_file() and runs.isdisjoint(file.parents)
        )
        if not files:
            raise FileNotFoundError(
                f"{path} is a folder without any .txt file{' outside of its runs' * bool(runs)}"
            )
        return files
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file {source!r}, and no corpus of that name "
            f"({' and '.join(CORPORA)} are){did_you_mean(source, CORPORA)}"
        )
    return [path]


def _is_run(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() and (folder / "checkpoints").is_dir()


def _read_file(
    path: Path, chunk_size: int, universal_newlines: bool, changed: list[str]
) -> Iterator[str]:
    empty = True
    with path.open("rb") as file:
        for chunk in _read_stream(file, str(path), chunk_size, universal_newlines, changed):
            empty = False
            yield chunk
    if empty:
        raise ValueError(f"{path} is empty")


def _read_stream(
    file: BinaryIO, name: str, chunk_size: int, universal_newlines: bool, changed: list[str]
) -> Iterator[str]:
    """The text in chunks; `changed` gets the name if universal newlines change the text."""
    if not universal_newlines:
        yield from _decode(file, name, chunk_size)
        return
    decoder, marked = io.IncrementalNewlineDecoder(None, translate=True), False
    for index, chunk in enumerate(_decode(file, name, chunk_size)):
        if index == 0 and (marked := chunk.startswith(BYTE_ORDER_MARK)):
            chunk = chunk[1:]
        if text := decoder.decode(chunk):
            yield text
    if text := decoder.decode("", final=True):  # a carriage return at the end
        yield text
    if marked or decoder.newlines not in (None, "\n"):
        changed.append(name)


def _decode(file: BinaryIO, name: str, chunk_size: int) -> Iterator[str]:
    """Decode UTF-8 in chunks, strictly."""
    decoded, pending = 0, b""
    while block := file.read(chunk_size):
        block, pending = pending + block, b""
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            # the end of a chunk may split a character, the end of the file may not
            if error.reason != "unexpected end of data":
                raise _not_text(name, decoded + error.start) from None
            text, pending = block[: error.start].decode("utf-8"), block[error.start :]
        if "\0" in text:
            place = decoded + len(text[: text.index("\0")].encode())
            raise ValueError(
                f"{name} is binary, or UTF-16: byte {place} is NUL; convert it to UTF-8 text"
            )
        decoded += len(block) - len(pending)
        if text:
            yield text
    if pending:
        raise _not_text(name, decoded)


def _not_text(name: str, offset: int) -> ValueError:
    return ValueError(f"{name} is not UTF-8 text: byte {offset} can't be read; convert it to UTF-8")
