"""Whether a value matches an annotation. Binds the sizes that the annotation names."""

import contextlib
import functools
import operator
import re
import types
import typing
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, get_args, get_origin

import numpy as np
from beartype import BeartypeConf
from beartype.door import die_if_unbearable, is_bearable
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AnnotationError, Shaped

from jgpt.shapes.describe import _described, _is_shaped, _spelled, is_array

_BEARTYPE = BeartypeConf(is_pep484_tower=True, is_color=False)  # 0 is a valid float
_UNIONS = (typing.Union, types.UnionType)
SYMBOLS: ContextVar[dict[str, Any]] = ContextVar("symbols", default={})  # noqa: B039  never changed
"""During a proof: symbolic sizes, and the functions that braces may use."""
SIZE_FUNCTIONS = {"floordiv": operator.floordiv, "mod": operator.mod}
"""Functions in JAX's text of a symbolic size that Python lacks."""
_IMPOSSIBLE_SIZE = np.broadcast_to(np.False_, 987_654_321)  # one byte of memory


def _mismatch(hint: Any, value: Any) -> str:
    """The reason why a value does not match an annotation, or an empty string.

    Binds the sizes that the annotation names.
    """
    if hint is Any or isinstance(hint, (typing.ParamSpecArgs, typing.ParamSpecKwargs)):
        return ""
    if is_array(hint):
        return _array_mismatch(hint, value)
    if get_origin(hint) in _UNIONS:
        first, *others = (part for part in get_args(hint) if part is not types.NoneType)
        if others:
            matches = is_bearable(_with_numbers(value), hint, conf=_BEARTYPE)
        else:
            matches = value is None
        return "" if matches else _mismatch(first, value)
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        parts = get_args(hint)
        if not isinstance(value, tuple) or len(value) != len(parts):
            return f"it is not a tuple of {len(parts)}"
        for i, (part, item) in enumerate(zip(parts, value, strict=True)):
            if reason := _mismatch(part, item):
                return f"item {i} is {_described(item)}: {reason}"
        return ""
    if _is_tree_of_arrays(hint):
        return _tree_mismatch(hint, value)
    return _other_mismatch(hint, value)


def _is_tree_of_arrays(hint: Any) -> bool:
    leaf: Any = getattr(hint, "leaftype", None)
    if leaf is None:
        return False

    import jax

    leaves: Any = get_args(leaf) if get_origin(leaf) in _UNIONS else (leaf,)
    known = all(is_array(each) and each.array_type in (jax.Array, np.ndarray) for each in leaves)
    return known and ("?" not in str(leaf) or len(leaves) == 1)


def _tree_mismatch(hint: Any, tree: Any) -> str:
    """Check as jaxtyping does, but without making a type checker for each call."""
    import jax
    from jaxtyping import PyTree

    if tree is None:
        return ""
    if hint.structure is not None and not isinstance(tree, PyTree[Any, hint.structure]):
        return "its structure is not that of the tree it must match"
    has_own_sizes = "?" in str(hint.leaftype)
    for index, leaf in enumerate(jax.tree.leaves(tree)):
        suffix = f"_{hint.structure}{index}"
        of_leaf = _of_leaf(hint.leaftype, suffix) if has_own_sizes else hint.leaftype
        if reason := _mismatch(of_leaf, leaf).replace(suffix, ""):
            path, _ = jax.tree_util.tree_leaves_with_path(tree)[index]
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            return f"its leaf {where} is {_described(leaf)}: {reason}" if path else reason
    return ""


@functools.cache
def _of_leaf(hint: Any, suffix: str) -> Any:
    """An array annotation for one leaf: `?size` becomes `size_LEAF`."""
    dimensions = re.sub(r"\?(\*?\w+)", rf"\1{suffix}", hint.dim_str)
    return hint.dtype[hint.array_type, dimensions]


