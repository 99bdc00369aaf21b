"""Descriptions of values and annotations for the messages of the shape contract."""

import re
import reprlib
import types
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from jaxtyping import AbstractArray

Value = TypeVar("Value")


def is_array(hint: Any) -> bool:
    """Return whether an annotation is that of a single array."""
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def by_dimension(hint: Any, values: Sequence[Value]) -> Iterator[tuple[str, Sequence[Value]]]:
    """Pair each dimension of an array annotation with its part of `values`, such as a shape.

    A dimension such as `*batch` has a part of any length.
    """
    names = hint.dim_str.split()
    # An annotation has at most one such dimension, so every other one has a single value.
    length_of_variadic = len(values) - len(names) + 1
    start = 0
    for name in names:
        is_variadic = name.lstrip("?").startswith(("*", "..."))
        length = 1
        if is_variadic:
            length = length_of_variadic
        end = start + length
        yield name, values[start:end]
        start = end


def is_shaped(value: Any) -> bool:
    """Return whether a value has the attributes of an array."""
    # The attribute alone is not enough: `nnx.Rngs` makes a stream for any name.
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and hasattr(value, "dtype")


class _Repr(reprlib.Repr):
    """A formatter that writes arrays, also inside containers, as dtype and shape, and other objects
    as their class."""

    def repr1(self, x: Any, level: int) -> str:
        if is_shaped(x):
            sizes = ",".join(map(str, x.shape))
            return f"{x.dtype}[{sizes}]"
        # The text of an object may be pages long, for example that of a module with its weights.
        kind = type(x)
        if kind.__module__ != "builtins":
            return f"{kind.__name__} object"
        return super().repr1(x, level)


def describe_value(value: Any) -> str:
    """Describe a value in one short line: `float32[2,5]`, `GPT object`, `'text'`."""
    return _Repr().repr(value)


def describe_annotation(hint: Any) -> str:
    """Return an annotation as written in source, without module names."""
    if hint is types.NoneType:
        return "None"
    if isinstance(hint, TypeVar) and hint.__constraints__:  # its text is `~Texts`
        return " | ".join(map(describe_annotation, hint.__constraints__))
    if isinstance(hint, TypeVar) and hint.__bound__ is not None:
        return describe_annotation(hint.__bound__)
    text = str(hint)
    if isinstance(hint, type):  # its text is `<class 'int'>`
        text = hint.__name__
    # Dots between quotes belong to dimensions (`{self.embed_dim}`), all others to module names.
    quoted_or_module = r"('[^']*')|\b(?:\w+\.)+(?=\w)"

    def without_module(match: re.Match[str]) -> str:
        quoted = match[1]
        if quoted is None:
            return ""
        return quoted

    plain = re.sub(quoted_or_module, without_module, text)
    return plain.replace("'", '"')  # dimensions are written with double quotes
