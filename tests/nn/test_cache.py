"""The KV cache: a ring buffer, and which of its positions may be attended to."""

import jax.numpy as jnp
import numpy as np
import pytest

from jgpt.nn.cache import KVCache, LayerCache
from tests.models import normal


def cache_of(length, end, capacity) -> LayerCache:
    cache = LayerCache(len(length), capacity, 2, 3)
    cache.length[...], cache.end[...] = jnp.array(length), jnp.array(end)
    return cache


@pytest.mark.parametrize(
    ("length", "end", "time", "window", "seen"),
    [
        (3, 3, 1, None, ["xxx."]),
        (2, 3, 1, None, [".xx."]),  # a shorter sequence begins later
        (3, 3, 2, None, ["xx..", "xxx."]),
        (3, 3, 3, None, ["x...", "xx..", "xxx."]),
        (1, 3, 2, None, ["....", "..x."]),  # its first token is the newest
        (10, 10, 1, None, ["xxxx"]),  # the ring holds the last four
        (10, 10, 1, 2, ["xx.."]),  # at slots 8, 9, 6 and 7
        (3, 3, 2, 1, [".x..", "..x."]),
        (6, 6, 1, 3, ["xx.x"]),  # slots 4 and 5 lie where 0 and 1 did
        (2, 6, 1, 3, ["xx.."]),  # a sequence that began at slot 4
        (6, 6, 1, 9, ["xxxx"]),  # the cache holds less than the window
    ],
)
def test_the_newest_attend_to_themselves_and_the_past(length, end, time, window, seen):
    (mask,) = cache_of([length], end, 4).mask(time, window)
    assert ["".join(".x"[bool(place)] for place in query) for query in mask] == seen


def test_sequences_of_a_batch_have_their_own_past():
    first, second = cache_of([3, 1], 3, 4).mask(1)
    assert (first.tolist(), second.tolist()) == (
        [[True] * 3 + [False]],
        [[False, False, True, False]],
    )


def test_a_cache_is_a_ring():
    cache = cache_of([7, 5], 7, 5)
    kept = normal(0, 4, 5, 3)
    cache.keys[...], cache.values[...] = kept, -kept
    key, value = normal(1, 2, 2, 1, 3), normal(2, 2, 2, 1, 3)
    cache.append(key, value)
    np.testing.assert_array_equal(cache.keys, kept.at[:, 2].set(key.reshape(4, 3)))
    np.testing.assert_array_equal(cache.values, (-kept).at[:, 2].set(value.reshape(4, 3)))
    assert (cache.length.tolist(), int(cache.end[...])) == ([8, 6], 8)


def test_a_cache_can_be_filled_at_once_and_no_further():
    cache = LayerCache(2, 5, 2, 3, dtype="bfloat16")
    whole = normal(2, 2, 2, 5, 3)
    cache.append(whole, whole)
    assert cache.keys.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.keys, whole.reshape(4, 5, 3).astype("bfloat16"))
    six = normal(0, 2, 2, 6, 3)
    with pytest.raises(ValueError, match="6 positions don't fit into a KV cache of 5"):
        cache.append(six, six)


def test_a_cache_that_grows_goes_on_where_it_ended():
    cache = LayerCache(2, 3, 2, 3, dtype="bfloat16")
    whole = normal(2, 2, 2, 5, 3)
    cache.append(whole[:, :, :3], -whole[:, :, :3])
    cache.grow(7)
    assert (cache.capacity, cache.keys.dtype) == (7, jnp.bfloat16)
    cache.append(whole[:, :, 3:], -whole[:, :, 3:])
    kept = whole.reshape(4, 5, 3).astype("bfloat16")
    np.testing.assert_array_equal(cache.keys, jnp.pad(kept, ((0, 0), (0, 2), (0, 0))))
    np.testing.assert_array_equal(cache.values, jnp.pad(-kept, ((0, 0), (0, 2), (0, 0))))
    assert cache.mask(1).tolist() == [[[True] * 5 + [False] * 2]] * 2
    cache.grow(7)
    with pytest.raises(ValueError, match="a KV cache of 7 positions can't shrink to 6"):
        cache.grow(6)


def test_tokens_stand_behind_those_that_are_in_the_cache():
    cache = cache_of([0, -2], 0, 5)
    tokens = jnp.ones((2, 3), jnp.int32)
    assert cache.positions(tokens).tolist() == [[0, 1, 2], [-2, -1, 0]]
    three = normal(0, 2, 2, 3, 3)
    cache.append(three, three)
    assert cache.positions(tokens[:, :1]).tolist() == [[3], [1]]


def test_n_grams_look_back_at_the_tokens_before_the_new_ones():
    layer = LayerCache(2, 5, 2, 3)
    cache = KVCache((layer,), batch=2, lookback=2)
    cache.set_lengths(jnp.array([0, -1]))
    assert layer.length.tolist() == [0, -1]
    known = cache.append_tokens(jnp.array([[7, 8, 9], [4, 5, 6]]))
    assert known.tolist() == [[-1, -1, 7, 8, 9], [-1, -1, -1, 5, 6]]
    layer.length[...] += 3
    assert cache.append_tokens(jnp.array([[1], [2]])).tolist() == [[8, 9, 1], [5, 6, 2]]
    layer.length[...] += 1
    assert cache.append_tokens(jnp.array([[3], [0]])).tolist() == [[9, 1, 3], [6, 2, 0]]
