"""Shapes proven for all sizes: an abstract trace for each branch that sizes decide."""

import contextlib
import importlib
import math
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import beartype
import flax
import jax
import jaxtyping
import numpy as np
import optax
from jax.errors import InconclusiveDimensionOperation

from jgpt.shapes import matching
from jgpt.shapes.calls import set_context
from jgpt.shapes.contract import typed
from jgpt.shapes.matching import SIZE_FUNCTIONS, SYMBOLS
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
LIBRARIES = tuple(
    f"{Path(str(module.__file__)).parent}/"
    for module in (jax, flax, optax, jaxtyping, beartype, np)
)
"""The folders of libraries, which branch on a size for speed and not to compute something else."""
_CONTRACT = matching.__file__
"""The checks, which compare sizes and compute nothing with them."""
_Patch = tuple[Any, str, Callable[..., Any], Callable[..., Any]]
"""An object, the name of its attribute, jgpt's function and the original one."""
_LOCK = threading.RLock()
"""Held by the thread of a proof, for which methods of JAX's class of sizes are replaced."""


class _Open(BaseException):
    """An open equality that JAX would decide. Handlers of `Exception` don't catch it."""


class _Scale(float):
    """A power or a quotient of open sizes: it scales numbers, and comparisons with it are open.

    As a float it is 1, which means nothing, since values are not computed in a proof.
    """

    def _decides(self, *_: Any) -> Any:
        raise _Open("a power or a quotient of a size decides a shape or a branch")

    def _scales(self, other: Any = 0, mod: Any = None) -> Any:
        if isinstance(other, (int, float)):
            return self
        return NotImplemented  # an array computes with it as with any float

    def __eq__(self, other: object) -> bool:
        if _a_library_asks():
            return float(self) == other
        return self._decides()

    def __ne__(self, other: object) -> bool:
        # As in JAX's initialisers, which test whether a mean of sizes is 0.
        return not self == other

    __hash__ = float.__hash__
    __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = __bool__ = _decides
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __mod__ = _decides
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __abs__ = _scales
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _scales


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
        return "\n".join(lines)


@typed
def prove(function: Callable[..., Any], *arrays: str, where: str | Sequence[str] = ()) -> Proof:
    """Trace a function for all sizes of its arrays, and check every shape annotation in it.

    An array is written `float32[b t 8]`; `where` has constraints such as `t <= 8`, and every size
    is at least 1. At a branch on an undetermined size, as in `if t > 8`, both sides
    are traced. The verdict of a case is `proven`; `rejected` if the function raises ValueError;
    `violated` if an annotation does not hold, or cannot be shown to hold; or `open` if the function
    cannot be traced with symbolic sizes. A proof covers shapes, not values.
    Raises ValueError for an array or a constraint that can't be read, or that no size meets.
    """
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

    try:
        with _LOCK, _whole_tracebacks(), _raise_on_open_questions(sizes):
            traced = jax.make_jaxpr(call)(*structs)
            _require_whole_reshapes(traced.jaxpr)
    except (InconclusiveDimensionOperation, _Open) as error:
        parts = split_question(str(error))
        # If JAX can't use an answer, it repeats the question.
        is_new = set(parts).isdisjoint(constraints)
        if parts and is_new:
            return parts
        return Case(constraints, "open", _describe_error(error))
    except jaxtyping.TypeCheckError as error:
        return Case(constraints, "violated", _describe_error(error))
    except ValueError as error:
        if _is_unsatisfiable(error):
            return []
        # The program's own error is a verdict; an error of a library may be a limit of tracing.
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        if last_frame.filename.startswith(LIBRARIES):
            return Case(constraints, "open", _describe_error(error))
        return Case(constraints, "rejected", _describe_error(error))
    except Exception as error:
        return Case(constraints, "open", _describe_error(error))
    return Case(constraints, "proven")


def _is_unsatisfiable(error: ValueError) -> bool:
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
        raise _Open(f"'{before}' == '{after}'")
    # With symbols that are not open, the difference is 0 for no sizes.
    if not are_symbols_gone or before != after:
        raise jaxtyping.TypeCheckError(f"a reshape of {before} entries to {after}")


def _is_jaxpr(value: Any) -> bool:
    """Return whether a parameter is a program, with constants (`ClosedJaxpr`) or without."""
    program = getattr(value, "jaxpr", value)
    return hasattr(program, "eqns")


# --- JAX's class of sizes, patched for one thread ------------------------------------------------


