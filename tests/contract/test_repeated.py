"""A verdict never comes from an earlier call: wrong calls after right ones of the same function."""

import asyncio
from typing import Any, TypeVar

import jax.numpy as jnp
import pytest
from jaxtyping import AnnotationError, Array, Float, Int, PyTree, TypeCheckError

from jgpt.shapes.contract import check, typed

Prompt = TypeVar("Prompt", Int[Array, "time"], list[int])


TWO = jnp.ones(2)
THREE = jnp.ones(3)


def test_an_alternative_that_does_not_fit_binds_nothing():
    @typed
    def second(
        x: tuple[Float[Array, "size"], int] | tuple[Float[Array, "other"], str],
        y: Float[Array, "size"],
    ) -> None: ...

    second((TWO, "text"), THREE)


def test_the_reason_is_that_of_the_nearest_alternative():
    @typed
    def encode(prompt: Prompt) -> None: ...

    encode([3])
    with pytest.raises(TypeCheckError, match="this array has dtype uint16, which is no Int"):
        encode(jnp.ones(3, "uint16"))
    with pytest.raises(TypeCheckError, match=r"Expected: Int\[Array, \"time\"\] \| list\[int\]"):
        encode("text")  # type: ignore[arg-type]


def test_the_result_of_an_async_function_is_checked_when_it_is_awaited():
    @typed
    async def doubled(x: Float[Array, "size"], length: int) -> Float[Array, "size"]:
        await asyncio.sleep(0)
        return check(jnp.ones(length), Float[Array, "size"])

    async def both() -> Any:
        return await asyncio.gather(doubled(TWO, 2), doubled(THREE, 3))

    assert [x.shape for x in asyncio.run(both())] == [(2,), (3,)]
    with pytest.raises(TypeCheckError):
        asyncio.run(doubled(TWO, 3))


@pytest.mark.parametrize("hint", [PyTree[Float[Array, "?size"]], Float[Array, "#size"]])
def test_what_means_nothing_is_refused_by_name(hint):
    def function(x: Any) -> None: ...

    function.__annotations__["x"] = hint
    with pytest.raises(AnnotationError, match=r"\?size|#size"):
        typed(function)(TWO)


class Owner:
    """An object whose sizes are in annotations."""

    def __init__(self, width: Any) -> None:
        self.width = width
        self.sizes = (4, 3)

    @typed
    def take(self, x: Float[Array, "batch {self.width}"]) -> Float[Array, "batch"]:
        return x[:, 0]

    @typed
    def second(self, x: Float[Array, "batch {self.sizes[1]+1-1}"]) -> None: ...


@typed
def bound_inside(x: Float[Array, "a"], n: int, m: int) -> Float[Array, "b"]:
    check(jnp.zeros(n), Float[Array, "b"])
    return jnp.zeros(m)


@typed
def listed(x: list[Float[Array, "size"]], y: Float[Array, "size"]) -> None: ...


ROWS = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (bound_inside, (TWO, 3, 3), (TWO, 4, 3)),
        (listed, ([TWO, TWO], TWO), ([TWO, THREE], TWO)),
        (listed, ([TWO], TWO), ([TWO], THREE)),
        (lambda width: Owner(width).take(ROWS), (3,), (4,)),
        (lambda width: Owner(width).take(ROWS), (3,), (3.5,)),
        (lambda x: Owner(3).second(x), (ROWS,), (ROWS[:, :2],)),
    ],
)
def test_a_wrong_call_after_right_ones_is_refused(function, right, wrong):
    for _ in range(3):
        function(*right)
        with pytest.raises(TypeCheckError):
            function(*wrong)
