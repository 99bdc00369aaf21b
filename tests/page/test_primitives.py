"""Every primitive of the page's interpreter computes what JAX computes, edge cases included."""

import base64
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wasmtime
from jax import lax

from jgpt.page.program import PRIMITIVES, make_program
from tests.javascript import (
    INTERPRETER,
    NODE,
    PRODUCT,
    Call,
    needs_javascript,
    run_programs,
)

RANDOM = np.random.default_rng(0)
EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-30],
    np.float32,
)
INTEGERS = np.array([0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 65537, -65537, 31], np.int32)
TRUTHS = np.array([True, False])
WORDS = np.array([0, 1, 7, 2**32 - 1, 2**31, 65537, 40, 3000000000], np.uint32)


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and how many units in the last place JAX may be away.

    The units are those of the largest number if it is a sum, whose parts may cancel.
    """

    primitive: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    ulps: int = 0

    @property
    def is_sum(self) -> bool:
        return self.primitive in ("reduce_sum", "cumsum", "dot_general")


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def integers(*shape: int, low: int = -9, high: int = 9, dtype: Any = np.int32) -> np.ndarray:
    return RANDOM.integers(low, high, shape).astype(dtype)


def pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of some values."""
    left, right = np.meshgrid(values, values, indexing="ij")
    return left.ravel(), right.ravel()


class Cases(list[Case]):
    def add(
        self, primitive: str, function: Callable[..., Any], *arguments: Any, ulps: int = 0
    ) -> None:
        self.append(Case(primitive, function, arguments, ulps))


def unary_cases() -> Cases:
    ulps = {
        "acos": 4,
        "acosh": 8,
        "asin": 4,
        "asinh": 8,
        "atan": 4,
        "atanh": 8,
        "cbrt": 16,  # XLA is 13 away, and JavaScript rounds correctly
        "cos": 4,
        "cosh": 8,
        "erf": 8,
        "erf_inv": 16,
        "erfc": 64,
        "exp": 4,
        "exp2": 4,
        "expm1": 8,
        "log": 4,
        "log1p": 8,
        "logistic": 8,
        "rsqrt": 4,
        "sin": 4,
        "sinh": 8,
        "tan": 8,
        "tanh": 8,
    }
    exact = ("abs", "ceil", "floor", "is_finite", "neg", "sign", "sqrt", "square")
    cases = Cases()
    for name in (*ulps, *exact):
        function = getattr(lax, name)
        # JAX takes 30 ms to compile a case, so that not all have all shapes.
        arrays = [np.concatenate([EDGES, 3 * floats(9)])]
        if name in ("exp", "neg", "erf"):
            arrays.append(floats(0, 2))
            arrays.append(floats(1, 1))
            arrays.append(floats(4, 3).T)
            arrays.append(floats(2, 3, 5))
        for x in arrays:
            cases.add(name, function, x, ulps=ulps.get(name, 0))
    of_integers = {
        "abs": lax.abs,
        "neg": lax.neg,
        "sign": lax.sign,
        "not": lax.bitwise_not,
        "square": lax.square,
    }
    bytes_ = integers(2, 3, dtype=np.int8)
    for x in (INTEGERS, WORDS.astype(np.int32), bytes_):
        for name, function in of_integers.items():
            cases.add(name, function, x)
    cases.add("not", lax.bitwise_not, TRUTHS)
    cases.add("not", lax.bitwise_not, WORDS)
    return cases


def power_cases() -> Cases:
    cases = Cases()
    for exponent in (2, 3, -1, 5, 0):
        power = partial(lax.integer_pow, y=exponent)
        cases.add("integer_pow", power, EDGES, ulps=2)
    cases.add("integer_pow", partial(lax.integer_pow, y=5), INTEGERS)
    return cases


def rounding_cases() -> Cases:
    cases = Cases()
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -0.2, 0.2, 8388609.0], np.float32)
    for method in (lax.RoundingMethod.TO_NEAREST_EVEN, lax.RoundingMethod.AWAY_FROM_ZERO):
        for x in (halves, EDGES, 5 * floats(4, 4)):
            cases.add("round", partial(lax.round, rounding_method=method), x)
    float16_edges = np.array([65519.0, 65520.0, 6e-5, 1e-7, 1e-9], np.float32)
    bfloat16 = partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    float16 = partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=10)
    for reduce in (bfloat16, float16):
        for x in (EDGES, floats(5, 3), float16_edges):
            cases.add("reduce_precision", reduce, x)
    return cases


