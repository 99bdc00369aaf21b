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
    """A number that isn't masked is below it in size: it is moderate."""
    rows_keep_an_entry: bool
    """Whether a row of a mask that data makes is assumed to keep an entry."""

    def nothing(self) -> Fields:
        """Return the reach of what depends on no input."""
        return [np.asarray(NOWHERE)] * self.channels

    def constant(self, value: Any) -> "Abstract":
        """Return an array whose numbers are known; keys of random numbers are unknown."""
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return self.unknown(value, self.nothing())
        number = np.asarray(value)
        return Abstract(self, number.shape, number.dtype, number, number, False, self.nothing())

    def unknown(self, aval: Any, reach: Fields, big: Any = False) -> "Abstract":
        """Return an array of any moderate numbers, and where `big` is true of any numbers."""
        dtype = number_dtype(aval)
        size = np.where(np.logical_and(big, is_float(dtype)), np.inf, 0.0)
        is_loose = np.full(size.shape, not is_truth(dtype))
        # A truth value lies between False and True; other numbers around 0.
        high = np.ones(size.shape) if is_truth(dtype) else size
        return Abstract(self, aval.shape, dtype, -size, high, is_loose, reach)


def is_float(dtype: Any) -> bool:
    """Return whether numbers are real or complex, and not integers or truth values."""
    return jnp.issubdtype(dtype, jnp.inexact)


def is_truth(dtype: Any) -> bool:
    """Return whether numbers are truth values."""
    return np.dtype(dtype).kind == "b"


def number_dtype(aval: Any) -> Any:
    """Return the dtype of an array; keys of random numbers count as unsigned integers."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return np.dtype(np.uint32)
    return np.dtype(aval.dtype)


class Abstract:
    """An abstract array.

    An element is a number from `low` to `high`, plus or minus a moderate number where it is
    `loose`. It is known if it is not loose and both ends are equal. -1e9 and loose is a masked
    score, from -inf to 0 and loose is masked or not, as data decides, and from -inf to inf is
    anything, NaN too. `reach` has for each channel the greatest position that the element can
    depend on.

    An axis along which nothing varies is stored with size 1, so that weights take no memory and
    attention takes one number for each pair of positions.
    """

    def __init__(
        self,
        world: World,
        shape: Sequence[int],
        dtype: Any,
        low: Any,
        high: Any,
        loose: Any,
        reach: Iterable[Any],
    ) -> None:
        self.world = world
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        if is_float(dtype):
            is_nan = np.isnan(low) | np.isnan(high)
            low = np.where(is_nan, -np.inf, low)
            high = np.where(is_nan, np.inf, high)
            loose = np.logical_or(loose, is_nan)
            # A moderate number, plus or minus one, is around 0.
            low = np.where(loose & (np.abs(low) < world.bound), 0, low)
            high = np.where(loose & (np.abs(high) < world.bound), 0, high)
        elif not is_truth(dtype):
            # Integers are known or not: nothing is asked of their size.
            loose = np.logical_or(loose, np.not_equal(low, high))
            low = np.where(loose, 0, low)
            high = low
        is_known = np.logical_not(loose) & np.equal(low, high)
        reach = [np.where(is_known, NOWHERE, channel).astype(np.int32) for channel in reach]
        fields = [
            np.asarray(low).astype(self.dtype),
            np.asarray(high).astype(self.dtype),
            np.asarray(loose, dtype=bool),
            *reach,
        ]
        # With as many axes as the array, so that fields of several arrays align.
        fields.append(np.zeros((1,) * len(self.shape), bool))
        self.fields: Fields = shrunk(fields)[:-1]
        self.low, self.high, self.loose, *self.reach = self.fields

    @property
    def known(self) -> np.ndarray:
        """Which numbers are known."""
        return ~self.loose & (self.low == self.high)

    @property
    def zero(self) -> np.ndarray:
        """Which numbers are known to be 0."""
        return self.known & (self.low == 0)

    @property
    def between(self) -> np.ndarray:
        """Which numbers are only known to lie between two others."""
        return ~self.loose & (self.low != self.high)

    @property
    def big(self) -> np.ndarray:
        """Which numbers may be of any size, as masked ones."""
        if not is_float(self.dtype):
            return np.zeros_like(self.loose)
        return np.maximum(np.abs(self.low), np.abs(self.high)) >= self.world.bound

    @property
    def load(self) -> Fields:
        """The channels of the reach, and one more that is 0 where a number is big.

        A result of numbers that come together is big if one of them is, as it depends on a
        position if one of them does.
        """
        return [*self.reach, np.where(self.big, np.int32(0), NOWHERE)]

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the greatest number that each element can be."""
        if is_float(self.dtype):
            margin = np.where(self.loose, self.world.bound, 0).astype(self.dtype)
            return self.low - margin, self.high + margin
        if is_truth(self.dtype):
            return self.low, self.high
        return np.where(self.loose, -np.inf, self.low), np.where(self.loose, np.inf, self.high)

    def with_fields(self, fields: Sequence[Any], shape: Sequence[int] | None = None) -> "Abstract":
        """Return an array of this dtype with other fields."""
        low, high, loose, *reach = fields
        new_shape = self.shape if shape is None else shape
        return Abstract(self.world, new_shape, self.dtype, low, high, loose, reach)

    def depending(self, *reaches: Fields) -> "Abstract":
        """Return the array with further dependences."""
        reach = union([self.reach, *reaches])
        return self.with_fields([self.low, self.high, self.loose, *reach])

    def blurred(self, axes: Iterable[int]) -> "Abstract":
        """Return what is true of every element along some axes."""
        along = tuple(axes)
        fields = [field.max(along, keepdims=True) for field in self.fields]
        fields[0] = self.low.min(along, keepdims=True)
        return self.with_fields(fields)

    def item(self, number: int) -> "Abstract":
        """Return one item along the first axis."""
        fields = [field[number % len(field)] for field in self.fields]
        return self.with_fields(fields, self.shape[1:])

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
    chosen = stack(*parts).blurred([0]).item(0)
    # The choice of a `cond` is a single number for arrays of any rank.
    behind = (1,) * (len(chosen.shape) - choice.loose.ndim)
    return chosen.depending([channel.reshape(channel.shape + behind) for channel in choice.reach])


def widened(choice: Abstract, *parts: Abstract) -> Abstract:
    """Return the same as `join`, so wide that a loop soon changes nothing more."""
    x = join(choice, *parts)
    if not is_float(x.dtype):
        return x
    bound = x.world.bound
    is_unsure = x.loose | x.between
    low = np.where(is_unsure & (x.low <= -bound), -np.inf, x.low)
    high = np.where(is_unsure & (x.high >= bound), np.inf, x.high)
    return x.with_fields([low, high, is_unsure, *x.reach])


def whole(x: Abstract, field: np.ndarray) -> np.ndarray:
    """Return a field with the array's own shape."""
    return np.broadcast_to(field, x.shape)
