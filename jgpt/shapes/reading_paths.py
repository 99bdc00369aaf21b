"""The way by which a position of an input comes to an output."""

import dataclasses
import itertools
import linecache
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jgpt.shapes.abstract import NOWHERE, Abstract, World, whole
from jgpt.shapes.interpreter import NO_PLACE, Origin, Place
from jgpt.shapes.jaxprs import Line


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation on the way, and the element of its result that is on it."""

    name: str
    place: Place
    shape: tuple[int, ...]
    element: tuple[int, ...]

    def is_at(self, position: int, size: int) -> bool:
        """Return whether the element is at a position along an axis of a size."""
        return (size, position) in zip(self.shape, self.element, strict=True)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        place = ",".join(map(str, self.element))
        return f"{self.name}[{shape}] at [{place}]{_source(self.place)}"


def steps_of(
    x: Abstract,
    origins: dict[int, Origin],
    element: tuple[int, ...],
    channel: int,
    target: int,
) -> Iterator[Step]:
    """Yield the operations from an element of an output back to the input. `target` is the value
    of a channel of its reach, which the element of each operand on the way has, too."""
    while True:
        origin = origins.get(id(x))
        if origin is None:
            yield Step("input", NO_PLACE, x.shape, element)
            return
        yield Step(origin.name, origin.place, x.shape, element)
        x, element = _operand_with(target, channel, origin, element, origins)


def _operand_with(
    target: int,
    channel: int,
    origin: Origin,
    element: tuple[int, ...],
    origins: dict[int, Origin],
) -> tuple[Abstract, tuple[int, ...]]:
    """Return the operand, and its element, by which a rule's result has its reach.

    The rule is applied again, to operands whose reach is the number of the element: what arrives
    is the number of one that brings the target.
    """
    # Of several, the operand that was made first: the way through the residual stream is short.
    operands = sorted(
        {id(operand): operand for operand in origin.operands}.values(),
        key=lambda operand: _order(operand, origins),
        reverse=True,
    )
    numbered: dict[int, Abstract] = {}
    begins: list[tuple[int, Abstract]] = []
    begin = 0
    for operand in operands:
        size = math.prod(operand.shape)
        numbers = np.arange(begin, begin + size, dtype=np.int32).reshape(operand.shape)
        brings = operand.reach[channel] == target
        numbered[id(operand)] = _with_single_channel(operand, np.where(brings, numbers, NOWHERE))
        begins.append((begin, operand))
        begin += size
    with np.errstate(all="ignore"):
        results: Any = origin.rule(*[numbered[id(operand)] for operand in origin.operands])
    result = results if isinstance(results, Abstract) else results[origin.result]
    number = int(whole(result, result.reach[0])[element])
    for begin, operand in reversed(begins):
        if number >= begin:
            place = np.unravel_index(number - begin, operand.shape)
            return operand, tuple(map(int, place))
    raise AssertionError(f"no operand of {origin.name} brings what its result has")


def _order(operand: Abstract, origins: dict[int, Origin]) -> int:
    origin = origins.get(id(operand))
    return -1 if origin is None else origin.order


def _with_single_channel(x: Abstract, channel: np.ndarray) -> Abstract:
    world = World(1, x.world.bound, x.world.rows_keep_an_entry)
    return Abstract(world, x.shape, x.dtype, x.low, x.high, x.loose, [channel])


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
        is_input = place == NO_PLACE and step.name == "input"
        texts.append(f"input at [{','.join(map(str, step.element))}]" if is_input else str(step))
    return texts


def _source(place: Place) -> str:
    """Return the line of source of a place; that of a library with the program's that calls it."""
    texts = []
    for line in (place.library, place.program):
        if line is not None:
            texts.append(_line_text(line))
    return "".join(f"   {text}" for text in texts)


def _line_text(line: Line) -> str:
    file, number = line
    # A cell of a notebook has a file of its own, whose name is a number.
    name = "cell" if "ipykernel" in file else Path(file).name
    return f"{name}:{number}: {linecache.getline(file, number).strip()}"


def told_entry(step: Step) -> str:
    """Return the operation by which an input comes in, for a message."""
    return f"{step.name}{_source(step.place)}"
