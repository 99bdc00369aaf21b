"""Tokenizers for characters, bytes and byte-pairs, which are saved as JSON."""

import contextlib
import functools
import inspect
import json
import os
import reprlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import tiktoken
import tokenizers
from jaxtyping import Int32, Integer
from tiktoken_ext.openai_public import r50k_pat_str

from jgpt.durable import prefix_errors, read_file, require_fetched
from jgpt.fields import Code
from jgpt.shapes.contract import typed

END_OF_TEXT = "<|endoftext|>"
LONG_TEXT = 1 << 16
"""The number of characters from which a text repays the time to make tiktoken's encoder."""
LONG_WORD = 1 << 12
"""The number of bytes at which words are cut in training, which takes quadratic time."""
MAX_THREADS = 8
MAX_NUMBERS = 1 << 24
"""The largest vocabulary of numbers, which is that of a model."""
MOST_DIGITS = 9
"""The limit of digits in a number, which fits into an int32."""
NO_TOKEN = -1
"""The entry in a table of tokens for code points that the vocabulary lacks."""
CHARACTERS_AT_ONCE = 1 << 18
"""The number of characters encoded at once, since code points take four bytes each."""
CONTEXT = 256
"""The number of characters before a part of a text that are encoded with it as context."""
_UNUSED_LETTER = "\N{LATIN SMALL LETTER Y WITH DIAERESIS}"
"""The letter that stands for byte 255 in the byte-level alphabet."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = 40
_SHORT.maxlist = 8
UTF_32 = ("utf-32-le", "surrogatepass")
"""The encoding in which each character takes four bytes, and lone surrogates are characters."""
Tokens = Int32[np.ndarray, " tokens"]
AnyTokens = Integer[np.ndarray, " tokens"] | Integer[Any, " tokens"] | Sequence[int]


class UnencodableText(ValueError):
    """A text that a tokenizer can't encode."""


class CharTokenizer:
    """Character-level: a token for each character of a text, ordered by code point."""

    begin: tuple[int, ...] = ()
    """The tokens that `encode` puts before a text."""

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

    @property
    def vocab_size(self) -> int:
        """The number of characters."""
        return len(self.characters)

    @typed
    def encode(self, text: str) -> Tokens:
        """Return the index of each character. Raises ValueError for one outside the vocabulary."""
        return self._encode_at(text, 0)

    @typed
    def _encode_at(self, text: str, offset: int) -> Tokens:
        """Encode a part of a text; `offset` is its place in the text, for error messages."""
        tokens = np.empty(len(text), np.int32)
        # Code points take four bytes each, so they are made for a part of the text at a time.
        for start in range(0, len(text), CHARACTERS_AT_ONCE):
            part = text[start : start + CHARACTERS_AT_ONCE]
            code_points = np.frombuffer(part.encode(*UTF_32), np.uint32)
            above_all = np.uint32(len(self._token_of) - 1)
            part_tokens = self._token_of[np.minimum(code_points, above_all)]
            unknown = np.flatnonzero(part_tokens == NO_TOKEN)
            if unknown.size:
                first = int(unknown[0])
                self._raise_unknown(part[first], offset + start + first)
            tokens[start : start + len(part)] = part_tokens
        return tokens

    def _raise_unknown(self, character: str, position: int) -> NoReturn:
        known = self.characters[:100]
        if self.vocab_size > 100:
            known += "…"
        raise UnencodableText(
            f"unknown character {character!r} at position {position}: the vocabulary is the "
            f"{self.vocab_size} characters {known!r}"
        )

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Join the characters of tokens."""
        return "".join(self.characters[token] for token in _in_range(tokens, self.vocab_size))

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


class ByteTokenizer:
    """Byte-level: the 256 UTF-8 bytes, which encode any text."""

    vocab_size = 256
    """The number of bytes."""
    begin: tuple[int, ...] = ()
    """The tokens that `encode` puts before a text."""

    @typed
    def encode(self, text: str) -> Tokens:
        """Return the UTF-8 bytes of `text`."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Decode UTF-8; invalid bytes become the replacement character."""
        # Strictly UTF-8, although `encode` accepts surrogates: a model may sample the bytes ED A0
        # 80, and a lone surrogate can be neither printed nor written to samples.txt.
        return bytes(_in_range(tokens, self.vocab_size)).decode("utf-8", "replace")

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"type": "byte"})

    def to_hf(self) -> tokenizers.Tokenizer:
        """Convert to byte-pair encoding without merges in the tokenizers library."""
        backend = _byte_level(tokenizers.models.BPE(vocab=bytes_of_letters(), merges=[]))
        # without the regular expression that splits words
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        return backend


