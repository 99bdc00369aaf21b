"""Values and annotations in words, for the messages of the shape contract."""

import re
import reprlib
import types
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from jaxtyping import AbstractArray

Value = TypeVar("Value")


def is_array(hint: Any) -> bool:
    """Whether an annotation is that of one array."""
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def by_dimension(hint: Any, each: Sequence[Value]) -> Iterator[tuple[str, Sequence[Value]]]:
    """The dimensions of an array annotation, with their parts of `each`: several for `*batch`."""
    names = hint.dim_str.split()
    several = len(each) - len(names) + 1
    for name in names:
        count = several if name.lstrip("?").startswith(("*", "...")) else 1
        yield name, each[:count]
        each = each[count:]


def _is_shaped(value: Any) -> bool:
    """Whether a value is like an array: `nnx.Rngs` has every attribute."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


class _Shapes(reprlib.Repr):
    """Formats arrays, in containers too, as dtype and shape; other objects as their class."""

    def repr1(self, x: Any, level: int) -> str:
        if _is_shaped(x):
            return f"{x.dtype}[{','.join(map(str, x.shape))}]"
        if type(x).__module__ != "builtins":
            return f"{type(x).__name__} object"
        return super().repr1(x, level)


_described = _Shapes().repr


def _spelled(hint: Any) -> str:
    """An annotation as it is written in source, without module names."""
    if hint is types.NoneType:
        return "None"
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"('[^']*')|\b(?:\w+\.)+(?=\w)", lambda match: match[1] or "", text)
    return text.replace("'", '"')
