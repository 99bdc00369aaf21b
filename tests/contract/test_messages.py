"""What a user reads when something has the wrong shape."""

import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, PyTree, TypeCheckError

import jgpt
from jgpt.shapes.contract import typed

TREE = PyTree[Float[Array, "?*shape"], "Tree"]
HEAD: Any = jgpt.Head(10, 4, rngs=nnx.Rngs(0))
X = jnp.ones((2, 3, 10))
MODEL = jgpt.BigramLM(5, rngs=nnx.Rngs(0))


@typed
def averaged(weights: PyTree[Float[Array, "..."]]) -> PyTree[Float[Array, "..."]]:
    return jax.tree.map(lambda leaf: leaf.shape, weights)


@typed
def alike(first: TREE, second: TREE) -> None: ...


class Misspelt:
    @typed
    def __call__(self, x: Float[Array, "batch {self.widht}"]) -> Float[Array, " batch"]:
        return x[:, 0]


NOT_CHECKED_BY_PYRIGHT: Any = [[1, 2, 3]]


def with_key(key: Any) -> Any:
    return jgpt.generate(MODEL, jnp.ones((2, 3), int), 4, key=key)


def test_a_message_says_what_was_expected_what_came_and_why():
    with pytest.raises(TypeCheckError) as caught:
        HEAD(jnp.ones((2, 3, 12)))
    assert str(caught.value) == (
        "jgpt.nn.heads.Head.__call__() got a wrong argument `x`.\n"
        'Expected: Float[Array, "batch time {self.embed_dim}"] with {self.embed_dim}=10\n'
        "Got: float32[2,3,12]\n"
        "Reason: the dimension size 12 does not equal the existing value of {self.embed_dim}=10."
    )
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("Traceback") == 1
    assert len(printed.splitlines()) < 12


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: HEAD(jnp.ones((3, 10))), "this array has 2 dimensions, not the 3"),
        (lambda: HEAD(X.astype(int)), "this array has dtype int32, which is no Float."),
        (lambda: HEAD(np.ones((2, 3, 10))), "ndarray is not a JAX array: jnp.asarray makes one."),
        (lambda: MODEL(NOT_CHECKED_BY_PYRIGHT), "list is not a JAX array: jnp.asarray makes one."),
        (lambda: with_key(jnp.ones(2, int)), "which is no Key: jax.random.key makes one."),
        (
            lambda: jgpt.ByteTokenizer().decode(3),  # type: ignore[arg-type]
            "int is not a NumPy array: np.asarray makes one.",
        ),
        (lambda: jgpt.attend(X, X, X, jgpt.causal_mask(4)), "| None with query=3, key=3\nGot: "),
        (lambda: jgpt.Head(10, 4.5, rngs=nnx.Rngs(0)), "float 4.5 not instance of int."),  # type: ignore[arg-type]
        (
            lambda: averaged({"bias": jnp.ones(3), "head": {"kernel": jnp.ones((2, 3), int)}}),
            "its leaf head.kernel is int32[2,3]: this array has dtype int32, which is no Float.",
        ),
        (
            lambda: alike({"a": jnp.ones(3)}, {"a": jnp.ones(4)}),
            "its leaf a is float32[4]: the shape of its variadic dimensions '*shape' is (4,)",
        ),
        (
            lambda: alike({"a": jnp.ones(3)}, {"b": jnp.ones(3)}),
            "its structure is not that of the tree it must match.",
        ),
        (lambda: Misspelt()(jnp.ones((2, 3))), "'Misspelt' object has no attribute 'widht'."),
    ],
)
def test_the_reason_is_that_of_the_mistake(call, words):
    with pytest.raises(TypeCheckError, match=re.escape(words)):
        call()


def test_a_missing_argument_names_the_function():
    with pytest.raises(TypeError, match=r"^Head.__init__\(\) missing a required argument: 'rngs'$"):
        jgpt.Head(10, 4)  # type: ignore[call-arg]


def test_an_argument_that_is_given_by_name_alone_is_named():
    with pytest.raises(
        TypeError, match=r"^load\(\) too many .* give which, model, .*in which=...$"
    ):
        jgpt.load("run", "last")  # type: ignore[misc]