def conversion_cases() -> Cases:
    cases = Cases()
    wide = np.array([300.7, -300.7, 2147483648.0, -5e9, 127.9, -128.9, 255.5, 0.99], np.float32)
    sources = (EDGES, wide, INTEGERS, WORDS, TRUTHS, integers(3, 4, dtype=np.int8))
    targets = (
        "float32",
        "bfloat16",
        "float16",
        "int32",
        "uint32",
        "int8",
        "uint8",
        "bool",
        "int16",
        "uint16",
    )
    for x in sources:
        for target in targets:
            if target == str(x.dtype):
                continue
            convert = partial(lax.convert_element_type, new_dtype=np.dtype(target))
            cases.add("convert_element_type", convert, x)
    for x, target in ((EDGES, "int32"), (EDGES, "uint32"), (INTEGERS, "float32")):
        read_bits = partial(lax.bitcast_convert_type, new_dtype=np.dtype(target))
        cases.add("bitcast_convert_type", read_bits, x)
    return cases


def binary_cases() -> Cases:
    cases = Cases()
    of_all_numbers = {
        "eq": lax.eq,
        "ge": lax.ge,
        "gt": lax.gt,
        "le": lax.le,
        "lt": lax.lt,
        "ne": lax.ne,
        "add": lax.add,
        "sub": lax.sub,
        "mul": lax.mul,
        "max": lax.max,
        "min": lax.min,
        "div": lax.div,
        "rem": lax.rem,
    }
    bytes_ = integers(6, low=-128, high=127, dtype=np.int8)
    for name, function in of_all_numbers.items():
        for values in (EDGES, INTEGERS, WORDS, bytes_):
            cases.add(name, function, *pairs(values))
        # some of them with arrays whose numbers don't lie in order, have a size of 1, or are none
        if name in ("add", "sub", "lt", "max"):
            cases.add(name, function, floats(4, 3).T, floats(3, 4))
            cases.add(name, function, floats(3, 1, 4), floats(3, 2, 4))
            cases.add(name, function, floats(0, 4), floats(0, 4))
    for name, function in {"pow": lax.pow, "atan2": lax.atan2}.items():
        cases.add(name, function, *pairs(EDGES), ulps=8)
        cases.add(name, function, abs(floats(2, 5)), floats(2, 5), ulps=8)
    logic = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
    for name, function in logic.items():
        for values in (INTEGERS, WORDS, TRUTHS, bytes_):
            cases.add(name, function, *pairs(values))
    shifts = {
        "shift_left": lax.shift_left,
        "shift_right_logical": lax.shift_right_logical,
        "shift_right_arithmetic": lax.shift_right_arithmetic,
    }
    for name, function in shifts.items():
        for values in (INTEGERS, WORDS, bytes_):
            counts = np.array([0, 1, 5, 7, 8, 31, 32, 40]).astype(values.dtype)
            shifted, count = np.meshgrid(values, counts)
            cases.add(name, function, shifted.ravel(), count.ravel())
    return cases


def choosing_cases() -> Cases:
    cases = Cases()
    a = floats(3, 4)
    b = floats(3, 4)
    which = RANDOM.integers(0, 2, (3, 4)).astype(bool)
    which_of_three = integers(3, 4, low=0, high=3)

    def select_transposed(which: Any, a: Any, b: Any) -> Any:
        return lax.select_n(which.T, a, b)

    cases.add("select_n", lax.select_n, which, a, b)
    cases.add("select_n", lax.select_n, np.array(True), a, b)
    cases.add("select_n", lax.select_n, which_of_three, a, b, floats(3, 4))
    cases.add("select_n", select_transposed, which.T.copy(), a, b)
    cases.add("clamp", lax.clamp, np.float32(-0.5), a, np.float32(0.25))
    cases.add("clamp", lax.clamp, np.float32(-1), EDGES, np.float32(1))
    cases.add("clamp", lax.clamp, -abs(a), b, abs(a))
    cases.add("clamp", lax.clamp, np.int32(-3), INTEGERS, np.int32(100))
    return cases


def broadcasting_cases() -> Cases:
    def broadcast_along_the_middle(x: Any) -> Any:
        return lax.broadcast_in_dim(x, (5, 3, 2), (1,))

    def broadcast_a_size_of_one(x: Any) -> Any:
        return jnp.broadcast_to(x, (2, 3, 4)) + 0

    def fill_nothing(x: Any) -> Any:
        return jnp.full((0, 3), x)

    cases = Cases()
    cases.add("broadcast_in_dim", broadcast_along_the_middle, floats(3))
    cases.add("broadcast_in_dim", broadcast_a_size_of_one, floats(3, 1))
    cases.add("broadcast_in_dim", fill_nothing, np.float32(2))
    return cases


