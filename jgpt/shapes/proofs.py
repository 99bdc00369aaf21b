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

from jgpt.shapes.calls import set_context
from jgpt.shapes.contract import typed
from jgpt.shapes.matching import SIZE_FUNCTIONS, SYMBOLS
from jgpt.shapes.sizes import (
    Size,
    _is_open,
    _names,
    _parsed,
    _parts,
    _require_readable,
    _scope,
    _shape,
    _theirs,
)

MOST_CASES = 60
LIBRARIES = tuple(
    f"{Path(str(module.__file__)).parent}/"
    for module in (jax, flax, optax, jaxtyping, beartype, np)
)
_LOCK = threading.RLock()
"""Held by the thread that proves: methods of JAX's class of sizes are replaced for it."""


class _Open(BaseException):
    """An open equality that JAX would decide. Handlers of `Exception` don't catch it."""


class _Scale(float):
    """A power or a quotient of open sizes: it scales numbers, and what it would decide is open."""

    def _decides(self, *_: Any) -> Any:
        raise _Open("a power or a quotient of a size decides a shape or a branch")

    def _scales(self, other: Any = 0, mod: Any = None) -> Any:
        return self if isinstance(other, (int, float)) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return float(self) == other if _a_library_asks() else self._decides()

    def __ne__(self, other: object) -> bool:
        # as in JAX's initialisers, which ask whether a mean of sizes is 0
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
    verdict: Literal["proven", "refused", "violated", "open"]
    detail: str = ""


@dataclass(frozen=True)
class Proof:
    """The cases of a proof. It is true if each is proven or refused, and one is proven."""

    cases: tuple[Case, ...]

    def __bool__(self) -> bool:
        verdicts = {case.verdict for case in self.cases}
        return "proven" in verdicts and verdicts <= {"proven", "refused"}

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
    is at least 1. Where the program asks something open of a size, as in `if t > 8`, both answers
    are traced. A case ends `proven`, `refused` by a ValueError of the program, `violated` if an
    annotation isn't met (or can't be shown to be), or `open`. Equal shapes are proven, not values.
    Raises ValueError for an array or a constraint that can't be read, and where no size can be.
    """
    parsed = [_parsed(array) for array in arrays]
    names = sorted({name for _, text in parsed for name in _names(text)})
    todo = [(where,) if isinstance(where, str) else tuple(where)]
    cases = []
    _require_readable(todo[0], names)
    while todo:
        case = todo.pop()
        if len(cases) + len(todo) >= MOST_CASES:
            cases.append(Case(case, "open", f"there are more than {MOST_CASES} cases"))
            break
        try:
            scope = _scope(case)
        except ValueError:
            continue  # no sizes are in this case
        sizes = dict(zip(names, _shape(" ".join(names), scope), strict=True))
        structs = [jax.ShapeDtypeStruct(_shape(text, scope), dtype) for dtype, text in parsed]
        try:
            with _LOCK, _splitting(sizes):
                traced = jax.make_jaxpr(lambda *given: (function(*given), None)[1])(*structs)
                _require_whole_reshapes(traced.jaxpr)
            cases.append(Case(case, "proven"))
        except (InconclusiveDimensionOperation, _Open) as error:
            parts = _parts(str(error))
            if not parts or set(parts) & set(case):
                cases.append(Case(case, "open", _reason(error)))
            else:
                todo += [(*case, part) for part in reversed(parts)]
        except jaxtyping.TypeCheckError as error:
            cases.append(Case(case, "violated", _reason(error)))
        except ValueError as error:
            if "nsatisfiable" in str(error):
                continue
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            verdict = "open" if last.startswith(LIBRARIES) else "refused"
            cases.append(Case(case, verdict, _reason(error)))
        except Exception as error:
            cases.append(Case(case, "open", _reason(error)))
    return Proof(tuple(cases))


def _require_whole_reshapes(jaxpr: Any) -> None:
    """What JAX checks of a reshape only when its sizes are numbers."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                _require_whole_reshapes(getattr(inner, "jaxpr", inner))
        if equation.primitive.name == "reshape":
            shapes = [it.aval.shape for it in (equation.invars[0], equation.outvars[0])]
            before, after = map(math.prod, shapes)
            if not isinstance(before - after, int) and _is_open(before - after):
                raise _Open(f"'{before}' == '{after}'")
            if not (isinstance(before - after, int) and before == after):
                raise jaxtyping.TypeCheckError(f"a reshape of {before} entries to {after}")


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


