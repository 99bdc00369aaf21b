"""Text from corpora, files and folders."""

import codecs
import csv
import gzip
import hashlib
import http.client
import importlib
import io
import json
import os
import platform
import sys
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from jgpt.durable import write_file
from jgpt.words import did_you_mean

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
TABLES = {".csv": ",", ".tsv": "\t"}
"""The suffixes of tables, with the character between their columns. A table is read if it is named,
and skipped in a folder: folders hold tables of numbers, too."""
TEXTS = (".txt", ".text", ".md", ".rst", ".org", ".tex", *RECORDS)
CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cs", ".m", ".mm",
    ".java", ".kt", ".scala", ".clj", ".go", ".rs", ".swift", ".zig", ".d", ".f90", ".jl",
    ".js", ".mjs", ".jsx", ".ts", ".tsx", ".vue", ".html", ".css", ".scss", ".sql", ".r",
    ".rb", ".php", ".pl", ".pm", ".lua", ".sh", ".bash", ".ps1", ".hs", ".ml", ".ex", ".exs",
    ".erl", ".el", ".lisp", ".scm", ".lean", ".proto", ".cmake", ".yaml", ".yml", ".toml",
)  # fmt: skip
"""Suffixes of text and code files that are read from folders, with or without compression."""
PACKED = (".gz", ".zst")
_LINES_AT_ONCE = 1 << 20
"""The number of bytes that are split into lines at once."""
_PARQUET_ROWS = 1024
"""The largest number of rows in a batch."""
KINDS_NAMED = 8
"""The largest number of kinds of skipped files that a message names; it counts the rest as
others."""
LONGEST_WORD = 1 << 22
"""The largest number of characters in a word; a chunk may end inside a longer word."""

Warn = Callable[[str], None]
"""A function that shows a message to the user."""


def read_text(sources: Sequence[str], **options: Any) -> str:
    """Return the concatenated text of corpora, files and folders; `options` are those of
    `read_blocks`."""
    return "".join(read_blocks(sources, **options))


def read_stream(file: BinaryIO, name: str, *, universal_newlines: bool = True) -> str:
    """Return the text of an open file; errors call it `name`."""
    return "".join(_with_newlines(_decoded(file, name, 1 << 30), "", universal_newlines))


def corpus_versions(sources: Sequence[str]) -> dict[str, str]:
    """Return the versions of the corpora among the sources: `pydocs` depends on the Python
    version."""
    versions = {
        "shakespeare": f"SHA-256 {SHAKESPEARE_SHA256[:12]}…",
        "pydocs": f"Python {platform.python_version()}",
    }
    return {name: versions[name] for name in sources if name in versions}


def text_chunks(
    sources: Sequence[str],
    chunk_size: int = 1 << 20,
    *,
    longest_word: int | None = None,
    **options: Any,
) -> Iterator[str]:
    """Yield the text of `read_text` in chunks of about `chunk_size` characters.

    A chunk ends where every tokenizer splits the text, or inside a word that is longer than
    `longest_word`.
    """
    longest_word = longest_word or LONGEST_WORD
    pending = ""
    enough = chunk_size
    for block in read_blocks(sources, chunk_size, **options):
        pending += block
        while len(pending) >= enough:
            end = last_split_point(pending)
            if end == 0 and enough < longest_word:
                # The word may end in a later block. Twice as many, since each look is at all of
                # them: a book of paragraphs that are indented has no place to split it.
                enough = min(2 * enough, longest_word)
                continue
            if end == 0:
                end = enough
            yield pending[:end]
            pending = pending[end:]
            enough = chunk_size
    if pending:
        yield pending


def last_split_point(text: str) -> int:
    """Return the last index between words, where every tokenizer splits the text, or 0.

    The index is after a single newline if there is one, else before a space.
    """
    # Tokenizers keep several spaces and newlines together, so none of these runs is split: the
    # tokens of the chunks are those of the whole text.
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
    """Return the path, size and modification time of each file."""
    files = []
    for source in sources:
        if source == "pydocs":  # This corpus is a Python module and has no file.
            continue
        for path in _files(source):
            status = path.stat()
            files.append((str(path), status.st_size, status.st_mtime_ns))
    return files


