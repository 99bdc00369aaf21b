"""For each primitive of JAX, what its results can depend on.

A rule gets an equation and abstract arrays, and returns abstract arrays. There is no default: a
primitive without a rule lets every result depend on every operand (`anything`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.shapes.abstract import (
    NOWHERE,
    Abstract,
    Fields,
    chosen,
    is_float,
    join,
    shrunk,
    stack,
    union,
    whole,
)

Arrays = list[Abstract]
Rule = Callable[..., Arrays]


def named(names: str) -> list[str]:
    """Return the names in a text."""
    return names.split()


# --- element by element ---------------------------------------------------------------------------

IN_NUMPY = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "exp": np.exp,
    "neg": np.negative,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
"""What NumPy computes as JAX does, without a compilation."""
MONOTONE = named(
    "add add_any sub mul div neg exp exp2 expm1 logistic tanh erf floor ceil round clamp "
    "convert_element_type reduce_precision lt le gt ge and or not"
)
"""Monotone in each operand, and moderate for moderate ones."""
OTHER_FUNCTIONS = named(
    "abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt "
    "clz complex conj cos cosh digamma eq erf_inv erfc igamma igammac imag integer_pow is_finite "
    "lgamma log log1p log2 ne nextafter one_minus_square population_count pow real rem rsqrt "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan xor"
)
"""Computed element by element, and not."""


def computed(equation: Any, *values: Any, **changes: Any) -> list[np.ndarray]:
    """Compute an equation, with changed parameters if they are given: by JAX, or by NumPy where a
    matrix of averages needs it."""
    parameters = equation.params | changes
    name = equation.primitive.name
    # JAX compiles each operation for each shape, and a proof asks at up to 64 lengths: with these
    # two and division, a matrix of averages took 31 s, and takes 0.8 s in NumPy.
    if name == "iota":
        shape = parameters["shape"]
        places = np.indices(shape, sparse=True)[parameters["dimension"]]
        return [np.broadcast_to(places, shape).astype(parameters["dtype"])]
    if name == "reduce_sum" and is_float(values[0].dtype):
        # in float64, whose rounding can't hide a sum that is 0
        exact = np.sum(values[0], parameters["axes"], np.float64)
        return [exact.astype(values[0].dtype)]
    results = equation.primitive.bind(*map(jnp.asarray, values), **parameters)
    if not equation.primitive.multiple_results:
        results = [results]
    return [np.asarray(result) for result in results]


def _computed_elements(equation: Any, *values: np.ndarray) -> np.ndarray:
    name = equation.primitive.name
    # NumPy's quotient of integers is a float
    if name in IN_NUMPY and (name != "div" or is_float(values[0].dtype)):
        return IN_NUMPY[name](*values)
    (value,) = computed(equation, *np.broadcast_arrays(*values))
    return value


def elementwise(equation: Any, *xs: Abstract) -> Arrays:
    """Return a function of single elements: known where the operands are, else bounded by the
    function's values at the ends of the operands where it is monotone."""
    world = xs[0].world
    reach = union([x.reach for x in xs])
    # Numbers vary along fewer axes than what they depend on.
    numbers = [x.with_fields([*shrunk([x.low, x.high]), *world.nothing]) for x in xs]
    is_known = functools.reduce(np.logical_and, [x.known for x in numbers])
    # The logarithm of a number from 0 to 1, for instance, may be of any size.
    is_big = functools.reduce(np.logical_or, [x.big | x.between for x in numbers])
    plain = world.unknown(equation.outvars[0].aval, reach, is_big)
    ends = [plain.low, plain.high]
    if _is_bounded_by_ends(equation, numbers) and not is_known.all():
        # Of anything, NaN too, nothing is known.
        is_wild = [(x.low == -np.inf) & (x.high == np.inf) for x in numbers]
        is_unbounded = functools.reduce(np.logical_or, is_wild)
        ends = chosen(is_unbounded, ends, _between_ends(equation, plain, numbers))
    if is_known.any():
        value = _computed_elements(equation, *[x.low for x in numbers])
        ends = chosen(is_known, [value, value], ends)
    return [plain.with_fields([*ends, *reach])]


