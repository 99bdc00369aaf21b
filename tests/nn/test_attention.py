"""Attention by hand: what a query reads, from whom, and never from its future."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import attend, attention_weights, causal_mask
from jgpt.nn import heads as heads_module
from jgpt.nn.attention import apply_rotary, merge_heads, split_heads
from jgpt.nn.kernels import fused_attend
from jgpt.nn.layers import apply_dropout
from tests import models
from tests.models import attention, loud, normal

BATCH, TIME, CONTEXT, EMBED_DIM, NUM_HEADS = 2, 5, 7, 12, 3


def test_a_query_may_look_at_itself_and_its_past():
    assert causal_mask(0).shape == (0, 0)
    assert causal_mask(3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_weights_by_hand():
    # affinities ln 1, ln 2, ln 5 after scaling by 4 ** -0.5: weights 1/8, 2/8, 5/8
    query = jnp.array([[2.0, 0.0, 0.0, 0.0]])
    key = jnp.array([[0.0, 9, 9, 9], [math.log(2), 0, 0, 0], [math.log(5), 0, 0, 0]])
    np.testing.assert_allclose(attention_weights(query, key), [[1 / 8, 2 / 8, 5 / 8]], rtol=1e-6)
    value = jnp.array([[8.0, 0.0], [0.0, 8.0], [16.0, 0.0]])
    np.testing.assert_allclose(attend(query, key, value), [[11.0, 2.0]], rtol=1e-6)
    masked = attention_weights(query, key, jnp.array([[True, True, False]]))
    np.testing.assert_allclose(masked, [[1 / 3, 2 / 3, 0]], rtol=1e-6)


def test_rows_of_weights_sum_to_one_and_the_future_weighs_nothing():
    query, key = 30 * normal(0, BATCH, TIME, 4), 30 * normal(1, BATCH, TIME, 4)
    weights = np.asarray(attention_weights(query, key, causal_mask(TIME)))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    future = ~np.tri(TIME, dtype=bool)
    assert (weights[:, future] == 0).all()
    assert (attention_weights(query, key)[:, future] > 0).any()


def test_a_query_that_may_look_nowhere_reads_all_alike():
    query, key = normal(0, 2, 4), normal(1, 3, 4)
    mask = jnp.array([[False, False, False], [True, False, False]])
    weights = attention_weights(query, key, mask)
    np.testing.assert_allclose(weights, [[1 / 3, 1 / 3, 1 / 3], [1, 0, 0]], rtol=1e-6)


def test_huge_affinities_stay_finite():
    weights = attention_weights(jnp.full((1, 4), 1e15), jnp.array([[1e15] * 4, [-1e15] * 4]))
    assert weights.tolist() == [[1, 0]]


def test_the_softmax_of_bfloat16_is_float32():
    """Affinities that differ by less than bfloat16 resolves still give different weights."""
    query, key = jnp.ones((1, 2)), jnp.array([[100.0, 1.0], [100.0, 1.25]])
    wide = attention_weights(query, key)
    narrow = attention_weights(query.astype(jnp.bfloat16), key.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=2**-8)
    assert abs(float(wide[0, 0]) - 0.5) > 2**-5


def test_heads_are_split_and_merged_in_order():
    x = jnp.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    heads = split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 2)
    assert heads[1, 3, 2].tolist() == x[1, 2, 6:8].tolist()
    assert jnp.array_equal(merge_heads(heads), x)


def test_dropping_keeps_the_mean_and_the_rate():
    x = jnp.full(40_000, 3.0)
    kept = apply_dropout(x, 0.2, jax.random.key(0))
    assert set(np.unique(kept)) == {0.0, 3.75}
    assert abs(float((kept == 0).mean()) - 0.2) < 0.01
    assert apply_dropout(x, 0.2, None) is x
    assert apply_dropout(x, 0.0, jax.random.key(0)) is x
    assert not jnp.array_equal(kept, apply_dropout(x, 0.2, jax.random.key(1)))


def make_head(**options):
    return loud(models.head(EMBED_DIM, 4, **options))


def make_heads(**options):
    return loud(attention(EMBED_DIM, NUM_HEADS, **options))


def by_numpy(head, x, source, causal):
    """One head, written down again without the code under test."""

    def linear(layer, y):
        z = np.asarray(y) @ np.asarray(layer.kernel[...])
        return z if layer.bias is None else z + np.asarray(layer.bias[...])

    query, key, value = linear(head.query, x), linear(head.key, source), linear(head.value, source)
    affinity = query @ key.swapaxes(-1, -2) / math.sqrt(head.head_dim)
    if causal:
        affinity = np.where(np.tri(x.shape[1], dtype=bool), affinity, -np.inf)
    weights = np.exp(affinity - affinity.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, weights @ value


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_head_computes_what_the_paper_says(use_bias, causal):
    head, x = make_head(use_bias=use_bias, causal=causal), normal(1, BATCH, TIME, EMBED_DIM)
    assert (head.query.bias is not None) == use_bias
    weights, output = by_numpy(head, x, x, causal)
    np.testing.assert_allclose(head.weights(x), weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head(x), output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention_reads_all_of_a_context_of_another_length(causal):
    head = make_head(causal=causal)
    x, context = normal(1, BATCH, TIME, EMBED_DIM), normal(2, BATCH, CONTEXT, EMBED_DIM)
    weights, output = by_numpy(head, x, context, causal=False)
    assert weights.shape == (BATCH, TIME, CONTEXT)
    np.testing.assert_allclose(head.weights(x, context), weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head(x, context), output, rtol=1e-4, atol=1e-5)
    heads = make_heads(causal=causal)
    assert heads(x, context).shape == (BATCH, TIME, EMBED_DIM)
    assert (heads.weights(x, context)[..., -1] > 0).all()


def test_a_bidirectional_head_sees_the_future_and_a_causal_one_does_not():
    x = normal(1, BATCH, TIME, EMBED_DIM)
    for causal in (True, False):
        head = make_head(causal=causal)
        reads = jax.jacobian(lambda y, head=head: head(y)[0].sum(-1))(x)[:, 0]  # type: ignore[index]
        influence = np.abs(np.asarray(reads)).sum(-1)
        assert (influence[np.tri(TIME, dtype=bool)] > 0).all()
        assert (influence[~np.tri(TIME, dtype=bool)] > 0).all() == (not causal)
        assert (influence[~np.tri(TIME, dtype=bool)] == 0).all() == causal


@pytest.mark.parametrize(
    ("qkv_bias", "use_bias", "causal", "cross"),
    [
        (False, True, True, False),
        (True, True, False, False),
        (True, False, True, True),
        (False, False, False, True),
    ],
)
def test_many_heads_are_the_heads_side_by_side_and_projected(qkv_bias, use_bias, causal, cross):
    module = make_heads(qkv_bias=qkv_bias, use_bias=use_bias, causal=causal)
    x = normal(1, BATCH, TIME, EMBED_DIM)
    context = normal(2, BATCH, CONTEXT, EMBED_DIM) if cross else None
    heads = [module.head(index) for index in range(NUM_HEADS)]
    assert all((head.key.bias is not None) == qkv_bias for head in heads)
    beside = np.concatenate([head(x, context) for head in heads], axis=-1)
    projected = beside @ np.asarray(module.projection.kernel[...])
    if module.projection.bias is not None:
        projected = projected + np.asarray(module.projection.bias[...])
    np.testing.assert_allclose(module(x, context), projected, rtol=1e-4, atol=1e-4)
    weights = np.stack([head.weights(x, context) for head in heads], axis=1)
    np.testing.assert_allclose(module.weights(x, context), weights, rtol=1e-4, atol=1e-6)
    swapped = np.concatenate([head(x, context) for head in heads[::-1]], axis=-1)
    assert np.abs(swapped - beside).max() > 0.1  # the order matters


def test_a_head_is_a_copy():
    module, x = make_heads(), normal(1, BATCH, TIME, EMBED_DIM)
    head = module.head(1)
    before = head(x)
    module.query.kernel[...] = jnp.zeros_like(module.query.kernel[...])
    assert jnp.array_equal(head(x), before)


@pytest.mark.parametrize("index", [-1, NUM_HEADS])
def test_there_is_no_other_head(index):
    with pytest.raises(ValueError, match=f"there is no head {index}: the heads are 0 to 2"):
        make_heads().head(index)


@pytest.mark.parametrize("num_heads", [5, 24])
def test_features_divide_into_heads(num_heads):
    with pytest.raises(
        ValueError, match=f"embed_dim=12 must be divisible by num_heads={num_heads}"
    ):
        attention(EMBED_DIM, num_heads)


@pytest.mark.parametrize("make", [make_head, make_heads])
def test_dropout_is_on_only_with_a_key(make):
    module, x = make(dropout=0.5), normal(1, BATCH, TIME, EMBED_DIM)
    training = module(x, rngs=nnx.Rngs(dropout=1))
    assert jnp.array_equal(module(x), make()(x))
    assert not jnp.array_equal(training, module(x))
    assert jnp.array_equal(training, module(x, rngs=nnx.Rngs(dropout=1)))
    assert not jnp.array_equal(training, module(x, rngs=nnx.Rngs(dropout=2)))


def test_weights_are_dropped_after_the_softmax():
    query, key, value = normal(0, 50, 3), normal(1, 40, 3), jnp.ones((40, 2))
    assert jnp.allclose(attend(query, key, value), 1)
    training = attend(query, key, value, dropout=0.5, dropout_key=jax.random.key(5))
    assert float(jnp.std(training)) > 0.05
    assert abs(float(training.mean()) - 1) < 0.1  # not normed again, but the mean is kept


def plain_attend(query, key, value, *, causal, scale):
    groups = query.shape[1] // key.shape[1]
    key, value = jnp.repeat(key, groups, axis=1), jnp.repeat(value, groups, axis=1)
    mask = causal_mask(query.shape[2]) if causal else None
    return attend(query, key, value, mask, scale=scale)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_is_attention_forward_and_backward(causal, kv_heads, scale):
    length = TIME if causal else CONTEXT
    query, key = normal(0, BATCH, 6, TIME, 4), normal(1, BATCH, kv_heads, length, 4)
    value, reads = normal(2, BATCH, kv_heads, length, 4), normal(3, BATCH, 6, TIME, 4)

    def both(function, **options):
        out, back = jax.vjp(lambda *inputs: function(*inputs, **options), query, key, value)
        return out, *back(reads)

    plain = both(plain_attend, causal=causal, scale=scale)
    fused = both(fused_attend, causal=causal, scale=scale, implementation="xla")
    for expected, got in zip(plain, fused, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    other = fused_attend(query, key, value, causal=causal, scale=0.2, implementation="xla")
    assert float(jnp.abs(other - plain[0]).max()) > 1e-2


def test_heads_that_can_t_be_shared_are_refused():
    query, key = normal(0, BATCH, 5, TIME, 4), normal(1, BATCH, 2, TIME, 4)
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
    module = attention(16, 2, dropout=0.5, **options)
    x, context = normal(1, BATCH, TIME, 16), normal(2, BATCH, CONTEXT, 16)
    plain, plain_cross = module(x), module(x, context)
    dropped_out = module(x, rngs=nnx.Rngs(dropout=1))
    calls = []

    def kernel(query, key, value, **options):
        calls.append((options["causal"], key.shape[1:3]))
        return fused_attend(query, key, value, implementation="xla", **options)

    module.fused = True
    monkeypatch.setattr(heads_module, "fused_attend", kernel)
    np.testing.assert_allclose(module(x), plain, rtol=2**-6, atol=2**-10)
    np.testing.assert_allclose(module(x, context), plain_cross, rtol=2**-6, atol=2**-10)
    assert calls == [(True, (1, TIME)), (False, (1, CONTEXT))]
    assert jnp.array_equal(module(x, rngs=nnx.Rngs(dropout=1)), dropped_out)
    assert len(calls) == 2
    module.dropout = 0.0  # a key alone drops nothing
    np.testing.assert_allclose(module(x, rngs=nnx.Rngs(dropout=1)), plain, rtol=2**-6, atol=2**-10)
    assert len(calls) == 3


def test_a_pair_is_turned_by_its_position():
    x = jnp.array([[3.0, 4.0], [1.0, 0.0], [1.0, 2.0]])
    cosine, sine = math.cos(-40), math.sin(-40)
    by_hand = [[3, 4], [math.cos(1), math.sin(1)], [cosine - 2 * sine, sine + 2 * cosine]]
    np.testing.assert_allclose(apply_rotary(x, jnp.array([0, 1, -40])), by_hand, rtol=1e-5)


def test_each_pair_turns_at_its_own_pace():
    # features 0 and 2 are a pair that turns by 1 a position, 1 and 3 one that turns by 1/100
    turned = apply_rotary(jnp.array([[1.0, 2.0, 0.0, 0.0]]), jnp.array([3]))
    by_hand = [math.cos(3), 2 * math.cos(0.03), math.sin(3), 2 * math.sin(0.03)]
    np.testing.assert_allclose(turned, [by_hand], rtol=1e-5)


def test_turning_keeps_lengths_and_makes_products_depend_on_distances():
    query, key = normal(0, BATCH, TIME, 6), normal(1, BATCH, CONTEXT, 6)

    def affinities(at, of):
        return (
            apply_rotary(query, at + jnp.arange(TIME))
            @ apply_rotary(key, of + jnp.arange(CONTEXT)).mT
        )

    np.testing.assert_allclose(affinities(0, 0), affinities(19, 19), rtol=1e-3, atol=1e-4)
    assert float(jnp.abs(affinities(0, 0) - affinities(19, 20)).max()) > 0.1
    np.testing.assert_allclose(
        jnp.linalg.norm(apply_rotary(query, 100 + jnp.arange(TIME)), axis=-1),
        jnp.linalg.norm(query, axis=-1),
        rtol=1e-5,
    )


def test_only_pairs_are_turned():
    with pytest.raises(ValueError, match="head_dim=5 must be even"):
        apply_rotary(normal(0, TIME, 5), jnp.arange(TIME))


def test_turning_is_as_narrow_as_what_it_turns():
    x = normal(0, TIME, 6, dtype=jnp.bfloat16)
    turned = apply_rotary(x, 1000 + jnp.arange(TIME))
    assert turned.dtype == jnp.bfloat16
    wide = apply_rotary(x.astype(jnp.float32), 1000 + jnp.arange(TIME))
    # the angles are not narrow: 1001 and 1002 are one number in bfloat16
    np.testing.assert_allclose(turned.astype(jnp.float32), wide, atol=0.05)


def test_affinities_are_scaled_as_asked():
    # affinities 4 times ln 1, ln 2, ln 5: a quarter of them gives weights 1/8, 2/8, 5/8
    query, key = jnp.array([[4.0]]), jnp.array([[0.0], [math.log(2)], [math.log(5)]])
    weights = attention_weights(query, key, scale=0.25)
    np.testing.assert_allclose(weights, [[1 / 8, 2 / 8, 5 / 8]], rtol=1e-6)
    value = jnp.array([[8.0], [16.0], [24.0]])
    np.testing.assert_allclose(attend(query, key, value, scale=0.25), [[20.0]], rtol=1e-6)
