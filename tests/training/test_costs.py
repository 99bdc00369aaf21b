"""What training and decoding cost: donated memory, compilations, and the rows of logits at once."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from jgpt import ModelConfig, TrainConfig
from jgpt.nn import loss
from jgpt.training.memory import compile_steps
from jgpt.training.placement import bytes_of
from jgpt.training.state import abstract_state, dropout_stream
from jgpt.training.step import make_eval_step, make_train_steps

MODEL = ModelConfig(vocab_size=11, block_size=6, num_layers=1, num_heads=2, embed_dim=8)
CONFIG = TrainConfig(model=MODEL, steps=7, batch_size=5, steps_per_call=3)


def test_the_whole_state_is_donated():
    program = compile_steps(CONFIG)

    analysis = program.memory_analysis()
    assert analysis is not None
    donated = analysis.alias_size_in_bytes
    assert donated >= bytes_of(abstract_state(CONFIG))


def test_a_gibibyte_of_logits_is_materialised_at_most():
    for vocab_size in (11, 50_257, 2**24):
        row = 4 * vocab_size
        rows = loss.rows_at_once(vocab_size)
        assert rows * row <= 2**30
        assert (rows + 1) * row > 2**30  # one more would be too many


def test_a_step_and_an_evaluation_hold_the_logits_of_one_chunk(monkeypatch):
    """All arrays of the vocabulary's size in their programs."""
    twelve_rows = 4 * 11 * 12
    monkeypatch.setattr(loss, "LOGITS_BYTES", twelve_rows)
    windows = jax.ShapeDtypeStruct((3, 5, 7), jnp.int32)
    counts = jax.ShapeDtypeStruct((3, 5, 6), bool)
    state: Any = abstract_state(CONFIG)
    train: Any = make_train_steps(CONFIG)
    evaluate: Any = make_eval_step(MODEL)

    step = jax.make_jaxpr(train)(state, windows, dropout_stream(0), 2, 0)
    evaluation = jax.make_jaxpr(evaluate)(state["model"], windows, counts)

    for program in (step, evaluation):
        rows = rows_of_the_vocabulary(str(program))
        assert 10 in rows  # two positions of five sequences
        assert max(rows) == 10


def rows_of_the_vocabulary(program: str) -> set[int]:
    """How many rows of 11 numbers the arrays of a program have."""
    rows = set()
    for leading in re.findall(r"f32\[((?:\d+,)*)11\]", program):
        sizes = re.findall(r"\d+", leading)
        rows.add(math.prod(int(size) for size in sizes))
    return rows
