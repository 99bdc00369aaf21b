"""The shape contract: `@typed`, `check`, records, `watching`, the legend of dimension names.

Shapes are checked when a function is traced or called eagerly, never inside a compiled step.
`JAXTYPING_DISABLE=1` in the environment switches every check off.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
import re
import reprlib
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import numpy as np
from beartype import BeartypeConf
from beartype.door import die_if_unbearable, is_bearable
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray, AnnotationError, Shaped, TypeCheckError, config, jaxtyped

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Record = TypeVar("Record")
Value = TypeVar("Value")

_BEARTYPE = BeartypeConf(is_pep484_tower=True, is_color=False)  # 0 is a valid float
_UNIONS = (typing.Union, types.UnionType)


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check a function's arguments and result against its annotations, shapes included.

    Use it on functions and methods, never on classes, and as the innermost decorator.
    A mismatch raises `jaxtyping.TypeCheckError`, a `TypeError` whose last line is the reason.
    """
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"@typed is for functions and methods, not for {function!r}")
    # annotations are resolved at the first call, so that imports stay cheap
    checked = functools.cache(lambda: _checked(function))

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        if config.jaxtyping_disable or not __debug__:
            return function(*args, **kwargs)
        try:
            result, error = checked()(*args, **kwargs)
        except TypeError as misfit:  # from binding the arguments: all else is returned
            raise TypeError(f"{function.__qualname__}() {misfit}") from None
        if error is not None:
            raise error
        return result

    wrapper.__shape_checked__ = True  # type: ignore[attr-defined]
    return wrapper


@dataclasses.dataclass(frozen=True)
class TypedCall:
    """A call of a `@typed` function, the argument of a watcher."""

    path: str
    """The module's path in the outermost module, then the method or function called unless it is
    the module's own call: `blocks.1.attention`, `blocks.1.attention.merge_heads`, `hidden`. The
    model itself is the empty path."""
    function: Callable[..., Any]
    arguments: dict[str, Any]
    """By name, `self` and defaults included."""
    annotations: dict[str, Any]
    """By name; that of the result is `return`."""


Watch = Callable[[TypedCall], Callable[[Any], Any] | None]
_WATCHES: ContextVar[tuple[Watch, ...]] = ContextVar("watches", default=())
_Place = tuple[str, dict[int, tuple[str, Any]]]  # a path; path and module by the module's id
_PLACE: ContextVar[_Place] = ContextVar("place", default=("", {}))


SYMBOLS: ContextVar[dict[str, Any]] = ContextVar("symbols", default={})  # noqa: B039  never changed
"""During a proof: symbolic sizes, and the functions that braces may use."""
SIZE_FUNCTIONS = {"floordiv": operator.floordiv, "mod": operator.mod}
"""Functions in JAX's text of a symbolic size that Python lacks."""


class _Watched:
    """What JAX's compiled programs are cached by while something watches."""

    def __init__(self) -> None:
        self.is_used = False
        """Whether a program that was traced meanwhile may hold what a watcher replaced."""


_UNUSED: list[_Watched] = []
"""Keys of which no program holds a typed call.

A new key for each `watching` would compile JAX's own operations anew each time, which takes seconds
for an eager model.
"""
_WATCHED: ContextVar[tuple[_Watched, Any] | None] = ContextVar("watched", default=None)
"""The key of the innermost watcher, and JAX's trace when it began."""
_CONTEXT_LOCK = threading.Lock()


@functools.cache
def _make_program_context() -> Any:
    import jax

    return jax.make_user_context(None)