def joining_cases() -> Cases:
    def join_three(a: Any, b: Any) -> Any:
        return jnp.concatenate([a, b, a], 1)

    def join_rows(a: Any, b: Any) -> Any:
        return jnp.concatenate([a, b])

    def join_transposed(a: Any) -> Any:
        return jnp.concatenate([a.T, a.T], 1)

    def stack_three(a: Any, b: Any) -> Any:
        return jnp.stack([a, b, a], 1)

    cases = Cases()
    cases.add("concatenate", join_three, floats(2, 3, 4), floats(2, 1, 4))
    cases.add("concatenate", join_rows, floats(0, 2), floats(3, 2))
    cases.add("concatenate", join_transposed, integers(3, 5))
    cases.add("stack", stack_three, floats(3, 2), floats(3, 2))
    return cases


def slicing_cases() -> Cases:
    x = floats(2, 3, 4)

    def slice_inside(x: Any, start: Any) -> Any:
        return lax.dynamic_slice(x, (0, start, 1), (2, 2, 3))

    def slice_across_both_ends(x: Any, start: Any) -> Any:
        return lax.dynamic_slice(x, (-1, start, 9), (1, 2, 3))

    def update(x: Any, values: Any, start: Any) -> Any:
        return lax.dynamic_update_slice(x, values, (0, start, 1))

    def slice_with_a_stride(x: Any) -> Any:
        return lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 3))

    def slice_nothing(x: Any) -> Any:
        return x[:, 2:2]

    def split(x: Any) -> Any:
        return jnp.split(x, 2, axis=2)

    cases = Cases()
    cases.add("dynamic_slice", slice_inside, x, 1)
    cases.add("dynamic_slice", slice_across_both_ends, x, 7)
    cases.add("dynamic_update_slice", update, x, floats(1, 2, 2), 5)
    cases.add("slice", slice_with_a_stride, x)
    cases.add("slice", slice_nothing, integers(3, 5))
    cases.add("split", split, x)
    return cases


def padding_cases() -> Cases:
    def pad_and_cut_between(x: Any) -> Any:
        return lax.pad(x, jnp.float32(7), ((1, 2, 0), (0, -1, 1), (-2, 3, 2)))

    def cut_rows(x: Any) -> Any:
        return lax.pad(x, 0, ((-2, -1, 0), (0, 0, 0)))

    def pad_nothing(x: Any) -> Any:
        return lax.pad(x, jnp.float32(1), ((2, 1, 3),))

    cases = Cases()
    cases.add("pad", pad_and_cut_between, floats(2, 3, 4))
    cases.add("pad", cut_rows, integers(3, 5))
    cases.add("pad", pad_nothing, floats(0))
    return cases


def shape_cases() -> Cases:
    x = floats(2, 3, 4)

    def count_integers() -> Any:
        return lax.broadcasted_iota(np.int32, (3, 4, 5), 1)

    def count_floats() -> Any:
        return lax.broadcasted_iota(np.float32, (3, 4), 0)

    def reshape(x: Any) -> Any:
        return x.reshape(6, 4)

    def reshape_transposed(x: Any) -> Any:
        return x.T.reshape(2, 12)

    def reverse_two_axes(x: Any) -> Any:
        return lax.rev(x, (0, 2))

    def reverse_nothing(x: Any) -> Any:
        return lax.rev(x, (0,)) + x

    def squeeze(x: Any) -> Any:
        return x.squeeze(1) + 0

    def tile(x: Any) -> Any:
        return jnp.tile(x, (2, 3, 1, 2))

    def transpose(x: Any) -> Any:
        return x.transpose(2, 0, 1)

    def transpose_and_reshape(x: Any) -> Any:
        return x.transpose(2, 0, 1).reshape(8, 3) * 2

    cases = Cases()
    cases.add("iota", count_integers)
    cases.add("iota", count_floats)
    cases.add("reshape", reshape, x)
    cases.add("reshape", reshape_transposed, x)
    cases.add("rev", reverse_two_axes, x)
    cases.add("rev", reverse_nothing, floats(0, 2))
    cases.add("squeeze", squeeze, floats(3, 1, 2))
    cases.add("tile", tile, x)
    cases.add("transpose", transpose, x)
    cases.add("transpose", transpose_and_reshape, x)
    return cases


