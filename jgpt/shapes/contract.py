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
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from jaxtyping import TypeCheckError, config, jaxtyped

from jgpt.shapes.calls import call_watched, is_watched, program_context
from jgpt.shapes.describe import describe_annotation, describe_value, is_array
from jgpt.shapes.matching import (
    SYMBOLS,
    array_mismatch,
    bind_size,
    bound_sizes,
    mismatch,
    symbols_in,
)
from jgpt.shapes.memo import NO_KEY, Memo, RememberedCall

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Record = TypeVar("Record")
_CheckedCall = Callable[..., tuple[Any, Exception | None]]
_Bind = Callable[[Any, Any], inspect.BoundArguments]


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check a function's arguments and result against its annotations, shapes included.

    Use it on functions and methods, never on classes, and as the innermost decorator.
    A mismatch raises `jaxtyping.TypeCheckError`, a `TypeError` whose last line is the reason.
    """
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"@typed is for functions and methods, not for {function!r}")

    # annotations are resolved at the first call, so that imports stay cheap
    @functools.cache
    def checked() -> tuple[_Bind, _CheckedCall]:
        return _checked(function)

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        if config.jaxtyping_disable or not __debug__:
            return function(*args, **kwargs)
        bind, check_and_call = checked()
        try:
            bound = bind(args, kwargs)
        except TypeError as misfit:  # its message doesn't name the function
            raise TypeError(f"{function.__qualname__}() {misfit}") from None
        result, error = check_and_call(bound, args, kwargs)
        # Raised here, outside of `jaxtyped`, which would add a note below the reason.
        if error is not None:
            raise error
        return result

    # A test reads it from every callable of the package, so that none is left out.
    wrapper.__shape_checked__ = True  # type: ignore[attr-defined]
    return wrapper


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
    reason = array_mismatch(annotation, value)
    if reason:
        frame = sys._getframe(1)  # the caller of `check`
        name = f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
        raise _error(f"{name}() computed a wrong intermediate", annotation, value, reason)
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


def _checked(function: Callable[..., Any]) -> tuple[_Bind, _CheckedCall]:
    """Return a function that binds arguments, and the function in its own jaxtyping scope.

    The latter gets bound arguments, and returns the result and the error that it raised.

    `jaxtyped` adds a note to exceptions that pass through it, which would hide the reason.
    """
    # Programs that were compiled outside this context would be compiled again inside it.
    program_context()
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    subject = f"{function.__module__}.{function.__qualname__}()"
    own_names = _dimension_names(hints)
    memo = Memo(signature, hints)

    def check_arguments(
        bound: inspect.BoundArguments,
    ) -> tuple[RememberedCall | None, Exception | None]:
        """Bind the sizes of the arguments; check them, unless a call like this one has passed."""
        key = NO_KEY
        if not SYMBOLS.get():  # open sizes have no keys
            key = memo.key(bound.arguments)
        known = memo.find(key)
        if known is not None:
            known.bind_sizes()
            return known, None
        has_symbols = _bind_symbols(bound, own_names)
        error = _argument_error(subject, bound, hints)
        if error is None and key is not NO_KEY and not has_symbols:
            known = memo.remember(key, bound.arguments)
        return known, error

    def check_result(
        result: Any, known: RememberedCall | None, bound: inspect.BoundArguments
    ) -> Exception | None:
        # A good result is remembered with its call, against whose sizes it was checked.
        key = NO_KEY
        if known is not None:
            key = memo.result_key(result, bound.arguments)
            if key in known.results:
                return None
        reason = mismatch(hints.get("return", Any), result)
        if reason:
            what = f"{subject} returned a wrong result"
            return _error(what, hints["return"], result, reason)
        if known is not None:
            known.remember_result(key)
        return None

    def check_and_call(
        bound: inspect.BoundArguments, args: Any, kwargs: Any
    ) -> tuple[Any, Exception | None]:
        __tracebackhide__ = True
        known, wrong_argument = check_arguments(bound)
        if wrong_argument is not None:
            return None, wrong_argument
        try:
            if is_watched():
                result = call_watched(function, bound, hints)
            else:
                result = function(*args, **kwargs)
        except Exception as error:
            return None, error
        return result, check_result(result, known, bound)

    # jaxtyping reads from it which names braces may contain.
    check_and_call.__signature__ = _BoundSignature()  # type: ignore[attr-defined]
    return _binder(signature), jaxtyped(check_and_call, typechecker=None)


def _binder(signature: inspect.Signature) -> _Bind:
    """Return a function that binds arguments and applies defaults, as the signature does.

    `Signature.bind` and `apply_defaults` took 6 of the 14 microseconds of a remembered call, so
    functions with named parameters alone are bound here. Raises the signature's TypeError for a
    misfit.
    """

    def bind_slowly(args: Any, kwargs: Any) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _Bound(signature, bound.arguments)

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

    def bind(args: Any, kwargs: Any) -> inspect.BoundArguments:
        if len(args) > len(positional):
            by_name = names[len(positional) :]
            if by_name:
                raise TypeError(
                    f"too many positional arguments: give {', '.join(by_name)} by name, as in "
                    f"{by_name[0]}=..."
                )
            return bind_slowly(args, kwargs)
        arguments = dict(zip(positional, args, strict=False))
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
        return _Bound(signature, arguments)  # type: ignore[arg-type]  a dict, as bind makes

    return bind


class _Bound(inspect.BoundArguments):
    """Bound arguments that have their defaults already, which jaxtyping would apply again."""

    __slots__ = ()

    def apply_defaults(self) -> None:
        pass


class _BoundSignature(inspect.Signature):
    """The signature of a function that gets the arguments of another, already bound.

    Binding takes as long as the check of an array, and jaxtyping would do it a second time.
    """

    def bind(  # type: ignore[override]
        self, bound: inspect.BoundArguments, args: Any, kwargs: Any
    ) -> inspect.BoundArguments:
        return bound


def _dimension_names(hints: dict[str, Any]) -> set[str]:
    """Return all words in the annotations outside braces, which include the names of dimensions."""
    text = " ".join(map(str, hints.values()))
    outside_braces = re.sub(r"\{[^}]*\}", "", text)
    return set(re.findall(r"\w+", outside_braces))


def _bind_symbols(bound: inspect.BoundArguments, own_names: set[str]) -> bool:
    """Bind the symbols of a proof, or those in the arguments, so that braces may name them.

    Return whether there are any.
    """
    symbols = SYMBOLS.get()
    if not symbols:  # the usual case; then only `jax.export` has symbols
        symbols = symbols_in(bound.arguments.values(), own_names)
    for name, size in symbols.items():
        bind_size(name, size)
    return bool(symbols)


def _argument_error(
    subject: str, bound: inspect.BoundArguments, hints: dict[str, Any]
) -> TypeCheckError | None:
    """Return the error of the first argument that does not match, or None.

    This binds sizes in the order of the signature.
    """
    for name, parameter in bound.signature.parameters.items():
        if name not in hints:
            continue
        match parameter.kind:
            case inspect.Parameter.VAR_POSITIONAL:
                values = bound.arguments[name]
            case inspect.Parameter.VAR_KEYWORD:
                values = bound.arguments[name].values()
            case _:
                values = (bound.arguments[name],)
        for value in values:
            reason = mismatch(hints[name], value)
            if reason:
                what = f"{subject} got a wrong argument `{name}`"
                return _error(what, hints[name], value, reason)
    return None


def _error(what: str, hint: Any, value: Any, reason: str) -> TypeCheckError:
    """Make an error of four lines: the subject, the expected annotation, the value, and the
    reason."""
    expected = describe_annotation(hint)
    sizes = [f"{name}={size}" for name, size in bound_sizes(expected)]
    if sizes:
        expected += f" with {', '.join(sizes)}"
    return TypeCheckError(
        f"{what}.\n"
        f"Expected: {expected}\n"
        f"Got: {describe_value(value)}\n"
        f"Reason: {reason.rstrip('.')}."
    )
