"""Shapes proven for all sizes: an abstract trace for each branch that sizes decide."""

import contextlib
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jaxtyping
from jax.errors import InconclusiveDimensionOperation

from jgpt.shapes.answers import Asked, Note, OpenQuestion, answering, is_program
from jgpt.shapes.calls import set_context
from jgpt.shapes.contract import typed
from jgpt.shapes.matching import SIZE_FUNCTIONS, SYMBOLS
from jgpt.shapes.sight import SightProof, Sizes, prove_sight
from jgpt.shapes.sizes import (
    Size,
    is_open,
    make_scope,
    make_shape,
    names_in,
    parse_array,
    require_readable,
    restore_names,
    split_question,
)

MOST_CASES = 60
"""The limit of cases, since a program that branches at each of `t` positions would split for
ever."""
UNSEEN = "what the type or identity of a size decides, or an error of JAX that is caught"
"""What a size is not asked for, so that no proof covers it."""
_LOCK = threading.RLock()
"""Held by the thread of a proof, for which methods of JAX's class of sizes are replaced."""


@dataclass(frozen=True)
class Case:
    """Constraints on the sizes, and the verdict under them."""

    where: tuple[str, ...]
    verdict: Literal["proven", "rejected", "violated", "open"]
    detail: str = ""


@dataclass(frozen=True)
class Proof:
    """The cases of a proof. It is true if each case is proven or rejected, and at least one is
    proven."""

    cases: tuple[Case, ...]

    def __bool__(self) -> bool:
        verdicts = {case.verdict for case in self.cases}
        return "proven" in verdicts and verdicts <= {"proven", "rejected"}

    def __str__(self) -> str:
        lines = []
        for case in self.cases:
            line = f"{case.verdict:<8}  {', '.join(case.where) or 'all sizes'}"
            if case.detail:
                line += f": {case.detail}"
            lines.append(line)
        lines.append(f"not seen  {UNSEEN}")
        return "\n".join(lines)


@overload
def prove(function: Callable[..., Any], *arrays: str, where: str | Sequence[str] = ()) -> Proof: ...


@overload
def prove(
    function: Callable[..., Any],
    *arrays: str,
    causal: str | None = None,
    separate: str | None = None,
    sizes: Sizes | None = None,
) -> SightProof: ...


@typed
def prove(
    function: Callable[..., Any],
    *arrays: str,
    where: str | Sequence[str] = (),
    causal: str | None = None,
    separate: str | None = None,
    sizes: Sizes | None = None,
) -> Proof | SightProof:
    """Trace a function for all sizes of its arrays, and check every shape annotation in it; or,
    with `causal` or `separate`, prove which inputs its outputs can depend on.

    An array is written `float32[b t 8]`; `where` has constraints such as `t <= 8`, and every size
    is at least 1. At a branch on an undetermined size, as in `if t > 8`, both sides are traced. The
    verdict of a case is `proven`; `rejected` if the function raises ValueError or AssertionError;
    `violated` if an annotation does not hold, or cannot be shown to hold; or `open` if the function
    cannot be traced with symbolic sizes, or asks a size for what only a number has, such as its
    hash or its text. A proof covers shapes, not values. It can't see what the type or identity of a
    size decides, as in `type(t) is int` or `jax.typeof(x) == jax.typeof(y)`, or an error of JAX
    that the function catches.

    With `causal="t"` no output at a position of the axis t reads an input after it. With
    `separate="b"` outputs along b read their own input alone. This is proven for numbers: for each
    length of t from 1 to the function's `block_size`, for the block size alone where it is above
    64, and from 1 to 64 without one; every other size is 2. `sizes={"t": range(1, 9), "b": 3}` says
    otherwise. Weights and arrays of floats are unknown; integers, truth values and NumPy's arrays
    are known. "not proven" names a way on which the output can depend on the input.

    Raises ValueError for an array or a constraint that can't be read, or that no size meets, and
    for a program whose sight can't be asked.
    """
    if causal is not None or separate is not None:
        if where:
            raise ValueError("`where` has no meaning with `causal` or `separate`: give `sizes`")
        return prove_sight(function, arrays, causal, separate, sizes or {})
    if sizes is not None:
        raise ValueError("`sizes` needs `causal` or `separate`: shapes are proven for all sizes")
    parsed = [parse_array(array) for array in arrays]
    found = set()
    for _, dimensions in parsed:
        found.update(names_in(dimensions))
    names = sorted(found)
    constraints = tuple(where)
    if isinstance(where, str):
        constraints = (where,)
    require_readable(constraints, names)

    cases = []
    todo = [constraints]
    while todo:
        constraints = todo.pop()
        if len(cases) + len(todo) >= MOST_CASES:
            cases.append(Case(constraints, "open", f"there are more than {MOST_CASES} cases"))
            break
        outcome = _try_case(function, parsed, names, constraints)
        if isinstance(outcome, Case):
            cases.append(outcome)
            continue
        # The parts of a case together cover all of its sizes. The last one in the list is taken
        # first, so that cases are listed in the order of their text.
        for part in reversed(outcome):
            todo.append((*constraints, part))
    return Proof(tuple(cases))