def _is_bounded_by_ends(equation: Any, xs: Arrays) -> bool:
    dtypes = [equation.outvars[0].aval.dtype, *[x.dtype for x in xs]]
    are_ordered = all(
        jnp.issubdtype(dtype, jnp.floating) or np.dtype(dtype).kind == "b" for dtype in dtypes
    )
    return are_ordered and equation.primitive.name in MONOTONE


def _between_ends(equation: Any, plain: Abstract, xs: Arrays) -> Fields:
    """Return the least and the greatest value of a function that is monotone in each operand."""
    function = functools.partial(_computed_elements, equation)
    if equation.primitive.name == "div":
        xs = [xs[0], _reciprocal(xs[1])]
        function = np.multiply
    least, greatest = [], []
    for corner in itertools.product(*[[(x, x.low), (x, x.high)] for x in xs]):
        value = function(*[end for _, end in corner])
        low, high = value, value
        if is_float(plain.dtype):
            # A function of moderate numbers is moderate, unless they meet a 0.
            are_within = [np.abs(end) <= x.limit for x, end in corner]
            are_ends = [(np.abs(end) == x.limit) & ~x.known for x, end in corner]
            is_moderate = functools.reduce(np.logical_and, [value != 0, *are_within])
            is_moderate = is_moderate & functools.reduce(np.logical_or, are_ends)
            low, high = chosen(is_moderate, (-plain.limit, plain.limit), (value, value))
        least.append(low)
        greatest.append(high)
    return [functools.reduce(np.minimum, least), functools.reduce(np.maximum, greatest)]


def _reciprocal(x: Abstract) -> Abstract:
    """Return 1 / x. That of an unknown moderate number is moderate: it is assumed not to be 0."""
    ends = chosen(x.big | x.between, (np.nan, np.nan), (x.low, x.high))
    ends = chosen(x.known, (1 / x.low, 1 / x.high), ends)
    return x.with_fields([*ends, *x.reach])


def select(equation: Any, which: Abstract, *cases: Abstract) -> Arrays:
    """Return the chosen case where the choice is known, and what is true of all cases elsewhere."""
    fields = cases[0].fields
    if not which.known.all():
        fields = join(which, *cases).fields
    for number, case in enumerate(cases):
        is_chosen = which.known & (which.low == number)
        fields = chosen(is_chosen, case.fields, fields)
    return [cases[0].with_fields(fields, equation.outvars[0].aval.shape)]


def extreme(equation: Any, *xs: Abstract) -> Arrays:
    """Return a maximum, a minimum, or whether any or all are true: it ignores what certainly is
    below (above) another element."""
    name = equation.primitive.name
    x, axes = xs[0], equation.params.get("axes")
    if axes is None:
        x, axes = stack(*xs), (0,)
    elif name in ("reduce_and", "reduce_or") and x.dtype != bool:  # bits of integers
        return anything(equation, x)
    if name in ("min", "reduce_min", "reduce_and"):
        low, high = x.low.min(axes, keepdims=True), x.high.min(axes, keepdims=True)
        is_lost = x.low > high
    else:
        low, high = x.low.max(axes, keepdims=True), x.high.max(axes, keepdims=True)
        is_lost = x.high < low
        if is_float(x.dtype) and x.world.rows_keep_an_entry:
            # A row of a mask that data makes has an entry that isn't masked, by assumption.
            low = np.where((low < -x.limit) & (np.abs(high) <= x.limit), -x.limit, low)
    reach = [np.where(is_lost, NOWHERE, channel).max(axes) for channel in x.reach]
    fields = [low.squeeze(axes), high.squeeze(axes), *reach]
    return [x.with_fields(fields, equation.outvars[0].aval.shape)]


# --- movement of elements -------------------------------------------------------------------------

MOVEMENTS = named(
    "broadcast_in_dim concatenate pad reshape rev slice split squeeze stack tile transpose unstack"
)
"""Primitives that only move elements: they move the elements' numbers, too."""


