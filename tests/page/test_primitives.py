"""Every primitive of the page's interpreter computes what JAX computes, edge cases included."""

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
from tests.javascript import INTERPRETER, PRODUCT, Call, needs_javascript, run_programs

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


CASES: list[Case] = []


def add(primitive: str, function: Callable[..., Any], *arguments: Any, ulps: int = 0) -> None:
    CASES.append(Case(primitive, function, arguments, ulps))


UNARY = {  # units in the last place; XLA's cbrt is 13 away, and JavaScript rounds correctly
    0: "abs ceil floor is_finite neg sign sqrt square",
    4: "acos asin atan cos exp exp2 log rsqrt sin",
    8: "acosh asinh atanh cosh erf expm1 log1p logistic sinh tan tanh",
    16: "cbrt erf_inv",
    64: "erfc",
}


def unary_cases() -> None:
    for ulps, names in UNARY.items():
        for name in names.split():
            # JAX takes 30 ms to compile a case, so that not all have all shapes.
            arrays = [np.concatenate([EDGES, 3 * floats(9)])]
            if name in ("exp", "neg", "erf"):
                arrays += [floats(0, 2), floats(1, 1), floats(4, 3).T, floats(2, 3, 5)]
            for x in arrays:
                add(name, getattr(lax, name), x, ulps=ulps)
    for x in (INTEGERS, WORDS.astype(np.int32), integers(2, 3, dtype=np.int8)):
        for name in ("abs", "neg", "sign", "square"):
            add(name, getattr(lax, name), x)
        add("not", lax.bitwise_not, x)
    for x in (TRUTHS, WORDS):
        add("not", lax.bitwise_not, x)


def power_cases() -> None:
    for exponent in (2, 3, -1, 5, 0):
        add("integer_pow", partial(lax.integer_pow, y=exponent), EDGES, ulps=2)
    add("integer_pow", partial(lax.integer_pow, y=5), INTEGERS)


def rounding_cases() -> None:
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -0.2, 0.2, 8388609.0], np.float32)
    for method in (lax.RoundingMethod.TO_NEAREST_EVEN, lax.RoundingMethod.AWAY_FROM_ZERO):
        for x in (halves, EDGES, 5 * floats(4, 4)):
            add("round", partial(lax.round, rounding_method=method), x)
    float16_edges = np.array([65519.0, 65520.0, 6e-5, 1e-7, 1e-9], np.float32)
    bfloat16 = partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    float16 = partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=10)
    for reduce in (bfloat16, float16):
        for x in (EDGES, floats(5, 3), float16_edges):
            add("reduce_precision", reduce, x)


TARGETS = "float32 bfloat16 float16 int32 uint32 int8 uint8 bool int16 uint16"


def conversion_cases() -> None:
    wide = np.array([300.7, -300.7, 2147483648.0, -5e9, 127.9, -128.9, 255.5, 0.99], np.float32)
    sources = (EDGES, wide, INTEGERS, WORDS, TRUTHS, integers(3, 4, dtype=np.int8))
    for x in sources:
        for target in TARGETS.split():
            if target == str(x.dtype):
                continue
            convert = partial(lax.convert_element_type, new_dtype=np.dtype(target))
            add("convert_element_type", convert, x)
    for x, target in ((EDGES, "int32"), (EDGES, "uint32"), (INTEGERS, "float32")):
        read_bits = partial(lax.bitcast_convert_type, new_dtype=np.dtype(target))
        add("bitcast_convert_type", read_bits, x)


OF_ALL_NUMBERS = "eq ge gt le lt ne add sub mul max min div rem"


