"""Attention over a KV cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from jgpt.nn import kernels
from jgpt.nn.attention import attend
from jgpt.nn.cache import LayerCache
from tests.models import attention, compiled, normal

BATCH = 2
EMBED_DIM = 24
HEADS = 6
KV_HEADS = 2
HEAD_DIM = 4
MODERN = {"rotary": True, "qk_norm": True, "scale": 0.7}


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("time", "options", "products"),
    [
        (11, {"window": 4}, [(3, 3), (3, 6), (3, 6), (2, 5)]),  # the first of each sees 3 back
        (7, {}, [(2, 2), (2, 4), (2, 6), (1, 7)]),
        # the cache has room for one more
        (10, {"window": 4}, [(3, 11), (3, 11), (3, 11), (1, 11)]),
    ],
    ids=str,
)
def test_long_inputs_attend_over_a_cache_in_blocks(monkeypatch, time, options, products):
    """(queries, keys) of each block: the keys after it are not read where the input fills it."""
    module = attention(EMBED_DIM, HEADS, num_kv_heads=KV_HEADS, **MODERN, **options)
    x = normal(1, BATCH, time, EMBED_DIM)
    shorter = normal(2, 1, time - 1, EMBED_DIM)
    _, cached_keys = products[0]
    capacity = max(time, cached_keys)
    seen = []

    def counted(query, key, *rest, **options):
        # the queries of the heads that share a key-value head are rows of one product
        queries = query.shape[0] * KV_HEADS // HEADS
        seen.append((queries, key.shape[0]))
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(kernels, "MIN_QUERY_BLOCK", 2)
    monkeypatch.setattr(kernels, "MAX_QUERY_BLOCKS", 4)
    monkeypatch.setattr(kernels, "attend", counted)

    def read_and_expected(x, shorter):
        expected = module(x)[0]
        expected_of_shorter = module(shorter)[0]
        seen.clear()
        cache = LayerCache(BATCH, capacity, KV_HEADS, HEAD_DIM, dtype="float32")
        # the second row begins with one position that isn't read
        cache.length[...] = jnp.array([0, -1])
        both = x.at[1, 1:].set(shorter[0])
        read = module(both, cache=cache)
        return read, expected, expected_of_shorter

    read, expected, expected_of_shorter = compiled(read_and_expected, x, shorter)

    close(read[0], expected)
    close(read[1, 1:], expected_of_shorter)
    assert seen == products


def test_a_full_cache_replaces_its_oldest_position():
    cache = LayerCache(1, 3, KV_HEADS, HEAD_DIM, dtype="float32")

    for place in range(5):
        key = jnp.full((1, KV_HEADS, 1, HEAD_DIM), float(place))
        cache.append(key, -key)

    assert cache.keys[...][0, :, 0].tolist() == [3, 4, 2]
    assert cache.values[...][1, :, 3].tolist() == [-3, -4, -2]
