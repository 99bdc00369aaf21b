"""Text: a word names a corpus, a file or a folder, and files are read by their suffix."""

import gzip
import hashlib
import http.client
import io
import json
import os
import pydoc_data
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from jgpt.files import write_file
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
REFERENCE = Path(pydoc_data.__file__).with_name("topics.py")
"""The module with the topics of `help()`, which is different in each Python."""
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
TEXTS = (".txt", ".text", ".md", ".rst", ".org", ".tex", *JSON_LINES, PARQUET)
CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cs", ".m", ".mm",
    ".java", ".kt", ".scala", ".clj", ".go", ".rs", ".swift", ".zig", ".d", ".f90", ".jl",
    ".js", ".mjs", ".jsx", ".ts", ".tsx", ".vue", ".html", ".css", ".scss", ".sql", ".r",
    ".rb", ".php", ".pl", ".pm", ".lua", ".sh", ".bash", ".ps1", ".hs", ".ml", ".ex", ".exs",
    ".erl", ".el", ".lisp", ".scm", ".lean", ".proto", ".cmake", ".yaml", ".yml", ".toml",
)  # fmt: skip
"""Suffixes of text and code files that are read from folders, gzipped or not."""
NANOGPT = ("train.bin", "val.bin")
"""The files that nanoGPT's prepare.py writes into a folder."""
PARQUET_ROWS = 1024
"""The largest number of rows that are read at once."""
KINDS_NAMED = 8
"""The largest number of kinds of skipped files that a message names."""
LONGEST_WORD = 1 << 22
"""The largest number of characters in a word; a chunk may end inside a longer word."""

Warn = Callable[[str], None]
"""A function that shows a message to the user."""
Advance = Callable[[int], None]
"""A function that is told how many more bytes were read."""


def read_text(words: Sequence[str]) -> str:
    """Return the concatenated text of corpora, files and folders."""
    return "".join(text_chunks(find_files(words)))


def read_stream(file: BinaryIO, name: str) -> str:
    """Return the text of an open file; errors call it `name`."""
    return "".join(_decoded(io.BytesIO(file.read()), name, -1))


def find_files(words: Sequence[str], warn: Warn = lambda message: None) -> list[Path]:
    """Return the files of corpora, files and folders, in the order of the words.

    A warning names the files of a folder that are skipped. Raises FileNotFoundError for a word that
    names nothing, and ValueError for tokens and pipes, which `jgpt prepare` reads.
    """
    files = []
    for word in words:
        path = Path(word)
        if word in CORPORA and path.exists():
            warn(f"{word} is the corpus of that name; the file or folder here is ./{word}")
        if word == "pydocs":
            files.append(REFERENCE)
        elif word == "shakespeare":
            files.append(shakespeare_file(warn))
        elif has_tokens(path):
            raise ValueError(
                f"{path} has tokens, not text: jgpt prepare {path} `out=DIR` makes a folder of "
                "them, for `data=DIR`"
            )
        elif path.is_dir():
            files.extend(_files_in(path, warn))
        elif path.is_file():
            files.append(path)
        elif word == "-" or path.exists():
            raise ValueError(
                f"{word} is a pipe, which can be read only once: jgpt prepare - `out=DIR` reads "
                "one, for `data=DIR`"
            )
        else:
            raise FileNotFoundError(
                f"{word!r} is neither a file nor a corpus{did_you_mean(word, CORPORA)}: the "
                f"corpora are {' and '.join(CORPORA)}"
            )
    return files


def has_tokens(path: Path) -> bool:
    """Return whether a path is a file of tokens, or a folder of nanoGPT's."""
    if path.is_dir():
        return (path / NANOGPT[0]).is_file()
    return path.suffix in (".npy", ".bin")


def text_chunks(
    files: Sequence[Path],
    size: int = 1 << 18,
    *,
    longest_word: int = LONGEST_WORD,
    field: str = "text",
    separator: str = "\n",
    advance: Advance = lambda count: None,
) -> Iterator[str]:
    """Yield the text of files in chunks of about `size` characters.

    A chunk ends where every tokenizer splits the text, or inside a word that is longer than
    `longest_word`. In JSON lines and Parquet each document is the text in `field`, followed by
    `separator`; documents that are empty or null are skipped. `advance` is called with the number
    of bytes read. Raises ValueError for a file that is damaged or not text, and if there is no text
    at all.
    """
    is_empty = True
    pending = ""
    enough = size
    for path in files:
        for block in _texts_of(path, size, field, separator, advance):
            is_empty = False
            pending += block
            while len(pending) >= enough:
                end = last_split_point(pending)
                if end == 0 and enough < longest_word:
                    # The word may end in a later block. Twice as many, since each look is at all of
                    # them: a book of paragraphs that are indented has no place to split it.
                    enough = min(2 * enough, longest_word)
                    continue
                end = end or enough
                yield pending[:end]
                pending = pending[end:]
                enough = size
    if is_empty:
        raise ValueError(f"{', '.join(map(str, files))} is empty")
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


def _texts_of(path: Path, size: int, field: str, separator: str, advance: Advance) -> Iterator[str]:
    """Yield the text of a file, in blocks of `size` characters or in documents."""
    if path == REFERENCE:
        yield python_reference()
        return
    suffix = path.suffix.lower()
    if suffix == ".zst":
        raise ValueError(f"{path} is compressed with zstd: `zstd -d {path}` unpacks it")
    with io.BufferedReader(_CountingFile(path, advance)) as file:
        unpacked: Any = file
        if suffix == ".gz":
            unpacked = gzip.GzipFile(fileobj=file)
            suffix = path.with_suffix("").suffix.lower()
        try:
            if suffix not in (*JSON_LINES, PARQUET):
                yield from _decoded(unpacked, str(path), size)
                return
            read = _parquet if suffix == PARQUET else _json_lines
            for text in read(unpacked, path, field):
                if text:
                    yield text.replace("\r\n", "\n").replace("\r", "\n") + separator
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged or cut short: {error}") from None


