"""Datasets: load and split a text as tokens, or prepare one that is larger than memory."""

import contextlib
import hashlib
import json
import mmap
import os
import re
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import platformdirs
from jaxtyping import Integer

from jgpt.config import DataConfig, TokenDtype
from jgpt.data import tokenizers
from jgpt.data.corpus import (
    Warn,
    corpus_versions,
    last_split_point,
    source_files,
    text_chunks,
)
from jgpt.data.mixture import Share
from jgpt.data.tokenizers import (
    END_OF_TEXT,
    MAX_NUMBERS,
    CustomTokenizer,
    NumberTokenizer,
    Tokenizer,
    encode_each,
    file_dtype,
    is_same_vocabulary,
    read_tokenizer,
    token_dtype,
)
from jgpt.durable import new_directory, write_file
from jgpt.fields import as_dict
from jgpt.shapes.contract import host_record, typed
from jgpt.words import counted

TOKENS_FILE = "tokens.bin"
INDEX_FILE = "dataset.json"
TOKENIZER_FILE = "tokenizer.json"
GIVEN = "dataset="
"""The source that a run records for a dataset that was made in Python."""
NANOGPT = ("train.bin", "val.bin")
"""The files that nanoGPT's prepare.py writes into a folder."""
DONE_FILE = "done.json"
"""The file with the numbers of characters and tokens that are prepared so far."""
LLM_C_MAGIC = (20240520, 20240801)
"""The first number in llm.c's token files, for GPT-2 and Llama 3."""
LLM_C_HEADER = 1024
"""The size of the header in bytes."""
SURELY_WIDER = 16
"""The number of tokens from which it cannot be chance that every second one is 0."""
SECONDS_BETWEEN_SAVES = 2.0
"""The largest amount of work, in seconds, that is lost when the process is stopped."""
SECONDS_BETWEEN_LOOKS = 0.5
"""The interval of the checks while another process tokenizes the same text."""
SECONDS_UNUSED = 30 * 24 * 3600
"""The time after which unused tokens of a text are deleted from the cache."""
LARGE_TEXT = 1 << 26
"""The size in bytes above which the tokens of a text go to the user's cache instead of memory."""
PIECE = 1 << 18
"""The number of characters encoded at once; each thread holds a few pieces and their tokens."""
DOCUMENT = 1 << 14
"""The number of characters in each text that byte-pairs are learned from. The tokenizers library
reads 256 such texts ahead, and splitting them into words takes some 20 bytes of memory for each
byte."""
DECODED_AT_ONCE = 1 << 20
"""The number of tokens decoded at once."""
CHECKED_AT_ONCE = 1 << 24
"""The number of tokens checked at once."""
HASHED_AT_ONCE = 1 << 20
"""The number of tokens hashed at once, which take four bytes each during that time."""


@dataclass(frozen=True)
class KnownText:
    """The identity of a run's text, with which a resumed run finds the same text again."""

    tokens_digest: str
    """SHA-256 of all tokens."""
    digest: str | None
    """SHA-256 of the text; None for prepared data, which has only tokens."""
    versions: dict[str, str]
    """The versions of the corpora in the text."""
    sources: tuple[str, ...] = field(default=(), compare=False)
    """The data sources that the run names; empty if it names none."""