def reduction_cases() -> Cases:
    x = floats(3, 4, 5)
    cases = Cases()
    for name in ("sum", "max", "min", "prod"):
        primitive = f"reduce_{name}"
        reduce = getattr(jnp, name)

        def reduce_transposed(x: Any, reduce: Callable[..., Any] = reduce) -> Any:
            return reduce(x.T, 1)

        ulps = 16 if name in ("sum", "prod") else 0
        for axes in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
            cases.add(primitive, partial(reduce, axis=axes), x, ulps=ulps)
        for floating in (EDGES, floats(1)):
            cases.add(primitive, reduce, floating, ulps=4)
        for exact in (INTEGERS, WORDS):
            cases.add(primitive, reduce, exact)
        cases.add(primitive, reduce_transposed, floats(4, 3), ulps=8)
    cases.add("reduce_sum", partial(jnp.sum, axis=0), floats(0, 2))
    cases.add("reduce_prod", partial(jnp.prod, axis=0), floats(0, 3))
    for name in ("reduce_max", "reduce_min"):
        reduce = getattr(lax, name)
        cases.add(name, partial(reduce, axes=(1,)), floats(2, 0))
        cases.add(name, partial(reduce, axes=(0,)), integers(0, 3))
    truths = RANDOM.integers(0, 2, (3, 4)).astype(bool)
    for name in ("reduce_and", "reduce_or", "reduce_xor"):
        reduce = partial(getattr(lax, name), axes=(1,))
        cases.add(name, reduce, truths)
        cases.add(name, reduce, integers(3, 4))
        cases.add(name, reduce, integers(2, 3, dtype=np.uint32, low=0))
    return cases


def argument_cases() -> Cases:
    ties = np.array([[1, 3, 3, 2], [2, 2, 2, 2], [0, -0.0, 0, -0.0]], np.float32)
    not_finite = np.array([[1, np.nan, 3, np.nan], [np.inf, 1, np.inf, -np.inf]], np.float32)
    cases = Cases()
    for name in ("argmax", "argmin"):
        function = getattr(lax, name)
        for values in (ties, not_finite, floats(4, 5), integers(3, 6), -not_finite):
            for axis in (0, 1):
                of_axis = partial(function, axis=axis, index_dtype=np.int32)
                cases.add(name, of_axis, values)
    return cases


def cumulative_cases() -> Cases:
    x = floats(3, 4, 5)
    cases = Cases()
    for name in ("cumsum", "cumprod", "cummax", "cummin"):
        function = getattr(lax, name)
        ulps = 16 if name in ("cumsum", "cumprod") else 0
        for axis, reverse in ((0, False), (2, True), (1, False)):
            cumulate = partial(function, axis=axis, reverse=reverse)
            cases.add(name, cumulate, x, ulps=ulps)
            cases.add(name, cumulate, integers(3, 2, 4))
        cases.add(name, function, floats(0))
    return cases


def order_cases() -> Cases:
    ties = np.array([3, 1, 3, np.nan, -0.0, 0.0, np.inf, -np.inf, 1, np.nan, 2], np.float32)
    few = integers(6, 50, low=0, high=5, dtype=np.float32)

    def top_3_transposed(x: Any) -> Any:
        return lax.top_k(x.T, 3)

    cases = Cases()
    for values in (ties, floats(4, 3), integers(5, 2), floats(0), floats(1)):
        cases.add("sort", partial(lax.sort, dimension=0), values)
    cases.add("sort", jnp.argsort, np.array([2, 1, 2, 1, 0, 2]))
    cases.add("sort", partial(jnp.argsort, axis=1), integers(3, 40, low=0, high=4))
    for values, k in ((ties, 11), (ties, 4), (few, 7), (few.T, 3), (few, 50), (floats(3, 1), 1)):
        cases.add("top_k", partial(lax.top_k, k=k), values)
    cases.add("top_k", partial(lax.top_k, k=0), few)
    cases.add("top_k", partial(lax.top_k, k=5), integers(2, 9))
    cases.add("top_k", top_3_transposed, floats(9, 2))
    return cases


