"""Attention over a KV cache, and the sizes of heads and groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jaxtyping import TypeCheckError

from jgpt import Head
from jgpt.nn import kernels
from jgpt.nn.attention import attend
from jgpt.nn.cache import LayerCache
from tests.models import attention, loud, normal

BATCH, TIME, CONTEXT = 2, 5, 7
EMBED_DIM, HEADS, KV_HEADS, HEAD_DIM = 24, 6, 2, 4


def make_heads(num_kv_heads: int | None = KV_HEADS, **options):
    return loud(attention(EMBED_DIM, HEADS, num_kv_heads=num_kv_heads, **options))


def test_rotary_heads_have_an_even_size():
    with pytest.raises(ValueError, match="head_dim=5 must be even"):
        Head(EMBED_DIM, 5, rotary=True, rngs=nnx.Rngs(0))(jnp.ones((1, 1, EMBED_DIM)))
    with pytest.raises(ValueError, match="'rotary' needs an even head size"):
        attention(15, 3, rotary=True)


@pytest.mark.parametrize("num_kv_heads", [4, 12])
def test_query_heads_divide_into_groups(num_kv_heads):
    with pytest.raises(
        ValueError, match=f"num_heads=6 must be divisible by num_kv_heads={num_kv_heads}"
    ):
        make_heads(num_kv_heads)


MODERN = {"rotary": True, "qk_norm": True, "scale": 0.7}
PLACES = 8


def empty_cache(module, batch=BATCH, dtype="float32"):
    return LayerCache(batch, PLACES, module.num_kv_heads, HEAD_DIM, dtype=dtype)


def read_in_parts(module, x, parts):
    """What is read when so many positions at a time are appended to the cache."""
    cache, read, length = empty_cache(module), [], 0
    for part in parts:
        read.append(module(x[:, length : length + part], cache=cache))
        length += part
        assert cache.length[...].tolist() == [length] * BATCH
    return jnp.concatenate(read, axis=1)


@pytest.mark.parametrize("options", [{"num_kv_heads": None}, MODERN], ids=["plain", "modern"])
@pytest.mark.parametrize("parts", [(5,), (1, 1, 1, 1, 1), (3, 2)], ids=str)
def test_a_cache_changes_nothing(options, parts):
    module, x = make_heads(**options), normal(1, BATCH, TIME, EMBED_DIM)
    np.testing.assert_allclose(read_in_parts(module, x, parts), module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("time", "options", "products"),
    [
        (11, {"window": 4}, [(3, 3), (3, 6), (3, 6), (2, 5)]),  # the first of each sees 3 back
        (11, {}, [(3, 3), (3, 6), (3, 9), (2, 11)]),
        (7, {}, [(2, 2), (2, 4), (2, 6), (1, 7)]),
        (2, {}, [(2, 2)]),
        (10, {"window": 4}, [(3, 11)] * 3 + [(1, 11)]),  # the cache has room for one more
    ],
    ids=str,
)
def test_long_inputs_attend_over_a_cache_in_blocks(monkeypatch, time, options, products):
    """(queries, keys) of each block: the keys after it are not read where the input fills it."""
    module, x = make_heads(**MODERN, **options), normal(1, BATCH, time, EMBED_DIM)
    longer, seen = normal(2, 1, time - 1, EMBED_DIM), []

    def counted(query, key, *rest, **options):
        seen.append((query.shape[0] * KV_HEADS // HEADS, key.shape[0]))
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(kernels, "MIN_QUERY_BLOCK", 2)
    monkeypatch.setattr(kernels, "MAX_QUERY_BLOCKS", 4)
    monkeypatch.setattr(kernels, "attend", counted)
    cache = LayerCache(BATCH, max(time, products[0][1]), KV_HEADS, HEAD_DIM)
    cache.length[...] = jnp.array([0, -1])
    read = module(x.at[1, 1:].set(longer[0]), cache=cache)
    assert seen == products
    np.testing.assert_allclose(read[0], module(x)[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(read[1, 1:], module(longer)[0], rtol=1e-3, atol=1e-3)


def test_sizes_of_the_blocks(monkeypatch):
    """At least 128 queries, at most eight blocks."""
    module, blocks = make_heads(None), []

    def counted(query, key, value, mask, scale):
        blocks.append(len(query))
        return query

    monkeypatch.setattr(kernels, "attend", counted)
    for time, lengths in ((129, [128, 1]), (1100, [138] * 7 + [134])):
        blocks.clear()
        module(normal(1, 1, time, EMBED_DIM), cache=LayerCache(1, time, HEADS, HEAD_DIM))
        assert blocks == lengths


@pytest.mark.slow
def test_a_full_cache_forgets_the_oldest():
    """Each new position takes the place of the one that is `PLACES` before it."""
    module, x = make_heads(**MODERN), normal(1, BATCH, 2 * PLACES + 3, EMBED_DIM)
    read = read_in_parts(module, x, [5] + [1] * (2 * PLACES - 2))
    for time in range(x.shape[1]):
        window = x[:, max(0, time + 1 - PLACES) : time + 1]
        np.testing.assert_allclose(read[:, time], module(window)[:, -1], rtol=1e-3, atol=1e-3)
    longer = module(x)[:, -1]
    assert float(jnp.abs(longer - read[:, -1]).max()) > 0.1


def test_rows_of_a_cache_stand_where_they_stand():
    """Sequences of different lengths, side by side: they end together."""
    module, x = make_heads(**MODERN), normal(1, BATCH, 3, EMBED_DIM)
    cache = empty_cache(module)
    cache.length[...] = jnp.array([0, -1])
    module(x[:, :2], cache=cache)
    read = module(x[:, 2:], cache=cache)
    np.testing.assert_allclose(read[0, 0], module(x[:1])[0, 2], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(read[1, 0], module(x[1:, 1:])[0, 1], rtol=1e-3, atol=1e-3)
    assert float(jnp.abs(read[1, 0] - module(x[1:])[0, 2]).max()) > 0.1


def test_a_cache_keeps_its_dtype():
    module, x = make_heads(**MODERN, dtype="bfloat16"), normal(1, BATCH, TIME, EMBED_DIM)
    for dtype in ("bfloat16", "float32"):
        cache = empty_cache(module, dtype=dtype)
        read = module(x, cache=cache)
        assert (read.dtype, cache.keys.dtype, cache.values.dtype) == (jnp.float32, dtype, dtype)
        assert cache.keys.shape == cache.values.shape == (BATCH * KV_HEADS, PLACES, HEAD_DIM)


@pytest.mark.parametrize(
    "options",
    [{"context": normal(2, BATCH, 3, EMBED_DIM)}, {"rngs": nnx.Rngs(dropout=0)}],
    ids=["cross-attention", "training"],
)
def test_a_cache_is_for_self_attention_in_evaluation(options):
    module, x = make_heads(**MODERN, dropout=0.5), normal(1, BATCH, TIME, EMBED_DIM)
    with pytest.raises(ValueError, match="a KV cache is for causal self-attention in evaluation"):
        module(x, cache=empty_cache(module), **options)
    encoder = attention(EMBED_DIM, HEADS, causal=False)
    with pytest.raises(ValueError, match="a KV cache is for causal self-attention"):
        encoder(x, cache=LayerCache(BATCH, PLACES, HEADS, HEAD_DIM))


def test_a_cache_of_other_sizes_is_refused():
    module, x = make_heads(**MODERN), normal(1, BATCH, TIME, EMBED_DIM)
    with pytest.raises(TypeCheckError, match=r"positions\(\) got a wrong argument `new`"):
        module(x, cache=empty_cache(module, batch=BATCH + 1))
    for kv_heads, head_dim in ((KV_HEADS + 1, HEAD_DIM), (KV_HEADS, HEAD_DIM + 2)):
        with pytest.raises(TypeCheckError, match=r"append\(\) got a wrong argument `key`"):
            module(x, cache=LayerCache(BATCH, PLACES, kv_heads, head_dim))


def test_a_cache_can_t_be_carried_out_of_a_trace():
    module, x = make_heads(**MODERN), normal(1, BATCH, TIME, EMBED_DIM)
    cache = empty_cache(module)
    with pytest.raises(TraceContextError):
        jax.jit(lambda x: module(x, cache=cache))(x)
