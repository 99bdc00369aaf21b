"""Sampling where layers read through a window and tokens bring their n-grams with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import GPT, generate
from tests.generation.test_decoding import BLOCK_SIZE, KEY, small_model
from tests.models import loud

COUNT = 7 * BLOCK_SIZE  # more than one call draws
NGRAMS = {"ngram_sizes": (2, 5), "ngram_rows": 23}
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 8]]  # the longest n-gram is of 5


@pytest.fixture(scope="module")
def model():
    # a seed whose greedy tokens do not end in a short circle
    return loud(small_model("modern", **NGRAMS, attention_window=3), size=0.5, seed=11)


def with_a_block_for_all(model, **fields):
    """The same weights where nothing needs to slide."""
    config = dataclasses.replace(model.config, block_size=64, **fields)
    larger = GPT(config, rngs=nnx.Rngs(1))
    nnx.update(larger, nnx.state(model, nnx.Param))
    return larger


def without_a_cache(model, prompt, count, crop):
    """Greedily: the last `crop` tokens are read anew for each one."""

    @jax.jit
    def following(tokens, last):  # what is behind the last one is not read
        return model(tokens)[0, last].argmax()

    tokens = list(prompt)
    for _ in range(count):
        read = tokens[-crop:]
        padded = np.pad(read, (0, crop - len(read)))[None]
        tokens.append(int(following(jnp.asarray(padded), len(read) - 1)))
    return tokens


def greedy(model, prompts, count):
    width = max(map(len, prompts))
    padded = jnp.array([prompt + [16] * (width - len(prompt)) for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts])
    drawn = generate(model, padded, count, key=KEY, lengths=lengths, temperature=0.0)
    return [row[: n + count].tolist() for row, n in zip(drawn, lengths, strict=True)]


def test_a_cache_that_slides_is_exactly_a_block_for_all(model):
    larger = with_a_block_for_all(model)
    expected = [without_a_cache(larger, prompt, COUNT, crop=64) for prompt in PROMPTS]
    assert greedy(model, PROMPTS, COUNT) == expected
    assert greedy(model, PROMPTS[1:2], COUNT) == expected[1:2]  # and a prompt by itself
    assert all(len(set(row[-BLOCK_SIZE:])) > 2 for row in expected)


@pytest.mark.parametrize("fields", [{"attention_window": 4}, {"ngram_sizes": (2, 3)}], ids=str)
def test_another_window_or_n_gram_continues_otherwise(model, fields):
    other = with_a_block_for_all(model, **fields)
    expected = [without_a_cache(other, prompt, COUNT, crop=64) for prompt in PROMPTS]
    for found, wanted in zip(greedy(model, PROMPTS, COUNT), expected, strict=True):
        assert found != wanted


def test_learned_positions_read_their_n_grams_in_the_last_block():
    model = small_model("nanogpt", **NGRAMS, tie_embeddings=False)
    expected = [without_a_cache(model, prompt, COUNT, crop=BLOCK_SIZE) for prompt in PROMPTS]
    assert greedy(model, PROMPTS, COUNT) == expected
    assert all(len(set(row[-BLOCK_SIZE:])) > 2 for row in expected)


def test_a_long_prompt_is_one_that_begins_with_its_last_block(model):
    long = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    whole = greedy(model, [long], 9)[0]
    assert whole[: len(long)] == long
    assert whole[len(long) :] == greedy(model, [long[-BLOCK_SIZE:]], 9)[0][BLOCK_SIZE:]


def test_newest_tokens_take_what_stands_before_them(model):
    rows, newest = [[3, 1, 4, 1, 5, 9], [2, 6], [8, 9, 7]], 2
    lengths = jnp.array([len(row) for row in rows])
    begins_late = jnp.array([[16] * (6 - len(row)) + row for row in rows])
    ends_early = jnp.array([row + [16] * (6 - len(row)) for row in rows])

    @functools.partial(jax.jit, static_argnames="forgets")
    def read(tokens, forgets):
        cache = model.empty_cache(3)
        cache.set_lengths(lengths - 6)
        model(tokens[:, :-newest], cache=cache)
        if forgets:
            cache.tokens[...] = jnp.full_like(cache.tokens[...], -1)
        return model(tokens[:, -newest:], cache=cache)[:, -1]

    found, forgotten = read(begins_late, False), read(begins_late, True)
    expected = jax.jit(model.__call__)(ends_early)[jnp.arange(3), lengths - 1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())
    differs = abs(forgotten - found).max(axis=-1) > 1e-3
    assert differs.tolist() == [True, False, True]  # in front of the second there is nothing