class NumberTokenizer:
    """Tokens without a text, such as notes or measurements. Numbers with spaces between them stand
    for tokens."""

    begin: tuple[int, ...] = ()
    """The tokens that `encode` puts before a text."""

    def __init__(self, vocab_size: int) -> None:
        """Make a tokenizer of the numbers from 0 to `vocab_size` - 1."""
        if isinstance(vocab_size, np.integer):  # such as tokens.max() + 1, which JSON can't hold
            vocab_size = int(vocab_size)
        if type(vocab_size) is not int or not 0 < vocab_size <= MAX_NUMBERS:
            raise ValueError(
                f"`vocab_size={vocab_size!r}` must be a whole number from 1 to {MAX_NUMBERS:,}"
            )
        self.vocab_size = vocab_size
        """The number of tokens."""

    @typed
    def encode(self, text: str) -> Tokens:
        """Return the numbers in a text, which white space separates."""
        words = text.split()
        # All words at once, since a question for each took most of the time.
        digits = "".join(words)
        # `int` alone would read "1_000", "+1" and digits of other scripts, too.
        are_numbers = digits.isascii() and (digits.isdigit() or not digits)
        if are_numbers and max(map(len, words), default=0) <= MOST_DIGITS:
            tokens = np.array(list(map(int, words)), np.int32)
            if tokens.max(initial=0) < self.vocab_size:
                return tokens
        raise self._error_of(words)

    def _error_of(self, words: list[str]) -> UnencodableText:
        """Return the error of the first word that is no token."""
        place = 0
        while words[place].isascii() and words[place].isdigit():
            if len(words[place]) > MOST_DIGITS or int(words[place]) >= self.vocab_size:
                break
            place += 1
        return UnencodableText(
            f"word {place + 1} of the text, {reprlib.repr(words[place])}, is not a token: the "
            f"tokens are the numbers from 0 to {self.vocab_size - 1}"
        )

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Join the numbers with spaces."""
        return " ".join(str(token) for token in _in_range(tokens, self.vocab_size))

    def to_json(self) -> str:
        """Return the tokenizer as JSON."""
        return json.dumps({"type": "numbers", "vocab_size": self.vocab_size})

    def to_hf(self) -> tokenizers.Tokenizer:
        """Convert to a vocabulary of words in the tokenizers library."""
        vocabulary = {str(token): token for token in range(self.vocab_size)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return backend


class CustomTokenizer:
    """A tokenizer of the user's own, whose results are checked; or the record of one, which a run
    never loads by itself."""

    begin: tuple[int, ...] = ()
    """The tokens that `encode` puts before a text."""

    def __init__(
        self, code: Code, vocab_size: int, tokenizer: Any = None, make: Any = None
    ) -> None:
        """Wrap a tokenizer and what made it; without them, only its record and vocabulary size."""
        self.code = code
        self.make = make
        self.vocab_size = vocab_size
        """The number of tokens."""
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, make: Any) -> "CustomTokenizer":
        """Wrap an object with `encode`, `decode` and `vocab_size`, or what makes one without
        arguments.

        Raises ValueError for anything else.
        """
        code = Code.of(make)
        if isinstance(make, Code):
            raise _not_loaded(code)
        if isinstance(make, CustomTokenizer):
            return make
        tokenizer = make
        if isinstance(make, type) or (callable(make) and not hasattr(make, "encode")):
            tokenizer = make()
        vocab_size = getattr(tokenizer, "vocab_size", None)
        if isinstance(vocab_size, np.integer):
            vocab_size = int(vocab_size)
        if (
            not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode"))
            or type(vocab_size) is not int
            or not 0 < vocab_size <= MAX_NUMBERS
        ):
            raise ValueError(
                f"the tokenizer {code.named} must have encode, decode and a vocab_size from 1 to "
                f"{MAX_NUMBERS:,}; its vocab_size is {vocab_size!r}"
            )
        return cls(code, vocab_size, tokenizer, make)

    def with_code(self, make: Any) -> "CustomTokenizer":
        """Return the tokenizer of a record. Raises ValueError if it is missing, or another one."""
        if self._tokenizer is not None:
            return self
        if make is None:
            make = self.code
        tokenizer = CustomTokenizer.of(make)
        if tokenizer.vocab_size != self.vocab_size:
            raise ValueError(
                f"the tokenizer {tokenizer.code.named} has a vocab_size of {tokenizer.vocab_size}, "
                f"but that of the run has {self.vocab_size}"
            )
        return tokenizer

    @typed
    def encode(self, text: str) -> Tokens:
        """Return what the tokenizer makes of a text. Raises ValueError if that is not a row of
        tokens."""
        tokens = np.asarray(self._call("encode", text))
        if tokens.size == 0:  # an empty list has no dtype
            tokens = np.zeros(0, np.int32)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise UnencodableText(
                f"the tokenizer {self.code.named} encodes {_SHORT.repr(text)} as "
                f"{tokens.dtype}{list(tokens.shape)}, not as a row of whole numbers"
            )
        outside = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if outside.size:
            raise UnencodableText(
                f"the tokenizer {self.code.named} gives token {tokens[outside[0]]}, outside its "
                f"vocab_size of {self.vocab_size}"
            )
        return tokens.astype(np.int32)

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Return the text that the tokenizer makes of tokens."""
        return self._call("decode", _in_range(tokens, self.vocab_size))

    @typed
    def encode_reversibly(self, text: str) -> Tokens:
        """Encode a text. Raises ValueError unless the tokens decode to the same text."""
        tokens = self.encode(text)
        decoded = self.decode(tokens)
        if decoded == text:
            return tokens
        same = 0
        for written, read in zip(text, decoded, strict=False):
            if written != read:
                break
            same += 1
        raise UnencodableText(
            f"the tokenizer {self.code.named} isn't reversible: from position {same} on, "
            f"{_SHORT.repr(text[same:])} decodes to {_SHORT.repr(decoded[same:])}"
        )

    def _call(self, method: str, argument: Any) -> Any:
        if self._tokenizer is None:
            raise _not_loaded(self.code)
        try:
            return getattr(self._tokenizer, method)(argument)
        except Exception as error:
            raise UnencodableText(
                f"the tokenizer {self.code.named} can't {method} {_SHORT.repr(argument)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def to_json(self) -> str:
        """Return the record of the tokenizer as JSON."""
        code = {"name": self.code.name, "file": self.code.file, "sha256": self.code.sha256}
        return json.dumps({"type": "custom", "vocab_size": self.vocab_size, "code": code})

    def to_hf(self) -> tokenizers.Tokenizer:
        """Raise ValueError, since other programs don't have the user's code."""
        raise ValueError(f"the tokenizer {self.code.named} is code, which can't be exported")


def _not_loaded(code: Code) -> ValueError:
    return ValueError(
        f"the run's tokenizer is {code.named}, which a run never loads by itself: give "
        f"`tokenizer={code.named!r}`"
    )


class BPETokenizer:
    """Byte-level byte-pair encoding with the tokenizers library; tiktoken encodes long texts.

    `encode` adds the special tokens that the library's post-processor adds to a text, such as
    Llama's beginning of text, unless `adds_special_tokens` is False.
    """

    def __init__(
        self, backend: Any, *, adds_special_tokens: bool = True, vocab_size: int | None = None
    ) -> None:
        """Wrap a tokenizer of the library; `vocab_size` adds tokens without a text at the end."""
        self._backend = backend
        self._last_with_text = max(backend.get_vocab().values(), default=-1)
        self.vocab_size = vocab_size or self._last_with_text + 1
        """The size of the vocabulary, unused tokens included."""
        has_template = backend.num_special_tokens_to_add(is_pair=False) > 0
        self.adds_special_tokens = adds_special_tokens and has_template
        """Whether `encode` adds special tokens to a text."""
        self.begin: tuple[int, ...] = ()
        """The tokens that `encode` puts before a text."""
        if self.adds_special_tokens:
            processor = json.loads(backend.to_str())["post_processor"]
            self.begin = tuple(_tokens_before_text(processor))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn merges from texts up to `vocab_size` tokens.

        `<|endoftext|>`, which ends documents, is one of the tokens and takes the place of a byte
        that never occurs in text. Programs that read an export need such a special token inside the
        model's vocabulary. No merges are learned from its text.
        """
        backend = _byte_level(tokenizers.models.BPE())
        words = backend.pre_tokenizer
        # Long words are cut while merges are learned.
        parts = tokenizers.pre_tokenizers.FixedLength(LONG_WORD)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, parts])
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        backend.train_from_iterator(_documents(texts), trainer)
        backend.pre_tokenizer = words
        return cls(_with_unused_byte_named(backend, END_OF_TEXT))

    @classmethod
    def from_hf(
        cls,
        values: dict[str, Any],
        *,
        adds_special_tokens: bool = True,
        vocab_size: int | None = None,
    ) -> Self:
        """Read the tokenizer in a Hugging Face `tokenizer.json`. Raises ValueError for another
        file."""
        values = dict(values)
        # Texts are encoded deterministically and without truncation; BPE dropout (Provilkov et al.
        # 2020) is random. With truncation, an evaluation counted 51 targets of 4,261.
        values["model"] = values["model"] | {"dropout": None}
        values["truncation"] = None
        values["padding"] = None
        with _errors_named("not a tokenizer"):
            backend = tokenizers.Tokenizer.from_str(json.dumps(values))
        return cls(backend, adds_special_tokens=adds_special_tokens, vocab_size=vocab_size)

    @classmethod
    def from_gpt2(cls, directory: str | Path) -> Self:
        """Read GPT-2's tokenizer from `encoder.json` and `vocab.bpe`, or `vocab.json` and
        `merges.txt`.

        `<|endoftext|>` in a text is encoded as that token.
        """
        directory = Path(directory)
        for vocabulary_file, merges_file in (
            ("encoder.json", "vocab.bpe"),  # OpenAI's names
            ("vocab.json", "merges.txt"),  # transformers' names
        ):
            vocabulary = directory / vocabulary_file
            merges = directory / merges_file
            if vocabulary.is_file() and merges.is_file():
                break
        else:
            raise FileNotFoundError(
                f"{directory} has neither encoder.json and vocab.bpe nor vocab.json and merges.txt"
            )
        for file in (vocabulary, merges):
            with prefix_errors(file):
                require_fetched(file)
        with _errors_named(f"{directory}: not GPT-2's vocabulary and merges"):
            model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
        backend = _byte_level(model)
        if model.token_to_id(END_OF_TEXT) is not None:
            backend.add_special_tokens([END_OF_TEXT])
        return cls(backend)

    def with_added_tokens(
        self, tokens: Iterable[tokenizers.AddedToken], largest_size: int
    ) -> "BPETokenizer":
        """Return a copy with more tokens, up to a vocabulary of `largest_size`."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        for token in tokens:
            is_new = backend.token_to_id(token.content) is None
            if is_new and backend.get_vocab_size() >= largest_size:
                continue
            if token.special:
                backend.add_special_tokens([token])
            else:
                backend.add_tokens([token])
        return BPETokenizer(backend, adds_special_tokens=self.adds_special_tokens)

    def added_tokens(self) -> set[str]:
        """Return the texts of tokens that are matched before a text is split into words."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content for token in added.values()}

    def padded_to(self, vocab_size: int) -> "BPETokenizer":
        """Return a copy with empty tokens added, until each embedding row has a token."""
        return BPETokenizer(
            self._backend, adds_special_tokens=self.adds_special_tokens, vocab_size=vocab_size
        )

    def has_same_tokens(self, other: "Tokenizer") -> bool:
        """Return whether `other` has the same tokens with a text, by their numbers.

        The files of GPT-2 and a `tokenizer.json` of it may differ in what is not a token.
        """
        if not isinstance(other, BPETokenizer):
            return False
        return self._backend.get_vocab() == other._backend.get_vocab()

    def to_hf(self) -> tokenizers.Tokenizer:
        """Return the tokenizer of the tokenizers library."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    def token_of(self, text: str) -> int | None:
        """Return the token with this text, which may be special, or None."""
        return self._backend.token_to_id(text)

    @functools.cached_property
    def end(self) -> tuple[int, ...]:
        """The tokens that `encode` puts after a text."""
        return _tokens_after_text(self)

    @property
    def end_of_text(self) -> int | None:
        """The token of `<|endoftext|>`, which separates documents, or None."""
        return self._backend.token_to_id(END_OF_TEXT)

    @typed
    def encode(self, text: str) -> Tokens:
        """Encode text as byte-pairs, with the special tokens that the tokenizer adds to a text.

        If a text already begins with them, as one from a chat template does, they are not added
        again.
        """
        if not self.adds_special_tokens:
            return self.encode_part(text)
        tokens = _encode(self._backend, text, add_special_tokens=True)
        count = len(self.begin)
        if self.begin and tuple(tokens[count : 2 * count]) == self.begin:
            tokens = tokens[count:]
        return np.array(tokens, np.int32)

    @typed
    def encode_part(self, text: str) -> Tokens:
        """Encode a part of a text like `encode`, without the tokens that begin or end a text."""
        if len(text) >= LONG_TEXT and self._fast is not None:
            # tiktoken raises it for a surrogate and for too long a run of spaces, which the
            # tokenizers library then encodes, or rejects with a better message
            with contextlib.suppress(ValueError):
                return self._fast.encode_to_numpy(text, allowed_special="all").astype(np.int32)
        return np.array(_encode(self._backend, text), np.int32)

    def takes_spaces_before(self, text: str) -> bool:
        """Return whether a text begins with an added token that takes the spaces before it."""
        if not text or not self._lstrip_tokens:
            return False
        tokens = _encode(self._backend, " " + text)
        return bool(tokens) and tokens[0] in self._lstrip_tokens

    @functools.cached_property
    def _lstrip_tokens(self) -> set[int]:
        added = self._backend.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.lstrip}

    @typed
    def encode_ordinary(self, text: str) -> Tokens:
        """Encode text that follows a special token; special tokens inside it are encoded as plain
        text.

        A tokenizer that puts a space before the first word of a text adds none here.
        """
        return np.array(_encode(self._ordinary, text), np.int32)

    @typed
    def encode_template(self, pieces: Sequence[int | str]) -> Tokens:
        """Encode a chat template whose fields are filled in.

        `pieces` are the numbers of special tokens, and the texts between them. They are encoded as
        one text, in which a special token may include the spaces beside it. A text never becomes a
        special token. Raises ValueError where the tokenizer would not find a special token beside
        this text; transformers would not find it either.
        """
        renamed = self._renamed
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            else:
                text += renamed.names[piece]
        tokens = []
        for token in _encode(renamed.backend, text):
            tokens.append(renamed.numbers.get(token, token))
        for number in renamed.names:
            if tokens.count(number) < pieces.count(number):
                raise ValueError(
                    f"the tokenizer reads {self.decode([number])!r} as text beside other text: "
                    "its added token has single_word or normalized set in tokenizer.json"
                )
        return np.array(tokens, np.int32)

    @functools.cached_property
    def _renamed(self) -> "_Renamed":
        """The tokenizer with other names for its special tokens, which no text contains."""
        values = json.loads(self._backend.to_str())
        # Renaming tokens in the model's vocabulary would break the merges that make them. Without
        # their old names, they are added as new tokens, and the vocabulary stays.
        values["added_tokens"] = []
        values["post_processor"] = None
        backend = tokenizers.Tokenizer.from_str(json.dumps(values))
        # The library numbers new tokens from the size of the vocabulary on. Where the vocabulary
        # skips numbers, those are already in use.
        vocabulary = backend.get_vocab()
        missing = range(len(vocabulary), max(vocabulary.values(), default=-1) + 1)
        unguessable = secrets.token_hex()
        backend.add_tokens([f"{unguessable}/{number}" for number in missing])
        names: dict[int, str] = {}
        numbers: dict[int, int] = {}
        for number, token in sorted(self._backend.get_added_tokens_decoder().items()):
            name = token.content
            if token.special:
                name = f"<|{unguessable}-{number}|>"
                names[number] = name
            renamed = tokenizers.AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            backend.add_tokens([renamed])
            new_number = backend.token_to_id(name)
            assert new_number is not None  # it was just added
            numbers[new_number] = number
        return _Renamed(backend, names, numbers)

    @functools.cached_property
    def _ordinary(self) -> Any:
        # The prepend scheme "first" of Metaspace applies to the beginning of a text, and this is
        # not one.
        values = self._backend.to_str().replace(
            '"prepend_scheme":"first"', '"prepend_scheme":"never"'
        )
        backend = tokenizers.Tokenizer.from_str(values)
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def _fast(self) -> tiktoken.Encoding | None:
        """tiktoken's encoder, or None if its tokens might differ from the library's."""
        values = json.loads(self._backend.to_str())
        if not _splits_as_gpt2(values):
            return None
        special = {}
        for token in values["added_tokens"]:
            special[token["content"]] = token["id"]
        numbers = {}
        for word, number in values["model"]["vocab"].items():
            if word not in special:
                numbers[word] = number
        merged = ["".join(pair) for pair in values["model"]["merges"]]
        if not self._is_made_by_merges(numbers, merged):
            return None
        to_byte = {}
        for letter, byte in bytes_of_letters().items():
            to_byte[ord(letter)] = byte  # latin-1 has one character for each byte
        ranks = {}
        for word, number in numbers.items():
            ranks[word.translate(to_byte).encode("latin-1")] = number
        return tiktoken.Encoding(
            "jgpt", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
        )

    def _is_made_by_merges(self, numbers: dict[str, int], merged: list[str]) -> bool:
        """Return whether each token is a byte or made by one merge, and the merges are in order.

        tiktoken has no list of merges: it merges the pair whose token has the lowest number.
        """
        # Byte 255 occurs in no text, and its token may have another name.
        letters = set(bytes_of_letters())
        if _UNUSED_LETTER not in numbers:
            letters.remove(_UNUSED_LETTER)
        if set(numbers) != letters | set(merged):
            return False
        if len(numbers) != len(letters) + len(merged):  # two merges make the same token
            return False
        ranks = [numbers[word] for word in merged]
        if ranks != sorted(ranks):
            return False
        # Other merges may apply first, so that a word is never made.
        return all(len(self._backend.model.tokenize(word)) == 1 for word in merged)

    @typed
    def decode(self, tokens: AnyTokens) -> str:
        """Decode; invalid UTF-8 becomes the replacement character."""
        indices = _in_range(tokens, self.vocab_size)
        if not self._whole_texts:
            return self._decode(indices)
        text = ""
        pending: list[int] = []
        for token in indices:
            if token not in self._whole_texts:
                pending.append(token)
                continue
            text += self._decode(pending) + self._whole_texts[token]
            pending = []
        return text + self._decode(pending)

    def _decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)

    @functools.cached_property
    def _whole_texts(self) -> dict[int, str]:
        """The added tokens whose text the byte-level decoder would take for letters of its
        alphabet.

        The alphabet's é stands for a byte, but an added token é is its text. Where a letter or a
        merge of letters is an added token, too, the token stays bytes, which texts need.
        """
        values = json.loads(self._backend.to_str())
        if "ByteLevel" not in json.dumps(values["decoder"]):
            return {}
        made_of_bytes = set(bytes_of_letters())
        for pair in values["model"].get("merges", ()):
            made_of_bytes.add("".join(pair))
        found = {}
        for token, added in self._backend.get_added_tokens_decoder().items():
            text = added.content
            if text.isascii() or text in made_of_bytes:
                continue
            if self._decode([token]) != text:
                found[token] = text
        return found

    def to_json(self) -> str:
        """Return the tokenizer as JSON, which contains the library's own JSON."""
        adds = ""
        if self.adds_special_tokens:
            adds = '"adds_special_tokens": true, '
        size = ""
        if self.vocab_size > self._last_with_text + 1:
            size = f'"vocab_size": {self.vocab_size}, '
        return f'{{"type": "bpe", {adds}{size}"tokenizer": {self._backend.to_str()}}}'


