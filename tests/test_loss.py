"""The loss by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt import cross_entropy
from jgpt.loss import bits_per_character, token_losses


def test_losses_by_hand():
    logits = jnp.log(jnp.array([[[1.0, 3.0, 4.0], [2.0, 2.0, 4.0]]]))
    targets = jnp.array([[1, 2]])
    np.testing.assert_allclose(
        token_losses(logits, targets), [[math.log(8 / 3), math.log(2)]], rtol=1e-6
    )
    assert float(cross_entropy(logits, targets)) == pytest.approx(math.log(16 / 3) / 2)


def test_a_shift_of_all_logits_changes_nothing_and_large_ones_are_finite():
    logits, targets = jnp.array([[1000.0, 998.0]]), jnp.array([1])
    assert float(cross_entropy(logits, targets)) == pytest.approx(
        2 + math.log1p(math.exp(-2)), rel=1e-4
    )
    assert float(cross_entropy(-logits, targets)) == pytest.approx(
        math.log1p(math.exp(-2)), rel=1e-3
    )


def test_the_gradient_is_probability_less_one_at_the_target():
    logits, targets = jnp.log(jnp.array([[1.0, 3.0, 4.0]])), jnp.array([1])
    gradient = jax.grad(lambda x: cross_entropy(x, targets))(logits)
    np.testing.assert_allclose(gradient, [[1 / 8, 3 / 8 - 1, 4 / 8]], rtol=1e-5)


def test_the_loss_of_bfloat16_logits_is_float32():
    # 1 + 2 ** -9 is not a bfloat16: a sum in it would be lost
    logits = jnp.array([[0.0, -math.log(512)]], jnp.bfloat16)
    loss = cross_entropy(logits, jnp.array([0]))
    assert loss.dtype == jnp.float32
    expected = math.log1p(math.exp(float(logits[0, 1])))
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_bits_per_character():
    assert bits_per_character(math.log(2), 1.0) == pytest.approx(1)
    assert bits_per_character(3 * math.log(2), 4.0) == pytest.approx(0.75)
