"""A memo of the checks that passed, so that a call like an earlier one is not checked again."""

import ast
import inspect
import operator
import typing
from collections.abc import Callable
from typing import Any, get_args, get_origin

import numpy as np
from jaxtyping import Shaped

from jgpt.shapes.describe import by_dimension, is_array, is_shaped
from jgpt.shapes.matching import UNIONS, fake_array, is_other

MOST_CALLS = 64
"""The limit of remembered calls of a function, and of remembered results of each call."""
NO_KEY = object()
"""The key of values that the memo can't tell apart by shapes, dtypes and sizes."""
_Reader = Callable[[Any], Any]
"""A function that returns the key of a value, or `NO_KEY` if the value must be checked."""
_EXACT = (ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Constant, ast.operator, ast.unaryop)
"""Syntax whose value follows from the values in it."""


class RememberedCall:
    """A call whose arguments passed the check, the sizes that they bound, and its good results.

    It holds numbers and dtypes, no arrays and no modules.
    """

    def __init__(self, sizes: dict[str, tuple[Any, ...]]) -> None:
        self.results: dict[Any, None] = {}
        self._bindings: list[tuple[Any, Any]] = []
        """Pairs of an annotation and an array, since jaxtyping binds sizes when it checks an array.
        One pair mostly has all of them."""
        single = []
        variadic = []
        for name in sizes:
            if name.startswith("*"):
                variadic.append(name)
            else:
                single.append(name)
        # An annotation has at most one dimension of any length, so a second one needs its own.
        self._add_binding(single + variadic[:1], sizes)
        for name in variadic[1:]:
            self._add_binding([name], sizes)

    def _add_binding(self, names: list[str], sizes: dict[str, tuple[Any, ...]]) -> None:
        if not names:
            return
        shape: list[Any] = []
        for name in names:
            shape += sizes[name]
        annotation = Shaped[Any, " ".join(names)]
        self._bindings.append((annotation, fake_array(*shape)))

    def remember_result(self, key: Any) -> None:
        """Remember that a result of the call passed the check."""
        if key is not NO_KEY:
            _add(self.results, key, None)

    def bind_sizes(self) -> None:
        """Bind the sizes for the enclosing typed call, as the check of its arguments does."""
        for annotation, array in self._bindings:
            annotation.__instancecheck_str__(array)


class Memo:
    """The calls of one function that passed the check.

    jaxtyping's verdict on an array follows from the dtype, the shape and the sizes in braces, so
    these are the key. Anything else is checked at each call, which takes beartype a microsecond. A
    function that needs more, such as the leaves of a tree or a call in braces, isn't remembered.
    Reading and writing a dictionary are atomic, so threads share it.
    """

    def __init__(self, signature: inspect.Signature, hints: dict[str, Any]) -> None:
        self._calls: dict[Any, RememberedCall] = {}
        self._hints = hints
        self._readers: dict[str, _Reader] = {}
        self._sizes: list[_Reader] = []
        self._result_reader = _read_nothing
        self._result_sizes: list[_Reader] = []
        self._is_used = self._read_annotations(signature)

    def _read_annotations(self, signature: inspect.Signature) -> bool:
        """Make the readers of all annotations; return whether there is one for each of them."""
        several_values = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for name, parameter in signature.parameters.items():
            reader = _reader(self._hints.get(name, Any))
            if reader is None:
                return False
            if reader is _read_nothing:  # anything matches, so it is no part of the key
                continue
            if parameter.kind in several_values:
                return False
            self._readers[name] = reader
        result_hint = self._hints.get("return", Any)
        result_reader = _reader(result_hint)
        if result_reader is None:
            return False
        self._result_reader = result_reader
        names = set(signature.parameters)
        try:
            for name in self._readers:
                self._sizes += _sizes_in(self._hints[name], names)
            self._result_sizes += _sizes_in(result_hint, names)
        except (_UnknownSizeError, SyntaxError):
            return False
        return True

    def key(self, arguments: dict[str, Any]) -> Any:
        """Return the key of a call, or `NO_KEY`."""
        if not self._is_used:
            return NO_KEY
        key = []
        for name, read in self._readers.items():
            part = read(arguments[name])
            if part is NO_KEY:
                return NO_KEY
            key.append(part)
        return _with_sizes(key, self._sizes, arguments)

    def find(self, key: Any) -> RememberedCall | None:
        """Return the call that was remembered with a key."""
        if key is NO_KEY:
            return None
        return self._calls.get(key)

    def remember(self, key: Any, arguments: dict[str, Any]) -> RememberedCall:
        """Remember that the arguments of a call passed the check."""
        sizes: dict[str, tuple[Any, ...]] = {}
        for name in self._readers:
            _collect_sizes(self._hints[name], arguments[name], sizes)
        call = RememberedCall(sizes)
        _add(self._calls, key, call)
        return call

    def result_key(self, result: Any, arguments: dict[str, Any]) -> Any:
        """Return the key of a result, or `NO_KEY`. Braces are read again, since the function may
        have changed their sizes."""
        part = self._result_reader(result)
        if part is NO_KEY:
            return NO_KEY
        return _with_sizes([part], self._result_sizes, arguments)


