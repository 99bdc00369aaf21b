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

from jgpt.shapes.describe import describe_value

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


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where calls are: the path of the calling module, and the modules whose paths are known."""

    path: str
    modules: dict[int, tuple[str, Any]]
    """Path and module by the module's id. It holds the module, so that no other gets its id."""


@dataclasses.dataclass(eq=False)
class _ProgramKey:
    """What JAX's compiled programs are cached by while something watches."""

    is_used: bool = False
    """Whether a program that was traced meanwhile may hold what a watcher replaced."""


_WATCHES: ContextVar[tuple[Watch, ...]] = ContextVar("watches", default=())
_PLACE: ContextVar[_Place] = ContextVar("place", default=_Place("", {}))  # noqa: B039  never changed
_INNERMOST: ContextVar[tuple[_ProgramKey, Any] | None] = ContextVar("innermost", default=None)
"""The key of the innermost watcher, and JAX's trace when it began."""
_UNUSED_KEYS: list[_ProgramKey] = []
"""Keys of which no program holds a typed call.

A new key for each `watching` would compile JAX's own operations anew each time, which takes seconds
for an eager model.
"""
_CONTEXT_LOCK = threading.Lock()


@contextlib.contextmanager
def set_context(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Set a context variable for the block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


# --- watching ------------------------------------------------------------------------------------


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Call `watch` before every typed call of this thread.

    It may return a function of the result. What that returns replaces the result, and is checked
    like any other. Of nested watchers the outer one is called first, and the inner one sees the
    result first. A program that `jit` compiled before is traced anew within each `watching`, so
    `watch` is called once for each of its calls. A replacement ends with the block. A scan over the
    blocks and rematerialisation trace one block, whose path is `blocks.*`.
    Raises ValueError where checks are switched off.
    """
    if not callable(watch):
        raise TypeError(f"watching needs a function of a TypedCall, not {describe_value(watch)}")
    if config.jaxtyping_disable or not __debug__:
        raise ValueError("watching needs the shape checks, which are switched off")
    from jax.extend.core import get_opaque_trace_state

    # popping is atomic: two threads never share a key, and so never each other's programs
    try:
        key = _UNUSED_KEYS.pop()
    except IndexError:
        key = _ProgramKey()
    try:
        with (
            program_context()(key),
            set_context(_INNERMOST, (key, get_opaque_trace_state())),
            set_context(_WATCHES, (*_WATCHES.get(), watch)),
        ):
            yield
    finally:
        # the programs of a used key hold replaced results, and must not be found again
        if not key.is_used:
            _UNUSED_KEYS.append(key)


def is_watched() -> bool:
    """Return whether something watches the typed calls of this thread."""
    return bool(_WATCHES.get())


def call_watched(
    function: Callable[..., Any], bound: inspect.BoundArguments, hints: dict[str, Any]
) -> Any:
    """Call a function; tell the watches, and let them replace the result."""
    watches = _WATCHES.get()
    place_of_call = module_path_of(bound.arguments.get("self"))
    path = place_of_call.path
    # a module's own call has the module's path
    if function.__name__ != "__call__":
        path = f"{path}.{function.__name__}".removeprefix(".")
    call = TypedCall(path, function, bound.arguments, hints)

    _note_program()
    with _unwatched():  # or a watcher that calls typed functions would watch itself without end
        replacements = [watch(call) for watch in watches]
    for replace in replacements:
        if replace is not None and not callable(replace):
            raise TypeError(
                f"a watch returns a function of the result, not {describe_value(replace)}"
            )

    # calls inside have paths from here on
    with set_context(_PLACE, place_of_call):
        result = function(*bound.args, **bound.kwargs)

    with _unwatched():
        for replace in reversed(replacements):  # the inner watcher sees the result first
            if replace is not None:
                result = replace(result)
    return result


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Nothing watches in the block, and its programs are not those of a watcher."""
    with (
        program_context()(None),
        set_context(_INNERMOST, None),
        set_context(_WATCHES, ()),
    ):
        yield


# --- compiled programs ---------------------------------------------------------------------------


def program_context() -> Any:
    """JAX's context that compiled programs are cached by.

    Made at the first typed call: programs from before it are compiled anew.
    """
    # `functools.cache` alone lets two threads make two contexts, of which one would be forgotten
    with _CONTEXT_LOCK:
        return _make_program_context()


@functools.cache
def _make_program_context() -> Any:
    import jax

    return jax.make_user_context(None)


def _note_program() -> None:
    """Note if a typed call is in a program that JAX may cache, for the innermost watcher."""
    from jax.extend import core

    innermost = _INNERMOST.get()
    assert innermost is not None
    key, trace_outside = innermost
    if key.is_used or core.get_opaque_trace_state() == trace_outside:
        return
    # an eager vmap or gradient caches nothing
    key.is_used = core.unsafe_am_i_under_a_jit_DO_NOT_USE()  # pyright: ignore[reportPrivateImportUsage]


# --- paths ---------------------------------------------------------------------------------------


def place(path: str) -> contextlib.AbstractContextManager[None]:
    """Set the path of modules outside the outermost one, such as copies in a transformation."""
    return set_context(_PLACE, _Place(path, _PLACE.get().modules))


def called_in(module: Any) -> contextlib.AbstractContextManager[None]:
    """Set the outermost module, for calls of its methods and parts."""
    return set_context(_PLACE, module_path_of(module))


def module_path_of(module: Any) -> _Place:
    """Return the path of a module (of the calling module, for a function), and all known
    modules."""
    from flax import nnx

    current = _PLACE.get()
    if not isinstance(module, nnx.Module):
        return current
    modules = current.modules
    if id(module) not in modules:
        # the outermost module, or a copy that a transformation made of one: its parts are new
        modules = dict(modules)
        for keys, part in nnx.iter_modules(module):
            names = [str(key) for key in keys]
            if current.path:
                names.insert(0, current.path)
            modules[id(part)] = (".".join(names), part)
    path, _ = modules[id(module)]
    return _Place(path, modules)
