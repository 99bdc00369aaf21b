"""The checks of what one writes in lessons 1, 3, 4, 5 and 18.

They accept solutions, also unusual ones, and name the mistakes that are planted in them.
"""

import ast
import importlib
import linecache
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "notebooks"))
mine = importlib.import_module("mine")
student = runpy.run_path(str(ROOT / "notebooks" / "student.py"))
IMPORTS = """
import jax
import jax.numpy as jnp
import mine
import optax
import parts
from flax import nnx
from given import *
from jaxtyping import Array, Float, Int

import jgpt

SMALL = nnx.initializers.normal(0.02)
"""
TRAINING = """
graph, weights = nnx.split(GPT(11, 7, 1, 2, 8, rngs=nnx.Rngs(0)))
window = jax.random.randint(jax.random.key(0), (1, 8), 0, 11)
"""
PARTS = {}
"""The exercises of the parts, by the name that a solution defines."""
LESSON_OF = {}
for lesson in ("01", "03", "04", "05", "18"):
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    for found in student["exercises_in"](nbformat.read(path, as_version=4).cells).values():
        if "parts.problem_of_" in found.check:
            PARTS[found.names[0]] = found
            LESSON_OF[found.names[0]] = lesson


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of a lesson, in which parts are saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(name: str, solution: str, before: str = "") -> None:
    """Run a part's solution and its check, with the given parts beside it."""
    namespace: dict = {"__name__": name}
    exec(IMPORTS + before, namespace)
    if name == "loss_of":
        statements, _ = PARTS["GPT"].statements
        exec("\n\n".join(map(ast.unparse, statements)) + TRAINING, namespace)
    lines = [f"{line}\n" for line in solution.splitlines()]
    linecache.cache[name] = (len(solution), None, lines, name)  # as a notebook keeps a cell
    exec(compile("".join(lines), name, "exec"), namespace)


@pytest.mark.parametrize("name", PARTS)
def test_each_check_accepts_the_solution(name, folder):
    run(name, PARTS[name].solution)
    if name in mine.PARTS:
        assert list(folder.glob("*.py")) == [folder / mine.file_of(name)]
        run(name, PARTS[name].solution.replace(f"({name})", f'(mine.part("{name}"))', 1))


def test_the_given_parts_are_the_solutions():
    given = {
        statement.name: ast.dump(statement)
        for statement in ast.parse((ROOT / "notebooks" / "given.py").read_text()).body
        if isinstance(statement, ast.FunctionDef | ast.ClassDef)
    }
    assert tuple(given) == mine.PARTS
    for name, text in given.items():
        statements, _ = PARTS[name].statements
        assert text == ast.dump(statements[0])


