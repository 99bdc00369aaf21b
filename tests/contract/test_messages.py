"""What a user reads when something has the wrong shape, to the letter."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, PyTree, TypeCheckError

import jgpt
from jgpt.contracts import typed

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


class Foreign:
    shape, dtype = (2, 3, 10), "float32"


class Misspelt:
    @typed
    def __call__(self, x: Float[Array, "batch {self.widht}"]) -> Float[Array, " batch"]:
        return x[:, 0]


SUBJECTS = {
    "head": (
        "jgpt.nn.heads.Head.__call__() got a wrong argument `x`",
        'Float[Array, "batch time {self.embed_dim}"] with {self.embed_dim}=10',
    ),
    "tokens": (
        "jgpt.nn.bigram.BigramLM.__call__() got a wrong argument `tokens`",
        'Int[Array, "batch time"]',
    ),
    "key": (
        "jgpt.generation.decoding.generate() got a wrong argument `key`",
        'Key[Array, ""] | Rngs',
    ),
    "decode": (
        "jgpt.data.tokenizers.ByteTokenizer.decode() got a wrong argument `tokens`",
        'Integer[ndarray, "tokens"] | Integer[Any, "tokens"] | Sequence[int]',
    ),
    "mask": (
        "jgpt.nn.attention.attend() got a wrong argument `mask`",
        'Bool[Array, "query key"] | None with query=3, key=3',
    ),
    "context": (
        "jgpt.nn.heads.Head.__call__() got a wrong argument `context`",
        'Float[Array, "batch key {self.embed_dim}"] | None with batch=2, {self.embed_dim}=10',
    ),
    "head_dim": ("jgpt.nn.heads.Head.__init__() got a wrong argument `head_dim`", "int"),
    "weights": ("HERE.averaged() got a wrong argument `weights`", 'PyTree[Float[Array, "..."]]'),
    "tree": (
        "HERE.alike() got a wrong argument `second`",
        'PyTree[Float[Array, "?*shape"], "Tree"]',
    ),
    "written": ("HERE.in_pairs() got a wrong argument `x`", 'Float[Array, "batch 2"]'),
    "pair": (
        "HERE.in_pairs() returned a wrong result",
        'tuple[Float[Array, "batch"], Float[Array, "batch"]] with batch=4',
    ),
    "halves": (
        "HERE.halves() returned a wrong result",
        'tuple[Float[Array, "batch"], Float[Array, "time"]] with batch=2, time=3',
    ),
    "parts": (
        "HERE.concatenated() got a wrong argument `parts`",
        'tuple[Float[Array, "batch time"], ...]',
    ),
    "misspelt": (
        "HERE.Misspelt.__call__() got a wrong argument `x`",
        'Float[Array, "batch {self.widht}"]',
    ),
}
"""What was called, and what was expected."""


def head(x):
    return lambda: HEAD(x)


def with_key(key):
    return lambda: jgpt.generate(MODEL, jnp.ones((2, 3), int), 4, key=key)


def decode(tokens):
    return lambda: jgpt.ByteTokenizer().decode(tokens)


ALIKE = "which does not equal the existing value of"
GOLDEN = [
    (
        "head",
        head(jnp.ones((2, 3, 12))),
        "float32[2,3,12]",
        "the dimension size 12 does not equal the existing value of {self.embed_dim}=10",
    ),
    (
        "head",
        head(jnp.ones((3, 10))),
        "float32[3,10]",
        "this array has 2 dimensions, not the 3 expected by the type hint",
    ),
    ("head", head(X.astype(int)), "int32[2,3,10]", "this array has dtype int32, which is no Float"),
    (
        "head",
        head(np.ones((2, 3, 10))),
        "float64[2,3,10]",
        "ndarray is not a JAX array: jnp.asarray makes one",
    ),
    (
        "head",
        head(Foreign()),
        "float32[2,3,10]",
        "Foreign is not a JAX array: jnp.asarray makes one",
    ),
    ("head", head("x"), "'x'", "str is not a JAX array"),
    (
        "tokens",
        lambda: MODEL([[1, 2, 3]]),  # type: ignore[arg-type]
        "[[1, 2, 3]]",
        "list is not a JAX array: jnp.asarray makes one",
    ),
    (
        "key",
        with_key(jax.random.PRNGKey(0)),
        "uint32[2]",
        "this array has dtype uint32, which is no Key: jax.random.key makes one",
    ),
    ("key", with_key(0), "0", "int is not a JAX array: jax.random.key makes one"),
    ("decode", decode(3), "3", "int is not a NumPy array: np.asarray makes one"),
    (
        "mask",
        lambda: jgpt.attend(X, X, X, jgpt.causal_mask(4)),
        "bool[4,4]",
        f"the size of dimension query is 4 {ALIKE} 3",
    ),
    (
        "context",
        lambda: HEAD(X, jnp.ones((5, 3, 10))),
        "float32[5,3,10]",
        f"the size of dimension batch is 5 {ALIKE} 2",
    ),
    (
        "head_dim",
        lambda: jgpt.Head(10, 4.5, rngs=nnx.Rngs(0)),  # type: ignore[arg-type]
        "4.5",
        "float 4.5 not instance of int",
    ),
    (
        "head_dim",
        lambda: jgpt.Head(10, X, rngs=nnx.Rngs(0)),  # type: ignore[arg-type]
        "float32[2,3,10]",
        "an array is no int",
    ),
    (
        "weights",
        lambda: averaged({"bias": jnp.ones(3), "head": {"kernel": jnp.ones((2, 3), int)}}),
        "{'bias': float32[3], 'head': {'kernel': int32[2,3]}}",
        "its leaf head.kernel is int32[2,3]: this array has dtype int32, which is no Float",
    ),
    (
        "tree",
        lambda: alike({"a": jnp.ones(3)}, {"a": jnp.ones(4)}),
        "{'a': float32[4]}",
        "its leaf a is float32[4]: the shape of its variadic dimensions '*shape' is (4,), "
        f"{ALIKE} (3,)",
    ),
    (
        "tree",
        lambda: alike({"a": jnp.ones(3)}, {"b": jnp.ones(3)}),
        "{'b': float32[3]}",
        "its structure is not that of the tree it must match",
    ),
    (
        "written",
        lambda: in_pairs(jnp.ones((4, 3))),
        "float32[4,3]",
        "the dimension size 3 does not equal 2 as expected by the type hint",
    ),
    ("pair", lambda: in_pairs(jnp.ones((4, 2))), "(float32[4],)", "it is not a tuple of 2"),
    (
        "halves",
        lambda: halves(jnp.ones((2, 3))),
        "(float32[2], float32[2])",
        f"item 1 is float32[2]: the size of dimension time is 2 {ALIKE} 3",
    ),
    # beartype's own check, of any number
    (
        "parts",
        lambda: concatenated((jnp.ones(3),)),
        "(float32[3],)",
        "tuple index 0 item this array has 1 dimensions, not the 2 expected by the type hint",
    ),
    (
        "misspelt",
        lambda: Misspelt()(jnp.ones((2, 3))),
        "float32[2,3]",
        "AttributeError: 'Misspelt' object has no attribute 'widht'",
    ),
]


@pytest.mark.parametrize(("subject", "call", "got", "reason"), GOLDEN)
def test_the_message_says_what_where_and_why(subject, call, got, reason):
    what, expected = SUBJECTS[subject]
    with pytest.raises(TypeCheckError) as caught:
        call()
    message = f"{what}.\nExpected: {expected}\nGot: {got}\nReason: {reason}."
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
