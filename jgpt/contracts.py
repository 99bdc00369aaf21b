"""The shape contract: `@typed`, `check`, `record`, and the legend of dimension names.

Shapes are checked when a function is traced or called eagerly, never inside a compiled step.
`JAXTYPING_DISABLE=1` in the environment switches every check off.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

from beartype import BeartypeConf
from beartype.door import die_if_unbearable, is_bearable
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray, AnnotationError, TypeCheckError, config

# what jaxtyping's decorator is made of: it checks arguments twice, and goes three frames deeper
from jaxtyping._storage import (
    clear_treepath_memo,
    get_shape_memo,
    pop_shape_memo,
    push_shape_memo,
    set_treepath_memo,
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Record = TypeVar("Record")

LEGEND: dict[str, str] = {
    "batch": "sequences side by side; `*batch` is any number of leading axes",
    "time": "positions in a sequence",
    "query": "positions that ask",
    "key": "positions that answer",
    "head_dim": "features of one head's queries and keys",
    "value_dim": "features of one head's values",
    "heads": "attention heads",
    "layers": "blocks on top of each other",
    "kv_heads": "heads of keys and values",
    "embed_dim": "features of the residual stream",
    "vocab": "tokens a model can name",
    "features": "features of all heads side by side",
    "in_features": "features a projection reads",
    "out_features": "features a projection writes",
    "rows": "any leading axes that a projection or a norm leaves alone",
    "chunks": "parts of a batch whose logits are computed one after the other",
    "chunk": "positions in each of them",
    "places": "positions that a cache of keys and values has room for",
    "steps": "optimizer steps in one call",
    "window": "a block and the target after it",
    "batches": "batches of evaluation windows",
    "tokens": "tokens in a text, a split or a file",
    "held_out": "tokens in the validation split",
    "shape": "whatever shape a parameter has; `?*shape` is each leaf's own",
}
"""Every dimension name that an annotation here may use; a module's own sizes are `{self.name}`."""

_BEARTYPE = BeartypeConf(is_pep484_tower=True, is_color=False)  # 0 is a valid float


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check a function's arguments and result against its annotations, shapes included.

    Use it on functions and methods, never on classes, and as the innermost decorator.
    A mismatch raises `jaxtyping.TypeCheckError`, a `TypeError` whose last line is the reason.
    """
    contract = _Contract(function)

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        if config.jaxtyping_disable or not __debug__:
            return function(*args, **kwargs)
        arguments = contract.bind(args, kwargs)
        push_shape_memo(arguments)
        try:
            if complaint := contract.complaint_about_arguments(arguments):
                raise TypeCheckError(complaint)
            # no frame between this one and the function's: JAX walks the stack at each operation
            result = function(*args, **kwargs)
            if complaint := contract.complaint_about_result(result, arguments):
                raise TypeCheckError(complaint)
            return result
        finally:
            pop_shape_memo()

    wrapper.__shape_checked__ = True  # type: ignore[attr-defined]
    return wrapper


def check(value: Result, annotation: Any) -> Result:
    """Check an intermediate against the sizes bound by the enclosing `@typed` call; return it.

    `annotation` is one array annotation, such as `Float[Array, "batch time {self.embed_dim}"]`.
    """
    if config.jaxtyping_disable or not __debug__:
        return value
    if reason := _mismatch(annotation, value):
        frame = sys._getframe(1)
        subject = (
            f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}() computed a wrong "
            "intermediate"
        )
        reason = _in_plain_words(reason, annotation, value)
        raise TypeCheckError(_complaint(subject, annotation, value, frame.f_locals, reason))
    return value


def record(kind: type[Record]) -> type[Record]:
    """Check a dataclass's fields against their annotations when it is made.

    JAX can take it apart, and rebuilds it unchecked: in a tree, leaves may be anything.
    """
    import jax

    kind.__init__ = typed(kind.__init__)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    def flatten(made):
        return [(jax.tree_util.GetAttrKey(name), getattr(made, name)) for name in names], None

    def unflatten(_, values):
        made = object.__new__(kind)
        vars(made).update(zip(names, values, strict=True))
        return made

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    return kind


_UNIONS = (typing.Union, types.UnionType)
_Accepts = Callable[[Any], bool]


class _Contract:
    """What a function's annotations ask for, read when it is first called: imports stay cheap."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        hints = typing.get_type_hints(self.function, include_extras=True)
        return {name: _resolved(hint) for name, hint in hints.items()}

    @functools.cached_property
    def parameters(self) -> list[tuple[str, Any, _Accepts]]:
        """In the signature's order, which is the order in which sizes are bound."""
        return [
            (name, parameter.kind, _acceptor(self.hints[name]))
            for name, parameter in self.signature.parameters.items()
            if name in self.hints
        ]

    @functools.cached_property
    def accepts_result(self) -> _Accepts:
        return _acceptor(self.hints.get("return", Any))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises TypeError, naming the function, where they don't fit."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.function.__qualname__}() {error}") from None
        bound.apply_defaults()
        return bound.arguments

    def complaint_about_arguments(self, arguments: dict[str, Any]) -> str:
        """What is wrong with the first argument that is wrong, or nothing."""
        for name, kind, accepts in self.parameters:
            for value in _values(kind, arguments[name]):
                if not accepts(value):
                    return self._complaint(f"was given a wrong {name}", name, value, arguments)
        return ""

    def complaint_about_result(self, result: Any, arguments: dict[str, Any]) -> str:
        """What is wrong with the result, or nothing."""
        if self.accepts_result(result):
            return ""
        return self._complaint("returned a wrong result", "return", result, arguments)

    def _complaint(self, what: str, name: str, value: Any, arguments: dict[str, Any]) -> str:
        subject = f"{self.function.__module__}.{self.function.__qualname__}() {what}"
        hint = self.hints[name]
        return _complaint(subject, hint, value, arguments, _reason(hint, value))


