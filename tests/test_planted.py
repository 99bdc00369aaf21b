"""False functions, wrong at one size alone: none of them may be proven."""

import contextlib
import copy
import dataclasses
import enum
import fractions
import functools
import inspect
import itertools
import json
import linecache
import math
import operator
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import jgpt
from jgpt.shapes.proofs import prove


@dataclasses.dataclass(frozen=True)
class Sized:
    size: Any


class Seven:
    def __eq__(self, other: object) -> bool:
        return operator.index(other) == 7  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


class Sevens(enum.IntEnum):
    SEVEN = 7


def caught(ask: Callable[[], Any], kind: type[BaseException] = BaseException) -> Any:
    """What a function returns, or True if it raises."""
    try:
        return ask()
    except kind:
        return True


def last_word(ask: Callable[[], Any]) -> bool:
    found = False
    try:
        found = ask()
    finally:
        return found  # noqa: B012


def in_thread(ask: Callable[[], Any]) -> bool:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(caught(ask)))
    thread.start()
    thread.join()
    return found[0]


def suppressed(ask: Callable[[], Any]) -> bool:
    found = [False]
    with contextlib.suppress(BaseException):
        found[0] = ask()
    return found[0]


@functools.lru_cache
def remembered(size: Any) -> bool:
    return size == 7


def matched(size) -> bool:
    match size:
        case 7:
            return True
        case _:
            return False


def raised(size) -> bool:
    try:
        raise KeyError(size)
    except KeyError as error:
        return "7" in str(error)


def asserted(size) -> bool:
    try:
        assert size != 7, "seven"
    except AssertionError:
        return True
    return False


ASKED: dict[str, Callable[[Any], bool]] = {
    # as a key or a member
    "in a set": lambda n: n in {3, 7},
    "in a list": lambda n: n in [3, 7],
    "in a tuple of tuples": lambda n: (n, 1) in ((7, 1), (3, 1)),
    "a key": lambda n: {7: True}.get(n, False),
    "distinct": lambda n: len({n, 7}) == 1,
    "cached": remembered,
    "index in a list": lambda n: not caught(lambda: [7].index(n)),
    "grouped": lambda n: len(list(itertools.groupby([n, 7]))) == 1,
    # as a text
    "formatted": lambda n: f"{n:d}" == "7",
    "with a percent sign": lambda n: "%s" % n == "7",  # noqa: UP031
    "repr": lambda n: repr(n) == "7",
    "pattern": lambda n: re.fullmatch("7", str(n)) is not None,
    "JSON": lambda n: caught(
        lambda: json.dumps({"n": n}, default=str) in ('{"n": 7}', '{"n": "7"}')
    ),
    "in an exception": raised,
    # as another number
    "float": lambda n: float(n) == 7.0,
    "equal to a float": lambda n: n == 7.0,
    "a float, the other way": lambda n: 7.0 == n,  # noqa: SIM300
    "equal to a fraction": lambda n: n == fractions.Fraction(7),
    "equal to a NumPy integer": lambda n: n == np.int32(7),
    "a NumPy integer, the other way": lambda n: bool(np.int64(7) == n),
    "an enumeration": lambda n: n == Sevens.SEVEN,
    "between fractions": lambda n: 6.5 < n < 7.5,
    "a root": lambda n: math.sqrt(n) == math.sqrt(7),
    "a quotient": lambda n: n / 7 == 1,
    "a power": lambda n: n**0.5 == 7**0.5,
    "the greatest divisor": lambda n: math.gcd(n, 49) == 7 and n < 8,
    "bits": lambda n: n & 7 == 7 and n < 8,
    "its bits": lambda n: n.bit_length() == 3 and n > 6,
    "an index": lambda n: operator.index(n) == 7,
    "a range": lambda n: len(range(n)) == 7,
    "a member of a range": lambda n: n in range(7, 8),
    "sliced": lambda n: len("seventh"[:n]) == 7 and n < 8,
    # compared by others
    "an equal of its own": lambda n: Seven() == n,
    "records": lambda n: Sized(n) == Sized(7),
    "hashes of records": lambda n: hash(Sized(n)) == hash(Sized(7)),
    "a copy": lambda n: copy.copy(n) == 7,
    "equal shapes": lambda n: np.array_equal((n,), (7,)),
    "shapes that broadcast": lambda n: not caught(lambda: np.broadcast_shapes((n,), (7,)) != (7,)),
    "np.unique": lambda n: len(np.unique(np.array([n, 7]))) == 1,
    "sorted": lambda n: sorted([7.5, n, 6.5])[1] == n and 6 < n < 8,
    "the largest": lambda n: max(n, 7) == min(n, 7),
    "xor of truths": lambda n: not (n - 7),
    "reduced": lambda n: functools.reduce(operator.eq, [n, 7]),
    "matched": matched,
    # asked where what is raised is caught
    "caught": lambda n: caught(lambda: n == 7),
    "the last word": lambda n: last_word(lambda: n == 7),
    "suppressed": lambda n: suppressed(lambda: n == 7),
    "in a thread": lambda n: in_thread(lambda: n == 7),
    "asserted": asserted,
}


STATIC = jax.jit(lambda x, n: x[:-1] if n == 7 else x, static_argnums=1)