def _try_case(
    function: Callable[..., Any],
    arrays: list[tuple[Any, str]],
    names: list[str],
    constraints: tuple[str, ...],
) -> Case | list[str]:
    """Trace a case; return its verdict, or the further constraints that split it.

    The result is an empty list if the constraints hold for no sizes.
    """
    try:
        scope = make_scope(constraints)
    except ValueError as error:
        if _is_unsatisfiable(error):
            return []
        # Earlier constraints worked before, so this is the last one, an equality of two sums.
        return Case(constraints, "open", f"JAX can't use the constraint {constraints[-1]}")
    sizes = dict(zip(names, make_shape(" ".join(names), scope), strict=True))
    structs = []
    for dtype, dimensions in arrays:
        structs.append(jax.ShapeDtypeStruct(make_shape(dimensions, scope), dtype))

    def call(*arguments: Any) -> None:
        function(*arguments)  # its result may be anything, not only arrays

    asked = Asked(scope)
    try:
        with _LOCK, _whole_tracebacks(), _symbols(sizes), answering(asked):
            traced = jax.make_jaxpr(call)(*structs)
            _require_whole_reshapes(traced.jaxpr)
    except (InconclusiveDimensionOperation, OpenQuestion) as error:
        return _split(str(error), constraints, _describe_error(error))
    except jaxtyping.TypeCheckError as error:
        return Case(constraints, "violated", _describe_error(error))
    except (ValueError, AssertionError) as error:
        if _is_unsatisfiable(error):
            return []
        # The program's own error is a verdict; an error of a library may be a limit of tracing.
        if not _is_raised_by_program(error):
            return Case(constraints, "open", _describe_error(error))
        unanswered = [question for question in asked.questions if not _is_message(question, error)]
        return _open_case(unanswered, constraints) or Case(
            constraints, "rejected", _describe_error(error)
        )
    except Exception as error:
        return Case(constraints, "open", _describe_error(error))
    return _open_case(asked.questions, constraints) or Case(constraints, "proven")


def _split(question: str, constraints: tuple[str, ...], detail: str) -> Case | list[str]:
    """Return the constraints that answer a question, or an open case if they don't."""
    parts = split_question(question)
    # If JAX can't use an answer, it repeats the question.
    is_new = set(parts).isdisjoint(constraints)
    if parts and is_new:
        return parts
    return Case(constraints, "open", detail)


def _open_case(
    questions: Sequence[OpenQuestion | Note], constraints: tuple[str, ...]
) -> Case | list[str] | None:
    """Return how a case goes on that ended with unanswered questions, or None without any."""
    # A case that is split asks its notes again.
    for question in questions:
        if isinstance(question, OpenQuestion):
            return _split(str(question), constraints, _describe_error(question))
    for question in questions:
        assert isinstance(question, Note)
        return Case(constraints, "open", question.text)
    return None


def _is_message(question: OpenQuestion | Note, error: BaseException) -> bool:
    """Return whether a program asked only for the message of an error that it raised."""
    return isinstance(question, Note) and question.is_in_message(error)


def _is_raised_by_program(error: BaseException) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return is_program(frame)


@contextlib.contextmanager
def _symbols(sizes: dict[str, Any]) -> Iterator[None]:
    """Let braces of annotations name the symbols of sizes, as JAX's text of a size does."""
    symbols: dict[str, Any] = {}
    for size in sizes.values():
        if isinstance(size, Size):
            symbols[str(size)] = size
    if symbols:
        symbols |= SIZE_FUNCTIONS
    with set_context(SYMBOLS, symbols):
        yield


def _is_unsatisfiable(error: Exception) -> bool:
    """Return whether JAX says that no sizes meet some constraints, with a capital letter or
    without."""
    return "nsatisfiable" in str(error)


@contextlib.contextmanager
def _whole_tracebacks() -> Iterator[None]:
    """Keep JAX's frames in the tracebacks of the block: the last one says who has raised the error.

    Without it, `jax.shard_map` with wrong specs would look like an error of the program.
    """
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def _require_whole_reshapes(jaxpr: Any) -> None:
    """Check reshapes as JAX does when their sizes are numbers."""
    for equation in jaxpr.eqns:
        # The programs inside, such as the body of a scan.
        parameters = list(equation.params.values())
        for parameter in jax.tree.leaves(parameters, is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                _require_whole_reshapes(getattr(parameter, "jaxpr", parameter))
        if equation.primitive.name == "reshape":
            array = equation.invars[0]
            result = equation.outvars[0]
            _require_equal_entries(array.aval.shape, result.aval.shape)


def _require_equal_entries(shape: Sequence[Any], new_shape: Sequence[Any]) -> None:
    before = math.prod(shape)
    after = math.prod(new_shape)
    difference = before - after
    are_symbols_gone = isinstance(difference, int)  # in `2*t - t*2` they cancel
    if not are_symbols_gone and is_open(difference):
        raise OpenQuestion(f"'{before}' == '{after}'")
    # With symbols that are not open, the difference is 0 for no sizes.
    if not are_symbols_gone or before != after:
        raise jaxtyping.TypeCheckError(f"a reshape of {before} entries to {after}")


def _is_jaxpr(value: Any) -> bool:
    """Return whether a parameter is a program, with constants (`ClosedJaxpr`) or without."""
    program = getattr(value, "jaxpr", value)
    return hasattr(program, "eqns")


def _describe_error(error: BaseException) -> str:
    """Describe an error in one line, with its last place in the program that is proven."""
    lines = str(error).splitlines()
    if not lines:
        lines = [type(error).__name__]
    text = lines[0]
    # A typed call's error has four lines, and the last one is the reason.
    if isinstance(error, TypeError) and len(lines) > 1:
        text += f" {lines[-1]}"
    text = restore_names(text)

    frames = traceback.walk_tb(error.__traceback__)
    for frame, line in reversed(list(frames)):
        if is_program(frame):
            file = Path(frame.f_code.co_filename).name
            return f"{text} ({file}:{line})"
    return text
