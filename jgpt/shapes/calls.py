"""Calls of typed functions: their paths, and the watchers of calls."""

import contextlib
import dataclasses
import inspect
import sys
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
    call is the module's own: `blocks.1.attention`, `blocks.1.attention.merge_heads`, `hidden`;
    `final_norm.__call__` is the call of a base class in it. The path of the outermost module is
    empty, and so is that of another library's module."""
    function: Callable[..., Any]
    arguments: dict[str, Any]
    """The arguments by name, with `self` and defaults."""
    annotations: dict[str, Any]
    """The annotations by name; that of the result is `return`."""
    kept: list[Any] = dataclasses.field(repr=False)
    """The list that `watching` returned, or within a block the list of that block."""

    @property
    def name(self) -> str:
        """The path, or the class of a module whose path is empty: `GPT`."""
        if self.path or "self" not in self.arguments:
            return self.path or self.function.__name__
        return type(self.arguments["self"]).__name__

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
    trace: Any
    """JAX's trace in which the watching began."""
    program: Any
    """The program whose trace that is part of, or None where JAX computes at once."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of calls: the path of the calling module, and the modules whose paths are known."""

    path: str
    modules: dict[int, tuple[str, Any]]
    """Path and module by the module's id. The module is stored so that no other can get its id."""
    called: Any = None
    """The module whose own call is running, in which `super().__call__` is a function."""


_WATCHERS: ContextVar[tuple[_Watcher, ...]] = ContextVar("watchers", default=())
_PLACE: ContextVar[_Place] = ContextVar("place", default=_Place("", {}))  # noqa: B039  never changed


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
    receives the result first. Inside `jit`, a call is watched when it is traced: a program that
    JAX has cached is not watched. A scan over the blocks and rematerialisation trace one block,
    whose path is `blocks.*`. The list that the context returns has the values that `watch` keeps by
    `TypedCall.keep`. Raises ValueError if checks are switched off, and for a replacement in a
    program that is begun within the block, which JAX would cache; `jgpt.edit` has no such limit.
    """
    if config.jaxtyping_disable or not __debug__:
        raise ValueError("watching needs the shape checks, which are switched off")
    from jax.extend.core import get_opaque_trace_state

    watcher = _Watcher(watch, [], get_opaque_trace_state(), _current_program())
    with set_context(_WATCHERS, (*_WATCHERS.get(), watcher)):
        yield watcher.kept


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
    module = bound.arguments.get("self")
    place_of_call = module_path_of(module)
    path = place_of_call.path
    is_super = module is not None and _PLACE.get().called is module
    is_call = function.__name__ == "__call__"
    if is_call:
        place_of_call = dataclasses.replace(place_of_call, called=module)
    # The path of a module's own call is that of the module.
    if is_super or not is_call:
        path = f"{path}.{function.__name__}".removeprefix(".")
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
        # The inner watcher receives the result first.
        for watcher, replace in reversed(list(zip(watchers, replacements, strict=True))):
            if replace is None:
                continue
            replaced = replace(result)
            if replaced is not result and _is_in_program_within(watcher):
                raise ValueError(
                    f"{path or function.__name__} is called in a program that JAX caches (of jit, "
                    f"scan or checkpoint), where its result can't be replaced"
                )
            result = replaced
    return result


def _unwatched() -> contextlib.AbstractContextManager[None]:
    """Disable watchers in the block."""
    return set_context(_WATCHERS, ())


def _is_in_program_within(watcher: _Watcher) -> bool:
    """Return whether a program is being made that was begun after the watching.

    JAX caches it, and would run it with its replacements when nobody watches any more.
    """
    from jax.extend import core

    if core.get_opaque_trace_state() == watcher.trace:
        return False
    if not core.unsafe_am_i_under_a_jit_DO_NOT_USE():  # pyright: ignore[reportPrivateImportUsage]
        return False
    return _current_program() is not watcher.program


def _current_program() -> Any:
    """Return the trace of the program that is being made, or None.

    Within `vmap` and `grad` it is that of the program around them, since they make none.
    """
    import jax.numpy as jnp

    # A constant is traced by a program alone. Tracers have no public link to their trace.
    return getattr(jnp.zeros(()) + 0, "_trace", None)


# --- paths ---------------------------------------------------------------------------------------


def is_nnx(value: Any, kind: str) -> bool:
    """Return whether a value is a Module or a Variable of Flax NNX. It isn't imported for this."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, getattr(nnx, kind))


def place(path: str) -> contextlib.AbstractContextManager[None]:
    """Set the path of modules outside the outermost one, such as copies in a transformation."""
    return set_context(_PLACE, _Place(path, _PLACE.get().modules))


def called_in(module: Any) -> contextlib.AbstractContextManager[None]:
    """Set the outermost module, for calls of its methods and parts."""
    return set_context(_PLACE, module_path_of(module))


def module_path_of(module: Any) -> _Place:
    """Return the path of a module (for a function: of its caller), and all known modules."""
    current = _PLACE.get()
    if not is_nnx(module, "Module"):
        return current

    from flax import nnx

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
