"""What a user reads when something has the wrong shape, to the letter."""

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
HEAD = jgpt.Head(10, 4, rngs=nnx.Rngs(0))
X = jnp.ones((2, 3, 10))
MODEL = jgpt.BigramLM(5, rngs=nnx.Rngs(0))


@typed
def averaged(weights: PyTree[Float[Array, "..."]]) -> PyTree[Float[Array, "..."]]:
    return jax.tree.map(lambda leaf: leaf.shape, weights)


@typed
def halves(x: Float[Array, "batch time"]) -> tuple[Float[Array, " batch"], Float[Array, " time"]]:
    return x[:, 0], x[:, 0]


@typed
def alike(first: TREE, second: TREE) -> None: ...


@typed
def in_pairs(x: Float[Array, "batch 2"]) -> tuple[Float[Array, "batch"], Float[Array, "batch"]]:
    return (x[:, 0],)  # type: ignore[return-value]


@typed
def concatenated(parts: tuple[Float[Array, "batch time"], ...]) -> Float[Array, "batch time"]:
    return jnp.concatenate(parts)


class Misspelt:
    @typed
    def __call__(self, x: Float[Array, "batch {self.widht}"]) -> Float[Array, " batch"]:
        return x[:, 0]


HEAD_EXPECTS = """\
jgpt.nn.heads.Head.__call__() got a wrong argument `x`.
Expected: Float[Array, "batch time {self.embed_dim}"] with {self.embed_dim}=10
"""
KEY_EXPECTS = """\
jgpt.generation.decoding.generate() got a wrong argument `key`.
Expected: Key[Array, ""] | UInt32[Array, "words"]
"""
HEAD_DIM_EXPECTS = """\
jgpt.nn.heads.Head.__init__() got a wrong argument `head_dim`.
Expected: int
"""
TREE_EXPECTS = """\
HERE.alike() got a wrong argument `second`.
Expected: PyTree[Float[Array, "?*shape"], "Tree"]
"""


def head(x):
    return lambda: HEAD(x)


def sized_head(head_dim):
    return lambda: jgpt.Head(10, head_dim, rngs=nnx.Rngs(0))


def with_key(key):
    return lambda: jgpt.generate(MODEL, jnp.ones((2, 3), int), 4, key=key)