def _decoded(file: BinaryIO, name: str, size: int) -> Iterator[str]:
    """Yield UTF-8 text in blocks, with newlines alone and without a byte-order mark."""
    with io.TextIOWrapper(file, encoding="utf-8-sig") as reader:
        try:
            while text := reader.read(size):
                yield text
        except UnicodeDecodeError as error:
            # The error's object is what was read last, with the undecoded bytes before it.
            place = file.tell() - len(error.object) + error.start
            raise ValueError(
                f"{name} is not UTF-8 text: byte {place} can't be read; iconv -f ENCODING -t UTF-8 "
                "converts a text of another encoding"
            ) from None


def _json_lines(file: BinaryIO, path: Path, field: str) -> Iterator[str]:
    number = 0
    while line := file.readline():
        number += 1
        if not line.strip():
            continue
        try:
            text = json.loads(line.decode("utf-8-sig"))[field]
            if text is None:  # as in Parquet; a field that is missing may be a misspelt name
                continue
            text.encode()  # raises for a lone surrogate
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path}, line {number}, has no text in a field {field!r}: name the field with "
                "`data_field=NAME`"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, can't be read as JSON: {error}") from None
        yield text


def _parquet(file: BinaryIO, path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a column, read in batches of rows; rows without a text are skipped."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{path} needs pyarrow: pip install 'jgpt[parquet]'") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise ValueError(
                f"{path} has no column {field!r}, but {', '.join(table.schema_arrow.names)}: name "
                "it with `data_field=NAME`"
            )
        for batch in table.iter_batches(PARQUET_ROWS, columns=[field], use_threads=False):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str | None):
                    raise ValueError(
                        f"{path} has no text in the column {field!r}: name another one with "
                        "`data_field=NAME`"
                    )
                if text is not None:
                    yield text
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from None


class _CountingFile(io.FileIO):
    """A file that reports the number of bytes read."""

    def __init__(self, path: Path, advance: Advance) -> None:
        super().__init__(path)
        self.advance = advance

    def readinto(self, buffer: Any, /) -> int | None:
        """Read into a buffer."""
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


def _files_in(folder: Path, warn: Warn) -> list[Path]:
    """Return the files of text and code in a folder; a warning names the others."""
    # What runs have written, such as samples.txt, is no training text.
    runs = {path.parent for path in folder.glob("**/config.json") if _is_in_run(path)}
    files = []
    skipped: Counter[str] = Counter()
    # Sorted, since file systems differ in their order: the same folder gives the same text.
    for file in sorted(folder.glob("**/*")):
        if not file.is_file():
            continue
        suffix = file.suffix.lower()
        if suffix == ".gz":
            suffix = file.with_suffix("").suffix.lower()
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            skipped["hidden"] += 1
        elif not runs.isdisjoint(file.parents):
            skipped["of runs"] += 1
        elif suffix not in TEXTS + CODE:
            skipped[suffix or "without a suffix"] += 1
        else:
            files.append(file)
    kinds = [f"{count:,} {kind}" for kind, count in skipped.most_common(KINDS_NAMED)]
    if not files:
        found = ", ".join(kinds) or "nothing"
        raise FileNotFoundError(
            f"{folder} is a folder without any text or code ({' '.join(TEXTS)} "
            f"{' '.join(CODE[:4])} and more): it has {found}"
        )
    if skipped:
        warn(f"{folder}: {len(files):,} files are read, and {', '.join(kinds)} skipped")
    return files


def _is_in_run(config: Path) -> bool:
    return config.with_name("tokenizer.json").is_file() and config.with_name("checkpoints").is_dir()


def python_reference() -> str:
    """Return the topics of `help()` in alphabetical order, about 0.47 million characters."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def shakespeare_file(warn: Warn = lambda message: None) -> Path:
    """Return the path of tiny Shakespeare, which is downloaded into the user's cache if necessary.

    A copy in `$JGPT_DATA_DIR` comes first, then the one in the cache.
    """
    places = _places_of_shakespeare()
    cached = places[-1]
    for path in places:
        if path.is_file():
            _require_shakespeare(str(path), path.read_bytes())
            return path
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
        raise ConnectionError(
            f"tiny Shakespeare could not be downloaded from {SHAKESPEARE_URL} ({error}): name a "
            f"file with a copy of it, or put it as {SHAKESPEARE_FILE} into the folder that "
            "JGPT_DATA_DIR names, or use the corpus pydocs, which needs no network"
        ) from None
    return cached


def has_shakespeare() -> bool:
    """Return whether there is a copy of tiny Shakespeare, which is then not downloaded."""
    return any(path.is_file() for path in _places_of_shakespeare())


def _places_of_shakespeare() -> list[Path]:
    folders = [platformdirs.user_cache_dir("jgpt")]
    given = os.environ.get("JGPT_DATA_DIR")
    if given:
        folders.insert(0, given)
    return [Path(folder, SHAKESPEARE_FILE) for folder in folders]


def _require_shakespeare(name: str, data: bytes) -> None:
    """Raise ValueError for other data than tiny Shakespeare."""
    found = hashlib.sha256(data).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise ValueError(
            f"{name} is not tiny Shakespeare: its SHA-256 is {found[:12]}…, not "
            f"{SHAKESPEARE_SHA256[:12]}…"
        )
