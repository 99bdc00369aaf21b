"""Random programs: every dependence that is seen lies inside the hull."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jgpt.shapes import reads
from tests.quick import only
from tests.sight.brute import SHAPE, dependences, outside

Array = jax.Array
Operation = Callable[[Array, Array], Any]
_, TIME, WIDTH = SHAPE


def _weights(numbers: np.random.Generator, *shape: int) -> Array:
    return jnp.asarray(numbers.normal(size=shape), jnp.float32)


def _mask(numbers: np.random.Generator) -> np.ndarray:
    """Positions that each position sees, at least itself."""
    return (numbers.random((TIME, TIME)) < 0.4) | np.eye(TIME, dtype=bool)


def operation(numbers: np.random.Generator) -> Operation:
    """Return a function of two arrays (batch, time, width) to another one of this shape."""
    axis = int(numbers.integers(1, 3))
    places = numbers.integers(TIME, size=TIME)
    mask = _mask(numbers)
    fill = float(numbers.choice([-np.inf, -1e9, -1e4, -3.0]))
    weights = _weights(numbers, WIDTH, WIDTH)
    kernel = _weights(numbers, 2, WIDTH, WIDTH)
    known = np.asarray(numbers.integers(-1, 2, size=(TIME, WIDTH)), np.float32)
    mixing = np.asarray(numbers.integers(0, 2, size=(TIME, TIME)), np.float32)
    start = int(numbers.integers(TIME))

    def attention(x: Array, y: Array) -> Array:
        scores = jnp.where(mask, x @ y.mT, fill)
        return jax.nn.softmax(scores) @ y

    def convolution(x: Array, _: Array) -> Array:
        return lax.conv_general_dilated(
            x, kernel, (1,), [(1, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        )

    def scan(x: Array, y: Array) -> Array:
        def body(carry: Array, item: Any) -> tuple[Array, Array]:
            carry = jnp.tanh(carry + item[0]) * 0.9
            return carry, carry + item[1]

        items = (x.swapaxes(0, 1), y.swapaxes(0, 1))
        reverse = bool(start % 2)
        return lax.scan(body, x[:, start], items, reverse=reverse)[1].swapaxes(0, 1)

    def branch(x: Array, y: Array) -> Array:
        return lax.cond(x[0, start, 0] > 0, lambda x, y: x, lambda x, y: y, x, y)

    def loop(x: Array, _: Array) -> Array:
        return lax.while_loop(
            lambda y: (jnp.abs(y[:, start]).sum() < 3) & (jnp.abs(y).max() < 50),
            lambda y: y * 1.3 + 0.2 * y[:, places],
            x,
        )

    def update(x: Array, y: Array) -> Array:
        where = (x[0, start, 0] > 0).astype(int) + min(start, TIME - 2)
        return lax.dynamic_update_slice_in_dim(x, y[:, :1], where, axis=1)

    operations: list[Operation] = [
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: x / (1 + jnp.abs(y)),
        lambda x, y: jnp.maximum(x, y),
        lambda x, y: jnp.where(x > 0, x, y),
        lambda x, y: jnp.where(known > 0, x, y),
        lambda x, _: x * known,
        lambda x, _: x + known,
        lambda x, _: jnp.tanh(x),
        lambda x, _: jnp.exp(-jnp.abs(x)),
        lambda x, _: x @ weights,
        lambda x, _: mixing @ x,
        lambda x, _: jnp.cumsum(x, axis),
        lambda x, _: lax.cummax(x, axis, reverse=True),
        lambda x, _: jnp.flip(x, axis),
        lambda x, _: jnp.roll(x, 1, axis),
        lambda x, _: jnp.sort(x, axis),
        lambda x, _: x - x.max(axis, keepdims=True),
        lambda x, _: x - x.mean(axis, keepdims=True),
        lambda x, _: jax.nn.softmax(x, axis),
        lambda x, _: jax.nn.one_hot(x.argmax(axis=2), WIDTH) + 0 * x,
        lambda x, _: x[:, places],
        lambda x, y: x.at[:, places].add(y),
        lambda x, y: jnp.concatenate([x[:, :start], y[:, start:]], 1),
        lambda x, _: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
        lambda x, _: x.reshape(-1, WIDTH, TIME).swapaxes(1, 2),
        lambda x, _: lax.top_k(x.mT, TIME)[0].mT,
        lambda x, _: (x > 0.3).any(axis, keepdims=True) * x,
        attention,
        convolution,
        scan,
        branch,
        loop,
        update,
    ]
    return operations[int(numbers.integers(len(operations)))]


def random_program(seed: int) -> Callable[[Array], Array]:
    numbers = np.random.default_rng(seed)
    steps = []
    for _ in range(int(numbers.integers(1, 7))):
        steps.append((operation(numbers), numbers.random(), numbers.random()))

    def program(x: Array) -> Array:
        made = [x]
        for function, first, second in steps:
            # Mostly the newest array, and any earlier one.
            one = made[-1] if first < 0.7 else made[int(first * len(made))]
            made.append(function(one, made[int(second * len(made))]))
        return made[-1]

    return program


@pytest.mark.parametrize("group", only(range(3), range(100)))
def test_a_dependence_that_is_seen_is_inside_the_hull(group: int) -> None:
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    seeds = range(20 * group, 20 * group + 20)
    programs = [random_program(seed) for seed in seeds]
    found = dependences(*programs, seeds=2)
    for seed, program, seen in zip(seeds, programs, found, strict=True):
        hull = reads(program, array, of={0: ("b", "t")})
        assert not outside(hull, seen).size, f"seed {seed}: {outside(hull, seen)[:3].tolist()}"
