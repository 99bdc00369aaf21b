"""Which positions of its inputs each output of a function can depend on."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.shapes.abstract import NOWHERE, Abstract, World, whole
from jgpt.shapes.calls import is_nnx
from jgpt.shapes.interpreter import BOUNDS, Interpreter, Known, assumptions_of
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
                recorded = outputs[self.number]
                steps = steps_of(recorded.result, element, index, target)
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


@dataclasses.dataclass(frozen=True)
class Question:
    """A traced function, and the axes of its arguments that are tracked."""

    closed: Any
    weights: tuple[Any, ...]
    """The variables of an NNX module, which come first among the program's inputs."""
    arguments: tuple[Any, ...]
    structure: Any
    """The structure of the function's result."""
    of: Mapping[int, Sequence[str | None]]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tracked axes."""
        names: dict[str, None] = {}
        for axes in self.of.values():
            names.update(dict.fromkeys(name for name in axes if name is not None))
        return tuple(names)

    def answer(self, world: World, *, records: bool = False) -> list[Reads]:
        """Run the program with abstract arrays, and return what each output reads."""
        interpreter = Interpreter(world, records=records)
        variables = iter(self.closed.jaxpr.invars)
        inputs = [_weight(world, value, next(variables).aval) for value in self.weights]
        for number, argument in enumerate(self.arguments):
            axes = tuple(self.of.get(number, ()))
            is_known = isinstance(argument, Known)
            for leaf in jax.tree.leaves(argument.array if is_known else argument):
                aval = next(variables).aval
                if is_known:
                    inputs.append(world.constant(leaf))
                else:
                    positions = list(_positions(aval, self.names, axes))
                    inputs.append(world.unknown(aval, positions))
        with np.errstate(all="ignore"):
            results = interpreter.run(self.closed, inputs)
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
    """Trace a function; the weights of an NNX module may be abstract."""
    weights: tuple[Any, ...] = ()
    call = function
    if is_nnx(function, "Module"):
        from flax import nnx

        graph, state = nnx.split(function)
        leaves_of_state, structure = jax.tree.flatten(state)
        weights = tuple(leaves_of_state)

        def call(*values: Any) -> Any:
            leaves = values[: len(weights)]
            module: Any = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            return module(*values[len(weights) :])

    plain = [argument.array if isinstance(argument, Known) else argument for argument in args]
    closed, shapes = jax.make_jaxpr(call, return_shape=True)(*map(_shape_of, weights), *plain)
    return Question(closed, weights, tuple(args), jax.tree.structure(shapes), of)


def _shape_of(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _weight(world: World, value: Any, aval: Any) -> Abstract:
    """Return a variable of a module: known if it has integers or truth values, else a parameter."""
    is_number = not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    has_value = not isinstance(value, jax.ShapeDtypeStruct)
    if has_value and is_number and not jnp.issubdtype(aval.dtype, jnp.inexact):
        return world.constant(np.asarray(value))
    return world.unknown(aval, world.nothing)


def _positions(aval: Any, names: Sequence[str], axes: Sequence[str | None]) -> Iterator[np.ndarray]:
    """Yield the channels of an input: each element's own position along each tracked axis."""
    for name in names:
        if name not in axes:
            yield np.asarray(NOWHERE)
            yield np.asarray(NOWHERE)
            continue
        axis = axes.index(name)
        shape = [1] * len(aval.shape)
        shape[axis] = -1
        position = np.arange(aval.shape[axis], dtype=np.int32).reshape(shape)
        yield position
        yield -position
