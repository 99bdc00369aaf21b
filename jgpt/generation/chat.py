"""Conversations in ChatML, the template of SmolLM2 and Qwen3."""

import re
from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any

import numpy as np
from flax import nnx

from jgpt.data.tokenizers import END_OF_TEXT, BPETokenizer, Tokenizer
from jgpt.generation.sampling import Sampling
from jgpt.generation.text import stream_continuations
from jgpt.nn.models import LanguageModel

START = "<|im_start|>"
END = "<|im_end|>"
_REASONING = re.compile(r"\s*<think>.*?</think>\n*", re.DOTALL)
"""What an answer may begin with. Tags further on are part of what it says, as spaces are."""

_Turn = list[int | str]
"""The pieces of a turn: special tokens by their numbers, and text."""


class Chat:
    """A conversation with a model; the context keeps the newest messages.

    Messages are encoded without special tokens: no text can end a turn or begin another role's.
    `sampling` are the parameters of `jgpt.generate`. Raises ValueError for an invalid one, or a
    tokenizer without ChatML's tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        system: str | None = None,
        max_new_tokens: int = 512,
        *,
        rngs: nnx.Rngs,
        **sampling: Any,
    ) -> None:
        self._sampling = Sampling(**sampling)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be positive")
        if not isinstance(tokenizer, BPETokenizer) or not all(
            len(tokenizer.encode_part(word)) == 1 < len(tokenizer.encode_ordinary(word))
            for word in (START, END)
        ):
            raise ValueError(
                f"the tokenizer lacks {START} and {END}, the special tokens of a chat: "
                "smollm2-chat and qwen3 are models that have them (jgpt import)"
            )
        self._start = tokenizer.encode_part(START).item()
        self._end = tokenizer.encode_part(END).item()
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._rngs = rngs
        self._system: list[_Turn] = []
        if system is not None:
            self._system = [self._turn("system", system)]
        self._tokens([*self._system, self._turn("user", "")])  # raises for what can't be encoded
        self._turns: list[_Turn] = []

    def reply(self, message: str) -> tuple[int, Generator[str, None, None]]:
        """How many earlier messages no longer fit, and the answer, streamed.

        If the answer is closed early, the part so far stays in the conversation.
        Raises ValueError for a message that can't be encoded or leaves no room for an answer.
        """
        turns = [*self._turns, self._turn("user", message)]
        size = self._model.block_size
        dropped = 0
        most = size - min(self._max_new_tokens, size // 2)
        while len(tokens := self._tokens([*self._system, *turns])) > most:
            if len(turns) == 1:
                raise ValueError(
                    f"the message is too long: {len(tokens)} tokens with all that belongs to it, "
                    f"and {most} of block_size={size} are left"
                )
            turns = turns[2:]
            dropped = dropped + 2
        pieces = stream_continuations(
            self._model,
            self._tokenizer,
            np.array([tokens], np.int32),
            np.array([len(tokens)]),
            min(self._max_new_tokens, size - len(tokens)),
            self._sampling,
            key=self._rngs,
            stop=(END, END_OF_TEXT),
            contexts=(tuple(tokens),),
        )
        return dropped, self._answer(turns, pieces)

    def _answer(
        self, turns: list[_Turn], pieces: Iterator[tuple[str, ...]]
    ) -> Generator[str, None, None]:
        said = ""
        try:
            for (text,) in pieces:
                said += text
                yield text
        finally:
            self._turns = [*turns, self._turn("assistant", said[_length_of_reasoning(said) :])]

    def _tokens(self, turns: list[_Turn]) -> list[int]:
        """The tokens of turns, and of the words that open an answer.

        They are encoded as one text: a special token may take the spaces and newlines beside it.
        """
        pieces = list(chain(*turns))
        pieces += [self._start, "assistant\n"]
        return self._tokenizer.encode_template(pieces).tolist()

    def _turn(self, role: str, text: str) -> _Turn:
        return [self._start, f"{role}\n{text}", self._end, "\n"]


def _length_of_reasoning(answer: str) -> int:
    """The length of the reasoning that an answer begins with, which the template forgets."""
    found = _REASONING.match(answer)
    return found.end() if found else 0