UNUSUAL = [
    ("cross_entropy", "-of_targets.mean()", "-jnp.sum(of_targets) / targets.size"),
    ("cross_entropy", "jax.nn.log_softmax(logits, axis=-1)",
     "logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)"),
    ("cross_entropy",
     "jnp.take_along_axis(\n        log_probability, targets[..., None], axis=-1\n    )",
     "jax.vmap(jax.vmap(lambda row, target: row[target]))(log_probability, targets)"),
    ("cross_entropy", "-of_targets.mean()", "-jnp.einsum('bti->', of_targets) / targets.size"),
    ("Embedding", "jax.random.normal(rngs.params(), (rows, features))",
     "jax.random.normal(jax.random.fold_in(rngs.params(), 5), (rows, features))"),
    ("Embedding", "self.table[...][tokens]", "jnp.take(self.table[...], tokens, axis=0)"),
    ("Embedding", "self.table[...][tokens]",
     "jax.nn.one_hot(tokens, len(self.table[...])) @ self.table[...]"),
    ("train_loop", "losses.append(loss)", "losses += [float(loss)]"),
    ("train_loop", "train_step", "one_step"),
    ("Head", "query @ key.transpose(0, 2, 1)", "jnp.einsum('bqd,bkd->bqk', query, key)"),
    ("Head", "weights @ value", "jnp.einsum('bqk,bkd->bqd', weights, value)"),
    ("Head", "weights @ value", "jax.vmap(jnp.matmul)(weights, value)"),
    ("Head", "-jnp.inf", "-1e30"),
    ("Head", "jnp.tril(jnp.ones((time, time), bool))",
     "jnp.arange(time)[:, None] >= jnp.arange(time)"),
    ("Head", "head_dim**-0.5", "(1 / jnp.sqrt(head_dim))"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jnp.stack(outputs, axis=2).reshape(x.shape)"),
    ("MultiHeadAttention",
     "nnx.List(\n            Head(embed_dim, head_dim, rngs=rngs) for _ in "
     "range(num_heads)\n        )",
     "nnx.List([Head(embed_dim, head_dim, rngs=rngs) for _ in range(num_heads)])"),
    ("LayerNorm", "(centred**2).mean(axis=-1, keepdims=True)",
     "jnp.var(x, axis=-1, keepdims=True)"),
    ("LayerNorm", "centred / jnp.sqrt(variance + 1e-5)",
     "centred * jax.lax.rsqrt(variance + 1e-5)"),
    ("FeedForward", "jax.nn.relu(self.expansion(x))", "jnp.maximum(self.expansion(x), 0)"),
    ("FeedForward", "self.projection(hidden)",
     "jnp.einsum('bth,he->bte', hidden, self.projection.kernel[...]) + self.projection.bias[...]"),
    ("Block", "LayerNorm(embed_dim, rngs=rngs)",
     "nnx.LayerNorm(embed_dim, epsilon=1e-5, rngs=rngs)"),
    ("Block", "normed", "h"),
    ("loss_of", "window[:, 1:]", "jnp.roll(window, -1, axis=1)[:, :-1]"),
    ("generate", "jax.random.fold_in(key, step)", "jax.random.split(key, count)[step]"),
]  # fmt: skip
"""Right answers as others write them."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "usual", "unusual"), UNUSUAL)
def test_each_check_accepts_unusual_answers(name, usual, unusual):
    solution = PARTS[name].solution
    assert usual in solution
    run(name, solution.replace(usual, unusual))


def test_a_part_that_needs_another_cell_is_not_saved(folder):
    solution = PARTS["cross_entropy"].solution.replace("targets[..., None]", "column(targets)")
    another = "\ndef column(x):\n    return x[..., None]"
    with pytest.raises(NameError, match=r"cross_entropy is right, but not saved: .* column "):
        run("cross_entropy", solution, before=another)
    assert list(folder.iterdir()) == []


def test_a_saved_part_is_used_and_written_anew(folder, capsys):
    assert mine.part("Head").__module__ == "given"
    for number in (1, 2):
        marked = f"Head.mark = {number}\n\n# Check"
        run("Head", PARTS["Head"].solution.replace("# Check", marked))
        assert mine.part("Head").mark == number
        assert "yours, of my_head.py" in capsys.readouterr().out
    run("MultiHeadAttention", PARTS["MultiHeadAttention"].solution)
    heads = mine.part("MultiHeadAttention").__init__.__globals__
    assert heads["Head"].mark == 2


MISTAKES = [(name, *mistake) for name in PARTS for mistake in student["MISTAKES"][name]]
"""A part, what is replaced by what in its solution, and words of what the check says."""


def mistakes():
    """The mistakes; those after the first of each part are slow together."""
    seen = set()
    for mistake in MISTAKES:
        marks = [pytest.mark.slow] if mistake[0] in seen else []
        seen.add(mistake[0])
        yield pytest.param(*mistake, marks=marks)


@pytest.mark.parametrize(("name", "right", "wrong", "message"), list(mistakes()))
def test_each_check_names_the_mistake(name, right, wrong, message, folder):
    solution = PARTS[name].solution
    assert right in solution
    with pytest.raises(Exception, match=re.escape(message)):
        run(name, solution.replace(right, wrong))
    assert list(folder.iterdir()) == []  # what is wrong is not saved


def test_each_lesson_has_forty_mistakes_of_which_nine_tenths_are_named():
    of_lessons = Counter(LESSON_OF[name] for name, *_ in MISTAKES)
    unnamed = Counter(
        LESSON_OF[name] for name, _, _, message in MISTAKES if message == "differ by up to"
    )
    for lesson, count in of_lessons.items():
        assert count >= 40, lesson
        assert unnamed[lesson] <= 0.1 * count, lesson


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
