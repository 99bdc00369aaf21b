"""Datasets: load and split a text as tokens, or prepare one that is larger than memory."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from jaxtyping import Integer

from jgpt.config import DataConfig
from jgpt.contracts import host_record, typed
from jgpt.data import tokenizers
from jgpt.data.corpus import Warn, corpus_versions, read_text, source_files, text_chunks
from jgpt.data.tokenizers import (
    END_OF_TEXT,
    Tokenizer,
    encode_each,
    is_same_vocabulary,
    read_tokenizer,
)
from jgpt.durable import new_directory, own_file, read_file, write_file

TOKENS_FILE, INDEX_FILE, TOKENIZER_FILE = "tokens.bin", "dataset.json", "tokenizer.json"
NANOGPT = "train.bin", "val.bin"
DONE_FILE = "done.json"
"""The numbers of characters and tokens prepared so far."""
SECONDS_BETWEEN_SAVES = 2.0
DECODED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class KnownText:
    """What tells a text from another, to train on the same one again."""

    tokens_digest: str
    """SHA-256 of all tokens."""
    digest: str | None
    """SHA-256 of the text; None for prepared data, which has only tokens, and in old runs."""
    versions: dict[str, str]
    """The versions of the corpora it is made of."""


@host_record
@dataclass(frozen=True)
class Dataset:
    """A tokenized text, split by position into training, validation and test."""

    train: Integer[np.ndarray, " tokens"]
    validation: Integer[np.ndarray, " held_out"]
    test: Integer[np.ndarray, " unseen"]
    """Empty by default."""
    tokenizer: Tokenizer
    text: KnownText


def load_dataset(
    config: DataConfig,
    block_size: int,
    *,
    tokenizer: Tokenizer | None = None,
    known: KnownText | None = None,
    warn: Warn = lambda message: None,
) -> Dataset:
    """Read, tokenize and split the data of a config, with a given tokenizer or a new one.

    Raises ValueError or OSError for text that can't be read or encoded, is too short, or differs
    from the known text.
    """
    text_digest = None
    is_text = known is not None and known.digest is not None
    prepared = [source for source in config.data if _has_tokens(Path(source), is_text)]
    if prepared:
        path, given = Path(prepared[0]), tokenizer
        if len(config.data) > 1:
            raise ValueError(f"prepared data {path} can't be mixed with other data")
        if (path / INDEX_FILE).is_file():
            tokens, tokenizer = _open_prepared(path)
            parts = [tokens]
        else:
            tokenizer = given or _nanogpt_tokenizer(path, config)
            files = [path / name for name in NANOGPT] if path.is_dir() else [path]
            parts = [_open_tokens(file, np.dtype(np.uint16), tokenizer) for file in files]
            if len(parts) > 1 and config.test_fraction:
                raise ValueError(f"{path} is split already: test_fraction must be 0")
        if given is not None:
            if not is_same_vocabulary(given, tokenizer):
                raise ValueError(f"{path} was prepared with another tokenizer: prepare it again")
            tokenizer = given
    else:
        if tokenizer is None and config.tokenizer == "gpt2":
            tokenizer = _make_tokenizer(config, tuple)
        text, text_digest = _read(config, tokenizer, known, warn)
        tokenizer = tokenizer or _make_tokenizer(config, lambda: [text])
        parts = [tokenizer.encode(text)]
    digest = _digest(*parts).hexdigest()
    if known is not None:
        _require_known(config, known, "of its tokens ", digest, known.tokens_digest)
    if len(parts) == 2:
        train, validation = parts
        test = validation[:0]
    else:
        (tokens,) = parts
        first = int(len(tokens) * (1 - config.held_out_fraction))
        second = int(len(tokens) * (1 - config.test_fraction))
        train, validation, test = tokens[:first], tokens[first:second], tokens[second:]
    for name, split in (("training", train), ("validation", validation), ("test", test)):
        if len(split) <= block_size and (name != "test" or config.test_fraction):
            raise ValueError(
                f"the {name} split has {len(split)} tokens, too few for one block of {block_size} "
                "and its targets: use more text or a smaller block_size"
            )
    read = KnownText(digest, text_digest, corpus_versions(config.data))
    return Dataset(train, validation, test, tokenizer, read)


def _how(config: DataConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Options of `read_text`. Documents end with `<|endoftext|>` if the tokenizer has it.

    If it has tokens that begin a text, these are between them, as transformers encodes each.
    """
    separator = "\n"
    has_end = isinstance(tokenizer, tokenizers.BPETokenizer) and tokenizer.end_of_text is not None
    if has_end:
        separator = END_OF_TEXT
    if tokenizer is not None and tokenizer.begin:
        separator = tokenizer.decode(tokenizer.begin)
    how = {"universal_newlines": config.universal_newlines, "field": config.data_field}
    return how | {"separator": separator}


