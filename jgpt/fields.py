"""The fields of a config: rules for their values, the words for them, and JSON.

This module knows no config, and imports no jax.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import reprlib
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, get_args, get_origin

from jgpt.words import did_you_mean


class Rule(typing.NamedTuple):
    """A condition on a value, in the annotation of its field."""

    text: str
    holds: Callable[[Any], bool]


# NaN fails this, too
FINITE = Rule("be finite", lambda value: abs(value) < math.inf)
POSITIVE = Rule("be positive", lambda value: value > 0)
INT32 = Rule(f"be at most {2**31 - 1}", lambda value: value <= 2**31 - 1)
NOT_NEGATIVE = Rule("not be negative", lambda value: value >= 0)
FRACTION = Rule("be at least 0 and below 1", lambda value: 0 <= value < 1)


@functools.cache
def _hints(kind: type) -> dict[str, tuple[Any, Any]]:
    """Return the type of each field, without and with rules."""
    plain = typing.get_type_hints(kind)
    annotated = typing.get_type_hints(kind, include_extras=True)
    # Class variables have types, too.
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: (plain[name], annotated[name]) for name in names}


_SHORT = reprlib.Repr()
"""A text that is given for a file by mistake must not fill the screen."""
_SHORT.maxstring = 200


def validate(config: Any) -> None:
    """Raise ValueError for a field that is of another type, as in edited JSON, or out of bounds."""
    for name, (hint, annotated) in _hints(type(config)).items():
        value = getattr(config, name)
        if not _has_type(value, hint):
            advice = ""
            if hasattr(value, "item"):  # a NumPy scalar
                advice = ": its item() is one"
            raise ValueError(
                f"`{name}` must be {_in_words(hint)}, not {reprlib.repr(value)}{advice}"
            )
        for rule in _rules_for(value, annotated):
            if not rule.holds(value):
                raise ValueError(f"`{name}={_SHORT.repr(value)}` must {rule.text}")


def _rules_for(value: Any, annotated: Any) -> Iterator[Rule]:
    """Yield the rules for a value in the annotation of its field."""
    if isinstance(value, (int, float)):
        yield FINITE
    # In `Count | None` the rules are those of Count, and None has none.
    for kind in (annotated, *get_args(annotated)):
        if hasattr(kind, "__metadata__") and _has_type(value, kind.__origin__):
            yield from kind.__metadata__


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a field's type; an int is a float, too, but a bool is not an
    int."""
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in kinds
    if get_origin(hint) is tuple:
        # Every item, where beartype checks one at random: a number among paths passed now and then.
        return isinstance(value, tuple) and all(_has_type(item, kinds[0]) for item in value)
    if get_origin(hint) in (typing.Union, UnionType):
        return any(_has_type(value, kind) for kind in kinds)
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, (int, float))
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        words = ", ".join(kinds)
        if len(kinds) == 1:
            return words
        return f"one of {words}"
    if get_origin(hint) is tuple:
        return f"a tuple, each item {_in_words(kinds[0])}"
    if kinds:
        return " or ".join(map(_in_words, kinds))
    words_of_types = {
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "a string",
        NoneType: "None",
    }
    if hint in words_of_types:
        return words_of_types[hint]
    return f"a {hint.__name__}"


def require_multiple(config: Any, name: str, divisor_name: str) -> None:
    """Raise ValueError if a field is not divisible by another field that is a number."""
    value = getattr(config, name)
    divisor = getattr(config, divisor_name)
    if isinstance(divisor, int) and value % divisor:
        raise ValueError(f"`{name}={value!r}` must be divisible by `{divisor_name}={divisor!r}`")


class UnknownField(TypeError, ValueError):
    """A field that this version of jgpt doesn't know, for example one from a newer version."""


class Fields:
    """A frozen dataclass whose fields have rules and can be written as JSON.

    Raises UnknownField, with a suggestion, where a plain dataclass would raise a TypeError.
    """

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Raise UnknownField for a name that is not a field."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                suggestion = did_you_mean(name, known)
                raise UnknownField(f"{cls.__name__} has no field {name!r}{suggestion}")
        return super().__new__(cls)


