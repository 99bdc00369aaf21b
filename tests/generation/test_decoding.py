"""Sampling: what is drawn, from what, and that a cache changes nothing."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import GPT, generate
from jgpt.generation.decoding import TOKENS_PER_CALL, stream
from jgpt.generation.sampling import Sampling, next_token
from jgpt.parallel.mesh import make_mesh
from tests.models import FAMILIES, SIZES, compiled, loud, random_model, tokens_of
from tests.quick import only

VOCAB = SIZES["vocab_size"]
BLOCK_SIZE = 6
PROMPT = jnp.array([[3, 1, 4], [1, 5, 9]])
KEY = jax.random.key(8)


NGRAMS = {"ngram_sizes": (2, 5), "ngram_rows": 23}
VARIANTS = {
    **{family: {"family": family} for family in FAMILIES},
    "windows": {"family": "modern", **NGRAMS, "attention_window": 3},
    "scan": {"family": "modern", "scan_layers": True},
}
ROWS = [[3, 1, 4, 1, 5, 9], [2, 6, 5], [8, 9, 7, 9]]  # the longest n-gram is of 5


def small_model(family, **changes):
    """A model of a family whose block is soon full."""
    return random_model(family, block_size=BLOCK_SIZE, **changes)


@pytest.fixture(scope="module")
def model():
    """One layer: where several matter, a variant has them."""
    return small_model("nanogpt", num_layers=1)


@pytest.fixture(scope="module")
def windows():
    """A seed whose greedy tokens don't end in a short circle."""
    return loud(small_model(**VARIANTS["windows"]), size=0.5, seed=11)


@pytest.fixture(scope="module", params=only(["windows"], ["windows", "gpt2", "qwen3", "bigram"]))
def variant(request, windows):
    return windows if request.param == "windows" else small_model(**VARIANTS[request.param])


def likeliest(logits, _):
    return logits.argmax(-1)


def without_a_cache(model, rows, count, choose=likeliest, crop=BLOCK_SIZE, **fields):
    """The loop as the lecture writes it: crop, read, choose, append.

    A rolling cache is a window in a block that is never full; `fields` change that model.
    """
    if isinstance(model, GPT) and model.supports_rolling_cache:
        crop = 64
        window = model.config.attention_window or model.block_size
        fields = {"block_size": crop, "attention_window": window} | fields
        larger = GPT(dataclasses.replace(model.config, **fields), rngs=nnx.Rngs(1))
        nnx.update(larger, nnx.state(model, nnx.Param))
        model = larger

    @jax.jit
    def following(tokens, last):  # what is behind the last one is not read
        return model(tokens)[jnp.arange(len(tokens)), last]

    texts = [list(row) for row in rows]
    for index in range(count):
        tokens = np.zeros((len(texts), crop), np.int32)
        last = np.zeros(len(texts), np.int32)
        for row, text in enumerate(texts):
            read = text[-crop:]
            tokens[row, : len(read)] = read
            last[row] = len(read) - 1
        drawn = choose(following(tokens, last), jax.random.fold_in(KEY, index))
        for text, token in zip(texts, drawn.tolist(), strict=True):
            text.append(token)
    return texts


def greedy(model, rows, count):
    """What is appended to each row by `generate`, whose prompts are padded to one length."""
    lengths = np.array([len(row) for row in rows])
    prompt = np.full((len(rows), max(lengths)), 16)
    for row, tokens in enumerate(rows):
        prompt[row, : len(tokens)] = tokens

    drawn = generate(model, jnp.asarray(prompt), count, key=KEY, lengths=lengths, temperature=0.0)

    texts = []
    for row, length in zip(np.asarray(drawn), lengths, strict=True):
        end = length + count
        assert not row[end:].any()  # zeros, not what the prompt was padded with
        texts.append(row[:end].tolist())
    return texts


def test_greedy_with_a_cache_is_greedy_without_one(variant):
    """Within the block and past it, in a second call too."""
    count = TOKENS_PER_CALL + 2
    expected = without_a_cache(variant, ROWS, count)

    assert greedy(variant, ROWS, count) == expected

    # and these are no rows of one token, which any mistake would draw as well
    drawn = set()
    for prompt, text in zip(ROWS, expected, strict=True):
        drawn.update(text[len(prompt) :])
    assert len(drawn) > 3 or not isinstance(variant, GPT)