@contextlib.contextmanager
def _splitting(sizes: dict[str, Any]) -> Iterator[None]:
    """Within it, an open equality or truth of a size is an error, as an open order is.

    JAX answers an open `t == 1` with False and an open `if t % 4` with True, which would drop a
    branch in silence. Libraries still get these answers, since they ask for speed only, and so
    do other threads.
    """
    equal = Size.__eq__
    power = Size.__pow__
    isqrt = math.isqrt
    divide = Size.__truediv__
    divide_into = Size.__rtruediv__
    multiply = Size.__mul__
    multiply_into = Size.__rmul__

    def equals(self: Any, other: Any) -> bool:
        if isinstance(other, Size) and other.scope is not self.scope:
            return False  # of another case, in one of JAX's caches
        same = equal(self, other)
        if same is True or not isinstance(other, (int, Size)) or _a_library_asks():
            return same
        if _is_open(self - other):
            raise _Open(f"'{self}' == '{other}'")
        return same

    def truth(self: Any) -> bool:
        if _is_open(self) and not _a_library_asks():
            raise _Open(f"'{self}' == '0'")
        return True

    def to_power(self: Any, exponent: Any, modulo: Any = None) -> Any:
        return _Scale(1) if isinstance(exponent, float) else power(self, exponent, modulo)

    # a quotient is a float at all sizes; JAX makes it an array, which decides nothing either
    def quotient(self: Any, divisor: Any) -> Any:
        return _Scale(1) if isinstance(divisor, (int, float, Size)) else divide(self, divisor)

    def quotient_of(self: Any, dividend: Any) -> Any:
        return _Scale(1) if isinstance(dividend, (int, float)) else divide_into(self, dividend)

    def times(self: Any, factor: Any) -> Any:
        return factor if isinstance(factor, _Scale) else multiply(self, factor)

    def times_into(self: Any, factor: Any) -> Any:
        return factor if isinstance(factor, _Scale) else multiply_into(self, factor)

    def root(size: Any) -> Any:
        """Any size at all: what is proven for it is proven for the root."""
        if not isinstance(size, Size):
            return isqrt(size)
        name = f"isqrt_{_theirs(str(size))}"
        if not name.isidentifier():
            raise _Open(f"the square root of {_theirs(str(size))}")
        if name not in sizes:
            (sizes[name],) = _shape(name, size.scope)
            known[str(sizes[name])] = sizes[name]
        return sizes[name]

    fans = _replaced_fans()
    symbols = {str(size): size for size in sizes.values() if isinstance(size, Size)}
    known: dict[str, Any] = symbols and symbols | SIZE_FUNCTIONS
    patches = (
        (Size, "__eq__", equals, equal),
        (Size, "__ne__", lambda a, b: not equals(a, b), Size.__ne__),
        (Size, "__bool__", truth, lambda size: True),
        (Size, "__pow__", to_power, power),
        (Size, "__truediv__", quotient, divide),
        (Size, "__rtruediv__", quotient_of, divide_into),
        (Size, "__mul__", times, multiply),
        (Size, "__rmul__", times_into, multiply_into),
        (math, "isqrt", root, isqrt),
        *fans,
    )
    with contextlib.ExitStack() as stack:
        for owner, name, ours, theirs in patches:
            patch = mock.patch.object(owner, name, _here(ours, theirs), create=True)
            stack.enter_context(patch)
        with set_context(SYMBOLS, known):
            yield


def _here(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function for this thread, another for others."""
    thread = threading.get_ident()

    def chosen(*args: Any, **named: Any) -> Any:
        function = ours if threading.get_ident() == thread else theirs
        return function(*args, **named)

    return chosen


def _replaced_fans() -> list[tuple[Any, str, Any, Any]]:
    """A patch of the fans that random weights are scaled by.

    JAX 0.12 asks whether an open fan, which is a traced number, is zero, and fails. The function is
    private: with a JAX that lacks it, a weight of any width may be open, and a test fails.
    """
    try:
        initializers = importlib.import_module("jax._src.nn.initializers")
        compute_fans = initializers._compute_fans
    except (ImportError, AttributeError):
        return []

    def fans(shape: Sequence[Any], *axes: Any, **named_axes: Any) -> tuple[Any, Any]:
        if any(isinstance(size, Size) for size in shape):
            return 1, 1  # they scale values, and decide no shape
        return compute_fans(shape, *axes, **named_axes)

    return [(initializers, "_compute_fans", fans, compute_fans)]


def _a_library_asks() -> bool:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    file = frame.f_code.co_filename
    standard = sysconfig.get_paths()["stdlib"]
    return file.startswith(LIBRARIES) or (file.startswith(standard) and "-packages" not in file)


def _reason(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    skipped = (*LIBRARIES, f"{Path(__file__).parent}/")
    asked = [frame for frame in frames if not frame.filename.startswith(skipped)]
    place = f" ({Path(asked[-1].filename).name}:{asked[-1].lineno})" if asked else ""
    lines = str(error).splitlines() or [type(error).__name__]
    text = (
        f"{lines[0]} {lines[-1]}" if isinstance(error, TypeError) and len(lines) > 1 else lines[0]
    )
    return _theirs(text) + place
