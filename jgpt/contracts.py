"""The shape contract: `@typed`, `check`, and the legend of dimension names.

Shapes are checked when a function is traced or called eagerly, never inside a compiled step.
`JAXTYPING_DISABLE=1` in the environment switches every check off.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError, config, jaxtyped

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

LEGEND: dict[str, str] = {
    "batch": "sequences side by side; `*batch` is any number of leading axes",
    "time": "positions in a sequence",
    "query": "positions that ask",
    "key": "positions that answer",
    "head_dim": "features of one head's queries and keys",
    "value_dim": "features of one head's values",
    "heads": "attention heads",
    "embed_dim": "features of the residual stream",
    "vocab": "tokens a model can name",
    "features": "features of all heads side by side",
    "in_features": "features a projection reads",
    "out_features": "features a projection writes",
    "rows": "any leading axes that a projection or a norm leaves alone",
    "steps": "optimizer steps in one call",
    "window": "a block and the target after it",
    "batches": "batches of evaluation windows",
    "tokens": "tokens in a text, a split or a file",
}
"""Every dimension name that an annotation here may use; a module's own sizes are `{self.name}`."""

_check_call = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a valid float


def typed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check a function's arguments and result against its annotations, shapes included.

    Use it on functions and methods, never on classes, and as the innermost decorator.
    A mismatch raises `jaxtyping.TypeCheckError`, a `TypeError` whose last line is the reason.
    """
    checked = jaxtyped(function, typechecker=_check_call)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        try:
            return checked(*args, **kwargs)
        except TypeCheckError as error:
            _put_reason_last(error)
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
    if __debug__ and not config.jaxtyping_disable:
        reason = annotation.__instancecheck_str__(value)
        if reason:
            raise TypeCheckError(
                f"An intermediate is not {annotation.__name__}.\nReason: {reason.rstrip('.')}."
            )
    return value


def _put_reason_last(error: TypeCheckError) -> None:
    """End the message with why: jaxtyping leaves that three chained tracebacks away."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, BeartypeCallHintViolation):
        cause = cause.__cause__
    if cause is not None:
        error.add_note("Reason: " + str(cause).partition(", as ")[2])
        error.__cause__ = None


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
