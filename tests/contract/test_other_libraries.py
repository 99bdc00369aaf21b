"""The shape contract beside models of Equinox and Flax Linen: errors, trees, watching, proofs."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jaxtyping import Array, Float, TypeCheckError

from jgpt.shapes.calls import TypedCall, watching
from jgpt.shapes.contract import typed
from jgpt.shapes.edits import capture, edit
from jgpt.shapes.proofs import prove
from jgpt.shapes.trace import shape_trace


@typed
def gated(both: Float[Array, "time twice"]) -> Float[Array, "time features"]:
    value, gate = jnp.split(both, 2, axis=-1)
    return value * jax.nn.sigmoid(gate)


class EquinoxGate(eqx.Module):
    expansion: eqx.nn.Linear
    embed_dim: int = eqx.field(static=True)

    @typed
    def __call__(
        self, x: Float[Array, "time {self.embed_dim}"]
    ) -> Float[Array, "time {self.embed_dim}"]:
        return gated(jax.vmap(self.expansion)(x))


class LinenGate(linen.Module):
    embed_dim: int

    @linen.compact
    @typed
    def __call__(
        self, x: Float[Array, "time {self.embed_dim}"]
    ) -> Float[Array, "time {self.embed_dim}"]:
        return gated(linen.Dense(2 * self.embed_dim)(x))


X = jnp.ones((5, 6))


LINEN = LinenGate(6)
MODELS: dict[str, Any] = {
    "EquinoxGate": EquinoxGate(eqx.nn.Linear(6, 12, key=jax.random.key(0)), 6),
    "LinenGate": functools.partial(LINEN.apply, LINEN.init(jax.random.key(0), X)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_library_is_checked_watched_captured_drawn_and_proven(name: str):
    model = MODELS[name]
    assert model(X).shape == (5, 6)

    with pytest.raises(TypeCheckError, match=rf"{name}.__call__\(\) got a wrong argument `x`\."):
        model(jnp.ones((5, 7)))

    calls: list[TypedCall] = []
    with watching(calls.append):
        model(X)
    assert [call.function.__name__ for call in calls] == ["__call__", "gated"]
    assert calls[1].arguments["both"].shape == (5, 12)

    def doubling(call: TypedCall) -> Any:
        return (lambda result: 2 * result) if call.function.__name__ == "gated" else None

    with watching(doubling):
        doubled = model(X)
    assert jnp.allclose(doubled, 2 * model(X))

    found = capture(model, "gated")(X)
    assert found["gated"].shape == (5, 6)
    assert (found["gated"] == model(X)).all()
    with pytest.raises(ValueError, match="did you mean 'gated'"):
        capture(model, "gate")(X)

    lines = str(shape_trace(model, X)).splitlines()
    for line in lines[:-1]:  # the last one is the result
        path = re.split(r"[( ]", line.strip())[0]
        (result,) = capture(model, path)(X).values()
        edited = edit(model, {path: lambda result: -3 * result})
        assert jnp.allclose(edited(X), -3 * result)
        assert jnp.allclose(jax.jit(edited)(X), -3 * result)
    assert jnp.allclose(model(X), doubled / 2)
    assert lines[0] == f"{name}(x: float32[time=5 embed_dim=6])"
    assert lines[1].split() == ["gated", "float32[time=5", "features=6]"]

    assert str(prove(model, "float32[t 6]")).startswith("proven    all sizes\n")
    assert not prove(model, "float32[t 7]")


class EquinoxPair(eqx.Module):
    gates: list[EquinoxGate]

    @typed
    def __call__(self, x: Float[Array, "time features"]) -> Float[Array, "time features"]:
        for gate in self.gates:
            x = gate(x)
        return x


def test_the_modules_of_an_equinox_model_are_captured_and_edited_by_the_names_of_the_tree():
    gates = []
    for seed in range(2):
        gates.append(EquinoxGate(eqx.nn.Linear(6, 12, key=jax.random.key(seed)), 6))
    model = EquinoxPair(gates)

    names = [call.name for call in shape_trace(model, X).calls]
    captured = capture(model, *names)(X)
    edited = edit(model, {"EquinoxGate": lambda x: x + 1})

    assert names == ["EquinoxGate", "EquinoxGate"]
    first = gates[0](X)
    assert jnp.allclose(captured["EquinoxGate"], first)
    assert jnp.allclose(captured["EquinoxGate[1]"], gates[1](first))
    expected = gates[1](first + 1) + 1
    assert jnp.allclose(eqx.filter_jit(lambda model, x: model(x))(edited, X), expected)
    # the model is an argument of the program, with its edits as a part of the program's key
    assert jnp.allclose(jax.jit(lambda model, x: model(x))(edited, X), expected)
    assert jnp.allclose(jax.jit(lambda model, x: model(x))(model, X), gates[1](first))
