"""Projections and norms by hand, and how wide they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt.nn.layers import (
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    make_norm,
    rms_norm,
)
from jgpt.nn.products import project, project_to_vocabulary
from tests.models import config_of


def test_a_linear_layer_by_hand():
    layer = Linear(2, 3, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    layer.bias[...] = jnp.array([10.0, 20, 30])  # type: ignore[index]
    assert layer(jnp.array([[[1.0, 2.0]]])).tolist() == [[[19, 32, 45]]]


def test_an_embedding_by_hand():
    table = Embedding(2, 3, rngs=nnx.Rngs(0))
    table.embedding[...] = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    assert table(jnp.array([[1], [0]])).tolist() == [[[4, 5, 6]], [[1, 2, 3]]]


@pytest.mark.parametrize("std", [0.02, 3.0])
def test_parameters_are_drawn_from_a_normal_distribution(std):
    options = {} if std == 0.02 else {"init_std": std}
    kernel = Linear(90, 110, rngs=nnx.Rngs(1), **options).kernel[...]
    table = Embedding(90, 110, rngs=nnx.Rngs(1), **options).embedding[...]
    for drawn in (kernel, table):
        assert float(drawn.std()) == pytest.approx(std, rel=0.03)
        assert abs(float(drawn.mean())) < 0.04 * std
        within = float((abs(drawn) < std).mean())
        assert within == pytest.approx(0.683, abs=0.02)


def test_a_wide_projection_has_a_derivative_forward_too():
    """Only a narrow one has a gradient of its own, which JAX can't turn around."""
    kernel, x, along = jnp.array([[2.0], [5.0]]), jnp.ones((1, 2)), jnp.array([[3.0, 1.0]])
    _, slope = jax.jvp(lambda x: project(x, kernel, "float32"), (x,), (along,))
    assert slope.tolist() == [[11]]
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda x: project(x, kernel, "bfloat16"), (x,), (along,))


@pytest.mark.parametrize(
    ("rows", "features", "multiplied"),
    [(129, 65, 65), (129, 1024, 1024), (129, 1030, 1152), (128, 1030, 1030)],
)
def test_only_many_rows_and_features_are_padded(rows, features, multiplied):
    """And none in the products of a decode step, whose copy would take longer than they do."""
    kernel = jnp.ones((3, features))
    jaxpr = jax.make_jaxpr(lambda x: project_to_vocabulary(x, kernel, jnp.float32))(
        jnp.ones((rows, 3))
    )
    (product,) = [each for each in jaxpr.eqns if each.primitive.name == "dot_general"]
    assert product.outvars[0].aval.shape == (rows, multiplied)
    assert jaxpr.out_avals[0].shape == (rows, features)


@pytest.mark.parametrize("activation", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_projection_and_its_gradients_by_hand(dtype, activation):
    x = jnp.array([[[1.0, 2.0]], [[3.0, -1.0]]], dtype)
    kernel = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    y, pull_back = jax.vjp(lambda x, kernel: project(x, kernel, dtype, activation), x, kernel)
    assert y.dtype == (activation or "float32")
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


def test_a_layer_norm_of_16_bits_subtracts_the_mean_in_32():
    """The mean of 259.5 would be 260 in bfloat16."""
    x = jnp.array([[256, 258, 260, 264]], jnp.bfloat16)
    expected = np.array([[-3.5, -1.5, 0.5, 4.5]]) / 8.75**0.5
    np.testing.assert_allclose(LayerNorm(4)(x), expected, rtol=1e-5)


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


def test_norms_add_a_hundred_thousandth_to_the_variance():
    """Mean 0 and variance 3e-5: the root of 4e-5 divides."""
    deviation = 3e-5**0.5
    x = jnp.array([[-deviation, deviation]])
    for norm in (LayerNorm(2), RMSNorm(2)):
        np.testing.assert_allclose(norm(x), [[-(0.75**0.5), 0.75**0.5]], rtol=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("layer", LayerNorm), ("rms", RMSNorm)])
def test_a_norm_is_of_its_kind(kind, expected):
    def made(**options):
        return make_norm(config_of("gpt2", norm=kind, norm_epsilon=0.25, **options))

    norm = made()
    assert type(norm) is expected
    assert (norm.embed_dim, norm.epsilon) == (21, 0.25)
    assert norm.scale is not None
    assert made(norm_scale=False).scale is None
    for use_bias in (True, False) if kind == "layer" else ():
        norm = made(use_bias=use_bias)
        assert isinstance(norm, LayerNorm)
        assert (norm.bias is not None) == use_bias


def test_a_key_to_drop_with_is_the_next_one_or_none():
    module = RMSNorm(2)
    assert module.next_dropout_key(None, 0.5) is None
    rngs, same = nnx.Rngs(dropout=3), nnx.Rngs(dropout=3)
    drawn = [module.next_dropout_key(rngs, rate) for rate in (0.5, 0.0)]
    assert drawn == [same.dropout(), same.dropout()]


def test_an_rms_norm_keeps_the_direction_and_not_the_size():
    x = jax.random.normal(jax.random.key(0), (3, 5, 7))
    y = rms_norm(x, 1e-12)
    np.testing.assert_allclose(jnp.square(y).mean(-1), np.ones((3, 5)), rtol=1e-5)
    np.testing.assert_allclose(y, rms_norm(100 * x, 1e-12), rtol=1e-5)
    assert (jnp.sign(y) == jnp.sign(x)).all()


def test_norms_are_wide():
    """The squares of these don't fit into float16, and their mean isn't resolved in bfloat16."""
    x = jnp.array([[300.0, 400.0]], jnp.float16)
    for norm in (RMSNorm(2), LayerNorm(2), RMSNorm(2, param_dtype=jnp.float16)):
        assert norm(x).dtype == jnp.float32
    np.testing.assert_allclose(RMSNorm(2)(x), [[0.6 * 2**0.5, 0.8 * 2**0.5]], rtol=1e-6)
    with jax.enable_x64(True):
        assert rms_norm(jnp.ones(2, "float64"), 1e-5).dtype == "float64"
