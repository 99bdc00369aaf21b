"""Corpora: the built-in one, tiny Shakespeare, and the user's files."""

import codecs
import gzip
import hashlib
import http.client
import importlib
import io
import json
import os
import platform
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

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
RECORDS = (".jsonl", ".ndjson", ".parquet")
TEXTS = (".txt", ".text", ".md", ".rst", ".org", ".tex", *RECORDS)
"""Suffixes of files that are read in folders, compressed or not."""
PACKED = (".gz", ".zst")
NOT_TEXT = (".json", ".csv", ".tsv", ".pdf", ".docx", ".bin", ".npy", ".arrow")
NOT_TEXT += (".zip", ".tar", ".tgz", ".xz", ".bz2", ".7z")
LONGEST_WORD = 1 << 22
LONGEST_LINE = 1 << 26
"""Bytes; a longer line of JSON is cut, and then refused."""

Warn = Callable[[str], None]
"""Called with a message for the user."""


def read_text(sources: Sequence[str], **how: Any) -> str:
    """The text of corpora, files and folders, concatenated, with the options of `read_blocks`."""
    return "".join(read_blocks(sources, **how))


def read_stream(file: BinaryIO, name: str, *, universal_newlines: bool = True) -> str:
    """The text of an open file; errors use this name."""
    return "".join(_with_newlines(_decoded(file, name, 1 << 30), "", universal_newlines))


def corpus_versions(sources: Sequence[str]) -> dict[str, str]:
    """The versions of the corpora among the sources: `pydocs` differs between Pythons."""
    versions = {"shakespeare": f"SHA-256 {SHAKESPEARE_SHA256[:12]}…"}
    versions["pydocs"] = f"Python {platform.python_version()}"
    return {name: versions[name] for name in sources if name in versions}


def text_chunks(sources: Sequence[str], chunk_size: int = 1 << 20, **how: Any) -> Iterator[str]:
    """The text of `read_text` in chunks of about `chunk_size` characters.

    A chunk ends where all tokenizers split a text, or inside a word that is longer than any.
    """
    pending, enough = "", chunk_size
    for chunk in read_blocks(sources, chunk_size, **how):
        pending += chunk
        while len(pending) >= enough:
            split = _last_split_point(pending)
            if split or enough >= LONGEST_WORD:
                yield pending[: split or enough]
                pending, enough = pending[split or enough :], chunk_size
            else:
                enough += chunk_size
    if pending:
        yield pending


def _last_split_point(text: str) -> int:
    """The last index between words, where all tokenizers split, or 0.

    After a single newline if there is one, else before a space.
    """
    end = len(text) - 1
    while (newline := text.rfind("\n", 1, end)) > 0:
        if not (text[newline - 1].isspace() or text[newline + 1].isspace()):
            return newline + 1
        end = newline
    end = len(text)
    while (space := text.rfind(" ", 1, end)) > 0 and text[space - 1].isspace():
        end = space
    return max(space, 0)