@host_record
@dataclass(frozen=True)
class Dataset:
    """A tokenized text, split by position into training, validation and test."""

    train: Integer[np.ndarray, " tokens"]
    validation: Integer[np.ndarray, " held_out"]
    test: Integer[np.ndarray, " unseen"]
    """The test split, empty by default."""
    tokenizer: Tokenizer
    text: KnownText
    shares: tuple[Share, ...] = ()
    """The texts of a mixture, in the order of their training tokens; empty for a single text."""

    @classmethod
    def from_tokens(
        cls,
        tokens: Any,
        *,
        validation: Any = None,
        test: Any = None,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.0,
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> "Dataset":
        """Make a dataset of tokens that have no text, or that a `tokenizer` made.

        The tokens are an array or a sequence of whole numbers, and so are `validation` and `test`.
        Without a `validation` split, `validation_fraction` and `test_fraction` of the tokens, at
        their end, are held out. Without a `tokenizer`, the tokens are numbers below
        `vocab_size`, by default one more than the largest one. Raises ValueError for tokens that
        are not whole numbers, or outside of the vocabulary.
        """
        if validation is None and test is not None:
            raise ValueError("give validation with test, or neither and the fractions")
        if tokenizer is not None and vocab_size is not None:
            raise ValueError("give tokenizer or vocab_size, not both")
        splits = [_whole_numbers("tokens", tokens)]
        if validation is not None:
            splits.append(_whole_numbers("validation", validation))
            if test is None:
                test = ()
            splits.append(_whole_numbers("test", test))
        advice = "give the tokenizer that made the tokens"
        if tokenizer is None:
            if vocab_size is None:
                vocab_size = _largest_of(splits) + 1
            tokenizer = NumberTokenizer(vocab_size)
            advice = "give a larger vocab_size"
        elif not isinstance(tokenizer, Tokenizer):
            tokenizer = CustomTokenizer.of(tokenizer)
        for split in splits:
            _require_in_vocabulary("the dataset", split, tokenizer, advice)
        splits = [_narrow(split, tokenizer) for split in splits]
        if validation is None:
            config = DataConfig(
                validation_fraction=validation_fraction, test_fraction=test_fraction
            )
            loaded = _Tokens(splits[0], tokenizer)
            train, validation, test = _split(config, loaded)
        else:
            train, validation, test = splits
            loaded = _Tokens(train, tokenizer, np.concatenate([validation, test]))
        return cls(train, validation, test, tokenizer, KnownText(_digest_of(loaded), None, {}))


@typed
def load_dataset(
    config: DataConfig,
    block_size: int,
    *,
    tokenizer: Tokenizer | None = None,
    known: KnownText | None = None,
    warn: Warn = lambda message: None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Dataset:
    """Read, tokenize and split the data of a config, with `tokenizer` or a new one.

    A text of more than `LARGE_TEXT` bytes is tokenized once, into a folder of the user's cache that
    a warning names. `progress` is called often with the fraction that is tokenized: 0 while the
    text is read, 1 at the end. It may raise an exception to stop. Raises ValueError or OSError for
    text that can't be read or encoded, is too short, or differs from the `known` text.
    """
    weights = _weights_of(config.data)
    if weights is not None:
        dataset = _load_mixture(config, weights, block_size, tokenizer, warn, progress)
        require_usable(dataset, config, block_size, known)
        return dataset
    tokens = _load(config, tokenizer, known, warn, progress)
    text = KnownText(_digest_of(tokens), tokens.text_digest, corpus_versions(config.data))
    train, validation, test = _split(config, tokens)
    dataset = Dataset(train, validation, test, tokens.tokenizer, text)
    require_usable(dataset, config, block_size, known)
    return dataset


@typed
def require_usable(
    dataset: Dataset, config: DataConfig, block_size: int, known: KnownText | None = None
) -> None:
    """Raise ValueError if a dataset is too short, or not the `known` one of a run."""
    if known is not None:
        found = dataset.text.tokens_digest
        is_same_text = known.digest is not None and dataset.text.digest == known.digest
        if is_same_text and found != known.tokens_digest:
            raise ValueError(
                f"the tokenizer has changed since the run was trained: {' '.join(config.data)} is "
                "the same text, but has other tokens; restore the tokenizer, or train a new run"
            )
        _require_known(config, known, "of its tokens ", found, known.tokens_digest)
    _require_a_block("training", dataset.train, block_size)
    _require_a_block("validation", dataset.validation, block_size)
    if config.test_fraction > 0 or len(dataset.test) > 0:
        _require_a_block("test", dataset.test, block_size)


@typed
def load_text(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    warn: Warn = lambda message: None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Integer[np.ndarray, " tokens"]:
    """Read and tokenize the data of a config, without splitting it.

    Raises ValueError or OSError for text that can't be read or encoded, and for tokens of another
    tokenizer or that are split already.
    """
    _require_no_weights(config)
    loaded = _load(config, tokenizer, None, warn, progress)
    if loaded.validation is not None:
        train_file, validation_file = NANOGPT
        folder = Path(config.data[0])
        raise ValueError(
            f"{folder} has two splits: name {folder / train_file} or {folder / validation_file}"
        )
    return loaded.tokens


def _load(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    known: KnownText | None,
    warn: Warn,
    progress: Callable[[float], None],
) -> "_Tokens":
    if isinstance(tokenizer, CustomTokenizer):
        tokenizer = tokenizer.with_code(config.make)
    elif tokenizer is None and config.make is not None:
        tokenizer = CustomTokenizer.of(config.make)
    if GIVEN in config.data:
        raise ValueError(
            "the run was trained on a Dataset in Python: give it again with dataset=, or name "
            "other data with `data`"
        )
    path = _find_tokens(config, known)
    if path is None:
        return _load_text(config, tokenizer, known, warn, progress)
    return _load_tokens(config, path, tokenizer)


def _find_tokens(config: DataConfig, known: KnownText | None) -> Path | None:
    """Return the path of the first source that contains tokens, or None if all sources are text."""
    is_known_text = known is not None and known.digest is not None
    for source in config.data:
        if _has_tokens(Path(source), is_known_text):
            return Path(source)
    return None


_WEIGHTED = re.compile(r"(.+)=((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)")


def _weights_of(sources: Sequence[str]) -> dict[str, float] | None:
    """Return the weights of sources such as a.txt=0.7, or None if they have none."""
    weights: dict[str, float] = {}
    for source in sources:
        if Path(source).exists():  # a file may have such a name
            continue
        weighted = _WEIGHTED.fullmatch(source)
        if weighted is not None:
            weights[weighted[1]] = float(weighted[2])
            continue
        name, equals, weight = source.rpartition("=")
        if equals and Path(name).exists():
            raise ValueError(
                f"{weight!r} is no weight of {name}: give a positive number, as in {name}=0.3"
            )
    if not weights:
        return None
    if len(weights) < len(sources):
        raise ValueError(
            f"`data={tuple(sources)!r}` must have a weight for each text, as in a.txt=0.7 "
            "b.txt=0.3, and each text once"
        )
    for source, weight in weights.items():
        if weight == 0:
            raise ValueError(f"{source} has the weight 0: leave it out, or give a positive weight")
    return weights


def _require_no_weights(config: DataConfig) -> None:
    """Raise ValueError for the weights of a mixture where all of a text is read once."""
    if _weights_of(config.data) is not None:
        raise ValueError(
            f"`data={config.data!r}` has weights, which are for training: name the texts "
            "without them"
        )


def text_sources(sources: Sequence[str]) -> tuple[str, ...]:
    """Return the sources without the weights of a mixture, if they have any."""
    return tuple(_weights_of(sources) or sources)


def _load_mixture(
    config: DataConfig,
    weights: dict[str, float],
    block_size: int,
    tokenizer: Tokenizer | None,
    warn: Warn,
    progress: Callable[[float], None],
) -> Dataset:
    """Load texts that are mixed by weights. Each is split, and the splits follow each other."""
    sources = tuple(weights)
    is_text = not any(_has_tokens(Path(source), is_text=False) for source in sources)
    if tokenizer is None and is_text:
        # A vocabulary of all texts, as if they were one.
        tokenizer = _make_tokenizer(config, lambda: _chunks_of(config, sources, progress))
    elif tokenizer is None and config.tokenizer == "numbers":
        tokenizer = _tokenizer_of_all_numbers(config, sources)
    splits: list[tuple[Any, Any, Any]] = []
    shares = []
    for index, source in enumerate(sources):
        part = replace(config, data=(source,))

        def part_progress(fraction: float, before: int = index) -> None:
            progress((before + fraction) / len(sources))

        loaded = _load(part, tokenizer, None, warn, part_progress)
        tokenizer = loaded.tokenizer
        split = _split(part, loaded)
        training_tokens = len(split[0])
        if training_tokens <= block_size:
            raise ValueError(
                f"the training split of {source} has {counted(training_tokens, 'token')}, too "
                f"few for one block of {block_size} and its targets: use more text or a smaller "
                "`block_size`"
            )
        splits.append(split)
        shares.append(Share(source, training_tokens, weights[source]))
    assert tokenizer is not None  # there is a source
    train_parts, validation_parts, test_parts = zip(*splits, strict=True)
    train = np.concatenate(train_parts)
    validation = np.concatenate(validation_parts)
    test = np.concatenate(test_parts)
    digest = _digest(train, np.concatenate([validation, test]))
    # The same tokens with other weights are another training.
    tokens_and_weights = [(share.tokens, share.weight) for share in shares]
    digest.update(json.dumps(tokens_and_weights).encode())
    text = KnownText(digest.hexdigest(), None, corpus_versions(sources))
    return Dataset(train, validation, test, tokenizer, text, tuple(shares))


def _tokenizer_of_all_numbers(config: DataConfig, sources: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of the numbers of all sources, some of which are files of tokens."""
    vocab_size = 0
    for source in sources:
        part = replace(config, data=(source,))
        loaded = _load(part, None, None, lambda message: None, lambda fraction: None)
        vocab_size = max(vocab_size, loaded.tokenizer.vocab_size)
    return NumberTokenizer(vocab_size)


def _chunks_of(
    config: DataConfig, sources: Sequence[str], progress: Callable[[float], None]
) -> Iterator[str]:
    """Yield the texts of a mixture for its vocabulary, of which nothing is tokenized yet."""
    for chunk in text_chunks(sources, **_read_options(config, None)):
        progress(0.0)  # lets the caller stop
        yield chunk


def _require_a_block(name: str, split: Any, block_size: int) -> None:
    if len(split) > block_size:  # one more token is the target of the last input
        return
    raise ValueError(
        f"the {name} split has {counted(len(split), 'token')}, too few for one block of "
        f"{block_size} and its targets: use more text or a smaller `block_size`"
    )


@host_record
@dataclass(frozen=True)
class _Tokens:
    """Tokens before they are split, or the tokens of training and validation."""

    tokens: Integer[np.ndarray, " tokens"]
    """All tokens, or the training tokens if there is a validation split."""
    tokenizer: Tokenizer
    validation: Integer[np.ndarray, " held_out"] | None = None
    text_digest: str | None = None
    """SHA-256 of the text; None for prepared data."""


@typed
def _split(
    config: DataConfig, loaded: _Tokens
) -> tuple[
    Integer[np.ndarray, " tokens"],
    Integer[np.ndarray, " held_out"],
    Integer[np.ndarray, " unseen"],
]:
    """Split the tokens into training, validation and test."""
    tokens = loaded.tokens
    if loaded.validation is not None:
        return tokens, loaded.validation, loaded.validation[:0]
    # The split is by position, since windows of one part overlap: no training step sees validation
    # text.
    train_end = int(len(tokens) * (1 - config.held_out_fraction))
    validation_end = int(len(tokens) * (1 - config.test_fraction))
    return tokens[:train_end], tokens[train_end:validation_end], tokens[validation_end:]


def _digest_of(loaded: _Tokens) -> str:
    if loaded.validation is None:
        return _digest(loaded.tokens).hexdigest()
    return _digest(loaded.tokens, loaded.validation).hexdigest()


def _load_tokens(config: DataConfig, path: Path, tokenizer: Tokenizer | None) -> _Tokens:
    """Return the tokens that `jgpt prepare` or nanoGPT's prepare.py wrote."""
    if len(config.data) > 1:
        raise ValueError(
            f"tokens such as {path} can't be joined with other data; training mixes them by "
            f"weights, as in {path}=0.5"
        )
    validation = None
    if (path / INDEX_FILE).is_file():
        tokens, own_tokenizer = _open_prepared(path)
    else:
        own_tokenizer, splits = _load_bare_tokens(config, path, tokenizer)
        tokens = splits[0]
        if path.is_dir():
            validation = splits[1]
    if tokenizer is None:
        if isinstance(own_tokenizer, CustomTokenizer):
            own_tokenizer = own_tokenizer.with_code(None)  # which asks for it
        return _Tokens(tokens, own_tokenizer, validation)
    if not is_same_vocabulary(tokenizer, own_tokenizer):
        raise ValueError(f"{path} was prepared with another tokenizer: prepare it again")
    return _Tokens(tokens, tokenizer, validation)


def _load_bare_tokens(
    config: DataConfig, path: Path, tokenizer: Tokenizer | None
) -> tuple[Tokenizer, list[Any]]:
    """Return the tokenizer and the tokens of a file without an index, or of each in a folder."""
    if not path.is_dir():
        files = [path]
    else:
        files = [path / name for name in NANOGPT]
        if config.test_fraction:
            raise ValueError(f"{path} is split already: `test_fraction` must be 0")
    is_numbers = config.tokenizer == "numbers"
    is_new = tokenizer is None
    if tokenizer is None and not is_numbers:
        tokenizer = _nanogpt_tokenizer(path, config)
    splits = [_open_bare_tokens(file, tokenizer, config.token_dtype) for file in files]
    if tokenizer is None:
        tokenizer = _number_tokenizer(str(path), splits, config.numbers_vocab_size)
    for file, split in zip(files, splits, strict=True):
        advice = (
            f"write tokens of this tokenizer, or give the tokenizer of these {split.dtype} tokens"
        )
        if isinstance(tokenizer, NumberTokenizer):
            advice = "train a run whose vocabulary has it"
            if is_new:
                size = f"`numbers_vocab_size={_largest_of(splits) + 1!r}`"
                advice = f"give {size}"
        _require_in_vocabulary(str(file), split, tokenizer, advice)
    return tokenizer, [_narrow(split, tokenizer) for split in splits]


def _number_tokenizer(name: str, splits: Sequence[Any], vocab_size: int | None) -> NumberTokenizer:
    """Return the tokenizer of numbers for some tokens, which messages call `name`."""
    if vocab_size is not None:
        return NumberTokenizer(vocab_size)
    largest = _largest_of(splits)
    if largest >= MAX_NUMBERS:
        raise ValueError(
            f"{name} contains token {largest} as {splits[0].dtype}, but a vocabulary has at "
            f"most {MAX_NUMBERS:,} tokens: a .bin file may have another `token_dtype`"
        )
    count = sum(len(split) for split in splits)
    # Two tokens of 16 bits that are read as one of 32 are such a number.
    if largest > count and largest >= 1 << 16:
        raise ValueError(
            f"{name} contains token {largest} as {splits[0].dtype}, but only "
            f"{counted(count, 'token')}: if that is right, give "
            f"`numbers_vocab_size={largest + 1!r}`, else another `token_dtype`"
        )
    return NumberTokenizer(largest + 1)


def _largest_of(splits: Sequence[Any]) -> int:
    """Return the largest token of all splits."""
    largest = 0
    for split in splits:
        _, largest_in_split = _extremes(split)
        largest = max(largest, largest_in_split)
    return largest


@typed
def _extremes(tokens: Integer[np.ndarray, " tokens"]) -> tuple[int, int]:
    """Return the smallest and the largest token, and zeros if there is none."""
    smallest = 0
    largest = 0
    # In parts, so that a file that is mapped into memory is not read into it at once.
    for start in range(0, len(tokens), CHECKED_AT_ONCE):
        part = tokens[start : start + CHECKED_AT_ONCE]
        smallest = min(smallest, int(part.min()))
        largest = max(largest, int(part.max()))
    return smallest, largest


@typed
def _require_in_vocabulary(
    name: str,
    tokens: Integer[np.ndarray, " tokens"],
    tokenizer: Tokenizer,
    advice: str,
) -> None:
    """Raise ValueError for a token outside of the vocabulary."""
    # An embedding returns NaN for such a token, without an error, so they are checked once here.
    smallest, largest = _extremes(tokens)
    wrong = largest
    if smallest < 0:
        wrong = smallest
        advice = "a token is never negative"
    elif largest < tokenizer.vocab_size:
        return
    raise ValueError(
        f"{name} contains token {wrong}, outside its tokenizer's vocabulary of "
        f"{tokenizer.vocab_size:,}: {advice}"
    )


@typed
def _narrow(
    tokens: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer
) -> Integer[np.ndarray, " tokens"]:
    """Return tokens in a dtype that JAX has and that is native here."""
    if tokens.dtype.isnative and tokens.dtype.name in ("uint8", "uint16", "uint32", "int32"):
        return tokens
    return tokens.astype(file_dtype(tokenizer))


def _whole_numbers(name: str, values: Any) -> Any:
    """Return tokens of any kind as an array. Raises ValueError if they are not whole numbers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # for rows of several lengths
        raise ValueError(f"{name} must be one row of whole numbers: {error}") from None
    if array.size == 0:  # an empty list has no dtype
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one row of whole numbers, not {array.dtype}{list(array.shape)}"
        )
    return array


def _load_text(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    known: KnownText | None,
    warn: Warn,
    progress: Callable[[float], None],
) -> _Tokens:
    if tokenizer is None and config.tokenizer in ("byte", "gpt2"):  # these tokenizers need no text
        tokenizer = _make_tokenizer(config, tuple)
    text = _read(config, tokenizer, known, warn, progress)
    if text.pieces is None:
        folder = _tokenized_in_cache(config, text, tokenizer, warn, progress)
        try:
            tokens, saved_tokenizer = _open_prepared(folder)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{error}; {folder} is a cache: delete it") from None
        if tokenizer is None:
            tokenizer = saved_tokenizer
        loaded = _Tokens(tokens, tokenizer, text_digest=text.digest)
    else:
        loaded = _tokenized_in_memory(config, text, tokenizer, known, progress)
    progress(1.0)
    return loaded


class _Fraction:
    """A counter of the bytes that have been read, which reports their fraction."""

    def __init__(self, size: int, report: Callable[[float], None]) -> None:
        self.size = size
        self.total = size
        self.report = report
        self.done = 0

    def add_pass(self) -> None:
        """Add one more pass over the text to the total."""
        self.total += self.size

    def add(self, count: int) -> None:
        """Add `count` bytes to those read, and report the fraction."""
        self.done += count
        self.report(self.done / max(self.total, self.done, 1))


@dataclass(frozen=True)
class _Text:
    """A text that was read once."""

    digest: str
    """SHA-256 of its UTF-8."""
    size: int
    """Its size in bytes of UTF-8."""
    options: dict[str, Any]
    """The options of `read_blocks` with which it is read again."""
    pieces: deque[mmap.mmap] | None
    """The text as UTF-8, which takes one byte for most characters, where a string may take four.
    None for a text that is too large for memory.

    Each piece has its own pages, which return to the system once the piece is encoded. With bytes
    objects, the allocator would keep the memory beside the tokens: 2.8 bytes for a byte of text
    instead of 1.6.
    """

    def parts(self, bytes_read: _Fraction) -> Iterator[str]:
        """Yield the pieces as text."""
        assert self.pieces is not None
        for piece in self.pieces:
            bytes_read.add(len(piece))
            yield piece[:].decode()


def _read_options(config: DataConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the options of `read_blocks`. Documents end with `<|endoftext|>` if the tokenizer has
    it.

    Tokens that begin a text are placed between documents, too, as when transformers encodes each
    document.
    """
    separator = "\n"
    if tokenizer is None:
        has_end = config.tokenizer == "bpe"  # trained byte-pairs have this token
    else:
        is_bpe = isinstance(tokenizer, tokenizers.BPETokenizer)
        has_end = is_bpe and tokenizer.end_of_text is not None
    if has_end:
        separator = END_OF_TEXT
    if tokenizer is not None and tokenizer.begin:
        separator = tokenizer.decode(tokenizer.begin)
    return {
        "universal_newlines": config.universal_newlines,
        "field": config.data_field,
        "separator": separator,
    }


def _read(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    known: KnownText | None,
    warn: Warn,
    progress: Callable[[float], None],
) -> _Text:
    """Read a text. Raises ValueError if it is not the known one."""
    options = _read_options(config, tokenizer)
    try:
        text = _read_once(config.data, options, warn, progress)
    except FileNotFoundError as error:
        if known is None:
            raise
        raise FileNotFoundError(
            f"{error}; if the run's text has moved, train it with `resume=True` `data=PLACE`"
        ) from None
    if known is not None and known.digest is not None:
        _require_known(config, known, "", text.digest, known.digest)
    return text


def _read_once(
    sources: Sequence[str],
    options: dict[str, Any],
    warn: Warn,
    progress: Callable[[float], None],
) -> _Text:
    # A pipe can't be read twice, so its text is kept in memory, however long it is.
    is_kept = any(_is_read_once(Path(source)) for source in sources)
    digest = hashlib.sha256()
    size = 0
    pieces: deque[mmap.mmap] | None = deque()
    # No shorter word is cut, so the tokens are those of the whole text.
    for chunk in text_chunks(sources, PIECE, longest_word=LARGE_TEXT, warn=warn, **options):
        progress(0.0)  # Nothing is tokenized yet; this call lets the caller stop.
        piece = chunk.encode()
        digest.update(piece)
        size += len(piece)
        if size > LARGE_TEXT and not is_kept:
            pieces = None
        if pieces is not None:
            pages = mmap.mmap(-1, len(piece))
            pages[:] = piece
            pieces.append(pages)
    return _Text(digest.hexdigest(), size, options, pieces)


def _tokenized_in_memory(
    config: DataConfig,
    text: _Text,
    tokenizer: Tokenizer | None,
    known: KnownText | None,
    progress: Callable[[float], None],
) -> _Tokens:
    bytes_read = _Fraction(text.size, progress)
    if tokenizer is None:
        bytes_read.add_pass()
        tokenizer = _make_tokenizer(config, lambda: text.parts(bytes_read))
    try:
        tokens = _encode(tokenizer, text, bytes_read)
    except ValueError as error:  # for a character that the run's tokenizer lacks
        if known is None or not _is_elsewhere(config, known):
            raise
        raise _other_text(config, known, str(error)) from None
    return _Tokens(tokens, tokenizer, text_digest=text.digest)


def _is_read_once(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


@typed
def _encode(
    tokenizer: Tokenizer, text: _Text, bytes_read: _Fraction
) -> Integer[np.ndarray, " tokens"]:
    """Encode a text in memory into the narrowest dtype; this consumes the text's pieces."""
    dtype = token_dtype(tokenizer)
    # Pages of zeros take no memory until they are written, so room for one token for each byte is
    # free. XLA's CPU client shares memory that begins at a page, and copies other memory.
    buffer = mmap.mmap(-1, max(text.size, 1) * dtype.itemsize)
    end = 0
    parts = _used_up(text.pieces, bytes_read)
    if isinstance(tokenizer, CustomTokenizer):
        # At once, since nobody knows where the user's tokenizer splits a text.
        parts = ["".join(parts)]
    for _, tokens in encode_each(tokenizer, parts, dtype):
        start = end
        end += len(tokens)
        while end > len(buffer):  # a normaliser may lengthen a text
            buffer = _twice_as_long(buffer)
        buffer[start:end] = tokens
    return np.frombuffer(buffer, dtype, end // dtype.itemsize)


def _used_up(pieces: deque[mmap.mmap] | None, bytes_read: _Fraction) -> Iterator[str]:
    while pieces:
        with pieces.popleft() as pages:
            piece = pages[:]
        bytes_read.add(len(piece))
        yield piece.decode()


def _twice_as_long(buffer: mmap.mmap) -> mmap.mmap:
    longer = mmap.mmap(-1, 2 * len(buffer))
    longer[: len(buffer)] = buffer[:]
    return longer


# --- a large text: its tokens are kept in the user's cache ---------------------------------------


def _tokenized_in_cache(
    config: DataConfig,
    text: _Text,
    tokenizer: Tokenizer | None,
    warn: Warn,
    progress: Callable[[float], None],
) -> Path:
    """Tokenize a text into the cache, or find the tokens of an earlier or another process.

    Returns their folder.
    """
    cache = Path(platformdirs.user_cache_dir("jgpt"), "prepared")
    folder = cache / _cache_name(cache, config, text, tokenizer)
    if not (folder / INDEX_FILE).is_file():
        warn(
            f"{_sources(config)}: a text of {text.size / 1e6:,.0f} MB is tokenized once, into "
            f"{folder}"
        )
        _remove_unused(cache)
    has_waited = False
    while not (folder / INDEX_FILE).is_file():
        try:
            with new_directory(folder, text.digest[:8]) as partial:
                _write_text_in_cache(config, text, tokenizer, partial, warn, progress)
        except BlockingIOError:
            if not has_waited:
                warn("another process is tokenizing this text: waiting for it")
            has_waited = True
            progress(0.0)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        except FileExistsError:
            if not (folder / INDEX_FILE).is_file():
                raise
        except FileNotFoundError:  # the text's file is missing
            raise
        except OSError as error:
            raise OSError(
                f"{error}; the tokens of a text above {LARGE_TEXT / 1e6:.0f} MB are kept there: "
                "make room, or write them elsewhere with `jgpt prepare` and train on that folder"
            ) from error
    os.utime(folder)  # marks the folder as used
    return folder


def _write_text_in_cache(
    config: DataConfig,
    text: _Text,
    tokenizer: Tokenizer | None,
    partial: Path,
    warn: Warn,
    progress: Callable[[float], None],
) -> None:
    bytes_read = _Fraction(text.size, progress)

    def read() -> Iterator[str]:
        """Read the text again. Raises ValueError if its digest has changed."""
        digest = hashlib.sha256()
        for chunk in text_chunks(config.data, **text.options):
            piece = chunk.encode()
            digest.update(piece)
            bytes_read.add(len(piece))
            yield chunk
        if digest.hexdigest() != text.digest:
            raise ValueError(f"{_sources(config)} changed while it was read: start again")

    def make_tokenizer() -> Tokenizer:
        if tokenizer is not None:
            return tokenizer
        bytes_read.add_pass()
        return _make_tokenizer(config, read)

    _write_tokens(partial, make_tokenizer, lambda _: read(), warn)


def _cache_name(cache: Path, config: DataConfig, text: _Text, tokenizer: Tokenizer | None) -> str:
    """Return the name of the cache folder for a text and a tokenizer.

    A resumed run has a tokenizer. A new run has none yet, so the name depends on the tokenizer that
    its config asks for.
    """
    asked: list[Any] = [config.tokenizer]
    if config.make is not None:
        asked.append(as_dict(config)["make"])
    if config.tokenizer == "bpe":
        asked.append(config.bpe_vocab_size)
    name = _short_digest([text.digest, *asked])
    if tokenizer is None:
        return name
    with contextlib.suppress(ValueError, OSError):
        if read_tokenizer(cache / name / TOKENIZER_FILE).to_json() == tokenizer.to_json():
            return name
    return _short_digest([text.digest, tokenizer.to_json()])


def _remove_unused(cache: Path) -> None:
    """Delete folders that no run has used for a month, and the remains of stopped processes."""
    oldest = time.time() - SECONDS_UNUSED
    for path in cache.glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= oldest:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _short_digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _sources(config: DataConfig) -> str:
    if len(config.data) == 1:
        return config.data[0]
    return f"{config.data[0]} and {len(config.data) - 1} more"


@typed
def count_characters(tokens: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer) -> int:
    """Return the number of characters that begin in these tokens."""
    count = 0
    for start in range(0, len(tokens), DECODED_AT_ONCE):
        text = tokenizer.decode(tokens[start : start + DECODED_AT_ONCE])
        # Bits per character need the characters of this split: with the ratio of the whole text
        # they were 4.2% too low, for byte-pairs of 1,024 on tiny Shakespeare. A character that
        # began in earlier tokens decodes to replacement characters.
        count += len(text.lstrip("\N{REPLACEMENT CHARACTER}"))
    return count


def _require_known(
    config: DataConfig, known: KnownText, kind: str, found: str, wanted: str
) -> None:
    """Raise ValueError if the SHA-256 `found` isn't `wanted`; `kind` names what was hashed."""
    if found == wanted:
        return
    differs = f"SHA-256 {kind}{found[:12]}…, not {wanted[:12]}…"
    if _is_elsewhere(config, known):
        raise _other_text(config, known, differs)
    versions_here = corpus_versions(config.data)
    moved = []
    for name, version in known.versions.items():
        here = versions_here.get(name, version)
        if here != version:
            moved.append(f"{name} was that of {version}, here it is that of {here}")
    why = f"{' '.join(config.data)}: {differs}"
    what_to_do = "restore the text"
    if moved:
        why = "; ".join(moved)
        what_to_do = "restore the text or use that Python"
    raise ValueError(
        f"the text has changed since the run was trained on it ({why}): {what_to_do}, or train a "
        "new run"
    )


def _is_elsewhere(config: DataConfig, known: KnownText) -> bool:
    """Return whether a resumed run names other data than before."""
    return known.sources not in ((), config.data)


def _other_text(config: DataConfig, known: KnownText, why: str) -> ValueError:
    return ValueError(
        f"the run was trained on `data={known.sources!r}`, and `data={config.data!r}` is "
        f"another text ({why}): give the run's data, or train a new run"
    )


def prepare(
    config: DataConfig,
    directory: Path,
    *,
    warn: Warn = lambda message: None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> int:
    """Tokenize text of any size into a folder to train from; return the number of tokens.

    The folder holds the tokens as uint16 or uint32, the tokenizer and an index. The finished folder
    is renamed into place. If an earlier process was killed while it prepared the same text, this
    continues its work. `progress` is called with the fraction read.
    """
    _require_no_weights(config)
    for source in config.data:
        if _is_read_once(Path(source)):
            raise ValueError(f"{source} can be read only once: save its text to a file first")
    files = source_files(config.data)
    total = sum(size for _, size, _ in files)
    bytes_read = _Fraction(total, progress)

    def read(tokenizer: Tokenizer | None = None, **options: Any) -> Iterable[str]:
        options |= _read_options(config, tokenizer)
        return text_chunks(config.data, advance=bytes_read.add, **options)

    def make_tokenizer() -> Tokenizer:
        if config.make is None and config.tokenizer in ("char", "bpe"):
            bytes_read.add_pass()
        return _make_tokenizer(config, read)

    def read_for(tokenizer: Tokenizer) -> Iterable[str]:
        return read(tokenizer, warn=warn)

    # Only the work of a process with the same files and options is continued. Two processes that
    # shared a folder left the tokens of one beside the tokenizer of the other.
    content = json.dumps([as_dict(config), files, corpus_versions(config.data)])
    with new_directory(directory, hashlib.sha256(content.encode()).hexdigest()[:8]) as partial:
        return _write_tokens(partial, make_tokenizer, read_for, warn)


def _write_tokens(
    partial: Path,
    make_tokenizer: Callable[[], Tokenizer],
    read: Callable[[Tokenizer], Iterable[str]],
    warn: Warn,
) -> int:
    """Write the tokens of a text, the tokenizer and the index; return the number of tokens.

    Continues the work of a stopped process in the same folder.
    """
    tokenizer_file = partial / TOKENIZER_FILE
    done_file = partial / DONE_FILE
    if tokenizer_file.is_file():
        tokenizer = read_tokenizer(tokenizer_file)
        if isinstance(tokenizer, CustomTokenizer):  # its file is only a record
            tokenizer = make_tokenizer()
    else:
        tokenizer = make_tokenizer()
        write_file(tokenizer_file, tokenizer.to_json())
    dtype = file_dtype(tokenizer)
    done, count = _done_before(partial, dtype)
    if done:
        warn(f"continuing after the {count:,} tokens of a process that was stopped")
    with (partial / TOKENS_FILE).open("ab") as file:
        file.truncate(count * dtype.itemsize)
        saved = time.monotonic()
        for length, data in encode_each(tokenizer, read(tokenizer), dtype, done):
            file.write(data)
            done += length
            count += len(data) // dtype.itemsize
            if time.monotonic() > saved + SECONDS_BETWEEN_SAVES:
                # The numbers are written after the tokens are on disk: after a power cut they must
                # not exceed them.
                file.flush()
                os.fsync(file.fileno())
                write_file(done_file, json.dumps([done, count]))
                saved = time.monotonic()
    done_file.unlink(missing_ok=True)
    index = {"dtype": dtype.name, "tokens": count}
    (partial / INDEX_FILE).write_text(json.dumps(index) + "\n", encoding="utf-8")
    return count


def _done_before(partial: Path, dtype: np.dtype) -> tuple[int, int]:
    """Return the numbers of characters and tokens that a killed process has prepared.

    Both are 0 if the file of tokens is shorter than that, since it would be padded with zeros.
    """
    try:
        done, count = json.loads((partial / DONE_FILE).read_text())
        size = (partial / TOKENS_FILE).stat().st_size
        if count * dtype.itemsize <= size:
            return done, count
    except FileNotFoundError:
        pass
    return 0, 0


def _has_tokens(path: Path, is_text: bool) -> bool:
    """Return whether a path contains tokens. A run's own text may lie beside nanoGPT's tokens."""
    if (path / INDEX_FILE).is_file():
        return True
    if is_text:
        return False
    if path.suffix in (".bin", ".npy"):
        return True
    return any((path / name).is_file() for name in NANOGPT)


@typed
def _open_prepared(directory: Path) -> tuple[Integer[np.ndarray, " tokens"], Tokenizer]:
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: prepare the text again")
    tokenizer = read_tokenizer(path)
    try:
        index = json.loads((directory / INDEX_FILE).read_text())
        dtype = np.dtype({"uint16": np.uint16, "uint32": np.uint32}[index["dtype"]])
        count = int(index["tokens"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{directory / INDEX_FILE} is damaged: {error!r}") from None
    path = directory / TOKENS_FILE
    if path.stat().st_size != count * dtype.itemsize or count < 2:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, not the {count} {dtype} tokens of its index: "
            "prepare it again"
        )
    tokens = _open_tokens(path, dtype, f"{dtype} tokens")
    _require_in_vocabulary(str(path), tokens, tokenizer, "prepare it again")
    return tokens, tokenizer


def _nanogpt_tokenizer(path: Path, config: DataConfig) -> Tokenizer:
    """Return the tokenizer that the config names, or the one beside the tokens."""
    if config.tokenizer in ("gpt2", "byte"):
        return _make_tokenizer(config, tuple)
    folder = path
    if not path.is_dir():
        folder = path.parent
    if (folder / TOKENIZER_FILE).is_file():
        return read_tokenizer(folder / TOKENIZER_FILE)
    raise ValueError(
        f"{path} has tokens without a tokenizer: put its {TOKENIZER_FILE} there, or give "
        "`tokenizer='gpt2'` and `tokenizer_files`, or `tokenizer='numbers'` for tokens without "
        "a text, or name a text"
    )


@typed
def _open_bare_tokens(
    path: Path, tokenizer: Tokenizer | None, named: TokenDtype = "auto"
) -> Integer[np.ndarray, " tokens"]:
    """Open a file that contains only tokens: .npy, or .bin as nanoGPT's prepare.py writes it.

    A .bin file doesn't record the width of a token. Unless it is `named`, it follows from the size
    of the vocabulary. Raises ValueError for other formats.
    """
    if path.suffix == ".npy":
        return _open_npy(path, named)
    if named != "auto":
        dtype = np.dtype(named)
    elif tokenizer is not None:
        dtype = file_dtype(tokenizer)
    else:
        raise ValueError(
            f"{path} doesn't say the dtype of its tokens: give `token_dtype='uint16'`, or the "
            "dtype that it was written with"
        )
    with path.open("rb") as file:
        beginning = file.read(8)
    if beginning.startswith(b"\x93NUMPY"):
        raise ValueError(f"{path} was written by numpy.save: name it {path.stem}.npy")
    if int.from_bytes(beginning[:4], "little") in LLM_C_MAGIC:
        raise ValueError(
            f"{path} begins with the header of llm.c: leave out its {LLM_C_HEADER:,} bytes, with "
            f"tail -c +{LLM_C_HEADER + 1} {shlex.quote(str(path))} > tokens.bin"
        )
    described = f"{dtype} tokens"
    if tokenizer is not None:
        described = f"the {dtype} tokens of a vocabulary of {tokenizer.vocab_size:,}"
    tokens = _open_tokens(path, dtype, described)
    # Small numbers of twice the width have an upper half of 0. Where the dtype is named, it counts.
    is_guessed = named == "auto" and dtype == np.uint16
    if is_guessed and len(tokens) >= SURELY_WIDER and not tokens[1::2].any():
        wider = "uint32"
        why = "every other uint16 in it is 0"
        if not tokens[2::4].any():
            wider = "int64"
            why = "three of four uint16 in it are 0"
        raise ValueError(
            f"{path} seems to have {wider} tokens, because {why}: write {described}, or give "
            f"`token_dtype={wider!r}`"
        )
    return tokens


@typed
def _open_npy(path: Path, named: TokenDtype) -> Integer[np.ndarray, " tokens"]:
    """Map a file of `numpy.save` into memory."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} can't be read as .npy: {error}") from None
    tokens = _whole_numbers(str(path), array)
    if named not in ("auto", tokens.dtype.name):
        raise ValueError(
            f"`token_dtype={named!r}` is not the dtype of {path}, which is {tokens.dtype}"
        )
    if not len(tokens):
        raise ValueError(f"{path} has no tokens")
    return tokens


@typed
def _open_tokens(path: Path, dtype: np.dtype, described: str) -> Integer[np.ndarray, " tokens"]:
    """Map a file of nothing but tokens into memory."""
    size = path.stat().st_size
    if size % dtype.itemsize or not size:
        raise ValueError(f"{path} has {size} bytes, so it cannot have {described}")
    return np.memmap(path, dtype, mode="r")


def _make_tokenizer(config: DataConfig, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    if config.make is not None:
        return CustomTokenizer.of(config.make)
    match config.tokenizer:
        case "byte":
            return tokenizers.ByteTokenizer()
        case "bpe":
            return tokenizers.BPETokenizer.train(_documents(texts()), config.bpe_vocab_size)
        case "gpt2":
            assert config.tokenizer_files is not None  # the config ensures this
            return tokenizers.BPETokenizer.from_gpt2(config.tokenizer_files)
        case "char":
            characters: set[str] = set()
            for text in texts():
                characters.update(text)
            return tokenizers.CharTokenizer.from_text("".join(characters))
        case "numbers":
            size = config.numbers_vocab_size
            everything = NumberTokenizer(size or MAX_NUMBERS)
            if size is not None:
                return everything
            largest = 0
            for text in texts():
                largest = max(largest, *everything.encode(text).tolist(), 0)
            return NumberTokenizer(largest + 1)
        case _:
            assert_never(config.tokenizer)


def _documents(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts of at most `DOCUMENT` characters, or more where a word is longer."""
    for text in texts:
        start = 0
        size = DOCUMENT
        while start + size < len(text):
            length = last_split_point(text[start : start + size])
            if length == 0:
                size *= 2  # not a little more, since each look is at all of the word
                continue
            yield text[start : start + length]
            start += length
            size = DOCUMENT
        yield text[start:]


@typed
def _digest(
    tokens: Integer[np.ndarray, " tokens"], held_out: Integer[np.ndarray, " held_out"] | None = None
) -> Any:
    """Return the SHA-256 of all tokens."""
    digest = hashlib.sha256()
    parts = [tokens]
    if held_out is not None:
        parts.append(held_out)
    for part in parts:
        for start in range(0, len(part), HASHED_AT_ONCE):
            # Hashed with one width and byte order, independent of the dtype in memory.
            digest.update(part[start : start + HASHED_AT_ONCE].astype("<u4").data)
    return digest
