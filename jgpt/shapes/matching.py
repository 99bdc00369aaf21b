"""Annotations, each read once into a function that matches values and binds sizes.

jaxtyping and beartype define what an annotation means. The dimensions of arrays are matched here:
jaxtyping would evaluate the text of `{self.embed_dim}` anew for each array.
"""

import collections.abc
import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, get_args, get_origin

import numpy as np
from beartype import BeartypeConf
from beartype.door import die_if_unbearable, is_bearable
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AnnotationError

from jgpt.shapes.describe import describe_annotation, describe_value, is_array, is_shaped

# With PEP 484's numeric tower an int is a float: 0 is a valid `dropout: float`.
_BEARTYPE = BeartypeConf(is_pep484_tower=True, is_color=False)
_UNIONS = (typing.Union, types.UnionType)
"""The origins of `Optional[int]` and `int | None`."""
_COLLECTIONS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Set)
_MAPPINGS = (dict, collections.abc.Mapping)

SYMBOLS: ContextVar[dict[str, Any]] = ContextVar("symbols", default={})  # noqa: B039  never changed
"""During a proof: symbolic sizes, and the functions that braces may use."""
SIZE_FUNCTIONS = {"floordiv": operator.floordiv, "mod": operator.mod}
"""Functions that appear in JAX's text of a symbolic size and that Python lacks."""


class AnyFloat:
    """Base of what stands for a float of any value during a proof."""


class Scope:
    """What annotations of one typed call may name."""

    __slots__ = ("arguments", "sizes")

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        """The arguments, which braces may name."""
        self.sizes: dict[str, Any] = {}
        """The sizes that were bound so far, and the structures of trees."""

    def forget(self, count: int) -> None:
        """Keep the first `count` sizes alone, as before an annotation that did not match."""
        while len(self.sizes) > count:
            self.sizes.popitem()  # a dict has them in the order in which they were bound


Match = Callable[[Any, Scope], str]
"""Returns the reason why a value does not match, or binds its sizes and returns an empty string."""


# --- any annotation ------------------------------------------------------------------------------


def matcher(hint: Any) -> Match | None:
    """Read an annotation; None if it takes any value."""
    # Each evaluation of `Float[Array, "time"]` makes a class, so that a cache of classes would grow
    # with each call of `check`.
    if is_array(hint):
        return _array(hint.dtype, hint.array_type, hint.dim_str)
    try:
        return _read(hint)
    except TypeError:  # an annotation that can't be hashed, such as Annotated[int, []]
        return _read.__wrapped__(hint)


@functools.cache
def _read(hint: Any) -> Match | None:
    if hint in (Any, object) or isinstance(hint, (typing.ParamSpecArgs, typing.ParamSpecKwargs)):
        return None
    named = _without_name(hint)
    if named is not hint:
        return matcher(named)
    if hasattr(hint, "leaftype"):
        return _tree(hint)
    if get_origin(hint) in _UNIONS:
        return _union(hint)
    # beartype would also check the items of a tuple, but describes the wrong item less precisely.
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return _tuple(hint)
    if get_origin(hint) in (*_COLLECTIONS, *_MAPPINGS) and _binds_sizes(hint):
        return _items(hint)
    return functools.partial(_other, hint)


def _without_name(hint: Any) -> Any:
    """Return what a name stands for: a NewType, a type alias, a TypeVar, or Annotated."""
    if isinstance(hint, typing.NewType):
        return hint.__supertype__
    if isinstance(hint, typing.TypeVar):
        if hint.__constraints__:
            return typing.Union[hint.__constraints__]  # noqa: UP007  it takes any number
        return hint.__bound__ or Any
    if get_origin(hint) is typing.Annotated and _binds_sizes(hint):
        return hint.__origin__
    return getattr(hint, "__value__", hint)  # of `type Rows = ...`


def _binds_sizes(hint: Any) -> bool:
    """Return whether there is an array or a tree in an annotation."""
    if is_array(hint) or hasattr(hint, "leaftype"):
        return True
    named = _without_name(hint) if get_origin(hint) is not typing.Annotated else hint
    if named is not hint:
        return _binds_sizes(named)
    return any(map(_binds_sizes, get_args(hint)))


def _union(hint: Any) -> Match | None:
    alternatives = [part for part in get_args(hint) if part is not types.NoneType]
    match_alternative = _union_of(list(map(matcher, alternatives)))
    if match_alternative is None or len(alternatives) == len(get_args(hint)):
        return match_alternative

    def match(value: Any, scope: Scope) -> str:
        if value is None:
            return ""
        return match_alternative(value, scope)

    return match


