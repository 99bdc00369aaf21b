"""Abstract arrays: for each element, which input positions it can depend on, and between which
numbers it lies."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NOWHERE = np.int32(-(2**30))
"""Below every position: no dependence."""
Fields = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class World:
    """What one interpretation tracks and assumes."""

    channels: int
    """For each tracked axis two: the last position, and minus the first."""
    bound: float
    """A number that isn't masked is moderate: in size at most this."""
    rows_keep_an_entry: bool
    """Whether a row of a mask that data makes is assumed to keep an entry."""

    @property
    def nothing(self) -> Fields:
        """The reach of what depends on no input."""
        return [np.asarray(NOWHERE)] * self.channels

    def limit(self, dtype: Any) -> Any:
        """Return the greatest moderate number of a dtype."""
        if not is_float(dtype):
            return np.inf
        # Below the greatest number of float16, which stands for infinity in its masks.
        greatest = float(jnp.finfo(dtype).max) / 1.01
        return np.asarray(min(self.bound, greatest)).astype(dtype)

    def constant(self, value: Any) -> "Abstract":
        """Return an array whose numbers are known; keys of random numbers are unknown."""
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return self.unknown(value, self.nothing)
        number = np.asarray(value)
        return Abstract(self, number.shape, number.dtype, [number, number, *self.nothing])

    def unknown(self, aval: Any, reach: Fields, big: Any = False) -> "Abstract":
        """Return an array of any moderate numbers, and where `big` is true of any numbers."""
        dtype = np.dtype(np.uint32)  # of keys of random numbers
        if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            dtype = np.dtype(aval.dtype)
        if is_float(dtype):
            high = np.where(big, np.inf, self.limit(dtype))
            low = -high
        else:
            # For an integer, any two numbers that differ stand for all.
            low = np.False_
            high = np.True_
        return Abstract(self, aval.shape, dtype, [low, high, *reach])


def is_float(dtype: Any) -> bool:
    """Return whether numbers are real or complex, and not integers or truth values."""
    return jnp.issubdtype(dtype, jnp.inexact)


class Abstract:
    """An abstract array.

    An element is a number from `low` to `high`, and known if these are equal. From minus the limit
    to the limit it is any moderate number; around -1e9 a masked score; from -inf to the limit
    masked or not, as data decides; from -inf to inf anything, NaN too. `reach` has for each channel
    the greatest position that the element can depend on.

    An axis along which nothing varies is stored with size 1, so that weights take no memory and
    attention takes one number for each pair of positions.
    """

    origin: Any = None
    """How the array was made, if that is recorded."""

    def __init__(
        self, world: World, shape: Sequence[int], dtype: Any, fields: Iterable[Any]
    ) -> None:
        low, high, *reach = fields
        self.world = world
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.limit = world.limit(dtype)
        if is_float(dtype):
            low, high = self._ends_of_floats(low, high)
        elif self.dtype != bool:
            low, high = self._ends_of_integers(low, high)
        low = np.asarray(low).astype(self.dtype)
        high = np.asarray(high).astype(self.dtype)
        fields = [low, high]
        is_known = low == high
        for channel in reach:
            # A known number is the same whatever the inputs are.
            fields.append(np.where(is_known, NOWHERE, channel).astype(np.int32))
        # With as many axes as the array, so that fields of several arrays align.
        fields.append(np.zeros((1,) * len(self.shape), bool))
        self.fields: Fields = shrunk(fields)[:-1]
        self.low, self.high, *self.reach = self.fields

    def _ends_of_floats(self, low: Any, high: Any) -> Fields:
        """Return the ends of floats: NaN may be any number, and a moderate one is any such."""
        is_nan = np.isnan(low) | np.isnan(high)
        low, high = chosen(is_nan, (-np.inf, np.inf), (low, high))
        size = np.maximum(-low, high)
        # One interval for all moderate numbers, so that a loop comes to a fixpoint.
        is_moderate = (size == self.limit) & (low != high)
        return chosen(is_moderate, (-size, size), (low, high))

    def _ends_of_integers(self, low: Any, high: Any) -> Fields:
        """Return the ends of integers, which are known or not: nothing is asked of their size."""
        anything = (jnp.iinfo(self.dtype).min, jnp.iinfo(self.dtype).max)
        return chosen(np.equal(low, high), (low, high), anything)

    @property
    def known(self) -> np.ndarray:
        """Which numbers are known."""
        return self.low == self.high

    @property
    def zero(self) -> np.ndarray:
        """Which numbers are known to be 0."""
        return self.known & (self.low == 0)

    @property
    def big(self) -> np.ndarray:
        """Which numbers may be of any size, as masked ones."""
        return np.maximum(np.abs(self.low), np.abs(self.high)) > self.limit

    @property
    def between(self) -> np.ndarray:
        """Which numbers are only known to lie between two others."""
        if is_float(self.dtype) or self.dtype == bool:
            return ~self.known & (self.high != self.limit)
        return np.zeros_like(self.low, bool)

    @property
    def load(self) -> Fields:
        """The channels of the reach, and one more that is 0 where a number is big.

        A result of numbers that come together is big if one of them is, as it depends on a
        position if one of them does.
        """
        return [*self.reach, np.where(self.big, np.int32(0), NOWHERE)]

    def with_fields(self, fields: Iterable[Any], shape: Sequence[int] | None = None) -> "Abstract":
        """Return an array of this dtype with other fields."""
        if shape is None:
            shape = self.shape
        return Abstract(self.world, shape, self.dtype, fields)

    def depending(self, *reaches: Fields) -> "Abstract":
        """Return the array with further dependences."""
        return self.with_fields([self.low, self.high, *union([self.reach, *reaches])])

    def blurred(self, axes: Iterable[int]) -> "Abstract":
        """Return what is true of every element along some axes."""
        along = tuple(axes)
        low, *others = self.fields
        greatest = [field.max(along, keepdims=True) for field in others]
        return self.with_fields([low.min(along, keepdims=True), *greatest])

    def item(self, number: int) -> "Abstract":
        """Return one item along the first axis."""
        items = []
        for field in self.fields:
            # A field that doesn't vary along the axis has one item.
            items.append(field[number % len(field)])
        return self.with_fields(items, self.shape[1:])

    def is_same(self, other: "Abstract") -> bool:
        """Return whether all fields are equal."""
        return all(map(np.array_equal, self.fields, other.fields))