def binary_cases() -> None:
    bytes_ = integers(6, low=-128, high=127, dtype=np.int8)
    for name in OF_ALL_NUMBERS.split():
        function = getattr(lax, name)
        for values in (EDGES, INTEGERS, WORDS, bytes_):
            add(name, function, *pairs(values))
        # some of them with arrays whose numbers don't lie in order, have a size of 1, or are none
        if name in ("add", "sub", "lt", "max"):
            add(name, function, floats(4, 3).T, floats(3, 4))
            add(name, function, floats(3, 1, 4), floats(3, 2, 4))
            add(name, function, floats(0, 4), floats(0, 4))
    for name in ("pow", "atan2"):
        function = getattr(lax, name)
        add(name, function, *pairs(EDGES), ulps=8)
        add(name, function, abs(floats(2, 5)), floats(2, 5), ulps=8)
    for name in ("and", "or", "xor"):
        for values in (INTEGERS, WORDS, TRUTHS, bytes_):
            add(name, getattr(lax, f"bitwise_{name}"), *pairs(values))
    for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic"):
        for values in (INTEGERS, WORDS, bytes_):
            counts = np.array([0, 1, 5, 7, 8, 31, 32, 40]).astype(values.dtype)
            shifted, count = np.meshgrid(values, counts)
            add(name, getattr(lax, name), shifted.ravel(), count.ravel())


def choosing_cases() -> None:
    a = floats(3, 4)
    b = floats(3, 4)
    which = RANDOM.integers(0, 2, (3, 4)).astype(bool)
    which_of_three = integers(3, 4, low=0, high=3)
    add("select_n", lax.select_n, which, a, b)
    add("select_n", lax.select_n, np.array(True), a, b)
    add("select_n", lax.select_n, which_of_three, a, b, floats(3, 4))
    add("select_n", lambda w, a, b: lax.select_n(w.T, a, b), which.T.copy(), a, b)
    add("clamp", lax.clamp, np.float32(-0.5), a, np.float32(0.25))
    add("clamp", lax.clamp, np.float32(-1), EDGES, np.float32(1))
    add("clamp", lax.clamp, -abs(a), b, abs(a))
    add("clamp", lax.clamp, np.int32(-3), INTEGERS, np.int32(100))


