"""Every primitive of the page's interpreter computes what JAX computes, edge cases included."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jgpt.pictures.program import PRIMITIVES, make_program
from tests.javascript import INTERPRETER, Call, needs_javascript, run_programs

RANDOM = np.random.default_rng(0)
EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-30],
    np.float32,
)
INTEGERS = np.array([0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 65537, -65537, 31], np.int32)
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


def unary_cases() -> list[Case]:
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
    cases = []
    for name in (*ulps, *exact):
        function = getattr(lax, name)
        # JAX takes 30 ms to compile a case, so that not all have all shapes.
        shapes = [np.concatenate([EDGES, 3 * floats(9)])]
        if name in ("exp", "neg", "erf"):
            shapes += [floats(0, 2), floats(1, 1), floats(4, 3).T, floats(2, 3, 5)]
        for x in shapes:
            cases.append(Case(name, function, (x,), ulps.get(name, 0)))
    for x in (INTEGERS, WORDS.astype(np.int32), integers(2, 3, dtype=np.int8)):
        for name in ("abs", "neg", "sign", "not", "square"):
            cases.append(Case(name, getattr(lax, "bitwise_not" if name == "not" else name), (x,)))
    cases.append(Case("not", lax.bitwise_not, (np.array([True, False]),)))
    cases.append(Case("not", lax.bitwise_not, (WORDS,)))
    for power in (2, 3, -1, 5, 0):
        cases.append(Case("integer_pow", lambda x, y=power: lax.integer_pow(x, y), (EDGES,), 2))
    cases.append(Case("integer_pow", lambda x: lax.integer_pow(x, 5), (INTEGERS,)))
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -0.2, 0.2, 8388609.0], np.float32)
    for method in (lax.RoundingMethod.TO_NEAREST_EVEN, lax.RoundingMethod.AWAY_FROM_ZERO):
        for x in (halves, EDGES, 5 * floats(4, 4)):
            cases.append(Case("round", lambda x, how=method: lax.round(x, how), (x,)))
    for exponent, mantissa in ((8, 7), (5, 10)):
        for x in (EDGES, floats(5, 3), np.array([65519.0, 65520.0, 6e-5, 1e-7, 1e-9], np.float32)):
            cases.append(
                Case(
                    "reduce_precision",
                    lambda x, e=exponent, m=mantissa: lax.reduce_precision(x, e, m),
                    (x,),
                )
            )
    return cases


def conversion_cases() -> list[Case]:
    cases = []
    wide = np.array([300.7, -300.7, 2147483648.0, -5e9, 127.9, -128.9, 255.5, 0.99], np.float32)
    sources = (EDGES, wide, INTEGERS, WORDS, np.array([True, False]), integers(3, 4, dtype=np.int8))
    targets = ("float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool")
    for x in sources:
        for target in (*targets, "int16", "uint16"):
            if target == str(x.dtype):
                continue

            def convert(x: Any, target: str = target) -> Any:
                return lax.convert_element_type(x, target)

            cases.append(Case("convert_element_type", convert, (x,)))
    for x, target in ((EDGES, "int32"), (EDGES, "uint32"), (INTEGERS, "float32")):

        def bits(x: Any, target: str = target) -> Any:
            return lax.bitcast_convert_type(x, target)

        cases.append(Case("bitcast_convert_type", bits, (x,)))
    return cases


def binary_cases() -> list[Case]:
    cases = []
    compared = {"eq": lax.eq, "ge": lax.ge, "gt": lax.gt, "le": lax.le, "lt": lax.lt, "ne": lax.ne}
    arithmetic = {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min}
    arithmetic |= {"div": lax.div, "rem": lax.rem}
    bytes_ = integers(6, low=-128, high=127, dtype=np.int8)
    for name, function in (compared | arithmetic).items():
        for values in (EDGES, INTEGERS, WORDS, bytes_):
            cases.append(Case(name, function, pairs(values)))
        if name not in ("add", "sub", "lt", "max"):
            continue
        cases.append(Case(name, function, (floats(4, 3).T, floats(3, 4))))
        cases.append(Case(name, function, (floats(3, 1, 4), floats(3, 2, 4))))
        cases.append(Case(name, function, (floats(0, 4), floats(0, 4))))
    for name, function in {"pow": lax.pow, "atan2": lax.atan2}.items():
        cases.append(Case(name, function, pairs(EDGES), 8))
        cases.append(Case(name, function, (abs(floats(2, 5)), floats(2, 5)), 8))
    logic = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
    for name, function in logic.items():
        for values in (INTEGERS, WORDS, np.array([True, False]), bytes_):
            cases.append(Case(name, function, pairs(values)))
    shifts = {
        "shift_left": lax.shift_left,
        "shift_right_logical": lax.shift_right_logical,
        "shift_right_arithmetic": lax.shift_right_arithmetic,
    }
    for name, function in shifts.items():
        for values in (INTEGERS, WORDS, bytes_):
            counts = np.array([0, 1, 5, 7, 8, 31, 32, 40]).astype(values.dtype)
            left, right = np.meshgrid(values, counts)
            cases.append(Case(name, function, (left.ravel(), right.ravel())))
    return cases


def choosing_cases() -> list[Case]:
    a, b = floats(3, 4), floats(3, 4)
    which = RANDOM.integers(0, 2, (3, 4)).astype(bool)
    cases = [
        Case("select_n", lax.select_n, (which, a, b)),
        Case("select_n", lax.select_n, (np.array(True), a, b)),
        Case("select_n", lax.select_n, (integers(3, 4, low=0, high=3), a, b, floats(3, 4))),
        Case("select_n", lambda w, a, b: lax.select_n(w.T, a, b), (which.T.copy(), a, b)),
        Case("clamp", lax.clamp, (np.float32(-0.5), a, np.float32(0.25))),
        Case("clamp", lax.clamp, (np.float32(-1), EDGES, np.float32(1))),
        Case("clamp", lax.clamp, (-abs(a), b, abs(a))),
        Case("clamp", lax.clamp, (np.int32(-3), INTEGERS, np.int32(100))),
    ]
    return cases


def shape_cases() -> list[Case]:
    x = floats(2, 3, 4)
    numbers = integers(3, 5)

    def padded(x: Any) -> Any:
        return lax.pad(x, jnp.float32(7), ((1, 2, 0), (0, -1, 1), (-2, 3, 2)))

    cases = [
        Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (5, 3, 2), (1,)), (floats(3),)),
        Case("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (2, 3, 4)) + 0, (floats(3, 1),)),
        Case("broadcast_in_dim", lambda x: jnp.full((0, 3), x), (np.float32(2),)),
        Case("concatenate", lambda a, b: jnp.concatenate([a, b, a], 1), (x, floats(2, 1, 4))),
        Case("concatenate", lambda a, b: jnp.concatenate([a, b]), (floats(0, 2), floats(3, 2))),
        Case("concatenate", lambda a: jnp.concatenate([a.T, a.T], 1), (numbers,)),
        Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (0, i, 1), (2, 2, 3)), (x, 1)),
        Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (-1, i, 9), (1, 2, 3)), (x, 7)),
        Case(
            "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 1)),
            (x, floats(1, 2, 2), 5),
        ),
        Case("iota", lambda: lax.broadcasted_iota(np.int32, (3, 4, 5), 1), ()),
        Case("iota", lambda: lax.broadcasted_iota(np.float32, (3, 4), 0), ()),
        Case("pad", padded, (x,)),
        Case("pad", lambda x: lax.pad(x, 0, ((-2, -1, 0), (0, 0, 0))), (numbers,)),
        Case("pad", lambda x: lax.pad(x, jnp.float32(1), ((2, 1, 3),)), (floats(0),)),
        Case("reshape", lambda x: x.reshape(6, 4), (x,)),
        Case("reshape", lambda x: x.T.reshape(2, 12), (x,)),
        Case("rev", lambda x: lax.rev(x, (0, 2)), (x,)),
        Case("rev", lambda x: lax.rev(x, (0,)) + x, (floats(0, 2),)),
        Case("slice", lambda x: lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 3)), (x,)),
        Case("slice", lambda x: x[:, 2:2], (numbers,)),
        Case("split", lambda x: jnp.split(x, 2, axis=2), (x,)),
        Case("squeeze", lambda x: x.squeeze(1) + 0, (floats(3, 1, 2),)),
        Case("stack", lambda a, b: jnp.stack([a, b, a], 1), (floats(3, 2), floats(3, 2))),
        Case("tile", lambda x: jnp.tile(x, (2, 3, 1, 2)), (x,)),
        Case("transpose", lambda x: x.transpose(2, 0, 1), (x,)),
        Case("transpose", lambda x: x.transpose(2, 0, 1).reshape(8, 3) * 2, (x,)),
    ]
    return cases


def reduction_cases() -> list[Case]:
    x = floats(3, 4, 5)
    cases = []
    for name in ("sum", "max", "min", "prod"):
        function = getattr(jnp, name)
        for axes in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
            ulps = 16 if name in ("sum", "prod") else 0
            cases.append(Case(f"reduce_{name}", lambda x, a=axes, f=function: f(x, a), (x,), ulps))
        for values in (EDGES, floats(1), INTEGERS, WORDS):
            is_exact = values.dtype != np.float32
            cases.append(Case(f"reduce_{name}", function, (values,), 0 if is_exact else 4))
        cases.append(Case(f"reduce_{name}", lambda x, f=function: f(x.T, 1), (floats(4, 3),), 8))
    for name, start in (("sum", 0), ("prod", 1)):
        function = getattr(jnp, name)
        cases.append(Case(f"reduce_{name}", lambda x, f=function: f(x, 0), (floats(0, start + 2),)))
    for name in ("max", "min"):
        reduce = getattr(lax, f"reduce_{name}")
        for empty in (floats(2, 0), integers(0, 3)):
            axis = empty.shape.index(0)
            cases.append(Case(f"reduce_{name}", lambda x, r=reduce, a=axis: r(x, (a,)), (empty,)))
    truths = RANDOM.integers(0, 2, (3, 4)).astype(bool)
    for name in ("and", "or", "xor"):
        reduce = getattr(lax, f"reduce_{name}")
        for values in (truths, integers(3, 4), integers(2, 3, dtype=np.uint32, low=0)):
            cases.append(Case(f"reduce_{name}", lambda x, r=reduce: r(x, (1,)), (values,)))
    ties = np.array([[1, 3, 3, 2], [2, 2, 2, 2], [0, -0.0, 0, -0.0]], np.float32)
    broken = np.array([[1, np.nan, 3, np.nan], [np.inf, 1, np.inf, -np.inf]], np.float32)
    for name in ("argmax", "argmin"):
        function = getattr(lax, name)
        for values in (ties, broken, x[0], integers(3, 6), -broken):
            for axis in (0, 1):
                cases.append(Case(name, lambda x, f=function, a=axis: f(x, a, np.int32), (values,)))
    for name in ("cumsum", "cumprod", "cummax", "cummin"):
        function = getattr(lax, name)
        ulps = 16 if name in ("cumsum", "cumprod") else 0
        for axis, reverse in ((0, False), (2, True), (1, False)):

            def cumulate(x: Any, f: Any = function, a: int = axis, r: bool = reverse) -> Any:
                return f(x, axis=a, reverse=r)

            cases.append(Case(name, cumulate, (x,), ulps))
            cases.append(Case(name, cumulate, (integers(3, 2, 4),)))
        cases.append(Case(name, function, (floats(0),)))
    return cases


def order_cases() -> list[Case]:
    ties = np.array([3, 1, 3, np.nan, -0.0, 0.0, np.inf, -np.inf, 1, np.nan, 2], np.float32)
    cases = []
    for values in (ties, floats(4, 3), integers(5, 2), floats(0), floats(1)):
        cases.append(Case("sort", lambda x: lax.sort(x, dimension=0), (values,)))
    cases.append(Case("sort", lambda x: jnp.argsort(x), (np.array([2, 1, 2, 1, 0, 2]),)))
    cases.append(Case("sort", lambda x: jnp.argsort(x, axis=1), (integers(3, 40, low=0, high=4),)))
    few = integers(6, 50, low=0, high=5, dtype=np.float32)
    for values, k in ((ties, 11), (ties, 4), (few, 7), (few.T, 3), (few, 50), (floats(3, 1), 1)):
        cases.append(Case("top_k", lambda x, k=k: lax.top_k(x, k), (values,)))
    cases.append(Case("top_k", lambda x: lax.top_k(x, 0), (few,)))
    cases.append(Case("top_k", lambda x: lax.top_k(x, 5), (integers(2, 9),)))
    cases.append(Case("top_k", lambda x: lax.top_k(x.T, 3), (floats(9, 2),)))
    return cases


def product_cases() -> list[Case]:
    def product(text: str) -> Callable[..., Any]:
        return lambda a, b: jnp.einsum(text, a, b)

    bytes_ = {"low": -128, "high": 127, "dtype": np.int8}
    cases = [
        Case("dot_general", jnp.matmul, (floats(5, 7), floats(7, 6)), 8),
        Case("dot_general", jnp.matmul, (floats(9, 3), floats(3, 8)), 8),
        Case("dot_general", jnp.matmul, (floats(2, 4, 3), floats(2, 3, 5)), 8),
        Case(
            "dot_general", product("bqhd,bkhd->bhqk"), (floats(2, 5, 3, 4), floats(2, 6, 3, 4)), 8
        ),
        Case("dot_general", product("abc,bcd->da"), (floats(2, 3, 4), floats(3, 4, 5)), 8),
        Case("dot_general", product("i,j->ij"), (floats(3), floats(4)), 4),
        Case("dot_general", product("i,i->"), (floats(5), floats(5)), 8),
        Case("dot_general", jnp.matmul, (floats(3, 0), floats(0, 2))),
        Case("dot_general", jnp.matmul, (floats(0, 3), floats(3, 2))),
        Case("dot_general", jnp.matmul, (integers(3, 4), integers(4, 2))),
        Case("dot_general", jnp.matmul, (np.stack([INTEGERS] * 2), np.stack([INTEGERS] * 3).T)),
        Case(
            "dot_general",
            lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32),
            (integers(5, 30, **bytes_), integers(30, 7, **bytes_)),
        ),
        Case(
            "dot_general",
            lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32),
            (floats(5, 6).astype(jnp.bfloat16), floats(6, 3).astype(jnp.bfloat16)),
            8,
        ),
        Case("dot_general", lambda a, b: a.T @ b.T, (floats(4, 3), floats(5, 4)), 8),
    ]
    return cases


def index_cases() -> list[Case]:
    x = floats(5, 3, 4)
    rows = np.array([[0, 4, -1], [2, 7, -6]], np.int32)
    modes = ("clip", "fill", "promise_in_bounds")
    cases = []
    for mode in modes:
        indices = rows % 5 if mode == "promise_in_bounds" else rows

        def take(x: Any, i: Any, mode: str = mode) -> Any:
            return x.at[i].get(mode=mode)

        cases.append(Case("gather", take, (x, indices)))
        cases.append(Case("gather", take, (integers(5, 2), indices)))
        cases.append(Case("gather", take, (integers(5, dtype=np.uint32, low=0), indices)))
    places = integers(5, 3, 2, low=-6, high=6)
    cases += [
        Case("gather", lambda x, i: jnp.take_along_axis(x, i, axis=2), (x, places)),
        Case("gather", lambda x, i: x[:, i, 1:3], (x, np.array([2, 0, 2]))),
        Case("gather", lambda x, i: jnp.take(x, i, axis=1, fill_value=-2.5), (x, np.array([9, 0]))),
        Case("gather", lambda x, i: x[i, i], (x, np.array([1, 2]))),
    ]
    updates = floats(2, 3, 3, 4)
    for name in ("set", "add", "multiply", "max", "min"):
        primitive = {"set": "scatter", "multiply": "scatter-mul"}.get(name, f"scatter-{name}")
        for mode in ("clip", "drop"):

            def scatter(x: Any, i: Any, u: Any, name: str = name, mode: str = mode) -> Any:
                return getattr(x.at[i], name)(u, mode=mode)

            unique = rows if name != "set" else np.array([[0, 4, 1], [2, 7, -6]], np.int32)
            if name == "set" and mode == "clip":
                unique = np.array([[0, 4, 1], [2, 3, -2]], np.int32)[:, :3]
            cases.append(Case(primitive, scatter, (x, unique, updates), 4))
            if name != "set":
                more = integers(2, 3, 2, low=-(2**30), high=2**30)
                cases.append(Case(primitive, scatter, (integers(5, 2), rows, more)))
    cases.append(Case("scatter", lambda x, i: x.at[:, i].set(3), (x, 1)))
    cases.append(Case("scatter-add", lambda x, i: x.at[i, 1].add(2), (integers(4, 3), rows[0])))
    return cases


def key_cases() -> list[Case]:
    key = np.array([12345, 2**32 - 7], np.uint32)

    def with_key(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda words: function(jax.random.wrap_key_data(words))

    def folded(words: Any, number: Any) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(words), number)
        return jax.random.bits(key, (3, 5))

    return [
        Case("threefry2x32", with_key(lambda key: jax.random.bits(key, (4, 3))), (key,)),
        Case("threefry2x32", with_key(lambda key: jax.random.uniform(key, (7,))), (key,)),
        Case(
            "threefry2x32",
            with_key(lambda key: jax.random.key_data(jax.random.split(key, 3))),
            (key,),
        ),
        Case("threefry2x32", with_key(lambda key: jax.random.randint(key, (9,), -5, 99)), (key,)),
        Case("threefry2x32", with_key(lambda key: jax.random.normal(key, (4, 4))), (key,), 32),
        Case("threefry2x32", folded, (key, np.uint32(77))),
        Case("iota_2x32_shape", with_key(lambda key: jax.random.bits(key, (2, 3, 2))), (key,)),
    ]


def control_cases() -> list[Case]:
    def choose(i: Any, x: Any) -> Any:
        return lax.switch(i, [lambda x: x + 1, lambda x: x.T.reshape(3, 2), lambda x: -x], x)

    def collatz(n: Any) -> Any:
        def step(state: Any) -> Any:
            n, steps = state
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

        return lax.while_loop(lambda state: state[0] != 1, step, (n, 0))

    def scanned(x: Any, y: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return carry + row * y, (carry, row.sum())

        return lax.scan(step, jnp.zeros(4), x, reverse=True)

    cases = [Case("cond", choose, (np.int32(i), floats(3, 2))) for i in (-1, 0, 1, 2, 5)]
    cases += [Case("while", collatz, (np.int32(n),)) for n in (1, 27)]
    cases.append(Case("while", lambda n, x: lax.fori_loop(0, n, lambda i, x: x * 2 + i, x), (5, 3)))
    cases.append(Case("stack", scanned, (floats(3, 4), floats(4)), 8))
    cases.append(Case("broadcast_in_dim", scanned, (floats(0, 4), floats(4))))
    return cases


CASES = (
    unary_cases()
    + conversion_cases()
    + binary_cases()
    + choosing_cases()
    + shape_cases()
    + reduction_cases()
    + order_cases()
    + product_cases()
    + index_cases()
    + key_cases()
    + control_cases()
)


@pytest.fixture(scope="module")
def expected() -> list[list[np.ndarray]]:
    """What JAX computes: all cases in one compiled program."""

    def every(arguments: Any) -> Any:
        return [case.function(*given) for case, given in zip(CASES, arguments, strict=True)]

    results = jax.jit(every)([case.arguments for case in CASES])
    return [[np.asarray(leaf) for leaf in jax.tree.leaves(result)] for result in results]


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return [Call(make_program(case.function, *case.arguments), case.arguments) for case in CASES]


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
        same &= np.signbit(found) == np.signbit(wanted)
        same |= np.isnan(found) & np.isnan(wanted)
        same |= (abs(found) <= tiny) & (abs(wanted) <= tiny)
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
    tested = [number for number, case in enumerate(CASES) if case.primitive == primitive]
    assert tested, f"no case has {primitive}"
    wrong = []
    for number in tested:
        case = CASES[number]
        used = {name for name, _, _, _ in calls[number].program.operations}
        if case.arguments and np.size(case.arguments[0]) > 0:
            assert primitive in used, f"case {number} has no {primitive}, only {used}"
        for found, wanted in zip(computed[number], expected[number], strict=True):
            difference = differences(found, wanted, case)
            if difference:
                wrong.append(f"case {number}: {difference}")
    assert not wrong, "\n".join(wrong)


MISTAKES = {
    "argmax": ("if (x > a[i - (k - best) * s])", "if (x >= a[i - (k - best) * s])"),
    "dot_general": ("c33 += a3 * b3", "c33 += a3 * b2"),
    "gather": ('mode === "clip" ? start', "true ? start"),
    "mul": ("always(binary(Math.imul));", "always(binary((a, b) => a * b));"),
    "rem": ("b === 0 ? a : a % b", "a % b"),
    "transpose": ("order.map((axis) => x.strides[axis]))", "x.strides)"),
}


@needs_javascript
@pytest.mark.parametrize("primitive", MISTAKES)
def test_a_mistake_in_the_interpreter_is_noticed(primitive, calls, expected, tmp_path):
    right, wrong = MISTAKES[primitive]
    source = INTERPRETER.read_text()
    assert right in source
    path = tmp_path / "interpreter.js"
    path.write_text(source.replace(right, wrong))
    tested = [number for number, case in enumerate(CASES) if case.primitive == primitive]

    results = run_programs([calls[number] for number in tested], path)

    found = []
    for number, result in zip(tested, results, strict=True):
        for values, wanted in zip(result.values(), expected[number], strict=True):
            found.append(differences(values, wanted, CASES[number]))
    assert any(found)


def test_the_tables_of_python_and_javascript_are_equal():
    source = INTERPRETER.read_text()
    start = source.index("const primitives = {")
    table = source[start : source.index("\n};", start)]
    names = re.findall(r'^  "?([a-z_\d-]+)"?(?:[:,])', table, re.MULTILINE)
    assert sorted(names) == sorted(PRIMITIVES)
