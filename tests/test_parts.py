"""The checks of lesson 18 name the mistakes that are planted in its solutions."""

import ast
import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
LESSON = ROOT / "notebooks" / "18_write_your_gpt.ipynb"
sys.path.append(str(ROOT / "notebooks"))
student = runpy.run_path(str(ROOT / "notebooks" / "student.py"))
CELLS = nbformat.read(LESSON, as_version=4).cells
IMPORTS = """
import jax
import jax.numpy as jnp
import optax
import parts
from flax import nnx
from jaxtyping import Array, Float, Int

import jgpt

SMALL = nnx.initializers.normal(0.02)
"""
TRAINING = """
graph, weights = nnx.split(GPT(11, 7, 1, 2, 8, rngs=nnx.Rngs(0)))
optimizer = optax.adamw(1e-3, weight_decay=0.01)
window = jax.random.randint(jax.random.key(0), (3, 8), 0, 11)
"""
PARTS = {}
"""The exercises of the parts, by the name that a solution defines."""
for found in filter(None, map(student["exercise_of"], CELLS)):
    if "parts.problem_of_" in found.check:
        PARTS[found.names[0]] = found


def run(name: str, solution: str) -> None:
    """Run a part's solution and its check, after the solutions of the parts before it."""
    code = IMPORTS
    for other, exercise in PARTS.items():
        if other == "loss_of":
            code += TRAINING
        if other == name:
            break
        statements, _ = exercise.statements
        code += "\n\n".join(ast.unparse(statement) for statement in statements) + "\n\n"
    exec(compile(f"{code}\n{solution}\n", name, "exec"), {"__name__": name})


MISTAKES = [
    ("cross_entropy", "-of_targets.mean()", "of_targets.mean()", "negative"),
    ("Head", " * self.head_dim**-0.5", "", "without a scale"),
    ("Block", "attended = x + ", "attended = ", "attention without its residual"),
    ("generate", "tokens[:, -model.block_size :]", "tokens", "isn't cropped"),
]


@pytest.mark.parametrize(("name", "right", "wrong", "message"), MISTAKES)
def test_each_check_names_the_mistake(name, right, wrong, message):
    solution = PARTS[name].solution
    assert right in solution
    with pytest.raises(Exception, match=message):
        run(name, solution.replace(right, wrong))


def plain(text: str) -> str:
    return re.sub(r"\s", "", text)


def answers_of(solution: list[ast.stmt]) -> set[str]:
    """The expressions that a solution's functions compute, without spaces."""
    found = set()
    functions = [
        node
        for statement in solution
        for node in ast.walk(statement)
        if isinstance(node, ast.FunctionDef)
    ]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.Return) and node.value is not None:
                answer = plain(ast.unparse(node.value))
                if len(answer) > 12:
                    found.add(answer)
    return found


def given_in(text: str, solution: list[ast.stmt]) -> set[str]:
    return {answer for answer in answers_of(solution) if answer in plain(text)}


@pytest.mark.parametrize("name", PARTS)
def test_neither_task_nor_hint_nor_starter_holds_the_answer(name):
    exercise = PARTS[name]
    assert "<summary>Hint</summary>" in exercise.student_task
    statements, _ = exercise.statements
    given = f"{exercise.student_task}\n{exercise.starter}\n{exercise.check}"
    assert answers_of(statements)
    assert given_in(given, statements) == set()
    assert given_in(f"{given}\n{exercise.solution}", statements)  # the control
    assert "@jgpt.typed" not in exercise.starter
