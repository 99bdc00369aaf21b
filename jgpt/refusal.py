"""What an error or a warning says, in which the fields that it names are kept apart from the words.

The library speaks to Python and writes `steps=4`; a command speaks to a shell and writes
`--steps 4`. A text that was already written could only be searched for what looks like a field,
and a file of that name, or a word of the user's, looks like one too.
"""

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_ABSENT = object()
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxtuple = _SHORT.maxlist = 30


class Placeholder(str):
    """What stands for a value that the user is to give, as NAME in `data_field=NAME`."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Field:
    """A field of a config or a parameter, alone or with its value."""

    name: str
    value: Any = _ABSENT

    @property
    def has_value(self) -> bool:
        """Whether the message gives the value."""
        return self.value is not _ABSENT

    def __str__(self) -> str:
        if not self.has_value:
            return self.name
        return f"{self.name}={_SHORT.repr(self.value)}"


class Message(str):
    """A text of words and fields: a string as Python spells it, which others can spell anew.

    Its parts are given in order, other messages among them. Any exception can carry a message as
    its only argument. An f-string that quotes one keeps its text alone;
    `Message("before: ", message)` keeps its fields.
    """

    parts: tuple[str | Field, ...]

    def __new__(cls, *parts: "str | Field") -> "Message":
        """Make a message of its parts."""
        flat: list[str | Field] = []
        for part in parts:
            if isinstance(part, Message):
                flat.extend(part.parts)
            else:
                flat.append(part)
        message = super().__new__(cls, "".join(map(str, flat)))
        message.parts = tuple(flat)
        return message

    @classmethod
    def join(cls, separator: str, messages: Iterable[str]) -> "Message":  # type: ignore[override]
        """Messages with a separator between them, as `str.join` puts it between strings."""
        parts: list[str] = []
        for message in messages:
            if parts:
                parts.append(separator)
            parts.append(message)
        return cls(*parts)

    def spelled(self, spell: Callable[[Field], str]) -> str:
        """The text with each field as `spell` writes it."""
        text = ""
        for part in self.parts:
            if isinstance(part, Field):
                text += spell(part)
            else:
                text += part
        return text


def message_of(error: BaseException) -> str:
    """What an error says: its `Message`, if it was raised with one."""
    if len(error.args) == 1 and isinstance(error.args[0], Message):
        return error.args[0]
    return str(error)