def _other_mismatch(hint: Any, value: Any) -> str:
    try:
        die_if_unbearable(_with_numbers(value), hint, conf=_BEARTYPE)
    except BeartypeCallHintViolation as violation:
        if _is_shaped(value):  # beartype would print the numbers
            return f"an array is no {_spelled(hint)}"
        reason = str(violation).partition(", as ")[2].strip()
        return re.sub(r'<\w+ "([^"]*)">', r"\1", reason)
    return ""


def _with_numbers(value: Any) -> Any:
    """The value with an integer in place of each symbolic size."""
    if type(value) is tuple:
        return tuple(map(_with_numbers, value))
    return 1 if _is_symbolic(value) else value


def _array_mismatch(hint: Any, value: Any) -> str:
    """jaxtyping's reason, except where it lists dtypes or names classes."""
    import jax

    reason = _jaxtyping_mismatch(hint, value)
    kind = hint.__name__.partition("[")[0]
    advice = ": jax.random.key makes one" if kind == "Key" else ""
    if "array type" in reason:
        on_host = hint.array_type is np.ndarray
        if _is_shaped(value) or isinstance(value, (list, tuple, int, float)):
            advice = advice or f": {'np' if on_host else 'jnp'}.asarray makes one"
        given = "a JAX array" if isinstance(value, jax.Array) else type(value).__name__
        return f"{given} is not a {'NumPy' if on_host else 'JAX'} array{advice}"
    return re.sub(", not .* as expected.*", f", which is no {kind}{advice}", reason)


def _jaxtyping_mismatch(hint: Any, value: Any) -> str:
    """jaxtyping's reason why a value does not match an array annotation, or an empty string."""
    try:
        return hint.__instancecheck_str__(value)
    except AnnotationError:
        raise
    except Exception as error:  # raised inside the annotation's braces
        return f"{type(error).__name__}: {error}"


def _fake_array(size: Any) -> Any:
    """What jaxtyping takes for an array of one dimension, whose size may be anything."""
    return types.SimpleNamespace(shape=(size,), dtype=np.dtype(bool))


def _is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic size, as in a proof and in `jax.export`."""
    if value is None or isinstance(value, (int, float, str)):
        return False

    import jax

    return jax.export.is_symbolic_dim(value)


def _symbols_in(values: Iterable[Any], own_names: set[str]) -> dict[str, Any]:
    """The symbols in the sizes of a call's arrays and integers, as braces may spell them.

    A symbol with the name of a dimension of the call is left to that dimension.
    """
    found: dict[str, Any] = {}
    for value in values:
        sizes = value.shape if _is_shaped(value) else (value,)
        for size in sizes:
            if _is_symbolic(size):
                found |= _symbols_of(size)
    return {name: symbol for name, symbol in found.items() if name not in own_names}


def _symbols_of(size: Any) -> dict[str, Any]:
    import jax

    found: dict[str, Any] = {}
    for name in re.findall(r"[A-Za-z_]\w*", str(size)):
        if name in SIZE_FUNCTIONS:
            found[name] = SIZE_FUNCTIONS[name]
        elif name not in ("max", "min"):
            (found[name],) = jax.export.symbolic_shape(name, scope=size.scope)
    return found


def _sizes(expected: str) -> Iterable[tuple[str, str]]:
    """The sizes bound to the names and braces of an annotation.

    jaxtyping states a bound size when it refuses an array of a size that nothing has.
    """
    dimensions = re.findall(r"\{[^}]*\}|\w+", " ".join(re.findall(r'"([^"]*)"', expected)))
    for dimension in dict.fromkeys(dimensions):
        for spelled in (dimension, f"*{dimension}"):
            with contextlib.suppress(Exception):  # a brace that can't be evaluated is the reason
                said = _jaxtyping_mismatch(Shaped[np.ndarray, spelled], _IMPOSSIBLE_SIZE)
                if found := re.search(r"existing value of (?:.*=)?(\d+|\(.*\))$", said):
                    yield dimension, found[1]
                    break