def read_blocks(
    sources: Sequence[str],
    size: int = 1 << 30,
    *,
    universal_newlines: bool = True,
    field: str = "text",
    separator: str = "\n",
    warn: Warn = lambda message: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """Yield the text of corpora, files and folders in blocks of at most `size` bytes.

    With `universal_newlines`, CR LF and CR become newlines, a file's byte-order mark is dropped,
    and one warning says so. For tables, JSON lines and Parquet, each document is the text in
    `field`, followed by `separator`; documents that are empty or null are skipped. `advance` is
    called with the number of bytes read. Raises ValueError for a file that is damaged or not text,
    and if there is no text at all.
    """
    total = 0
    changed = []
    for source in sources:
        if source in CORPORA and Path(source).exists():
            warn(f"{source} is the corpus of that name; the file or folder here is ./{source}")
        if source == "pydocs":
            text = python_reference()
            total += len(text)
            yield text
            continue
        for path in _files(source, warn):
            suffix, compression = _suffixes(path)
            with io.BufferedReader(_CountingFile(path, advance)) as file:
                unpacked, errors = _unpacked(file, compression, path)
                if suffix in RECORDS or suffix in TABLES:
                    pieces = _documents(unpacked, str(path), suffix, field)
                    end = separator
                else:
                    pieces = _decoded(unpacked, str(path), size)
                    end = ""
                # Where the pieces are read, since a generator raises its errors there.
                try:
                    length, is_changed = yield from _with_newlines(pieces, end, universal_newlines)
                except errors as error:
                    raise ValueError(f"{path} is damaged or cut short: {error}") from None
            total += length
            if is_changed:
                changed.append(path)
    if total == 0:
        raise ValueError(f"{' '.join(sources)} is empty")
    if changed:
        names = str(changed[0])
        if len(changed) > 1:
            names += f" and {len(changed) - 1} more"
        warn(
            f"{names}: carriage returns are read as newlines, and byte-order marks are dropped; "
            "universal_newlines=False keeps both"
        )


def _documents(file: BinaryIO, name: str, suffix: str, field: str) -> Iterator[str]:
    if suffix == ".parquet":
        return _parquet(file, name, field)
    if suffix in TABLES:
        return _table(file, name, TABLES[suffix], field)
    return _json_lines(file, name, field)


def python_reference() -> str:
    """Return the topics of `help()` in alphabetical order, about 0.47 million characters."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def shakespeare_file(warn: Warn = lambda message: None) -> Path:
    """Return the path of tiny Shakespeare, which is downloaded into the user's cache if necessary.

    A copy in `$JGPT_DATA_DIR` comes first, then the one in the cache.
    """
    places = _places_of_shakespeare()
    for path in places.values():
        if path.is_file():
            _require_shakespeare(str(path), path.read_bytes())
            return path
    cached = places["the cache"]
    folder = os.environ.get("JGPT_DATA_DIR")
    warn(f"downloading tiny Shakespeare from {SHAKESPEARE_URL}")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            data = response.read()
        _require_shakespeare("the answer", data)
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_file(cached, data)
    # A cut connection is no OSError, and another page is a ValueError.
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # the error keeps the connection open
        missing = ""
        if folder:
            missing = f", JGPT_DATA_DIR={folder} has no {SHAKESPEARE_FILE}"
        raise ConnectionError(
            f"tiny Shakespeare could not be downloaded from {SHAKESPEARE_URL} ({error}){missing}: "
            f"name a file with a copy of it, or put it as {SHAKESPEARE_FILE} into a folder that "
            "JGPT_DATA_DIR names, or use the corpus pydocs, which needs no network"
        ) from None
    return cached


def has_shakespeare() -> bool:
    """Return whether there is a copy of tiny Shakespeare, which is then not downloaded."""
    return any(path.is_file() for path in _places_of_shakespeare().values())


def _places_of_shakespeare() -> dict[str, Path]:
    places = {"the cache": Path(platformdirs.user_cache_dir("jgpt"), SHAKESPEARE_FILE)}
    folder = os.environ.get("JGPT_DATA_DIR")
    if folder:
        places = {"JGPT_DATA_DIR": Path(folder, SHAKESPEARE_FILE)} | places
    return places


def _require_shakespeare(name: str, data: bytes) -> None:
    """Raise ValueError for other data than tiny Shakespeare."""
    found = hashlib.sha256(data).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise ValueError(
            f"{name} is not tiny Shakespeare: its SHA-256 is {found[:12]}…, not "
            f"{SHAKESPEARE_SHA256[:12]}…"
        )


def _files(source: str, warn: Warn = lambda message: None) -> list[Path]:
    """Return the files of a source; a warning names the files of a folder that are skipped."""
    if source == "shakespeare":
        return [shakespeare_file(warn)]
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(
            f"{source!r} is neither a file nor a corpus{did_you_mean(source, CORPORA)}: the "
            f"corpora are {' and '.join(CORPORA)}"
        )
    if not path.is_dir():
        return [path]
    runs = _run_directories(path)
    files = []
    skipped: Counter[str] = Counter()
    # Sorted, since file systems differ in their order: the same folder gives the same text.
    for file in sorted(path.glob("**/*")):
        if not file.is_file():
            continue
        suffix, _ = _suffixes(file)
        if _is_hidden(file.relative_to(path)):
            skipped["hidden"] += 1
        elif not runs.isdisjoint(file.parents):
            skipped["of runs"] += 1
        elif suffix not in TEXTS + CODE:
            skipped[suffix or "without a suffix"] += 1
        else:
            files.append(file)
    if not files:
        raise FileNotFoundError(
            f"{path} is a folder without any text or code ({' '.join(TEXTS)} {' '.join(CODE[:4])} "
            f"and more){_listed(skipped, ': it has {}')}"
        )
    if skipped:
        warn(f"{path}: {len(files):,} files are read{_listed(skipped, ', and {} skipped')}")
    return files


def _run_directories(folder: Path) -> set[Path]:
    """Return the run directories in a folder, whose files, such as samples.txt, are no training
    text."""
    runs = set()
    for config in folder.glob("**/config.json"):
        run = config.parent
        if (run / "tokenizer.json").is_file() and (run / "checkpoints").is_dir():
            runs.add(run)
    return runs


def _is_hidden(file: Path) -> bool:
    """Return whether a file or one of its folders is hidden, such as .git."""
    return any(part.startswith(".") for part in file.parts)


def _listed(skipped: Counter[str], form: str) -> str:
    """Return the number of skipped files of each kind, the most frequent kinds first."""
    if not skipped:
        return ""
    kinds = []
    others = skipped.total()
    for kind, count in skipped.most_common(KINDS_NAMED):
        kinds.append(f"{count:,} {kind}")
        others -= count
    if others > 0:
        kinds.append(f"{others:,} others")
    return form.format(", ".join(kinds))


def _suffixes(path: Path) -> tuple[str, str]:
    """Return the suffix of a file and the suffix of its compression, such as .jsonl and .gz."""
    suffix = path.suffix.lower()
    if suffix in PACKED:
        return path.with_suffix("").suffix.lower(), suffix
    return suffix, ""


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


def _unpacked(
    file: BinaryIO, compression: str, path: Path
) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return the decompressed file, and the exceptions that damaged data raises."""
    if compression == ".gz":
        return gzip.GzipFile(fileobj=file), (EOFError, gzip.BadGzipFile, zlib.error)
    if compression == ".zst":
        zstd = _module(path, "zstd", "compression.zstd", "backports.zstd")
        return zstd.ZstdFile(file), (EOFError, zstd.ZstdError)
    return file, ()


def _module(path: Path | str, extra: str, *names: str) -> Any:
    """Import the first of several modules that is installed; the error says that `path` needs
    it."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"{path} needs {names[-1]}: pip install 'jgpt[{extra}]'")


def _json_lines(file: BinaryIO, name: str, field: str) -> Iterator[str]:
    number = 0
    while line := file.readline():
        number += 1
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
            text = record[field]
            if text is None:  # as in Parquet; a field that is missing may be a misspelt name
                continue
            text.encode()  # raises for a lone surrogate
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{name}, line {number}, has no text in a field {field!r}: name the field with "
                "`data_field=NAME`"
            ) from None
        except ValueError as error:
            raise ValueError(f"{name}, line {number}, can't be read as JSON: {error}") from None
        yield text


def _table(file: BinaryIO, name: str, delimiter: str, field: str) -> Iterator[str]:
    """Yield the texts of a column of a CSV file, whose first row has the names of the columns."""
    # The module's own limit is 131,072 characters, which a document easily has.
    csv.field_size_limit(sys.maxsize)
    # Strict, since a quotation mark without its end would make one document of the whole file.
    rows = csv.DictReader(_lines(file, name), delimiter=delimiter, strict=True)
    first_line = 1
    try:
        columns = list(rows.fieldnames or ())
        if columns:
            columns[0] = columns[0].removeprefix("\ufeff")  # a byte-order mark
        _require_column(name, field, columns)
        rows.fieldnames = columns
        first_line = rows.line_num + 1
        for row in rows:
            # Where the next row begins: a quotation mark that is never closed takes all lines.
            first_line = rows.line_num + 1
            if row[field] is not None:  # a row that is too short
                yield row[field]
    except csv.Error as error:
        raise ValueError(f"{name}, line {first_line}, can't be read as CSV: {error}") from None


def _require_column(name: str, field: str, columns: Sequence[str]) -> None:
    if field not in columns:
        raise ValueError(
            f"{name} has no column of text {field!r}, but {', '.join(columns)}: name it with "
            "`data_field=NAME`"
        )


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8 text, which end at newlines alone."""
    # `str.splitlines` would also end lines at characters such as U+2028, inside a column's text.
    pending = ""
    for block in _decoded(file, name, _LINES_AT_ONCE):
        *lines, pending = (pending + block).split("\n")
        for line in lines:
            yield line + "\n"
    if pending:
        yield pending


def _parquet(file: BinaryIO, name: str, field: str) -> Iterator[str]:
    """Yield the texts of a column, read in batches of rows; rows without a text are skipped."""
    arrow = _module(name, "parquet", "pyarrow")
    parquet = _module(name, "parquet", "pyarrow.parquet")
    try:
        table = parquet.ParquetFile(file)
        kinds = (arrow.string(), arrow.large_string(), arrow.string_view())
        columns = []
        for column in table.schema_arrow:
            kind = column.type
            if arrow.types.is_dictionary(kind):  # pandas writes categories like this
                kind = kind.value_type
            if kind in kinds:
                columns.append(column.name)
        _require_column(name, field, columns)
        for batch in table.iter_batches(_PARQUET_ROWS, columns=[field], use_threads=False):
            for text in batch.column(0).to_pylist():
                if text is not None:
                    yield text
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} can't be read as Parquet: {error}") from None


