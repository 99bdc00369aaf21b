"""The checks of exercises accept their solutions, and name planted mistakes.

Those of the parts are in `test_parts.py`, and exercises that need a trained model in neither.
"""

import ast
import dataclasses
import importlib
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.test_parts import PARTS, answers_of, given_in

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "notebooks"))
rungs = importlib.import_module("rungs")
student = runpy.run_path(str(ROOT / "notebooks" / "student.py"))
IMPORTS = """
import copy
import dataclasses
import functools
import re
from collections import Counter
from dataclasses import dataclass

import circuits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import parts
import rungs
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, TypeCheckError

import jgpt
from jgpt.data.batches import batches, resident
from jgpt.generation.sampling import Sampling
from jgpt.nn.layers import Embedding, LayerNorm, Linear
from jgpt.parallel.mesh import abstract_mesh
from jgpt.parallel.rules import spec_of

TIME = 32
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Weights = PyTree[Float[Array, "..."]]
Carried = tuple[Weights, PyTree]
Probabilities = Float[Array, " vocab"]
x = 3 * jax.random.normal(jax.random.key(5), (4, 8, 32)) + 2
tokens = jnp.arange(40)[None] % 11
GPT = jgpt.GPT
small = jgpt.ModelConfig(
    vocab_size=65,
    block_size=64,
    num_layers=1,
    num_heads=4,
    embed_dim=64,
    activation="relu",
    use_bias=True,
    tie_embeddings=False,
    head_bias=True,
)
"""
GIVEN = {
    "00_jax_for_those_who_know_pytorch": """
lengths = []
inputs = jax.random.normal(jax.random.key(2), (8, 3))
targets = inputs @ jnp.array([1.0, -2.0, 3.0])
w = jnp.ones(3)
gradient = jax.grad(loss_of)(w, inputs, targets)
""",
    "02_averaging_the_past": """
time = 8
affinities = jnp.zeros((time, time))
by_loop = averages_by_loop(x)
""",
    "03_one_head": """
head = parts._loud(jgpt.Head(32, 16, rngs=nnx.Rngs(0)))
encoder = jgpt.Head(32, 16, causal=False, rngs=nnx.Rngs(0))
nnx.update(encoder, nnx.state(head))
order = jnp.array([3, 7, 0, 5, 1, 6, 2, 4])
""",
    "04_many_heads_step_by_step": """
heads_of_query, heads_of_key = jax.random.normal(jax.random.key(3), (2, 1, 2, 3, 3)).round(2)
scores = heads_of_query @ heads_of_key.swapaxes(2, 3)
scaled = scores * 3**-0.5
weights = jax.nn.softmax(jnp.where(jgpt.causal_mask(3), scaled, -jnp.inf), axis=-1)
mha = jgpt.MultiHeadAttention(jgpt.ModelConfig(embed_dim=6, num_heads=2), rngs=nnx.Rngs(0))
context = heads_of_query
output = mha.projection(context.swapaxes(1, 2).reshape(1, 3, 6))
""",
    "05_the_block": """
sizes = dataclasses.replace(small, embed_dim=32)
h = x
""",
    "06_shapes_as_types": "",
    "07_a_pure_train_step": """
graph, state = nnx.split(jgpt.GPT(small, rngs=nnx.Rngs(0)))
weights = nnx.to_pure_dict(state)
windows = jax.random.randint(jax.random.key(0), (1, 12, 9), 0, 65)
gradient = jax.jit(jax.grad(loss_of))(weights, windows[0])
""",
    "09_byte_pairs": "",
    "10_sampling_and_the_cache": """
model = jgpt.GPT(small, rngs=nnx.Rngs(0))
prompt = tokens[:, :32]
cache = model.empty_cache(batch=1)
difference = jnp.abs(model(prompt, cache=cache) - model(prompt)).max()
""",
    "11_the_modern_block": """
time, head_dim = 24, 16
query = jax.random.normal(jax.random.key(0), (head_dim,))
head_of_12 = jgpt.Head(48, 12, qk_norm=True, rotary=True, rngs=nnx.Rngs(0))
""",
    "12_muon_and_schedules": """
gradient = jax.random.normal(jax.random.key(0), (48, 192))
update = orthogonalise(gradient)
""",
    "13_what_the_fastest_preset_adds": "",
    "14_one_program_eight_devices": """
config = jgpt.TrainConfig(
    model=jgpt.ModelConfig(
        vocab_size=80, block_size=16, num_layers=1, num_heads=4, embed_dim=32, hidden_dim=64
    )
)
""",
    "17_fine_tuning_with_adapters": """
model = jgpt.GPT(
    jgpt.ModelConfig(
        vocab_size=11,
        block_size=64,
        num_layers=2,
        num_heads=2,
        embed_dim=64,
        hidden_dim=176,
        activation="silu",
        gated=True,
        norm="rms",
    ),
    rngs=nnx.Rngs(0),
)
python_tokens = np.arange(200) % 11
rate = 0.01
texts = {"Shakespeare": jnp.arange(50)[None] ** 2 % 11}
adapters = with_adapters(model, rank=4)
low = with_adapters(model, rank=4)
for place in linear_layers(low):
    layer = getattr(*place)
    layer.b[...] = jnp.ones_like(layer.b[...])
before = losses_of(model)
""",
    "18_write_your_gpt": "trained = jgpt.GPT(small, rngs=nnx.Rngs(0))",
    "20_the_ladder": "",
    "21_induction_heads": """
model = parts._loud(Layers(2, rngs=nnx.Rngs(0)))
test_tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, 26)
previous_head = 1
""",
    "22_fine_tuning_that_one_can_read": """
config = jgpt.ModelConfig(vocab_size=11, block_size=7, num_layers=1, num_heads=2, embed_dim=8)
model = jgpt.GPT(config, rngs=nnx.Rngs(0))
tuned = jgpt.GPT(config, rngs=nnx.Rngs(1))
""",
}
"""What the cells before an exercise define, small and untrained."""
LESSONS = tuple(GIVEN)
IN_WORDS = LESSONS[-3:]
"""Lessons whose exercises have hints."""


