"""The checks of lessons 20 and 21 accept their solutions, and name planted mistakes."""

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
LESSONS = ("20_the_ladder", "21_induction_heads")
IMPORTS = """
import functools

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
from jgpt.nn.layers import Embedding, LayerNorm, Linear

TIME = 32
LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""
UNTRAINED = """
model = parts._loud(Layers(2, rngs=nnx.Rngs(0)))
test_tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, 26)
previous_head = 1
"""


def exercises_of(lesson: str) -> dict[str, Any]:
    """The exercises, by the first name that a solution defines."""
    found = {}
    for cell in nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4).cells:
        exercise = student["exercise_of"](cell)
        if exercise is not None:
            found[exercise.names[0]] = exercise
    return found


def definitions_of(lesson: str) -> str:
    """The functions and classes of a lesson's cells."""
    parts = []
    for cell in nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            for statement in ast.parse(cell.source).body:
                if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    parts.append(ast.unparse(statement))
    return "\n\n".join(parts)


EXERCISES = {lesson: exercises_of(lesson) for lesson in LESSONS}
NAMES = [(lesson, name) for lesson in LESSONS for name in EXERCISES[lesson]]


def run(lesson: str, solution: str) -> None:
    """Run a solution and its check."""
    code = f"{IMPORTS}\n{definitions_of(lesson)}\n"
    if lesson == "21_induction_heads":
        code += UNTRAINED
    exec(compile(f"{code}\n{solution}\n", lesson, "exec"), {"__name__": lesson})


@pytest.mark.parametrize(("lesson", "name"), NAMES)
def test_each_check_accepts_the_solution(lesson, name):
    run(lesson, EXERCISES[lesson][name].solution)


MISTAKES = [
    ("is_clear", "after.max()", "after.mean()", "2.35 is above"),
    ("is_clear", "before.min()", "before.max()", "2.35 is above"),
    ("is_clear", "after.max() <", "after.max() >", "all are lower, so"),
    ("is_clear", "before.min()", "(before.min() - 0.05)", "2.29 is below"),
    ("NormAfter", "attended = self.attention_norm(x + self.attention(x, rngs=rngs))",
     "attended = x + self.attention(self.attention_norm(x), rngs=rngs)", "differ from jgpt's"),
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


@pytest.mark.parametrize(("name", "right", "wrong", "message"), MISTAKES)
def test_each_check_names_the_mistake(name, right, wrong, message):
    (lesson,) = [each for each in LESSONS if name in EXERCISES[each]]
    solution = EXERCISES[lesson][name].solution
    assert right in solution
    with pytest.raises(AssertionError, match=message):
        run(lesson, solution.replace(right, wrong))


@pytest.mark.parametrize(("lesson", "name"), NAMES)
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
