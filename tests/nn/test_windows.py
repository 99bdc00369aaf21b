"""Attention in a window: whom a query reads, whichever way it is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import Head, attend, causal_mask
from jgpt.nn.kernels import attend_windowed
from tests.models import attention, compiled, loud, normal

BATCH, TIME, WINDOW, EMBED_DIM, HEAD_DIM, VALUE_DIM = 2, 8, 3, 24, 4, 5
X = normal(1, BATCH, TIME, EMBED_DIM)


def band(time, window):
    """True where a query of a row reads the key of a column."""
    distance = np.arange(time)[:, None] - np.arange(time)
    return (distance >= 0) & (distance < window)


def new_head(**options):
    make = lambda: Head(EMBED_DIM, HEAD_DIM, rngs=nnx.Rngs(0), **options)  # noqa: E731
    return loud(nnx.eval_shape(make), size=0.1)


def new_heads(**options):
    return loud(attention(EMBED_DIM, 6, **options), size=0.1)


KINDS = pytest.mark.parametrize("new", [new_head, new_heads])


@pytest.mark.parametrize(("time", "window"), [(5, 2), (3, 1), (3, 3), (3, None), (0, None)])
def test_a_query_may_look_at_itself_and_so_much_of_its_past(time, window):
    assert np.array_equal(causal_mask(time, window), band(time, window or time))


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_holds_nothing_is_refused(window):
    with pytest.raises(ValueError, match=f"time={-TIME} must not be negative"):
        causal_mask(-TIME)
    with pytest.raises(ValueError, match=f"window={window} must be positive"):
        causal_mask(TIME, window)
    with pytest.raises(ValueError, match=f"window={window} must be positive"):
        new_heads(window=window)


@pytest.mark.parametrize(("time", "scale"), [(1, None), (2, 0.3), (3, None), (4, None), (8, 0.3)])
def test_attending_locally_is_attending_through_a_band(time, scale):
    def forward_and_back(function, *inputs):
        out, back = jax.vjp(function, *inputs[:-1])
        return out, *back(inputs[-1])

    def through(window):
        mask = jnp.asarray(band(time, window))
        return lambda query, key, value: attend(query, key, value, mask, scale=scale)

    def local(query, key, value):
        mask = causal_mask(time, WINDOW)
        return attend_windowed(query, key, value, mask, WINDOW, scale=scale)

    def all_of_them(*inputs):
        others = [through(WINDOW + more)(*inputs[:-1]) for more in (-1, 1)]
        both = (forward_and_back(each, *inputs) for each in (local, through(WINDOW)))
        return *both, others

    with jax.enable_x64(True):
        sizes = enumerate((4, 4, VALUE_DIM, VALUE_DIM))
        inputs = [normal(i, BATCH, 7, time, size) for i, size in sizes]
        found, expected, others = compiled(all_of_them, *inputs)
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-12, atol=1e-12)
    for window, other in zip((WINDOW - 1, WINDOW + 1), others, strict=True):
        same = np.allclose(other, expected[0], atol=1e-6)
        assert same == (time <= min(window, WINDOW))


@KINDS
def test_a_window_without_an_order_is_refused(new):
    """Rather than not heeded: it would be of the past, and there is none."""
    with pytest.raises(ValueError, match="window=2 needs causal=True"):
        jax.eval_shape(new(window=2, causal=False), X)


def test_across_sequences_there_is_no_window():
    context = normal(2, BATCH, 11, EMBED_DIM)
    modules = new_heads(window=2), new_heads()
    found, expected = compiled(lambda *inputs: [module(*inputs) for module in modules], X, context)
    assert jnp.array_equal(found, expected)


def test_dropping_weights_in_a_window_keeps_the_rate():
    time, window, rate = 300, 40, 0.3

    def drawn(key):
        zero = jnp.zeros((time, HEAD_DIM))  # all that is seen weighs the same
        inputs = zero, zero, jnp.eye(time), causal_mask(time, window), window
        return attend_windowed(*inputs, dropout=rate, dropout_key=key)

    weights, inside = np.asarray(compiled(drawn, jax.random.key(0))), band(time, window)
    assert (weights[~inside] == 0).all()
    kept = weights[inside] > 0
    assert abs(kept.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / kept.size) ** 0.5
    whole = np.broadcast_to(1 / inside.sum(-1, keepdims=True) / (1 - rate), inside.shape)
    np.testing.assert_allclose(weights[inside][kept], whole[inside][kept], rtol=1e-5)
    # no two windows drop alike
    alike = weights[window : 2 * window, window : 2 * window]
    assert not np.array_equal(alike > 0, weights[:window, :window] > 0)


def test_the_first_window_and_the_others_drop_with_keys_of_their_own(monkeypatch):
    def recorded(*inputs, dropout_key, **options):
        keys.append(jax.random.key_data(dropout_key).tolist())
        return attend(*inputs, dropout_key=dropout_key, **options)

    monkeypatch.setattr("jgpt.nn.kernels.attend", recorded)
    keys, x, given = [], normal(1, TIME, HEAD_DIM), jax.random.key(5)
    attend_windowed(x, x, x, causal_mask(TIME), WINDOW, dropout=0.3, dropout_key=given)
    first, others = keys
    assert first != others
    assert jax.random.key_data(given).tolist() not in keys
