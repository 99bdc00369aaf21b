"""What holds from call to call: nothing said of one counts for the next, and scopes end."""

import inspect
import threading
from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError

from jgpt.shapes.calls import watching
from jgpt.shapes.contract import check, typed

SIZED: Any = Float[Array, "size"]


class Grower:
    def __init__(self, size: int):
        self.size = size

    @typed
    def same(self, x: Float[Array, "{self.size}"], grow: int = 0) -> Float[Array, "{self.size}"]:
        self.size += grow
        return x


@typed
def paired(x: Float[Array, "size"], y: Float[Array, "size"]) -> Float[Array, "size"]:
    return y


def test_a_size_that_has_changed_is_read_again():
    grower = Grower(3)
    x = jnp.ones(3)

    assert grower.same(x) is x
    with pytest.raises(TypeCheckError, match="returned a wrong result"):
        grower.same(x, grow=1)
    with pytest.raises(TypeCheckError, match="got a wrong argument `x`"):
        grower.same(x)
    assert grower.same(jnp.ones(4)).shape == (4,)
    with pytest.raises(TypeCheckError, match="got a wrong argument `x`"):
        Grower(5).same(jnp.ones(4))


def test_a_rejected_call_leaves_the_sizes_of_the_one_around_it():
    @typed
    def broken(x: Float[Array, "size"]) -> Float[Array, "size"]:
        raise ValueError("the body's own")

    @typed
    def outer(x: Float[Array, "size"]) -> Float[Array, "size"]:
        five = jnp.ones(5)
        for wrong in (lambda: paired(five, x), lambda: paired(*[five]), lambda: broken(five)):
            with pytest.raises((TypeError, ValueError)):
                wrong()
        with pytest.raises(TypeCheckError):
            check(jnp.ones(5), SIZED)
        return check(x, Float[Array, "size"])

    assert outer(jnp.ones(3)).shape == (3,)
    assert check(jnp.ones(5), SIZED).shape == (5,)  # out here no call decides it


def test_all_of_many_arguments_are_checked():
    @typed
    def total(*parts: Float[Array, "size"], **named: Float[Array, "size"]) -> Float[Array, "size"]:
        return sum([*parts, *named.values()], start=jnp.zeros(3))

    x = jnp.ones(3)
    assert total(x, x, y=x).sum() == 9
    for i in range(10):
        parts = [x] * 10
        parts[i] = jnp.ones(3, int)
        with pytest.raises(TypeCheckError, match="got a wrong argument `parts`"):
            total(*parts)
    with pytest.raises(TypeCheckError, match=r"argument `named`.*\n.*\nGot: float32\[4\]"):
        total(x, y=x, z=jnp.ones(4))


def both(first, second=2, *, third=3, fourth):
    return first, second, third, fourth


def only_by_position(first, /, second=2):
    return first, second


def of_many(first, *rest, last=9, **named):
    return first, rest, last, named


@pytest.mark.parametrize("function", [both, only_by_position, of_many])
@pytest.mark.parametrize("args", [(), (5, 6), (5, 6, 7)], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"fourth": 8}, {"fourth": 8, "second": 4}, {"fourth": 8, "unknown": 0}, {"second": 4}],
    ids=str,
)
def test_arguments_are_bound_as_python_binds_them(function, args, kwargs):
    try:
        expected = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) "):
            typed(function)(*args, **kwargs)
        return
    heard = []
    with watching(lambda call: heard.append(call.arguments)):
        assert typed(function)(*args, **kwargs) == expected
    assert tuple(heard[0].values()) == expected
    assert list(heard[0]) == list(inspect.signature(function).parameters)


def test_each_thread_has_its_own_sizes():
    met = threading.Barrier(2, timeout=20)

    @typed
    def waiting(x: Float[Array, "size"]) -> Float[Array, "size"]:
        met.wait()
        return x

    results = []
    threads = [
        threading.Thread(target=lambda size=size: results.append(waiting(jnp.ones(size)).shape))
        for size in (3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(results) == [(3,), (4,)]