@dataclass(frozen=True)
class _Renamed:
    """A tokenizer with other names for its special tokens."""

    backend: Any
    names: dict[int, str]
    """The new name of each special token, by its number in the original tokenizer."""
    numbers: dict[int, int]
    """The original number of each added token, by its new number."""


Tokenizer = CharTokenizer | ByteTokenizer | NumberTokenizer | CustomTokenizer | BPETokenizer


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the narrowest dtype that holds the tokens in memory."""
    if tokenizer.vocab_size <= 1 << 8:  # characters and bytes: a quarter of int32's memory
        return np.dtype(np.uint8)
    return file_dtype(tokenizer)


def file_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of the tokens in a file."""
    # nanoGPT's prepare.py writes uint16, so a narrower dtype would make its files unreadable.
    if tokenizer.vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def hf_tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `tokenizer_config.json` of a tokenizer that jgpt made.

    Its special token has all the roles that programs ask for, as in GPT-2. No other token is named,
    since transformers would add it beyond the model's embedding.
    """
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Otherwise version 4 of transformers removes spaces before punctuation.
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(tokenizer, BPETokenizer) and tokenizer.end_of_text is not None:
        for name in ("bos_token", "eos_token", "unk_token"):
            values[name] = END_OF_TEXT
    return values


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
    end = np.array(_tokens_after_text(tokenizer), np.int32)

    def encode(part: _Part) -> bytes:
        tokens = encode_part(part)
        # As in `encode`, a text that already begins with these tokens gets no second ones.
        begins_already = np.array_equal(tokens[: len(begin)], begin)
        if part.offset == 0 and not begins_already:
            tokens = np.concatenate([begin, tokens])
        if part.is_last and len(end):
            tokens = np.concatenate([tokens, end])
        return tokens.astype(dtype, copy=False).tobytes()

    threads = min(os.cpu_count() or 1, MAX_THREADS)
    if isinstance(tokenizer, CustomTokenizer):
        threads = 1  # the user's code may not expect others
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
    following: str
    """The characters after this part."""
    offset: int
    is_last: bool


def _parts(texts: Iterable[str], encoded: int) -> Iterator[_Part]:
    """Yield the parts of a text, without its first `encoded` characters."""
    context = ""
    offset = 0
    following = iter(texts)
    text = next(following, None)
    while text is not None:
        next_text = next(following, None)
        start = min(max(encoded - offset, 0), len(text))
        if start > 0:
            context = text[:start]
        if start < len(text):
            yield _Part(
                text[start:],
                context=context[-CONTEXT:],
                following=(next_text or "")[:CONTEXT],
                offset=offset + start,
                is_last=next_text is None,
            )
        context = text
        offset += len(text)
        text = next_text


def _part_encoder(tokenizer: Tokenizer) -> Callable[[_Part], np.ndarray]:
    """Return a function that encodes a part of a text."""
    # Unwrapped, since jaxtyping would import JAX to check shapes, which takes a second.
    if isinstance(tokenizer, CharTokenizer):
        encode_at = inspect.unwrap(CharTokenizer._encode_at)
        return lambda part: encode_at(tokenizer, part.text, part.offset)
    if isinstance(tokenizer, ByteTokenizer):
        encode_bytes = inspect.unwrap(ByteTokenizer.encode)
        return lambda part: encode_bytes(tokenizer, part.text)
    if isinstance(tokenizer, NumberTokenizer):
        encode_numbers = inspect.unwrap(NumberTokenizer.encode)
        return lambda part: encode_numbers(tokenizer, part.text)
    if isinstance(tokenizer, CustomTokenizer):
        return lambda part: tokenizer.encode_reversibly(part.text)
    encode = inspect.unwrap(BPETokenizer.encode_part)
    if tokenizer._fast is not None:  # made once, rather than by each thread
        return lambda part: encode(tokenizer, part.text)

    def encode_after_context(part: _Part) -> np.ndarray:
        # Some tokenizers put a space before a text, which must precede only the first part. So the
        # part is encoded behind its line's beginning, whose tokens are then left out.
        line_start = part.context.rfind("\n", 0, -1) + 1
        line = part.context[line_start:]
        text = part.text
        if tokenizer.takes_spaces_before(part.following):
            text = text.rstrip()  # the next part begins with a token that includes these spaces
        before = encode(tokenizer, line)
        tokens = encode(tokenizer, line + text)
        if np.array_equal(tokens[: len(before)], before):
            return tokens[len(before) :]
        return encode(tokenizer, text)

    return encode_after_context


def _tokens_after_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts after a text."""
    if not isinstance(tokenizer, BPETokenizer) or not tokenizer.adds_special_tokens:
        return ()
    sample = " "
    tokens = _encode(tokenizer._backend, sample)
    with_special = _encode(tokenizer._backend, sample, add_special_tokens=True)
    return tuple(with_special[len(tokenizer.begin) + len(tokens) :])


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer in a file. Raises FileNotFoundError or ValueError, which name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer {path}: give the file or its folder")
    with prefix_errors(path):
        return tokenizer_from_json(read_file(path))