def _add(remembered: dict[Any, Any], key: Any, value: Any) -> None:
    # A function that gets other sizes at each call would fill the memory. Such calls don't profit,
    # so it doesn't matter which ones are forgotten.
    if len(remembered) >= MOST_CALLS:
        remembered.clear()
    remembered[key] = value


# --- keys of values ------------------------------------------------------------------------------


def _reader(hint: Any) -> _Reader | None:
    """Return the reader for an annotation, or None for one whose verdict needs more than a key."""
    if hint is Any:
        return _read_nothing
    if not _binds_sizes(hint):
        return _other_reader(hint)
    if is_array(hint):
        return _array_reader(hint)
    if get_origin(hint) in UNIONS:
        return _union_reader(hint)
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return _tuple_reader(hint)
    return None


def _binds_sizes(hint: Any) -> bool:
    """Return whether there are arrays or trees in an annotation."""
    is_tree = getattr(hint, "__module__", "") == "jaxtyping"
    if is_tree or is_array(hint):
        return True
    return any(map(_binds_sizes, get_args(hint)))


def _read_nothing(_: Any) -> Any:
    return ()


def _array_reader(hint: Any) -> _Reader | None:
    import jax

    library = hint.array_type
    dimensions = hint.dim_str
    # Sizes of `?size` and `#size` depend on the tree and on the other arrays.
    if library not in (jax.Array, np.ndarray) or "?" in dimensions or "#" in dimensions:
        return None

    def read(value: Any) -> Any:
        if isinstance(value, library):
            return value.shape, value.dtype
        return NO_KEY

    return read


def _other_reader(hint: Any) -> _Reader:
    """Return a reader for an annotation without sizes. It checks each value, since a class, a
    number or a text decides, and adds nothing to the key."""
    # Most arguments of this kind, such as `rngs` and `cache`, are None in most calls, and beartype
    # took a seventh of the time of a remembered call to say so.
    accepts_none = is_other(hint, None)

    def read(value: Any) -> Any:
        if value is None and accepts_none:
            return ()
        if is_other(hint, value):
            return ()
        return NO_KEY

    return read


def _union_reader(hint: Any) -> _Reader | None:
    arrays = []
    others = []
    for alternative in get_args(hint):
        if is_array(alternative):
            arrays.append(alternative)
        else:
            others.append(alternative)
    # Which one of two array annotations binds its sizes depends on more than one key.
    if len(arrays) != 1 or any(map(_binds_sizes, others)):
        return None
    read_array = _array_reader(arrays[0])
    if read_array is None:
        return None
    read_other = _other_reader(typing.Union[tuple(others)])  # noqa: UP007  it takes any number

    def read(value: Any) -> Any:
        if value is None:  # the most common alternative
            return read_other(None)
        key = read_array(value)
        if key is NO_KEY:
            return read_other(value)
        return key

    return read


