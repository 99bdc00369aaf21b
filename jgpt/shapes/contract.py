"""The shape contract: `@typed`, `check` and records.

Shapes are checked when a function is traced or called eagerly, never inside a compiled step.
`JAXTYPING_DISABLE=1` in the environment switches every check off.
"""

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from jaxtyping import TypeCheckError, config

from jgpt.shapes.calls import call_watched, is_watched
from jgpt.shapes.describe import describe_annotation, describe_value, is_array
from jgpt.shapes.matching import Match, Scope, known_sizes, matcher

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Record = TypeVar("Record")
_Bind = Callable[[Any, Any], dict[str, Any]]

_NO_SCOPE = Scope({})
_SCOPE: ContextVar[Scope] = ContextVar("scope", default=_NO_SCOPE)
"""The scope of the innermost typed call, which `check` reads."""


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check a function's arguments and result against its annotations, shapes included.

    Use it on functions and methods, never on classes, and as the innermost decorator. The result of
    an async function is checked when it is awaited. A mismatch raises `jaxtyping.TypeCheckError`, a
    `TypeError` whose last line is the reason.
    """
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"@typed is for functions and methods, not for {function!r}")

    # annotations are resolved at the first call, so that imports stay cheap
    @functools.cache
    def contract() -> _Contract:
        return _Contract(function)

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        if config.jaxtyping_disable or not __debug__:
            return function(*args, **kwargs)
        scope, error = contract().scope_of(args, kwargs)
        if error is not None:
            raise error
        # The function is called here: JAX walks the stack at each operation that it traces, so that
        # frames cost more than checks.
        outer = _SCOPE.set(scope)
        result: Any
        try:
            if is_watched():
                result = contract().call_watched(scope)
            else:
                result = function(*args, **kwargs)
        finally:
            _SCOPE.reset(outer)
        if inspect.iscoroutine(result):
            return contract().awaited(result, scope)  # type: ignore[return-value]
        error = contract().error_of_result(result, scope)
        if error is not None:
            raise error
        return result

    # A test reads it from every callable of the package, so that none is left out.
    wrapper.__shape_checked__ = True  # type: ignore[attr-defined]
    return wrapper


class _Contract:
    """The annotations of a function, each read once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._subject = f"{function.__module__}.{function.__qualname__}()"
        self._signature = inspect.signature(function)
        self._hints = typing.get_type_hints(function, include_extras=True)
        self._bind = _binder(self._signature)
        self._arguments: list[tuple[str, Match, Any]] = []
        for name, parameter in self._signature.parameters.items():
            match = matcher(self._hints.get(name, Any))
            if match is not None:
                self._arguments.append((name, match, parameter.kind))
        self._match_result = matcher(self._hints.get("return", Any))

    def scope_of(self, args: Any, kwargs: Any) -> tuple[Scope, TypeCheckError | None]:
        """Return the scope of a call, with the sizes that its arguments bind, and the error of the
        first wrong one.

        This binds sizes in the order of the signature.
        """
        try:
            arguments = self._bind(args, kwargs)
        except TypeError as misfit:  # its message doesn't name the function
            raise TypeError(f"{self._function.__qualname__}() {misfit}") from None
        scope = Scope(arguments)
        for name, match, kind in self._arguments:
            values: Any = (arguments[name],)
            if kind is inspect.Parameter.VAR_POSITIONAL:
                values = arguments[name]
            elif kind is inspect.Parameter.VAR_KEYWORD:
                values = arguments[name].values()
            for value in values:
                reason = match(value, scope)
                if reason:
                    what = f"{self._subject} got a wrong argument `{name}`"
                    return scope, _error(what, self._hints[name], value, reason, scope)
        return scope, None

    def call_watched(self, scope: Scope) -> Any:
        """Call the function with its watchers."""
        bound = inspect.BoundArguments(self._signature, scope.arguments)  # type: ignore[arg-type]
        return call_watched(self._function, bound, self._hints)

    async def awaited(self, result: Any, scope: Scope) -> Any:
        """Await the result of an async function, and check it."""
        __tracebackhide__ = True
        outer = _SCOPE.set(scope)
        try:
            value = await result
        finally:
            _SCOPE.reset(outer)
        error = self.error_of_result(value, scope)
        if error is not None:
            raise error
        return value

    def error_of_result(self, result: Any, scope: Scope) -> TypeCheckError | None:
        """Return the error of a wrong result, or None."""
        if self._match_result is None:
            return None
        reason = self._match_result(result, scope)
        if not reason:
            return None
        what = f"{self._subject} returned a wrong result"
        return _error(what, self._hints["return"], result, reason, scope)


