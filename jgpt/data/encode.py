"""All tokenizers: read from JSON, and encoding a text of any size with threads."""

import inspect
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from jgpt.data.byte_pairs import END_OF_TEXT, BPETokenizer
from jgpt.data.characters import ByteTokenizer, CharTokenizer, NumberTokenizer, OwnTokenizer
from jgpt.files import prefix_errors, read_file
from jgpt.shapes.contract import typed

Tokenizer = CharTokenizer | ByteTokenizer | NumberTokenizer | OwnTokenizer | BPETokenizer
MAX_THREADS = 8
CONTEXT = 256
"""The number of characters before a part of a text that are encoded with it as context."""
DECODED_AT_ONCE = 1 << 20
"""The number of tokens decoded at once."""


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer in a file. Raises FileNotFoundError or ValueError, which name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer {path}: give the file or its folder")
    with prefix_errors(path):
        return tokenizer_from_json(read_file(path))


def tokenizer_from_json(text: str) -> Tokenizer:
    """Read the tokenizer from the JSON of `to_json` or Hugging Face. Raises ValueError
    otherwise."""
    match json.loads(text):
        case {"added_tokens": _} as values:
            return BPETokenizer.from_hf(values)
        case {"type": "char", "characters": str(characters)}:
            return CharTokenizer(characters)
        case {"type": "byte"}:
            return ByteTokenizer()
        case {"type": "numbers", "vocab_size": int(vocab_size)}:
            return NumberTokenizer(vocab_size)
        case {"type": "own", "name": str(name), "vocab_size": int(vocab_size)}:
            return OwnTokenizer(name, vocab_size)
        case {"type": "bpe", "tokenizer": dict(inner)} as values:
            return BPETokenizer.from_hf(inner, vocab_size=values.get("vocab_size"))
    raise ValueError("not a tokenizer of jgpt or of Hugging Face's library tokenizers")


def is_same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether tokenizers have the same tokens, by their numbers.

    The files of GPT-2 and a `tokenizer.json` of it may differ in what is not a token.
    """
    if isinstance(one, BPETokenizer) and isinstance(other, BPETokenizer):
        return one.to_hf().get_vocab() == other.to_hf().get_vocab()
    return one.to_json() == other.to_json()


def document_end(tokenizer: Tokenizer) -> str:
    """Return the text between documents: `<|endoftext|>` if the tokenizer has it, or a newline.

    Tokens that begin a text are placed between documents, too, as when transformers encodes each
    document.
    """
    if tokenizer.begin:
        return tokenizer.decode(tokenizer.begin)
    if tokenizer.end_of_text is not None:
        return END_OF_TEXT
    return "\n"


@typed
def count_characters(tokens: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer) -> int:
    """Return the number of characters that begin in these tokens.

    A special token between documents is one character, as the newline is without such a token: the
    letters of its name are not in the text.
    """
    count = 0
    for start in range(0, len(tokens), DECODED_AT_ONCE):
        part = tokens[start : start + DECODED_AT_ONCE]
        is_text = ~np.isin(part, tokenizer.special)
        text = tokenizer.decode(part[is_text])
        # Bits per character need the characters of this split: with the ratio of the whole text
        # they were 4.2% too low, for byte-pairs of 1,024 on tiny Shakespeare. A character that
        # began in earlier tokens decodes to replacement characters.
        count += len(text.lstrip("\N{REPLACEMENT CHARACTER}")) + len(part) - int(is_text.sum())
    return count


def encode_each(
    tokenizer: Tokenizer, texts: Iterable[str], dtype: np.dtype, encoded: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yield the length of each part of a text and its tokens as bytes; threads encode ahead.

    The tokens are those of the whole text, with those that the tokenizer puts before and after it.
    The parts must end where the tokenizer splits a text. The first `encoded` characters are
    skipped.
    """
    encode_part = _part_encoder(tokenizer)
    begin = np.array(tokenizer.begin, np.int32)
    end = np.array(tokenizer.end, np.int32)

    def encode(part: _Part) -> bytes:
        tokens = encode_part(part)
        # As in `encode`, a text that already begins with these tokens gets no second ones.
        begins_already = np.array_equal(tokens[: len(begin)], begin)
        if part.offset == 0 and not begins_already:
            tokens = np.concatenate([begin, tokens])
        if part.is_last:
            tokens = np.concatenate([tokens, end])
        return tokens.astype(dtype, copy=False).tobytes()

    threads = min(os.cpu_count() or 1, MAX_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        parts = _parts(texts, encoded)
        # lazily: the next part is read when one is done, so that few are in memory
        submitted = ((len(part.text), pool.submit(encode, part)) for part in parts)
        waiting = deque(islice(submitted, threads + 2))
        while waiting:
            length, tokens = waiting.popleft()
            yield length, tokens.result()
            waiting.extend(islice(submitted, 1))


@dataclass(frozen=True)
class _Part:
    """A part of a text."""

    text: str
    context: str
    """The characters before this part."""
    offset: int
    is_last: bool


def _parts(texts: Iterable[str], encoded: int) -> Iterator[_Part]:
    """Yield the parts of a text, without its first `encoded` characters."""
    context = ""
    offset = 0
    for text, following in pairwise(chain(texts, [""])):
        start = min(max(encoded - offset, 0), len(text))
        if start < len(text):
            before = context + text[:start]
            is_last = following == ""
            yield _Part(text[start:], before[-CONTEXT:], offset + start, is_last)
        context = text[-CONTEXT:]
        offset += len(text)


def _part_encoder(tokenizer: Tokenizer) -> Callable[[_Part], np.ndarray]:
    """Return a function that encodes a part of a text."""
    # Unwrapped, since jaxtyping would import JAX to check shapes, which takes a second.
    if isinstance(tokenizer, CharTokenizer):
        encode_characters = inspect.unwrap(CharTokenizer.encode)
        return lambda part: encode_characters(tokenizer, part.text, part.offset)
    if not isinstance(tokenizer, BPETokenizer):
        encode_text = inspect.unwrap(type(tokenizer).encode)
        return lambda part: encode_text(tokenizer, part.text)
    encode = inspect.unwrap(BPETokenizer.encode_part)
    if tokenizer.fast is not None:  # made once, rather than by each thread
        return lambda part: encode(tokenizer, part.text)

    def encode_after_context(part: _Part) -> np.ndarray:
        # Some tokenizers put a space before a text, which must precede only the first part. So the
        # part is encoded behind its line's beginning, whose tokens are then left out.
        line_start = part.context.rfind("\n", 0, -1) + 1
        line = part.context[line_start:]
        before = encode(tokenizer, line)
        tokens = encode(tokenizer, line + part.text)
        if np.array_equal(tokens[: len(before)], before):
            return tokens[len(before) :]
        return encode(tokenizer, part.text)

    return encode_after_context
