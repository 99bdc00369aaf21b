"""What training and decoding cost: donated memory, compilations, and the rows of logits at once."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import GPT, ModelConfig, TrainConfig, generate
from jgpt.data.batches import batches
from jgpt.generation import decoding
from jgpt.generation.sampling import Sampling
from jgpt.nn import loss
from jgpt.nn.products import project_to_tied_vocabulary, project_to_vocabulary
from jgpt.training.memory import compile_steps
from jgpt.training.placement import bytes_of
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import make_eval_step, make_train_steps

MODEL = ModelConfig(vocab_size=11, block_size=6, num_layers=1, num_heads=2, embed_dim=8)
CONFIG = TrainConfig(model=MODEL, steps=7, batch_size=5, steps_per_call=3)
TOKENS = np.arange(211, dtype=np.int32) * 7 % 11


def test_the_whole_state_is_donated():
    analysis = compile_steps(CONFIG).memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= bytes_of(abstract_state(CONFIG))


def test_the_cache_of_decoding_is_donated():
    graph, weights = nnx.split(GPT(MODEL, rngs=nnx.Rngs(0)))
    window = jnp.zeros((3, 6), jnp.int32)
    length = jnp.full(3, 2, jnp.int32)
    cache = nnx.merge(graph, weights).empty_cache(3, 6)
    sampling = jax.tree.map(jnp.float32, Sampling(1.0, None, None, None))
    arguments = (weights, window, length, cache, 0, 5, jax.random.key(0), sampling)
    lowered = decoding._compiled_draw.lower(*arguments, graph=graph, recomputes=False)
    analysis = lowered.compile().memory_analysis()

    assert analysis is not None
    assert analysis.alias_size_in_bytes >= bytes_of((window, nnx.state(cache)))


def test_one_program_for_a_run_and_one_for_its_evaluations():
    steps: Any = make_train_steps(CONFIG)
    evaluate: Any = make_eval_step(MODEL)
    state = init_state(CONFIG)
    for first, count in ((0, 3), (3, 1), (4, 2)):
        windows = batches(TOKENS, 0, first, 3, 5, 6)
        state, _ = steps(state, windows, dropout_stream(0), count, first)
        counts = jnp.ones((3, 5, 6), bool).at[count:].set(False)
        evaluate(state.weights, windows, counts)

    assert (steps._cache_size(), evaluate._cache_size()) == (1, 1)


def test_one_program_decodes_for_prompts_up_to_a_power_of_two():
    model = GPT(dataclasses.replace(MODEL, block_size=64, num_heads=1), rngs=nnx.Rngs(0))
    programs: list[Any] = [decoding._prefill, decoding._compiled_draw]
    before = [program._cache_size() for program in programs]
    for length in (10, 13, 17):  # 9, 12 and 16 tokens before the last
        prompt = jnp.zeros((1, length), jnp.int32)
        generate(model, prompt, 4, key=jax.random.key(length), temperature=0.5 + length / 10)
    after = [program._cache_size() for program in programs]

    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]


def columns(function, *shapes: tuple[int, ...]) -> set[str]:
    """The columns of the products in a program, from its jaxpr."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = str(jax.make_jaxpr(lambda *given: function(*given, jnp.float32))(*arrays))
    return set(re.findall(r"f32\[\d+,(\d+)\] = dot_general", text))


@pytest.mark.parametrize(
    ("rows", "features", "padded"),
    [(129, 1025, 1152), (128, 1025, 1025), (129, 1024, 1024), (129, 1030, 1152), (300, 1152, 1152)],
)
def test_many_rows_of_a_large_vocabulary_are_padded_to_whole_tiles(rows, features, padded):
    assert columns(project_to_vocabulary, (rows, 7), (7, features)) == {str(padded)}
    assert columns(project_to_tied_vocabulary, (1, rows, 7), (features, 7)) == {str(padded)}


@pytest.mark.parametrize(
    ("batch", "time", "at_once", "chunks", "size"),
    [
        (2, 9, 8, 3, 3),  # chunks of 4 positions fit; three of 3 need no padding
        (2, 10, 8, 3, 4),
        (3, 10, 7, 5, 2),
        (5, 4, 3, 4, 1),  # a position at least, of each sequence
        (2, 9, 16, 2, 5),
    ],
)
def test_the_chunks_of_a_loss_are_few_and_balanced(batch, time, at_once, chunks, size):
    x = jnp.zeros((batch, time, 7))
    targets = jnp.zeros((batch, time), jnp.int32)
    cut: Any = loss._chunked
    xs, parts, real = jax.eval_shape(lambda x, targets: cut(x, targets, at_once), x, targets)

    assert xs.shape == (chunks, batch, size, 7)
    assert parts.shape == real.shape == (chunks, batch, size)


def test_a_gibibyte_of_logits_is_materialised_at_most():
    for vocab_size in (11, 50_257, 2**24):
        rows = loss.rows_at_once(vocab_size)
        assert rows * vocab_size * 4 <= 2**30 < (rows + 1) * vocab_size * 4


def test_a_step_and_an_evaluation_hold_the_logits_of_one_chunk(monkeypatch):
    """All arrays of the vocabulary's size in their programs."""
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 11 * 12)
    windows = jax.ShapeDtypeStruct((3, 5, 7), jnp.int32)
    state: Any = abstract_state(CONFIG)
    steps = jax.make_jaxpr(make_train_steps(CONFIG))(state, windows, dropout_stream(0), 2)
    counts = jax.ShapeDtypeStruct((3, 5, 6), bool)
    evaluation = jax.make_jaxpr(make_eval_step(MODEL))(state.weights, windows, counts)
    for program in (steps, evaluation):
        shapes = set(re.findall(r"f32\[((?:\d+,)*)11\]", str(program)))
        rows = {int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes}
        assert 10 in rows  # two positions of five sequences
        assert max(rows) == 10
