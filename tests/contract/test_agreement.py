"""`typed` drives jaxtyping and beartype itself: it says what jaxtyping's own decorator says."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import BeartypeConf, beartype
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, TypeCheckError, jaxtyped

from jgpt.shapes.contract import typed

SIZED: Any = Float[Array, "size"]
A = jnp.ones(3)
VALUES: dict[str, Any] = {
    "array": A,
    "other size": jnp.ones(4),
    "other rank": jnp.ones((3, 2)),
    "other dtype": jnp.ones(3, int),
    "numpy": np.ones(3, np.float32),
    "numpy ints": np.ones(3, np.int32),
    "key": jax.random.key(0),
    "param": nnx.Param(A),
    "none": None,
    "int": 2,
    "bool": True,
    "float": 1.5,
    "string": "a",
    "pair": (A, A),
    "pair of two sizes": (A, jnp.ones(4)),
    "one": (A,),
    "triple": (A, A, A),
    "ints": [1, 2],
    "tree": {"a": A, "b": {"c": jnp.ones((3, 2))}},
    "tree, swapped": {"a": jnp.ones((3, 2)), "b": {"c": A}},
    "tree, one leaf resized": {"a": A, "b": {"c": jnp.ones((3, 4))}},
    "tree, the last leaf of another dtype": {"a": A, "b": {"c": jnp.ones((3, 2), int)}},
    "tree with another name": {"a": A, "x": {"c": jnp.ones((3, 2))}},
    "tree with a leaf gone": {"a": A, "b": {"c": None}},
    "tree with an int": {"a": A, "b": 1},
    "tree with a NumPy leaf": {"a": A, "b": np.ones(3, np.float32)},
    "tree of bools": {"a": True, "b": {"c": False}},
    "tree of params": {"a": nnx.Param(A), "b": nnx.Param(A)},
    "empty": {},
}
HINTS: dict[str, Any] = {
    "array": SIZED,
    "any": Any,
    "optional": SIZED | None,
    "one or the other": SIZED | Int[Array, "size"],
    "array or number": SIZED | float,
    "pair": tuple[SIZED, SIZED],
    "pair in a pair": tuple[tuple[SIZED, Float[Array, "other"]], Any] | None,
    "pair with a tree": tuple[SIZED, PyTree[SIZED, "Tree"]],
    "tree": PyTree[Float[Array, "..."]],
    "tree of one size": PyTree[Float[Array, "size ..."]],
    "named tree": PyTree[Float[Array, "..."], "Tree"],
    "named tree of its leaves' shapes": PyTree[Float[Array, "?*shape"], "Tree"],
    "tree of one size a leaf": PyTree[Float[Array, "?size ..."], "Tree"],
    "two trees of one size a leaf": tuple[
        PyTree[Float[Array, "?size ..."], "Tree"], PyTree[Float[Array, "?size ..."], "Other"]
    ],
    "tree of a size a leaf, of two kinds": PyTree[
        Float[Array, "?size"] | Int[Array, "?size"], "Tree"
    ],
    "optional tree": PyTree[Float[Array, "?*shape"], "Tree"] | None,
    "tree of two kinds": PyTree[Float[Array, "..."] | Int[np.ndarray, "size"]],
    "tree of params": PyTree[Float[nnx.Param, "size"]],
    "tree of bools": PyTree[bool, "Tree"],
    "any tree": PyTree,
}
FIRSTS = {"array", "none", "pair", "tree"}
Judge = Callable[[Any, Any], list[bool]]


def judge(decorator: Callable[..., Any], hint: Any) -> Judge:
    """Whether it takes two values, and whether it gives the second for the first."""

    def take(first, second): ...

    def give(first, box):
        return box[0]

    take.__annotations__ = {"first": hint, "second": hint}
    give.__annotations__ = {"first": hint, "return": hint}
    take = decorator(take)
    give = decorator(give)

    def says(call: Callable[[], Any]) -> bool:
        try:
            call()
        except TypeCheckError:
            return False
        return True

    return lambda first, second: [
        says(lambda: take(first, second)),
        says(lambda: give(first, [second])),
    ]


REFERENCE = jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))


def accepted(says: Judge) -> set[str]:
    return {name for name, value in VALUES.items() if all(says(value, value))}


@pytest.mark.parametrize("name", HINTS)
def test_it_accepts_what_jaxtyping_accepts(name: str):
    """Of each value alone, and of each pair that begins with one of a few."""
    hint = HINTS[name]
    ours = judge(typed, hint)
    theirs = judge(REFERENCE, hint)
    good = accepted(theirs)
    assert accepted(ours) == good
    assert (len(good) == len(VALUES)) == (hint in (Any, PyTree))
    for first, second in itertools.product(good & FIRSTS, VALUES):
        verdict = ours(VALUES[first], VALUES[second])
        # jaxtyping takes its time to refuse: it needn't say again what it said of each alone
        if second in good or any(verdict):
            assert verdict == theirs(VALUES[first], VALUES[second]), (first, second)