def _union_of(alternatives: list[Match | None]) -> Match | None:
    """Match the first alternative that fits; the reason is that of the nearest one."""
    matchers: list[Match] = []
    for match_alternative in alternatives:
        if match_alternative is None:  # it takes any value
            return None
        matchers.append(match_alternative)
    if len(matchers) == 1:
        return matchers[0]

    def match(value: Any, scope: Scope) -> str:
        reasons = []
        for match_alternative in matchers:
            before = len(scope.sizes)
            reason = match_alternative(value, scope)
            if not reason:
                return ""
            reasons.append(reason)
            scope.forget(before)  # the sizes of the first items of a tuple
        return max(reasons, key=_nearness)

    return match


def _nearness(reason: str) -> int:
    """Return how much of an alternative a value matches: the library of arrays, and the dtype."""
    if reason.startswith("this array has dtype"):
        return 1
    return 2 * reason.startswith(("this array has", "the "))


def _tuple(hint: Any) -> Match:
    matchers = [matcher(part) for part in get_args(hint)]

    def match(value: Any, scope: Scope) -> str:
        if not isinstance(value, tuple) or len(value) != len(matchers):
            return f"it is not a tuple of {len(matchers)}"
        for index, match_item in enumerate(matchers):
            if match_item is None:
                continue
            item = value[index]
            reason = match_item(item, scope)
            if reason:
                return f"item {index} is {describe_value(item)}: {reason}"
        return ""

    return match


def _items(hint: Any) -> Match:
    """Match every item of a collection; beartype would take one at random."""
    origin = get_origin(hint)
    kinds = get_args(hint)
    if origin is tuple:  # `tuple[X, ...]`
        kinds = kinds[:1]
    matchers = [matcher(kind) for kind in kinds]

    def match(value: Any, scope: Scope) -> str:
        if not isinstance(value, origin):
            return f"{describe_value(value)} is not a {origin.__name__}"
        rows = value.items() if origin in _MAPPINGS else ((item,) for item in value)
        for index, row in enumerate(rows):
            for match_item, item in zip(matchers, row, strict=True):
                reason = match_item(item, scope) if match_item is not None else ""
                if reason:
                    where = repr(row[0]) if origin in _MAPPINGS else index
                    return f"item {where} is {describe_value(item)}: {reason}"
        return ""

    return match


def _other(hint: Any, value: Any, scope: Scope) -> str:
    """Return beartype's reason, shortened."""
    if isinstance(hint, type) and type(value) is hint:
        return ""
    value = _with_numbers(value)
    if is_bearable(value, hint, conf=_BEARTYPE):
        return ""
    if is_shaped(value):  # beartype would print the numbers
        return f"an array is no {describe_annotation(hint)}"
    try:
        die_if_unbearable(value, hint, conf=_BEARTYPE)
    except BeartypeCallHintViolation as violation:
        # `Value 'a' violates type hint <class 'int'>, as str 'a' not instance of int`
        reason = str(violation).partition(", as ")[2].strip()
        return re.sub(r'<\w+ "([^"]*)">', r"\1", reason)
    return ""


def _with_numbers(value: Any) -> Any:
    """Replace what stands for a number in a proof by a number, since beartype rejects it."""
    if type(value) is tuple:  # not a subclass, whose constructor may differ
        return tuple(map(_with_numbers, value))
    # Most values are one of these, and the data code needs the contract without loading JAX.
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, AnyFloat):
        return 1.0

    import jax

    if jax.export.is_symbolic_dim(value):
        return 1
    return value


# --- one array -----------------------------------------------------------------------------------


@functools.cache
def _array(kind: Any, library: Any, dimensions: str) -> Match:
    """Match arrays of a library, of a kind such as `Float`."""
    if "?" in dimensions:
        raise AnnotationError(
            f"{_text(kind, library, dimensions)}: a size of its own for each leaf, `?`, needs a "
            'tree with a name, as in PyTree[Float[Array, "?size"], "Tree"]'
        )
    match_shape = _shape(kind, library, dimensions)

    def match(value: Any, scope: Scope) -> str:
        if library is Any:
            if not is_shaped(value):
                return "this value does not have both `shape` and `dtype` attributes"
        elif not isinstance(value, library):
            return _not_an_array(kind, library, value)
        if not _has_dtype(kind, value.dtype):
            return f"this array has dtype {value.dtype}, which is no {_kind(kind)}"
        return match_shape(value.shape, scope)

    return match


@functools.cache
def _has_dtype(kind: Any, dtype: Any) -> bool:
    """Return whether jaxtyping takes a dtype for a kind such as `Float`."""
    return isinstance(types.SimpleNamespace(shape=(), dtype=dtype), kind[Any, ""])