def _program_context() -> Any:
    """JAX's context that compiled programs are cached by.

    Made at the first typed call: programs from before it are compiled anew.
    """
    with _CONTEXT_LOCK:
        return _make_program_context()


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Call `watch` before every typed call of this thread.

    It may return a function of the result. What that returns replaces the result, and is checked
    like any other. Of nested watchers the outer one is called first, and the inner one sees the
    result first. A program that `jit` compiled before is traced anew within each `watching`, so
    that its calls are heard once, and what is replaced in it ends with the block. A scan over the
    blocks and rematerialisation trace one block, whose path is `blocks.*`.
    Raises ValueError where checks are switched off.
    """
    if not callable(watch):
        raise TypeError(f"watching needs a function of a TypedCall, not {_described(watch)}")
    if config.jaxtyping_disable or not __debug__:
        raise ValueError("watching needs the shape checks, which are switched off")
    from jax.extend.core import get_opaque_trace_state

    try:
        key = _UNUSED.pop()
    except IndexError:
        key = _Watched()
    try:
        with (
            _program_context()(key),
            holding(_WATCHED, (key, get_opaque_trace_state())),
            holding(_WATCHES, (*_WATCHES.get(), watch)),
        ):
            yield
    finally:
        if not key.is_used:
            _UNUSED.append(key)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Nothing watches in the block, and its programs are not those of a watcher."""
    with _program_context()(None), holding(_WATCHED, None), holding(_WATCHES, ()):
        yield


def _note_program() -> None:
    """Note if a typed call is in a program that JAX may cache, for the innermost watcher."""
    from jax.extend import core

    watched = _WATCHED.get()
    assert watched is not None
    key, trace_outside = watched
    if key.is_used or core.get_opaque_trace_state() == trace_outside:
        return
    # an eager vmap or gradient caches nothing
    key.is_used = core.unsafe_am_i_under_a_jit_DO_NOT_USE()  # pyright: ignore[reportPrivateImportUsage]


def place(path: str) -> contextlib.AbstractContextManager[None]:
    """Set the path of modules outside the outermost one, such as copies in a transformation."""
    return holding(_PLACE, (path, _PLACE.get()[1]))


def called_in(module: Any) -> contextlib.AbstractContextManager[None]:
    """Set the outermost module, for calls of its methods and parts."""
    return holding(_PLACE, _placed(module))


@contextlib.contextmanager
def holding(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Set a context variable for the block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def check(value: Result, annotation: Any) -> Result:
    """Check an intermediate against the sizes bound by the enclosing `@typed` call; return it.

    `annotation` is one array annotation, such as `Float[Array, "batch time {self.embed_dim}"]`.
    """
    if config.jaxtyping_disable or not __debug__:
        return value
    if not is_array(annotation):
        raise TypeError(
            f"check() needs an array annotation, such as Float[Array, 'batch'], "
            f"not {_spelled(annotation)}"
        )
    if reason := _array_mismatch(annotation, value):
        frame = sys._getframe(1)
        name = f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
        raise _error(f"{name}() computed a wrong intermediate", annotation, value, reason)
    return value


def host_record(kind: type[Record]) -> type[Record]:
    """Check a dataclass's fields against their annotations when it is made."""
    kind.__init__ = typed(kind.__init__)
    return kind


def record(kind: type[Record]) -> type[Record]:
    """A `host_record` that JAX takes apart and rebuilds unchecked: leaves may be anything.

    As for `jax.tree_util.register_dataclass`, a field with `metadata={"static": True}` is no leaf.
    """
    import jax

    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [field.name for field in fields if not field.metadata.get("static")]
    static = [field.name for field in fields if field.metadata.get("static")]

    def flatten(made):
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(made, name)) for name in names]
        return leaves, tuple(getattr(made, name) for name in static)

    def unflatten(fixed, values):
        made = object.__new__(kind)
        vars(made).update(zip([*names, *static], [*values, *fixed], strict=True))
        return made

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    return host_record(kind)