@dataclass(frozen=True)
class Code(Fields):
    """A record of a custom function or class: its name, its file and the file's SHA-256.

    A run has this in place of the code, which it never loads by itself.
    """

    name: str
    file: str | None = None
    """The file, or None for code typed into a notebook or an interpreter."""
    sha256: str | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    """The fields of a custom config class that `ModelConfig` lacks."""

    @property
    def named(self) -> str:
        """The name FILE.py:NAME."""
        return f"{self.file or 'FILE.py'}:{self.name}"

    @classmethod
    def of(cls, make: Any) -> "Code":
        """Make the record of a callable; a record is returned unchanged."""
        if isinstance(make, Code):
            return make
        name = _name_in_its_module(make)
        path = file_of(make)
        if path is None:
            return cls(name)
        shown = path
        if path.is_relative_to(Path.cwd()):
            shown = path.relative_to(Path.cwd())
        return cls(name, str(shown), hashlib.sha256(path.read_bytes()).hexdigest())


def file_of(make: Any) -> Path | None:
    """Return the file of a callable; None for code typed into a notebook or an interpreter."""
    if not (inspect.isfunction(make) or inspect.isclass(make)):
        make = getattr(make, "func", type(make))  # of a functools.partial, or of a callable object
    try:
        path = Path(inspect.getfile(make))
    except (TypeError, OSError):
        return None
    if not path.is_file():
        return None
    return path


def _name_in_its_module(make: Any) -> str:
    """Return the name that a callable has in its file, which is what a user types.

    Its own name may be another one: that of a class that a function made, or of an object's class.
    """
    module = getattr(make, "__module__", None) or type(make).__module__
    for name, value in getattr(sys.modules.get(module), "__dict__", {}).items():
        if value is make:
            return name
    return getattr(make, "__qualname__", type(make).__qualname__)


Config = typing.TypeVar("Config")
Make = Callable | Code | None
"""Custom code in a config, or the record of it."""


def code_fields(kind: type) -> list[str]:
    """Return the names of a config's fields that hold custom code."""
    return [name for name, (hint, _) in _hints(kind).items() if hint == Make]


def values_without_code(config: Any) -> dict[str, Any]:
    """Return the fields by name, without custom code."""
    code = code_fields(type(config))
    values = {}
    for field in dataclasses.fields(config):
        if field.name not in code:
            values[field.name] = getattr(config, field.name)
    return values


def as_dict(config: Any) -> dict[str, Any]:
    """Return the fields as a run saves them, with records in place of custom code."""
    values = values_without_code(config)
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = as_dict(value)
    for name in code_fields(type(config)):
        make = getattr(config, name)
        if make is None:
            continue
        record = dataclasses.asdict(Code.of(make))
        # The fields of a custom config class stand beside those of ours, as the user wrote them.
        values.update(record.pop("fields"))
        values[name] = record
    return values


def to_json(config: Any) -> str:
    """Serialise as JSON, one field per line."""
    return json.dumps(as_dict(config), indent=2) + "\n"


def from_json(kind: type[Config], text: str) -> Config:
    """Return the inverse of `to_json`. Raises ValueError for text that is no such config."""
    return _from_dict(kind, json.loads(text))


def _from_dict(kind: type[Config], values: Any) -> Config:
    hints = {name: hint for name, (hint, _) in _hints(kind).items()}
    fields: dict[str, Any] = {}
    for name in code_fields(kind):
        recorded = values.get(name)
        if not isinstance(recorded, dict):
            continue
        others: dict[str, Any] = {}
        if name == "make":  # the custom config class may have fields that this class lacks
            others = {other: value for other, value in values.items() if other not in hints}
        fields[name] = _code_from_dict(recorded, others)
        is_read = {name, *others}
        values = {other: value for other, value in values.items() if other not in is_read}
    for name, value in values.items():
        nested: Any = hints.get(name)
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            value = _from_dict(nested, value)
        fields[name] = _as_tuple(value)
    return kind(**fields)


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, since JSON has no tuples."""
    if isinstance(value, list):
        return tuple(value)
    return value


def _code_from_dict(recorded: dict[str, Any], others: dict[str, Any]) -> Code:
    """Make the record of custom code, with the fields of a config that only the custom class
    has."""
    fields = []
    for name, value in others.items():
        fields.append((name, _as_tuple(value)))
    return Code(**recorded, fields=tuple(fields))