def _text(kind: Any, library: Any, dimensions: str) -> str:
    return describe_annotation(kind[library, dimensions])


def _kind(kind: Any) -> str:
    name = kind.__name__
    if name == "Key":
        return f"{name}: jax.random.key makes one"
    return name


def _not_an_array(kind: Any, library: Any, value: Any) -> str:
    """Describe what is no array, or one of another library; jaxtyping names `ArrayImpl`."""
    import jax

    name = "JAX"
    function = "jnp.asarray"
    if library is np.ndarray:
        name = "NumPy"
        function = "np.asarray"
    advice = ""
    if kind.__name__ == "Key":  # an array of numbers is no key
        advice = ": jax.random.key makes one"
    elif is_shaped(value) or isinstance(value, (list, tuple, int, float)):
        advice = f": {function} makes one"
    got = type(value).__name__
    if isinstance(value, jax.Array):
        got = "a JAX array"
    return f"{got} is not a {name} array{advice}"


def _shape(kind: Any, library: Any, dimensions: str) -> Callable[[Any, Scope], str]:
    """Match shapes: return the reason why one does not match, or bind its sizes."""
    words = dimensions.split()
    variadic = None  # the index of the dimension of any length
    for index, word in enumerate(words):
        if "#" in word.partition("{")[0]:
            raise AnnotationError(
                f"{_text(kind, library, dimensions)}: a dimension that may be broadcast, `#`, is "
                "not supported: write the size"
            )
        if word == "..." or word.rpartition("=")[2].startswith("*"):
            variadic = index
    count = len(words)
    # A name, a number, an expression, or None for a dimension of any size.
    expected_sizes = list(map(_size, words))

    def match(shape: Any, scope: Scope) -> str:
        if variadic is not None:
            length = len(shape) - count + 1
            if length < 0:
                return (
                    f"this array has {len(shape)} dimensions, which is fewer than {count - 1} that "
                    "is the minimum expected by the type hint"
                )
            end = variadic + length
            shape = (*shape[:variadic], shape[variadic:end], *shape[end:])
        elif len(shape) != count:
            return (
                f"this array has {len(shape)} dimensions, not the {count} expected by the type hint"
            )
        known = scope.sizes
        before = len(known)
        reason = ""
        try:
            for expected, size in zip(expected_sizes, shape, strict=True):
                if type(expected) is str:
                    if expected not in known:
                        known[expected] = size
                    elif known[expected] != size:
                        reason = _other_size(expected, size, known[expected])
                        break
                elif expected is not None:
                    reason = _mismatch(expected, size, scope)
                    if reason:
                        break
        except AnnotationError:
            raise
        except Exception as error:  # raised in braces, or by sizes that can't be compared
            reason = f"{type(error).__name__}: {error}"
        if reason:
            scope.forget(before)  # an array that doesn't match binds nothing
        return reason

    return match


def _mismatch(expected: Any, size: Any, scope: Scope) -> str:
    """Return the reason why a size is not the number, or the value of the expression."""
    if type(expected) is int:
        if expected == size:
            return ""
        return (
            f"the dimension size {size} {_does_not_equal(size, expected)} {expected} as "
            "expected by the type hint"
        )
    try:
        value = expected.value(scope)
    except NameError as error:
        raise AnnotationError(f"dimension {expected.text!r}: {error}") from None
    if value == size:
        return ""
    return (
        f"the dimension size {size} {_does_not_equal(size, value)} the existing value of "
        f"{expected.text}={value}"
    )


def _other_size(name: str, size: Any, known: Any) -> str:
    differs = _does_not_equal(size, known)
    if name.startswith("*"):
        return (
            f"the shape of its variadic dimensions '{name}' is {size}, which {differs} the "
            f"existing value of {known}"
        )
    return f"the size of dimension {name} is {size} which {differs} the existing value of {known}"


def _does_not_equal(size: Any, other: Any) -> str:
    """Return these words, or weaker ones for symbolic sizes that may be equal for some numbers."""
    pairs = [(size, other)]
    if isinstance(size, tuple) and len(size) == len(other):
        pairs = list(zip(size, other, strict=True))
    are_different = any(one != another and _differ(one, another) for one, another in pairs)
    return "does not equal" if are_different else "can't be shown to equal"


def _differ(size: Any, other: Any) -> bool:
    """Return whether two sizes that aren't equal are so for all numbers."""
    import jax

    if not jax.export.is_symbolic_dim(size) and not jax.export.is_symbolic_dim(other):
        return True
    difference = size - other
    for signed in (difference, -difference):
        try:
            if signed >= 1:
                return True
        except jax.errors.InconclusiveDimensionOperation:  # for some numbers, and not for others
            continue
    return False


