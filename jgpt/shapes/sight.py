"""Proofs of sight: which positions of its inputs an output can depend on, at given sizes."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.shapes.abstract import World, whole
from jgpt.shapes.interpreter import BOUNDS, Unreadable, assumptions_of, told
from jgpt.shapes.reading import Question, Reads, ask, positions_along
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


def prove_sight(
    function: Callable[..., Any],
    arrays: Sequence[str],
    causal: str | None,
    separate: str | None,
    sizes: Sizes,
) -> SightProof:
    """Prove that no output at a position of the axis `causal` reads an input after it, and that
    outputs along `separate` read themselves alone."""
    asked = _Asked(function, [parse_array(array) for array in arrays], causal, separate)
    name = asked.names[0]
    lengths, others = asked.sizes(sizes)
    block_size = getattr(function, "block_size", None)
    worlds: dict[int, World] = {}
    known: list[str] = []
    refused = ""
    for length in lengths:
        try:
            leak, outputs = asked.leak({**others, name: length})
        except Unreadable:
            raise
        except Exception as error:
            if name in sizes or block_size is not None or not worlds:
                raise
            # A length that the function refuses ends the list.
            reason, *_ = str(error).splitlines() or [type(error).__name__]  # a bare `assert`
            refused = f"; it refuses {name} = {length}: {reason}"
            break
        if leak is not None:
            return SightProof(False, asked.explained(leak, {**others, name: length}, max(lengths)))
        worlds[length] = outputs[0].interpreter.world
        known += outputs[0].interpreter.known

    # What is assumed of one length is assumed of all.
    bound = min(world.bound for world in worlds.values())
    keeps = any(world.rows_keep_an_entry for world in worlds.values())
    proven = list(worlds)
    text = f"proven for {name} = {_spans(proven)}"
    if proven[-1] == block_size:
        text += ", the block size"
    text += refused
    if keeps:
        text += ", if each row of a mask that data makes keeps an entry"
    if causal is not None:
        text += f"\n  no output along {causal} reads an input after its position"
    if separate is not None:
        text += f"\n  outputs along {separate} read their own input alone"
    if others:
        text += f"\n  each at {_told_sizes(others)}"
    return SightProof(True, text, tuple(assumptions_of(World(0, bound, keeps), known)))


class _Leak(NamedTuple):
    """An output's element that reads a position which it may not read."""

    name: str
    found: Reads
    axis: int
    element: tuple[int, ...]
    channel: int