def _binder(signature: inspect.Signature) -> _Bind:
    """Return a function that binds arguments and applies defaults, as the signature does.

    `Signature.bind` and `apply_defaults` take longer than the checks of a call, so functions with
    named parameters alone are bound here. Raises the signature's TypeError for a misfit.
    """

    def bind_slowly(args: Any, kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    positional = []
    names = []
    defaults = {}
    for name, parameter in signature.parameters.items():
        match parameter.kind:
            case inspect.Parameter.POSITIONAL_OR_KEYWORD:
                positional.append(name)
            case inspect.Parameter.KEYWORD_ONLY:
                pass
            case _:
                return bind_slowly
        names.append(name)
        if parameter.default is not inspect.Parameter.empty:
            defaults[name] = parameter.default

    def bind(args: Any, kwargs: Any) -> dict[str, Any]:
        if len(args) > len(positional):
            by_name = names[len(positional) :]
            if by_name:
                raise TypeError(
                    f"too many positional arguments: give {', '.join(by_name)} by name, as in "
                    f"{by_name[0]}=..."
                )
            return bind_slowly(args, kwargs)
        arguments = dict(zip(positional, args, strict=False))
        if len(args) == len(names) and not kwargs:
            return arguments
        keywords = 0
        for name in names[len(args) :]:
            if name in kwargs:
                arguments[name] = kwargs[name]
                keywords += 1
            elif name in defaults:
                arguments[name] = defaults[name]
            else:
                return bind_slowly(args, kwargs)
        # A keyword that no parameter has, or that is given by its position, too.
        if keywords < len(kwargs):
            return bind_slowly(args, kwargs)
        return arguments

    return bind


def check(value: Result, annotation: Any) -> Result:
    """Return an intermediate value, checked against the sizes of the enclosing `@typed` call.

    `annotation` is one array annotation, such as `Float[Array, "batch time {self.embed_dim}"]`.
    """
    if config.jaxtyping_disable or not __debug__:
        return value
    if not is_array(annotation):
        raise TypeError(
            f"check() needs an array annotation, such as Float[Array, 'batch'], "
            f"not {describe_annotation(annotation)}"
        )
    scope = _SCOPE.get()
    match = matcher(annotation)
    assert match is not None  # an array annotation takes no other value
    if scope is _NO_SCOPE:
        scope = Scope({})
    reason = match(value, scope)
    if reason:
        frame = sys._getframe(1)  # the caller of `check`
        name = f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
        raise _error(f"{name}() computed a wrong intermediate", annotation, value, reason, scope)
    return value


def host_record(kind: type[Record]) -> type[Record]:
    """Check a dataclass's fields against their annotations when an instance is made."""
    # Sizes are bound in the order of the fields, and all fields of a record must agree.
    kind.__init__ = typed(kind.__init__)
    return kind


def record(kind: type[Record]) -> type[Record]:
    """Make a dataclass a JAX pytree whose fields are checked when you create an instance.

    JAX rebuilds an instance with any leaves, without a check. As in
    `jax.tree_util.register_dataclass`, a field with `metadata={"static": True}` is no leaf.
    """
    import jax

    dynamic = []
    static = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.metadata.get("static"):
            static.append(field.name)
        else:
            dynamic.append(field.name)

    def flatten(instance: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves = []
        for name in dynamic:
            key = jax.tree_util.GetAttrKey(name)  # the leaf's name in JAX's messages
            leaves.append((key, getattr(instance, name)))
        fixed = [getattr(instance, name) for name in static]
        return leaves, tuple(fixed)

    def unflatten(fixed: tuple[Any, ...], leaves: Iterable[Any]) -> Record:
        # Without `__init__`, whose checks would reject JAX's placeholders for arrays, and through
        # `vars`, since a frozen dataclass lets no attribute be set.
        instance = object.__new__(kind)
        fields = vars(instance)
        fields.update(zip(dynamic, leaves, strict=True))
        fields.update(zip(static, fixed, strict=True))
        return instance

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    return host_record(kind)


def _error(what: str, hint: Any, value: Any, reason: str, scope: Scope) -> TypeCheckError:
    """Make an error of four lines: the subject, the expected annotation, the value, and the
    reason."""
    expected = describe_annotation(hint)
    sizes = known_sizes(expected, scope)
    if sizes:
        expected += f" with {', '.join(sizes)}"
    return TypeCheckError(
        f"{what}.\n"
        f"Expected: {expected}\n"
        f"Got: {describe_value(value)}\n"
        f"Reason: {reason.rstrip('.')}."
    )
