"""Calls of typed functions: their paths, and the watchers of calls."""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from jaxtyping import config

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class TypedCall:
    """A call of a `@typed` function, the argument of a watcher."""

    path: str
    """The module's path in the outermost module, followed by the method or function, unless the
    call is the module's own: `blocks.1.attention`, `blocks.1.attention.merge_heads`, `hidden`. The
    path of the model itself is empty."""
    function: Callable[..., Any]
    arguments: dict[str, Any]
    """The arguments by name, with `self` and defaults."""
    annotations: dict[str, Any]
    """The annotations by name; that of the result is `return`."""
    kept: list[Any] = dataclasses.field(repr=False)
    """The list that `watching` returned, or within a block the list of that block."""

    def keep(self, value: Any) -> None:
        """Append `value`, an array or a number, to the list that `watching` returned.

        Under `jit` a value of a block that is scanned or rematerialised exists only in that block.
        A value that is kept becomes one of the block's results, so that code outside can read it:
        a loss, for example. The values of a scan are appended layer by layer, as in a loop over
        the blocks.
        """
        self.kept.append(value)


Watch = Callable[[TypedCall], Callable[[Any], Any] | None]


@dataclasses.dataclass(frozen=True)
class _Watcher:
    """A function that is called before each typed call, and the values that it kept."""

    watch: Watch
    kept: list[Any]


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of calls: the path of the calling module, and the modules whose paths are known."""

    path: str
    modules: dict[int, tuple[str, Any]]
    """Path and module by the module's id. The module is stored so that no other can get its id."""


@dataclasses.dataclass(eq=False)
class _ProgramKey:
    """A part of the key of JAX's compiled programs while a watcher is active."""

    is_used: bool = False
    """Whether a program traced in this time may contain results that a watcher replaced."""


_WATCHERS: ContextVar[tuple[_Watcher, ...]] = ContextVar("watchers", default=())
_PLACE: ContextVar[_Place] = ContextVar("place", default=_Place("", {}))  # noqa: B039  never changed
_INNERMOST: ContextVar[tuple[_ProgramKey, Any] | None] = ContextVar("innermost", default=None)
"""The key of the innermost watcher, and JAX's trace when it began."""
_UNUSED_KEYS: list[_ProgramKey] = []
"""Keys for which no program contains a typed call.

A new key for each `watching` would compile JAX's own operations each time, which takes seconds for
an eager model.
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
def watching(watch: Watch) -> Iterator[list[Any]]:
    """Call `watch` before each `@typed` call on this thread.

    It may return a function of the result. The value of that function replaces the result, and is
    checked like any other. Among nested watchers, the outer one is called first, and the inner one
    receives the result first. A program that `jit` compiled before is traced again within each
    `watching`, so `watch` is called once for each of its calls. A replacement ends with the block.
    A scan over the blocks and rematerialisation trace one block, whose path is `blocks.*`. The list
    that the context returns has the values that `watch` keeps by `TypedCall.keep`. Raises
    ValueError if checks are switched off.
    """
    if config.jaxtyping_disable or not __debug__:
        raise ValueError("watching needs the shape checks, which are switched off")
    from jax.extend.core import get_opaque_trace_state

    # Popping is atomic, so two threads never share a key, nor each other's programs.
    try:
        key = _UNUSED_KEYS.pop()
    except IndexError:
        key = _ProgramKey()
    watcher = _Watcher(watch, [])
    try:
        with (
            program_context()(key),
            set_context(_INNERMOST, (key, get_opaque_trace_state())),
            set_context(_WATCHERS, (*_WATCHERS.get(), watcher)),
        ):
            yield watcher.kept
    finally:
        # The programs of a used key contain replaced results and must not be found again.
        if not key.is_used:
            _UNUSED_KEYS.append(key)


def is_watched() -> bool:
    """Return whether a watcher is active for typed calls on this thread."""
    return bool(_WATCHERS.get())


@contextlib.contextmanager
def keeping_apart() -> Iterator[list[list[Any]]]:
    """Return the values that are kept in the block, a list for each watcher.

    A transformation returns them as results, and what calls it gives them to `keep_all`.
    """
    # Lists of their own, since a tracer in the outer list would outlive its transformation.
    watchers = [dataclasses.replace(watcher, kept=[]) for watcher in _WATCHERS.get()]
    with set_context(_WATCHERS, tuple(watchers)):
        yield [watcher.kept for watcher in watchers]


def keep_all(kept: list[list[Any]]) -> None:
    """Give each watcher the values that it kept in a transformation."""
    for watcher, values in zip(_WATCHERS.get(), kept, strict=True):
        watcher.kept.extend(values)


def call_watched(
    function: Callable[..., Any], bound: inspect.BoundArguments, hints: dict[str, Any]
) -> Any:
    """Call a function, with the watchers called before it and their replacements applied to its
    result."""
    watchers = _WATCHERS.get()
    place_of_call = module_path_of(bound.arguments.get("self"))
    path = place_of_call.path
    # The path of a module's own call is that of the module.
    if function.__name__ != "__call__":
        path = f"{path}.{function.__name__}".removeprefix(".")
    _note_program()
    # otherwise a watcher that calls typed functions would watch itself without end
    replacements = []
    with _unwatched():
        for watcher in watchers:
            call = TypedCall(path, function, bound.arguments, hints, watcher.kept)
            replacements.append(watcher.watch(call))

    # From here on, calls inside have paths.
    with set_context(_PLACE, place_of_call):
        result = function(*bound.args, **bound.kwargs)

    with _unwatched():
        for replace in reversed(replacements):  # the inner watcher receives the result first
            if replace is not None:
                result = replace(result)
    return result


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Disable watchers in the block, and keep its programs apart from those of a watcher."""
    with (
        program_context()(None),  # the key of programs that nobody watched
        set_context(_INNERMOST, None),
        set_context(_WATCHERS, ()),
    ):
        yield