def source_files(sources: Sequence[str]) -> list[tuple[str, int, int]]:
    """The path, size and time of change of each file."""
    files = [path for source in sources if source != "pydocs" for path in _files(source)]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def read_blocks(
    sources: Sequence[str],
    size: int = 1 << 30,
    *,
    universal_newlines: bool = True,
    field: str = "text",
    separator: str = "\n",
    plain: bool = False,
    warn: Warn = lambda message: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """The text of corpora, files and folders, up to `size` bytes of it at once.

    With `universal_newlines`, CR LF and CR are read as newlines, and a file's byte-order mark is
    dropped, with one warning. The documents of JSON lines and Parquet are the texts in `field`,
    each followed by the separator. With `plain`, every file is text, in folders .txt alone.
    `advance` is called with the number of bytes read.
    """
    changed = []
    for source in sources:
        if source in CORPORA and Path(source).exists():
            warn(f"{source} is the corpus of that name; the file or folder here is ./{source}")
        if source == "pydocs":
            yield python_reference()
            continue
        for path in _files(source, plain, warn):
            suffix, packed = ("", "") if plain else _suffixes(path)
            if suffix in NOT_TEXT:
                raise ValueError(
                    f"{path} is not text: give UTF-8 text, JSON lines (.jsonl) or Parquet "
                    "(.parquet); text and JSON lines may be packed (.gz, .zst)"
                )
            with io.BufferedReader(_CountingFile(path, advance)) as file:
                opened, errors = _unpacked(file, packed, path)
                try:
                    if suffix in RECORDS:
                        read = _parquet if suffix == ".parquet" else _json_lines
                        pieces, end = read(opened, str(path), field), separator
                    else:
                        pieces, end = _decoded(opened, str(path), size), ""
                    length, is_changed = yield from _with_newlines(pieces, end, universal_newlines)
                except errors as error:
                    raise ValueError(f"{path} is damaged or cut short: {error}") from None
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


def _files(source: str, plain: bool = False, warn: Warn = lambda message: None) -> list[Path]:
    if source == "shakespeare":
        return [shakespeare_file(warn)]
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
    found = path.glob("**/*.txt" if plain else "**/*")
    texts = (file for file in found if _suffixes(file)[0] in TEXTS and file.is_file())
    files = sorted(file for file in texts if runs.isdisjoint(file.parents))
    if not files:
        raise FileNotFoundError(
            f"{path} is a folder without any text ({' '.join(TEXTS)})"
            f"{' outside of its runs' * bool(runs)}"
        )
    return files


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix of a file, and of its compression: .jsonl and .gz, say."""
    packed = path.suffix.lower() if path.suffix.lower() in PACKED else ""
    return (path.with_suffix("") if packed else path).suffix.lower(), packed


class _CountingFile(io.FileIO):
    """A file that reports the number of bytes read."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        super().__init__(path)
        self.advance = advance

    def readinto(self, buffer: Any, /) -> int | None:
        """Read into a buffer."""
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


def _unpacked(file: BinaryIO, packed: str, path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    """A file without its compression, and the errors of damaged data."""
    if packed == ".gz":
        return gzip.GzipFile(fileobj=file), (EOFError, gzip.BadGzipFile, zlib.error)
    if packed == ".zst":
        zstd = _module(path, "zstd", "compression.zstd", "backports.zstd")
        return zstd.ZstdFile(file), (EOFError, zstd.ZstdError)
    return file, ()


def _module(path: Path | str, extra: str, *names: str) -> Any:
    """The first module that is installed, to read a path."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"{path} needs {names[-1]}: pip install 'jgpt[{extra}]'")


def _json_lines(file: BinaryIO, name: str, field: str) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
            text = record[field]
            text.encode()  # a lone surrogate can't be
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{name}, line {number}, has no text in a field {field!r}: name the field with "
                "data_field=NAME"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}, can't be read as JSON: {error}") from None
        yield text


def _parquet(file: BinaryIO, name: str, field: str) -> Iterator[str]:
    """The texts of a column, read in batches of rows; a row without a text is left out."""
    arrow, parquet = (_module(name, "parquet", it) for it in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.ParquetFile(file)
        column = {it.name: it.type for it in table.schema_arrow}.get(field)
        if column not in (arrow.string(), arrow.large_string()):
            raise ValueError(
                f"{name} has no column {field!r} of text, but {', '.join(table.schema_arrow.names)}"
                ": name the column with data_field=NAME"
            )
        for batch in table.iter_batches(1024, columns=[field], use_threads=False):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} can't be read as Parquet: {error}") from None


def _decoded(file: BinaryIO, name: str, size: int) -> Iterator[str]:
    """The text of UTF-8, decoded strictly in blocks; the last block is empty."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    received, block = 0, None
    while block != b"":
        block = file.read(size)
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
        yield text


def _with_newlines(
    pieces: Iterator[str], end: str, universal_newlines: bool
) -> Generator[str, None, tuple[int, bool]]:
    """Documents, each with an end, or without an end the blocks of one text.

    Returns their length, and whether newlines or a byte-order mark were replaced.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    length, marked = 0, False
    for piece in pieces:
        if universal_newlines:
            # a carriage return at the end of a block waits for the next block
            piece = newlines.decode(piece, final=bool(end) or not piece)
            if not (end or length or marked) and piece.startswith("\ufeff"):
                marked, piece = True, piece[1:]
        length += len(piece)
        if piece:
            yield piece + end
    return length, marked or newlines.newlines not in (None, "\n")
