# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What users get of the contract: their own modules, their editor, their type checker."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array, Float, TypeCheckError

import jgpt
from jgpt.shapes.contract import record
from jgpt.user_code import load_code

THEIRS = '''
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jgpt import check, typed


class Gate(nnx.Module):
    """Half of the features decide how much of the other half goes on."""

    @typed
    def __init__(self, embed_dim: int, *, rngs: nnx.Rngs) -> None:
        self.embed_dim = embed_dim
        self.expansion = nnx.Linear(embed_dim, 2 * embed_dim, rngs=rngs)

    @typed
    def __call__(
        self, x: Float[Array, "batch time {self.embed_dim}"]
    ) -> Float[Array, "batch time {self.embed_dim}"]:
        """What passes the gate."""
        both = check(self.expansion(x), Float[Array, "batch time 2*{self.embed_dim}"])
        value, gate = jnp.split(both, 2, axis=self.axis)
        return value * gate

    axis = -1
'''


@pytest.fixture(params=["", "from __future__ import annotations\n"], ids=["", "strings"])
def gate(request: pytest.FixtureRequest, tmp_path: Path) -> nnx.Module:
    """An instance of a module written outside of jgpt."""
    path = tmp_path / "theirs.py"
    path.write_text(request.param + THEIRS)
    return load_code(f"{path}:Gate")(6, rngs=nnx.Rngs(0))


def test_a_module_of_theirs_is_checked(gate):
    def refusal(*shape: int) -> str:
        with pytest.raises(TypeCheckError) as caught:
            gate(jnp.ones(shape))
        return str(caught.value)

    assert gate(jnp.ones((2, 3, 6))).shape == (2, 3, 6)
    assert "Gate.__call__() got a wrong argument `x`." in refusal(2, 3, 5)
    gate.axis = 1
    assert "Gate.__call__() returned a wrong result." in refusal(2, 4, 6)
    gate.expansion = nnx.Linear(6, 11, rngs=nnx.Rngs(0))
    intermediate = refusal(2, 3, 6)
    assert "Gate.__call__() computed a wrong intermediate." in intermediate
    assert "with batch=2, time=3, {self.embed_dim}=6\nGot: float32[2,3,11]" in intermediate


def wrong_calls(rngs: nnx.Rngs) -> None:
    """`make lint` fails if pyright doesn't see one: the comment beside it is needless then."""
    head = jgpt.Head(10, 4, rngs=rngs)
    jgpt.Head(10, "4", rngs=rngs)  # pyright: ignore[reportArgumentType]
    jgpt.Head(10, rngs=rngs)  # pyright: ignore[reportCallIssue]
    jgpt.Head(10, 4, rngs=rngs, heads=2)  # pyright: ignore[reportCallIssue]
    jgpt.Head(10, 4)  # pyright: ignore[reportCallIssue]
    head([1.0])  # pyright: ignore[reportArgumentType]
    total: str = head(jnp.ones((1, 2, 10)))  # pyright: ignore[reportAssignmentType]
    print(total)


def test_a_record_of_theirs_is_a_tree_for_jax():
    @record
    @dataclasses.dataclass
    class Pair:
        one: Float[Array, " time"]
        other: Float[Array, " time"]

    doubled = jax.jit(lambda pair: jax.tree.map(lambda x: 2 * x, pair))(
        Pair(jnp.arange(3.0), jnp.ones(3))
    )

    assert doubled.one.tolist() == [0, 2, 4]
    assert doubled.other.tolist() == [2, 2, 2]
    with pytest.raises(TypeCheckError, match="wrong argument `other`"):
        Pair(jnp.arange(3.0), jnp.ones(5))
