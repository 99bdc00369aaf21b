"""Attention by hand: what a query reads, from whom, and never from its future."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import Head, ModelConfig, attend, attention_weights, causal_mask
from jgpt.nn import kernels
from jgpt.nn.attention import apply_rotary
from jgpt.nn.kernels import attend_windowed, fused_attend, repeat_heads
from tests.models import attention, compiled, loud, normal

BATCH, TIME, CONTEXT, EMBED_DIM, NUM_HEADS = 2, 5, 7, 12, 3
X = normal(1, BATCH, TIME, EMBED_DIM)


def test_weights_by_hand():
    # affinities ln 1, ln 2, ln 5 after scaling by 4 ** -0.5: weights 1/8, 2/8, 5/8
    query = jnp.array([[2.0, 0.0, 0.0, 0.0]])
    key = jnp.array([[0.0, 9, 9, 9], [math.log(2), 0, 0, 0], [math.log(5), 0, 0, 0]])
    value = jnp.array([[8.0, 0.0], [0.0, 8.0], [16.0, 0.0]])
    all_but_the_last = jnp.array([[True, True, False]])
    nothing = jnp.array([[False, False, False]])

    def weights(query, key):
        return [attention_weights(query, key, mask) for mask in (None, all_but_the_last, nothing)]

    without, masked, blind = compiled(weights, query, key)

    np.testing.assert_allclose(without, [[1 / 8, 2 / 8, 5 / 8]], rtol=1e-6)
    np.testing.assert_allclose(masked, [[1 / 3, 2 / 3, 0]], rtol=1e-6)
    np.testing.assert_allclose(blind, [[1 / 3] * 3], rtol=1e-6)  # and not a NaN
    np.testing.assert_allclose(compiled(attend, query, key, value), [[11.0, 2.0]], rtol=1e-6)


def test_huge_affinities_are_no_infinity():
    """1e15 times 1e15 fits into float32, and its exponential doesn't."""
    query = jnp.full((1, 4), 1e15)
    key = jnp.array([[1e15] * 4, [-1e15] * 4])

    assert compiled(attention_weights, query, key).tolist() == [[1, 0]]


def test_the_softmax_of_bfloat16_is_float32():
    """Affinities that differ by less than bfloat16 resolves still give different weights."""
    query = jnp.ones((1, 2))
    key = jnp.array([[100.0, 1.0], [100.0, 1.25]])
    wide = compiled(attention_weights, query, key)
    # eagerly: within one program XLA may keep more precision than the dtypes say
    narrow = attention_weights(query.astype("bfloat16"), key.astype("bfloat16"))

    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(narrow), wide, atol=2**-8)
    assert abs(float(wide[0, 0]) - 0.5) > 2**-5