def shape_cases() -> None:
    """What moves numbers and computes none, also of no numbers and of axes out of order."""
    x = floats(2, 3, 4)
    one = jnp.float32(1)
    add("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (5, 3, 2), (1,)), floats(3))
    add("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (2, 3, 4)) + 0, floats(3, 1))
    add("broadcast_in_dim", lambda x: jnp.full((0, 3), x), np.float32(2))

    a, b = floats(2, 3, 4), floats(2, 1, 4)
    add("concatenate", lambda a, b: jnp.concatenate([a, b, a], 1), a, b)
    add("concatenate", lambda a, b: jnp.concatenate([a, b]), floats(0, 2), floats(3, 2))
    add("concatenate", lambda a: jnp.concatenate([a.T, a.T], 1), integers(3, 5))
    add("stack", lambda a, b: jnp.stack([a, b, a], 1), floats(3, 2), floats(3, 2))

    add("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (0, i, 1), (2, 2, 3)), x, 1)
    # across both ends
    add("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (-1, i, 9), (1, 2, 3)), x, 7)
    add(
        "dynamic_update_slice",
        lambda x, values, i: lax.dynamic_update_slice(x, values, (0, i, 1)),
        *(x, floats(1, 2, 2), 5),
    )
    add("slice", lambda x: lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 3)), x)
    add("slice", lambda x: x[:, 2:2], integers(3, 5))
    add("split", lambda x: jnp.split(x, 2, axis=2), x)

    # between numbers, and with what is cut off
    add("pad", lambda x: lax.pad(x, 7 * one, ((1, 2, 0), (0, -1, 1), (-2, 3, 2))), x)
    add("pad", lambda x: lax.pad(x, 0, ((-2, -1, 0), (0, 0, 0))), integers(3, 5))
    add("pad", lambda x: lax.pad(x, one, ((2, 1, 3),)), floats(0))

    add("iota", lambda: lax.broadcasted_iota(np.int32, (3, 4, 5), 1))
    add("iota", lambda: lax.broadcasted_iota(np.float32, (3, 4), 0))
    add("reshape", lambda x: x.reshape(6, 4), x)
    add("reshape", lambda x: x.T.reshape(2, 12), x)
    add("rev", lambda x: lax.rev(x, (0, 2)), x)
    add("rev", lambda x: lax.rev(x, (0,)) + x, floats(0, 2))
    add("squeeze", lambda x: x.squeeze(1) + 0, floats(3, 1, 2))
    add("tile", lambda x: jnp.tile(x, (2, 3, 1, 2)), x)
    add("transpose", lambda x: x.transpose(2, 0, 1), x)
    add("transpose", lambda x: x.transpose(2, 0, 1).reshape(8, 3) * 2, x)


def reduction_cases() -> None:
    x = floats(3, 4, 5)
    for name in ("sum", "max", "min", "prod"):
        primitive = f"reduce_{name}"
        reduce = getattr(jnp, name)
        ulps = 16 if name in ("sum", "prod") else 0
        for axes in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
            add(primitive, partial(reduce, axis=axes), x, ulps=ulps)
        for floating in (EDGES, floats(1)):
            add(primitive, reduce, floating, ulps=4)
        for exact in (INTEGERS, WORDS):
            add(primitive, reduce, exact)
        add(primitive, lambda x, reduce=reduce: reduce(x.T, 1), floats(4, 3), ulps=8)
    add("reduce_sum", partial(jnp.sum, axis=0), floats(0, 2))
    add("reduce_prod", partial(jnp.prod, axis=0), floats(0, 3))
    for name in ("reduce_max", "reduce_min"):
        reduce = getattr(lax, name)
        add(name, partial(reduce, axes=(1,)), floats(2, 0))
        add(name, partial(reduce, axes=(0,)), integers(0, 3))
    truths = RANDOM.integers(0, 2, (3, 4)).astype(bool)
    for name in ("reduce_and", "reduce_or", "reduce_xor"):
        reduce = partial(getattr(lax, name), axes=(1,))
        add(name, reduce, truths)
        add(name, reduce, integers(3, 4))
        add(name, reduce, integers(2, 3, dtype=np.uint32, low=0))


def argument_cases() -> None:
    ties = np.array([[1, 3, 3, 2], [2, 2, 2, 2], [0, -0.0, 0, -0.0]], np.float32)
    not_finite = np.array([[1, np.nan, 3, np.nan], [np.inf, 1, np.inf, -np.inf]], np.float32)
    for name in ("argmax", "argmin"):
        function = getattr(lax, name)
        for values in (ties, not_finite, floats(4, 5), integers(3, 6), -not_finite):
            for axis in (0, 1):
                of_axis = partial(function, axis=axis, index_dtype=np.int32)
                add(name, of_axis, values)


def cumulative_cases() -> None:
    x = floats(3, 4, 5)
    for name in ("cumsum", "cumprod", "cummax", "cummin"):
        function = getattr(lax, name)
        ulps = 16 if name in ("cumsum", "cumprod") else 0
        for axis, reverse in ((0, False), (2, True), (1, False)):
            cumulate = partial(function, axis=axis, reverse=reverse)
            add(name, cumulate, x, ulps=ulps)
            add(name, cumulate, integers(3, 2, 4))
        add(name, function, floats(0))


def order_cases() -> None:
    ties = np.array([3, 1, 3, np.nan, -0.0, 0.0, np.inf, -np.inf, 1, np.nan, 2], np.float32)
    few = integers(6, 50, low=0, high=5, dtype=np.float32)
    for values in (ties, floats(4, 3), integers(5, 2), floats(0), floats(1)):
        add("sort", partial(lax.sort, dimension=0), values)
    add("sort", jnp.argsort, np.array([2, 1, 2, 1, 0, 2]))
    add("sort", partial(jnp.argsort, axis=1), integers(3, 40, low=0, high=4))
    for values, k in ((ties, 11), (ties, 4), (few, 7), (few.T, 3), (few, 50), (floats(3, 1), 1)):
        add("top_k", partial(lax.top_k, k=k), values)
    add("top_k", partial(lax.top_k, k=0), few)
    add("top_k", partial(lax.top_k, k=5), integers(2, 9))
    add("top_k", lambda x: lax.top_k(x.T, 3), floats(9, 2))


def product_cases() -> None:
    for left, right in (
        ((5, 7), (7, 6)),
        ((9, 3), (3, 8)),
        ((2, 4, 3), (2, 3, 5)),
        ((3, 13, 150), (3, 150, 11)),
        ((3, 0), (0, 2)),
        ((0, 3), (3, 2)),
        ((70, 90), (90, 80)),  # more than 64 kB
    ):
        add("dot_general", jnp.matmul, floats(*left), floats(*right), ulps=8)
    for equation, left, right in (
        ("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4)),
        ("abc,bcd->da", (2, 3, 4), (3, 4, 5)),
        ("i,j->ij", (3,), (4,)),
        ("i,i->", (5,), (5,)),
    ):
        function = partial(jnp.einsum, equation)
        add("dot_general", function, floats(*left), floats(*right), ulps=8)
    add("dot_general", lambda a, b: a.T @ b.T, floats(4, 3), floats(5, 4), ulps=8)

    bytes_ = partial(integers, low=-128, high=127, dtype=np.int8)
    summed_in_int32 = partial(lax.dot, preferred_element_type=jnp.int32)
    add("dot_general", jnp.matmul, integers(3, 4), integers(4, 2))
    add("dot_general", jnp.matmul, np.stack([INTEGERS] * 2), np.stack([INTEGERS] * 3).T)
    add("dot_general", summed_in_int32, bytes_(5, 30), bytes_(30, 7))

    summed_in_float32 = partial(lax.dot, preferred_element_type=jnp.float32)
    a = floats(5, 6).astype(jnp.bfloat16)
    b = floats(6, 3).astype(jnp.bfloat16)
    add("dot_general", summed_in_float32, a, b, ulps=8)
    difference = np.array([1, -1], np.float32)
    not_a_float = np.array([2**24 + 1, 2**24], np.int32)
    add("dot_general", jnp.matmul, difference, not_a_float)  # 0, since JAX rounds it


def gather_cases() -> None:
    x = floats(5, 3, 4)
    rows = np.array([[0, 4, -1], [2, 7, -6]], np.int32)
    for mode in ("clip", "fill", "promise_in_bounds"):
        indices = rows % 5 if mode == "promise_in_bounds" else rows

        def take(x: Any, indices: Any, mode: str = mode) -> Any:
            return x.at[indices].get(mode=mode)

        add("gather", take, x, indices)
        add("gather", take, integers(5, 2), indices)
        add("gather", take, integers(5, dtype=np.uint32, low=0), indices)
    along_an_axis = partial(jnp.take_along_axis, axis=2)
    with_a_fill_value = partial(jnp.take, axis=1, fill_value=-2.5)
    add("gather", along_an_axis, x, integers(5, 3, 2, low=-6, high=6))
    add("gather", lambda x, columns: x[:, columns, 1:3], x, np.array([2, 0, 2]))
    add("gather", with_a_fill_value, x, np.array([9, 0]))
    add("gather", lambda x, indices: x[indices, indices], x, np.array([1, 2]))


def scatter_cases() -> None:
    x = floats(5, 3, 4)
    updates = floats(2, 3, 3, 4)
    rows = np.array([[0, 4, -1], [2, 7, -6]], np.int32)
    # which of two values a row is set to is not said: here no row is set twice
    unique_rows = {
        "clip": np.array([[0, 4, 1], [2, 3, -2]], np.int32),
        "drop": np.array([[0, 4, 1], [2, 7, -6]], np.int32),
    }
    primitives = {"add": "scatter-add", "multiply": "scatter-mul"}
    primitives |= {"set": "scatter", "max": "scatter-max", "min": "scatter-min"}
    for name, primitive in primitives.items():
        for mode in ("clip", "drop"):

            def scatter(x: Any, rows: Any, updates: Any, name: str = name, mode: str = mode) -> Any:
                return getattr(x.at[rows], name)(updates, mode=mode)

            if name == "set":
                add(primitive, scatter, x, unique_rows[mode], updates, ulps=4)
                continue
            add(primitive, scatter, x, rows, updates, ulps=4)
            wide_integers = integers(2, 3, 2, low=-(2**30), high=2**30)
            add(primitive, scatter, integers(5, 2), rows, wide_integers)
    add("scatter", lambda x, column: x.at[:, column].set(3), x, 1)
    add("scatter-add", lambda x, rows: x.at[rows, 1].add(2), integers(4, 3), rows[0])


def of_key(draw: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a key as one of its two words."""
    return lambda words, *others: draw(jax.random.wrap_key_data(words), *others)


def key_cases() -> None:
    words = np.array([12345, 2**32 - 7], np.uint32)
    draws: list[Callable[..., Any]] = [
        lambda key: jax.random.bits(key, (4, 3)),
        lambda key: jax.random.uniform(key, (7,)),
        lambda key: jax.random.key_data(jax.random.split(key, 3)),
        lambda key: jax.random.randint(key, (9,), -5, 99),
    ]
    for draw in draws:
        add("threefry2x32", of_key(draw), words)
    normal = of_key(lambda key: jax.random.normal(key, (4, 4)))
    add("threefry2x32", normal, words, ulps=32)
    fold = of_key(lambda key, number: jax.random.bits(jax.random.fold_in(key, number), (3, 5)))
    add("threefry2x32", fold, words, np.uint32(77))
    of_three_axes = of_key(lambda key: jax.random.bits(key, (2, 3, 2)))
    add("iota_2x32_shape", of_three_axes, words)


def control_cases() -> None:
    def choose(branch: Any, x: Any) -> Any:
        branches = [lambda x: x + 1, lambda x: x.T.reshape(3, 2), lambda x: -x]
        return lax.switch(branch, branches, x)

    def collatz(n: Any) -> Any:
        def step(state: Any) -> Any:
            n, steps = state
            following = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
            return following, steps + 1

        return lax.while_loop(lambda state: state[0] != 1, step, (n, 0))

    def double_and_count(times: Any, x: Any) -> Any:
        return lax.fori_loop(0, times, lambda i, x: x * 2 + i, x)

    def scan(x: Any, y: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return carry + row * y, (carry, row.sum())

        return lax.scan(step, jnp.zeros(4), x, reverse=True)

    for branch in (-1, 0, 1, 2, 5):  # the first and the last are no branches: they are clamped
        add("cond", choose, np.int32(branch), floats(3, 2))
    for n in (1, 27):
        add("while", collatz, np.int32(n))
    add("while", double_and_count, 5, 3)
    add("stack", scan, floats(3, 4), floats(4), ulps=8)
    add("broadcast_in_dim", scan, floats(0, 4), floats(4))


for add_cases in (
    *(unary_cases, power_cases, rounding_cases, conversion_cases, binary_cases, choosing_cases),
    *(shape_cases, reduction_cases, argument_cases, cumulative_cases, order_cases),
    *(product_cases, gather_cases, scatter_cases, key_cases, control_cases),
):
    add_cases()
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


@needs_javascript
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_a_primitive_computes_what_jax_computes(primitive, calls, computed, expected):
    numbers = CASES_OF[primitive]
    assert numbers, f"no case has {primitive}"
    for number in numbers:
        arguments = CASES[number].arguments
        used = {name for name, _, _, _ in calls[number].program.operations}
        if arguments and np.size(arguments[0]) > 0:
            assert primitive in used, f"case {number} has no {primitive}, only {used}"
        for found, wanted in zip(computed[number], expected[number], strict=True):
            difference = differences(found, wanted, CASES[number])
            assert not difference, f"case {number}: {difference}"


def test_the_product_in_webassembly_is_assembled_from_its_source():
    source = PRODUCT.with_suffix(".wat").read_text()
    assembled = PRODUCT.read_bytes()

    assert assembled == bytes(wasmtime.wat2wasm(source))
    assert assembled != bytes(wasmtime.wat2wasm(source.replace("f64x2.mul", "f64x2.add")))


WITHOUT_WEBASSEMBLY = "delete globalThis.WebAssembly;\n"
"""As in a page whose host does not let WebAssembly run."""


@needs_javascript
def test_products_have_the_same_bits_in_loops(calls, computed, tmp_path):
    path = tmp_path / "interpreter.js"
    path.write_text(WITHOUT_WEBASSEMBLY + INTERPRETER.read_text())
    numbers = CASES_OF["dot_general"]

    in_loops = run_programs([calls[number] for number in numbers], path)

    for number, results in zip(numbers, in_loops, strict=True):
        for found, wanted in zip(results.values(), computed[number], strict=True):
            np.testing.assert_array_equal(found, wanted)