OF_ARRAYS: dict[str, Callable[[Array], bool]] = {
    "shape": lambda x: x.shape == (7,),
    "shape of a function": lambda x: jnp.shape(x) == (7,),
    "size": lambda x: x.size == 7,
    "bytes": lambda x: x.nbytes == 28,
    "index in a shape": lambda x: not caught(lambda: x.shape.index(7)),
    "text": lambda x: str(jax.typeof(x)) == "float32[7]",
    "text of a shape": lambda x: str(x.shape) == "(7,)",
    "hash of a shape": lambda x: hash(x.shape) == hash((7,)),
    "a new array": lambda x: jnp.ones((2, x.shape[0])).shape[1] == 7,
    "concatenated": lambda x: jnp.concatenate([x, x]).shape[0] == 14,
    "abstract": lambda x: jax.eval_shape(jnp.negative, x).shape == (7,),
    "struct": lambda x: (
        jax.ShapeDtypeStruct(x.shape, x.dtype) == jax.ShapeDtypeStruct((7,), x.dtype)
    ),
    "hash of a struct": lambda x: (
        jax.ShapeDtypeStruct(x.shape, x.dtype) in {jax.ShapeDtypeStruct((7,), x.dtype)}
    ),
    "static": lambda x: STATIC(x, x.shape[0]).shape[0] == 6,
}


def planted(ask: Callable[[Any], bool]) -> Callable[..., Any]:
    @jgpt.typed
    def wrong(x: Float[Array, "rows"]) -> Float[Array, "rows"]:
        is_asked = ask(x.shape[0])
        return x[:-1] if is_asked else x

    return wrong


def asks_shape(ask: Callable[[Array], bool]) -> Callable[..., Any]:
    @jgpt.typed
    def wrong(x: Float[Array, "rows"]) -> Float[Array, "rows"]:
        return x[:-1] if ask(x) else x

    return wrong


FALSE = {name: planted(ask) for name, ask in ASKED.items()}
FALSE |= {f"of an array: {name}": asks_shape(ask) for name, ask in OF_ARRAYS.items()}


@pytest.mark.parametrize("name", FALSE)
def test_what_is_wrong_at_one_size_is_not_proven(name: str) -> None:
    wrong = FALSE[name]
    assert wrong(jnp.ones(8)).shape == (8,)
    with pytest.raises(TypeError, match="rows"):
        wrong(jnp.ones(7))

    proof = prove(wrong, "float32[n]")

    assert not proof, str(proof)


# --- true functions ------------------------------------------------------------------------------


def told_in_a_refusal(x: Array) -> Array:
    rows = x.shape[0]
    if rows % 2:
        raise ValueError(f"{rows} rows are an odd number: {x.shape} must be even")
    return x


def told_by_a_helper(x: Array) -> Array:
    refuse_odd(x.shape[0])
    return x


def refuse_odd(rows: int) -> None:
    if rows % 2:
        raise ValueError(f"{rows} is an odd number")


def caught_and_raised_anew(x: Array) -> Array:
    try:
        return told_in_a_refusal(x)
    except ValueError as error:
        raise ValueError("odd") from error


def told_under_a_condition(x: Array) -> Array:
    text = str(x.shape[0])
    if text == "7":
        raise ValueError(text)
    return x


def printed(x: Array) -> Array:
    print(x.shape[0])
    return x


def warned_of(x: Array) -> Array:
    warnings.warn(f"{x.shape[0]} rows", stacklevel=1)
    return x


def drawn(x: Array) -> Array:
    text = f"{x}"
    return x if text else x[:1]


def kept_in_a_cache(x: Array) -> Array:
    remembered(x.shape[0])
    return x


@pytest.mark.parametrize(
    "function",
    [
        told_in_a_refusal,
        told_by_a_helper,
        lambda x: x.reshape(np.prod(x.shape)),
        lambda x: x.reshape(math.prod(x.shape)),
        lambda x: copy.deepcopy(x.shape)[0] * x,
        lambda x: x[: max(x.shape[0] // 2, 1)],
        lambda x: x * x.shape[0] ** -0.5,
        lambda x: dataclasses.replace(Sized(3), size=x.shape[0]).size * x,
        lambda x: functools.partial(jnp.ones)((x.shape[0], 2)),
        lambda x: jax.jit(jnp.negative)(x),
    ],
)
def test_what_asks_for_no_number_is_proven(function: Callable[[Array], Any]) -> None:
    proof = prove(function, "float32[n]")
    assert proof, str(proof)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("function", "asked_for"),
    [
        (kept_in_a_cache, "the hash of a size"),
        (printed, "the text of a size"),
        (warned_of, "the text of a size"),
        (drawn, "the text of a size"),
        (caught_and_raised_anew, "the text of a size"),
        (told_under_a_condition, "the text of a size"),
    ],
)
def test_a_question_without_an_answer_names_its_line(
    function: Callable[[Array], Any], asked_for: str
) -> None:
    proof = prove(function, "float32[n]")

    assert not proof
    (detail,) = {case.detail for case in proof.cases if case.verdict == "open"}
    line = re.fullmatch(rf"line (\d+) of test_planted\.py asks for {asked_for}", detail)
    assert line is not None, detail
    source = inspect.getsource(told_in_a_refusal) + inspect.getsource(function)
    asking = linecache.getline(__file__, int(line[1])).strip()
    assert asking in source
