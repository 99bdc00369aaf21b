"""An abstract interpreter of JAX's programs, which finds what each output can depend on.

For each element of each array it keeps the first and the last position of an input that the element
can depend on, and what is known of its number: a mask and a position are known, a masked score is
known to be about -1e9, and the exponential of that is a known 0, which drops what it multiplies.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jgpt.shapes.abstract import Abstract, World, is_float, join, stack, widened
from jgpt.shapes.jaxprs import (
    Line,
    inner_program,
    is_library_program,
    is_of_library,
    lines_of,
    scan_sizes,
)
from jgpt.shapes.reading_rules import CALLS, RULES, SAME, Arrays, Rule, anything, computed

MOST_STEPS = 20_000
"""The limit of the steps of a scan or a loop, which are unrolled."""
BOUNDS = (129 * 2.0**93, 129 * 2.0**20, 129 * 2.0**5)
"""What a number that isn't masked is assumed to be below, tried in this order: masked scores of
finfo.min, of -1e9 and of -1e4 are beyond. No program has these numbers as constants, which would
be taken for moderate ones; bfloat16 has them."""


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
Parameters = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Origin:
    """How an abstract array was made."""

    order: int
    name: str
    place: Place
    rule: Rule
    operands: tuple[Abstract, ...]
    result: int
    """Which of the rule's results it is."""


_OWN = Path(__file__).parent
_JAX = ("jax", "jaxlib")
"""Their lines say nothing of a layer, in which a program's mistake may be."""


def place_of(equation: Any, outside: Place) -> Place:
    """Return the innermost line of the program that an equation comes from, and the innermost line
    of a library of layers where that is what computes; what is unknown is that of the call."""
    library = None
    for line in lines_of(equation):
        file = Path(line[0])
        if file.parent == _OWN:
            continue
        if not is_of_library(line[0]):
            return Place(line, library)
        if library is None and not set(_JAX) & set(file.parts):
            library = line
    return Place(outside.program, library or outside.library)


