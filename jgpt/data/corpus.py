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
import shlex
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from jgpt.durable import write_file
from jgpt.words import counted, did_you_mean

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
"""The suffixes of tables, with the character between their columns. A table is read if it is named;
folders hold tables of numbers, too, and earlier versions skipped them."""
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
_TABLE = "a table, not text: save its column of text as JSON lines (.jsonl) or Parquet (.parquet)"
_PAGES = "not text but a document with a layout: save its text as .txt"
_ARRAYS = "not text but a file of arrays: name the text, or the folder that `jgpt prepare` wrote"
_ARCHIVE = "an archive: unpack it and name the folder"
_PACKED_OTHERWISE = "packed in a way that is not read: unpack it, or pack it with gzip or zstd"
_IMAGE = "not text but an image"
_SOUND = "not text but a sound or a film"
_PROGRAM = "not text but a compiled program: name its source"
_KINDS = {
    (".json",): "one JSON value: write one JSON object in each line, into a .jsonl file",
    (".ipynb",): "a notebook: save its cells as text (.md or .py), as `jupyter nbconvert` does",
    (".xls", ".xlsx", ".ods", ".arrow", ".feather"): _TABLE,
    (".sqlite", ".db"): _TABLE,
    (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ppt", ".pptx"): _PAGES,
    (".bin", ".npy", ".npz", ".pkl", ".pt", ".pth", ".ckpt", ".h5", ".gguf"): _ARRAYS,
    (".safetensors", ".msgpack"): _ARRAYS,
    (".zip", ".tar", ".tgz", ".7z", ".rar", ".whl"): _ARCHIVE,
    (".xz", ".bz2", ".lz4", ".br"): _PACKED_OTHERWISE,
    (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ico"): _IMAGE,
    (".mp3", ".wav", ".flac", ".ogg", ".mp4", ".mov", ".avi", ".mkv", ".webm"): _SOUND,
    (".exe", ".dll", ".so", ".dylib", ".o", ".a", ".pyc", ".class", ".jar"): _PROGRAM,
}


def _kinds_by_suffix() -> dict[str, str]:
    by_suffix = {}
    for suffixes, kind in _KINDS.items():
        for suffix in suffixes:
            by_suffix[suffix] = kind
    return by_suffix


NOT_TEXT = _kinds_by_suffix()
"""The kind of file that a suffix stands for if it is not text, and what the user can do."""
_LINES_AT_ONCE = 1 << 20
"""The number of bytes that are split into lines at once."""
_PARQUET_ROWS = 1024
"""The largest number of rows in a batch."""
_PARQUET_BATCH = 1 << 26
"""The largest number of characters in a batch."""
_PARQUET_RATIO = 1000
"""The largest ratio of a Parquet file's text to its bytes. Compressed text takes about a fifth, but
a dictionary and runs of its values let 500 bytes claim terabytes."""
_LARGEST_PARQUET = 1 << 26
"""The number of characters that any Parquet file may have, however small it is."""
_ROWS_PER_BYTE = 64
_MOST_ROWS = 1 << 20
"""The number of rows that any Parquet file may have, in addition to `_ROWS_PER_BYTE` for each
byte."""
_SMALL_PARQUET = 1 << 20
"""The size in bytes below which the batch size accounts for repeated values of a dictionary."""
_FIRST_BYTES = {
    b"\x89PNG": _IMAGE,
    b"\xff\xd8\xff": _IMAGE,
    b"GIF8": _IMAGE,
    b"%PDF": _PAGES,
    b"PK\3\4": "an archive, or a document of an office program, not text: save its text as .txt",
    b"PAR1": "Parquet: name it .parquet",
    b"\x93NUMPY": _ARRAYS,
    b"\x1f\x8b": "packed by gzip: name it .gz",
    b"\x28\xb5\x2f\xfd": "packed by zstd: name it .zst",
    b"BZh": _PACKED_OTHERWISE,
    b"\xfd7zXZ": _PACKED_OTHERWISE,
    b"\x7fELF": _PROGRAM,
}
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is a prefix of this one
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LOOKED_AT = 4096
"""The number of bytes at the beginning of a file from which its encoding is guessed."""
KINDS_NAMED = 8
"""The largest number of kinds of skipped files that a message names; it counts the rest as
others."""
LONGEST_WORD = 1 << 22
"""The largest number of characters in a word; a chunk may end inside a longer word."""
LONGEST_LINE = 1 << 26
"""The largest number of bytes in a line of JSON; a longer line is cut, so that it is an error."""

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
    called with the number of bytes read. Raises ValueError for a file that is empty, damaged or
    not text.
    """
    changed = []
    for source in sources:
        if source in CORPORA and Path(source).exists():
            warn(f"{source} is the corpus of that name; the file or folder here is ./{source}")
        if source == "pydocs":
            yield python_reference()
            continue
        for path in _files(source, warn):
            suffix, compression = _suffixes(path)
            if suffix in NOT_TEXT:
                raise ValueError(f"{path} is {NOT_TEXT[suffix]}")
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
            if length == 0:
                raise ValueError(f"{path} is empty")
            if is_changed:
                changed.append(path)
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
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise FileNotFoundError(
            "this Python has no pydoc_data, the source of the corpus pydocs: give a text file"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def shakespeare_file(warn: Warn = lambda message: None) -> Path:
    """Return the path of tiny Shakespeare, which is downloaded into the user's cache if necessary.

    A copy in `$JGPT_DATA_DIR` comes first, then the one in the cache.
    """
    places = _places_of_shakespeare()
    for name, path in places.items():
        if not path.is_file():
            continue
        wrong = _wrong_checksum(path.read_bytes())
        if wrong:
            raise ValueError(
                f"{path}, in {name}, is not tiny Shakespeare ({wrong}): delete it to download "
                "it again"
            )
        return path
    cached = places["the cache"]
    folder = os.environ.get("JGPT_DATA_DIR")
    warn(f"downloading tiny Shakespeare from {SHAKESPEARE_URL}")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            data = response.read()
        wrong = _wrong_checksum(data)
        if wrong:
            raise ConnectionError(wrong)
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_file(cached, data)
    except (OSError, http.client.HTTPException) as error:  # a cut connection is no OSError
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


def _wrong_checksum(data: bytes) -> str:
    found = hashlib.sha256(data).hexdigest()
    if found == SHAKESPEARE_SHA256:
        return ""
    return f"SHA-256 {found[:12]}…, not {SHAKESPEARE_SHA256[:12]}…"


def _files(source: str, warn: Warn = lambda message: None) -> list[Path]:
    """Return the files of a source; a warning names the files of a folder that are skipped."""
    if source == "shakespeare":
        return [shakespeare_file(warn)]
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(_why_missing(path, source))
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


def _why_missing(path: Path, source: str) -> str:
    if path.is_symlink():
        return f"{source} is a link to {os.readlink(path)}, which does not exist"
    return (
        f"{source!r} is neither a file nor a corpus{did_you_mean(source, CORPORA)}: the corpora "
        f"are {' and '.join(CORPORA)}"
    )


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
    while line := file.readline(LONGEST_LINE):
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
            reason = f"can't be read as JSON: {error}"
            if len(line) == LONGEST_LINE:  # it was cut here
                reason = f"has more than {LONGEST_LINE:,} bytes: make several documents of its text"
            raise ValueError(f"{name}, line {number}, {reason}") from None
        yield text


def _table(file: BinaryIO, name: str, delimiter: str, field: str) -> Iterator[str]:
    """Yield the texts of a column of a CSV file, whose first row has the names of the columns."""
    # The module's own limit is 131,072 characters, which a document easily has.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
    # Strict, since a quotation mark without its end would make one document of the whole file.
    rows = csv.reader(_lines(file, name), delimiter=delimiter, strict=True)
    first_line = 1
    try:
        columns = next(rows, [])
        first_line = rows.line_num + 1
        if columns:
            columns[0] = columns[0].removeprefix("\ufeff")  # a byte-order mark
        if field not in columns:
            raise ValueError(
                f"{name} has no column {field!r}, but {', '.join(columns)}: name the column of "
                "text with `data_field=NAME`"
            )
        place = columns.index(field)
        for row in rows:
            # Where the next row begins: a quotation mark that is never closed takes all lines.
            first_line = rows.line_num + 1
            if not row:  # an empty line
                continue
            if len(row) <= place:
                raise ValueError(
                    f"{name}, line {rows.line_num}, has {counted(len(row), 'column')}, not "
                    f"{len(columns)}"
                )
            yield row[place]
    except csv.Error as error:
        raise ValueError(f"{name}, line {first_line}, can't be read as CSV: {error}") from None


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
        schema = table.schema_arrow
        if field not in schema.names:
            raise ValueError(
                f"{name} has no column {field!r}, but {', '.join(schema.names)}: name the "
                "column of text with `data_field=NAME`"
            )
        column = schema.field(field).type
        value_type = column
        if arrow.types.is_dictionary(column):  # pandas writes categories like this
            value_type = column.value_type
        if value_type not in (arrow.string(), arrow.large_string(), arrow.string_view()):
            raise ValueError(
                f"{name}: its column {field!r} has values of type {column}, not text: name "
                f"another of {', '.join(schema.names)} with `data_field=NAME`"
            )
        size = file.seek(0, os.SEEK_END)
        _require_plausible(table.metadata, size, name, field)
        # The size that a file claims is not trusted: its text is counted while it is read.
        room = _LARGEST_PARQUET + _PARQUET_RATIO * size
        for group in range(table.num_row_groups):
            rows = _PARQUET_ROWS
            if size < _SMALL_PARQUET:
                # This reads the group twice, which is quick for a small file.
                dictionaries = parquet.ParquetFile(file, read_dictionary=[field])
                rows = _rows_at_once(dictionaries, group, field)
            options = {"row_groups": [group], "columns": [field], "use_threads": False}
            for batch in table.iter_batches(rows, **options):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        continue
                    room -= len(text)
                    if room < 0:
                        raise ValueError(
                            f"{name} has {size:,} bytes and more than {_PARQUET_RATIO} times as "
                            "much text: it repeats itself, or is damaged"
                        )
                    yield text
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} can't be read as Parquet: {error}") from None


def _require_plausible(metadata: Any, size: int, name: str, field: str) -> None:
    """Raise ValueError for a Parquet file that claims far more data than its bytes can hold."""
    claimed = 0
    for group_index in range(metadata.num_row_groups):
        group = metadata.row_group(group_index)
        for column_index in range(group.num_columns):
            column = group.column(column_index)
            if column.path_in_schema == field:
                claimed += column.total_uncompressed_size
    if claimed > _LARGEST_PARQUET + _PARQUET_RATIO * size:
        raise ValueError(f"{name} has {size:,} bytes and claims {claimed:,}: it is damaged")
    if metadata.num_rows > _MOST_ROWS + _ROWS_PER_BYTE * size:
        rows = metadata.num_rows
        raise ValueError(f"{name} has {size:,} bytes and claims {rows:,} rows: it is damaged")


def _rows_at_once(dictionaries: Any, group: int, field: str) -> int:
    """Return the number of rows in a batch, as if each row had the dictionary's longest value."""
    options = {"row_groups": [group], "columns": [field], "use_threads": False}
    first = next(dictionaries.iter_batches(1, **options), None)
    if first is None:
        return 1
    values = first.column(0).dictionary.cast("large_string").to_pylist()
    longest = 1
    for value in values:
        if value:  # null and empty values count, too
            longest = max(longest, len(value))
    return max(1, min(_PARQUET_ROWS, _PARQUET_BATCH // longest))


def _decoded(file: BinaryIO, name: str, size: int) -> Iterator[str]:
    """Yield UTF-8 text, decoded strictly in blocks; the last block is empty."""
    # Incremental, since a block may end inside a character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    received = 0
    block = None
    beginning = b""
    while block != b"":
        block = file.read(size)
        received += len(block)
        if len(beginning) < _LOOKED_AT:
            beginning += block[:_LOOKED_AT]
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # The error's object is this block, with the undecoded bytes of the last one before it.
            place = received - len(error.object) + error.start
            unread = error.object[error.start :] + file.read(_LOOKED_AT)
            beginning += unread[len(error.object) - error.start :]
            reason = f"is not UTF-8 text: byte {place} can't be read"
            # At the end of a file, a letter of another encoding can look like the first byte of a
            # sequence.
            is_cut = error.reason == "unexpected end of data" and len(unread) > 1
            encoding = None
            if not is_cut:
                encoding = _other_encoding(beginning, place, unread)
            raise ValueError(_why_not_text(name, reason, beginning, encoding)) from None
        nul = block.find(b"\0")  # valid UTF-8, but not text
        if nul >= 0:
            place = received - len(block) + nul
            beginning += file.read(_LOOKED_AT)
            encoding = _encoding_with_nuls(beginning)
            kind = encoding or "binary"
            reason = f"is {kind}, not UTF-8 text: byte {place} is NUL"
            raise ValueError(_why_not_text(name, reason, beginning, encoding))
        yield text


def _why_not_text(name: str, reason: str, beginning: bytes, encoding: str | None) -> str:
    """Return the message for a file that is not UTF-8: what it is, and how to convert it."""
    for first_bytes, kind in _FIRST_BYTES.items():
        if beginning.startswith(first_bytes):
            return f"{name} is {kind}"
    if encoding is None:
        return f"{name} {reason}"
    path = Path(name)
    if path.suffix.lower() in PACKED or not path.is_file():
        return f"{name} {reason}; it looks like {encoding}: convert it to UTF-8"
    converted = path.with_suffix(f".utf8{path.suffix}")
    command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(name)} > {shlex.quote(str(converted))}"
    return f"{name} {reason}; it looks like {encoding}: convert it with {command}"


def _encoding_with_nuls(beginning: bytes) -> str | None:
    """Return the encoding of text with zero bytes, by the name that iconv uses, or None."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if beginning.startswith(mark):
            return encoding
    # Without a byte-order mark, one of the two bytes of each Latin letter is 0.
    even = beginning[0::2]
    odd = beginning[1::2]
    if len(odd) < 2:
        return None
    if odd.count(0) > 0.9 * len(odd) and not even.count(0):
        return "UTF-16LE"
    if even.count(0) > 0.9 * len(even) and not odd.count(0):
        return "UTF-16BE"
    return None


def _other_encoding(beginning: bytes, place: int, unread: bytes) -> str | None:
    """Return the encoding of text whose byte at `place` is not UTF-8, by iconv's name, or None.

    `unread` are the bytes from that place on.
    """
    encoding = _encoding_with_nuls(beginning)
    if encoding is not None:
        return encoding
    if not beginning[:place].isascii():  # UTF-8 up to this byte: damaged, or of several encodings
        return None
    try:
        text = (beginning + unread).decode("cp1252")
    except UnicodeDecodeError:  # Windows-1252 has no character for five bytes
        return None
    # Text has no control characters except newlines, tabs and page breaks.
    if any(ord(letter) < 32 and letter not in "\t\n\r\f" for letter in text):
        return None
    return "WINDOWS-1252"


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