def tokenizer_from_json(text: str) -> Tokenizer:
    """Read the tokenizer from the JSON of `to_json` or Hugging Face. Raises ValueError
    otherwise."""
    values = json.loads(text)
    kind = None
    if isinstance(values, dict):
        kind = values.get("type")
        if "added_tokens" in values:
            return BPETokenizer.from_hf(values)
    if kind == "char":
        return CharTokenizer(values["characters"])
    if kind == "byte":
        return ByteTokenizer()
    if kind == "numbers":
        return NumberTokenizer(values["vocab_size"])
    if kind == "custom":
        return CustomTokenizer(Code(**values["code"]), int(values["vocab_size"]))
    if kind == "bpe":
        return BPETokenizer.from_hf(
            values["tokenizer"],
            adds_special_tokens=values.get("adds_special_tokens") is True,
            vocab_size=values.get("vocab_size"),
        )
    raise ValueError("not a tokenizer of jgpt or of Hugging Face's library tokenizers")


def is_same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether tokenizers have the same tokens, apart from those that they add to a text."""
    if isinstance(one, CustomTokenizer) and isinstance(other, CustomTokenizer):
        # A changed file is reported where it is loaded; its tokens may still be the same.
        return (one.code.name, one.vocab_size) == (other.code.name, other.vocab_size)
    if isinstance(one, BPETokenizer) and isinstance(other, BPETokenizer):
        return one._backend.to_str() == other._backend.to_str()
    return one.to_json() == other.to_json()


def _tokens_before_text(processor: Any) -> list[int]:
    """Return the special tokens that a post-processor of the tokenizers library puts before a
    text."""
    match processor:
        case {"type": "Sequence", "processors": list(processors)}:
            tokens = []
            # Post-processors apply in order, so the last one adds the outermost tokens.
            for part in reversed(processors):
                tokens.extend(_tokens_before_text(part))
            return tokens
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": special}:
            tokens = []
            for piece in pieces:
                if "SpecialToken" not in piece:  # the text
                    break
                name = piece["SpecialToken"]["id"]
                tokens.extend(special[name]["ids"])
            return tokens
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(token)]}:
            return [token]
    return []


def _encode(backend: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:  # the library raises this for a lone surrogate
        raise UnencodableText(
            "the text contains a lone surrogate, which UTF-8 cannot represent"
        ) from None


@typed
def _in_range(tokens: AnyTokens, vocab_size: int) -> list[int]:
    indices = np.asarray(tokens, dtype=np.int64)
    outside = np.flatnonzero((indices < 0) | (indices >= vocab_size))
    if outside.size:
        position = int(outside[0])
        raise ValueError(
            f"token {indices[position]} at position {position} is outside the vocabulary of "
            f"{vocab_size}"
        )
    return indices.tolist()


@contextlib.contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Raise ValueError for the bare Exception of the library tokenizers."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {error}") from None


def _splits_as_gpt2(values: dict[str, Any]) -> bool:
    """Return whether a tokenizer, as JSON, splits words as GPT-2's does and adds nothing else.

    It may have one special token, which is matched anywhere in a text.
    """
    plain = _byte_level_json()
    for part in ("normalizer", "pre_tokenizer"):
        if values[part] != plain[part]:
            return False
    for name, value in plain["model"].items():
        if name in ("vocab", "merges", "unk_token", "fuse_unk"):
            continue
        # null, false, an empty text and an empty list all mean that there is none.
        if (values["model"].get(name) or None) != (value or None):
            return False
    processor = values["post_processor"] or plain["decoder"]
    if processor["type"] != "ByteLevel":  # this changes offsets, not tokens
        return False
    if len(values["added_tokens"]) > 1:
        return False
    for token in values["added_tokens"]:
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            return False
    return True


def _documents(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts without the `<|endoftext|>` between them."""
    for text in texts:
        yield from text.split(END_OF_TEXT)


def _byte_level_json() -> dict[str, Any]:
    """Return the JSON that the tokenizers library writes for a plain byte-level tokenizer."""
    return json.loads(_byte_level(tokenizers.models.BPE()).to_str())


def bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of the byte-level alphabet stands for."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # A printable byte is the letter with the same number. For the others, GPT-2 uses the letters
    # from 256 on, in order, so that its vocabulary has no white space and no control characters.
    same = [ord(letter) for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(same))
    return dict(zip(letters, same + others, strict=True))


def _with_unused_byte_named(backend: Any, name: str) -> Any:
    """Rename the token of byte 255 in a byte-level tokenizer, and make it a special token.

    UTF-8 never contains byte 255, so each text keeps its tokens unless it contains `name`.
    """
    values = json.loads(backend.to_str())
    vocabulary = values["model"]["vocab"]
    vocabulary[name] = vocabulary.pop(_UNUSED_LETTER)
    token = {
        "id": vocabulary[name],
        "content": name,
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    values["added_tokens"].append(token)
    return tokenizers.Tokenizer.from_str(json.dumps(values))


def _byte_level(model: Any) -> Any:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend
