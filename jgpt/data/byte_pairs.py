"""Byte-pair encoding with the tokenizers library; tiktoken encodes long texts."""

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import tiktoken
import tokenizers
from tiktoken_ext.openai_public import r50k_pat_str

from jgpt.data.characters import (
    AnyTokens,
    Tokens,
    UnencodableText,
    bytes_of_letters,
    in_range,
)
from jgpt.files import prefix_errors, require_fetched
from jgpt.shapes.contract import typed

END_OF_TEXT = "<|endoftext|>"
LONG_TEXT = 1 << 16
"""The number of characters from which a text repays the time to make tiktoken's encoder."""
LONG_WORD = 1 << 12
"""The number of bytes at which words are cut in training, which takes quadratic time."""
_UNUSED_LETTER = "\N{LATIN SMALL LETTER Y WITH DIAERESIS}"
"""The letter that stands for byte 255 in the byte-level alphabet."""


class BPETokenizer:
    """Byte-level byte-pair encoding with the tokenizers library; tiktoken encodes long texts.

    `encode` adds the special tokens that the library's post-processor adds to a text, such as
    Llama's beginning of text.
    """

    def __init__(self, backend: Any, *, vocab_size: int | None = None) -> None:
        """Wrap a tokenizer of the library; `vocab_size` adds tokens without a text at the end."""
        self._backend = backend
        self._last_with_text = max(backend.get_vocab().values(), default=-1)
        self.vocab_size = vocab_size or self._last_with_text + 1
        """The size of the vocabulary, unused tokens included."""
        self.begin, self.end = _tokens_around_text(backend)
        """The tokens that `encode` puts before and after a text."""

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Learn merges from texts up to `vocab_size` tokens.

        `<|endoftext|>`, which ends documents, is one of the tokens and takes the place of a byte
        that never occurs in text. Programs that read an export need such a special token inside the
        model's vocabulary. No merges are learned from its text.
        """
        if isinstance(texts, str):  # which is an iterable of its characters
            raise ValueError("`texts` must be several texts, not one string: give [text]")
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
        backend.train_from_iterator(_without_ends(texts), trainer)
        backend.pre_tokenizer = words
        return cls(_with_unused_byte_named(backend, END_OF_TEXT))

    @classmethod
    def from_hf(cls, values: dict[str, Any], *, vocab_size: int | None = None) -> Self:
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
        return cls(backend, vocab_size=vocab_size)

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

    def padded_to(self, vocab_size: int) -> "BPETokenizer":
        """Return a copy with empty tokens added, until each embedding row has a token."""
        return BPETokenizer(self._backend, vocab_size=vocab_size)

    def to_hf(self) -> tokenizers.Tokenizer:
        """Return the tokenizer of the tokenizers library."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

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
        if not self.begin and not self.end:
            return self.encode_part(text)
        tokens = _encode(self._backend, text, add_special_tokens=True)
        count = len(self.begin)
        if self.begin and tuple(tokens[count : 2 * count]) == self.begin:
            tokens = tokens[count:]
        return np.array(tokens, np.int32)

    @typed
    def encode_part(self, text: str) -> Tokens:
        """Encode a part of a text like `encode`, without the tokens that begin or end a text."""
        if len(text) >= LONG_TEXT and self.fast is not None:
            # tiktoken raises it for a surrogate and for too long a run of spaces, which the
            # tokenizers library then encodes, or rejects with a better message
            with contextlib.suppress(ValueError):
                return self.fast.encode_to_numpy(text, allowed_special="all").astype(np.int32)
        return np.array(_encode(self._backend, text), np.int32)

    @typed
    def encode_ordinary(self, text: str) -> Tokens:
        """Encode text that follows a special token; special tokens inside it are encoded as plain
        text.

        A tokenizer that puts a space before the first word of a text adds none here.
        """
        return np.array(_encode(self._ordinary, text), np.int32)

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
    def fast(self) -> tiktoken.Encoding | None:
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
        indices = in_range(tokens, self.vocab_size)
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

    @functools.cached_property
    def special(self) -> list[int]:
        """The special tokens, such as `<|endoftext|>`."""
        added = self._backend.get_added_tokens_decoder()
        return [number for number, token in added.items() if token.special]

    def to_json(self) -> str:
        """Return the tokenizer as JSON, which contains the library's own JSON."""
        size = ""
        if self.vocab_size > self._last_with_text + 1:
            size = f'"vocab_size": {self.vocab_size}, '
        return f'{{"type": "bpe", {size}"tokenizer": {self._backend.to_str()}}}'


def _tokens_around_text(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that a post-processor puts before and after a text."""
    if backend.num_special_tokens_to_add(is_pair=False) == 0:
        return (), ()
    # The text of a token, since a tokenizer may have no token for some other text.
    sample = backend.decode([0], skip_special_tokens=False)
    encoding = backend.encode(sample)
    is_text = [not added for added in encoding.special_tokens_mask]
    first = is_text.index(True)
    after = len(is_text) - is_text[::-1].index(True)
    return tuple(encoding.ids[:first]), tuple(encoding.ids[after:])


def _encode(backend: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:  # the library raises this for a lone surrogate
        raise UnencodableText(
            "the text contains a lone surrogate, which UTF-8 cannot represent"
        ) from None


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


def _without_ends(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts without the `<|endoftext|>` between them."""
    for text in texts:
        yield from text.split(END_OF_TEXT)


def _byte_level_json() -> dict[str, Any]:
    """Return the JSON that the tokenizers library writes for a plain byte-level tokenizer."""
    return json.loads(_byte_level(tokenizers.models.BPE()).to_str())


def _with_unused_byte_named(backend: Any, name: str) -> Any:
    """Rename the token of byte 255 in a byte-level tokenizer, and make it a special token.

    UTF-8 never contains byte 255, so each text keeps its tokens unless it contains `name`.
    """
    values = json.loads(backend.to_str())
    vocabulary = values["model"]["vocab"]
    vocabulary[name] = vocabulary.pop(_UNUSED_LETTER)
    renamed = tokenizers.Tokenizer.from_str(json.dumps(values))
    renamed.add_special_tokens([name])
    return renamed


def _byte_level(model: Any) -> Any:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend
