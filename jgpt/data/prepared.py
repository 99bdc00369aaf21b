"""The one form of tokens: a folder with tokens.bin, tokenizer.json and dataset.json.

`jgpt prepare` writes one where the user says, and training writes one into the user's cache.
"""

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import platformdirs
from jaxtyping import Integer

from jgpt.config import DataConfig
from jgpt.data.byte_pairs import END_OF_TEXT, BPETokenizer
from jgpt.data.characters import ByteTokenizer, CharTokenizer, NumberTokenizer, OwnTokenizer
from jgpt.data.encode import (
    Tokenizer,
    document_end,
    encode_each,
    is_same_vocabulary,
    read_tokenizer,
)
from jgpt.data.sources import LONGEST_WORD, NANOGPT, Warn, find_files, text_chunks
from jgpt.files import locked, new_directory, write_file
from jgpt.shapes.contract import host_record, typed

TOKENS = "tokens.bin"
VALIDATION = "validation.bin"
"""The validation tokens, of data that came split."""
TOKENIZER = "tokenizer.json"
INDEX = "dataset.json"
DONE = "done.json"
"""The file with the numbers of characters and tokens that are prepared so far."""
FORM = 1
"""Another number makes the cache tokenize all texts anew."""
LLM_C = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""The number that llm.c's files of tokens begin with, and the dtype of their tokens."""
LLM_C_HEADER = 1024
PIECE = 1 << 18
"""The number of characters encoded at once; each thread holds a few pieces and their tokens."""
DOCUMENT = 1 << 14
"""The number of characters in each text that byte-pairs are learned from. The tokenizers library
reads 256 such texts ahead, and splitting them into words takes some 20 bytes of memory for each
byte."""
AT_ONCE = 1 << 20
"""The number of tokens that are hashed, checked or copied at once."""
LARGE_TEXT = 1 << 26
"""The size in bytes above which it is said where the tokens of a text are kept."""
SECONDS_BETWEEN_SAVES = 2.0
"""The largest amount of work, in seconds, that is lost when the process is stopped."""
SECONDS_BETWEEN_LOOKS = 0.5
"""The interval of the checks while another process tokenizes the same text."""
SECONDS_UNUSED = 30 * 24 * 3600
"""The time after which unused tokens of a text are deleted from the cache."""

Report = Callable[[float], None]
"""A function that is told the fraction that is done, and may raise an exception to stop."""
Array = Integer[np.ndarray, " tokens"]


@host_record
@dataclass(frozen=True)
class Prepared:
    """An open folder; its tokens are mapped into memory."""

    tokens: Integer[np.ndarray, " tokens"]
    validation: Integer[np.ndarray, " held_out"] | None
    """The validation tokens, of data that came split."""
    tokenizer: Tokenizer
    digest: str
    """SHA-256 of all tokens."""


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the narrowest dtype that holds the tokens."""
    if tokenizer.vocab_size <= 1 << 8:  # characters and bytes: a quarter of int32's memory
        return np.dtype(np.uint8)
    if tokenizer.vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def is_prepared(path: Path) -> bool:
    """Return whether a path is a prepared folder."""
    return (path / INDEX).is_file()


def open_prepared(folder: Path, tokenizer: Tokenizer | None = None) -> Prepared:
    """Open a folder, of the tokens of a `tokenizer` if one is given.

    Raises ValueError for a folder that is incomplete or damaged, or has other tokens.
    """
    try:
        index = json.loads((folder / INDEX).read_text())
        dtype = np.dtype(index["dtype"])
        digest = index["digest"]
        tokens = _mapped(folder / TOKENS, dtype, index["tokens"])
        validation = None
        if "validation" in index:
            validation = _mapped(folder / VALIDATION, dtype, index["validation"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{folder} is damaged ({type(error).__name__}: {error}): prepare it again"
        ) from None
    own = read_tokenizer(folder / TOKENIZER)
    if tokenizer is None:
        tokenizer = own
    if not _is_in_vocabulary(own, tokenizer):
        raise ValueError(f"{folder} was prepared with another tokenizer: prepare it again")
    return Prepared(tokens, validation, tokenizer, digest)


def _is_in_vocabulary(own: Tokenizer, tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of a folder's own tokenizer are those of another one."""
    if isinstance(tokenizer, NumberTokenizer) and isinstance(own, NumberTokenizer):
        return own.vocab_size <= tokenizer.vocab_size  # the largest number may be missing
    return is_same_vocabulary(own, tokenizer)


