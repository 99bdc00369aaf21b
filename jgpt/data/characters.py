"""Tokenizers whose tokens are characters, bytes or numbers, and those of the user's own."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import tokenizers
from jaxtyping import Int32, Integer

from jgpt.shapes.contract import typed

NO_TOKEN = -1
"""The entry in a table of tokens for code points that the vocabulary lacks."""
CHARACTERS_AT_ONCE = 1 << 18
"""The number of characters encoded at once, since code points take four bytes each."""
UTF_32 = ("utf-32-le", "surrogatepass")
"""The encoding in which each character takes four bytes, and lone surrogates are characters."""
Tokens = Int32[np.ndarray, " tokens"]
AnyTokens = Integer[np.ndarray, " tokens"] | Integer[Any, " tokens"] | Sequence[int]


class UnencodableText(ValueError):
    """A text that a tokenizer can't encode."""


class WithoutSpecialTokens:
    """A tokenizer that puts no tokens before or after a text, or between documents."""

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    special: tuple[int, ...] = ()
    end_of_text: int | None = None


class CharTokenizer(WithoutSpecialTokens):
    """Character-level: a token for each character of a text, ordered by code point."""

    def __init__(self, characters: str) -> None:
        """Make a tokenizer of these characters, which must be sorted and unique."""
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError(
                f"the characters {characters[:40]!r} must be sorted and unique, and at least one: "
                "CharTokenizer.from_text makes a vocabulary from a text"
            )
        self.characters = characters
        code_points = np.frombuffer(characters.encode(*UTF_32), np.uint32)
        # The token of each code point; the last entry is for all code points above the largest one.
        self._token_of = np.full(int(code_points[-1]) + 2, NO_TOKEN, np.int32)
        self._token_of[code_points] = np.arange(len(characters))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Make a tokenizer of the characters in `text`."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Self:
        """Make a tokenizer of the characters in `texts`, which are read one after the other."""
        is_used = np.zeros(sys.maxunicode + 1, bool)
        for text in texts:
            # A table of all code points: a set of characters takes five times as long.
            is_used[np.frombuffer(text.encode(*UTF_32), np.uint32)] = True
        code_points = np.flatnonzero(is_used).astype(np.uint32)
        return cls(code_points.tobytes().decode(*UTF_32))

    @property
    def vocab_size(self) -> int:
        """The number of characters."""
        return len(self.characters)

    @typed
    def encode(self, text: str, offset: int = 0) -> Tokens:
        """Return the index of each character. Raises ValueError for one outside the vocabulary.

        `offset` is the place of the text in a longer one, for the message.
        """
        tokens = np.empty(len(text), np.int32)
        for start in range(0, len(text), CHARACTERS_AT_ONCE):
            end = start + CHARACTERS_AT_ONCE
            code_points = np.frombuffer(text[start:end].encode(*UTF_32), np.uint32)
            tokens[start:end] = self._token_of.take(code_points, mode="clip")
        unknown = np.flatnonzero(tokens == NO_TOKEN)
        if unknown.size:
            first = int(unknown[0])
            known = self.characters[:100]
            if self.vocab_size > 100:
                known += "…"
            raise UnencodableText(
                f"unknown character {text[first]!r} at position {offset + first}: the vocabulary "
                f"is the {self.vocab_size} characters {known!r}"
            )
        return tokens

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Join the characters of tokens."""
        return "".join(self.characters[token] for token in in_range(tokens, self.vocab_size))

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"type": "char", "characters": self.characters})

    def to_hf(self) -> tokenizers.Tokenizer:
        """Convert to the tokenizers library, which drops unknown characters.

        Byte-pair encoding without merges keeps each character as a token.
        """
        vocabulary = {character: token for token, character in enumerate(self.characters)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        backend.decoder = tokenizers.decoders.Fuse()
        return backend


class ByteTokenizer(WithoutSpecialTokens):
    """Byte-level: the 256 UTF-8 bytes, which encode any text."""

    vocab_size = 256
    """The number of bytes."""

    @typed
    def encode(self, text: str) -> Tokens:
        """Return the UTF-8 bytes of `text`."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Decode UTF-8; invalid bytes become the replacement character."""
        # Strictly UTF-8, although `encode` accepts surrogates: a model may sample the bytes ED A0
        # 80, and a lone surrogate can be neither printed nor written to samples.txt.
        return bytes(in_range(tokens, self.vocab_size)).decode("utf-8", "replace")

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"type": "byte"})

    def to_hf(self) -> tokenizers.Tokenizer:
        """Convert to byte-pair encoding without merges in the tokenizers library."""
        letters = tokenizers.models.BPE(vocab=bytes_of_letters(), merges=[])
        backend = tokenizers.Tokenizer(letters)
        # without the regular expression that splits words
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        backend.decoder = tokenizers.decoders.ByteLevel()
        return backend