def _numbered(*xs: Abstract) -> list[np.ndarray]:
    """Return arrays with the numbers of the elements that are stored."""
    numbers = []
    start = 0
    for x in xs:
        stored = np.arange(start, start + x.low.size, dtype=np.int32)
        numbers.append(whole(x, stored.reshape(x.low.shape)))
        start += stored.size
    return numbers


def _picked(places: np.ndarray, aval: Any, *xs: Abstract) -> Abstract:
    """Return the stored elements with these numbers; -1 is outside, a number of any size."""
    (places,) = shrunk([places])
    world = xs[0].world
    aval_outside = jax.ShapeDtypeStruct((1,), xs[0].dtype)
    outside = world.unknown(aval_outside, world.nothing, True)
    fields = []
    for parts in zip(*[x.fields for x in (*xs, outside)], strict=True):
        flat = np.concatenate([part.reshape(-1) for part in parts])
        fields.append(flat[places])
    return xs[0].with_fields(fields, aval.shape)


def _moved_in_numpy(equation: Any, numbers: np.ndarray) -> np.ndarray | None:
    """Return what JAX would return for frequent movements, without a compilation, or None."""
    parameters = equation.params
    shape = equation.outvars[0].aval.shape
    match equation.primitive.name:
        case "broadcast_in_dim":
            new_axes = set(range(len(shape))) - set(parameters["broadcast_dimensions"])
            return np.broadcast_to(np.expand_dims(numbers, tuple(new_axes)), shape)
        case "reshape" if parameters["dimensions"] is None:
            return numbers.reshape(shape)
        case "squeeze":
            return numbers.reshape(shape)
        case "transpose":
            return numbers.transpose(parameters["permutation"])
    return None


def movement(
    equation: Any, *xs: Abstract, indices: Sequence[np.ndarray] = (), **changes: Any
) -> Arrays:
    """Run a primitive on the numbers of elements in place of the elements."""
    avals = [variable.aval for variable in equation.outvars]
    is_uniform = xs[0].low.size == 1 and all(x.is_same(xs[0]) for x in xs)
    if is_uniform and not indices:  # such as weights
        fields = [field.reshape(()) for field in xs[0].fields]
        return [xs[0].with_fields(fields, aval.shape) for aval in avals]
    numbers = _numbered(*xs)
    moved = None
    if len(numbers) == 1 and not indices:
        moved = _moved_in_numpy(equation, numbers[0])
    places = computed(equation, *numbers, *indices, **changes) if moved is None else [moved]
    return [_picked(place, aval, *xs) for place, aval in zip(places, avals, strict=True)]


def gather(equation: Any, x: Abstract, index: Abstract) -> Arrays:
    """Return elements at indices; along an axis with an unknown index it may be any of them."""
    dimensions = equation.params["dimension_numbers"]
    is_known = whole(index, index.known)
    unsure = []
    for place, axis in enumerate(dimensions.start_index_map):
        if not is_known[..., place].all():
            unsure.append(axis)
    values = whole(index, np.where(index.known, index.low, 0))
    (found,) = movement(equation, x.blurred(unsure), indices=[values], fill_value=-1)
    reach = [np.expand_dims(c.max(-1), dimensions.offset_dims) for c in index.reach]
    return [found.depending(reach)]


def dynamic_slice(equation: Any, x: Abstract, *starts: Abstract) -> Arrays:
    """Return a slice; along an axis with an unknown start it may be any."""
    unsure = [axis for axis, start in enumerate(starts) if not start.known.all()]
    (found,) = movement(equation, x.blurred(unsure), indices=[start.low for start in starts])
    return [found.depending(*[start.reach for start in starts])]


def dynamic_update_slice(equation: Any, x: Abstract, update: Abstract, *starts: Abstract) -> Arrays:
    """Return an array with a slice replaced at a known place."""
    if all(start.known.all() for start in starts):
        return movement(equation, x, update, indices=[start.low for start in starts])
    return anything(equation, x, update, *starts)


