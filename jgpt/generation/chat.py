"""Conversations in ChatML, the template of SmolLM2 and Qwen3."""

from collections.abc import Generator, Iterator
from typing import Any, TypeGuard

import jax
import numpy as np

from jgpt.config import CHAT_TOP_P
from jgpt.data.byte_pairs import END_OF_TEXT, BPETokenizer
from jgpt.data.encode import Tokenizer
from jgpt.generation.sampling import PRNGKey, Sampling, typed_key
from jgpt.generation.text import stream_continuations
from jgpt.nn.models import LanguageModel
from jgpt.shapes.contract import typed

START = "<|im_start|>"
END = "<|im_end|>"

_Turn = list[int | str]
"""The pieces of a turn: special tokens by their numbers, and text."""


class Chat:
    """A conversation with a model; the oldest messages are dropped from the context when it is
    full.

    Messages are encoded without special tokens, so that no text can end a turn or begin another
    role's turn. `key`, `top_p` and `sampling` mean the same as in `jgpt.generate_text`, but `top_p`
    is 0.95 unless it is given, as in `jgpt chat`. Raises ValueError for an invalid parameter, or a
    tokenizer without ChatML's tokens.
    """

    @typed
    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        system: str | None = None,
        max_new_tokens: int = 512,
        *,
        key: PRNGKey | None = None,
        top_p: float | None = CHAT_TOP_P,
        **sampling: Any,
    ) -> None:
        if key is None:
            key = jax.random.key(0)
        self._key = typed_key(key)
        self._replies = 0
        self._sampling = Sampling(top_p=top_p, **sampling)
        if not can_chat(tokenizer):
            raise ValueError(
                f"the tokenizer lacks {START} and {END}, the special tokens of a chat: "
                "smollm2-chat and qwen3 are models that have them (jgpt import)"
            )
        self._start = tokenizer.encode_part(START).item()
        self._end = tokenizer.encode_part(END).item()
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._system: list[_Turn] = []
        if system is not None:
            self._system = [self._pieces("system", system)]
        # This raises before the first message if the system message can't be encoded.
        self._tokens([*self._system, self._pieces("user", "")])
        self._turns: list[_Turn] = []

    def reply(self, message: str) -> tuple[int, Generator[str, None, None]]:
        """Answer a `message` of the user.

        Return how many earlier messages no longer fit, and an iterator over the answer. If the
        answer is closed early, the part so far stays in the conversation.
        Raises ValueError for a message that can't be encoded or leaves no room for an answer.
        """
        all_turns = [*self._turns, self._pieces("user", message)]
        turns, tokens = self._fit_context(all_turns)
        dropped = len(all_turns) - len(turns)
        size = self._model.block_size
        key = jax.random.fold_in(self._key, self._replies)  # another one for each reply
        self._replies += 1
        pieces = stream_continuations(
            self._model,
            self._tokenizer,
            np.array([tokens], np.int32),
            np.array([len(tokens)]),
            min(self._max_new_tokens, size - len(tokens)),
            self._sampling,
            key=key,
            stop=(END, END_OF_TEXT),
            contexts=(tuple(tokens),),
        )
        return dropped, self._answer(turns, pieces)

    def _fit_context(self, turns: list[_Turn]) -> tuple[list[_Turn], list[int]]:
        """Return the newest turns that leave room for an answer, and the tokens of the whole
        context."""
        size = self._model.block_size
        # Room for a long answer is limited to half of the context.
        max_tokens = size - min(self._max_new_tokens, size // 2)
        while True:
            tokens = self._tokens([*self._system, *turns])
            if len(tokens) <= max_tokens:
                return turns, tokens
            if len(turns) == 1:
                raise ValueError(
                    f"the message is too long: {len(tokens)} tokens with all that belongs to "
                    f"it, and {max_tokens} of `block_size={size!r}` are left"
                )
            turns = turns[2:]  # a question and its answer are dropped together

    def _answer(
        self, turns: list[_Turn], pieces: Iterator[tuple[str, ...]]
    ) -> Generator[str, None, None]:
        answer = ""
        try:
            for (text,) in pieces:
                answer += text
                yield text
        finally:  # if the caller stops reading, the part it read stays in the conversation
            self._turns = [*turns, self._pieces("assistant", _without_reasoning(answer))]

    def _tokens(self, turns: list[_Turn]) -> list[int]:
        """Encode turns, followed by the words that open an answer."""
        tokens: list[int] = []
        for turn in [*turns, [self._start, "assistant\n"]]:
            for piece in turn:
                if isinstance(piece, str):
                    tokens.extend(self._tokenizer.encode_ordinary(piece).tolist())
                else:
                    tokens.append(piece)
        return tokens

    def _pieces(self, role: str, text: str) -> _Turn:
        return [self._start, f"{role}\n{text}", self._end, "\n"]


def can_chat(tokenizer: Tokenizer) -> TypeGuard[BPETokenizer]:
    """Return whether a tokenizer has ChatML's tokens.

    As a special token each is one token, and as ordinary text several, so no message can contain
    it.
    """
    if not isinstance(tokenizer, BPETokenizer):
        return False
    for word in (START, END):
        as_special = tokenizer.encode_part(word)
        as_text = tokenizer.encode_ordinary(word)
        if len(as_special) != 1 or len(as_text) <= 1:
            return False
    return True


def _without_reasoning(answer: str) -> str:
    """Return what follows the reasoning of an answer, as Qwen3's template does. The prompt may have
    opened the reasoning, so that its first tag is not in the answer."""
    _, closed, rest = answer.rpartition("</think>")
    if not closed:
        return answer
    return rest.lstrip("\n")