NOT_CHECKED_BY_PYRIGHT: Any = [[1, 2, 3]]
GOLDEN = [
    (
        head(jnp.ones((2, 3, 12))),
        f"""{HEAD_EXPECTS}Got: float32[2,3,12]
Reason: the dimension size 12 does not equal the existing value of {{self.embed_dim}}=10.""",
    ),
    (
        head(jnp.ones((3, 10))),
        f"""{HEAD_EXPECTS}Got: float32[3,10]
Reason: this array has 2 dimensions, not the 3 expected by the type hint.""",
    ),
    (
        head(X.astype(int)),
        f"""{HEAD_EXPECTS}Got: int32[2,3,10]
Reason: this array has dtype int32, which is no Float.""",
    ),
    (
        head(np.ones((2, 3, 10))),
        f"""{HEAD_EXPECTS}Got: float64[2,3,10]
Reason: ndarray is not a JAX array: jnp.asarray makes one.""",
    ),
    (
        head("x"),
        f"""{HEAD_EXPECTS}Got: 'x'
Reason: str is not a JAX array.""",
    ),
    (
        lambda: MODEL(NOT_CHECKED_BY_PYRIGHT),
        """\
jgpt.nn.bigram.BigramLM.__call__() got a wrong argument `tokens`.
Expected: Int[Array, "batch time"]
Got: [[1, 2, 3]]
Reason: list is not a JAX array: jnp.asarray makes one.""",
    ),
    (
        with_key(jnp.ones(2, int)),
        f"""{KEY_EXPECTS}Got: int32[2]
Reason: this array has dtype int32, which is no Key: jax.random.key makes one.""",
    ),
    (
        with_key(0),
        f"""{KEY_EXPECTS}Got: 0
Reason: int is not a JAX array: jax.random.key makes one.""",
    ),
    (
        lambda: jgpt.ByteTokenizer().decode(3),  # type: ignore[arg-type]
        """\
jgpt.data.characters.ByteTokenizer.decode() got a wrong argument `tokens`.
Expected: Integer[ndarray, "tokens"] | Integer[Any, "tokens"] | Sequence[int]
Got: 3
Reason: int is not a NumPy array: np.asarray makes one.""",
    ),
    (
        lambda: jgpt.attend(X, X, X, jgpt.causal_mask(4)),
        """\
jgpt.nn.attention.attend() got a wrong argument `mask`.
Expected: Bool[Array, "*leading query key"] | None with query=3, key=3
Got: bool[4,4]
Reason: the size of dimension query is 4 which does not equal the existing value of 3.""",
    ),
    (
        sized_head(4.5),
        f"""{HEAD_DIM_EXPECTS}Got: 4.5
Reason: float 4.5 not instance of int.""",
    ),
    (
        sized_head(X),
        f"""{HEAD_DIM_EXPECTS}Got: float32[2,3,10]
Reason: an array is no int.""",
    ),
    (
        lambda: averaged({"bias": jnp.ones(3), "head": {"kernel": jnp.ones((2, 3), int)}}),
        """\
HERE.averaged() got a wrong argument `weights`.
Expected: PyTree[Float[Array, "..."]]
Got: {'bias': float32[3], 'head': {'kernel': int32[2,3]}}
Reason: its leaf head.kernel is int32[2,3]: this array has dtype int32, which is no Float.""",
    ),
    (
        lambda: alike({"a": jnp.ones(3)}, {"a": jnp.ones(4)}),
        f"""{TREE_EXPECTS}Got: {{'a': float32[4]}}
Reason: its leaf a is float32[4]: the shape of its variadic dimensions '*shape' is (4,), which \
does not equal the existing value of (3,).""",
    ),
    (
        lambda: alike({"a": jnp.ones(3)}, {"b": jnp.ones(3)}),
        f"""{TREE_EXPECTS}Got: {{'b': float32[3]}}
Reason: its structure is not that of the tree it must match.""",
    ),
    (
        lambda: in_pairs(jnp.ones((4, 2))),
        """\
HERE.in_pairs() returned a wrong result.
Expected: tuple[Float[Array, "batch"], Float[Array, "batch"]] with batch=4
Got: (float32[4],)
Reason: it is not a tuple of 2.""",
    ),
    (
        lambda: halves(jnp.ones((2, 3))),
        """\
HERE.halves() returned a wrong result.
Expected: tuple[Float[Array, "batch"], Float[Array, "time"]] with batch=2, time=3
Got: (float32[2], float32[2])
Reason: item 1 is float32[2]: the size of dimension time is 2 which does not equal the existing \
value of 3.""",
    ),
    (  # any number of items
        lambda: concatenated((jnp.ones(3),)),
        """\
HERE.concatenated() got a wrong argument `parts`.
Expected: tuple[Float[Array, "batch time"], ...]
Got: (float32[3],)
Reason: item 0 is float32[3]: this array has 1 dimensions, not the 2 expected by the type hint.""",
    ),
    (
        lambda: Misspelt()(jnp.ones((2, 3))),
        """\
HERE.Misspelt.__call__() got a wrong argument `x`.
Expected: Float[Array, "batch {self.widht}"]
Got: float32[2,3]
Reason: AttributeError: 'Misspelt' object has no attribute 'widht'.""",
    ),
]


@pytest.mark.parametrize(("call", "message"), GOLDEN)
def test_the_message_says_what_where_and_why(call, message):
    with pytest.raises(TypeCheckError) as caught:
        call()
    assert str(caught.value) == message.replace("HERE", __name__)


def test_there_is_one_traceback_and_the_reason_is_its_last_line():
    with pytest.raises(TypeCheckError) as caught:
        HEAD(jnp.ones((2, 3, 12)))
    printed = "".join(traceback.format_exception(caught.value)).rstrip()
    assert printed.count("Traceback") == 1
    assert len(printed.splitlines()) < 12
    assert printed.endswith("does not equal the existing value of {self.embed_dim}=10.")


def test_a_wrong_call_inside_a_call_is_reported_once_and_where_it_is():
    @typed
    def outer(x: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
        return jgpt.attend(x, x, x[:-1])

    with pytest.raises(TypeCheckError) as caught:
        outer(jnp.ones((4, 3)))
    assert str(caught.value).startswith("jgpt.nn.attention.attend() got a wrong argument `value`.")


def test_a_missing_argument_names_the_function():
    with pytest.raises(TypeError, match=r"^Head.__init__\(\) missing a required argument: 'rngs'$"):
        jgpt.Head(10, 4)  # type: ignore[call-arg]


def test_an_argument_that_is_given_by_name_alone_is_named():
    with pytest.raises(
        TypeError, match=r"^load\(\) too many .* give which, model, .*in which=...$"
    ):
        jgpt.load("run", "last")  # type: ignore[misc]
