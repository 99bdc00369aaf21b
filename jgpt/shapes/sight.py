"""Proofs of sight: which positions of its inputs an output can depend on, at given sizes."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.shapes.abstract import World, whole
from jgpt.shapes.interpreter import BOUNDS, Interpreter, Unreadable, assumptions_of, told
from jgpt.shapes.reading import Question, Reads, ask
from jgpt.shapes.reading_paths import entry_of, source_of, steps_of, texts_of
from jgpt.shapes.sizes import evaluate_size, names_in, parse_array

Sizes = Mapping[str, int | Iterable[int]]
LONGEST_IN_FULL = 64
"""Up to this length each length is proven; 64 lengths of a small model take some 20 s."""
SMALL = (5, 7, 3, 2, 11, 4, 6, 8, 12, 16)
"""Lengths at which a way is looked for: a length that no other axis has is best."""


@dataclasses.dataclass(frozen=True)
class SightProof:
    """Whether outputs read only the positions that they may. It is true if that is proven."""

    is_proven: bool
    text: str
    assumptions: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.is_proven

    def __str__(self) -> str:
        lines = [self.text]
        if self.assumptions:
            lines.append("assuming that")
            lines += [f"  {assumption}" for assumption in self.assumptions]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Axis:
    """An axis along which outputs may read nothing later, or themselves alone."""

    name: str
    is_causal: bool

    def wrong_element(self, found: Reads, axis: int) -> tuple[tuple[int, ...], int] | None:
        """Return the first element of an output that reads too much, and the channel which says
        so, or None."""
        shape = found.result.shape
        own = np.arange(shape[axis]).reshape([-1 if k == axis else 1 for k in range(len(shape))])
        channel = found.channel(self.name)
        wrongs = [(channel, found.last(self.name) > own)]
        if not self.is_causal:
            wrongs.append((channel + 1, found.first(self.name) < own))
        for wrong_channel, is_wrong in wrongs:
            if is_wrong.any():
                elements = map(tuple, np.argwhere(is_wrong))
                element = min(elements, key=lambda element: (element[axis], element))
                return tuple(map(int, element)), wrong_channel
        return None


@dataclasses.dataclass(frozen=True)
class _Leak:
    """An output's element that reads a position which it may not read."""

    question: _Axis
    found: Reads
    axis: int
    element: tuple[int, ...]
    channel: int


def prove_sight(
    function: Callable[..., Any],
    arrays: Sequence[str],
    causal: str | None,
    separate: str | None,
    sizes: Sizes | None,
) -> SightProof:
    """Prove that no output at a position of the axis `causal` reads an input after it, and that
    outputs along `separate` read themselves alone."""
    questions = []
    if causal is not None:
        questions.append(_Axis(causal, True))
    if separate is not None:
        questions.append(_Axis(separate, False))
    asked = _Asked(function, [parse_array(array) for array in arrays], questions)
    asked.require_axes()
    lengths, is_chosen = asked.lengths(sizes or {})
    name = questions[0].name

    proven: list[int] = []
    worlds: list[World] = []
    known: dict[str, None] = {}
    refused = ""
    for length in lengths:
        chosen = {**asked.other_sizes(sizes or {}), name: length}
        try:
            leak, interpreter = asked.leak(chosen)
        except Unreadable:
            raise
        except Exception as error:
            if is_chosen or not proven:
                raise
            # A length that the function refuses ends the list.
            reason, *_ = str(error).splitlines() or [type(error).__name__]  # a bare `assert`
            refused = f"; it refuses {name} = {length}: {reason}"
            break
        if leak is not None:
            return SightProof(False, asked.explained(leak, chosen, max(lengths)))
        proven.append(length)
        worlds.append(interpreter.world)
        known.update(dict.fromkeys(interpreter.known))
    # What is assumed of each length is assumed of all.
    world = dataclasses.replace(
        worlds[0],
        bound=min(world.bound for world in worlds),
        rows_keep_an_entry=any(world.rows_keep_an_entry for world in worlds),
    )
    others = asked.other_sizes(sizes or {})
    text = asked.proven_text(proven, refused, world.rows_keep_an_entry, others)
    return SightProof(True, text, tuple(assumptions_of(world, known)))