def shrunk(fields: Sequence[np.ndarray]) -> Fields:
    """Store each axis along which no field varies with size 1."""
    common = list(np.broadcast_arrays(*fields))
    for axis in range(common[0].ndim):
        if common[0].shape[axis] <= 1:
            continue
        firsts = [field.take([0], axis) for field in common]
        if all(map(_is_constant, common, firsts, [axis] * len(common))):
            common = list(np.broadcast_arrays(*firsts))
    return common


def _is_constant(field: np.ndarray, first: np.ndarray, axis: int) -> bool:
    # A stride of 0 is that of a broadcast axis, which need not be compared.
    return field.strides[axis] == 0 or bool((field == first).all())


def chosen(condition: Any, fields: Sequence[Any], others: Sequence[Any]) -> Fields:
    """Return fields where a condition is true, and others elsewhere."""
    return [np.where(condition, *pair) for pair in zip(fields, others, strict=True)]


def union(loads: Iterable[Fields]) -> Fields:
    """Return, channel by channel, what depends on all that one of several loads depends on."""
    return [functools.reduce(np.maximum, channels) for channels in zip(*loads, strict=True)]


def stack(*parts: Abstract) -> Abstract:
    """Return arrays of one shape, stacked along a new first axis."""
    stacked = []
    for fields in zip(*[part.fields for part in parts], strict=True):
        stacked.append(np.stack(np.broadcast_arrays(*fields)))
    return parts[0].with_fields(stacked, (len(parts), *parts[0].shape))


def join(choice: Abstract, *parts: Abstract) -> Abstract:
    """Return what is true of whichever part data chooses."""
    x = stack(*parts).blurred([0]).item(0)
    # The choice of a `cond` is a single number for arrays of any rank.
    behind = (1,) * (len(x.shape) - choice.low.ndim)
    return x.depending([channel.reshape(channel.shape + behind) for channel in choice.reach])


def widened(choice: Abstract, *parts: Abstract) -> Abstract:
    """Return the same as `join`, so wide that a loop soon changes nothing more."""
    x = join(choice, *parts)
    if not is_float(x.dtype):
        return x
    low = np.where(x.low < -x.limit, -np.inf, -x.limit)
    high = np.where(x.high > x.limit, np.inf, x.limit)
    return x.with_fields(chosen(x.known, x.fields, [low, high, *x.reach]))


def whole(x: Abstract, field: np.ndarray) -> np.ndarray:
    """Return a field with the array's own shape."""
    return np.broadcast_to(field, x.shape)