@dataclasses.dataclass
class _Asked:
    """A function, its arrays, and the axes along which outputs may read nothing later, or
    themselves alone."""

    function: Callable[..., Any]
    arrays: list[tuple[Any, str]]
    causal: str | None
    separate: str | None
    axes: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    """The axis of each name in each output: that of the first length."""

    def __post_init__(self) -> None:
        self.of: dict[int, list[str | None]] = {}
        for number, (_, dimensions) in enumerate(self.arrays):
            words = dimensions.split()
            self.of[number] = [word if word in self.names else None for word in words]
        for name in self.names:
            counts = [axes.count(name) for axes in self.of.values()]
            if not any(counts):
                raise ValueError(f"no array has an axis {name!r}, such as 'int32[b t]'")
            if max(counts) > 1:
                raise ValueError(f"an array has two axes {name!r}: name one otherwise")

    @property
    def names(self) -> list[str]:
        """The names of the axes."""
        return [name for name in (self.causal, self.separate) if name is not None]

    def sizes(self, chosen: Sizes) -> tuple[list[int], dict[str, int]]:
        """Return the lengths of the first axis, and the sizes of all others."""
        names = [name for _, dimensions in self.arrays for name in names_in(dimensions)]
        for name in chosen:
            if name not in names:
                raise ValueError(f"sizes names {name!r}, a size that no array has")
        first = self.names[0]
        lengths = chosen.get(first, self._default_lengths())
        lengths = [lengths] if isinstance(lengths, int) else list(lengths)
        if min(lengths, default=0) < 1:
            raise ValueError(f"sizes has no positive length of {first!r}")
        others: dict[str, int] = {}
        for name in names:
            size = chosen.get(name, 2)
            if name == first:
                continue
            if not isinstance(size, int):
                raise ValueError(f"sizes has several sizes of {name!r}: give one number")
            others[name] = size
        return lengths, others

    def _default_lengths(self) -> Iterable[int]:
        longest = getattr(self.function, "block_size", LONGEST_IN_FULL)
        if self.causal is None:
            return [2]
        if longest > LONGEST_IN_FULL:
            return [longest]
        return range(1, longest + 1)

    def leak(
        self, sizes: Mapping[str, int], *, records: bool = False
    ) -> tuple[_Leak | None, list[Reads]]:
        """Return what an output reads that it may not read, or None, and what each output reads
        under the assumptions that served."""
        shapes = []
        for dtype, dimensions in self.arrays:
            shape = [evaluate_size(word, sizes) for word in dimensions.split()]
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        question = ask(self.function, shapes, self.of)
        if not question.closed.out_avals:
            raise Unreadable("the function returns no array, so nothing is read")
        leak, outputs = None, []
        # What needs fewer assumptions is tried first.
        for keeps, bound in itertools.product((False, True), BOUNDS):
            world = World(2 * len(question.names), bound, keeps)
            outputs = question.answer(world, records=records)
            leak = next(self._leaks(outputs, sizes), None)
            if leak is None:
                break
        if question.closed.effects:
            names = sorted(type(effect).__name__ for effect in question.closed.effects)
            raise Unreadable(f"the function has side effects ({', '.join(names)}): leave them out")
        return leak, outputs

    def _leaks(self, outputs: Sequence[Reads], sizes: Mapping[str, int]) -> Iterator[_Leak]:
        for name, found in itertools.product(self.names, outputs):
            x = found.result
            axis = self._axis(name, found, sizes[name])
            own = positions_along(x.shape, axis)
            channel = found.channel(name)
            limits = {channel: own}
            if name == self.separate:
                limits[channel + 1] = -own
            for number, limit in limits.items():
                wrong = np.argwhere(whole(x, x.reach[number]) > limit)
                if len(wrong):
                    element = wrong[wrong[:, axis].argmin()]
                    yield _Leak(name, found, axis, tuple(element.tolist()), number)

    def _axis(self, name: str, found: Reads, size: int) -> int:
        """Return the axis of an output that has a name: the one where an array has it, else the
        only one of this size."""
        shape = found.result.shape
        axes = [axis for axis, length in enumerate(shape) if length == size]
        places = {words.index(name) for words in self.of.values() if name in words}
        if places & set(axes):
            axes = list(places & set(axes))
        key = name, found.number
        if len(axes) == 1:
            self.axes.setdefault(key, axes[0])
        axis = self.axes.get(key)
        if axis is None or shape[axis] != size:
            raise Unreadable(
                f"output {found.number} has no axis {name}, but the shape {list(shape)} at "
                f"{name} = {size}: give a function whose outputs have one where its input has it, "
                "such as logits, or ask `jgpt.shapes.reads`"
            )
        return axis

    def explained(self, leak: _Leak, sizes: Mapping[str, int], longest: int) -> str:
        """Return which output can depend on which input, and by which way, at the best small length
        that has one."""
        name = self.names[0]
        for length in [*[size for size in SMALL if size <= longest], sizes[name]]:
            with contextlib.suppress(Exception):  # this length is not possible
                recorded, _ = self.leak({**sizes, name: length}, records=True)
                if recorded is not None:
                    leak, sizes = recorded, {**sizes, name: length}
                    break
        x = leak.found.result
        target = int(whole(x, x.reach[leak.channel])[leak.element])
        position = abs(target)
        lines = [
            f"not proven: output {leak.element[leak.axis]} can depend on input {position}",
            f"  along {leak.name}, at {_told_sizes(sizes)}",
        ]
        steps = list(steps_of(x, leak.element, leak.channel, target))
        entry = entry_of(steps, position, x.shape[leak.axis])
        if entry is not None:
            lines.append(f"  it comes in at {entry.name}{source_of(entry.place)}")
        for primitive, place in leak.found.interpreter.without_rule.items():
            lines.append(
                f"  {primitive}{told(place)} has no rule: each of its results may depend on every "
                "input"
            )
        lines += _advice(leak.found.question)
        lines.append("  from the output to the input:")
        lines += [f"    {line}" for line in texts_of(steps)]
        return "\n".join(lines)


def _advice(question: Question) -> Iterator[str]:
    """Yield a line for each array of floats that looks like a mask: of 0 and another number."""
    for value in (*question.closed.consts, *[given.value for given in question.inputs]):
        if (
            isinstance(value, jax.Array)
            and value.ndim > 1
            and jnp.isdtype(value.dtype, "real floating")
        ):
            numbers = np.unique(value)
            if len(numbers) == 2 and 0 in numbers:
                shape = ",".join(map(str, value.shape))
                yield (
                    f"  {value.dtype.name}[{shape}] has the values of a mask, and is taken for a "
                    "parameter: keep a mask in booleans or in NumPy, or give it as Known"
                )


def _told_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _spans(lengths: Sequence[int]) -> str:
    """Return lengths as text: `1 to 64 and 1024`."""
    texts = []
    in_order = itertools.groupby(enumerate(lengths), key=lambda pair: pair[1] - pair[0])
    for _, span in in_order:
        first, *others = [length for _, length in span]
        texts.append(f"{first} to {others[-1]}" if others else str(first))
    *before, last = texts
    return f"{', '.join(before)} and {last}" if before else last
