"""Calls of typed functions: their paths, and those who watch them."""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from jaxtyping import config

from jgpt.shapes.describe import _described

Value = TypeVar("Value")


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
