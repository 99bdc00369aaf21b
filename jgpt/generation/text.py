"""Text generation: streaming, stop strings."""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Integer, Key

from jgpt.contracts import typed
from jgpt.data.tokenizers import Tokenizer
from jgpt.generation.decoding import stream
from jgpt.generation.sampling import Sampling
from jgpt.nn.models import LanguageModel

Texts = TypeVar("Texts", str, tuple[str, ...])
"""One text, or several."""


@typed
def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Texts,
    max_new_tokens: int,
    *,
    key: Key[Array, ""] | nnx.Rngs | None = None,
    stop: str | tuple[str, ...] = (),
    **sampling: Any,
) -> Texts:
    """The continuations that `stream_text` streams, whole."""
    pieces: Any = stream_text(
        model, tokenizer, prompts, max_new_tokens, key=key, stop=stop, **sampling
    )
    if isinstance(prompts, str):
        return "".join(pieces)
    return tuple("".join(text) for text in zip(*pieces, strict=True))


@typed
def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Texts,
    max_new_tokens: int,
    *,
    key: Key[Array, ""] | nnx.Rngs | None = None,
    stop: str | tuple[str, ...] = (),
    **sampling: Any,
) -> Iterator[Texts]:
    """Stream the continuations of prompts, which are sampled as one batch, or of one prompt.

    `sampling` are the parameters of `jgpt.generate`. A text ends before its first `stop` string, or
    after `max_new_tokens`; sampling ends with the last text. A stop string may span tokens, but not
    begin in the prompt. An empty prompt stands for a newline. Without a key, that of seed 0 draws.
    Raises ValueError for no prompts, an empty stop string, a prompt that the tokenizer can't
    encode, or an invalid sampling parameter.
    """
    texts = (prompts,) if isinstance(prompts, str) else prompts
    if not texts:
        raise ValueError("prompts is empty: give at least one, which may be an empty string")
    stop = (stop,) if isinstance(stop, str) else stop
    if "" in stop:
        raise ValueError("a stop string is empty: it would end every text at once")
    rows = [tokenizer.encode(text) if text else default_prompt(tokenizer) for text in texts]
    lengths = np.array([len(row) for row in rows])
    tokens = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows])
    key = jax.random.key(0) if key is None else key
    pieces: Any = stream_continuations(
        model, tokenizer, tokens, lengths, max_new_tokens, Sampling(**sampling), key=key, stop=stop
    )
    return (text for (text,) in pieces) if isinstance(prompts, str) else pieces


@typed
def stream_continuations(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: Int[np.ndarray, "batch time"],
    lengths: Int[np.ndarray, " batch"],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    key: Key[Array, ""] | nnx.Rngs,
    stop: tuple[str, ...],
) -> Iterator[tuple[str, ...]]:
    """`stream_text` for tokens, right-padded to one length."""
    writers = tuple(_Detokenizer(tokenizer, stop) for _ in lengths)
    pieces = stream(model, prompt, lengths, max_new_tokens, sampling, key=key)
    return _texts(writers, pieces)


@typed
def _texts(
    writers: tuple[Any, ...], pieces: Iterator[Integer[np.ndarray, "batch tokens"]]
) -> Iterator[tuple[str, ...]]:
    for piece in pieces:
        yield tuple(writer.write(row) for writer, row in zip(writers, piece, strict=True))
        if all(writer.ended for writer in writers):
            return
    nothing = np.zeros(0, np.int32)
    yield tuple(writer.write(nothing, final=True) for writer in writers)


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
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._emitted = 0
        self.ended = False

    @typed
    def write(self, tokens: Integer[np.ndarray, " tokens"], *, final: bool = False) -> str:
        """Add tokens; return the text that has become certain."""
        if self.ended:
            return ""
        self._tokens.extend(tokens.tolist())
        text = self._tokenizer.decode(self._tokens)
        if not final:
            # an incomplete character decodes to the replacement character: wait for its other bytes
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = range(self._emitted, len(text))
        stops = [at for at in new if text.startswith(self._stop, at)]
        self.ended = bool(stops)
        if not stops and not final:
            # what may begin a stop string is held back
            stops = [at for at in new if any(each.startswith(text[at:]) for each in self._stop)]
        end = min(stops, default=len(text))
        start, self._emitted = self._emitted, max(end, self._emitted)
        return text[start:end]
