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
from jgpt.refusal import Field, Message, Placeholder
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
TEXTS = (".txt", ".text", ".md", ".rst", ".org", ".tex", *RECORDS)
CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cs", ".m", ".mm",
    ".java", ".kt", ".scala", ".clj", ".go", ".rs", ".swift", ".zig", ".d", ".f90", ".jl",
    ".js", ".mjs", ".jsx", ".ts", ".tsx", ".vue", ".html", ".css", ".scss", ".sql", ".r",
    ".rb", ".php", ".pl", ".pm", ".lua", ".sh", ".bash", ".ps1", ".hs", ".ml", ".ex", ".exs",
    ".erl", ".el", ".lisp", ".scm", ".lean", ".proto", ".cmake", ".yaml", ".yml", ".toml",
)  # fmt: skip
"""Suffixes of files that are read in folders, compressed or not: text and code."""
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
    (".csv", ".tsv", ".xls", ".xlsx", ".ods", ".arrow", ".feather"): _TABLE,
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
NOT_TEXT = {suffix: kind for suffixes, kind in _KINDS.items() for suffix in suffixes}
"""What a file with a suffix is instead of text, and what to do."""
_PARQUET_ROWS = 1024
"""The most rows that are read at once."""
_PARQUET_BATCH = 1 << 26
"""The most characters that are read at once."""
_PARQUET_RATIO = 1000
"""A file's bytes may stand for so many times as much text. Text is compressed to a fifth; a
dictionary and runs of its values let 500 bytes claim terabytes."""
_LARGEST_PARQUET = 1 << 26
"""So much text any file may have."""
_ROWS_PER_BYTE = 64
_MOST_ROWS = 1 << 20
"""So many rows any file may have, and so many more for each of its bytes."""
_SMALL_PARQUET = 1 << 20
"""Bytes; the batches of smaller files heed what a dictionary makes of them."""
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
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16's, which it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LOOKED_AT = 4096
"""The bytes at the beginning of a file that tell its encoding."""
KINDS_NAMED = 8
"""Kinds of skipped files that are named, the rest are others."""
LONGEST_WORD = 1 << 22
"""Characters; a chunk ends inside a longer word."""
LONGEST_LINE = 1 << 26
"""Bytes; a longer line of JSON is cut, and then refused."""

Warn = Callable[[str], None]
"""Called with a message for the user."""


def read_text(sources: Sequence[str], **options: Any) -> str:
    """Return the text of corpora, files and folders, concatenated, with the options of
    `read_blocks`."""
    return "".join(read_blocks(sources, **options))


def read_stream(file: BinaryIO, name: str, *, universal_newlines: bool = True) -> str:
    """Return the text of an open file; errors use this name."""
    return "".join(_with_newlines(_decoded(file, name, 1 << 30), "", universal_newlines))