@typed
def _mapped(path: Path, dtype: np.dtype, count: int) -> Array:
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, not the {count} {dtype} tokens of its index: prepare it "
            "again"
        )
    if count == 0:  # which can't be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


# --- text ----------------------------------------------------------------------------------------


def prepare(
    config: DataConfig,
    folder: Path,
    *,
    warn: Warn = lambda message: None,
    progress: Report = lambda fraction: None,
) -> int:
    """Tokenize text of any size into a new folder; return the number of tokens.

    If an earlier process was killed while it prepared the same text, this continues its work. The
    text `-` is that of standard input.
    """
    if config.data == ("-",):
        with new_directory(folder) as partial:
            pipe = partial / "standard input"  # which is read twice
            with pipe.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            count = _write_text(partial, config, [pipe], None, warn, progress)
            pipe.unlink()
        return count
    files = find_files(config.data, warn)
    # Only the work of a process with the same files and options is continued.
    with new_directory(folder, _name_of(config, files)) as partial:
        return _write_text(partial, config, files, None, warn, progress)


def folder_of(
    config: DataConfig, tokenizer: Tokenizer | None, warn: Warn, progress: Report
) -> Path:
    """Return the prepared folder that a config names, or that of its text in the user's cache.

    The text is tokenized with a `tokenizer`, or else with the one that the config asks for.
    """
    for word in config.data:
        if not is_prepared(Path(word)):
            continue
        if len(config.data) > 1:
            raise ValueError(f"tokens such as {word} can't be joined with other data")
        return Path(word)
    if isinstance(tokenizer, OwnTokenizer):
        raise ValueError(
            f"the tokenizer {tokenizer.name} is an object of your own: give the tokens with "
            "dataset=jgpt.Dataset.from_tokens(tokens, tokenizer=...)"
        )
    return _in_cache(config, tokenizer, warn, progress)


def _in_cache(
    config: DataConfig, tokenizer: Tokenizer | None, warn: Warn, progress: Report
) -> Path:
    """Return the folder of a text in the user's cache, tokenized once for all runs."""
    files = find_files(config.data, warn)
    cache = Path(platformdirs.user_cache_dir("jgpt"), "prepared")
    name = _name_of(config, files)
    if tokenizer is not None and not _has_tokenizer(cache / name, tokenizer):
        name = _name_of(config, files, tokenizer)
    folder = cache / name
    if not is_prepared(folder):
        cache = _writable(cache)
        _remove_unused(cache)
        folder = cache / name
        size = sum(size for _, size, _ in _identify(files))
        if size > LARGE_TEXT:
            warn(f"a text of {size / 1e6:,.0f} MB is tokenized once, into {folder}")
    has_waited = False
    while not is_prepared(folder):
        try:
            with new_directory(folder, "text") as partial:
                _write_text(partial, config, files, tokenizer, warn, progress)
        except BlockingIOError:
            if not has_waited:
                warn("another process is tokenizing this text: waiting for it")
            has_waited = True
            progress(0.0)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        except FileExistsError:
            if not is_prepared(folder):
                raise
    with contextlib.suppress(OSError):  # a cache that can't be written
        os.utime(folder)  # marks the folder as used
    return folder