def product_cases() -> Cases:
    scores = partial(jnp.einsum, "bqhd,bkhd->bhqk")
    over_two_axes = partial(jnp.einsum, "abc,bcd->da")
    outer = partial(jnp.einsum, "i,j->ij")
    inner = partial(jnp.einsum, "i,i->")

    def product_of_transposed(a: Any, b: Any) -> Any:
        return a.T @ b.T

    two_rows = np.stack([INTEGERS] * 2)
    three_rows = np.stack([INTEGERS] * 3)
    bytes_ = partial(integers, low=-128, high=127, dtype=np.int8)
    cases = Cases()
    cases.add("dot_general", jnp.matmul, floats(5, 7), floats(7, 6), ulps=8)
    cases.add("dot_general", jnp.matmul, floats(9, 3), floats(3, 8), ulps=8)
    cases.add("dot_general", jnp.matmul, floats(2, 4, 3), floats(2, 3, 5), ulps=8)
    cases.add("dot_general", scores, floats(2, 5, 3, 4), floats(2, 6, 3, 4), ulps=8)
    cases.add("dot_general", over_two_axes, floats(2, 3, 4), floats(3, 4, 5), ulps=8)
    cases.add("dot_general", jnp.matmul, floats(3, 13, 150), floats(3, 150, 11), ulps=8)
    cases.add("dot_general", outer, floats(3), floats(4), ulps=4)
    cases.add("dot_general", inner, floats(5), floats(5), ulps=8)
    cases.add("dot_general", jnp.matmul, floats(3, 0), floats(0, 2))
    cases.add("dot_general", jnp.matmul, floats(0, 3), floats(3, 2))
    cases.add("dot_general", jnp.matmul, integers(3, 4), integers(4, 2))
    cases.add("dot_general", jnp.matmul, two_rows, three_rows.T)
    summed_in_int32 = partial(lax.dot, preferred_element_type=jnp.int32)
    cases.add("dot_general", summed_in_int32, bytes_(5, 30), bytes_(30, 7))
    summed_in_float32 = partial(lax.dot, preferred_element_type=jnp.float32)
    a = floats(5, 6).astype(jnp.bfloat16)
    b = floats(6, 3).astype(jnp.bfloat16)
    cases.add("dot_general", summed_in_float32, a, b, ulps=8)
    cases.add("dot_general", product_of_transposed, floats(4, 3), floats(5, 4), ulps=8)
    difference = np.array([1, -1], np.float32)
    not_a_float = np.array([2**24 + 1, 2**24], np.int32)
    cases.add("dot_general", jnp.matmul, difference, not_a_float)  # 0, since JAX rounds it
    cases.add("dot_general", jnp.matmul, not_a_float, difference)
    cases.add("dot_general", jnp.matmul, floats(70, 90), floats(90, 80), ulps=8)  # more than 64 kB
    return cases


def gather_cases() -> Cases:
    x = floats(5, 3, 4)
    rows = np.array([[0, 4, -1], [2, 7, -6]], np.int32)
    rows_inside = rows % 5
    cases = Cases()
    for mode in ("clip", "fill", "promise_in_bounds"):
        indices = rows_inside if mode == "promise_in_bounds" else rows

        def take(x: Any, indices: Any, mode: str = mode) -> Any:
            return x.at[indices].get(mode=mode)

        cases.add("gather", take, x, indices)
        cases.add("gather", take, integers(5, 2), indices)
        cases.add("gather", take, integers(5, dtype=np.uint32, low=0), indices)

    def take_columns(x: Any, columns: Any) -> Any:
        return x[:, columns, 1:3]

    def take_diagonal(x: Any, indices: Any) -> Any:
        return x[indices, indices]

    along_an_axis = partial(jnp.take_along_axis, axis=2)
    with_a_fill_value = partial(jnp.take, axis=1, fill_value=-2.5)
    cases.add("gather", along_an_axis, x, integers(5, 3, 2, low=-6, high=6))
    cases.add("gather", take_columns, x, np.array([2, 0, 2]))
    cases.add("gather", with_a_fill_value, x, np.array([9, 0]))
    cases.add("gather", take_diagonal, x, np.array([1, 2]))
    return cases