@contextlib.contextmanager
def _raise_on_open_questions(sizes: dict[str, Any]) -> Iterator[None]:
    """Raise in the block for an open equality or truth of a size, as JAX does for an open order.

    JAX evaluates an open `t == 1` as False and an open `if t % 4` as True, which would silently
    drop a branch. Libraries still get these values, since they only ask for speed, and so do other
    threads.
    """
    symbols: dict[str, Any] = {}
    for size in sizes.values():
        if isinstance(size, Size):
            symbols[str(size)] = size
    if symbols:
        symbols |= SIZE_FUNCTIONS
    patches = [
        *_patched_comparisons(),
        *_patched_arithmetic(),
        _patched_root(sizes, symbols),
        *_patched_fans(),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, ours, theirs in patches:
            chosen = _in_this_thread(ours, theirs)
            stack.enter_context(mock.patch.object(owner, name, chosen, create=True))
        with set_context(SYMBOLS, symbols):
            yield


def _patched_comparisons() -> list[_Patch]:
    """Replace equality and truth of sizes, to raise where JAX would decide an open question."""
    equal = Size.__eq__

    def equals(self: Any, other: Any) -> bool:
        if isinstance(other, Size) and other.scope is not self.scope:
            return False  # a size of another case, in one of JAX's caches
        same = equal(self, other)
        if same is True or not isinstance(other, (int, Size)) or _a_library_asks():
            return same
        if is_open(self - other):
            raise _Open(f"'{self}' == '{other}'")
        return same

    def differs(self: Any, other: Any) -> bool:
        return not equals(self, other)

    def truth(self: Any) -> bool:
        if is_open(self) and not _a_library_asks():
            raise _Open(f"'{self}' == '0'")
        return True

    def always_true(self: Any) -> bool:
        return True  # Python's result for a class without `__bool__`

    return [
        (Size, "__eq__", equals, equal),
        (Size, "__ne__", differs, Size.__ne__),
        (Size, "__bool__", truth, always_true),
    ]


def _patched_arithmetic() -> list[_Patch]:
    """Replace powers and quotients of sizes, and products with them, by `_Scale`."""
    power = Size.__pow__
    divide = Size.__truediv__
    divide_into = Size.__rtruediv__
    multiply = Size.__mul__
    multiply_into = Size.__rmul__

    # `head_dim ** -0.5` scales scores, and `t ** 2` is a size.
    def to_power(self: Any, exponent: Any, modulo: Any = None) -> Any:
        if isinstance(exponent, float):
            return _Scale(1)
        return power(self, exponent, modulo)

    # A quotient is a float for all sizes; JAX makes it an array, which decides nothing either.
    def quotient(self: Any, divisor: Any) -> Any:
        if isinstance(divisor, (int, float, Size)):
            return _Scale(1)
        return divide(self, divisor)

    def quotient_of(self: Any, dividend: Any) -> Any:  # `dividend / self`
        if isinstance(dividend, (int, float)):
            return _Scale(1)
        return divide_into(self, dividend)

    # A size times a quotient of sizes is no longer a size, so its comparisons stay open.
    def times(self: Any, factor: Any) -> Any:
        if isinstance(factor, _Scale):
            return factor
        return multiply(self, factor)

    def times_into(self: Any, factor: Any) -> Any:  # `factor * self`
        if isinstance(factor, _Scale):
            return factor
        return multiply_into(self, factor)

    return [
        (Size, "__pow__", to_power, power),
        (Size, "__truediv__", quotient, divide),
        (Size, "__rtruediv__", quotient_of, divide_into),
        (Size, "__mul__", times, multiply),
        (Size, "__rmul__", times_into, multiply_into),
    ]


def _patched_root(sizes: dict[str, Any], symbols: dict[str, Any]) -> _Patch:
    """Replace the integer root of a size by a new size, which is added to both dictionaries."""
    isqrt = math.isqrt

    def root(size: Any) -> Any:
        """Return a size of any value: a proof for all values includes the root."""
        if not isinstance(size, Size):
            return isqrt(size)
        text = restore_names(str(size))
        name = f"isqrt_{text}"
        if not name.isidentifier():  # the root of an expression such as `2*t`
            raise _Open(f"the function takes the square root of {text}")
        # The root of a size is the same everywhere.
        if name not in sizes:
            (new_size,) = make_shape(name, size.scope)
            sizes[name] = new_size
            symbols[str(new_size)] = new_size
        return sizes[name]

    return (math, "isqrt", root, isqrt)


def _patched_fans() -> list[_Patch]:
    """Replace the fans that scale random weights.

    JAX 0.12 tests whether an open fan, which is a traced number, is zero, and fails. The function
    is private. If a version of JAX lacks it, weights of any width may still be open, and a test
    fails.
    """
    try:
        initializers = importlib.import_module("jax._src.nn.initializers")
        compute_fans = initializers._compute_fans
    except (ImportError, AttributeError):
        return []

    def fans(shape: Sequence[Any], *axes: Any, **named_axes: Any) -> tuple[Any, Any]:
        for size in shape:
            if isinstance(size, Size):
                return 1, 1  # they scale values and decide no shape
        return compute_fans(shape, *axes, **named_axes)

    return [(initializers, "_compute_fans", fans, compute_fans)]


def _in_this_thread(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `ours` on this thread and `theirs` on others."""
    thread = threading.get_ident()

    def chosen(*args: Any, **named: Any) -> Any:
        if threading.get_ident() == thread:
            return ours(*args, **named)
        return theirs(*args, **named)

    return chosen


# --- questions and errors ------------------------------------------------------------------------


def _a_library_asks() -> bool:
    """Return whether a library asks a question, rather than the program that is proven."""
    frame = sys._getframe(1)
    # This file's frames are those of the patches; the question comes from the caller of the
    # outermost.
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    file = frame.f_code.co_filename
    if file.startswith(LIBRARIES) or file == _CONTRACT:
        return True
    # Third-party packages are often in a folder inside the standard library's.
    standard = sysconfig.get_paths()["stdlib"]
    return file.startswith(standard) and "-packages" not in file


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

    own_folder = f"{Path(__file__).parent}/"
    skipped = (*LIBRARIES, own_folder)
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(skipped):
            file = Path(frame.filename).name
            return f"{text} ({file}:{frame.lineno})"
    return text
