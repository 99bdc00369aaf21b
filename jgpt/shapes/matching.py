"""Matching of values with annotations, which binds the sizes that an annotation names."""

import contextlib
import functools
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, get_args, get_origin

import numpy as np
from beartype import BeartypeConf
from beartype.door import die_if_unbearable, is_bearable
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AnnotationError, Shaped

from jgpt.shapes.describe import describe_annotation, describe_value, is_array, is_shaped

# With PEP 484's numeric tower an int is a float: 0 is a valid `dropout: float`.
_BEARTYPE = BeartypeConf(is_pep484_tower=True, is_color=False)
UNIONS = (typing.Union, types.UnionType)
"""The origins of `Optional[int]` and `int | None`."""

SYMBOLS: ContextVar[dict[str, Any]] = ContextVar("symbols", default={})  # noqa: B039  never changed
"""During a proof: symbolic sizes, and the functions that braces may use."""
SIZE_FUNCTIONS = {"floordiv": operator.floordiv, "mod": operator.mod}
"""Functions that appear in JAX's text of a symbolic size and that Python lacks."""
_IMPOSSIBLE_SIZE = np.broadcast_to(np.False_, 987_654_321)  # a view of one byte


# --- any annotation ------------------------------------------------------------------------------


def mismatch(hint: Any, value: Any) -> str:
    """Return the reason why a value does not match an annotation, or an empty string.

    This binds the sizes that the annotation names.
    """
    if hint is Any or isinstance(hint, (typing.ParamSpecArgs, typing.ParamSpecKwargs)):
        return ""
    if is_array(hint):
        return array_mismatch(hint, value)
    if get_origin(hint) in UNIONS:
        return _union_mismatch(hint, value)
    # beartype would also check the items of a tuple, but describes the wrong item less precisely.
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return _tuple_mismatch(hint, value)
    if _is_tree_of_arrays(hint):
        return _tree_mismatch(hint, value)
    return _other_mismatch(hint, value)


def _union_mismatch(hint: Any, value: Any) -> str:
    """Return the reason for `X | None`, the most common union, or for several alternatives."""
    alternatives = [part for part in get_args(hint) if part is not types.NoneType]
    matches = value is None
    if len(alternatives) > 1:  # `A | B`, with None or without
        matches = is_bearable(_with_numbers(value), hint, conf=_BEARTYPE)
    if matches:
        return ""
    # Among several alternatives, the message describes the first.
    return mismatch(alternatives[0], value)


def _tuple_mismatch(hint: Any, value: Any) -> str:
    parts = get_args(hint)
    if not isinstance(value, tuple) or len(value) != len(parts):
        return f"it is not a tuple of {len(parts)}"
    for index, part in enumerate(parts):
        item = value[index]
        reason = mismatch(part, item)
        if reason:
            return f"item {index} is {describe_value(item)}: {reason}"
    return ""


def is_other(hint: Any, value: Any) -> bool:
    """Return whether a value matches an annotation that binds no sizes."""
    return is_bearable(value, hint, conf=_BEARTYPE)


def _other_mismatch(hint: Any, value: Any) -> str:
    """Return beartype's reason, shortened."""
    try:
        die_if_unbearable(_with_numbers(value), hint, conf=_BEARTYPE)
    except BeartypeCallHintViolation as violation:
        if is_shaped(value):  # beartype would print the numbers
            return f"an array is no {describe_annotation(hint)}"
        # `Value 'a' violates type hint <class 'int'>, as str 'a' not instance of int`
        reason = str(violation).partition(", as ")[2].strip()
        return re.sub(r'<\w+ "([^"]*)">', r"\1", reason)
    return ""


# --- one array -----------------------------------------------------------------------------------


def array_mismatch(hint: Any, value: Any) -> str:
    """Return jaxtyping's reason, or a shorter one where it lists dtypes or names classes."""
    import jax

    reason = _jaxtyping_mismatch(hint, value)
    dtype = hint.__name__.partition("[")[0]  # `Float` of `Float[Array, "batch time"]`
    advice = ""
    if dtype == "Key":
        advice = ": jax.random.key makes one"

    # A wrong dtype or shape. jaxtyping lists every dtype that a `Float` may have.
    if "array type" not in reason:
        return re.sub(", not .* as expected.*", f", which is no {dtype}{advice}", reason)

    # Not an array, or one of another library; jaxtyping names classes such as `ArrayImpl`.
    library = "JAX"
    function = "jnp.asarray"
    if hint.array_type is np.ndarray:
        library = "NumPy"
        function = "np.asarray"
    can_be_converted = is_shaped(value) or isinstance(value, (list, tuple, int, float))
    if can_be_converted and not advice:  # an array of numbers is no key
        advice = f": {function} makes one"
    kind = type(value).__name__
    if isinstance(value, jax.Array):
        kind = "a JAX array"
    return f"{kind} is not a {library} array{advice}"


def _jaxtyping_mismatch(hint: Any, value: Any) -> str:
    """Return jaxtyping's reason why a value does not match an array annotation, or an empty
    string."""
    try:
        return hint.__instancecheck_str__(value)
    except AnnotationError:
        raise
    except Exception as error:  # raised inside the annotation's braces
        return f"{type(error).__name__}: {error}"


def bind_size(name: str, size: Any) -> None:
    """Bind a name to a size of any value, for the enclosing typed call."""
    # jaxtyping binds only the sizes of arrays.
    _jaxtyping_mismatch(Shaped[Any, name], fake_array(size))