def _checked(function: Callable[..., Any]) -> Callable[..., tuple[Any, Exception | None]]:
    """The function in its own jaxtyping scope; returns its result and the error that it raised.

    `jaxtyped` adds a note to exceptions that pass through it, which would hide the reason.
    """
    _program_context()
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    # in signature order, which is the order in which sizes are bound
    kinds = {
        name: parameter.kind for name, parameter in signature.parameters.items() if name in hints
    }
    subject = f"{function.__module__}.{function.__qualname__}()"
    own_names = set(
        re.findall(r"\w+", re.sub(r"\{[^}]*\}", "", " ".join(map(str, hints.values()))))
    )

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
        __tracebackhide__ = True
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        symbols = SYMBOLS.get() or _symbols_in(bound.arguments.values(), own_names)
        for name, size in symbols.items():  # jaxtyping binds them as it binds sizes
            _jaxtyping_mismatch(Shaped[Any, name], _fake_array(size))
        for name, kind in kinds.items():
            values = bound.arguments[name]
            if kind is inspect.Parameter.VAR_KEYWORD:
                values = values.values()
            elif kind is not inspect.Parameter.VAR_POSITIONAL:
                values = (values,)
            for value in values:
                if reason := _mismatch(hints[name], value):
                    what = f"{subject} got a wrong argument `{name}`"
                    return None, _error(what, hints[name], value, reason)
        try:
            if watches := _WATCHES.get():
                result = _watched(watches, function, bound, hints)
            else:
                result = function(*args, **kwargs)
        except Exception as error:
            return None, error
        if reason := _mismatch(hints.get("return", Any), result):
            what = f"{subject} returned a wrong result"
            return None, _error(what, hints["return"], result, reason)
        return result, None

    call.__signature__ = signature  # type: ignore[attr-defined]  # of what braces may name
    return jaxtyped(call, typechecker=None)


def _watched(
    watches: tuple[Watch, ...],
    function: Callable[..., Any],
    bound: inspect.BoundArguments,
    hints: dict[str, Any],
) -> Any:
    """Call a function; tell the watches, and let them replace the result."""
    path, modules = _placed(bound.arguments.get("self"))
    name = "" if function.__name__ == "__call__" else function.__name__
    whole = ".".join(filter(None, (path, name)))
    call = TypedCall(whole, function, bound.arguments, hints)
    _note_program()
    with _unwatched():  # what a watcher calls itself isn't heard
        leaves = [watch(call) for watch in watches]
    for leave in leaves:
        if not (leave is None or callable(leave)):
            raise TypeError(f"a watch returns a function of the result, not {_described(leave)}")
    with holding(_PLACE, (path, modules)):
        result = function(*bound.args, **bound.kwargs)
    with _unwatched():
        for leave in reversed(leaves):
            result = result if leave is None else leave(result)
    return result


def _placed(module: Any) -> _Place:
    """The path of a module (of the calling module, for a function), and all known modules."""
    from flax import nnx

    path, modules = _PLACE.get()
    if not isinstance(module, nnx.Module):
        return path, modules
    if id(module) not in modules:
        found = (
            (".".join(map(str, (path, *at) if path else at)), it)
            for at, it in nnx.iter_modules(module)
        )
        modules = modules | {id(it): (at, it) for at, it in found}
    return modules[id(module)][0], modules


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


@functools.cache
def _of_leaf(hint: Any, suffix: str) -> Any:
    """An array annotation for one leaf: `?size` becomes `size_LEAF`."""
    dimensions = re.sub(r"\?(\*?\w+)", rf"\1{suffix}", hint.dim_str)
    return hint.dtype[hint.array_type, dimensions]


def _is_shaped(value: Any) -> bool:
    """Whether a value is like an array: `nnx.Rngs` has every attribute."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


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


def _error(what: str, hint: Any, value: Any, reason: str) -> TypeCheckError:
    expected = _spelled(hint)
    sizes = ", ".join(f"{name}={size}" for name, size in _sizes(expected))
    return TypeCheckError(
        f"{what}.\n"
        f"Expected: {expected}{' with ' if sizes else ''}{sizes}\n"
        f"Got: {_described(value)}\n"
        f"Reason: {reason.rstrip('.')}."
    )


def _spelled(hint: Any) -> str:
    """An annotation as it is written in source, without module names."""
    if hint is types.NoneType:
        return "None"
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"('[^']*')|\b(?:\w+\.)+(?=\w)", lambda match: match[1] or "", text)
    return text.replace("'", '"')


class _Shapes(reprlib.Repr):
    """Formats arrays, in containers too, as dtype and shape; other objects as their class."""

    def repr1(self, x: Any, level: int) -> str:
        if _is_shaped(x):
            return f"{x.dtype}[{','.join(map(str, x.shape))}]"
        if type(x).__module__ != "builtins":
            return f"{type(x).__name__} object"
        return super().repr1(x, level)


_described = _Shapes().repr


_IMPOSSIBLE_SIZE = np.broadcast_to(np.False_, 987_654_321)  # one byte of memory


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
