"""The kinds of docs/shapes.md that static types can't read: the right function alone is proven."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array, BFloat16, Float, Float32, Int

from jgpt.shapes.contract import typed
from jgpt.shapes.proofs import prove

Body = Callable[..., Any]


# Each function has the annotations of a kind, and a right or a wrong body.


def scores(body: Body) -> Body:
    @typed
    def scores(
        query: Float[Array, "batch query head_dim"], key: Float[Array, "batch key head_dim"]
    ) -> Float[Array, "batch query key"]:
        return body(query, key)

    return scores


def scores_of_rows(body: Body) -> Body:
    @typed
    def scores(
        query: Float[Array, "*rows query head_dim"], key: Float[Array, "*rows key head_dim"]
    ) -> Float[Array, "*rows query key"]:
        return body(query, key)

    return scores


def fields_of_a_class(body: Body) -> Body:
    @dataclasses.dataclass
    class FeedForward:
        up: Float[Array, "embed hidden"]
        down: Float[Array, "hidden embed"]

        @typed
        def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
            return body(self, x)

    return FeedForward(jnp.ones((6, 10)), jnp.ones((10, 6)))


def attribute_of_a_module(body: Body) -> Body:
    class FeedForward(nnx.Module):
        def __init__(self, embed_dim: int, hidden_dim: int, *, rngs: nnx.Rngs) -> None:
            self.embed_dim = embed_dim
            self.up = nnx.Linear(embed_dim, hidden_dim, rngs=rngs)
            self.down = nnx.Linear(hidden_dim, embed_dim, rngs=rngs)

        @typed
        def __call__(
            self, x: Float[Array, "batch time {self.embed_dim}"]
        ) -> Float[Array, "batch time {self.embed_dim}"]:
            return body(self, x)

    return FeedForward(6, 10, rngs=nnx.Rngs(0))


def halves(body: Body) -> Body:
    @typed
    def rotate(x: Float[Array, "time head_dim"]) -> Float[Array, "time head_dim"]:
        if x.shape[-1] % 2:
            raise ValueError("`head_dim` must be even")
        first, second = jnp.split(x, 2, axis=-1)
        return body(first, second)

    return rotate


def repeated_heads(body: Body) -> Body:
    @typed
    def repeat_heads(
        x: Float[Array, "batch kv_heads time"], query: Float[Array, "batch heads time"]
    ) -> Float[Array, "batch heads time"]:
        heads, kv_heads = query.shape[1], x.shape[1]
        if heads % kv_heads:
            raise ValueError("`heads` must be a multiple of `kv_heads`")
        return body(x, heads, kv_heads)

    return repeat_heads


@typed
def project(
    x: Float[Array, " features"], kernel: Float[Array, "features out"]
) -> Float[Array, " out"]:
    return x @ kernel


def mapped(body: Body) -> Body:
    @typed
    def project_all(
        x: Float[Array, "time features"], kernel: Float[Array, "features out"]
    ) -> Float[Array, "time out"]:
        return body(x, kernel)

    return project_all


def scaled(gradient_of_scale: Body) -> Body:
    @jax.custom_vjp
    @typed
    def scaled(
        x: Float[Array, "batch features"], scale: Float[Array, " features"]
    ) -> Float[Array, "batch features"]:
        return x * scale

    def forward(x, scale):
        return x * scale, (x, scale)

    @typed
    def backward(
        kept: tuple[Float[Array, "batch features"], Float[Array, " features"]],
        cotangent: Float[Array, "batch features"],
    ) -> tuple[Float[Array, "batch features"], Float[Array, " features"]]:
        x, scale = kept
        return cotangent * scale, gradient_of_scale(x * cotangent)

    scaled.defvjp(forward, backward)
    return scaled


def rule(body: Body) -> Body:
    function = scaled(body)
    # The rule of the backward pass is called for a gradient alone.
    return jax.grad(lambda x, scale: function(x, scale).sum(), argnums=(0, 1))


def caller_of_a_rule(body: Body) -> Body:
    function = scaled(lambda product: product.sum(axis=0))

    @typed
    def caller(
        x: Float[Array, "batch features"], scale: Float[Array, " features"]
    ) -> Float[Array, "batch features"]:
        return body(function(x, scale))

    return caller


def rows_of_a_table(body: Body) -> Body:
    @typed
    def look_up(
        table: Float[Array, "vocab embed"], tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time embed"]:
        return body(table, tokens)

    return look_up


def bfloat16(body: Body) -> Body:
    @typed
    def scale_features(
        x: BFloat16[Array, "batch features"], scale: Float32[Array, " features"]
    ) -> BFloat16[Array, "batch features"]:
        return body(x, scale)

    return scale_features


def longest(is_full: Body) -> Body:
    @typed
    def longest(
        x: Float[Array, "batch time"], full: Float[Array, "batch longest"]
    ) -> Float[Array, "batch longest"]:
        if is_full(x.shape[1], full.shape[1]):
            return x
        return full

    return longest


class Kind(NamedTuple):
    """The annotations of a kind, the arrays of a proof, a right body and a wrong one."""

    annotated: Callable[[Body], Body]
    arrays: tuple[str, ...]
    right: Body
    wrong: Body


KINDS = {
    "dimension names": Kind(
        scores,
        ("float32[b q d]", "float32[b k d]"),
        lambda query, key: jnp.einsum("bqd,bkd->bqk", query, key),
        lambda query, key: jnp.einsum("bqd,bkd->bkq", query, key),
    ),
    "array fields of a class": Kind(
        fields_of_a_class,
        ("float32[b 6]",),
        lambda self, x: jnp.tanh(x @ self.up) @ self.down,
        lambda self, x: jnp.tanh(x @ self.up),
    ),
    "`{self.embed_dim}`": Kind(
        attribute_of_a_module,
        ("float32[b t 6]",),
        lambda self, x: self.down(jnp.tanh(self.up(x))),
        lambda self, x: jnp.tanh(self.up(x)),
    ),
    "`2*(d//2) = d`": Kind(
        halves,
        ("float32[t d]",),
        lambda first, second: jnp.concatenate([-second, first], axis=-1),
        lambda first, second: jnp.concatenate([-second, first], axis=0),
    ),
    "`h//k*k = h`": Kind(
        repeated_heads,
        ("float32[b k t]", "float32[b g*k t]"),
        lambda x, heads, kv_heads: jnp.repeat(x, heads // kv_heads, axis=1),
        lambda x, heads, kv_heads: jnp.repeat(x, heads, axis=1),
    ),
    "einsum with `...`": Kind(
        scores_of_rows,
        ("float32[b h q d]", "float32[b h k d]"),
        lambda query, key: jnp.einsum("...qd,...kd->...qk", query, key),
        lambda query, key: jnp.einsum("...qd,...kd->...kq", query, key),
    ),
    "`vmap`": Kind(
        mapped,
        ("float32[t e]", "float32[e o]"),
        lambda x, kernel: jax.vmap(project, in_axes=(0, None))(x, kernel),
        lambda x, kernel: jax.vmap(project, in_axes=(0, None), out_axes=1)(x, kernel),
    ),
    "`custom_vjp`, its caller": Kind(
        caller_of_a_rule, ("float32[b f]", "float32[f]"), lambda y: y, lambda y: y.T
    ),
    "`custom_vjp`, its rule": Kind(
        rule,
        ("float32[b f]", "float32[f]"),
        lambda product: product.sum(axis=0),
        lambda product: product.sum(axis=1),
    ),
    "advanced indexing": Kind(
        rows_of_a_table,
        ("float32[v e]", "int32[b t]"),
        lambda table, tokens: table[tokens],
        lambda table, tokens: table[:, tokens],
    ),
    "dtypes": Kind(
        bfloat16,
        ("bfloat16[b f]", "float32[f]"),
        lambda x, scale: (x * scale).astype(x.dtype),
        lambda x, scale: x * scale,
    ),
    "narrowing": Kind(
        longest,
        ("float32[b t]", "float32[b l]"),
        lambda time, longest: time == longest,
        lambda time, longest: time >= longest,
    ),
}


def verdicts(function: Body, *arrays: str) -> list[tuple[str, str]]:
    """The last constraint of each case, and its verdict."""
    proof = prove(function, *arrays)
    return [("".join(case.where[-1:]), case.verdict) for case in proof.cases]


@pytest.mark.parametrize("name", KINDS)
def test_the_right_function_is_proven_and_the_wrong_one_is_violated(name: str):
    annotated, arrays, right, wrong = KINDS[name]

    assert prove(annotated(right), *arrays)

    assert not prove(annotated(wrong), *arrays)
    found = {verdict for _, verdict in verdicts(annotated(wrong), *arrays)}
    assert found - {"proven", "rejected"} == {"violated"}


def test_a_branch_on_sizes_is_proven_case_by_case():
    assert verdicts(halves(KINDS["`2*(d//2) = d`"].right), "float32[t d]") == [
        ("mod(d, 2) == 0", "proven"),
        ("mod(d, 2) >= 1", "rejected"),
    ]
    narrowing = KINDS["narrowing"]
    assert verdicts(longest(narrowing.right), "float32[b t]", "float32[b l]") == [
        ("t == l", "proven"),
        ("t >= l + 1", "proven"),
        ("t <= l - 1", "proven"),
    ]
    assert verdicts(longest(narrowing.wrong), "float32[b t]", "float32[b l]") == [
        ("t >= l", "violated"),
        ("t <= l - 1", "proven"),
    ]


def test_a_multiple_of_an_open_size_is_proven_only_if_it_is_written_as_a_product():
    repeat_heads = repeated_heads(KINDS["`h//k*k = h`"].right)

    assert prove(repeat_heads, "float32[b k t]", "float32[b g*k t]")
    assert prove(repeat_heads, "float32[b 2 t]", "float32[b h t]")
    # JAX keeps `k*floordiv(h, k)` as it is, even where `h` is a multiple of `k`.
    assert verdicts(repeat_heads, "float32[b k t]", "float32[b h t]") == [
        ("mod(h, k) == 0", "violated"),
        ("mod(h, k) >= 1", "rejected"),
    ]