def scatter_cases() -> Cases:
    x = floats(5, 3, 4)
    updates = floats(2, 3, 3, 4)
    rows = np.array([[0, 4, -1], [2, 7, -6]], np.int32)
    # which of two values a row is set to is not said: here no row is set twice
    unique_rows = {
        "clip": np.array([[0, 4, 1], [2, 3, -2]], np.int32),
        "drop": np.array([[0, 4, 1], [2, 7, -6]], np.int32),
    }
    primitives = {
        "set": "scatter",
        "add": "scatter-add",
        "multiply": "scatter-mul",
        "max": "scatter-max",
        "min": "scatter-min",
    }
    cases = Cases()
    for name, primitive in primitives.items():
        for mode in ("clip", "drop"):

            def scatter(x: Any, rows: Any, updates: Any, name: str = name, mode: str = mode) -> Any:
                method = getattr(x.at[rows], name)
                return method(updates, mode=mode)

            if name == "set":
                cases.add(primitive, scatter, x, unique_rows[mode], updates, ulps=4)
                continue
            cases.add(primitive, scatter, x, rows, updates, ulps=4)
            wide_integers = integers(2, 3, 2, low=-(2**30), high=2**30)
            cases.add(primitive, scatter, integers(5, 2), rows, wide_integers)

    def set_a_column(x: Any, column: Any) -> Any:
        return x.at[:, column].set(3)

    def add_to_a_column(x: Any, rows: Any) -> Any:
        return x.at[rows, 1].add(2)

    cases.add("scatter", set_a_column, x, 1)
    cases.add("scatter-add", add_to_a_column, integers(4, 3), rows[0])
    return cases


def key_cases() -> Cases:
    words = np.array([12345, 2**32 - 7], np.uint32)

    def bits(words: Any) -> Any:
        return jax.random.bits(jax.random.wrap_key_data(words), (4, 3))

    def bits_of_three_axes(words: Any) -> Any:
        return jax.random.bits(jax.random.wrap_key_data(words), (2, 3, 2))

    def uniform(words: Any) -> Any:
        return jax.random.uniform(jax.random.wrap_key_data(words), (7,))

    def normal(words: Any) -> Any:
        return jax.random.normal(jax.random.wrap_key_data(words), (4, 4))

    def random_integers(words: Any) -> Any:
        return jax.random.randint(jax.random.wrap_key_data(words), (9,), -5, 99)

    def split(words: Any) -> Any:
        keys = jax.random.split(jax.random.wrap_key_data(words), 3)
        return jax.random.key_data(keys)

    def fold(words: Any, number: Any) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(words), number)
        return jax.random.bits(key, (3, 5))

    cases = Cases()
    cases.add("threefry2x32", bits, words)
    cases.add("threefry2x32", uniform, words)
    cases.add("threefry2x32", split, words)
    cases.add("threefry2x32", random_integers, words)
    cases.add("threefry2x32", normal, words, ulps=32)
    cases.add("threefry2x32", fold, words, np.uint32(77))
    cases.add("iota_2x32_shape", bits_of_three_axes, words)
    return cases