MODERN = {"rotary": True, "qk_norm": True, "scale": 0.7}


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "use_bias": True, "causal": False},
        {**MODERN, "qk_norm_scale": True, "qkv_bias": True, "num_kv_heads": 1, "rotary_base": 50.0},
        {**MODERN, "num_heads": 6, "num_kv_heads": 3, "window": 2},
    ],
    ids=str,
)
def test_many_heads_are_the_heads_side_by_side_and_projected(options, cross):
    module = attention(**{"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS, **options})
    heads = [module.head(index) for index in range(module.num_heads)]
    context = [normal(2, BATCH, CONTEXT, EMBED_DIM)] if cross else []

    def together_and_side_by_side(*inputs):
        outputs = jnp.concatenate([head(*inputs) for head in heads], axis=-1)
        weights = jnp.stack([head.weights(*inputs) for head in heads], axis=1)
        return (
            (module(*inputs), module.projection(outputs)),
            (module.weights(*inputs), weights),
        )

    outputs, weights = compiled(together_and_side_by_side, X, *context)

    np.testing.assert_allclose(*outputs, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-5)
    # each head has queries of its own, and the keys of its group
    keys = {np.asarray(head.key.kernel[...]).tobytes() for head in heads}
    assert len(keys) == module.num_kv_heads
    queries = {np.asarray(head.query.kernel[...]).tobytes() for head in heads}
    assert len(queries) == module.num_heads


def test_a_head_is_a_copy():
    module = attention(EMBED_DIM, NUM_HEADS)
    head = module.head(1)
    before = np.asarray(head.query.kernel[...])
    module.query.kernel[...] = jnp.zeros_like(module.query.kernel[...])

    assert np.array_equal(head.query.kernel[...], before)
    assert before.any()


@pytest.mark.parametrize("index", [-1, NUM_HEADS])
def test_there_is_no_other_head(index):
    with pytest.raises(ValueError, match=f"there is no head {index}: the heads are 0 to 2"):
        attention(EMBED_DIM, NUM_HEADS).head(index)


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize(
    ("causal", "window", "scale"),
    [(False, None, None), (True, None, 0.3), (True, 1, 0.3), (True, 3, None)],
)
def test_fused_attention_is_attention_forward_and_backward(causal, window, kv_heads, scale):
    length = TIME if causal else CONTEXT
    query = normal(0, BATCH, 6, TIME, 4)
    key = normal(1, BATCH, kv_heads, length, 4)
    value = normal(2, BATCH, kv_heads, length, 4)
    gradient = normal(3, BATCH, 6, TIME, 4)

    def plain(query, key, value):
        mask = causal_mask(TIME, window) if causal else None
        return attend(query, repeat_heads(key, 6), repeat_heads(value, 6), mask, scale=scale)

    def fused(window=window, scale=scale):
        options = {"causal": causal, "window": window, "scale": scale}
        return functools.partial(fused_attend, **options, implementation="xla")

    def outputs_and_gradients(*qkv):
        found, pull_back = jax.vjp(fused(), *qkv)
        expected, plain_pull_back = jax.vjp(plain, *qkv)
        others = [fused(scale=0.2)(*qkv), fused(window=2)(*qkv)]
        return (found, *pull_back(gradient)), (expected, *plain_pull_back(gradient)), others

    found, expected, (scaled, windowed) = compiled(outputs_and_gradients, query, key, value)

    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)
    # of a single key any scale makes a weight of 1
    assert np.allclose(scaled, expected[0], atol=1e-2) == (window == 1)
    # a window without an order is not heeded
    assert np.allclose(windowed, expected[0], atol=1e-3) == (not causal)


def test_heads_that_can_t_be_shared_are_refused():
    query = normal(0, BATCH, 5, TIME, 4)
    key = normal(1, BATCH, 2, TIME, 4)
    with pytest.raises(ValueError, match="5 query heads must be divisible by 2 key-value heads"):
        fused_attend(query, key, key, causal=True, implementation="xla")


def test_a_module_fuses_what_can_be_fused(monkeypatch):
    """The kernel's place is taken by XLA's own, which computes the same anywhere."""
    options = {
        "dtype": "bfloat16",
        "activation_dtype": "bfloat16",
        "num_kv_heads": 1,
        "scale": 0.3,
        "window": 2,
    }
    module = loud(attention(16, 2, dropout=0.5, **options), size=0.1)
    x = normal(1, BATCH, TIME, 16)
    context = normal(2, BATCH, CONTEXT, 16)
    calls = []

    def kernel(query, key, value, **options):
        calls.append((options["causal"], key.shape[1:3]))
        return fused_attend(query, key, value, implementation="xla", **options)

    def read(x, context):
        return module(x), module(x, context)

    expected = compiled(read, x, context)
    module.fused = True
    monkeypatch.setattr(kernels, "fused_attend", kernel)
    for found, wanted in zip(
        compiled(lambda *both: read(*both), x, context), expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2**-6, atol=2**-10)
    assert calls == [(True, (1, TIME)), (False, (1, CONTEXT))]

    def train(key):
        return module(x, rngs=nnx.Rngs(dropout=key))

    jax.eval_shape(train, jax.random.key(1))
    assert len(calls) == 2
    module.dropout = 0.0  # a key alone drops nothing
    jax.eval_shape(lambda key: train(key), jax.random.key(1))
    assert len(calls) == 3


def test_turning_is_as_narrow_as_what_it_turns():
    x = normal(0, TIME, 6, dtype=jnp.bfloat16)
    position = jnp.arange(1000, 1000 + TIME)
    turned = compiled(apply_rotary, x, position)
    assert turned.dtype == jnp.bfloat16
    base = compiled(functools.partial(apply_rotary, base=ModelConfig.rotary_base), x, position)
    assert np.array_equal(turned, base)  # the default, of features that turn far
    # the angles are not narrow: 1001 and 1002 are one number in bfloat16
    wide = compiled(apply_rotary, x.astype(jnp.float32), position)
    np.testing.assert_allclose(np.float32(turned), wide, atol=0.05)


# --- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("time", "window"), [(5, 2), (3, 1), (3, 3), (3, None), (0, None)])
def test_a_query_may_look_at_itself_and_so_much_of_its_past(time, window):
    distance = np.arange(time)[:, None] - np.arange(time)
    farthest = time if window is None else window

    expected = (distance >= 0) & (distance < farthest)

    assert np.array_equal(causal_mask(time, window), expected)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_holds_nothing_is_refused(window):
    with pytest.raises(ValueError, match=f"time={-TIME} must not be negative"):
        causal_mask(-TIME)
    with pytest.raises(ValueError, match=f"window={window} must be positive"):
        causal_mask(TIME, window)
    with pytest.raises(ValueError, match=f"window={window} must be positive"):
        attention(EMBED_DIM, NUM_HEADS, window=window)


def test_a_window_is_of_the_past():
    """Without an order it is refused rather than not heeded; across sequences there is none."""
    windowed = attention(EMBED_DIM, NUM_HEADS, window=2)
    plain = attention(EMBED_DIM, NUM_HEADS)
    context = normal(2, BATCH, CONTEXT, EMBED_DIM)

    found, expected = compiled(lambda *inputs: [windowed(*inputs), plain(*inputs)], X, context)
    assert jnp.array_equal(found, expected)

    windowed.causal = False
    head = Head(EMBED_DIM, 4, window=2, causal=False, rngs=nnx.Rngs(0))
    for module in (windowed, head):
        with pytest.raises(ValueError, match="window=2 needs causal=True"):
            jax.eval_shape(module, X)


def test_the_first_window_and_the_others_drop_with_keys_of_their_own(monkeypatch):
    """With the same key each window would drop the same weights."""
    keys = []
    x = normal(1, 8, 4)
    given = jax.random.key(5)

    def recorded(*inputs, dropout_key, dropout, **options):
        assert dropout == 0.3
        keys.append(jax.random.key_data(dropout_key).tolist())
        return attend(*inputs, dropout_key=dropout_key, dropout=dropout, **options)

    monkeypatch.setattr(kernels, "attend", recorded)
    attend_windowed(x, x, x, causal_mask(8), 3, dropout=0.3, dropout_key=given)

    first, others = keys
    assert first != others
    assert jax.random.key_data(given).tolist() not in keys