def _name_of(config: DataConfig, files: Sequence[Path], tokenizer: Tokenizer | None = None) -> str:
    """Return a name for the tokens of files as they are now, with a tokenizer or the config's."""
    facts: list[Any] = [FORM, _identify(files), config.data_field]
    if tokenizer is not None:
        facts.append(tokenizer.to_json())
    else:
        facts.append([config.tokenizer, config.tokenizer_files])
        if config.tokenizer == "bpe":
            facts.append(config.bpe_vocab_size)
        if config.tokenizer_files is not None:
            facts.append(_identify(sorted(Path(config.tokenizer_files).glob("*"))))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _identify(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return the place, size and time of change of each file."""
    facts = []
    for path in files:
        status = path.stat()
        facts.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return facts


def _has_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    path = folder / TOKENIZER
    return path.is_file() and path.read_text(encoding="utf-8") == tokenizer.to_json()


def _writable(cache: Path) -> Path:
    """Return the cache, or a folder that ends with this process if it can't be written."""
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    temporary = Path(tempfile.mkdtemp(prefix="jgpt-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _remove_unused(cache: Path) -> None:
    """Delete what no run has opened for a month, and the remains of stopped processes."""
    for path in cache.iterdir():
        with contextlib.suppress(OSError):  # another process has it, or has deleted it
            if path.stat().st_mtime > time.time() - SECONDS_UNUSED:
                continue
            name, *_ = path.name.split(".")
            lock = cache / f"{name}.jgpt.lock"
            with locked(lock, path):
                if path.is_dir():
                    shutil.rmtree(path)
                lock.unlink()


def _write_text(
    partial: Path,
    config: DataConfig,
    files: Sequence[Path],
    tokenizer: Tokenizer | None,
    warn: Warn,
    progress: Report,
) -> int:
    """Write the tokens of text, the tokenizer and the index; return the number of tokens.

    Continues the work of a stopped process in the same folder.
    """
    before = _identify(files)
    total = max(sum(size for _, size, _ in before), 1)
    passes = 1
    done_bytes = 0

    def advance(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress(min(done_bytes / (passes * total), 1.0))

    def chunks(size: int, **options: Any) -> Iterator[str]:
        return text_chunks(files, size, field=config.data_field, advance=advance, **options)

    if (partial / TOKENIZER).is_file():
        tokenizer = read_tokenizer(partial / TOKENIZER)
    else:
        if tokenizer is None:
            if config.tokenizer in ("char", "bpe"):
                passes = 2
            tokenizer = _make_tokenizer(config, chunks)
        write_file(partial / TOKENIZER, tokenizer.to_json())
    longest_word = LONGEST_WORD
    if not isinstance(tokenizer, BPETokenizer):  # there are no words, so that any place will do
        longest_word = PIECE
    texts = chunks(PIECE, separator=document_end(tokenizer), longest_word=longest_word)
    count, digest = _write_tokens(partial, tokenizer, texts, warn)
    if _identify(files) != before:
        raise ValueError(f"{', '.join(config.data)} changed while it was read: start again")
    (partial / DONE).unlink(missing_ok=True)
    _write_index(partial, token_dtype(tokenizer), count, digest, field=config.data_field)
    progress(1.0)
    return count


def _make_tokenizer(config: DataConfig, chunks: Callable[..., Iterator[str]]) -> Tokenizer:
    """Make the tokenizer that a config asks for, from a text if that is necessary."""
    match config.tokenizer:
        case "byte":
            return ByteTokenizer()
        case "gpt2":
            assert config.tokenizer_files is not None  # the config ensures this
            return BPETokenizer.from_gpt2(config.tokenizer_files)
        case "bpe":
            # Nothing is learned from the ends of documents.
            texts = chunks(DOCUMENT, separator=END_OF_TEXT)
            return BPETokenizer.train(texts, config.bpe_vocab_size)
        case "char":
            return CharTokenizer.from_texts(chunks(PIECE, longest_word=PIECE))
        case _:
            assert_never(config.tokenizer)


def _write_tokens(
    partial: Path, tokenizer: Tokenizer, texts: Iterable[str], warn: Warn
) -> tuple[int, str]:
    """Write the tokens of a text after those that are there; return their number and digest."""
    dtype = token_dtype(tokenizer)
    done, count = _done_before(partial, dtype)
    digest = hashlib.sha256()
    if done:
        warn(f"continuing after the {count:,} tokens of a process that was stopped")
        _add_to_digest(digest, np.memmap(partial / TOKENS, dtype, mode="r", shape=(count,)))
    with (partial / TOKENS).open("ab") as file:
        file.truncate(count * dtype.itemsize)
        saved = time.monotonic()
        for length, data in encode_each(tokenizer, texts, dtype, done):
            file.write(data)
            tokens = np.frombuffer(data, dtype)
            _add_to_digest(digest, tokens)
            done += length
            count += len(tokens)
            if time.monotonic() > saved + SECONDS_BETWEEN_SAVES:
                # The numbers are written after the tokens are on disk: after a power cut they must
                # not exceed them.
                file.flush()
                os.fsync(file.fileno())
                write_file(partial / DONE, json.dumps([done, count]))
                saved = time.monotonic()
    return count, digest.hexdigest()


def _done_before(partial: Path, dtype: np.dtype) -> tuple[int, int]:
    """Return the numbers of characters and tokens that a killed process has prepared.

    Both are 0 if the file of tokens is shorter than that, or lost, as after a power cut.
    """
    with contextlib.suppress(FileNotFoundError):
        done, count = json.loads((partial / DONE).read_text())
        if count * dtype.itemsize <= (partial / TOKENS).stat().st_size:
            return done, count
    return 0, 0


def _write_index(
    partial: Path, dtype: np.dtype, count: int, digest: str, **facts: int | str
) -> None:
    """Write the index, which makes the folder complete."""
    index = {"dtype": dtype.name, "tokens": count, "digest": digest, **facts}
    (partial / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def digest_of(*parts: Any) -> str:
    """Return the SHA-256 of the tokens of one array after another."""
    digest = hashlib.sha256()
    for part in parts:
        _add_to_digest(digest, part)
    return digest.hexdigest()


def _add_to_digest(digest: Any, tokens: Any) -> None:
    for start in range(0, len(tokens), AT_ONCE):
        # Hashed with one width and byte order, independent of the dtype in memory.
        digest.update(tokens[start : start + AT_ONCE].astype("<u4").data)


# --- tokens that other programs wrote ------------------------------------------------------------


def prepare_tokens(path: Path, folder: Path, tokenizer: Tokenizer | None = None) -> int:
    """Make a folder of tokens in a .npy or .bin file, or of nanoGPT's train.bin and val.bin.

    A .bin that has the form already is linked, and not copied. Without a `tokenizer`, the tokens
    are numbers without a text. Returns the number of tokens. Raises ValueError for a token outside
    of the vocabulary.
    """
    files = [path]
    if path.is_dir():
        files = [path / name for name in NANOGPT]
    arrays = [_open_tokens(file, tokenizer) for file in files]
    if tokenizer is None:
        tokenizer = NumberTokenizer(max(extremes(array)[1] for array in arrays) + 1)
    for file, array in zip(files, arrays, strict=True):
        require_in_vocabulary(str(file), array, tokenizer)
    # Files of .npy and llm.c begin with a header.
    is_the_form = all(isinstance(array, np.memmap) and array.offset == 0 for array in arrays)
    dtype = arrays[0].dtype if is_the_form else token_dtype(tokenizer)
    with new_directory(folder) as partial:
        for name, file, array in zip((TOKENS, VALIDATION), files, arrays, strict=False):
            if is_the_form:
                _link(file, partial / name)
                continue
            with (partial / name).open("wb") as copy:
                for start in range(0, len(array), AT_ONCE):
                    array[start : start + AT_ONCE].astype(dtype).tofile(copy)
        write_file(partial / TOKENIZER, tokenizer.to_json())
        facts = {}
        if len(arrays) == 2:
            facts["validation"] = len(arrays[1])
        _write_index(partial, dtype, len(arrays[0]), digest_of(*arrays), **facts)
    return sum(map(len, arrays))


def tokenizer_beside(path: Path, config: DataConfig) -> Tokenizer:
    """Return the tokenizer of tokens: the one that a config names, or the one beside them."""
    if config.tokenizer in ("gpt2", "byte"):
        return _make_tokenizer(config, lambda *_: iter(()))
    folder = path if path.is_dir() else path.parent
    if (folder / TOKENIZER).is_file():
        return read_tokenizer(folder / TOKENIZER)
    beside = ""
    if (folder / "meta.pkl").is_file():
        beside = " (meta.pkl is not read, since unpickling can run code: prepare the text itself)"
    raise ValueError(
        f"{path} has tokens without a tokenizer{beside}: put its {TOKENIZER} there, or give "
        "`tokenizer='gpt2'` and `tokenizer_files`, or `tokenizer='numbers'` for tokens without a "
        "text"
    )


@typed
def _open_tokens(path: Path, tokenizer: Tokenizer | None) -> Array:
    """Open a .npy file, which says its dtype, or a .bin file of nanoGPT or llm.c."""
    if path.suffix == ".npy":
        return whole_numbers(str(path), np.lib.format.open_memmap(path, mode="r"))
    with path.open("rb") as file:
        header = np.frombuffer(file.read(12), "<i4")
    if len(header) == 3 and int(header[0]) in LLM_C:
        dtype = LLM_C[int(header[0])]
        return np.memmap(path, dtype, mode="r", offset=LLM_C_HEADER, shape=(int(header[2]),))
    if tokenizer is None:
        raise ValueError(
            f"{path} doesn't say the dtype of its tokens: save them with np.save as .npy, which "
            "does"
        )
    # nanoGPT's prepare.py writes uint16.
    dtype = np.dtype(np.uint16)
    if tokenizer.vocab_size > 1 << 16:
        dtype = np.dtype(np.uint32)
    if path.stat().st_size % dtype.itemsize or path.stat().st_size == 0:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, which are no {dtype} tokens")
    tokens = np.memmap(path, dtype, mode="r")
    # Small numbers of twice the width have an upper half of 0.
    if dtype == np.uint16 and len(tokens) >= 16 and not tokens[1::2].any():
        raise ValueError(
            f"{path} seems to have wider tokens than uint16, because every other one is 0: save "
            "them with np.save as .npy, which says their dtype"
        )
    return tokens


def _link(file: Path, place: Path) -> None:
    """Link a file, which may have gigabytes."""
    try:
        os.link(file.resolve(), place)
    except OSError:  # on another disk
        place.symlink_to(file.resolve())


def whole_numbers(name: str, values: Any) -> Any:
    """Return tokens of any kind as an array. Raises ValueError if they are not whole numbers."""
    array = np.asanyarray(values)
    if array.size == 0:  # an empty list has no dtype
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one row of whole numbers, not {array.dtype}{list(array.shape)}"
        )
    return array


@typed
def extremes(tokens: Array) -> tuple[int, int]:
    """Return the smallest and the largest token, and zeros if there is none."""
    smallest = 0
    largest = 0
    # In parts, so that a file that is mapped into memory is not read into it at once.
    for start in range(0, len(tokens), AT_ONCE):
        part = tokens[start : start + AT_ONCE]
        smallest = min(smallest, int(part.min()))
        largest = max(largest, int(part.max()))
    return smallest, largest


@typed
def require_in_vocabulary(name: str, tokens: Array, tokenizer: Tokenizer) -> None:
    """Raise ValueError for a token outside of the vocabulary."""
    # An embedding returns NaN for such a token, without an error, so they are checked once here.
    smallest, largest = extremes(tokens)
    wrong = smallest if smallest < 0 else largest
    if not 0 <= wrong < tokenizer.vocab_size:
        raise ValueError(
            f"{name} contains token {wrong}, outside its tokenizer's vocabulary of "
            f"{tokenizer.vocab_size:,}: give the tokenizer that made the tokens"
        )