class Interpreter:
    """Runs a program with abstract arrays."""

    def __init__(self, world: World, *, records: bool = False) -> None:
        self.world = world
        self.without_rule: dict[str, Place] = {}
        """Primitives for which every result depends on everything, and where the first is."""
        self.known: list[str] = []
        """Arrays of a closure whose values are known to the proof."""
        self._records = records
        self._orders = itertools.count()

    def run(
        self,
        closed: Any,
        operands: Arrays,
        outside: Place = NO_PLACE,
        *,
        is_library: bool = False,
    ) -> Arrays:
        """Return the results of a program that is called at a place; the operations of a library's
        program are there, too."""
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
            place = outside if is_library else place_of(equation, outside)
            results = self._step(equation, [read(atom) for atom in equation.invars], place)
            values.update(zip(equation.outvars, results, strict=True))
            for variable in last_uses.get(number, ()):
                del values[variable]
        return [read(atom) for atom in jaxpr.outvars]

    def _captured(self, value: Any) -> Abstract:
        """Return an array of a closure. One of floats is a parameter, whatever it holds, since a
        mixing that begins at the identity is trained; NumPy's, integers and truth values are
        known."""
        if isinstance(value, jax.Array) and is_float(value.dtype):
            return self.world.unknown(value, self.world.nothing)
        constant = self.world.constant(value)
        if constant.shape and constant.known.all():
            self.known.append(f"{constant.dtype}[{','.join(map(str, constant.shape))}]")
        return constant

    def _step(self, equation: Any, operands: Arrays, place: Place) -> Arrays:
        name = equation.primitive.name
        parameters = equation.params
        for variable in (*equation.invars, *equation.outvars):
            if "Ref" in type(variable.aval).__name__:
                raise Unreadable(
                    f"{name} changes an array in place{told(place)}: compute a new one instead"
                )
        if name in SAME:
            return operands
        match name:
            case "cond":
                return self._cond(parameters["branches"], operands, place)
            case "scan":
                return self._scan(parameters, operands, place)
            case "while":
                return self._while(parameters, operands, place)
            case "iota":
                return [self.world.constant(value) for value in computed(equation)]
        inner = inner_program(parameters)
        if name in CALLS and inner is not None:
            return self.run(inner, operands, place, is_library=is_library_program(inner))
        rule = RULES.get(name)
        if rule is None:
            self.without_rule.setdefault(name, place)
            rule = anything
        if not operands:  # such as the index of a device
            operands = [self.world.unknown(jnp.float32(0), self.world.nothing, True)]
        return self._applied(name, place, functools.partial(rule, equation), operands)

    def _applied(self, name: str, place: Place, rule: Rule, operands: Arrays) -> Arrays:
        """Apply a rule, and record how its results were made."""
        results = rule(*operands)
        if self._records:
            for index, result in enumerate(results):
                order = next(self._orders)
                result.origin = Origin(order, name, place, rule, tuple(operands), index)
        return results

    def _made(
        self, name: str, place: Place, make: Callable[..., Abstract], *operands: Abstract
    ) -> Abstract:
        """Make a single array, and record how."""
        (result,) = self._applied(name, place, lambda *xs: [make(*xs)], [*operands])
        return result

    def _cond(self, branches: Sequence[Any], operands: Arrays, place: Place) -> Arrays:
        choice, *rest = operands
        if choice.known.all():
            number = int(np.clip(choice.low, 0, len(branches) - 1))
            return self.run(branches[number], rest, place)
        of_branches = [self.run(branch, rest, place) for branch in branches]
        results = []
        for parts in zip(*of_branches, strict=True):
            results.append(self._made("cond", place, join, choice, *parts))
        return results

    def _scan(self, parameters: Parameters, operands: Arrays, place: Place) -> Arrays:
        length = parameters["length"]
        if not 0 < length <= MOST_STEPS:
            raise Unreadable(
                f"a scan of {length} steps is more than the {MOST_STEPS} that are unrolled"
                f"{told(place)}: ask at a smaller size"
            )
        begin, carried = scan_sizes(parameters)
        constants, carry = operands[:begin], operands[begin : begin + carried]
        arrays = operands[begin + carried :]
        by_step: dict[int, Arrays] = {}
        for number in sorted(range(length), reverse=parameters["reverse"]):
            take = functools.partial(Abstract.item, number=number)
            items = [self._made("scan", place, take, x) for x in arrays]
            results = self.run(parameters["jaxpr"], [*constants, *carry, *items], place)
            carry, by_step[number] = results[:carried], results[carried:]
        in_order = [by_step[number] for number in range(length)]
        of_steps = zip(*in_order, strict=True)
        return [*carry, *[self._made("scan", place, stack, *parts) for parts in of_steps]]

    def _while(self, parameters: Parameters, operands: Arrays, place: Place) -> Arrays:
        begin = parameters["cond_nconsts"]
        end = begin + parameters["body_nconsts"]
        carry = operands[end:]
        for _ in range(MOST_STEPS):
            (goes_on,) = self.run(parameters["cond_jaxpr"], [*operands[:begin], *carry], place)
            if not goes_on.high.any():
                return carry
            new = self.run(parameters["body_jaxpr"], [*operands[begin:end], *carry], place)
            if not goes_on.low.all():
                # Data decides: what is true of every number of steps is what changes no more.
                for index, (before, after) in enumerate(zip(carry, new, strict=True)):
                    new[index] = self._made("while", place, widened, goes_on, before, after)
                if all(map(Abstract.is_same, carry, new)):
                    return new
            carry = new
        raise Unreadable(f"a loop of more than {MOST_STEPS} steps{told(place)}")


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Return for each equation the variables that it is the last to read, which can be dropped."""
    read = {atom for atom in jaxpr.outvars if isinstance(atom, core.Var)}
    last_uses = {}
    for number, equation in reversed(list(enumerate(jaxpr.eqns))):
        atoms = {atom for atom in equation.invars if isinstance(atom, core.Var)}
        last_uses[number] = list(atoms - read)
        read |= atoms
    return last_uses


def told(place: Place) -> str:
    """Return a place for a message, with a space before it."""
    line = place.program or place.library
    return "" if line is None else f" ({Path(line[0]).name}:{line[1]})"


def assumptions_of(world: World, known: Iterable[str]) -> list[str]:
    """Return what an interpretation assumes, with the arrays that it takes as known."""
    assumed = [
        "unmasked numbers are finite, and no denominator is 0",
        f"unmasked scores are below {world.bound / 2:.4g} in size",
        "tokens and indices are in range",
        "the program is as JAX traces it at these sizes",
    ]
    arrays = ", ".join(dict.fromkeys(known))
    if arrays:
        assumed.append(f"arrays of the closure keep their values: {arrays}")
    if world.rows_keep_an_entry:
        assumed.insert(0, "each row of a mask that data makes keeps an entry")
    return assumed
