"""Text generation: streaming, stop strings."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Key

from jgpt.contracts import typed
from jgpt.data.tokenizers import Tokenizer
from jgpt.generation.decoding import stream
from jgpt.nn.models import LanguageModel


@typed
def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    *,
    key: Key[Array, ""],
    stop: tuple[str, ...] = (),
    **sampling: Any,
) -> tuple[str, ...]:
    """The continuation of each prompt."""
    pieces = stream_text(model, tokenizer, prompts, max_new_tokens, key=key, stop=stop, **sampling)
    return tuple("".join(text) for text in zip(*pieces, strict=True))


@typed
def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    *,
    key: Key[Array, ""],
    stop: tuple[str, ...] = (),
    **sampling: Any,
) -> Iterator[tuple[str, ...]]:
    """Stream the continuations of prompts, which are sampled as one batch.

    `sampling` are the parameters of `jgpt.generate`. A text ends before the first `stop` string in
    it, or after `max_new_tokens`; sampling ends when all texts have. A stop string may span
    tokens, but not begin in the prompt. An empty prompt stands for a newline.
    Raises ValueError for no prompts, an empty stop string, a prompt that the tokenizer can't
    encode, or an invalid sampling parameter.
    """
    if not prompts:
        raise ValueError("prompts is empty: give at least one, which may be an empty string")
    writers = tuple(_Detokenizer(tokenizer, stop) for _ in prompts)
    rows = [tokenizer.encode(prompt) if prompt else default_prompt(tokenizer) for prompt in prompts]
    lengths = np.array([len(row) for row in rows])
    tokens = jnp.asarray(np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows]))
    pieces = stream(model, tokens, max_new_tokens, key=key, lengths=lengths, **sampling)
    return _texts(writers, pieces)


@typed
def _texts(
    writers: tuple[Any, ...], pieces: Iterator[Integer[np.ndarray, "batch tokens"]]
) -> Iterator[tuple[str, ...]]:
    for piece in pieces:
        yield tuple(writer.write(row) for writer, row in zip(writers, piece, strict=True))
        if all(writer.ended for writer in writers):
            return
    yield tuple(writer.finish() for writer in writers)


@typed
def default_prompt(tokenizer: Tokenizer) -> Integer[np.ndarray, " tokens"]:
    """The prompt of a sample without one: a newline, or the first token if there is none."""
    try:
        return tokenizer.encode("\n")
    except ValueError:
        return np.zeros(1, np.int32)


class _Detokenizer:
    """Incremental detokenizer of one sequence, which ends before a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty: it would end every text at once")
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._emitted = 0
        self.ended = False

    @typed
    def write(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Add tokens; return the text that has become certain."""
        if self.ended:
            return ""
        self._tokens.extend(tokens.tolist())
        # an incomplete character decodes to the replacement character: wait for its other bytes
        text = self._tokenizer.decode(self._tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        return self._emit(text, len(text) - self._held_back(text))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text = self._tokenizer.decode(self._tokens)
        return "" if self.ended else self._emit(text, len(text))

    def _held_back(self, text: str) -> int:
        """How many characters at the end may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _emit(self, text: str, end: int) -> str:
        stops = [at for stop in self._stop if (at := text.find(stop, self._emitted)) >= 0]
        self.ended = bool(stops)
        new = text[self._emitted : min(stops, default=end)]
        self._emitted += len(new)
        return new
