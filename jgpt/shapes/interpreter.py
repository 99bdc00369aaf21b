"""An abstract interpreter of JAX's programs, which finds what each output can depend on.

For each element of each array it keeps the first and the last position of an input that the element
can depend on, and what is known of its number: a mask and a position are known, a masked score is
known to be about -1e9, and the exponential of that is a known 0, which drops what it multiplies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jgpt.shapes.abstract import Abstract, World, join, stack, widened
from jgpt.shapes.jaxprs import (
    Line,
    inner_program,
    is_library_program,
    is_of_library,
    lines_of,
    scan_sizes,
)
from jgpt.shapes.reading_rules import CALLS, RULES, SAME, anything, computed

MOST_STEPS = 20_000
"""The limit of the steps of a scan or a loop, which are unrolled."""
BOUNDS = (1e30, 1e8, 5e3)
"""What a number that isn't masked is assumed to be below, tried in this order: masked scores of
finfo.min, of -1e9 and of -1e4 are beyond."""


@dataclasses.dataclass(frozen=True)
class Known:
    """An argument whose values are known, such as the documents of a packed batch or a mask."""

    array: Any


class Unreadable(ValueError):
    """A program that can't be interpreted; the message says why."""


class Place(NamedTuple):
    """Where an operation is: in the program, and in a library that the program calls there."""

    program: Line | None
    library: Line | None


NO_PLACE = Place(None, None)


@dataclasses.dataclass(frozen=True)
class Origin:
    """How an abstract array was made."""

    order: int
    name: str
    place: Place
    rule: Callable[..., list[Abstract]]
    operands: tuple[Abstract, ...]
    result: int
    """Which of the rule's results it is."""


# --- places ---------------------------------------------------------------------------------------

_OWN = Path(__file__).parent
_JAX = ("jax", "jaxlib")
"""Their lines say nothing of a layer, in which a program's mistake may be."""


def place_of(equation: Any) -> Place:
    """Return the innermost line of the program that an equation comes from, and the innermost line
    of a library of layers where that is what computes."""
    library = None
    for file, number in lines_of(equation):
        is_own = Path(file).parent == _OWN
        if not is_own and not is_of_library(file):
            return Place((file, number), library)
        if library is None and not is_own and not any(f"/{name}/" in file for name in _JAX):
            library = (file, number)
    return Place(None, library)


# --- the interpreter ------------------------------------------------------------------------------


