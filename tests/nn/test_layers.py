"""Projections and norms by hand, and how wide they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt.nn.layers import LayerNorm, Linear, RMSNorm, rms_norm
from jgpt.nn.products import project


@pytest.mark.parametrize("activation", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_projection_and_its_gradients_by_hand(dtype, activation):
    # small integers, which bfloat16 has exactly: the order of adding can't be seen
    x = jnp.array([[[1.0, 2]], [[3, -1]]], dtype)
    kernel = jnp.array([[1.0, 2, 3], [4, 5, 6]])

    def projection(x, kernel):
        return project(x, kernel, dtype, activation)

    y, pull_back = jax.vjp(projection, x, kernel)
    dy = jnp.array([[[1.0, 0, 2]], [[0, 1, 0]]], y.dtype)
    dx, dkernel = pull_back(dy)

    assert y.dtype == (activation or "float32")
    assert y.tolist() == [[[9, 12, 15]], [[-1, 1, 3]]]
    # each gradient has the dtype of its own argument
    assert dx.dtype == dtype
    assert dkernel.dtype == "float32"
    assert dx.tolist() == [[[7, 16]], [[2, 5]]]
    assert dkernel.tolist() == [[1, 3, 2], [2, -1, 4]]


def test_a_narrow_projection_adds_up_in_float32():
    """513 ones after a big number would each be lost in bfloat16, and the last one of the sum."""
    numbers = jnp.ones(514).at[0].set(4096)
    row = numbers[None, :]
    column = numbers[:, None]

    def summed_over_rows(kernel):
        return project(column, kernel, "bfloat16").sum()

    product = project(row, jnp.ones((514, 1)), "bfloat16")
    gradient = jax.grad(summed_over_rows)(jnp.ones((1, 1)))

    assert product.tolist() == [[4609]]
    assert gradient.tolist() == [[4609]]


def test_a_layer_norm_of_16_bits_subtracts_the_mean_in_32():
    """The mean of 259.5 would be 260 in bfloat16."""
    x = jnp.array([[256, 258, 260, 264]], jnp.bfloat16)
    norm = LayerNorm(4)

    found = norm(x)

    differences = np.array([[-3.5, -1.5, 0.5, 4.5]])
    variance = 8.75
    expected = differences / variance**0.5
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_norms_are_wide():
    """The squares of these don't fit into float16, and their mean isn't resolved in bfloat16."""
    x = jnp.array([[300.0, 400.0]], jnp.float16)
    norm = RMSNorm(2)
    narrow_norm = RMSNorm(2, param_dtype=jnp.float16)

    for each in (norm, LayerNorm(2), narrow_norm):
        assert each(x).dtype == jnp.float32
    # the root of the mean square of 300 and 400 is 500 divided by the root of 2
    expected = [[0.6 * 2**0.5, 0.8 * 2**0.5]]
    np.testing.assert_allclose(norm(x), expected, rtol=1e-6)
    with jax.enable_x64(True):
        wide = rms_norm(jnp.ones(2, "float64"), 1e-5)
    assert wide.dtype == "float64"


def test_a_layer_returns_the_dtype_that_activations_have():
    layer = Linear(2, 3, dtype="float32", activation_dtype="bfloat16", rngs=nnx.Rngs(0))

    assert layer(jnp.ones((4, 2))).dtype == "bfloat16"
