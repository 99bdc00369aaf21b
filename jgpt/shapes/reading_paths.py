"""The way by which a position of an input comes to an output."""

import dataclasses
import itertools
import linecache
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jgpt.shapes.abstract import NOWHERE, Abstract, whole
from jgpt.shapes.interpreter import NO_PLACE, Place

Element = tuple[int, ...]


class Step(NamedTuple):
    """An operation on the way, and the element of its result that is on it."""

    name: str
    place: Place
    shape: tuple[int, ...]
    element: Element

    def is_at(self, position: int, size: int) -> bool:
        """Return whether the element is at a position along an axis of a size."""
        return (size, position) in zip(self.shape, self.element, strict=True)


def steps_of(x: Abstract, element: Element, channel: int, target: int) -> Iterator[Step]:
    """Yield the operations from an element of an output back to the input. `target` is the value
    of a channel of its reach, which the element of each operand on the way has, too."""
    while x.origin is not None:
        yield Step(x.origin.name, x.origin.place, x.shape, element)
        x, element = _operand_with(target, channel, x.origin, element)
    yield Step("input", NO_PLACE, x.shape, element)


def _operand_with(
    target: int, channel: int, origin: Any, element: Element
) -> tuple[Abstract, Element]:
    """Return the operand, and its element, by which a rule's result has its reach.

    The rule is applied again, to operands whose reach is the number of the element: what arrives
    is the number of one that brings the target.
    """

    def order(x: Abstract) -> tuple[int, int]:
        made = -1  # an input is before all operations
        if x.origin is not None:
            made = x.origin.order
        width = 0
        if origin.name == "dot_general":
            width = _width(x, channel, target)
        return -width, made

    # Of weights and values, first the weights, which read several positions: their way goes by the
    # mask. Of others the one that was made first: the way through the residual stream is short.
    for operand in sorted(set(origin.operands), key=order):
        numbers = np.arange(math.prod(operand.shape), dtype=np.int32).reshape(operand.shape)
        brings = np.where(operand.reach[channel] == target, numbers, NOWHERE)
        tagged = []
        for x in origin.operands:
            number_of_element = NOWHERE
            if x is operand:
                number_of_element = brings
            tagged.append(_with_reach(x, number_of_element))
        with np.errstate(all="ignore"):
            result = origin.rule(*tagged)[origin.result]
        number = int(whole(result, result.reach[0])[element])
        if number > NOWHERE:
            place = np.unravel_index(number, operand.shape)
            return operand, tuple(map(int, place))
    raise AssertionError(f"no operand of {origin.name} brings what its result has")


def _width(x: Abstract, channel: int, target: int) -> int:
    """Return over how many positions those elements reach that bring the target."""
    # The channel beside it has the first position, negated: their sum is last minus first.
    last_minus_first = x.reach[channel] + x.reach[channel ^ 1]
    brings = x.reach[channel] == target
    return int(last_minus_first[brings].max(initial=0))


def _with_reach(x: Abstract, channel: Any) -> Abstract:
    world = dataclasses.replace(x.world, channels=1)
    return Abstract(world, x.shape, x.dtype, [x.low, x.high, channel])


def entry_of(steps: Sequence[Step], position: int, size: int) -> Step | None:
    """Return the operation by which an input's position comes in: the one nearest to the output
    whose operand is still at this position, and whose result isn't."""
    for step, before in itertools.pairwise(steps):
        if before.is_at(position, size) and not step.is_at(position, size):
            return step
    return None


def texts_of(steps: Sequence[Step]) -> list[str]:
    """Return the steps as text; of several on one line of source, the one nearest to the output."""
    texts = []
    for place, on_line in itertools.groupby(steps, key=lambda step: step.place):
        step = next(on_line)
        what = step.name
        if what != "input":  # whose shape the user knows
            what += f"[{','.join(map(str, step.shape))}]"
        element = ",".join(map(str, step.element))
        texts.append(f"{what} at [{element}]{source_of(place)}")
    return texts


def source_of(place: Place) -> str:
    """Return the line of source of a place; that of a library with the program's that calls it."""
    text = ""
    for line in (place.library, place.program):
        if line is None:
            continue
        file, number = line
        name = Path(file).name
        if "ipykernel" in file:  # a cell of a notebook has a file, whose name is a number
            name = "cell"
        text += f"   {name}:{number}: {linecache.getline(file, number).strip()}"
    return text