def scatter(equation: Any, x: Abstract, index: Abstract, update: Abstract) -> Arrays:
    """Return an array with elements replaced or combined at known places."""
    if not index.known.all():
        return anything(equation, x, index, update)
    where = whole(index, index.low)
    if equation.primitive.name == "scatter":
        old, new = _numbered(x, update)
        (places,) = computed(equation, old, where, new)
        is_written_once = (places >= x.low.size).sum() == math.prod(update.shape)
        if is_written_once:
            return [_picked(places, equation.outvars[0].aval, x, update)]
    return _mixture(_scattered, equation, x, index, update)


# --- mixtures: all that matters is which elements come together -----------------------------------

Mix = Callable[..., tuple[Fields, Any]]
"""A function of an equation and its operands to the load of each result, and to where it is 0."""


def _mixture(mix: Mix, equation: Any, *xs: Abstract) -> Arrays:
    world = xs[0].world
    if all(x.known.all() for x in xs):
        values = computed(equation, *[whole(x, x.low) for x in xs])
        return [world.constant(value) for value in values]
    (*reach, big), is_zero = mix(equation, *xs)
    results = []
    for variable in equation.outvars:
        x = world.unknown(variable.aval, reach, big > NOWHERE)
        results.append(x.with_fields(chosen(is_zero, [0, 0, *x.reach], x.fields)))
    return results


def _reduction(equation: Any, x: Abstract) -> tuple[Fields, Any]:
    axes = tuple(equation.params["axes"])
    return [channel.max(axes) for channel in x.load], x.zero.all(axes)


def _cumulative(equation: Any, x: Abstract) -> tuple[Fields, Any]:
    axis = equation.params["axis"]
    direction = slice(None, None, -1 if equation.params["reverse"] else 1)
    order = (slice(None),) * axis + (direction,)
    load = []
    for channel in x.load:
        accumulated = np.maximum.accumulate(whole(x, channel)[order], axis)
        load.append(accumulated[order])
    return load, False


def _along_axes(equation: Any, *xs: Abstract) -> tuple[Fields, Any]:
    """Any element along these axes can come to any place on them."""
    parameters = equation.params
    rank = len(xs[0].shape)
    if "dimension" in parameters:
        axes = [parameters["dimension"]]
    else:
        axes = list(range(rank - len(parameters.get("fft_lengths", [1])), rank))
    load = union([x.load for x in xs])
    return [channel.max(tuple(axes), keepdims=True) for channel in load], False


def _dot_general(equation: Any, left: Abstract, right: Abstract) -> tuple[Fields, Any]:
    (left_inner, right_inner), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left_free = _other_axes(left, left_inner, left_batch)
    right_free = _other_axes(right, right_inner, right_batch)
    # Both with the axes: batch, free of the left, free of the right, inner.
    after_batch = len(left_batch)
    after_left = after_batch + len(left_free)
    after_right = after_left + len(right_free)
    new_in_left = tuple(range(after_left, after_right))
    new_in_right = tuple(range(after_batch, after_left))

    def arranged(x: Abstract, order: Sequence[int], new_axes: Sequence[int]) -> Fields:
        fields = [*x.load, x.zero]
        return [np.expand_dims(field.transpose(order), new_axes) for field in fields]

    *left_load, left_zero = arranged(left, [*left_batch, *left_free, *left_inner], new_in_left)
    *right_load, right_zero = arranged(
        right, [*right_batch, *right_free, *right_inner], new_in_right
    )
    inner = tuple(range(after_right, left_zero.ndim))

    def meeting(load: Fields, other_is_zero: np.ndarray) -> Fields:
        """A factor counts unless it meets a 0, and then if it may be infinite."""
        is_dropped = other_is_zero & (load[-1] == NOWHERE)
        return [np.where(is_dropped, NOWHERE, channel).max(inner) for channel in load]

    load = union([meeting(left_load, right_zero), meeting(right_load, left_zero)])
    is_zero = (left_zero | right_zero).all(inner) & (load[-1] == NOWHERE)
    return load, is_zero


def _other_axes(x: Abstract, *groups: Sequence[int]) -> list[int]:
    taken = set(itertools.chain(*groups))
    return [axis for axis in range(len(x.shape)) if axis not in taken]