def _decoded(file: BinaryIO, name: str, size: int) -> Iterator[str]:
    """Yield UTF-8 text, decoded strictly in blocks; the last block is empty."""
    # Incremental, since a block may end inside a character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    received = 0
    block = None
    while block != b"":
        block = file.read(size)
        received += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # The error's object is this block, with the undecoded bytes of the last one before it.
            place = received - len(error.object) + error.start
            raise ValueError(
                f"{name} is not UTF-8 text: byte {place} can't be read; iconv -f ENCODING -t UTF-8 "
                "converts a text of another encoding"
            ) from None
        yield text


def _with_newlines(
    pieces: Iterator[str], end: str, universal_newlines: bool
) -> Generator[str, None, tuple[int, bool]]:
    """Yield the documents, each followed by `end`; if `end` is empty, yield the blocks of one text.

    Returns the length, and whether newlines or a byte-order mark were replaced.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    length = 0
    has_mark = False
    for piece in pieces:
        if universal_newlines:
            # A carriage return at the end of a block may belong to the next block's newline; at the
            # end of a document it does not.
            is_last = end != "" or piece == ""
            piece = newlines.decode(piece, final=is_last)
            is_beginning = end == "" and length == 0 and not has_mark
            if is_beginning and piece.startswith("\ufeff"):
                has_mark = True
                piece = piece[1:]
        length += len(piece)
        if piece:
            yield piece + end
    return length, has_mark or newlines.newlines not in (None, "\n")