def _read(
    config: DataConfig, tokenizer: Tokenizer | None, known: KnownText | None, warn: Warn
) -> tuple[str, str]:
    """A text and its SHA-256. Raises ValueError if it is not the known one.

    It is read as earlier versions did if that gives the known text.
    """
    how, wanted = _how(config, tokenizer) | {"warn": warn}, known and known.digest
    if wanted is not None:
        with contextlib.suppress(ValueError, FileNotFoundError):
            text = read_text(config.data, plain=True, **how)
            if hashlib.sha256(text.encode()).hexdigest() == wanted:
                return text, wanted
    try:
        text = read_text(config.data, **how)
    except FileNotFoundError as error:
        if known is None:
            raise
        raise FileNotFoundError(
            f"{error}; if the run's text has moved, train it with resume=True data=PLACE"
        ) from None
    digest = hashlib.sha256(text.encode()).hexdigest()
    if known is not None and wanted is not None:
        _require_known(config, known, "", digest, wanted)
    return text, digest


@typed
def count_characters(tokens: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer) -> int:
    """The number of characters that begin in tokens."""
    starts = range(0, len(tokens), DECODED_AT_ONCE)
    texts = (tokenizer.decode(tokens[start : start + DECODED_AT_ONCE]) for start in starts)
    # a character that began before decodes to replacement characters
    return sum(len(text.lstrip("\N{REPLACEMENT CHARACTER}")) for text in texts)


def _require_known(config: DataConfig, known: KnownText, of: str, found: str, wanted: str) -> None:
    if found == wanted:
        return
    here, sources = corpus_versions(config.data), " ".join(config.data)
    moved = [
        f"{name} was that of {version}, here it is that of {here[name]}"
        for name, version in known.versions.items()
        if here.get(name, version) != version
    ]
    why = "; ".join(moved) or f"{sources}: SHA-256 {of}{found[:12]}…, not {wanted[:12]}…"
    raise ValueError(
        f"the text has changed since the run was trained on it ({why}): "
        f"restore the text{' or use that Python' * bool(moved)}, or train a new run"
    )