def corpus_versions(sources: Sequence[str]) -> dict[str, str]:
    """Return the versions of the corpora among the sources: `pydocs` differs between Pythons."""
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

    A chunk ends where all tokenizers split a text, or inside a word that is longer than any.
    """
    longest_word = longest_word or LONGEST_WORD
    pending = ""
    enough = chunk_size
    for block in read_blocks(sources, chunk_size, **options):
        pending += block
        while len(pending) >= enough:
            end = last_split_point(pending)
            if end == 0 and enough < longest_word:
                enough += chunk_size  # a word goes on: with one more block it may end
                continue
            if end == 0:
                end = enough
            yield pending[:end]
            pending = pending[end:]
            enough = chunk_size
    if pending:
        yield pending


def last_split_point(text: str) -> int:
    """Return the last index between words, where all tokenizers split, or 0.

    After a single newline if there is one, else before a space.
    """
    # tokenizers take several spaces and newlines together: none of them is split
    end = len(text) - 1
    while (newline := text.rfind("\n", 1, end)) > 0:
        if not (text[newline - 1].isspace() or text[newline + 1].isspace()):
            return newline + 1
        end = newline
    end = len(text)
    while (space := text.rfind(" ", 1, end)) > 0 and text[space - 1].isspace():
        end = space
    return max(space, 0)


def source_files(sources: Sequence[str], *, earlier: bool = False) -> list[tuple[str, int, int]]:
    """Return the path, size and time of change of each file; `earlier` is an option of
    `read_blocks`."""
    files = []
    for source in sources:
        if source == "pydocs":  # a module, and not a file
            continue
        for path in _files(source, earlier=earlier):
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
    plain: bool = False,
    earlier: bool = False,
    warn: Warn = lambda message: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """Yield the text of corpora, files and folders, up to `size` bytes of it at once.

    With `universal_newlines`, CR LF and CR are read as newlines, and a file's byte-order mark is
    dropped, with one warning. The documents of JSON lines and Parquet are the texts in `field`,
    each followed by the separator. Versions before this one read other files of a folder: with
    `earlier`, hidden files but no code; with `plain`, .txt alone, and every file that is named is
    text. `advance` is called with the number of bytes read.
    """
    changed = []
    for source in sources:
        if source in CORPORA and Path(source).exists():
            warn(f"{source} is the corpus of that name; the file or folder here is ./{source}")
        if source == "pydocs":
            yield python_reference()
            continue
        for path in _files(source, plain=plain, earlier=earlier, warn=warn):
            suffix = ""
            compression = ""
            if not plain:
                suffix, compression = _suffixes(path)
            if suffix in NOT_TEXT:
                raise ValueError(f"{path} is {NOT_TEXT[suffix]}")
            with io.BufferedReader(_CountingFile(path, advance)) as file:
                opened, errors = _unpacked(file, compression, path)
                if suffix in RECORDS:
                    pieces = _documents(opened, str(path), suffix, field)
                    end = separator
                else:
                    pieces = _decoded(opened, str(path), size)
                    end = ""
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
            f"{names}: carriage returns are read as newlines and byte-order marks "
            "dropped; what is read with universal_newlines=False keeps them"
        )


def _documents(file: BinaryIO, name: str, suffix: str, field: str) -> Iterator[str]:
    if suffix == ".parquet":
        return _parquet(file, name, field)
    return _json_lines(file, name, field)


def python_reference() -> str:
    """Return the topics of `help()`, in alphabetical order: about 0.47 million characters."""
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
    places = {"the cache": cached}
    folder = os.environ.get("JGPT_DATA_DIR")
    if folder:
        places = {"JGPT_DATA_DIR": Path(folder, SHAKESPEARE_FILE)} | places
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
    warn(f"downloading tiny Shakespeare from {SHAKESPEARE_URL}")
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            data = response.read()
        wrong = _wrong_checksum(data)
        if wrong:
            raise ConnectionError(wrong)
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_file(cached, data)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection open
        missing = ""
        if folder:
            missing = f", JGPT_DATA_DIR={folder} has no {SHAKESPEARE_FILE}"
        raise ConnectionError(
            f"tiny Shakespeare could not be downloaded from {SHAKESPEARE_URL} ({error}){missing}: "
            f"name a file with a copy of it, or put it as {SHAKESPEARE_FILE} into a folder that "
            "JGPT_DATA_DIR names, or use the corpus pydocs, which needs no network"
        ) from None
    return cached


def _wrong_checksum(data: bytes) -> str:
    found = hashlib.sha256(data).hexdigest()
    if found == SHAKESPEARE_SHA256:
        return ""
    return f"SHA-256 {found[:12]}…, not {SHAKESPEARE_SHA256[:12]}…"


def _files(
    source: str,
    *,
    plain: bool = False,
    earlier: bool = False,
    warn: Warn = lambda message: None,
) -> list[Path]:
    """Return the files of a source; a line names what is skipped in a folder."""
    if source == "shakespeare":
        return [shakespeare_file(warn)]
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(_why_missing(path, source))
    if not path.is_dir():
        return [path]
    if plain:
        wanted = (".txt",)
    elif earlier:
        wanted = TEXTS
    else:
        wanted = TEXTS + CODE
    runs = _run_directories(path)
    files = []
    skipped: Counter[str] = Counter()
    # sorted, since the order of a file system is no one's: the same folder is the same text
    for file in sorted(path.glob("**/*")):
        if not file.is_file():
            continue
        if plain:
            suffix = file.suffix
        else:
            suffix, _ = _suffixes(file)
        if not (plain or earlier) and _is_hidden(file.relative_to(path)):
            skipped["hidden"] += 1
        elif not runs.isdisjoint(file.parents):
            skipped["of runs"] += 1
        elif suffix not in wanted:
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
    """Return the runs in a folder: what they wrote, such as samples.txt, is no text to train on."""
    runs = set()
    for config in folder.glob("**/config.json"):
        run = config.parent
        if (run / "tokenizer.json").is_file() and (run / "checkpoints").is_dir():
            runs.add(run)
    return runs


def _is_hidden(file: Path) -> bool:
    """Return whether a file or a folder that it is in is hidden, as .git and .ipynb_checkpoints
    are."""
    return any(part.startswith(".") for part in file.parts)


def _listed(skipped: Counter[str], form: str) -> str:
    """Return the kinds of files that were skipped, with their numbers, the most frequent ones
    first."""
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
    """Return the suffix of a file, and of its compression: .jsonl and .gz, say."""
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
    """Return a file without its compression, and the errors of damaged data."""
    if compression == ".gz":
        return gzip.GzipFile(fileobj=file), (EOFError, gzip.BadGzipFile, zlib.error)
    if compression == ".zst":
        zstd = _module(path, "zstd", "compression.zstd", "backports.zstd")
        return zstd.ZstdFile(file), (EOFError, zstd.ZstdError)
    return file, ()


def _module(path: Path | str, extra: str, *names: str) -> Any:
    """Return the first module that is installed, to read a path."""
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
            text.encode()  # a lone surrogate can't be
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                Message(
                    f"{name}, line {number}, has no text in a field {field!r}: name the field "
                    "with ",
                    Field("data_field", Placeholder("NAME")),
                )
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}, can't be read as JSON: {error}") from None
        yield text


def _parquet(file: BinaryIO, name: str, field: str) -> Iterator[str]:
    """Yield the texts of a column, read in batches of rows; a row without a text is left out."""
    arrow = _module(name, "parquet", "pyarrow")
    parquet = _module(name, "parquet", "pyarrow.parquet")
    try:
        table = parquet.ParquetFile(file)
        schema = table.schema_arrow
        if field not in schema.names:
            raise ValueError(
                Message(
                    f"{name} has no column {field!r}, but {', '.join(schema.names)}: name the "
                    "column of text with ",
                    Field("data_field", Placeholder("NAME")),
                )
            )
        column = schema.field(field).type
        value_type = column
        if arrow.types.is_dictionary(column):  # as pandas writes a category
            value_type = column.value_type
        if value_type not in (arrow.string(), arrow.large_string(), arrow.string_view()):
            raise ValueError(
                Message(
                    f"{name}: its column {field!r} has values of type {column}, not text: name "
                    f"another of {', '.join(schema.names)} with ",
                    Field("data_field", Placeholder("NAME")),
                )
            )
        size = file.seek(0, os.SEEK_END)
        _require_plausible(table.metadata, size, name, field)
        # what the file says of its size is not believed: its text is counted while it is read
        room = _LARGEST_PARQUET + _PARQUET_RATIO * size
        for group in range(table.num_row_groups):
            rows = _PARQUET_ROWS
            if size < _SMALL_PARQUET:
                # reads the group twice, which takes little time for a small file
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
    """Raise ValueError for a Parquet file that claims far more than its bytes can hold."""
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
    """Return the rows to read at once, each of which may be the longest value of a dictionary."""
    options = {"row_groups": [group], "columns": [field], "use_threads": False}
    first = next(dictionaries.iter_batches(1, **options), None)
    if first is None:
        return 1
    values = first.column(0).dictionary.cast("large_string").to_pylist()
    longest = 1
    for value in values:
        if value:  # null and the empty text are values too
            longest = max(longest, len(value))
    return max(1, min(_PARQUET_ROWS, _PARQUET_BATCH // longest))


def _decoded(file: BinaryIO, name: str, size: int) -> Iterator[str]:
    """Yield the text of UTF-8, decoded strictly in blocks; the last block is empty."""
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
        except UnicodeDecodeError as error:  # its object is this block, after the last one's rest
            place = received - len(error.object) + error.start
            unread = error.object[error.start :] + file.read(_LOOKED_AT)
            beginning += unread[len(error.object) - error.start :]
            reason = f"is not UTF-8 text: byte {place} can't be read"
            # a letter of another encoding at the end may be taken for the first byte of several
            is_cut = error.reason == "unexpected end of data" and len(unread) > 1
            encoding = None
            if not is_cut:
                encoding = _other_encoding(beginning, place, unread)
            raise ValueError(_why_not_text(name, reason, beginning, encoding)) from None
        nul = block.find(b"\0")  # valid UTF-8, but in no text
        if nul >= 0:
            place = received - len(block) + nul
            beginning += file.read(_LOOKED_AT)
            encoding = _encoding_with_nuls(beginning)
            kind = "binary" if encoding is None else encoding
            reason = f"is {kind}, not UTF-8 text: byte {place} is NUL"
            raise ValueError(_why_not_text(name, reason, beginning, encoding))
        yield text


def _why_not_text(name: str, reason: str, beginning: bytes, encoding: str | None) -> str:
    """What a file is that can't be read as UTF-8, and how to convert it."""
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
    """Return the encoding of a text that has bytes of 0, as iconv calls it; None for what is no
    text."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if beginning.startswith(mark):
            return encoding
    # without a mark: one of the two bytes of each Latin letter is 0
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
    """Return the encoding, as iconv calls it, of a text whose byte at a place is not UTF-8, or
    None.

    `unread` is what follows from that byte.
    """
    encoding = _encoding_with_nuls(beginning)
    if encoding is not None:
        return encoding
    if not beginning[:place].isascii():  # UTF-8 until then: damaged, or of several encodings
        return None
    try:
        text = (beginning + unread).decode("cp1252")
    except UnicodeDecodeError:  # five bytes have no character
        return None
    # text has no control characters, but newlines, tabs and page breaks
    if any(ord(letter) < 32 and letter not in "\t\n\r\f" for letter in text):
        return None
    return "WINDOWS-1252"


def _with_newlines(
    pieces: Iterator[str], end: str, universal_newlines: bool
) -> Generator[str, None, tuple[int, bool]]:
    """Documents, each with an end, or without an end the blocks of one text.

    Returns their length, and whether newlines or a byte-order mark were replaced.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    length = 0
    has_mark = False
    for piece in pieces:
        if universal_newlines:
            # a carriage return at the end of a block waits for the next one, and of a document not
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
