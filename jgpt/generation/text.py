"""Text from a model: prompts in, and what comes after them, as it comes."""

from collections.abc import Iterable, Iterator
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
    """What `stream_text` says after each prompt, whole."""
    said = stream_text(model, tokenizer, prompts, max_new_tokens, key=key, stop=stop, **sampling)
    return tuple("".join(pieces) for pieces in zip(*said, strict=True))


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
    """What comes after each prompt, piece by piece: all prompts are continued side by side.

    `sampling` is what `jgpt.generate` takes. A text ends before the first `stop` string in it, or
    after `max_new_tokens`; when all texts have ended, no more is drawn. A stop string may lie
    across tokens; one that begins in the prompt is none. An empty prompt is a line's beginning.
    Raises ValueError for no prompts, an empty stop string, a prompt that the tokenizer can't
    encode, or a bad sampling parameter.
    """
    if not prompts:
        raise ValueError("prompts is empty: give at least one, which may be an empty text")
    writers = tuple(_Writer(tokenizer, stop) for _ in prompts)
    rows = [tokenizer.encode(prompt) if prompt else opening(tokenizer) for prompt in prompts]
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
def decode_stream(
    tokenizer: Tokenizer, pieces: Iterable[Integer[np.ndarray, " _"]], stop: tuple[str, ...] = ()
) -> Iterator[str]:
    """The text of one sequence's pieces as soon as it is certain, up to a stop string.

    What may still become a stop string, or a whole character, is held back until it is decided.
    """
    writer = _Writer(tokenizer, stop)
    for piece in pieces:
        if text := writer.write(piece):
            yield text
        if writer.ended:
            return
    if text := writer.finish():
        yield text


@typed
def opening(tokenizer: Tokenizer) -> Integer[np.ndarray, " tokens"]:
    """Where a sample without a prompt begins: a new line, or the first token if there is none."""
    try:
        return tokenizer.encode("\n")
    except ValueError:
        return np.zeros(1, np.int32)


class _Writer:
    """Makes text of a sequence's tokens as they come, and ends before a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty: it would end every text at once")
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._said = 0
        self.ended = False

    @typed
    def write(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """The text that is certain with these tokens, and was not before."""
        if self.ended:
            return ""
        self._tokens.extend(tokens.tolist())
        # bytes of an unfinished character decode to the replacement character: wait for the rest
        text = self._tokenizer.decode(self._tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        return self._say(text, len(text) - self._undecided(text))

    def finish(self) -> str:
        """The text that was held back, when no more tokens come."""
        text = self._tokenizer.decode(self._tokens)
        return "" if self.ended else self._say(text, len(text))

    def _undecided(self, text: str) -> int:
        """How many characters at the end of the text a stop string may begin with."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text) - self._said), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _say(self, text: str, end: int) -> str:
        stops = [at for stop in self._stop if (at := text.find(stop, self._said)) >= 0]
        self.ended = bool(stops)
        said = text[self._said : min(stops, default=end)]
        self._said += len(said)
        return said
