"""Attention in a window: whom a query reads, whichever way it is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import Head, attend, causal_mask
from jgpt.nn.kernels import attend_windowed
from tests.models import attention, normal

BATCH, TIME, WINDOW, EMBED_DIM, HEAD_DIM, VALUE_DIM = 2, 8, 3, 24, 4, 5


@pytest.fixture
def doubles():
    with jax.enable_x64(True):
        yield


def band(time, window):
    """True where a query of a row reads the key of a column."""
    distance = np.arange(time)[:, None] - np.arange(time)
    return (distance >= 0) & (distance < window)


def new_head(**options):
    return Head(EMBED_DIM, HEAD_DIM, rngs=nnx.Rngs(0), **options)


def new_heads(**options):
    return attention(EMBED_DIM, 6, **options)


KINDS = pytest.mark.parametrize("new", [new_head, new_heads])


def test_a_query_may_look_at_itself_and_so_much_of_its_past():
    assert causal_mask(5, 2).tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [False, True, True, False, False],
        [False, False, True, True, False],
        [False, False, False, True, True],
    ]
    assert causal_mask(3, 1).tolist() == np.eye(3, dtype=bool).tolist()
    assert causal_mask(3, 3).tolist() == causal_mask(3).tolist() == np.tri(3, dtype=bool).tolist()
    assert causal_mask(0).shape == (0, 0)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_holds_nothing_is_refused(window):
    with pytest.raises(ValueError, match=f"time={-TIME} must not be negative"):
        causal_mask(-TIME)
    with pytest.raises(ValueError, match=f"window={window} must be positive"):
        causal_mask(TIME, window)
    with pytest.raises(ValueError, match=f"window={window} must be positive"):
        new_heads(window=window)(jnp.zeros((BATCH, TIME, EMBED_DIM)))


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    ("time", "scale"), [(1, None), (2, 0.3), (3, None), (4, None), (6, 0.3), (8, None)]
)
def test_attending_locally_is_attending_through_a_band(time, scale):
    inputs = [normal(i, BATCH, 7, time, size) for i, size in enumerate((4, 4, VALUE_DIM))]
    reads = normal(3, BATCH, 7, time, VALUE_DIM)

    def forward_and_back(function):
        def both(*inputs):
            out, back = jax.vjp(function, *inputs)
            return out, *back(reads)

        return jax.jit(both)(*inputs)

    def plain(query, key, value, window=WINDOW):
        return attend(query, key, value, jnp.asarray(band(time, window)), scale=scale)

    def local(query, key, value):
        return attend_windowed(query, key, value, causal_mask(time, WINDOW), WINDOW, scale=scale)

    expected = forward_and_back(plain)
    for found, wanted in zip(forward_and_back(local), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    for window in (WINDOW - 1, WINDOW + 1):
        other = plain(*inputs, window=window)
        same = np.allclose(other, expected[0], atol=1e-6)
        assert same == (time <= min(window, WINDOW))


@KINDS
@pytest.mark.parametrize("window", [WINDOW, None])
def test_nothing_outside_the_band_weighs_anything(new, window):
    weights = np.asarray(new(window=window).weights(normal(1, BATCH, TIME, EMBED_DIM)))
    inside = np.broadcast_to(band(TIME, window or TIME), weights.shape)
    assert (weights[~inside] == 0).all()
    assert (weights[inside] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


@KINDS
def test_a_window_as_long_as_the_text_is_none(new):
    x = normal(1, BATCH, TIME, EMBED_DIM)
    for window in (TIME, TIME + 1):
        assert jnp.array_equal(new(window=window)(x), new()(x))
    assert not np.allclose(new(window=TIME - 1)(x), new()(x), atol=1e-6)


@KINDS
def test_a_window_without_an_order_is_refused(new):
    """Rather than not heeded: it would be of the past, and there is none."""
    with pytest.raises(ValueError, match="window=2 needs causal=True"):
        new(window=2, causal=False)(normal(1, BATCH, TIME, EMBED_DIM))


def test_across_sequences_there_is_no_window():
    x, context = normal(1, BATCH, TIME, EMBED_DIM), normal(2, BATCH, 11, EMBED_DIM)
    assert jnp.array_equal(new_heads(window=2)(x, context), new_heads()(x, context))


def test_dropping_weights_in_a_window_keeps_the_rate():
    time, window, rate = 300, 40, 0.3
    zero = jnp.zeros((time, HEAD_DIM))  # all that is seen weighs the same
    key = jax.random.key(0)
    inputs = zero, zero, jnp.eye(time), causal_mask(time, window), window
    drawn = attend_windowed(*inputs, dropout=rate, dropout_key=key)
    weights, inside = np.asarray(drawn), band(time, window)
    assert (weights[~inside] == 0).all()
    kept = weights[inside] > 0
    assert abs(kept.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / kept.size) ** 0.5
    whole = np.broadcast_to(1 / inside.sum(-1, keepdims=True) / (1 - rate), inside.shape)
    np.testing.assert_allclose(weights[inside][kept], whole[inside][kept], rtol=1e-5)
    # no two windows drop alike
    alike = weights[window : 2 * window, window : 2 * window]
    assert not np.array_equal(alike > 0, weights[:window, :window] > 0)