def control_cases() -> Cases:
    def choose(branch: Any, x: Any) -> Any:
        def increase(x: Any) -> Any:
            return x + 1

        def transpose(x: Any) -> Any:
            return x.T.reshape(3, 2)

        def negate(x: Any) -> Any:
            return -x

        return lax.switch(branch, [increase, transpose, negate], x)

    def collatz(n: Any) -> Any:
        def goes_on(state: Any) -> Any:
            return state[0] != 1

        def step(state: Any) -> Any:
            n, steps = state
            following = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
            return following, steps + 1

        return lax.while_loop(goes_on, step, (n, 0))

    def double_and_count(times: Any, x: Any) -> Any:
        return lax.fori_loop(0, times, lambda i, x: x * 2 + i, x)

    def scan(x: Any, y: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return carry + row * y, (carry, row.sum())

        return lax.scan(step, jnp.zeros(4), x, reverse=True)

    cases = Cases()
    for branch in (-1, 0, 1, 2, 5):  # the first and the last are no branches: they are clamped
        cases.add("cond", choose, np.int32(branch), floats(3, 2))
    for n in (1, 27):
        cases.add("while", collatz, np.int32(n))
    cases.add("while", double_and_count, 5, 3)
    cases.add("stack", scan, floats(3, 4), floats(4), ulps=8)
    cases.add("broadcast_in_dim", scan, floats(0, 4), floats(4))
    return cases


CASES = (
    unary_cases()
    + power_cases()
    + rounding_cases()
    + conversion_cases()
    + binary_cases()
    + choosing_cases()
    + broadcasting_cases()
    + joining_cases()
    + slicing_cases()
    + padding_cases()
    + shape_cases()
    + reduction_cases()
    + argument_cases()
    + cumulative_cases()
    + order_cases()
    + product_cases()
    + gather_cases()
    + scatter_cases()
    + key_cases()
    + control_cases()
)
CASES_OF: dict[str, list[int]] = {primitive: [] for primitive in PRIMITIVES}
"""The numbers of the cases of each primitive."""
for number, case in enumerate(CASES):
    CASES_OF[case.primitive].append(number)


@pytest.fixture(scope="module")
def expected() -> list[list[np.ndarray]]:
    """What JAX computes: all cases in one compiled program."""

    def compute_all(arguments: list[tuple[Any, ...]]) -> list[Any]:
        results = []
        for case, values in zip(CASES, arguments, strict=True):
            results.append(case.function(*values))
        return results

    results = jax.jit(compute_all)([case.arguments for case in CASES])
    return [[np.asarray(leaf) for leaf in jax.tree.leaves(result)] for result in results]


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    calls = []
    for case in CASES:
        program = make_program(case.function, *case.arguments)
        calls.append(Call(program, case.arguments))
    return calls


@pytest.fixture(scope="module")
def computed(calls: list[Call]) -> list[list[np.ndarray]]:
    """What JavaScript computes."""
    return [list(results.values()) for results in run_programs(calls)]


def differences(found: np.ndarray, wanted: np.ndarray, case: Case) -> str:
    """Where two arrays differ by more than some units in the last place, or an empty text."""
    if wanted.dtype in (jnp.bfloat16, np.float16):
        wanted = wanted.astype(np.float32)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype}{found.shape} is not {wanted.dtype}{wanted.shape}"
    same = found == wanted
    if wanted.dtype == np.float32:
        # JAX sets numbers below the smallest normal one to zero.
        tiny = np.finfo(np.float32).tiny
        both_tiny = (abs(found) <= tiny) & (abs(wanted) <= tiny)
        both_nan = np.isnan(found) & np.isnan(wanted)
        same &= np.signbit(found) == np.signbit(wanted)
        same |= both_nan | both_tiny
        with np.errstate(invalid="ignore", over="ignore"):
            size = abs(wanted)
            if case.is_sum:
                size = np.broadcast_to(size.max(initial=0), size.shape)
            same |= abs(found - wanted) <= case.ulps * np.spacing(size)
    if same.all():
        return ""
    return f"found {found[~same][:8]}, wanted {wanted[~same][:8]}"


def all_differences(number: int, found: list[np.ndarray], wanted: list[np.ndarray]) -> list[str]:
    """A line for each result of a case that is wrong."""
    lines = []
    for one_found, one_wanted in zip(found, wanted, strict=True):
        difference = differences(one_found, one_wanted, CASES[number])
        if difference:
            lines.append(f"case {number}: {difference}")
    return lines


@needs_javascript
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_a_primitive_computes_what_jax_computes(primitive, calls, computed, expected):
    numbers = CASES_OF[primitive]
    assert numbers, f"no case has {primitive}"
    wrong = []
    for number in numbers:
        arguments = CASES[number].arguments
        used = {name for name, _, _, _ in calls[number].program.operations}
        if arguments and np.size(arguments[0]) > 0:
            assert primitive in used, f"case {number} has no {primitive}, only {used}"

        wrong += all_differences(number, computed[number], expected[number])

    assert not wrong, "\n".join(wrong)


MISTAKES = {
    "argmax": ("if (x > a[i - (k - best) * s])", "if (x >= a[i - (k - best) * s])"),
    "dot_general": ("pack(numbers, right, matrix)", "pack(numbers, right, matrices[0])"),
    "gather": ('mode === "clip" ? start', "true ? start"),
    "mul": ("always(binary(Math.imul));", "always(binary((a, b) => a * b));"),
    "rem": ("b === 0 ? a : a % b", "a % b"),
    "transpose": ("order.map((axis) => x.strides[axis]))", "x.strides)"),
}


def test_the_product_in_webassembly_is_assembled_from_its_source():
    source = PRODUCT.with_suffix(".wat").read_text()
    assembled = PRODUCT.read_bytes()

    assert assembled == bytes(wasmtime.wat2wasm(source))
    assert assembled != bytes(wasmtime.wat2wasm(source.replace("f64x2.mul", "f64x2.add")))


WITHOUT_WEBASSEMBLY = "delete globalThis.WebAssembly;\n"
"""As in a page whose host does not let WebAssembly run."""
WITHOUT_MORE_MEMORY = """
WebAssembly.Memory.prototype.grow = () => { throw new RangeError("the memory is full"); };
"""
"""As on a phone: what a page of 64 kB has no room for is computed in loops."""
MISTAKE_IN_LOOPS = ("c33 += a3 * b3", "c33 += a3 * b2")


