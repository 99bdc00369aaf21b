"""Attention by hand: what a query reads, from whom, and never from its future."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import Head, attend, attention_weights, causal_mask
from jgpt.nn import kernels
from jgpt.nn.kernels import attend_windowed, fused_attend, repeat_heads
from tests.models import attention, compiled, loud, normal

BATCH = 2
TIME = 5
CONTEXT = 7
EMBED_DIM = 12
NUM_HEADS = 3
X = normal(1, BATCH, TIME, EMBED_DIM)


def test_weights_by_hand():
    # affinities ln 1, ln 2, ln 5 after scaling by 4 ** -0.5: weights 1/8, 2/8, 5/8
    query = jnp.array([[2.0, 0.0, 0.0, 0.0]])
    key = jnp.array([[0.0, 9, 9, 9], [math.log(2), 0, 0, 0], [math.log(5), 0, 0, 0]])
    value = jnp.array([[8.0, 0], [0, 8], [16, 0]])
    all_but_the_last = jnp.array([[True, True, False]])
    nothing = jnp.array([[False, False, False]])

    def read(query, key, value):
        return {
            "no mask": attention_weights(query, key, None),
            "all but the last": attention_weights(query, key, all_but_the_last),
            "nothing": attention_weights(query, key, nothing),
            "output": attend(query, key, value),
        }

    found = compiled(read, query, key, value)

    np.testing.assert_allclose(found["no mask"], [[1 / 8, 2 / 8, 5 / 8]], rtol=1e-6)
    np.testing.assert_allclose(found["all but the last"], [[1 / 3, 2 / 3, 0]], rtol=1e-6)
    # who sees nothing reads all alike, and not a NaN
    np.testing.assert_allclose(found["nothing"], [[1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(found["output"], [[11.0, 2.0]], rtol=1e-6)


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
    inputs = [X]
    if cross:
        context = normal(2, BATCH, CONTEXT, EMBED_DIM)
        inputs.append(context)

    def together(*inputs):
        return module(*inputs), module.weights(*inputs)

    def side_by_side(*inputs):
        outputs = [head(*inputs) for head in heads]
        weights = [head.weights(*inputs) for head in heads]
        projected = module.projection(jnp.concatenate(outputs, axis=-1))
        return projected, jnp.stack(weights, axis=1)

    def both(*inputs):
        return together(*inputs), side_by_side(*inputs)

    (outputs, weights), (expected_outputs, expected_weights) = compiled(both, *inputs)

    # loud numbers: the order of adding is seen in the fourth digit
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-3, atol=1e-5)
    # each head has queries of its own, and the keys of its group
    queries = set()
    keys = set()
    for head in heads:
        queries.add(np.asarray(head.query.kernel[...]).tobytes())
        keys.add(np.asarray(head.key.kernel[...]).tobytes())
    assert len(queries) == module.num_heads
    assert len(keys) == module.num_kv_heads


@pytest.mark.parametrize(
    ("causal", "window", "scale", "kv_heads"),
    [(False, None, None, 6), (True, None, 0.3, 2), (True, 1, 0.3, 6), (True, 3, None, 2)],
)
def test_fused_attention_is_attention_forward_and_backward(causal, window, scale, kv_heads):
    key_length = TIME if causal else CONTEXT
    mask = causal_mask(TIME, window) if causal else None
    query = normal(0, BATCH, 6, TIME, 4)
    key = normal(1, BATCH, kv_heads, key_length, 4)
    value = normal(2, BATCH, kv_heads, key_length, 4)
    output_gradient = normal(3, BATCH, 6, TIME, 4)

    def plain(query, key, value):
        keys = repeat_heads(key, 6)
        values = repeat_heads(value, 6)
        return attend(query, keys, values, mask, scale=scale)

    def fused(query, key, value):
        return fused_attend(
            query, key, value, causal=causal, window=window, scale=scale, implementation="xla"
        )

    def output_and_gradients(function, *qkv):
        output, pull_back = jax.vjp(function, *qkv)
        return output, *pull_back(output_gradient)

    def both(*qkv):
        return output_and_gradients(fused, *qkv), output_and_gradients(plain, *qkv)

    for found, expected in zip(*compiled(both, query, key, value), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_module_fuses_what_can_be_fused(monkeypatch):
    """The kernel's place is taken by XLA's own, which computes the same anywhere."""
    narrow: dict[str, Any] = {"dtype": "bfloat16", "activation_dtype": "bfloat16"}
    module = attention(16, 2, dropout=0.5, num_kv_heads=1, scale=0.3, window=2, **narrow)
    loud(module, size=0.1)
    x = normal(1, BATCH, TIME, 16)
    context = normal(2, BATCH, CONTEXT, 16)
    calls = []

    def kernel(query, key, value, **options):
        calls.append((options["causal"], key.shape[1:3]))
        return fused_attend(query, key, value, implementation="xla", **options)

    def read():
        # a function of its own each time: JAX would reuse the program that was traced before
        def self_and_cross(x, context):
            return module(x), module(x, context)

        return compiled(self_and_cross, x, context)

    def trace_training():
        def train(key):
            return module(x, rngs=nnx.Rngs(dropout=key))

        jax.eval_shape(train, jax.random.key(1))

    plain = read()
    module.fused = True
    monkeypatch.setattr(kernels, "fused_attend", kernel)
    fused = read()

    # bfloat16 has 8 significant bits
    for found, expected in zip(fused, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-10)
    causal_self_attention = (True, (1, TIME))
    cross_attention = (False, (1, CONTEXT))
    assert calls == [causal_self_attention, cross_attention]

    trace_training()
    assert len(calls) == 2  # the kernel can't drop weights
    module.dropout = 0.0  # a key alone drops nothing
    trace_training()
    assert len(calls) == 3


# --- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("time", "window"), [(5, 2), (3, 1), (3, 3), (3, None), (0, None)])
def test_a_query_may_look_at_itself_and_so_much_of_its_past(time, window):
    position = np.arange(time)
    distance = position[:, None] - position
    farthest = time
    if window is not None:
        farthest = window

    mask = causal_mask(time, window)

    expected = (distance >= 0) & (distance < farthest)
    assert np.array_equal(mask, expected)


def test_a_window_is_of_the_past():
    """Without an order it is refused rather than not heeded; across sequences there is none."""
    windowed = attention(EMBED_DIM, NUM_HEADS, window=2)
    plain = attention(EMBED_DIM, NUM_HEADS)
    context = normal(2, BATCH, CONTEXT, EMBED_DIM)

    def cross_attention(x, context):
        return windowed(x, context), plain(x, context)

    found, expected = compiled(cross_attention, X, context)
    assert jnp.array_equal(found, expected)

    windowed.causal = False
    head = Head(EMBED_DIM, 4, window=2, causal=False, rngs=nnx.Rngs(0))
    for module in (windowed, head):
        with pytest.raises(ValueError, match="`window=2` needs `causal=True`"):
            jax.eval_shape(module, X)


def test_the_first_window_and_the_others_drop_with_keys_of_their_own(monkeypatch):
    """With the same key each window would drop the same weights."""
    x = normal(1, 8, 4)
    mask = causal_mask(8)
    callers_key = jax.random.key(5)
    keys = []

    def recorded(*inputs, dropout_key, dropout, **options):
        assert dropout == 0.3
        numbers = jax.random.key_data(dropout_key)
        keys.append(numbers.tolist())
        return attend(*inputs, dropout_key=dropout_key, dropout=dropout, **options)

    monkeypatch.setattr(kernels, "attend", recorded)
    attend_windowed(x, x, x, mask, 3, dropout=0.3, dropout_key=callers_key)

    first, others = keys
    assert first != others
    assert jax.random.key_data(callers_key).tolist() not in keys