def _convolution(equation: Any, x: Abstract, kernel: Abstract) -> tuple[Fields, Any]:
    """Join what each tap of the kernel reads, which a kernel with a single 1 shows."""
    dimensions = equation.params["dimension_numbers"]
    _, features, *_ = dimensions.lhs_spec
    out_features, in_features, *_ = dimensions.rhs_spec
    load = [channel.max(features, keepdims=True) for channel in x.load]
    stored = load[0].size
    numbers = np.arange(1, stored + 1, dtype=np.float32).reshape(load[0].shape)
    is_zero = whole(kernel, kernel.zero).all((out_features, in_features), keepdims=True)
    is_zero = is_zero & (load[-1].max() == NOWHERE)  # 0 times infinity isn't 0
    found = [[channel.max() for channel in kernel.load]]
    for tap in np.argwhere(~is_zero):
        alone = np.zeros(kernel.shape, np.float32)
        place = [slice(index, index + 1) for index in tap]
        place[out_features] = slice(None)
        alone[tuple(place)] = 1
        read = whole(x, numbers)
        (places,) = computed(equation, read, alone, preferred_element_type=None)
        index = places.astype(np.int32) - 1  # -1, the last one, is padding
        found.append([np.append(channel, NOWHERE)[index] for channel in load])
    return union(found), False


def _scattered(equation: Any, x: Abstract, index: Abstract, update: Abstract) -> tuple[Fields, Any]:
    parameters = equation.params
    where = whole(index, index.low)
    load = []
    for old, new in zip(x.load, update.load, strict=True):
        combined = jax.lax.scatter_max(
            jnp.asarray(whole(x, old)),
            where,
            jnp.asarray(whole(update, new)),
            parameters["dimension_numbers"],
            mode=parameters["mode"],
        )
        load.append(np.asarray(combined))
    return load, False


def anything(equation: Any, *xs: Abstract) -> Arrays:
    """Return results that depend on everything that any element of any operand depends on."""
    *reach, big = union([[channel.max() for channel in x.load] for x in xs])
    is_random = equation.primitive.name.startswith("random_")
    reads_inputs = any(channel > NOWHERE for channel in reach)
    # What depends on inputs by an unknown rule may be of any size.
    is_big = big > NOWHERE or (reads_inputs and not is_random)
    world = xs[0].world
    return [world.unknown(variable.aval, reach, is_big) for variable in equation.outvars]


def _mixing(mix: Mix) -> Rule:
    return functools.partial(_mixture, mix)


_NAMES: list[tuple[Rule, str]] = [
    (elementwise, " ".join([*IN_NUMPY, *MONOTONE, *OTHER_FUNCTIONS])),
    (select, "select_n"),
    (extreme, "max min reduce_max reduce_min reduce_or reduce_and"),
    (movement, " ".join(MOVEMENTS)),
    (gather, "gather"),
    (dynamic_slice, "dynamic_slice"),
    (dynamic_update_slice, "dynamic_update_slice"),
    (scatter, "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max"),
    (_mixing(_reduction), "reduce_sum reduce_prod argmax argmin"),
    (_mixing(_cumulative), "cumsum cumprod cummax cummin cumlogsumexp"),
    (_mixing(_along_axes), "sort top_k fft"),
    (_mixing(_dot_general), "dot_general"),
    (_mixing(_convolution), "conv_general_dilated"),
    # Random numbers depend on their key alone.
    (
        anything,
        "random_bits random_seed random_wrap random_unwrap random_fold_in random_split",
    ),
]
RULES = {name: rule for rule, names in _NAMES for name in names.split()}
"""The rule of each primitive that has one. Programs inside primitives are the interpreter's."""
SAME = named(
    "copy optimization_barrier sharding_constraint reshard stop_gradient pvary device_put name"
)
"""Primitives that return their operands."""
CALLS = named("jit closed_call remat2 custom_jvp_call custom_vjp_call")
"""Primitives that run the program inside as it is. A primitive is not one because it has a program:
that of a Pallas kernel runs otherwise."""