@needs_javascript
@pytest.mark.parametrize("lacking", [WITHOUT_WEBASSEMBLY, WITHOUT_MORE_MEMORY])
@pytest.mark.parametrize("mistake", [None, MISTAKE_IN_LOOPS])
def test_products_have_the_same_bits_in_loops(lacking, mistake, calls, computed, tmp_path):
    source = INTERPRETER.read_text()
    if mistake is not None:
        right, wrong = mistake
        assert right in source
        source = source.replace(right, wrong)
    path = tmp_path / "interpreter.js"
    path.write_text(lacking + source)
    numbers = CASES_OF["dot_general"]

    in_loops = run_programs([calls[number] for number in numbers], path)

    is_same = []
    for number, results in zip(numbers, in_loops, strict=True):
        for found, wanted in zip(results.values(), computed[number], strict=True):
            is_same.append(np.array_equal(found, wanted))
    assert all(is_same) == (mistake is None)


@needs_javascript
def test_weights_serve_products_of_different_kinds():
    """Of floats, of integers, and of nothing: in WebAssembly, in loops, and in neither."""

    def function(nothing: Any, numbers: Any, bytes_: Any, weights: Any, byte_weights: Any) -> Any:
        summed = partial(lax.dot, preferred_element_type=jnp.int32)
        return (
            nothing @ weights,
            numbers @ weights,
            numbers @ byte_weights,
            summed(bytes_, byte_weights),
        )

    arguments = (
        floats(0, 5),
        floats(3, 5),
        integers(3, 5, dtype=np.int8),
        floats(5, 7),
        integers(5, 7, dtype=np.int8),
    )
    program = make_program(function, *arguments)
    *_, weights, byte_weights = program.inputs

    (results,) = run_programs([Call(program, arguments, fixed=(weights, byte_weights))])

    for found, wanted in zip(results.values(), function(*arguments), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


PANELS = """
const shape = [3, 2, 5];
const type = (...sizes) => ["float32", sizes];
const parameters = {left: [2], right: [1], left_batch: [0], right_batch: [0]};
const program = {
  types: [type(3, 4, 2), type(...shape), type(3, 4, 5)],
  constants: [],
  inputs: {x: 0, w: 1},
  operations: [["dot_general", [0, 1], [2], parameters]],
  outputs: {product: 2},
};
const w = interpreter.array("float32", shape, new Float32Array(30).fill(2));
const machine = interpreter.load(program, {w});
const x = new Float32Array(24);
const found = [];
for (const part of [[0, 1, 2], [0, 1], [1, 2], [0], [1], [2]]) {
  for (const batch of part) x.fill(found.length + 1, 8 * batch, 8 * batch + 8);
  machine.run({x: interpreter.array("float32", [3, 4, 2], x.slice())});
  found.push(w.store.packs.size);
}
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
@pytest.mark.parametrize("lacking", ["", WITHOUT_WEBASSEMBLY])
def test_parts_of_a_batch_of_weights_have_no_panels_of_their_own(lacking, tmp_path):
    path = tmp_path / "panels.js"
    product = base64.b64encode(PRODUCT.read_bytes()).decode()
    defined = f'globalThis.PRODUCT = "{product}";\n'
    path.write_text(defined + lacking + INTERPRETER.read_text() + PANELS)

    done = subprocess.run([str(NODE), path], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == [3] * 6


@needs_javascript
@pytest.mark.parametrize("primitive", MISTAKES)
def test_a_mistake_in_the_interpreter_is_noticed(primitive, calls, expected, tmp_path):
    right, wrong = MISTAKES[primitive]
    source = INTERPRETER.read_text()
    assert right in source
    path = tmp_path / "interpreter.js"
    path.write_text(source.replace(right, wrong))
    numbers = CASES_OF[primitive]

    results = run_programs([calls[number] for number in numbers], path)

    wrong = []
    for number, result in zip(numbers, results, strict=True):
        wrong += all_differences(number, list(result.values()), expected[number])
    assert wrong


def test_the_tables_of_python_and_javascript_are_equal():
    source = INTERPRETER.read_text()
    start = source.index("const elementByElement = {")
    table = source[start : source.index("\n};", source.index("const primitives = {"))]
    names = re.findall(r'^  "?([a-z_\d-]+)"?(?:[:,])', table, re.MULTILINE)
    assert sorted(names) == sorted(PRIMITIVES)
