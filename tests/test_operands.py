"""A call that fails says which operands don't fit, in one sentence."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array, Float

import jgpt
from jgpt.shapes.source import annotated_source


def matmul(x, kernel):
    return x @ kernel


def matmul_of_batches(x, y):
    return jnp.matmul(x, y)


def dot(x, kernel):
    return jnp.dot(x, kernel)


def einsum(x, kernel):
    return jnp.einsum("btd,de->bte", x, kernel)


def einsum_of_another_rank(x):
    return jnp.einsum("btd->bt", x)


def add(x, bias):
    return x + bias


def add_in_place(x, bias):
    x += bias
    return x


def of_an_expression(x, bias):
    return x + jnp.square(bias)


def concatenate(x, y):
    return jnp.concatenate([x, y], axis=-1)


def stack(x, y):
    return jnp.stack([x, y])


def reshape(x):
    return x.reshape(*x.shape[:2], 5, 7)


def reshape_to_the_rest(x):
    return jnp.reshape(x, (-1, 5))


def where(x, y):
    return jnp.where(x > 0, x, y)


def index(x):
    return x[:, 0, 0]


def index_of_floats(table, index):
    return table[index]


def scan(x):
    def body(carry, row):
        return jnp.concatenate([carry, row]), row

    return jax.lax.scan(body, x[0], x)


def cond(x, y):
    return jax.lax.cond(True, lambda: x, lambda: y)


def vmap(x, y):
    return jax.vmap(lambda a, b: a + b)(x, y)


def inside_vmap(x, bias):
    return jax.vmap(lambda row: row + bias)(x)


def inside_jit(x, kernel):
    return jax.jit(matmul)(x, kernel)


def axis(x):
    return jax.nn.softmax(x, axis=3)


def update(x, y):
    return x.at[:, 0].set(y)


def linear(x):
    layer = nnx.Linear(96, 384, rngs=nnx.Rngs(0))
    return layer(x)


@pytest.mark.parametrize(
    ("function", "arrays", "reason"),
    [
        (matmul, ("[b t 128]", "[96 384]"), "x is [b t 128], kernel is [96 384]: 128 and 96"),
        (matmul_of_batches, ("[b 3 4]", "[5 4 2]"), "x is [b 3 4], y is [5 4 2]: b and 5"),
        (dot, ("[t 128]", "[96]"), "x is [t 128], kernel is [96]: 128 and 96"),
        (
            einsum,
            ("[b t 128]", "[96 384]"),
            "x is [b t 128], kernel is [96 384]: d in 'btd,de->bte' is 128 and 96",
        ),
        (
            einsum_of_another_rank,
            ("[b t]",),
            "x is [b t]: 'btd' in 'btd->bt' has 3 dimensions, and not 2",
        ),
        (add, ("[b t 5]", "[t 7]"), "x is [b t 5], bias is [t 7]: 5 and 7 don't match"),
        (add_in_place, ("[b t 5]", "[7]"), "x is [b t 5], bias is [7]: 5 and 7 don't match"),
        (of_an_expression, ("[b 5]", "[7]"), "x is [b 5], `jnp.square(bias)` is [7]: 5 and 7"),
        (
            concatenate,
            ("[b t 5]", "[b 3 7]"),
            "x is [b t 5], y is [b 3 7]: they are joined along axis 2, and t and 3 don't match",
        ),
        (stack, ("[b 5]", "[b 7]"), "x is [b 5], y is [b 7]: arrays that are stacked need"),
        (
            reshape,
            ("[b t 128]",),
            "x is [b t 128]: it can't be reshaped to [b t 5 7], since 128 and 5*7 don't match",
        ),
        (
            reshape_to_the_rest,
            ("[t 3]",),
            "x is [t 3]: it can't be reshaped to [-1 5], since t*3 is not a multiple of 5",
        ),
        (where, ("[b 5]", "[b 7]"), "`x > 0` is [b 5], x is [b 5], y is [b 7]: 5 and 7"),
        (index, ("[b t]",), "x is [b t]: it has 2 dimensions, and 3 are indexed"),
        (index_of_floats, ("[9 5]", "[t]"), "index is [t] of float32: an index is an integer"),
        (scan, ("[t 3]",), "the carry carry is float32[3] before a step and float32[6] after it"),
        (cond, ("[b]", "[b 2]"), "one branch returns float32[b], the other float32[b 2]"),
        (vmap, ("[b 5]", "[3 5]"), "x is [b 5], y is [3 5]: vmap goes over b and 3 examples"),
        (inside_vmap, ("[b 5]", "[7]"), "row is [5], bias is [7]: 5 and 7 don't match"),
        (inside_jit, ("[b 5]", "[7 2]"), "x is [b 5], kernel is [7 2]: 5 and 7 don't match"),
        (axis, ("[b t]",), "x is [b t]: it has 2 dimensions and no axis 3"),
        (update, ("[b 5]", "[7]"), "y is [7]: it can't be broadcast to [b], since 7 and b don't"),
        (linear, ("[b t 128]",), "inputs is [b t 128], kernel is [96 384]: 128 and 96 don't match"),
    ],
)
def test_the_sentence_names_the_operands(function, arrays, reason):
    source = annotated_source(function, *(f"float32{array}" for array in arrays))

    assert source.reason is not None
    assert source.reason.startswith(reason)
    assert source.reason in str(source).splitlines()
    assert source.failing().functions[-1].lines[-1].has_failed


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: len(x.shape) // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (lambda x: 1 if x.sum() > 0 else 2, "TracerBoolConversionError: Attempted boolean"),
        (lambda x: float(x.sum()), "ConcretizationTypeError: Abstract tracer value"),
        (lambda x: x.missing, "AttributeError: "),
    ],
)
def test_other_errors_have_their_own_first_line_alone(function, error):
    def caller(x):
        y = x + 1
        return function(y)

    source = annotated_source(caller, "float32[b 3]")
    assert source.error is not None
    assert source.error.startswith(error)
    assert "\n" not in source.error
    assert source.reason is None


def test_sizes_in_an_error_have_their_names():
    source = annotated_source(add, "float32[b t]", "float32[b]")
    assert source.reason == "x is [b t], bias is [b]: t and b don't match"
    assert source.error is not None
    assert "101" not in source.error


@jgpt.typed
def first_four(x: Float[Array, "batch time"]) -> Float[Array, "batch 4"]:
    y = x[:, :4]
    return y


def test_a_number_in_an_annotation_is_no_name():
    lines = str(annotated_source(first_four, "float32[b t]"))
    assert "| return: float32[batch=b 4]" in " ".join(lines.split())


def test_a_rejected_argument_and_a_rejected_result_of_a_typed_function():
    def caller(x: Any) -> Any:
        return first_four(x)

    source = annotated_source(caller, "float32[b]")
    assert source.reason == (
        'first_four() got a wrong argument `x`: float32[b], and not Float[Array, "batch time"]'
    )
    assert source.failing().functions[0].lines[-1].text.strip() == "return first_four(x)"

    source = annotated_source(caller, "float32[b 3]")
    assert source.reason is not None
    assert source.reason.startswith("first_four() returned a wrong result: float32[b,3], and not ")
    (failing,) = source.failing().functions
    assert (failing.name, failing.lines[-1].text.strip()) == ("first_four", "return y")
    assert source.functions[-1] == failing
