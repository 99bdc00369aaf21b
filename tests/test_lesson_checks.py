"""The checks of lessons 17 and 20 to 22 accept their solutions, and name planted mistakes."""

import ast
import dataclasses
import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.test_parts import answers_of, given_in

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "notebooks"))
rungs = importlib.import_module("rungs")
student = runpy.run_path(str(ROOT / "notebooks" / "student.py"))
LESSONS = (
    "17_fine_tuning_with_adapters",
    "20_the_ladder",
    "21_induction_heads",
    "22_fine_tuning_that_one_can_read",
)
IMPORTS = """
import copy
import functools
import re
from dataclasses import dataclass

import circuits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import parts
import rungs
from flax import nnx
from jaxtyping import Array, Float, Int

import jgpt
from jgpt.data.batches import batches, resident
from jgpt.nn.layers import Embedding, LayerNorm, Linear

TIME = 32
LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""
GIVEN = {
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


def exercises_of(lesson: str) -> dict[str, Any]:
    """The exercises, by the first name that a solution defines."""
    found = {}
    cells = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4).cells
    for exercise in student["exercises_in"](cells).values():
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


def run(lesson: str, solution: str) -> None:
    """Run a solution and its check."""
    code = f"{IMPORTS}\n{definitions_of(lesson)}\n{GIVEN[lesson]}"
    exec(compile(f"{code}\n{solution}\n", lesson, "exec"), {"__name__": lesson})


@pytest.mark.parametrize(("lesson", "name"), NAMES)
def test_each_check_accepts_the_solution(lesson, name):
    run(lesson, EXERCISES[lesson][name].solution)


MISTAKES = [
    ("adapter_size", "rank * (n + m)", "rank * n * m", "a and b of `expansion` have others"),
    ("adapter_size", "rank = 47", "rank = 46", "the kernel still has more"),
    ("adapter_size", "rank = 47", "rank = 48", "a smaller rank has more"),
    ("stuck", "pair.a[...] = jnp.zeros_like(pair.a[...])", "pass", "A of query wasn't 0"),
    ("stuck", "rank=2", "rank=3", "the adapter of query isn't of rank 2"),
    ("stuck", "steps=5", "steps=4", "fine-tune for 5 steps"),
    ("without", "copy.deepcopy(low)", "low", "low was changed"),
    ("without", "pair.b[...] = jnp.zeros_like(pair.b[...])", "pass", "B of query isn't 0"),
    ("without", "pair.b[...] = jnp.zeros_like(pair.b[...])",
     "pair.b[...] *= 0\n    pair.base.kernel[...] *= 2", "another than before"),
    ("share_of_words", "[a-z]+", "[a-z']+", "are four words"),
    ("share_of_words", "[a-z]+", r"\\w+", "letters alone count"),
    ("share_of_words", "text.lower()", "text", "case doesn't count"),
    ("share_of_words", "in words if", "in set(words) if", "each occurrence counts"),
    ("between", "(1 - share) * one + share * other", "one", "a share of 1 isn't the second"),
    ("between", "(1 - share) * one + share * other", "share * one + (1 - share) * other",
     "a share of 0 isn't the first"),
    ("between", "(1 - share) * one + share * other",
     "jnp.where(share < 1, one + share * jnp.abs(other - one), other)", "the straight line"),
    ("between", "(1 - share) * one + share * other",
     "one + share**2 * (other - one)", "a share of 0.25 goes 0.06 of the way"),
    ("between", "return nnx.merge(graph, jax.tree.map(mixed, first_weights, second_weights))",
     "nnx.update(first, jax.tree.map(mixed, first_weights, second_weights))\n    return first",
     "first has changed"),
    ("is_clear", "after.max()", "after.mean()", "2.35 is above"),
    ("is_clear", "before.min()", "before.max()", "2.35 is above"),
    ("is_clear", "after.max() <", "after.max() >", "all are lower, so"),
    ("is_clear", "before.min()", "(before.min() - 0.05)", "2.29 is below"),
    ("NormAfter", "attended = self.attention_norm(x + self.attention(x, rngs=rngs))",
     "attended = x + self.attention(self.attention_norm(x), rngs=rngs)", "differ by up to"),
    ("NormAfter", "attended = self.attention_norm(x + self.attention(x, rngs=rngs))",
     "attended = x + self.attention(x, rngs=rngs)", "without the norm after attention"),
    ("NormAfter", "return self.feed_forward_norm(attended + changed)",
     "return attended + changed", "without the norm after the MLP"),
    ("NormAfter", "self.feed_forward_norm(attended + changed)",
     "self.attention_norm(attended + changed)", "one norm for both"),
    ("NormAfter", "self.feed_forward_norm(attended + changed)",
     "self.feed_forward_norm(x + changed)", "added to the input of the block"),
    ("NormAfter", "self.attention_norm", "self.norm", "no weights attention_norm"),
    ("previous_score", "offset=-1", "offset=0", "on the token itself"),
    ("previous_score", "offset=-1", "offset=1", "rows are queries"),
    ("previous_score", "offset=-1", "offset=-2", "two tokens back"),
    ("previous_score", "mean(axis=(0, 2))", "mean(axis=0).sum(axis=-1)", "a sum over the queries"),
    ("previous_score", "mean(axis=(0, 2))", "mean(axis=0)", r"the shape \(3, 13\), not \(3,\)"),
    ("prefix_score", "-(period - 1)", "-period", "on the same token"),
    ("prefix_score", "-(period - 1)", "-(period - 2)", "two tokens after"),
    ("prefix_score", "after_the_same[..., 1:]", "after_the_same", "a query of the first copy"),
    ("prefix_score", "mean(axis=(0, 2))", "mean(axis=0).sum(axis=-1)", "a sum over the queries"),
    ("patched", "return jgpt.edit(model, {path: lambda _: found})", "return model",
     "nothing is replaced"),
    ("patched", "return jgpt.edit(model, {path: lambda _: found})", "return without",
     "of the model without the head"),
    ("patched", "lambda _: found", "jnp.zeros_like", "key is 0"),
    ("patched", 'f"layers.1.{part}"', '"layers.1.key"', "a patched key: the part is query"),
    ("patched", "jgpt.capture(without, path)", "jgpt.capture(model, path)", "nothing is replaced"),
]  # fmt: skip


def mistakes():
    """The mistakes; those before which a model is trained are slow."""
    for mistake in MISTAKES:
        marks = [pytest.mark.slow] if mistake[0] == "stuck" else []
        yield pytest.param(*mistake, marks=marks)


@pytest.mark.parametrize(("name", "right", "wrong", "message"), list(mistakes()))
def test_each_check_names_the_mistake(name, right, wrong, message):
    (lesson,) = [each for each in LESSONS if name in EXERCISES[each]]
    solution = EXERCISES[lesson][name].solution
    assert right in solution
    with pytest.raises(AssertionError, match=message):
        run(lesson, solution.replace(right, wrong))


@pytest.mark.parametrize(("lesson", "name"), [each for each in NAMES if each[0] != LESSONS[0]])
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