@pytest.mark.parametrize("name", only(["windows", "scan"], ["windows", "scan", "gpt2", "bigram"]))
def test_logits_with_a_cache_are_those_without(name, windows):
    """Of pieces of three tokens, of two and of one."""
    model: Any = windows if name == "windows" else small_model(**VARIANTS[name])
    tokens = tokens_of(1, time=BLOCK_SIZE)
    cache = model.empty_cache(2)

    @nnx.jit
    def read(model, cache, tokens):
        return model(tokens, cache=cache)

    pieces = [read(model, cache, piece) for piece in jnp.split(tokens, [3, 5], axis=1)]

    expected = compiled(model, tokens)
    tolerance = 1e-5 * abs(expected).max()
    np.testing.assert_allclose(np.concatenate(pieces, 1), expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nanogpt", "modern"])
def test_a_cache_that_is_smaller_than_the_block_is_written_around_its_end(name):
    """Of 64 positions after a prompt that was read as 64 and has 40; the next one stands first."""
    model = random_model(name, block_size=100)
    rows = [(np.arange(40) ** 2 % VOCAB).tolist(), [1, 5, 9]]
    assert greedy(model, rows, 24) == without_a_cache(model, rows, 24, crop=100, block_size=100)


@pytest.mark.slow
def test_a_mesh_generates_the_same_tokens():
    model = random_model("modern", num_heads=6, embed_dim=24, hidden_dim=32, vocab_size=18)
    prompt = tokens_of(3, batch=4, time=5)
    alone = generate(model, prompt, 9, key=KEY, temperature=0.0)
    with jax.set_mesh(make_mesh("data=4,tensor=2")):
        found = generate(model, prompt, 9, key=KEY, temperature=0.0)

    np.testing.assert_array_equal(found, alone)


@pytest.mark.slow
def test_a_seed_draws_the_same_twice_and_from_the_model_s_distribution(model):
    draw = functools.partial(next_token, sampling=Sampling())
    count = 2 * TOKENS_PER_CALL + 3
    drawn = jnp.array(without_a_cache(model, PROMPT.tolist(), count, draw))

    assert jnp.array_equal(generate(model, PROMPT, count, key=KEY), drawn)
    assert jnp.array_equal(generate(model, PROMPT, count, key=KEY), drawn)
    assert not jnp.array_equal(generate(model, PROMPT, count, key=jax.random.key(9)), drawn)


def test_a_long_prompt_is_kept_whole_and_read_by_its_end(variant):
    prompt = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    end = prompt[-BLOCK_SIZE:]

    (text,) = greedy(variant, [prompt], 9)
    (text_of_the_end,) = greedy(variant, [end], 9)

    assert text == prompt + text_of_the_end[BLOCK_SIZE:]


def test_a_stream_is_what_generate_appends_and_a_shorter_one_its_beginning(model):
    count = 2 * TOKENS_PER_CALL + 5
    less = TOKENS_PER_CALL - 2
    lengths = np.array([3, 3])

    pieces = list(stream(model, PROMPT, lengths, count, Sampling(top_k=9), key=KEY))
    whole = generate(model, PROMPT, count, key=KEY, top_k=9)
    shorter = generate(model, PROMPT, less, key=KEY, top_k=9)
    nothing = generate(model, PROMPT, 0, key=KEY)

    first, second, third = pieces
    assert first.shape == (2, TOKENS_PER_CALL)
    assert second.shape == (2, TOKENS_PER_CALL)
    assert third.shape == (2, 5)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole[:, 3:])
    np.testing.assert_array_equal(shorter, whole[:, : 3 + less])
    np.testing.assert_array_equal(nothing, PROMPT)


def test_calls_of_one_shape_compile_two_programs(caplog):
    count = 3 * BLOCK_SIZE
    model = small_model("nanogpt", vocab_size=VOCAB + count, num_layers=1)  # of no other test
    compiled_in_each_call = []

    with caplog.at_level(logging.WARNING), jax.log_compiles():
        for index, key in enumerate(jax.random.split(KEY, 3)):
            generate(
                model,
                PROMPT,
                count,
                key=key,
                top_k=5,  # which is part of the program, as the others are not
                temperature=0.5 * index,
                min_p=0.1 * index,
                lengths=np.array([3 - index, 3]),
            )
            messages = caplog.messages
            caplog.records[:] = []
            finished = [line for line in messages if line.startswith("Finished XLA compilation")]
            compiled_in_each_call.append(finished)

    first, *others = compiled_in_each_call
    for program in ("jit(_prefill)", "jit(_draw)"):  # besides small ones that others may have left
        assert sum(program in line for line in first) == 1
    assert others == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "`max_new_tokens=-1` must be 0 or more"),
        ({"prompt": jnp.zeros((2, 0), jnp.int32)}, "the prompt is empty"),
        ({"lengths": np.array([3, 0])}, "the prompt is empty"),
        (
            {"prompt": jnp.array([[3, VOCAB]])},
            "the prompt's token 17 at batch index 0, position 1 is outside the vocabulary of 17",
        ),
        ({"prompt": np.array([[3, 2**32]])}, "the prompt's token 4294967296 at"),  # 0 as an int32
    ],
)
def test_a_bad_request_is_rejected_before_anything_is_drawn(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, **{"prompt": PROMPT, "max_new_tokens": 5, "key": KEY} | options)


def test_each_sampling_parameter_reaches_the_draw(windows):
    def drawn(**options):
        return generate(windows, PROMPT, 9, key=KEY, **options).tolist()

    greedy = drawn(temperature=0.0)

    assert drawn(temperature=30.0) != greedy
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert drawn(temperature=30.0, **options) == greedy


@pytest.mark.parametrize("time", [1, 3])
def test_weights_that_are_committed_to_a_device_compile_one_decode_loop(time, caplog):
    """As those of a checkpoint are; what the loop returns is committed then."""
    model = small_model("nanogpt", vocab_size=VOCAB + 10 + time, num_layers=1)
    nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        generate(model, PROMPT[:, :time], TOKENS_PER_CALL + 1, key=KEY)

    assert sum("XLA compilation of jit(_draw)" in line for line in caplog.messages) == 1


def test_broken_weights_are_reported(model):
    broken = nnx.clone(model)
    broken.final_norm.scale[...] = jnp.full_like(broken.final_norm.scale[...], jnp.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        generate(broken, PROMPT, 3, key=KEY)
