"""Projections and norms by hand, and how wide they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt.device import activation_dtype
from jgpt.layers import LayerNorm, Linear, RMSNorm, project, rms_normed


def test_a_linear_layer_by_hand():
    layer = Linear(2, 3, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    layer.bias[...] = jnp.array([10.0, 20, 30])  # type: ignore[index]
    assert layer(jnp.array([[[1.0, 2.0]]])).tolist() == [[[19, 32, 45]]]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_projection_and_its_gradients_by_hand(monkeypatch, dtype, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x = jnp.array([[[1.0, 2.0]], [[3.0, -1.0]]], dtype)
    kernel = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    y, pull_back = jax.vjp(lambda x, kernel: project(x, kernel, dtype), x, kernel)
    assert y.dtype == activation_dtype(dtype)
    assert y.tolist() == [[[9, 12, 15]], [[-1, 1, 3]]]
    dx, dkernel = pull_back(jnp.array([[[1.0, 0, 2]], [[0, 1, 0]]], y.dtype))
    assert (dx.dtype, dkernel.dtype) == (dtype, "float32")  # each its own argument's
    assert dx.tolist() == [[[7, 16]], [[2, 5]]]
    assert dkernel.tolist() == [[1, 3, 2], [2, -1, 4]]


def test_a_narrow_projection_adds_up_in_float32():
    """512 ones after a big number would each be lost in bfloat16."""
    row = jnp.concatenate([jnp.array([4096.0]), jnp.ones(512)])[None]
    assert project(row, jnp.ones((513, 1)), "bfloat16").tolist() == [[4608]]
    gradient = jax.grad(lambda kernel: project(row.T, kernel, "bfloat16").sum())(jnp.ones((1, 1)))
    assert gradient.tolist() == [[4608]]


def test_a_layer_norm_by_hand():
    norm = LayerNorm(2, epsilon=0.75)
    norm.scale[...], norm.bias[...] = jnp.array([3.0, 5.0]), jnp.array([0.0, 1.0])  # type: ignore[index]
    # mean 2, variance 1/4, so the deviations -1/2 and 1/2 are divided by 1
    x = jnp.array([[1.5, 2.5]])
    np.testing.assert_allclose(norm(x), [[-1.5, 3.5]], rtol=1e-6)
    plain = LayerNorm(2, epsilon=0.75, use_scale=False, use_bias=False)
    assert plain.scale is plain.bias is None
    np.testing.assert_allclose(plain(x), [[-0.5, 0.5]], rtol=1e-6)


def test_an_rms_norm_by_hand():
    # the mean square of 3 and 4 is 12.5, and 16 with the epsilon: both are divided by 4
    x = jnp.array([[3.0, 4.0]])
    norm = RMSNorm(2, epsilon=3.5)
    assert norm.scale is not None
    np.testing.assert_allclose(norm(x), [[0.75, 1]], rtol=1e-6)
    norm.scale[...] = jnp.array([2.0, 10.0])
    np.testing.assert_allclose(norm(x), [[1.5, 10]], rtol=1e-6)
    plain = RMSNorm(2, epsilon=3.5, use_scale=False)
    assert plain.scale is None
    np.testing.assert_allclose(plain(x), [[0.75, 1]], rtol=1e-6)


def test_an_rms_norm_keeps_the_direction_and_not_the_size():
    x = jax.random.normal(jax.random.key(0), (3, 5, 7))
    y = rms_normed(x, 1e-12)
    np.testing.assert_allclose(jnp.square(y).mean(-1), np.ones((3, 5)), rtol=1e-5)
    np.testing.assert_allclose(y, rms_normed(100 * x, 1e-12), rtol=1e-5)
    assert (jnp.sign(y) == jnp.sign(x)).all()


def test_norms_are_wide():
    """The squares of these don't fit into float16, and their mean isn't resolved in bfloat16."""
    x = jnp.array([[300.0, 400.0]], jnp.float16)
    for norm in (RMSNorm(2), LayerNorm(2), RMSNorm(2, param_dtype=jnp.float16)):
        assert norm(x).dtype == jnp.float32
    np.testing.assert_allclose(RMSNorm(2)(x), [[0.6 * 2**0.5, 0.8 * 2**0.5]], rtol=1e-6)
    with jax.enable_x64(True):
        assert rms_normed(jnp.ones(2, "float64"), 1e-5).dtype == "float64"