def _values(kind: Any, argument: Any) -> Iterable[Any]:
    """What a parameter's annotation is about: of `*args` and `**kwargs` it is each of them."""
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return argument
    return argument.values() if kind is inspect.Parameter.VAR_KEYWORD else (argument,)


def _resolved(hint: Any) -> Any:
    """An annotation with the class itself for a type variable that names its bound."""
    if not isinstance(hint, type) and (variables := getattr(hint, "__parameters__", ())):
        return hint[tuple(map(_resolved, variables))]
    bound = getattr(hint, "__bound__", None)
    if not isinstance(bound, typing.ForwardRef):
        return hint
    return getattr(sys.modules[hint.__module__], bound.__forward_arg__, hint)


def _holds_arrays(hint: Any) -> bool:
    # jaxtyping's PyTree has no public base class, and lives where its arrays do
    return getattr(hint, "__module__", None) == "jaxtyping" or any(
        map(_holds_arrays, get_args(hint))
    )


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _is_fixed_tuple(hint: Any) -> bool:
    return get_origin(hint) is tuple and Ellipsis not in get_args(hint)


def _acceptor(hint: Any) -> _Accepts:
    """A function that says whether a value is of an annotation, and binds the sizes it names."""
    if hint is Any or isinstance(hint, (typing.ParamSpecArgs, typing.ParamSpecKwargs)):
        return lambda value: True
    if _is_array(hint):
        return lambda value: not _mismatch(hint, value)
    if hint in (int, bool, str, types.NoneType):  # as beartype does, without its detour
        return lambda value: isinstance(value, hint)
    if get_origin(hint) in _UNIONS:
        some = [part for part in get_args(hint) if part is not types.NoneType]
        if len(some) == 1:
            accepts = _acceptor(some[0])
            return lambda value: value is None or accepts(value)
    if _is_fixed_tuple(hint):
        parts = [_acceptor(part) for part in get_args(hint)]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(accepts(item) for accepts, item in zip(parts, value, strict=True))
        )
    if leaf_types := _leaf_types(hint):
        return functools.partial(_accepts_tree, hint, leaf_types, _acceptor(hint.leaftype))
    return lambda value: is_bearable(value, hint, conf=_BEARTYPE)


def _leaf_types(hint: Any) -> tuple[Any, ...]:
    """The classes of a tree's leaves, where `_accepts_tree` can judge the tree; else none."""
    leaf: Any = getattr(hint, "leaftype", None)
    leaves = get_args(leaf) if get_origin(leaf) in _UNIONS else (leaf,)
    classes = tuple(getattr(each, "array_type", each) for each in leaves)
    plain = all(_is_array(each) or each in (bool, int, float, str) for each in leaves)
    whole = plain and (hint.structure is None or hint.structure.isidentifier())
    return classes if whole and Any not in classes else ()


def _accepts_tree(
    hint: Any, leaf_types: tuple[Any, ...], accepts_leaf: _Accepts, value: Any
) -> bool:
    """What jaxtyping says of a tree, without the type checker that it starts twice for a leaf."""
    import jax

    if value is None:
        return True
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda node: isinstance(node, leaf_types))
    if hint.structure is None:
        return all(map(accepts_leaf, _distinct(leaves, leaf_types)))
    if get_shape_memo()[2].get(hint.structure, structure) != structure:
        return False
    for i, leaf in enumerate(leaves):
        set_treepath_memo(i, hint.structure)
        try:
            if not accepts_leaf(leaf):
                return False
        finally:
            clear_treepath_memo()
    get_shape_memo()[2][hint.structure] = structure
    return True


