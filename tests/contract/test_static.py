"""The kinds of docs/shapes.md that static types can't read: the right function alone is proven."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array, BFloat16, Float, Float32, Int

from jgpt.shapes.contract import typed
from jgpt.shapes.proofs import prove

# Each makes the right function of a kind, or one with a mistake.


def scores(is_wrong: bool):
    @typed
    def scores(
        query: Float[Array, "batch query head_dim"], key: Float[Array, "batch key head_dim"]
    ) -> Float[Array, "batch query key"]:
        return jnp.einsum("bqd,bkd->bkq" if is_wrong else "bqd,bkd->bqk", query, key)

    return scores


def scores_of_rows(is_wrong: bool):
    @typed
    def scores(
        query: Float[Array, "*rows query head_dim"], key: Float[Array, "*rows key head_dim"]
    ) -> Float[Array, "*rows query key"]:
        return jnp.einsum("...qd,...kd->...kq" if is_wrong else "...qd,...kd->...qk", query, key)

    return scores


def fields_of_a_class(is_wrong: bool):
    @dataclasses.dataclass
    class FeedForward:
        up: Float[Array, "embed hidden"]
        down: Float[Array, "hidden embed"]

        @typed
        def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
            hidden = jnp.tanh(x @ self.up)
            return hidden if is_wrong else hidden @ self.down

    return FeedForward(jnp.ones((6, 10)), jnp.ones((10, 6)))


def attribute_of_a_module(is_wrong: bool):
    class FeedForward(nnx.Module):
        def __init__(self, embed_dim: int, hidden_dim: int, *, rngs: nnx.Rngs) -> None:
            self.embed_dim = embed_dim
            self.up = nnx.Linear(embed_dim, hidden_dim, rngs=rngs)
            self.down = nnx.Linear(hidden_dim, embed_dim, rngs=rngs)

        @typed
        def __call__(
            self, x: Float[Array, "batch time {self.embed_dim}"]
        ) -> Float[Array, "batch time {self.embed_dim}"]:
            hidden = jnp.tanh(self.up(x))
            return hidden if is_wrong else self.down(hidden)

    return FeedForward(6, 10, rngs=nnx.Rngs(0))


def halves(is_wrong: bool):
    @typed
    def rotate(x: Float[Array, "time head_dim"]) -> Float[Array, "time head_dim"]:
        if x.shape[-1] % 2:
            raise ValueError("`head_dim` must be even")
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=0 if is_wrong else -1)

    return rotate


def repeated_heads(is_wrong: bool):
    @typed
    def repeat_heads(
        x: Float[Array, "batch kv_heads time"], query: Float[Array, "batch heads time"]
    ) -> Float[Array, "batch heads time"]:
        heads, kv_heads = query.shape[1], x.shape[1]
        if heads % kv_heads:
            raise ValueError("`heads` must be a multiple of `kv_heads`")
        return jnp.repeat(x, heads if is_wrong else heads // kv_heads, axis=1)

    return repeat_heads


@typed
def project(
    x: Float[Array, " features"], kernel: Float[Array, "features out"]
) -> Float[Array, " out"]:
    return x @ kernel


def mapped(is_wrong: bool):
    @typed
    def project_all(
        x: Float[Array, "time features"], kernel: Float[Array, "features out"]
    ) -> Float[Array, "time out"]:
        return jax.vmap(project, in_axes=(0, None), out_axes=int(is_wrong))(x, kernel)

    return project_all


def scaled(is_wrong: bool):
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
        return cotangent * scale, (x * cotangent).sum(axis=1 if is_wrong else 0)

    scaled.defvjp(forward, backward)
    return scaled


def rule(is_wrong: bool):
    function = scaled(is_wrong)
    # The rule of the backward pass is called for a gradient alone.
    return jax.grad(lambda x, scale: function(x, scale).sum(), argnums=(0, 1))


def caller_of_a_rule(is_wrong: bool):
    function = scaled(False)

    @typed
    def caller(
        x: Float[Array, "batch features"], scale: Float[Array, " features"]
    ) -> Float[Array, "batch features"]:
        found = function(x, scale)
        return found.T if is_wrong else found

    return caller


def rows_of_a_table(is_wrong: bool):
    @typed
    def look_up(
        table: Float[Array, "vocab embed"], tokens: Int[Array, "batch time"]
    ) -> Float[Array, "batch time embed"]:
        return table[:, tokens] if is_wrong else table[tokens]

    return look_up


def bfloat16(is_wrong: bool):
    @typed
    def scale_features(
        x: BFloat16[Array, "batch features"], scale: Float32[Array, " features"]
    ) -> BFloat16[Array, "batch features"]:
        wide = x * scale
        return wide if is_wrong else wide.astype(x.dtype)

    return scale_features


def longest(is_wrong: bool):
    @typed
    def longest(
        x: Float[Array, "batch time"], full: Float[Array, "batch longest"]
    ) -> Float[Array, "batch longest"]:
        time, longest = x.shape[1], full.shape[1]
        if time >= longest if is_wrong else time == longest:
            return x
        return full

    return longest


KINDS: dict[str, tuple[Callable[[bool], Any], *tuple[str, ...]]] = {
    "dimension names": (scores, "float32[b q d]", "float32[b k d]"),
    "array fields of a class": (fields_of_a_class, "float32[b 6]"),
    "`{self.embed_dim}`": (attribute_of_a_module, "float32[b t 6]"),
    "`2*(d//2) = d`": (halves, "float32[t d]"),
    "`h//k*k = h`": (repeated_heads, "float32[b k t]", "float32[b g*k t]"),
    "einsum with `...`": (scores_of_rows, "float32[b h q d]", "float32[b h k d]"),
    "`vmap`": (mapped, "float32[t e]", "float32[e o]"),
    "`custom_vjp`, its caller": (caller_of_a_rule, "float32[b f]", "float32[f]"),
    "`custom_vjp`, its rule": (rule, "float32[b f]", "float32[f]"),
    "advanced indexing": (rows_of_a_table, "float32[v e]", "int32[b t]"),
    "dtypes": (bfloat16, "bfloat16[b f]", "float32[f]"),
    "narrowing": (longest, "float32[b t]", "float32[b l]"),
}


def verdicts(function: Any, *arrays: str) -> list[tuple[str, str]]:
    """The last constraint of each case, and its verdict."""
    proof = prove(function, *arrays)
    return [("".join(case.where[-1:]), case.verdict) for case in proof.cases]


@pytest.mark.parametrize("name", KINDS)
def test_the_right_function_is_proven_and_the_wrong_one_is_violated(name: str):
    make, *arrays = KINDS[name]

    assert prove(make(False), *arrays)

    assert not prove(make(True), *arrays)
    found = {verdict for _, verdict in verdicts(make(True), *arrays)}
    assert found - {"proven", "rejected"} == {"violated"}


def test_a_branch_on_sizes_is_proven_case_by_case():
    assert verdicts(halves(False), "float32[t d]") == [
        ("mod(d, 2) == 0", "proven"),
        ("mod(d, 2) >= 1", "rejected"),
    ]
    assert verdicts(longest(False), "float32[b t]", "float32[b l]") == [
        ("t == l", "proven"),
        ("t >= l + 1", "proven"),
        ("t <= l - 1", "proven"),
    ]
    assert verdicts(longest(True), "float32[b t]", "float32[b l]") == [
        ("t >= l", "violated"),
        ("t <= l - 1", "proven"),
    ]


def test_a_multiple_of_an_open_size_is_proven_only_if_it_is_written_as_a_product():
    repeat_heads = repeated_heads(False)

    assert prove(repeat_heads, "float32[b k t]", "float32[b g*k t]")
    assert prove(repeat_heads, "float32[b 2 t]", "float32[b h t]")
    # JAX keeps `k*floordiv(h, k)` as it is, even where `h` is a multiple of `k`.
    assert verdicts(repeat_heads, "float32[b k t]", "float32[b h t]") == [
        ("mod(h, k) == 0", "violated"),
        ("mod(h, k) >= 1", "rejected"),
    ]