# --- compiled programs ---------------------------------------------------------------------------


def program_context() -> Any:
    """Return JAX's context that is a part of the key of compiled programs.

    It is made at the first typed call; programs from before are compiled again.
    """
    # With `functools.cache` alone, two threads could make two contexts and lose one of them.
    with _CONTEXT_LOCK:
        return _make_program_context()


@functools.cache
def _make_program_context() -> Any:
    import jax

    return jax.make_user_context(None)


def _note_program() -> None:
    """Note for the innermost watcher whether a typed call is in a program that JAX may cache."""
    from jax.extend import core

    innermost = _INNERMOST.get()
    assert innermost is not None
    key, trace_outside = innermost
    if key.is_used:
        return
    # In the trace in which the watching began, no program has been begun within it.
    if core.get_opaque_trace_state() == trace_outside:
        return
    # Another trace may be that of an eager vmap or gradient, which caches nothing.
    key.is_used = core.unsafe_am_i_under_a_jit_DO_NOT_USE()  # pyright: ignore[reportPrivateImportUsage]


# --- paths ---------------------------------------------------------------------------------------


def place(path: str) -> contextlib.AbstractContextManager[None]:
    """Set the path of modules outside the outermost one, such as copies in a transformation."""
    return set_context(_PLACE, _Place(path, _PLACE.get().modules))


def called_in(module: Any) -> contextlib.AbstractContextManager[None]:
    """Set the outermost module, for calls of its methods and parts."""
    return set_context(_PLACE, module_path_of(module))


def module_path_of(module: Any) -> _Place:
    """Return the path of a module (for a function: of its caller), and all known modules."""
    from flax import nnx

    current = _PLACE.get()
    if not isinstance(module, nnx.Module):
        return current
    modules = current.modules
    if id(module) not in modules:
        # The outermost module, or a copy that a transformation made, whose parts are new.
        modules = dict(modules)
        for keys, part in nnx.iter_modules(module):
            names = list(map(str, keys))  # the key of a module in a list is a number
            if current.path:  # that of the module that makes the call, or of `place`
                names.insert(0, current.path)
            modules[id(part)] = (".".join(names), part)
    path, _ = modules[id(module)]
    return _Place(path, modules)