def fake_array(*shape: Any) -> Any:
    """Return an object that jaxtyping treats as an array of this shape."""
    return types.SimpleNamespace(shape=shape, dtype=np.dtype(bool))


def bound_sizes(annotation: str) -> Iterator[tuple[str, str]]:
    """Yield the sizes bound to the names and braces in the text of an annotation.

    jaxtyping has no function that returns them, but its message names a bound size when it rejects
    an array of an impossible size.
    """
    quoted = " ".join(re.findall(r'"([^"]*)"', annotation))
    dimensions = re.findall(r"\{[^}]*\}|\w+", quoted)
    for dimension in dict.fromkeys(dimensions):  # each once, in the order of the text
        # A name may be bound as one dimension or as several.
        for pattern in (dimension, f"*{dimension}"):
            size = _bound_size(pattern)
            if size is not None:
                yield dimension, size
                break


def _bound_size(pattern: str) -> str | None:
    # A brace that can't be evaluated is the reason itself.
    with contextlib.suppress(Exception):
        reason = _jaxtyping_mismatch(Shaped[np.ndarray, pattern], _IMPOSSIBLE_SIZE)
        # The size is a number or a tuple: `... existing value of batch=3`.
        found = re.search(r"existing value of (?:.*=)?(\d+|\(.*\))$", reason)
        if found:
            return found[1]
    return None


# --- trees of arrays -----------------------------------------------------------------------------


def _is_tree_of_arrays(hint: Any) -> bool:
    """Return whether an annotation is a PyTree of arrays, all of NumPy or JAX."""
    leaf: Any = getattr(hint, "leaftype", None)
    if leaf is None:
        return False

    import jax

    alternatives: Any = (leaf,)
    if get_origin(leaf) in UNIONS:
        alternatives = get_args(leaf)
    for alternative in alternatives:
        if not is_array(alternative) or alternative.array_type not in (jax.Array, np.ndarray):
            return False
    # Inside several alternatives, `?size` has no name that a leaf's name could replace.
    return "?" not in str(leaf) or len(alternatives) == 1


def _tree_mismatch(hint: Any, tree: Any) -> str:
    """Check a tree as jaxtyping does, but without making a type checker for each call."""
    import jax
    from jaxtyping import PyTree

    if tree is None:
        return ""
    # The first tree of a name binds its structure, as the first array of a name binds its size.
    if hint.structure is not None and not isinstance(tree, PyTree[Any, hint.structure]):
        return "its structure is not that of the tree it must match"
    has_own_sizes = "?" in str(hint.leaftype)
    for index, leaf in enumerate(jax.tree.leaves(tree)):
        # The suffix is equal for the same leaf of each tree of this name, such as weights and
        # gradients.
        suffix = f"_{hint.structure}{index}"
        leaf_hint = hint.leaftype
        if has_own_sizes:
            leaf_hint = _leaf_annotation(leaf_hint, suffix)
        reason = mismatch(leaf_hint, leaf)
        reason = reason.replace(suffix, "")  # the user knows no suffix
        if reason:
            # Paths are slow to make, so only the wrong leaf's path is made.
            path, _ = jax.tree_util.tree_leaves_with_path(tree)[index]
            if not path:  # the tree is a single leaf
                return reason
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return f"its leaf {name} is {describe_value(leaf)}: {reason}"
    return ""


# jaxtyping makes a class for each text of dimensions.
@functools.cache
def _leaf_annotation(hint: Any, suffix: str) -> Any:
    """Make an array annotation for one leaf: `?size` becomes `size_LEAF`."""
    own_size = r"\?(\*?\w+)"
    dimensions = re.sub(own_size, rf"\1{suffix}", hint.dim_str)
    return hint.dtype[hint.array_type, dimensions]


# --- symbolic sizes ------------------------------------------------------------------------------


def _with_numbers(value: Any) -> Any:
    """Replace each symbolic size in a value by an integer, since beartype rejects symbols."""
    if type(value) is tuple:  # not a subclass, whose constructor may differ
        return tuple(map(_with_numbers, value))
    if _is_symbolic(value):
        return 1
    return value


def _is_symbolic(value: Any) -> bool:
    """Return whether a value is a symbolic size, as in a proof and in `jax.export`."""
    # Most values are one of these, and the data code needs the contract without loading JAX.
    if value is None or isinstance(value, (int, float, str)):
        return False

    import jax

    return jax.export.is_symbolic_dim(value)


def symbols_in(values: Iterable[Any], own_names: set[str]) -> dict[str, Any]:
    """Return the symbols in the sizes of a call's arrays and integers, as braces may write them.

    A symbol that has the name of a dimension of the call is left out.
    """
    found: dict[str, Any] = {}
    for value in values:
        sizes = (value,)  # an integer argument may be a size itself
        if is_shaped(value):
            sizes = value.shape
        for size in sizes:
            if _is_symbolic(size):
                found |= _symbols_of(size)
    if not found:  # nearly always
        return found
    found |= SIZE_FUNCTIONS  # braces such as {x.shape[0]//2} make them of sizes without any
    for name in own_names:
        found.pop(name, None)
    return found


def _symbols_of(size: Any) -> dict[str, Any]:
    """Return the symbols in JAX's text of a size, such as `b*floordiv(t, 2)`."""
    import jax

    functions = ("max", "min", *SIZE_FUNCTIONS)  # Python has the first two itself
    found: dict[str, Any] = {}
    for name in re.findall(r"[A-Za-z_]\w*", str(size)):
        if name not in functions:
            (symbol,) = jax.export.symbolic_shape(name, scope=size.scope)
            found[name] = symbol
    return found
