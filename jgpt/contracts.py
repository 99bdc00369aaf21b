"""The shape contract: `@typed`, `check`, `record`, and the legend of dimension names.

Shapes are checked when a function is traced or called eagerly, never inside a compiled step.
`JAXTYPING_DISABLE=1` in the environment switches every check off.
"""

import contextlib
import functools
import inspect
import io
import re
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray, TypeCheckError, config, jaxtyped, print_bindings

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

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True, is_color=False))  # 0 is a valid float


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check a function's arguments and result against its annotations, shapes included.

    Use it on functions and methods, never on classes, and as the innermost decorator.
    A mismatch raises `jaxtyping.TypeCheckError`, a `TypeError` whose last line is the reason.
    """
    signature = inspect.signature(function)
    explained = functools.partial(_explained, f"{function.__module__}.{function.__qualname__}()")
    hints = [signature.return_annotation, *(p.annotation for p in signature.parameters.values())]
    # without arrays there are no sizes to bind, and no reason to import jax
    checked: Callable[..., Result] = (
        jaxtyped(function, typechecker=explained)
        if any(map(_holds_arrays, hints))
        else explained(function)
    )

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        try:
            return checked(*args, **kwargs)
        except (TypeCheckError, BeartypeCallHintViolation) as error:
            if complaint := _complaint_of(error):
                raise TypeCheckError(complaint) from None
            raise
        except TypeError:
            _require_binding(function, signature, args, kwargs)
            raise

    wrapper.__shape_checked__ = True  # type: ignore[attr-defined]
    return wrapper


def check(value: Result, annotation: Any) -> Result:
    """Check an intermediate against the sizes bound by the enclosing `@typed` call; return it.

    `annotation` is one array annotation, such as `Float[Array, "batch time {self.embed_dim}"]`.
    """
    if config.jaxtyping_disable or not __debug__:
        return value
    if reason := annotation.__instancecheck_str__(value):
        frame = sys._getframe(1)
        subject = (
            f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}() computed a wrong "
            "intermediate"
        )
        reason = _in_plain_words(reason, annotation, value)
        raise TypeCheckError(_complaint(subject, annotation, value, frame.f_locals, reason))
    return value


def record(kind: type[Record]) -> type[Record]:
    """Check a dataclass's fields against their annotations when it is made."""
    kind.__init__ = typed(kind.__init__)
    return kind


def pytree(kind: type[Record]) -> type[Record]:
    """Let JAX take a record apart, and rebuild it unchecked: in a tree, leaves may be anything."""
    import jax

    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    def flatten(made):
        return [(jax.tree_util.GetAttrKey(name), getattr(made, name)) for name in names], None

    def unflatten(_, values):
        made = object.__new__(kind)
        vars(made).update(zip(names, values, strict=True))
        return made

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    return kind


def _holds_arrays(hint: Any) -> bool:
    # jaxtyping's PyTree has no public base class, and lives where its arrays do
    return getattr(hint, "__module__", None) == "jaxtyping" or any(
        map(_holds_arrays, get_args(hint))
    )


def _explained(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Beartype, with a complaint for people noted on its errors while the sizes are bound."""
    checked, signature = _beartype(function), inspect.signature(function)

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation as violation:
            message = str(violation)
            reason = re.sub(r'<\w+ "([^"]*)">', r"\1", message.partition(", as ")[2].strip())
            blamed = re.search(r" parameter (\w+)=", message.partition(" violates ")[0])
            try:
                arguments = signature.bind(*args, **kwargs).arguments
                if blamed:
                    subject = f"{where} was given a wrong {blamed[1]}"
                    hint, value = signature.parameters[blamed[1]].annotation, arguments[blamed[1]]
                else:
                    subject = f"{where} returned a wrong result"
                    hint = signature.return_annotation
                    # where jaxtyping hands its typechecker the result
                    value = arguments.get("ret0", violation.culprits[0])
            except (KeyError, TypeError):
                raise violation from None
            reason = _reason(hint, value) or reason
            violation.add_note(_complaint(subject, hint, value, arguments, reason))
            raise

    return explained


def _complaint_of(error: BaseException) -> str | None:
    """The complaint about this very call, below what jaxtyping chains on top of it."""
    below: BaseException | None = error
    while below is not None and not isinstance(below, BeartypeCallHintViolation):
        below = below.__cause__ or (None if below.__suppress_context__ else below.__context__)
    return None if below is None else below.__notes__[0]


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
    """Why a value is not of an annotation that holds arrays, or nothing."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return _in_plain_words(hint.__instancecheck_str__(value), hint, value)
    if get_origin(hint) in (Union, types.UnionType):
        reasons = [_reason(each, value) for each in get_args(hint) if _holds_arrays(each)]
        return reasons[0] if len(reasons) == 1 else ""
    if get_origin(hint) is tuple and len(get_args(hint)) == len(value):
        for i, (each, item) in enumerate(zip(get_args(hint), value, strict=True)):
            if reason := _reason(each, item):
                return f"item {i} is {_described(item)}: {reason}"
    leaf_hint = getattr(hint, "leaftype", None)
    if leaf_hint is not None and "?" not in str(leaf_hint):
        import jax

        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if reason := _reason(leaf_hint, leaf):
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
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_bindings()
    bound = dict(re.findall(r"^(\w+)=(.*)$", printed.getvalue(), re.MULTILINE))
    sizes = {}
    for dimension in re.findall(r"\{[^}]*\}|\w+", " ".join(re.findall(r'"([^"]*)"', expected))):
        if dimension.startswith("{"):
            with contextlib.suppress(Exception):  # what can't be read is the reason, not a size
                sizes[dimension] = eval(dimension[1:-1], {}, dict(arguments))
        elif dimension in bound:
            sizes[dimension] = bound[dimension]
    return sizes


def _require_binding(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Name the function when its arguments don't fit its signature: jaxtyping doesn't."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}() {error}") from None