class Interpreter:
    """Runs a program with abstract arrays."""

    def __init__(self, world: World, *, records: bool = False) -> None:
        self.world = world
        self.without_rule: dict[str, Place] = {}
        """Primitives for which every result depends on everything, and where the first is."""
        self.known: list[str] = []
        """Arrays of a closure whose values are known to the proof."""
        self._records = records
        self.origins: dict[int, Origin] = {}
        self._kept: list[Abstract] = []  # so that no other array gets the id of one

    def run(
        self,
        closed: Any,
        operands: Sequence[Abstract],
        inside: Place | None = None,
        outside: Place = NO_PLACE,
    ) -> list[Abstract]:
        """Return the results of a program. `inside` is the place of all of its operations, where
        it is a library's; `outside` that of the call, for operations without one."""
        jaxpr = closed.jaxpr
        constants = [self._captured(value) for value in closed.consts]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))
        last_uses = _last_uses(jaxpr)

        def read(atom: Any) -> Abstract:
            if isinstance(atom, core.Literal):
                aval: Any = atom.aval
                return self.world.constant(np.asarray(atom.val, aval.dtype))
            return values[atom]

        for number, equation in enumerate(jaxpr.eqns):
            place = inside
            if place is None:
                place = place_of(equation)
                if place.program is None:
                    place = Place(outside.program, place.library or outside.library)
            results = self._step(equation, [read(atom) for atom in equation.invars], place)
            values.update(zip(equation.outvars, results, strict=True))
            for atom in equation.invars:
                if isinstance(atom, core.Var) and last_uses[atom] == number:
                    values.pop(atom, None)
        return [read(atom) for atom in jaxpr.outvars]

    def apply(
        self, name: str, place: Place, rule: Callable[..., Any], *operands: Abstract
    ) -> list[Abstract]:
        """Apply a rule, and record how its results were made."""
        results = rule(*operands)
        if isinstance(results, Abstract):
            results = [results]
        if self._records:
            for index, result in enumerate(results):
                if not any(result is operand for operand in operands):
                    origin = Origin(len(self._kept), name, place, rule, operands, index)
                    self.origins[id(result)] = origin
                    self._kept.append(result)
        return results

    def _captured(self, value: Any) -> Abstract:
        """Return an array of a closure. One of floats is a parameter, whatever it holds, since a
        mixing that begins at the identity is trained; NumPy's, integers and truth values are
        known."""
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        if isinstance(value, jax.Array) and jnp.issubdtype(dtype, jnp.inexact):
            return self.world.unknown(value, self.world.nothing())
        if np.ndim(value) > 0 and not jnp.issubdtype(dtype, jax.dtypes.extended):
            self.known.append(f"{np.dtype(dtype).name}[{','.join(map(str, np.shape(value)))}]")
        return self.world.constant(value)

    def _step(self, equation: Any, operands: list[Abstract], place: Place) -> list[Abstract]:
        name = equation.primitive.name
        parameters = equation.params
        for variable in (*equation.invars, *equation.outvars):
            if "Ref" in type(variable.aval).__name__:
                raise Unreadable(f"{name} changes an array in place{told(place)}")
        if name in SAME:
            return operands
        match name:
            case "cond":
                return self._cond(parameters, operands, place)
            case "scan":
                return self._scan(parameters, operands, place)
            case "while":
                return self._while(parameters, operands, place)
            case "iota":
                return [self.world.constant(value) for value in computed(equation)]
        if name in CALLS:
            return self._call(parameters, operands, place)
        if not operands:  # nothing that it could depend on
            nothing = self.world.nothing()
            return [self.world.unknown(result.aval, nothing, True) for result in equation.outvars]
        rule = RULES.get(name)
        if rule is None:
            self.without_rule.setdefault(name, place)
            rule = anything
        return self.apply(name, place, functools.partial(rule, equation), *operands)

    def _call(
        self, parameters: dict[str, Any], operands: list[Abstract], place: Place
    ) -> list[Abstract]:
        inner = inner_program(parameters)
        if inner is None:
            raise Unreadable(f"a call without a program{told(place)}")
        inside = place if is_library_program(inner) else None
        return self.run(inner, operands, inside, place)

    def _cond(
        self, parameters: dict[str, Any], operands: list[Abstract], place: Place
    ) -> list[Abstract]:
        choice, *rest = operands
        branches = parameters["branches"]
        if choice.known.all():
            number = int(np.clip(choice.low, 0, len(branches) - 1))
            return self.run(branches[number], rest, outside=place)
        of_branches = [self.run(branch, rest, outside=place) for branch in branches]
        results = []
        for parts in zip(*of_branches, strict=True):
            results += self.apply("cond", place, join, choice, *parts)
        return results

    def _scan(
        self, parameters: dict[str, Any], operands: list[Abstract], place: Place
    ) -> list[Abstract]:
        length = parameters["length"]
        if not 0 < length <= MOST_STEPS:
            raise Unreadable(
                f"a scan of {length} steps is more than the {MOST_STEPS} that are unrolled"
                f"{told(place)}: ask at a smaller size"
            )
        begin, carried = scan_sizes(parameters)
        end = begin + carried
        constants = operands[:begin]
        carry = operands[begin:end]
        by_step: dict[int, list[Abstract]] = {}
        for number in sorted(range(length), reverse=parameters["reverse"]):
            items = []
            for x in operands[end:]:
                take = functools.partial(Abstract.item, number=number)
                items += self.apply("scan", place, take, x)
            results = self.run(parameters["jaxpr"], [*constants, *carry, *items], outside=place)
            carry = results[: len(carry)]
            by_step[number] = results[len(carry) :]
        stacked = []
        for parts in zip(*[by_step[number] for number in range(length)], strict=True):
            stacked += self.apply("scan", place, stack, *parts)
        return [*carry, *stacked]

    def _while(
        self, parameters: dict[str, Any], operands: list[Abstract], place: Place
    ) -> list[Abstract]:
        begin = parameters["cond_nconsts"]
        end = begin + parameters["body_nconsts"]
        carry = operands[end:]
        for _ in range(MOST_STEPS):
            inputs = [*operands[:begin], *carry]
            (goes_on,) = self.run(parameters["cond_jaxpr"], inputs, outside=place)
            is_known = bool(goes_on.known.all())
            if is_known and not goes_on.low.any():
                return carry
            inputs = [*operands[begin:end], *carry]
            new = self.run(parameters["body_jaxpr"], inputs, outside=place)
            if not is_known or not goes_on.low.all():
                # Data decides: what is true of every number of steps is what changes no more.
                joined = []
                for before, after in zip(carry, new, strict=True):
                    joined += self.apply("while", place, widened, goes_on, before, after)
                new = joined
                if all(map(Abstract.is_same, carry, new)):
                    return new
            carry = new
        raise Unreadable(f"a loop of more than {MOST_STEPS} steps{told(place)}")


def _last_uses(jaxpr: Any) -> dict[Any, float]:
    """Return for each variable the last equation that reads it, so that it can be dropped then."""
    last: dict[Any, float] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for atom in equation.invars:
            if isinstance(atom, core.Var):
                last[atom] = number
    for atom in jaxpr.outvars:
        if isinstance(atom, core.Var):
            last[atom] = math.inf
    return last


def told(place: Place) -> str:
    """Return a place for a message, with a space before it."""
    line = place.program or place.library
    return "" if line is None else f" ({Path(line[0]).name}:{line[1]})"


def assumptions_of(world: World, known: Iterable[str]) -> list[str]:
    """Return what an interpretation assumes, with the arrays that it takes as known."""
    assumed = [
        "unmasked numbers are finite, and no denominator is 0",
        f"unmasked scores are below {world.bound / 2:g} in size",
        "tokens and indices are in range",
        "the program is as JAX traces it at these sizes",
    ]
    arrays = ", ".join(dict.fromkeys(known))
    if arrays:
        assumed.append(f"arrays of the closure keep their values: {arrays}")
    if world.rows_keep_an_entry:
        assumed.insert(0, "each row of a mask that data makes keeps an entry")
    return assumed
