"""Text generation with streaming and stop strings."""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int, Integer

from jgpt.data.encode import Tokenizer
from jgpt.generation.decoding import TOKENS_PER_CALL, stream
from jgpt.generation.sampling import PRNGKey, Sampling
from jgpt.nn.models import LanguageModel
from jgpt.shapes.contract import typed

Texts = TypeVar("Texts", str, tuple[str, ...])
"""One text, or several."""


@typed
def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Texts,
    max_new_tokens: int,
    *,
    key: PRNGKey | None = None,
    stop: str | tuple[str, ...] = (),
    **sampling: Any,
) -> Texts:
    """Return the continuation of one prompt, or the continuations of several, without the prompts.

    Several prompts are sampled as one batch. `sampling` are the parameters of `jgpt.generate`. A
    text ends before the `stop` string that is complete first, or after `max_new_tokens`; sampling
    ends when all texts have. A stop string may span tokens, but not begin in the prompt. An empty
    prompt stands for the beginning of a text if the tokenizer has a token for that, else for a
    newline. `key` is the PRNG key for sampling, by default that of seed 0. Raises ValueError for a
    prompt that the tokenizer can't encode, or an invalid sampling parameter.
    """
    pieces: Any = stream_text(
        model, tokenizer, prompts, max_new_tokens, key=key, stop=stop, **sampling
    )
    if isinstance(prompts, str):
        return "".join(pieces)
    pieces_of_texts = zip(*pieces, strict=True)
    return tuple("".join(pieces_of_text) for pieces_of_text in pieces_of_texts)


@typed
def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Texts,
    max_new_tokens: int,
    *,
    key: PRNGKey | None = None,
    stop: str | tuple[str, ...] = (),
    **sampling: Any,
) -> Iterator[Texts]:
    """Yield what `jgpt.generate_text` returns, piece by piece as it is sampled.

    For several prompts, each item has a piece of every text. Arguments and errors are those of
    `jgpt.generate_text`.
    """
    texts = prompts
    if isinstance(prompts, str):
        texts = (prompts,)
    if isinstance(stop, str):
        stop = (stop,)
    if key is None:
        key = jax.random.key(0)
    rows = []
    contexts = []
    for text in texts:
        row, context = _encode_prompt(tokenizer, text)
        rows.append(row)
        contexts.append(context)
    lengths = np.array([len(row) for row in rows])
    longest = lengths.max()
    padded_rows = []
    for row in rows:
        padding = longest - len(row)
        padded_rows.append(np.pad(row, (0, padding)))
    prompt = np.stack(padded_rows)
    pieces: Any = stream_continuations(
        model,
        tokenizer,
        prompt,
        lengths,
        max_new_tokens,
        Sampling(**sampling),
        key=key,
        stop=stop,
        contexts=tuple(contexts),
    )
    if isinstance(prompts, str):
        return (text for (text,) in pieces)
    return pieces


@typed
def _encode_prompt(
    tokenizer: Tokenizer, text: str
) -> tuple[Integer[np.ndarray, " tokens"], tuple[int, ...]]:
    """Return the tokens that the model continues, and those whose text the continuation follows."""
    if text:
        tokens = tokenizer.encode(text)
        # Tokens that begin a text have no characters.
        return tokens, tuple(tokens[len(tokenizer.begin) :].tolist())
    # The tokens that stand for an empty prompt are not part of the text.
    return default_prompt(tokenizer), ()


@typed
def stream_continuations(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: Int[np.ndarray, "batch time"],
    lengths: Int[np.ndarray, " batch"],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    key: PRNGKey,
    stop: tuple[str, ...],
    contexts: tuple[tuple[int, ...], ...],
) -> Iterator[tuple[str, ...]]:
    """Stream like `stream_text`, from tokens that are right-padded to one length.

    A text is the part that its tokens add to the text of its context, the tokens that it continues.
    """
    writers = tuple(_Detokenizer(tokenizer, stop, context) for context in contexts)
    pieces = stream(model, prompt, lengths, max_new_tokens, sampling, key=key)
    return _texts(writers, pieces)


