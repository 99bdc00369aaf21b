"""Sampling: what is drawn, from what, and how it reads as it comes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

from jgpt import GPT, BigramLM, ByteTokenizer, CharTokenizer, ModelConfig, generate
from jgpt.generation import TOKENS_PER_CALL, _draw, decode_stream, next_token, opening, stream

VOCAB, BLOCK_SIZE = 17, 6
PROMPT = jnp.array([[3, 1, 4], [1, 5, 9]])
KEY = jax.random.key(8)


@pytest.fixture(scope="module")
def model():
    """A GPT with parameters so large that its choices vary."""
    config = ModelConfig(
        vocab_size=VOCAB, block_size=BLOCK_SIZE, num_layers=1, num_heads=2, embed_dim=8
    )
    model = GPT(config, rngs=nnx.Rngs(0))
    weights = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: leaf * 25 if leaf.ndim > 1 else leaf, weights))
    return model


def by_hand(model, prompt, count, choose):
    """The loop as the lecture writes it: crop, read, choose, append."""
    run = nnx.jit(lambda model, tokens: model(tokens)[:, -1])
    tokens = prompt
    for index in range(count):
        logits = run(model, tokens[:, -model.block_size :])
        token = choose(logits, jax.random.fold_in(KEY, index))
        tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
    return tokens


def test_greedy_takes_the_likeliest_and_slides_past_the_block(model):
    greedy = by_hand(model, PROMPT, 11, lambda logits, _: logits.argmax(-1))
    assert len(set(np.asarray(greedy[:, 3:]).flat)) > 3
    assert jnp.array_equal(generate(model, PROMPT, 11, key=KEY, temperature=0.0), greedy)
    assert jnp.array_equal(generate(model, PROMPT, 11, key=KEY, top_k=1), greedy)
    assert jnp.array_equal(generate(model, PROMPT, 11, key=KEY, top_p=1e-6), greedy)
    assert jnp.array_equal(generate(model, PROMPT, 11, key=KEY, temperature=1e-37), greedy)
    assert jnp.array_equal(generate(model, PROMPT, 11, key=KEY, temperature=1e-44), greedy)


def test_sampling_draws_from_the_cropped_window_s_distribution(model):
    drawn = by_hand(model, PROMPT, 11, lambda logits, key: jax.random.categorical(key, logits))
    assert jnp.array_equal(generate(model, PROMPT, 11, key=KEY), drawn)
    assert not jnp.array_equal(generate(model, PROMPT, 11, key=jax.random.key(9)), drawn)


def test_a_long_prompt_is_kept_whole_and_read_by_its_end(model):
    long = jnp.tile(PROMPT, (1, 3))
    whole = generate(model, long, 4, key=KEY, temperature=0.0)
    cropped = generate(model, long[:, -BLOCK_SIZE:], 4, key=KEY, temperature=0.0)
    assert jnp.array_equal(whole[:, :9], long)
    assert jnp.array_equal(whole[:, 9:], cropped[:, BLOCK_SIZE:])


def test_one_continuation_begins_the_longer_one(model):
    many = TOKENS_PER_CALL + 3
    long = generate(model, PROMPT, many, key=KEY)
    assert jnp.array_equal(generate(model, PROMPT, many - 5, key=KEY), long[:, : many - 5 + 3])
    assert jnp.array_equal(generate(model, PROMPT, 0, key=KEY), PROMPT)


def test_the_pieces_of_a_stream_are_what_generate_appends(model):
    count = 2 * TOKENS_PER_CALL + 5
    pieces = list(stream(model, PROMPT, count, key=KEY, top_k=9))
    assert [piece.shape for piece in pieces] == [(2, TOKENS_PER_CALL)] * 2 + [(2, 5)]
    whole = generate(model, PROMPT, count, key=KEY, top_k=9)
    assert np.array_equal(np.concatenate(pieces, axis=1), whole[:, 3:])


def test_many_calls_of_one_shape_compile_once(model):
    program: Any = _draw
    program.clear_cache()
    for count, length, temperature in ((1, 3, 1.0), (40, 3, 0.5), (7, 1, 0.0), (9, 6, 2.0)):
        prompt = jnp.ones((2, length), jnp.int32)
        generate(model, prompt, count, key=jax.random.key(count), temperature=temperature)
    assert program._cache_size() == 1


def test_a_bigram_generates_from_the_last_token_alone():
    model = BigramLM(VOCAB, rngs=nnx.Rngs(0))
    table = np.asarray(model.table.embedding[...])
    expected = [5]
    for _ in range(8):
        expected.append(int(table[expected[-1]].argmax()))
    tokens = generate(model, jnp.array([[2, 5]]), 8, key=KEY, temperature=0.0)
    assert tokens[0, 1:].tolist() == expected


def probabilities(logits, count=20_000, **options):
    """How often each token is drawn."""
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1))
    temperature = jnp.float32(options.get("temperature", 1.0))
    top_p = options.get("top_p")
    top_p = None if top_p is None else jnp.float32(top_p)
    drawn = next_token(rows, KEY, temperature, options.get("top_k"), top_p)
    return np.bincount(np.asarray(drawn), minlength=len(logits)) / count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.8}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        # the nucleus is taken of what temperature and top_k have left
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(options, expected):
    drawn = probabilities(np.log([0.1, 0.4, 0.2, 0.3]), **options)
    np.testing.assert_allclose(drawn, expected, atol=0.015)
    assert (drawn[np.array(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan must be 0 or more"),
        ({"temperature": float("inf")}, "temperature=inf must be 0 or more"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p=1.1 must be in \(0, 1\]"),
        ({"top_p": float("nan")}, r"top_p=nan must be in \(0, 1\]"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be 0 or more"),
        ({"prompt": jnp.zeros((2, 0), jnp.int32)}, "the prompt is empty"),
        ({"prompt": jnp.array([[3, VOCAB]])}, "holds token 17, outside the vocabulary of 17"),
        ({"prompt": jnp.array([[-1, 3]])}, "holds token -1, outside the vocabulary of 17"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_drawn(model, options, message):
    arguments = {"prompt": PROMPT, "max_new_tokens": 5, "key": KEY} | options
    with pytest.raises(ValueError, match=message):
        stream(model, **arguments)


def test_broken_weights_are_reported(model):
    broken = nnx.clone(model)
    broken.final_norm.scale[...] = jnp.full(8, jnp.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        generate(broken, PROMPT, 3, key=KEY)


def test_a_sample_opens_with_a_new_line_if_there_is_one():
    assert opening(CharTokenizer("\n a")).tolist() == [0]
    assert opening(ByteTokenizer()).tolist() == [10]
    assert opening(CharTokenizer("bcd")).tolist() == [0]


@given(st.binary(max_size=30), st.integers(1, 4))
@example("a🙂é".encode(), 1)
@example(b"\xed\xa0\x80\xff", 3)
def test_a_stream_of_any_bytes_reads_as_the_whole(data, size):
    pieces = [np.array(list(data[i : i + size])) for i in range(0, len(data), size)]
    said = list(decode_stream(ByteTokenizer(), pieces))
    assert "".join(said) == ByteTokenizer().decode(list(data))


def test_characters_are_streamed_as_soon_as_they_are_whole():
    pieces = [np.array([byte]) for byte in "né🙂".encode()]
    assert list(decode_stream(ByteTokenizer(), pieces)) == ["n", "é", "🙂", ""]
    assert list(decode_stream(ByteTokenizer(), [np.array([0xF0, 0x9F])])) == ["\ufffd"]
    assert list(decode_stream(ByteTokenizer(), [])) == []
