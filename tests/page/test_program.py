"""A function of JAX as a flat program: what it keeps, and that a browser computes the same."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt import CharTokenizer, typed
from jgpt.page.model import forward_program, gradient_program
from jgpt.page.numbers import Look
from jgpt.page.program import DEFINITIONS, Uncomputable, make_program
from tests.javascript import Call, needs_javascript, run_programs
from tests.models import random_model
from tests.runs.test_plots import CONFIGS

TOKENIZER = CharTokenizer("\n !/<>abceiprst\u20ac\U0001f642")  # seventeen characters
TOKENS: tuple[int, ...] = (3, 1, 4, 1, 5, 9, 2, 6)


# --- flattening -----------------------------------------------------------------------------------


def transformed(x):
    return jax.scipy.special.gammaln(x)


def sines(x):
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length=60_000)[0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (transformed, f"the page can't compute lgamma.*{__file__}:"),
        (lambda x: x.astype(jnp.complex64), "the page can't compute .* with .*the dtype complex64"),
        (lambda x: jnp.lexsort((x, x + 1)), "the page can't compute .* with .*num_keys=2"),
        (sines, "more than 50000 operations"),
    ],
)
def test_what_the_page_can_t_compute_is_refused_by_name(function, reason):
    with pytest.raises(ValueError, match=reason):
        make_program(function, np.ones(2, np.float32))


@needs_javascript
def test_the_gradient_of_a_branch_has_what_this_branch_keeps_alone():
    """JAX fills the place of what the other branch keeps with an array that nobody reads."""

    def function(x):
        return jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: 2 * x, x).sum()

    x = np.array([0.5, -2.0, 3.0], np.float32)
    program = make_program(jax.grad(function), x)

    answers = run_programs([Call(program, (x,)), Call(program, (-x,))])

    found, other = [gradient for answer in answers for gradient in answer.values()]
    np.testing.assert_allclose(found, np.cos(x), rtol=1e-6)
    np.testing.assert_array_equal(other, [2, 2, 2])


# --- whole programs -------------------------------------------------------------------------------


class RunningMean(nnx.Module):
    """A model of somebody's own: a recurrence instead of attention."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.vocab_size = 17
        self.block_size = 12
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (17, 6)))
        self.gate = nnx.Param(jax.random.normal(rngs.params(), (6,)))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (6, 17)))

    def hidden(self, tokens: Any, *, rngs: Any = None) -> Any:
        x = self.embedding[...][tokens]
        keep = jax.nn.sigmoid(self.gate[...])

        def step(state: Any, entry: Any) -> Any:
            state = keep * state + (1 - keep) * entry
            return state, jnp.tanh(state)

        _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return states.swapaxes(0, 1)

    def logits(self, x: Any) -> Any:
        return x @ self.head[...]

    def __call__(self, tokens: Any, *, rngs: Any = None) -> Any:
        return self.logits(self.hidden(tokens))


LLAMA = {"qk_norm": False, "qk_norm_scale": False}


def model_named(name: str) -> Any:
    if name == "one's own":
        return RunningMean(rngs=nnx.Rngs(0))
    if name == "llama":
        return random_model("qwen3", **LLAMA)
    if name == "scanned":
        return random_model("gpt2", scan_layers=True, remat=True)
    if name == "bigram":
        return random_model("bigram")
    return random_model("nanogpt", **vars(CONFIGS[name]))


@functools.cache
def look_of(name: str) -> Look:
    return Look(model_named(name), TOKENIZER, name)


@pytest.mark.parametrize(
    ("name", "coefficients", "expected"),
    [
        ("log2", (), np.log2),
        ("one_minus_square", (), lambda x: 1 - x**2),
        ("polynomial", (5.0, -3.0, 2.0), lambda x: 5 - 3 * x + 2 * x**2),
    ],
)
def test_a_primitive_of_a_newer_jax_is_made_of_others(name, coefficients, expected):
    x = np.array([0.25, 0.9999, 1.0, 3.0, 1e-20], np.float32)

    found = DEFINITIONS[name](x, *map(np.float32, coefficients))

    np.testing.assert_allclose(found, expected(x.astype(np.float64)), rtol=1e-6)
    if hasattr(jax.lax, name):  # then a program has it
        primitive = getattr(jax.lax, name)
        arguments = (coefficients,) if coefficients else ()
        program = make_program(lambda x: primitive(x, *arguments), x)
        assert name not in {operation for operation, _, _, _ in program.operations}


class Repeats(nnx.Module):
    """A model with a loop, which JAX has no gradient of."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.vocab_size = 17
        self.block_size = 12
        self.table = nnx.Param(jax.random.normal(rngs.params(), (17, 17)))

    def __call__(self, tokens: Any, *, rngs: Any = None) -> Any:
        return jax.jit(self.repeated)(self.embed(tokens))

    @typed
    def embed(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time features"]:
        return self.table[...][tokens]

    def repeated(self, x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.max() < 9, lambda x: 2 * x, x)


def test_an_operation_without_a_gradient_is_refused_with_the_line_that_uses_it():
    line = Repeats.repeated.__code__.co_firstlineno + 1
    look = Look(Repeats(rngs=nnx.Rngs(0)), TOKENIZER, "repeats")
    forward_program(look, 4)  # the control

    with pytest.raises(Uncomputable) as error:
        gradient_program(look, 4)

    assert str(error.value) == (
        f"the page can't compute the gradient of while, which {__file__}:{line} uses"
    )
