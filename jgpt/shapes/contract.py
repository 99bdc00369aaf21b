"""The shape contract: `@typed`, `check` and records.

Shapes are checked when a function is traced or called eagerly, never inside a compiled step.
`JAXTYPING_DISABLE=1` in the environment switches every check off.
"""

import dataclasses
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jaxtyping import Shaped, TypeCheckError, config, jaxtyped

from jgpt.shapes.calls import _WATCHES, _program_context, _watched
from jgpt.shapes.describe import _described, _spelled, is_array
from jgpt.shapes.matching import (
    SYMBOLS,
    _array_mismatch,
    _fake_array,
    _jaxtyping_mismatch,
    _mismatch,
    _sizes,
    _symbols_in,
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Record = TypeVar("Record")


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


def _error(what: str, hint: Any, value: Any, reason: str) -> TypeCheckError:
    expected = _spelled(hint)
    sizes = ", ".join(f"{name}={size}" for name, size in _sizes(expected))
    return TypeCheckError(
        f"{what}.\n"
        f"Expected: {expected}{' with ' if sizes else ''}{sizes}\n"
        f"Got: {_described(value)}\n"
        f"Reason: {reason.rstrip('.')}."
    )
