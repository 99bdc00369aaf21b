"""Which positions of its inputs each output of a function can depend on."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jgpt.shapes.abstract import NOWHERE, Abstract, World, is_float, whole
from jgpt.shapes.calls import is_nnx
from jgpt.shapes.interpreter import BOUNDS, Interpreter, Known, Unreadable, assumptions_of
from jgpt.shapes.reading_paths import steps_of, texts_of


@dataclasses.dataclass(frozen=True)
class Reads:
    """For each element of an output, the first and the last position that it can depend on."""

    result: Abstract
    interpreter: Interpreter
    question: "Question"
    number: int
    """Which of the function's outputs it is."""

    def last(self, name: str) -> np.ndarray:
        """Return the last positions along an axis of the inputs; below 0 where none is read."""
        return whole(self.result, self.result.reach[self.channel(name)])

    def first(self, name: str) -> np.ndarray:
        """Return the first positions; beyond every size where none is read."""
        return -whole(self.result, self.result.reach[self.channel(name) + 1])

    @property
    def assumptions(self) -> list[str]:
        """What these positions rest on."""
        return assumptions_of(self.interpreter.world, self.interpreter.known)

    def path(self, output: Sequence[int], name: str, position: int) -> str:
        """Return the operations by which a position along an axis comes to an element of the
        output, from the output on, as lines of text. Raises ValueError for a position that is
        neither the first nor the last that the element reads."""
        element = tuple(output)
        channel = self.channel(name)
        for index, target in ((channel, position), (channel + 1, -position)):
            if int(whole(self.result, self.result.reach[index])[element]) == target:
                outputs = self.question.answer(self.interpreter.world, records=True)
                steps = steps_of(outputs[self.number].result, element, index, target)
                return "\n".join(texts_of(list(steps)))
        raise ValueError(
            f"position {position} is neither the first nor the last that output {list(element)} "
            "reads"
        )

    def channel(self, name: str) -> int:
        """Return the channel of the last positions along an axis; the next is of the first."""
        names = self.question.names
        if name not in names:
            raise ValueError(f"no input has an axis {name!r}: there are {', '.join(names)}")
        return 2 * names.index(name)


class Input(NamedTuple):
    """An array that a program is given."""

    value: Any
    is_known: bool
    axes: Sequence[str | None] = ()
    """The names of the tracked axes, and None for others."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A traced function, and the axes of its inputs that are tracked."""

    closed: Any
    inputs: list[Input]
    names: list[str]
    """The names of the tracked axes."""
    structure: Any
    """The structure of the function's result."""

    def answer(self, world: World, *, records: bool = False) -> list[Reads]:
        """Run the program with abstract arrays, and return what each output reads."""
        interpreter = Interpreter(world, records=records)
        with np.errstate(all="ignore"):
            operands = []
            for given, variable in zip(self.inputs, self.closed.jaxpr.invars, strict=True):
                if given.is_known:
                    operands.append(world.constant(given.value))
                else:
                    positions = _positions(variable.aval, self.names, given.axes)
                    operands.append(world.unknown(variable.aval, positions))
            results = interpreter.run(self.closed, operands)
        return [Reads(result, interpreter, self, number) for number, result in enumerate(results)]


def reads(function: Callable[..., Any], *args: Any, of: Mapping[int, Sequence[str | None]]) -> Any:
    """Return which positions of its inputs each output of a function can depend on.

    Arguments are arrays, shapes (`jax.ShapeDtypeStruct`), trees of them, or `Known` values. `of`
    maps the number of an argument to names of its axes; None is an axis that is not tracked. The
    result has the structure of the function's, with `Reads` in place of arrays. Weights and other
    arrays of floats are unknown. Raises ValueError for a program that can't be interpreted.
    """
    question = ask(function, args, of)
    outputs = question.answer(World(2 * len(question.names), BOUNDS[-1], True))
    return jax.tree.unflatten(question.structure, outputs)


def ask(
    function: Callable[..., Any], args: Sequence[Any], of: Mapping[int, Sequence[str | None]]
) -> Question:
    """Trace a function; the weights of an NNX module may be abstract, and come first among the
    program's inputs."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(function, linen.Module):
        raise Unreadable(
            "a Linen module has no weights of its own: give functools.partial(module.apply, "
            "variables)"
        )
    call = function
    inputs: list[Input] = []
    if is_nnx(function, "Module"):
        from flax import nnx

        graph, state = nnx.split(function)
        weights, structure = jax.tree.flatten(state)
        # Integers and truth values are known, numbers are parameters.
        for weight in weights:
            is_known = not isinstance(weight, jax.ShapeDtypeStruct) and not is_float(weight.dtype)
            inputs.append(Input(weight, is_known))

        def call(*values: Any) -> Any:
            leaves = values[: len(weights)]
            module: Any = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            return module(*values[len(weights) :])

    shapes = [jax.ShapeDtypeStruct(given.value.shape, given.value.dtype) for given in inputs]
    plain = []
    for number, argument in enumerate(args):
        value = argument
        is_known = isinstance(argument, Known)
        if is_known:
            value = argument.array
        plain.append(value)
        for leaf in jax.tree.leaves(value):
            inputs.append(Input(leaf, is_known, of.get(number, ())))
    closed, result = jax.make_jaxpr(call, return_shape=True)(*shapes, *plain)
    names: list[str] = []
    for axes in of.values():
        for name in axes:
            if name is not None and name not in names:  # arguments may share an axis
                names.append(name)
    return Question(closed, inputs, names, jax.tree.structure(result))


def _positions(aval: Any, names: Sequence[str], axes: Sequence[str | None]) -> list[np.ndarray]:
    """Return the channels of an input: each element's own position along each tracked axis."""
    channels = []
    for name in names:
        if name in axes:
            position = positions_along(aval.shape, axes.index(name))
            channels += [position, -position]
        else:
            channels += [np.asarray(NOWHERE)] * 2
    return channels


def positions_along(shape: Sequence[int], axis: int) -> np.ndarray:
    """Return the positions along an axis, aligned with an array of a shape."""
    others = [other for other in range(len(shape)) if other != axis]
    return np.expand_dims(np.arange(shape[axis], dtype=np.int32), others)