def _size(word: str) -> Any:
    """Read a dimension: a name, a number, an expression, or None for any size."""
    text = word
    if "{" not in word:
        text = word.rpartition("=")[2]  # `rows=4` documents a number
    if text == "..." or text.startswith(("_", "*_")):
        return None
    if text.removeprefix("*").isidentifier():
        return text
    if text.isdigit():
        return int(text)
    return Expression(text)


class Expression:
    """Arithmetic with bound sizes, in which braces hold arithmetic with arguments."""

    def __init__(self, text: str) -> None:
        braces = re.findall(r"\{([^{}]*)\}", text)
        numbers = iter(range(len(braces)))
        self._braces = [compile(brace.strip(), text, "eval") for brace in braces]
        whole = re.sub(r"\{[^{}]*\}", lambda _: f"_{next(numbers)}", text)
        self._whole = compile(whole, text, "eval")
        self.text = text

    def value(self, scope: Scope) -> Any:
        """Evaluate it. Raises what the braces raise, and NameError for a size that isn't bound."""
        names = SIZE_FUNCTIONS | scope.sizes
        for index, brace in enumerate(self._braces):
            # the text of an annotation is code, as that of the function is
            names[f"_{index}"] = eval(brace, {}, scope.arguments)
        return eval(self._whole, {}, names)


def known_sizes(annotation: str, scope: Scope) -> list[str]:
    """Return `name=size` for each name and brace in the text of an annotation that has a size."""
    quoted = " ".join(re.findall(r'"([^"]*)"', annotation))
    found = []
    for name in dict.fromkeys(re.findall(r"\{[^}]*\}|\w+", quoted)):  # each once, in order
        size = scope.sizes.get(name, scope.sizes.get(f"*{name}"))
        if name.startswith("{"):
            try:
                size = Expression(name).value(scope)
            except Exception:  # the reason itself
                continue
        if size is not None:
            found.append(f"{name}={size}")
    return found


# --- trees of arrays -----------------------------------------------------------------------------


def _tree(hint: Any) -> Match:
    leaf = hint.leaftype
    name = hint.structure
    if name is not None and not name.isidentifier():
        raise AnnotationError(f"{describe_annotation(hint)}: the structure of a tree has one name")
    # Without a name, `?size` is refused where the leaf is read.
    has_own_sizes = name is not None and "?" in str(leaf)
    match_leaf = matcher(leaf) if not has_own_sizes else _own_leaf(leaf, "")
    is_leaf: Callable[[Any], bool] | None = None
    if match_leaf is not None and not _is_of_arrays(leaf):
        is_leaf = functools.partial(_matches, match_leaf)

    def match(tree: Any, scope: Scope) -> str:
        import jax

        if tree is None:
            return ""
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
        # The first tree of a name binds its structure, as the first array of a name binds its size.
        if name is not None and scope.sizes.setdefault(f"{name}:", structure) != structure:
            return "its structure is not that of the tree it must match"
        if match_leaf is None:
            return ""
        for index, value in enumerate(leaves):
            # The suffix is equal for the same leaf of each tree of this name, such as weights and
            # gradients.
            suffix = f"_{name}{index}"
            match_this = _own_leaf(leaf, suffix) if has_own_sizes else match_leaf
            reason = match_this(value, scope) if match_this is not None else ""
            if reason:
                reason = reason.replace(suffix, "")  # the user knows no suffix
                # Paths are slow to make, so only the wrong leaf's path is made.
                path, _ = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)[index]
                if not path:  # the tree is a single leaf
                    return reason
                where = jax.tree_util.keystr(path, simple=True, separator=".")
                return f"its leaf {where} is {describe_value(value)}: {reason}"
        return ""

    return match


def _matches(match: Match, value: Any) -> bool:
    return not match(value, Scope({}))


def _is_of_arrays(leaf: Any) -> bool:
    """Return whether the leaves are arrays, which JAX finds alone."""
    import jax

    if get_origin(leaf) in _UNIONS:
        return all(map(_is_of_arrays, get_args(leaf)))
    return is_array(leaf) and leaf.array_type in (jax.Array, np.ndarray)


@functools.cache
def _own_leaf(leaf: Any, suffix: str) -> Match | None:
    """Match a leaf whose `?size` is a size of its own, named by the suffix."""
    if get_origin(leaf) in _UNIONS:
        return _union_of([_own_leaf(part, suffix) for part in get_args(leaf)])
    if not is_array(leaf):
        return matcher(leaf)
    dimensions = re.sub(r"\?(\*?\w+)", rf"\1{suffix}", leaf.dim_str)
    return _array(leaf.dtype, leaf.array_type, dimensions)
