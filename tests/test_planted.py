"""False functions, wrong at one size alone: none of them may be proven."""

import fractions
import functools
import math
import operator
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import jgpt
from jgpt.shapes.proofs import prove


class Seven:
    def __eq__(self, other: object) -> bool:
        return operator.index(other) == 7  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def caught(ask: Callable[[], Any], kind: type[BaseException] = BaseException) -> Any:
    """What a function returns, or True if it raises."""
    try:
        return ask()
    except kind:
        return True


def in_thread(ask: Callable[[], Any]) -> bool:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(caught(ask)))
    thread.start()
    thread.join()
    return found[0]


@functools.lru_cache
def remembered(size: Any) -> bool:
    return size == 7


ASKED: dict[str, Callable[[Any], bool]] = {
    # as a key or a member
    "a key": lambda n: {7: True}.get(n, False),
    "cached": remembered,
    # as a text
    "formatted": lambda n: f"{n:d}" == "7",
    "pattern": lambda n: re.fullmatch("7", str(n)) is not None,
    # as another number
    "float": lambda n: float(n) == 7.0,
    "equal to a fraction": lambda n: n == fractions.Fraction(7),
    "between fractions": lambda n: 6.5 < n < 7.5,
    "a root": lambda n: math.sqrt(n) == math.sqrt(7),
    "a quotient": lambda n: n / 7 == 1,
    "a power": lambda n: n**0.5 == 7**0.5,
    "bits": lambda n: n & 7 == 7 and n < 8,
    "a range": lambda n: len(range(n)) == 7,
    "sliced": lambda n: len("seventh"[:n]) == 7 and n < 8,
    # compared by others
    "an equal of its own": lambda n: Seven() == n,
    "equal shapes": lambda n: np.array_equal((n,), (7,)),
    # asked where what is raised is caught
    "caught": lambda n: caught(lambda: n == 7),
    "in a thread": lambda n: in_thread(lambda: n == 7),
}


STATIC = jax.jit(lambda x, n: x[:-1] if n == 7 else x, static_argnums=1)

OF_ARRAYS: dict[str, Callable[[Array], bool]] = {
    "shape": lambda x: x.shape == (7,),
    "text": lambda x: str(jax.typeof(x)) == "float32[7]",
    "a new array": lambda x: jnp.ones((2, x.shape[0])).shape[1] == 7,
    "abstract": lambda x: jax.eval_shape(jnp.negative, x).shape == (7,),
    "hash of a struct": lambda x: (
        jax.ShapeDtypeStruct(x.shape, x.dtype) in {jax.ShapeDtypeStruct((7,), x.dtype)}
    ),
    "static": lambda x: STATIC(x, x.shape[0]).shape[0] == 6,
}


def planted(ask: Callable[[Array], bool]) -> Callable[..., Any]:
    @jgpt.typed
    def wrong(x: Float[Array, "rows"]) -> Float[Array, "rows"]:
        return x[:-1] if ask(x) else x

    return wrong


FALSE = {name: planted(lambda x, ask=ask: ask(x.shape[0])) for name, ask in ASKED.items()}
FALSE |= {f"of an array: {name}": planted(ask) for name, ask in OF_ARRAYS.items()}


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


@pytest.mark.parametrize(
    "function",
    [
        told_in_a_refusal,
        lambda x: x.reshape(np.prod(x.shape)),
        lambda x: x.reshape(math.prod(x.shape)),
        lambda x: x[: max(x.shape[0] // 2, 1)],
    ],
)
def test_what_asks_for_no_number_is_proven(function: Callable[[Array], Any]) -> None:
    proof = prove(function, "float32[n]")
    assert proof, str(proof)