def _distinct(leaves: list[Any], leaf_types: tuple[Any, ...]) -> Iterable[Any]:
    """One leaf of each kind that an annotation tells apart: what it says of one, it says of all."""
    kinds = {}
    for leaf in leaves:
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        kinds[type(leaf), isinstance(leaf, leaf_types), shape, dtype] = leaf
    return kinds.values()


def _mismatch(hint: Any, value: Any) -> str:
    """jaxtyping's reason why a value is not of an array annotation, or nothing."""
    try:
        return hint.__instancecheck_str__(value)
    except AnnotationError:
        raise
    except Exception as error:  # out of the annotation's braces
        return f"{type(error).__name__}: {error}"


def _complaint(
    subject: str, hint: Any, value: Any, arguments: Mapping[str, Any], reason: str
) -> str:
    expected = _spelled(hint)
    sizes = ", ".join(f"{name}={size}" for name, size in _sizes(expected, arguments).items())
    return (
        f"{subject}.\n"
        f"Expected: {expected}{' with ' if sizes else ''}{sizes}\n"
        f"Got: {_described(value)}\n"
        f"Reason: {reason.rstrip('.')}."
    )


def _reason(hint: Any, value: Any) -> str:
    """Why a value is not of an annotation that didn't accept it."""
    if reason := _reason_in_arrays(hint, value):
        return reason
    try:
        die_if_unbearable(value, hint, conf=_BEARTYPE)
    except BeartypeCallHintViolation as violation:
        reason = str(violation).partition(", as ")[2].strip()
        return re.sub(r'<\w+ "([^"]*)">', r"\1", reason)
    return "one of its items is wrong"  # beartype looks at a random one of many


def _reason_in_arrays(hint: Any, value: Any) -> str:
    """Why a value is not of an annotation that holds arrays, or nothing."""
    if _is_array(hint):
        return _in_plain_words(_mismatch(hint, value), hint, value)
    if get_origin(hint) in _UNIONS:
        reasons = [_reason_in_arrays(each, value) for each in get_args(hint) if _holds_arrays(each)]
        return reasons[0] if len(reasons) == 1 else ""
    if _is_fixed_tuple(hint) and isinstance(value, tuple):
        for i, (each, item) in enumerate(zip(get_args(hint), value, strict=False)):
            if not _acceptor(each)(item) and (reason := _reason_in_arrays(each, item)):
                return f"item {i} is {_described(item)}: {reason}"
    leaf_hint = getattr(hint, "leaftype", None)
    if leaf_hint is not None and "?" not in str(leaf_hint):
        import jax

        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if reason := _reason_in_arrays(leaf_hint, leaf):
                where = jax.tree_util.keystr(path, simple=True, separator=".")
                return f"its leaf {where} is {_described(leaf)}: {reason}" if path else reason
    if leaf_hint is not None:
        return "its leaves, or their shapes, are not those of the tree it must match"
    return ""


def _in_plain_words(reason: str, hint: Any, value: Any) -> str:
    """jaxtyping's reason without its list of dtypes and its class names."""
    if not hasattr(value, "dtype"):
        return f"{type(value).__name__} is not an array" if reason else ""
    if "array type" in reason:
        is_numpy = type(value).__module__ == "numpy"
        return "this array is NumPy's, not JAX's" if is_numpy else "this array is not NumPy's"
    kind = hint.__name__.partition("[")[0]
    advice = ": jax.random.key makes one" if kind == "Key" else ""
    reason = re.sub("not .* as expected.*", f"which is no {kind}{advice}", reason)
    return reason.replace("expected by the type hint", "of the annotation")


def _spelled(hint: Any) -> str:
    """An annotation as one writes it: without modules, except in what the quotes hold."""
    if hint is types.NoneType:
        return "None"
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"('[^']*')|\b(?:\w+\.)+(?=\w)", lambda match: match[1] or "", text)
    return text.replace("'", '"')


class _Shapes(reprlib.Repr):
    """Arrays by dtype and shape, also inside containers, and other objects by their class."""

    def repr1(self, x: Any, level: int) -> str:
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"{x.dtype}[{','.join(map(str, x.shape))}]"
        if type(x).__module__ != "builtins":
            return f"{type(x).__name__} object"
        return super().repr1(x, level)


_described = _Shapes().repr


def _sizes(expected: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that are bound already, of the names and braces that an annotation uses."""
    single, variadic, trees, _ = get_shape_memo()
    bound = {**single, **{name: shape for name, (_, shape) in variadic.items()}, **trees}
    sizes = {}
    for dimension in re.findall(r"\{[^}]*\}|\w+", " ".join(re.findall(r'"([^"]*)"', expected))):
        if dimension.startswith("{"):
            with contextlib.suppress(Exception):  # what can't be read is the reason, not a size
                sizes[dimension] = eval(dimension[1:-1], {}, dict(arguments))
        elif dimension in bound:
            sizes[dimension] = bound[dimension]
    return sizes
