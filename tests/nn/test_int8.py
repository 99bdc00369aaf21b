"""Weights in int8: what they and their inputs are rounded to, and that nothing else is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import generate
from jgpt.nn.int8 import Int8Linear, quantise, with_int8_weights
from jgpt.nn.layers import Linear
from tests.models import SIZES, compiled, equations, normal, random_gpt
from tests.quick import only

PROMPT = jnp.array([[3, 1, 4], [1, 5, 9]])


def relative_error(found, exact):
    """The largest difference, as a part of the largest number."""
    difference = np.asarray(found) - np.asarray(exact)
    return abs(difference).max() / abs(np.asarray(exact)).max()


def flat_state(model):
    return dict(nnx.to_flat_state(nnx.state(model)))


def test_rows_are_quantised_by_hand():
    matrix = jnp.array(
        [
            [1.0, -2, 4, 3.97],
            [0, 0, 0, 0],  # has no largest number to divide by
            [0.5, 0, -1, 0.1],
        ]
    )

    rows, scale = quantise(matrix)

    assert rows.dtype == jnp.int8
    assert rows.tolist() == [[32, -64, 127, 126], [0, 0, 0, 0], [64, 0, -127, 13]]
    np.testing.assert_allclose(scale, [4 / 127, 1 / 127, 1 / 127], rtol=1e-6)


@pytest.mark.parametrize(("shape", "biased"), [((23,), True), ((1, 23), False), ((2, 3, 23), True)])
def test_a_layer_is_the_product_of_what_is_quantised(shape, biased):
    kernel = normal(0, 23, 29)
    bias = normal(2, 29) if biased else None
    added = np.asarray(bias) if biased else np.zeros(29)
    x = 7 * normal(1, *shape)

    def layer(x):
        return Int8Linear(kernel, bias)(x), quantise(kernel.T), quantise(x.reshape(-1, 23))

    found, (weights, weight_scale), (inputs, input_scale) = compiled(layer, x)

    # in float64 the sum of 23 products of two int8 has no rounding at all
    product = np.asarray(inputs, np.float64) @ np.asarray(weights, np.float64).T
    expected = product * np.asarray(input_scale)[:, None] * np.asarray(weight_scale) + added
    np.testing.assert_allclose(found, expected.reshape(*shape[:-1], 29), rtol=1e-5, atol=1e-5)
    # and it is not the product of what was not rounded
    unrounded = np.asarray(x) @ np.asarray(kernel) + added
    assert 1e-3 < relative_error(found, unrounded) < 0.05


@pytest.mark.parametrize(("rows", "multiplied"), [(1, 2), (2, 2), (3, 3)])
def test_a_product_has_two_rows_at_least(rows, multiplied):
    """Of one row XLA's CPU backend makes a loop that takes twice as long."""
    layer = Int8Linear(jnp.ones((23, 29)))

    jaxpr = jax.make_jaxpr(layer)(jnp.ones((rows, 23)))

    (product,) = equations(jaxpr, "dot_general")
    assert product.outvars[0].aval.shape == (multiplied, 29)


@pytest.mark.parametrize("family", only(["lecture"], ["nanogpt", "lecture"]))
def test_all_layers_and_the_head_are_quantised_in_a_copy(family):
    model = random_gpt(family, use_bias=True, qkv_bias=True)
    before = flat_state(model)

    quantised = with_int8_weights(model)

    after = flat_state(quantised)
    for _, module in nnx.iter_modules(quantised):
        assert not isinstance(module, Linear)
    # nanogpt's head is tied: it is the table of tokens, which stays as it is beside a copy in int8
    assert (model.head is None) == (family == "nanogpt")
    assert quantised.head is not None
    assert quantised.head.kernel.shape == (SIZES["vocab_size"], model.embed_dim)
    kernel_dtypes = {leaf.dtype for path, leaf in after.items() if "kernel" in path}
    assert kernel_dtypes == {jnp.dtype("int8")}

    # all else is copied as it is, and there are biases in it
    others = [path for path in before if path[-1] != "kernel"]
    assert any(path[-2:] == ("projection", "bias") for path in others)
    for path in others:
        assert jnp.array_equal(after[path][...], before[path][...]), path
    # the model itself has the very arrays that it had
    for path, leaf in flat_state(model).items():
        assert leaf[...] is before[path][...], path

    found = compiled(quantised, PROMPT)
    exact = compiled(model, PROMPT)
    assert 1e-3 < relative_error(found, exact) < 0.1  # the rounding is seen
    drawn = generate(quantised, PROMPT, 1, key=jax.random.key(3), temperature=0.0)
    assert drawn[:, -1].tolist() == found[:, -1].argmax(-1).tolist()