@dataclasses.dataclass
class _Asked:
    """A function, its arrays, and what is asked of it."""

    function: Callable[..., Any]
    arrays: list[tuple[Any, str]]
    questions: list[_Axis]
    axes: dict[_Axis, list[int]] = dataclasses.field(default_factory=dict)
    """For each output the axis that is asked of; the same at all lengths."""

    @functools.cached_property
    def of(self) -> dict[int, tuple[str | None, ...]]:
        """The tracked axes of each array."""
        asked = {question.name for question in self.questions}
        axes = {}
        for number, (_, dimensions) in enumerate(self.arrays):
            words = dimensions.split()
            axes[number] = tuple(word if word in asked else None for word in words)
        return axes

    def require_axes(self) -> None:
        """Raise ValueError unless each axis is one of an array, and once."""
        for question in self.questions:
            counts = [axes.count(question.name) for axes in self.of.values()]
            if not any(counts):
                raise ValueError(f"no array has an axis {question.name!r}, such as 'int32[b t]'")
            if max(counts) > 1:
                raise ValueError(f"an array has two axes {question.name!r}: name one otherwise")

    def lengths(self, sizes: Sizes) -> tuple[list[int], bool]:
        """Return the lengths to prove, and whether the user has chosen them."""
        names = set()
        for _, dimensions in self.arrays:
            names.update(names_in(dimensions))
        unknown = set(sizes) - names
        if unknown:
            raise ValueError(f"sizes names {min(unknown)!r}, a size that no array has")
        question = self.questions[0]
        given = sizes.get(question.name)
        if given is not None:
            chosen = [given] if isinstance(given, int) else list(given)
            if not chosen or min(chosen) < 1:
                raise ValueError(f"sizes has no positive length of {question.name!r}")
            return chosen, True
        if not question.is_causal:
            return [2], True
        block_size = getattr(self.function, "block_size", None)
        if block_size is None:
            return list(range(1, LONGEST_IN_FULL + 1)), False
        if block_size > LONGEST_IN_FULL:
            return [block_size], True
        return list(range(1, block_size + 1)), True

    def other_sizes(self, sizes: Sizes) -> dict[str, int]:
        """Return the size of each axis but the first that is asked for."""
        found = {}
        for _, dimensions in self.arrays:
            for name in names_in(dimensions):
                size = sizes.get(name, 2)
                if name == self.questions[0].name:
                    continue
                if not isinstance(size, int):
                    raise ValueError(f"sizes has several sizes of {name!r}: give one number")
                found[name] = size
        return found

    def _ask(self, sizes: Mapping[str, int]) -> Question:
        structs = []
        for dtype, dimensions in self.arrays:
            shape = [evaluate_size(word, sizes) for word in dimensions.split()]
            structs.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        question = ask(self.function, structs, self.of)
        names = {type(effect).__name__ for effect in question.closed.effects}
        # What is changed in place is refused where it happens, with the line.
        others = sorted(name for name in names if "Mutable" not in name and "Ref" not in name)
        if others:
            raise Unreadable(f"the function has side effects ({', '.join(others)}): leave them out")
        return question

    def leak(
        self, sizes: Mapping[str, int], *, records: bool = False
    ) -> tuple[_Leak | None, Interpreter]:
        """Return what an output reads that it may not read, or None, and the interpreter whose
        assumptions served."""
        question = self._ask(sizes)
        if not question.closed.out_avals:
            raise Unreadable("the function returns no array, so nothing is read")
        if not self.axes:
            for asked in self.questions:
                self.axes[asked] = self._axes_of(asked, question, sizes)
        leak = None
        interpreter: Any = None
        # What needs fewer assumptions is tried first.
        for keeps, bound in itertools.product((False, True), BOUNDS):
            world = World(2 * len(question.names), bound, keeps)
            outputs = question.answer(world, records=records)
            leak = self._first_leak(outputs, self.axes)
            interpreter = outputs[0].interpreter
            if leak is None:
                break
        return leak, interpreter

    @staticmethod
    def _first_leak(outputs: list[Reads], axes: Mapping[_Axis, list[int]]) -> _Leak | None:
        for question, axes_of_outputs in axes.items():
            for found, axis in zip(outputs, axes_of_outputs, strict=True):
                wrong = question.wrong_element(found, axis)
                if wrong is not None:
                    element, channel = wrong
                    return _Leak(question, found, axis, element, channel)
        return None

    def _axes_of(self, asked: _Axis, question: Question, sizes: Mapping[str, int]) -> list[int]:
        """Return the axis of each output that grows with the axis of the inputs."""
        size = sizes[asked.name]
        shapes = [aval.shape for aval in question.closed.out_avals]
        other = self._at_another_size(asked.name, sizes)
        if other is None:
            # A function of one size: an output has the axis where the inputs have it.
            places = {axes.index(asked.name) for axes in self.of.values() if asked.name in axes}
            others = [
                tuple(0 if axis in places else length for axis, length in enumerate(shape))
                for shape in shapes
            ]
        else:
            others = [aval.shape for aval in other.closed.out_avals]
        axes = []
        for number, (shape, other_shape) in enumerate(zip(shapes, others, strict=True)):
            found = []
            for axis, (length, other_length) in enumerate(zip(shape, other_shape, strict=True)):
                if length == size and length != other_length:
                    found.append(axis)
            if len(found) != 1:
                has = "no axis" if not found else f"{len(found)} axes"
                raise ValueError(
                    f"output {number} has {has} of the length {asked.name}: give a function "
                    "whose outputs have one, such as logits, or ask `jgpt.shapes.reads`"
                )
            axes += found
        return axes

    def _at_another_size(self, name: str, sizes: Mapping[str, int]) -> Question | None:
        for other in (sizes[name] - 1, sizes[name] + 1):
            with contextlib.suppress(Exception):  # this length is not possible
                if other >= 1:
                    return self._ask({**sizes, name: other})
        return None

    def proven_text(
        self,
        lengths: Sequence[int],
        refused: str,
        rows_keep_an_entry: bool,
        others: Mapping[str, int],
    ) -> str:
        """Return what is proven, and no more."""
        block_size = getattr(self.function, "block_size", None)
        name = self.questions[0].name
        end = ", the block size" if lengths[-1] == block_size else ""
        text = f"proven for {name} = {_spans(lengths)}{end}{refused}"
        if rows_keep_an_entry:
            text += ", if each row of a mask that data makes keeps an entry"
        lines = [text]
        for question in self.questions:
            if question.is_causal:
                lines.append(f"  no output along {question.name} reads an input after its position")
            else:
                lines.append(f"  outputs along {question.name} read their own input alone")
        if others:
            lines.append(f"  each at {_told_sizes(others)}")
        return "\n".join(lines)

    def explained(self, leak: _Leak, sizes: Mapping[str, int], longest: int) -> str:
        """Return which output can depend on which input, and by which way."""
        leak, sizes = self._recorded(leak, sizes, longest)
        question = leak.question
        found = leak.found
        target = int(whole(found.result, found.result.reach[leak.channel])[leak.element])
        position = abs(target)
        size = found.result.shape[leak.axis]
        output = leak.element[leak.axis]
        lines = [f"not proven: output {output} can depend on input {position}"]
        lines.append(f"  along {question.name}, at {_told_sizes(sizes)}")
        steps = list(steps_of(found.result, leak.element, leak.channel, target))
        entry = entry_of(steps, position, size)
        if entry is not None:
            lines.append(f"  it comes in at {entry.name}{source_of(entry.place)}")
        for name, place in found.interpreter.without_rule.items():
            lines.append(
                f"  {name}{told(place)} has no rule: each of its results may depend on every input"
            )
        lines += _advice(found.question)
        lines.append("  from the output to the input:")
        lines += [f"    {line}" for line in texts_of(steps)]
        return "\n".join(lines)

    def _recorded(
        self, leak: _Leak, sizes: Mapping[str, int], longest: int
    ) -> tuple[_Leak, Mapping[str, int]]:
        """Return the leak with its way, at the best small length that has one."""
        name = self.questions[0].name
        small = [size for size in SMALL if size <= longest]
        for length in [*small, sizes[name]]:
            at_length = {**sizes, name: length}
            try:
                found, _ = self.leak(at_length, records=True)
            except Exception:  # this length is not possible
                continue
            if found is not None:
                return found, at_length
        return leak, sizes


def _advice(question: Question) -> Iterator[str]:
    """Yield a line for each array of floats that looks like a mask."""
    for value in (*question.closed.consts, *question.weights):
        if _looks_like_a_mask(value):
            shape = ",".join(map(str, value.shape))
            yield (
                f"  {value.dtype.name}[{shape}] has the values of a mask, and is taken for a "
                "parameter: keep a mask in booleans or in NumPy, or give it as Known"
            )


def _looks_like_a_mask(value: Any) -> bool:
    is_array = isinstance(getattr(value, "value", value), jax.Array)
    if not is_array or value.ndim < 2 or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    values = np.unique(np.asarray(value, np.float32))
    return len(values) == 2 and (0.0 in values)


def _told_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _spans(lengths: Sequence[int]) -> str:
    """Return lengths as text: `1 to 64 and 1024`."""
    spans: list[list[int]] = []
    for length in lengths:
        if spans and length == spans[-1][-1] + 1:
            spans[-1].append(length)
        else:
            spans.append([length])
    texts = []
    for span in spans:
        texts.append(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}")
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