@typed
def _texts(
    writers: tuple[Any, ...], pieces: Iterator[Integer[np.ndarray, "batch tokens"]]
) -> Iterator[tuple[str, ...]]:
    for piece in pieces:
        texts = []
        for writer, row in zip(writers, piece, strict=True):
            texts.append(writer.write(row))
        yield tuple(texts)
        if all(writer.ended for writer in writers):
            return
    # There are no more tokens: pending text, such as part of a character, is written unchanged.
    no_tokens = np.zeros(0, np.int32)
    last_texts = [writer.write(no_tokens, final=True) for writer in writers]
    yield tuple(last_texts)


@typed
def default_prompt(tokenizer: Tokenizer) -> Integer[np.ndarray, " tokens"]:
    """Return the tokens that stand for an empty prompt.

    They are the token that begins a text, else a newline, else the first token of the vocabulary.
    """
    if tokenizer.begin:
        return np.array(tokenizer.begin, np.int32)
    first_token = np.zeros(1, np.int32)
    try:
        newline = tokenizer.encode("\n")
    except ValueError:
        return first_token
    if len(newline) == 0:  # a tokenizer of words drops newlines
        return first_token
    return newline


MOST_PENDING = 2 * TOKENS_PER_CALL
"""The most tokens that wait for the rest of a character; if there are more, their bytes are not
text."""
INCOMPLETE = 3
"""The most bytes, and thus tokens, of an incomplete character: UTF-8 has at most four bytes."""


class _Detokenizer:
    """Incremental detokenizer of one sequence, which ends before a stop string.

    Tokens are decoded together with those just before them, because decoders strip the space of a
    first word, and a character may span tokens. Earlier tokens are not decoded again, so the work
    is linear in the number of tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        context: tuple[int, ...] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._set_context(list(context))
        self._pending: list[int] = []  # tokens that wait for the rest of a character
        self._unwritten = ""  # text that may be the beginning of a stop string
        self.ended = False

    def _set_context(self, tokens: list[int]) -> None:
        self._context = tokens
        self._context_length = len(self._tokenizer.decode(tokens))

    @typed
    def write(self, tokens: Integer[np.ndarray, " tokens"], *, final: bool = False) -> str:
        """Add tokens; return the text that later tokens can't change."""
        if self.ended:
            return ""
        self._unwritten += self._new_text(tokens.tolist(), final)
        # Where each stop string ends, then where it begins. The one that is complete first counts,
        # so that the result does not depend on how the text is cut into tokens.
        stops = []
        for stop in self._stop:
            begin = self._unwritten.find(stop)
            if begin >= 0:
                stops.append((begin + len(stop), begin))
        if stops:
            self.ended = True
            _, end = min(stops)
        elif final:
            end = len(self._unwritten)
        else:
            end = self._begin_of_stop()
        text = self._unwritten[:end]
        self._unwritten = self._unwritten[end:]
        return text

    def _new_text(self, tokens: list[int], final: bool) -> str:
        """Return the text of pending and new tokens, without an incomplete character at the end."""
        self._pending.extend(tokens)
        if final:
            count = len(self._pending)
        else:
            count = self._count_complete()
        if count == 0:
            return ""
        complete = self._pending[:count]
        # The difference of two decodings, since the tokens alone might lose the space before a
        # word.
        text = self._tokenizer.decode(self._context + complete)
        new_text = text[self._context_length :]
        self._set_context(complete)
        self._pending = self._pending[count:]
        return new_text

    def _count_complete(self) -> int:
        """Return the number of pending tokens that end with a complete character."""
        pending = len(self._pending)
        for waiting in range(min(INCOMPLETE, pending) + 1):
            tokens = self._context + self._pending[: pending - waiting]
            # an incomplete character decodes to the replacement character
            if not self._tokenizer.decode(tokens).endswith("\N{REPLACEMENT CHARACTER}"):
                return pending - waiting
        if pending > MOST_PENDING:
            return pending
        return 0

    def _begin_of_stop(self) -> int:
        """Return the index from which the text may be the beginning of a stop string, or its
        length."""
        length = len(self._unwritten)
        longest = max(map(len, self._stop), default=1)
        # A complete stop string was found before, so only a string without its last character can
        # be here.
        first = max(0, length - (longest - 1))
        for place in range(first, length):
            possible_beginning = self._unwritten[place:]
            for stop in self._stop:
                if stop.startswith(possible_beginning):
                    return place
        return length
