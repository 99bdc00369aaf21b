"""The hull of single operations: the first and the last position that each result reads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jgpt.shapes.reading import reads

TIME = 5
FEW = 1 << 20
"""A first position at or above this is that of what reads nothing."""
X = jax.ShapeDtypeStruct((TIME,), jnp.float32)
EACH = list(range(TIME))
OWN = [[t, t] for t in EACH]
NONE = "none"


def hull(program: Callable[..., Any]) -> list[Any]:
    """Return for each element of a vector the first and the last position that it reads."""
    found = reads(program, X, of={0: ("t",)})
    firsts = found.first("t").reshape(-1)
    lasts = found.last("t").reshape(-1)
    return [
        NONE if first > FEW else [int(first), int(last)]
        for first, last in zip(firsts, lasts, strict=True)
    ]


def spread(x: Any) -> Any:
    """A loop that goes on as its first number decides; each step reads one position further."""
    return lax.while_loop(lambda y: y[0] < 9, lambda y: y + jnp.append(y[1:], 0.0), x)


def shifted_in_scan(x: Any) -> Any:
    return lax.scan(lambda carry, item: (item, carry), 0.0, x)[1]


def far_below(x: Any) -> Any:
    """One of two numbers far below moderate ones, as the last position decides."""
    return jnp.where(x[4] > 0, -1e7, -2e7)


def infinite_or_0(x: Any) -> Any:
    return jnp.where(x > 0, jnp.inf, 0.0)


HULLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "elements": (lambda x: jnp.exp(x) * 3, OWN),
    "a constant": (lambda x: 0 * x + jnp.zeros(5), [NONE] * TIME),
    "times a known 0": (
        lambda x: x * np.array([0.0, 1, 0, 2, 0]),
        [NONE, [1, 1], NONE, [3, 3], NONE],
    ),
    "0 times what may be infinite": (lambda x: 0 * (1 / jnp.where(x > 0, 0.0, 1.0)), OWN),
    "a logarithm of what may be 0": (lambda x: 0 * jnp.log(jnp.where(x > 0, 0.0, 1.0)), OWN),
    "a known choice": (
        lambda x: jnp.where(np.arange(5) < 2, x, x[::-1]),
        [[0, 0], [1, 1], [2, 2], [1, 1], [0, 0]],
    ),
    "a choice of equal numbers": (lambda x: jnp.where(x > 0, 2.0, 2.0), [NONE] * TIME),
    "sum": (lambda x: x[1:4].sum(), [[1, 3]]),
    "product": (lambda x: x[2:].prod(), [[2, 4]]),
    "maximum": (lambda x: jnp.where(np.arange(5) < 3, x, -jnp.inf).max(), [[0, 2]]),
    "minimum of two": (
        lambda x: jnp.minimum(x, np.array([-np.inf, np.inf, 0, 0, 0])),
        [NONE, *OWN[1:]],
    ),
    "maximum of two": (
        lambda x: jnp.maximum(x, np.array([np.inf, -np.inf, 0, 0, 0])),
        [NONE, *OWN[1:]],
    ),
    "maximum of a choice and another": (
        lambda x: jnp.maximum(jnp.where(x[::-1] > 0, -6.0, -5.0), x),
        [[min(t, 4 - t), max(t, 4 - t)] for t in EACH],
    ),
    "minimum of what data masks": (
        lambda x: 0 * jnp.exp(-jnp.where(x > 0, 0.0, -jnp.inf).min()),
        [[0, 4]],
    ),
    "any": (lambda x: ((x > 0) & (np.arange(5) < 2)).any(), [[0, 1]]),
    "all": (lambda x: ((x > 0) | (np.arange(5) >= 2)).all(), [[0, 1]]),
    "argmax": (lambda x: x[1:3].argmax(), [[1, 2]]),
    "a running sum": (jnp.cumsum, [[0, t] for t in EACH]),
    "a running sum from the end": (lambda x: lax.cumsum(x, reverse=True), [[t, 4] for t in EACH]),
    "sorted": (jnp.sort, [[0, 4]] * TIME),
    "flipped": (lambda x: x[::-1], [[4 - t, 4 - t] for t in EACH]),
    "padded": (lambda x: jnp.pad(x, (2, 0))[:5], [NONE, NONE, [0, 0], [1, 1], [2, 2]]),
    "taken": (lambda x: x[np.array([3, 3, 0])], [[3, 3], [3, 3], [0, 0]]),
    "taken where data says": (lambda x: x[1:3][(x[4:] > 0).astype(int)], [[1, 4]]),
    "a slice from where data says": (
        lambda x: lax.dynamic_slice(x[:3], (x[4].astype(int),), (1,)),
        [[0, 4]],
    ),
    "an update where data says": (
        lambda x: lax.dynamic_update_slice(x[:2], x[2:3], (x[3].astype(int),)),
        [[0, 3]] * 2,
    ),
    "set": (lambda x: x.at[np.array([1, 2])].set(x[3:]), [[0, 0], [3, 3], [4, 4], [3, 3], [4, 4]]),
    "added": (
        lambda x: x.at[np.array([1, 1])].add(x[3:]),
        [[0, 0], [1, 4], [2, 2], [3, 3], [4, 4]],
    ),
    "multiplied by matrices": (
        lambda x: np.array([[1.0, 0, 2, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 3, 1]]) @ x,
        [[0, 2], NONE, [3, 4]],
    ),
    "a logarithm of a moderate number that is above another": (
        lambda x: 0 * jnp.log(jnp.maximum(x, 0.5)),
        [NONE] * TIME,
    ),
    "the size of what is masked or not, as data decides": (
        lambda x: 0 * jnp.abs(jnp.where(x > 0, -jnp.inf, x)),
        OWN,
    ),
    "a maximum of numbers that are all far below": (
        lambda x: jnp.maximum(jnp.maximum(far_below(x), -3e7), x[0] - 1.5e7),
        [[0, 4]],
    ),
    "a logarithm of what may be 0 or 4,096": (
        lambda x: 0 * jnp.log(jnp.where(x > 0, 4096.0, 0.0)),
        OWN,
    ),
    "float16, masked by its least number": (
        lambda x: jnp.exp(jnp.where(np.arange(5) < 2, x.astype(jnp.float16), -65504)),
        [[0, 0], [1, 1], NONE, NONE, NONE],
    ),
    "matrices of what may be infinite": (
        lambda x: np.array([[1.0, 0, 0, 0, 0]]) @ jnp.log(jnp.where(x > 0, 0.0, 1.0)),
        [[0, 4]],
    ),
    "convolved to two features": (
        lambda x: lax.conv_general_dilated(
            x[None, :, None],
            jnp.ones((2, 1, 2)),
            (1,),
            [(1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
        )[0, :, 1],
        [[max(t - 1, 0), t] for t in EACH],
    ),
    "0 times what has no rule": (lambda x: 0 * jnp.linalg.cholesky(x[:1, None])[0], [[0, 0]]),
    "a maximum with a scaled masked number": (
        lambda x: jnp.maximum(x[0] * (x[0] - 1e9), far_below(x)),
        [[0, 4]],
    ),
    "a maximum with a difference of infinities": (
        lambda x: jnp.maximum(infinite_or_0(x[0]) - infinite_or_0(x[1]), far_below(x)),
        [[0, 4]],
    ),
    "0 times a sum of what may be -inf": (
        lambda x: 0 * jnp.where(x > 0, 0.0, -jnp.inf).sum(),
        [[0, 4]],
    ),
    "whether what is beyond the end is no number": (
        lambda x: jnp.where(jnp.isnan(jnp.take(x, np.array([7]), mode="fill")), x[4:], x[:1]),
        [[0, 4]],
    ),
    "an index that is one of two": (lambda x: x[:3][jnp.where(x[4] > 0, 1, 2)], [[0, 4]]),
    "a loop as data decides": (spread, [[0, 4]] * TIME),
    "a scan": (shifted_in_scan, [NONE, *[[t, t] for t in EACH[:-1]]]),
    "a branch as data decides": (
        lambda x: lax.cond(x[4] > 0, lambda x: x[:2], lambda x: x[1:3], x),
        [[0, 4], [1, 4]],
    ),
    "random numbers": (lambda x: jax.random.normal(jax.random.key(0), (5,)) + 0 * x, [NONE] * TIME),
    "a masked weight": (
        lambda x: jnp.exp(jnp.where(np.arange(5) < 2, x, -1e9)),
        [[0, 0], [1, 1], NONE, NONE, NONE],
    ),
    "a masked weight, made small": (
        lambda x: jnp.exp((x + np.where(np.arange(5) < 2, 0, -1e9)) * 1e-9),
        OWN,
    ),
    "a masked score, negated, which is infinite": (
        lambda x: jnp.exp(-(x + np.where(np.arange(5) < 2, 0, -1e9))),
        [[0, 0], [1, 1], NONE, NONE, NONE],
    ),
    "a large number that is known": (lambda x: x * 1e6 * 1e-6, OWN),
    "compared with a masked number": (
        lambda x: (x > np.array([-1e9, 1e9, 0, 0, 0])) * 1.0,
        [NONE, NONE, *[[t, t] for t in EACH[2:]]],
    ),
}


@pytest.mark.parametrize("name", HULLS)
def test_the_first_and_the_last_position_are_found(name: str) -> None:
    program, expected = HULLS[name]

    assert hull(program) == expected