def prepare(
    config: DataConfig,
    directory: Path,
    *,
    warn: Warn = lambda message: None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> int:
    """Tokenize text of any size into a folder to train from; return the number of tokens.

    The folder holds the tokens as uint16 or uint32, the tokenizer and an index. It appears whole or
    not at all. Continues what a killed process has prepared of the same text. `progress` is called
    with the fraction read.
    """
    for source in config.data:
        if Path(source).is_fifo():
            raise ValueError(f"{source} can be read only once: save its text to a file first")
    files, bytes_read = source_files(config.data), 0
    size = sum(size for _, size, _ in files) * (1 + (config.tokenizer in ("char", "bpe")))

    def advance(count: int) -> None:
        nonlocal bytes_read
        bytes_read += count
        progress(bytes_read / max(size, bytes_read, 1))

    def read(tokenizer: Tokenizer | None = None, **how: Any) -> Iterable[str]:
        return text_chunks(config.data, **_how(config, tokenizer), advance=advance, **how)

    content = json.dumps([asdict(config), files, corpus_versions(config.data)])
    with new_directory(directory, hashlib.sha256(content.encode()).hexdigest()[:8]) as partial:
        kept, done_file = partial / TOKENIZER_FILE, partial / DONE_FILE
        if kept.is_file():
            tokenizer, bytes_read = read_tokenizer(kept), size - sum(size for _, size, _ in files)
        else:
            tokenizer = _make_tokenizer(config, read)
            write_file(kept, tokenizer.to_json())
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        done, count = _done_before(partial, dtype)
        if done:
            warn(f"continuing after the {count:,} tokens of a process that was stopped")
        tokens_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with (
            own_file(partial / TOKENS_FILE, tokens_flags) as descriptor,
            open(descriptor, "ab", closefd=False) as file,
        ):
            file.truncate(count * dtype.itemsize)
            saved = time.monotonic()
            chunks = _without(read(tokenizer, warn=warn), done)
            for length, data in encode_each(tokenizer, chunks, dtype):
                file.write(data)
                done, count = done + length, count + len(data) // dtype.itemsize
                if time.monotonic() > saved + SECONDS_BETWEEN_SAVES:
                    file.flush()
                    os.fsync(file.fileno())
                    write_file(done_file, json.dumps([done, count]))
                    saved = time.monotonic()
        done_file.unlink(missing_ok=True)
        index = {"dtype": dtype.name, "tokens": count}
        (partial / INDEX_FILE).write_text(json.dumps(index) + "\n", encoding="utf-8")
    return count


def _done_before(partial: Path, dtype: np.dtype) -> tuple[int, int]:
    """The characters and tokens that a killed process has prepared.

    None if the file of tokens doesn't reach that far, since it would be filled up with zeros.
    """
    try:
        done, count = json.loads(read_file(partial / DONE_FILE))
        size = (partial / TOKENS_FILE).stat().st_size
        if type(done) is int and type(count) is int and 0 <= count * dtype.itemsize <= size:
            return done, count
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        pass
    return 0, 0


def _without(chunks: Iterable[str], done: int) -> Iterator[str]:
    """Chunks without the first `done` characters."""
    for chunk in chunks:
        if done < len(chunk):
            yield chunk[done:]
        done = max(done - len(chunk), 0)


def _has_tokens(path: Path, is_text: bool) -> bool:
    """Whether a path has tokens. A run's own text may lie beside those of nanoGPT."""
    nanogpt = path.suffix == ".bin" or any((path / name).is_file() for name in NANOGPT)
    return (path / INDEX_FILE).is_file() or (nanogpt and not is_text)


@typed
def _open_prepared(directory: Path) -> tuple[Integer[np.ndarray, " tokens"], Tokenizer]:
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: prepare the text again")
    tokenizer = read_tokenizer(path)
    try:
        index = json.loads(read_file(directory / INDEX_FILE))
        dtype = np.dtype({"uint16": np.uint16, "uint32": np.uint32}[index["dtype"]])
        count = int(index["tokens"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{directory / INDEX_FILE} is damaged: {error!r}") from None
    path = directory / TOKENS_FILE
    if path.stat().st_size != count * dtype.itemsize or count < 2:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, not the {count} {dtype} tokens of its index: "
            "prepare it again"
        )
    return _open_tokens(path, dtype, tokenizer), tokenizer


def _nanogpt_tokenizer(path: Path, config: DataConfig) -> Tokenizer:
    """The tokenizer that the config names, or the one beside the tokens."""
    if config.tokenizer in ("gpt2", "byte"):
        return _make_tokenizer(config, tuple)
    beside = (path if path.is_dir() else path.parent) / TOKENIZER_FILE
    if beside.is_file():
        return read_tokenizer(beside)
    raise ValueError(
        f"{path} has tokens without a tokenizer: put its {TOKENIZER_FILE} there, or give "
        "tokenizer=gpt2 and tokenizer_files, or name a text"
    )


@typed
def _open_tokens(
    path: Path, dtype: np.dtype, tokenizer: Tokenizer
) -> Integer[np.ndarray, " tokens"]:
    size = path.stat().st_size
    if size % dtype.itemsize or not size:
        raise ValueError(f"{path} has {size} bytes, which are no {dtype} tokens")
    tokens = np.memmap(path, dtype, mode="r")
    largest = max(int(tokens[i : i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24))
    if largest >= tokenizer.vocab_size:
        raise ValueError(
            f"{path} contains token {largest}, outside its tokenizer's vocabulary of "
            f"{tokenizer.vocab_size}: prepare it again"
        )
    return tokens


def _make_tokenizer(config: DataConfig, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    match config.tokenizer:
        case "byte":
            return tokenizers.ByteTokenizer()
        case "bpe":
            return tokenizers.BPETokenizer.train(texts(), config.bpe_vocab_size)
        case "gpt2":
            assert config.tokenizer_files is not None  # the config checks that
            return tokenizers.BPETokenizer.from_gpt2(config.tokenizer_files)
        case "char":
            return tokenizers.CharTokenizer.from_text("".join(set().union(*map(set, texts()))))
        case _:
            assert_never(config.tokenizer)


@typed
def _digest(
    tokens: Integer[np.ndarray, " tokens"], held_out: Integer[np.ndarray, " held_out"] | None = None
) -> Any:
    """The SHA-256 of all tokens."""
    digest = hashlib.sha256()
    for part in (tokens,) if held_out is None else (tokens, held_out):
        for start in range(0, len(part), 1 << 24):
            digest.update(part[start : start + (1 << 24)].astype("<u4").tobytes())
    return digest