def exercises_of(lesson: str) -> dict[str, Any]:
    """The exercises with mistakes, by the first name that a solution defines."""
    found = {}
    cells = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4).cells
    for exercise in student["exercises_in"](cells).values():
        if exercise.names[0] in student["MISTAKES"] and exercise.names[0] not in PARTS:
            found[exercise.names[0]] = exercise
    return found


def definitions_of(lesson: str) -> str:
    """The functions and classes of a lesson's cells."""
    parts = []
    for cell in nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4).cells:
        if cell.cell_type == "code" and "solution" not in cell.metadata.get("tags", ()):
            for statement in ast.parse(cell.source).body:
                if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    parts.append(ast.unparse(statement))
    return "\n\n".join(parts)


EXERCISES = {lesson: exercises_of(lesson) for lesson in LESSONS}
NAMES = [(lesson, name) for lesson in LESSONS for name in EXERCISES[lesson]]


def run(lesson: str, solved: Any, exercise: Any) -> None:
    """Run a solution, without what it asserts itself, and the check of an exercise."""
    solution = [each for each in solved.statements[0] if not isinstance(each, ast.Assert)]
    parts = [IMPORTS, definitions_of(lesson), GIVEN[lesson]]
    parts += map(ast.unparse, [*solution, *exercise.statements[1]])
    exec(compile("\n".join(parts), lesson, "exec"), {"__name__": lesson})


@pytest.mark.parametrize(("lesson", "name"), NAMES)
def test_each_check_accepts_the_solution(lesson, name):
    exercise = EXERCISES[lesson][name]
    run(lesson, exercise, exercise)


MISTAKES = [
    (lesson, name, *mistake) for lesson, name in NAMES for mistake in student["MISTAKES"][name]
]
"""An exercise, what is replaced by what in its solution, and words of what the check says."""


def mistakes():
    """The mistakes; those after the first of each exercise are slow together."""
    seen = {"stuck"}  # a model is trained before it
    for mistake in MISTAKES:
        marks = [pytest.mark.slow] if mistake[1] in seen else []
        seen.add(mistake[1])
        yield pytest.param(*mistake, marks=marks)


@pytest.mark.parametrize(("lesson", "name", "right", "wrong", "message"), list(mistakes()))
def test_each_check_names_the_mistake(lesson, name, right, wrong, message):
    exercise = EXERCISES[lesson][name]
    assert right in exercise.solution
    mistaken = dataclasses.replace(exercise, solution=exercise.solution.replace(right, wrong))
    with pytest.raises(AssertionError, match=re.escape(message)):
        run(lesson, mistaken, exercise)


@pytest.mark.parametrize(("lesson", "name"), [each for each in NAMES if each[0] in IN_WORDS])
def test_neither_task_nor_hint_nor_starter_holds_the_answer(lesson, name):
    exercise = EXERCISES[lesson][name]
    statements, _ = exercise.statements
    given = f"{exercise.student_task}\n{exercise.starter}\n{exercise.check}"
    assert "<summary>Hint</summary>" in exercise.student_task
    assert answers_of(statements)
    assert given_in(given, statements) == set()
    assert given_in(f"{given}\n{exercise.solution}", statements)  # the control


def changed_fields(before: Any, after: Any) -> set[str]:
    found = set()
    for field in dataclasses.fields(before):
        if field.name != "name" and getattr(before, field.name) != getattr(after, field.name):
            found.add(field.name)
    return found


def test_each_rung_adds_one_thing():
    steps = {}
    for before, after in zip(rungs.RUNGS, rungs.RUNGS[1:], strict=False):
        steps[after.name] = changed_fields(before, after)
    # from no layer there is no number of heads either
    assert steps.pop("one head") == {"num_layers", "num_heads"}
    assert steps.pop("size") == {"embed_dim", "block_size", "batch_size", "dropout"}
    assert steps == {
        "many heads": {"num_heads"},
        "MLP": {"block"},
        "three blocks": {"num_layers"},
        "residual": {"block"},
        "norm": {"block"},
        "depth": {"num_layers"},
        "dropout": {"dropout"},
    }


def test_the_record_has_each_rung_with_one_budget():
    record = json.loads((ROOT / "benchmarks" / "results" / "ladder.json").read_text())
    names = [rung.name for rung in rungs.RUNGS]
    characters = {rung.batch_size * rung.block_size for rung in rungs.RUNGS}

    assert record["rungs"] == names == list(record["samples"])
    assert characters == {record["characters_per_step"]}
    assert record["steps"] == rungs.STEPS
    assert record["learning_rate"] == rungs.LEARNING_RATE
    for name in names:
        assert len(record["figures"][name]["validation_loss"]) == len(record["seeds"]) == 3
