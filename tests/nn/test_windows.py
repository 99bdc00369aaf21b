"""Attention in a window: whom a query reads, whichever way it is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import Head, attend, causal_mask
from jgpt.nn.attention import merge_heads, split_heads
from jgpt.nn.kernels import attend_windowed, fused_attend
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
    assert causal_mask(3, 3).tolist() == causal_mask(3).tolist()


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


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("time", [2, 3, TIME])
def test_many_heads_read_shared_keys_through_the_band(time):
    options = {"rotary": True, "qk_norm": True, "scale": 1.7, "dtype": "float64"}
    module = new_heads(num_kv_heads=2, window=WINDOW, **options)
    x = normal(0, BATCH, time, EMBED_DIM)
    weights = module.weights(x)
    assert weights.shape == (BATCH, 6, time, time)
    value = jnp.repeat(split_heads(module.value(x), 2), 3, axis=1)
    expected = module.projection(merge_heads(weights @ value))
    np.testing.assert_allclose(module(x), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(module.head(4).weights(x), weights[:, 4], rtol=1e-12)
    other = new_heads(num_kv_heads=2, window=WINDOW + 1, **options)
    assert np.allclose(other(x), expected, atol=1e-8) == (time <= WINDOW)


@KINDS
def test_nothing_outside_the_band_weighs_anything(new):
    weights = np.asarray(new(window=WINDOW).weights(normal(1, BATCH, TIME, EMBED_DIM)))
    inside = np.broadcast_to(band(TIME, WINDOW), weights.shape)
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
@pytest.mark.parametrize("window", [1, WINDOW, 5])
def test_a_position_is_read_within_its_window_and_nowhere_else(new, window):
    module, x = jax.jit(new(window=window).__call__), normal(1, BATCH, TIME, EMBED_DIM)
    before = module(x)
    for position in range(TIME):
        changed = (module(x.at[:, position].add(1.0)) != before).any(axis=(0, 2))
        assert changed.tolist() == band(TIME, window)[:, position].tolist()


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


@KINDS
def test_evaluation_drops_nothing_and_a_key_decides(new):
    module, x = new(window=WINDOW, dropout=0.5), normal(1, BATCH, TIME, EMBED_DIM)
    training = module(x, rngs=nnx.Rngs(dropout=1))
    assert jnp.array_equal(module(x), new(window=WINDOW)(x))
    assert not jnp.array_equal(training, module(x))
    assert jnp.array_equal(training, module(x, rngs=nnx.Rngs(dropout=1)))
    assert not jnp.array_equal(training, module(x, rngs=nnx.Rngs(dropout=2)))


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("window", [1, WINDOW, TIME])
def test_a_fused_window_is_the_plain_one_forward_and_backward(window):
    query, reads = normal(0, BATCH, 6, TIME, HEAD_DIM), normal(3, BATCH, 6, TIME, HEAD_DIM)
    key, value = (normal(i, BATCH, 2, TIME, HEAD_DIM) for i in (1, 2))

    def plain(query, key, value):
        key, value = (jnp.repeat(x, 3, axis=1) for x in (key, value))
        return attend(query, key, value, jnp.asarray(band(TIME, window)), scale=0.3)

    def fused(query, key, value, window=window, causal=True):
        options = {"causal": causal, "window": window, "scale": 0.3, "implementation": "xla"}
        return fused_attend(query, key, value, **options)

    expected, back = jax.vjp(plain, query, key, value)
    found, fused_back = jax.vjp(fused, query, key, value)
    pairs = zip((found, *fused_back(reads)), (expected, *back(reads)), strict=True)
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)  # its softmax is float32
    assert not np.allclose(fused(query, key, value, window % TIME + 1), expected, atol=1e-3)
    everything = fused(query, key, value, None, causal=False)
    assert jnp.array_equal(fused(query, key, value, causal=False), everything)