class NumberTokenizer(WithoutSpecialTokens):
    """Tokens without a text, such as notes or measurements. Numbers with spaces between them stand
    for tokens."""

    def __init__(self, vocab_size: int) -> None:
        """Make a tokenizer of the numbers from 0 to `vocab_size` - 1."""
        self.vocab_size = int(vocab_size)  # of NumPy, as tokens.max() + 1 is, JSON can't hold it
        """The number of tokens."""

    @typed
    def encode(self, text: str) -> Tokens:
        """Return the numbers in a text, which white space separates."""
        tokens = []
        for place, word in enumerate(text.split(), start=1):
            # `int` alone would read "1_000", "+1" and digits of other scripts, too.
            is_number = word.isascii() and word.isdigit()
            if not is_number or int(word) >= self.vocab_size:
                raise UnencodableText(
                    f"word {place} of the text, {word[:40]!r}, is not a token: the tokens are the "
                    f"numbers from 0 to {self.vocab_size - 1}"
                )
            tokens.append(int(word))
        return np.array(tokens, np.int32)

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Join the numbers with spaces."""
        return " ".join(str(token) for token in in_range(tokens, self.vocab_size))

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"type": "numbers", "vocab_size": self.vocab_size})

    def to_hf(self) -> tokenizers.Tokenizer:
        """Convert to a vocabulary of words in the tokenizers library."""
        vocabulary = {str(token): token for token in range(self.vocab_size)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return backend


class OwnTokenizer(WithoutSpecialTokens):
    """A tokenizer of the user's own, or the record of one, which has only its name and size."""

    def __init__(self, name: str, vocab_size: int, tokenizer: Any = None) -> None:
        """Wrap an object with `encode`, `decode` and `vocab_size`."""
        self.name = name
        self.vocab_size = int(vocab_size)
        """The number of tokens."""
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Any) -> "OwnTokenizer":
        """Wrap a tokenizer. Raises ValueError for an object that lacks a part of one."""
        if isinstance(tokenizer, OwnTokenizer):
            return tokenizer
        missing = [
            name for name in ("encode", "decode", "vocab_size") if not hasattr(tokenizer, name)
        ]
        if missing or isinstance(tokenizer, type):
            raise ValueError(
                f"`tokenizer={tokenizer!r}` must be an object with encode, decode and vocab_size"
            )
        return cls(type(tokenizer).__qualname__, tokenizer.vocab_size, tokenizer)

    @typed
    def encode(self, text: str) -> Tokens:
        """Return what the tokenizer makes of a text. Raises ValueError for what is no token."""
        tokens = np.asarray(self._tokenizer.encode(text))
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise UnencodableText(
                f"the tokenizer {self.name} gives {tokens.dtype}{list(tokens.shape)} for a text, "
                "not a row of whole numbers"
            )
        return np.array(in_range(tokens, self.vocab_size), np.int32)

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Return the text that the tokenizer makes of tokens."""
        return self._tokenizer.decode(in_range(tokens, self.vocab_size))

    def to_json(self) -> str:
        """Return the record of the tokenizer as JSON."""
        return json.dumps({"type": "own", "name": self.name, "vocab_size": self.vocab_size})

    def to_hf(self) -> tokenizers.Tokenizer:
        """Raise ValueError, since other programs don't have the user's object."""
        raise ValueError(f"the tokenizer {self.name} is of your own, and can't be exported")


@typed
def in_range(tokens: AnyTokens, vocab_size: int) -> list[int]:
    """Return tokens as a list. Raises ValueError for one outside the vocabulary."""
    indices = np.asarray(tokens, dtype=np.int64)
    outside = np.flatnonzero((indices < 0) | (indices >= vocab_size))
    if outside.size:
        position = int(outside[0])
        raise ValueError(
            f"token {indices[position]} at position {position} is outside the vocabulary of "
            f"{vocab_size}"
        )
    return indices.tolist()


def bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of the byte-level alphabet stands for."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # A printable byte is the letter with the same number. For the others, GPT-2 uses the letters
    # from 256 on, in order, so that its vocabulary has no white space and no control characters.
    same = [ord(letter) for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(same))
    return dict(zip(letters, same + others, strict=True))