def _tuple_reader(hint: Any) -> _Reader | None:
    readers: list[_Reader] = []
    for item in get_args(hint):
        reader = _reader(item)
        if reader is None:
            return None
        readers.append(reader)

    def read(value: Any) -> Any:
        if not isinstance(value, tuple) or len(value) != len(readers):
            return NO_KEY
        parts = []
        for reader, item in zip(readers, value, strict=True):
            part = reader(item)
            if part is NO_KEY:
                return NO_KEY
            parts.append(part)
        return tuple(parts)

    return read


def _collect_sizes(hint: Any, value: Any, sizes: dict[str, tuple[Any, ...]]) -> None:
    """Collect the sizes that a value binds to the names in its annotation."""
    if not _binds_sizes(hint):
        return
    if get_origin(hint) in UNIONS:
        for alternative in get_args(hint):
            if is_array(alternative) and is_shaped(value):
                _collect_sizes(alternative, value, sizes)
    elif get_origin(hint) is tuple:  # of a fixed length, since it has a key
        for part, item in zip(get_args(hint), value, strict=True):
            _collect_sizes(part, item, sizes)
    elif is_array(hint):
        for name, found in by_dimension(hint, value.shape):
            # Numbers, braces and `_` bind nothing.
            plain_name = name.removeprefix("*")
            if plain_name.isidentifier() and not plain_name.startswith("_"):
                sizes.setdefault(name, tuple(found))


# --- sizes in braces -----------------------------------------------------------------------------


class _UnknownSizeError(Exception):
    """Braces in an annotation contain more than sizes and arithmetic."""


def _sizes_in(hint: Any, names: set[str]) -> list[_Reader]:
    """Return a reader of the arguments for each size that the braces of an annotation name."""
    readers = []
    if not is_array(hint):
        for part in get_args(hint):
            readers += _sizes_in(part, names)
        return readers
    for dimension in hint.dim_str.split():
        if "{" not in dimension:
            continue
        for path in _paths_in(dimension):
            name, _, _ = path.partition(".")
            if name not in names:  # the key has arguments alone
                raise _UnknownSizeError
            readers.append(_size_reader(path))
    return readers


def _paths_in(dimension: str) -> list[str]:
    """Return the attributes in the braces of a dimension, such as `self.config.embed_dim`."""
    # jaxtyping evaluates a dimension as an f-string.
    text = ast.parse(f"f'{dimension}'", mode="eval").body
    paths: list[str] = []
    for part in getattr(text, "values", []):
        if not isinstance(part, ast.FormattedValue):  # text outside braces
            continue
        is_plain = part.format_spec is None and part.conversion == -1
        if not is_plain:  # `{size!r}` or `{size:3}`
            raise _UnknownSizeError
        _collect_paths(part.value, paths)
    return paths


def _collect_paths(node: ast.AST, paths: list[str]) -> None:
    if isinstance(node, _EXACT):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr_context):
                _collect_paths(child, paths)
        return
    path = ast.unparse(node)
    if not all(map(str.isidentifier, path.split("."))):  # such as a call, whose result may change
        raise _UnknownSizeError
    paths.append(path)


def _size_reader(path: str) -> _Reader:
    name, _, attributes = path.partition(".")
    get_attribute = None  # the braces name an argument itself
    if attributes:
        get_attribute = operator.attrgetter(attributes)

    def read(arguments: Any) -> Any:
        size = arguments[name]
        if get_attribute is not None:
            try:
                size = get_attribute(size)
            except Exception:  # the check reports it
                return NO_KEY
        # Only these: 2 and 2.0 would be one key, and an array in a key would stay alive.
        if type(size) is int:
            return size
        if type(size) is not tuple:
            return NO_KEY
        for item in size:
            if type(item) is not int:
                return NO_KEY
        return size

    return read


def _with_sizes(key: list[Any], readers: list[_Reader], arguments: dict[str, Any]) -> Any:
    """Return a key with the sizes in braces, or `NO_KEY`."""
    for read in readers:
        size = read(arguments)
        if size is NO_KEY:
            return NO_KEY
        key.append(size)
    return tuple(key)
