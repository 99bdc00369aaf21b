"""The checks of lesson 18 accept its solutions, and name the mistakes that are planted in them."""

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
for found in student["exercises_in"](CELLS).values():
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


@pytest.mark.parametrize("name", PARTS)
def test_each_check_accepts_the_solution(name):
    run(name, PARTS[name].solution)


MISTAKES = [
    ("cross_entropy", "-of_targets.mean()", "of_targets.mean()", "negative"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets.sum()", "a sum: take the mean"),
    ("cross_entropy", "(logits, axis=-1)", "(logits, axis=1)", "a softmax over time"),
    ("cross_entropy", "jax.nn.log_softmax", "jax.nn.softmax", "without a logarithm"),
    ("cross_entropy", "@jgpt.typed\n", "", "not rejected by the annotations"),
    ("Embedding", " + self.position_embedding(positions)", "", "the tokens alone"),
    ("Embedding", "jnp.arange(tokens.shape[1])", "tokens % 7", "read with the tokens"),
    ("Embedding", "jnp.arange(tokens.shape[1])", "1 + jnp.arange(tokens.shape[1])", "begin at 1"),
    ("Embedding", "self.position_embedding =", "self.positions =", "no weights position_"),
    ("Head", " * self.head_dim**-0.5", "", "without a scale"),
    ("Head", "self.head_dim**-0.5", "self.embed_dim**-0.5", "the scale of `embed_dim`"),
    ("Head", "self.head_dim**-0.5", "self.head_dim**-1.0", "not by its square root"),
    ("Head", "jnp.where(mask, scores, -jnp.inf)", "scores", "without a mask"),
    ("Head", "jnp.tril", "jnp.triu", "an inverted mask"),
    ("Head", "-jnp.inf", "0.0", r"exp\(0\) is 1"),
    ("Head", "jnp.where(mask, scores", "jnp.where(~mask, scores", "isn't finite"),
    ("Head", "(masked, axis=-1)", "(masked, axis=1)", "over the queries"),
    ("Head", "query @ key.tr", "key @ query.tr", "exchanged"),
    ("Head", '"use_bias": False, ', "", "key.bias, query.bias, value.bias are too many"),
    ("Head", ' -> Float[Array, "batch time {self.head_dim}"]', "", "has no annotation"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "return jnp.concatenate(outputs, axis=-1)", "without their projection"),
    ("MultiHeadAttention", "(outputs, axis", "(outputs[::-1], axis", "reverse order"),
    ("MultiHeadAttention", "kernel_init=SMALL", "use_bias=False", "no weights projection.bias"),
    ("FeedForward", "jax.nn.relu(self.expansion(x))", "self.expansion(x)", "non-linearity"),
    ("FeedForward", "jax.nn.relu", "jax.nn.gelu", "a GELU"),
    ("FeedForward", "return self.projection(hidden)",
     "return jax.nn.relu(self.projection(hidden))", "ReLU at the end"),
    ("FeedForward", "4 * embed_dim", "2 * embed_dim", "24 hidden features"),
    ("Block", "attended = x + ", "attended = ", "attention without its residual"),
    ("Block", "return attended + ", "return ", "an MLP without its residual"),
    ("Block", "norm(attended)", "norm(x)", "both read the input"),
    ("Block", "self.feed_forward_norm(attended)", "self.attention_norm(attended)",
     "whose norm is attention's"),
    ("Block", "epsilon=1e-5, ", "", "epsilon of a norm is 1e-06"),
    ("GPT", "self.head(self.final_norm(x))", "self.head(x)", "without the final norm"),
    ("GPT", "in self.blocks", "in reversed(self.blocks)", "reverse order"),
    ("GPT", "x = block(x)", "x = self.blocks[0](x)", "the first block, repeated"),
    ("GPT", "return self.head(self.final_norm(x))",
     "return jax.nn.softmax(self.head(self.final_norm(x)))", "^the values are those of prob"),
    ("loss_of", "window[:, 1:]", "window[:, :-1]", "targets that are the inputs"),
    ("train_step", "optax.apply_updates(weights, updates)", "weights", "the old ones"),
    ("train_step", "return optax.apply_updates(weights, updates)", "return updates", "alone"),
    ("train_step", "(weights, updates)", "(weights, jax.tree.map(jnp.negative, updates))",
     "uphill"),
    ("train_step", "updates, optimizer_state =", "updates, _ =", "state is still the old one"),
    ("generate", "tokens[:, -model.block_size :]", "tokens", "isn't cropped"),
    ("generate", "-model.block_size :", ": model.block_size", "not to its last tokens"),
    ("generate", "[:, -1]", "[:, 0]", "at the last position"),
    ("generate", "jax.random.fold_in(key, step)", "key", "the same key"),
    ("generate", "jax.random.fold_in(key, step)",
     "jax.random.fold_in(jax.random.key(5), step)", "another key gives the same"),
    ("generate", ", logits)", ", jax.nn.softmax(logits) * 50)", "takes logits"),
    ("generate", "return tokens", "return tokens[:, 2:]", "return both"),
]  # fmt: skip


def mistakes():
    """The mistakes; those after the first of each part are slow together."""
    seen = set()
    for mistake in MISTAKES:
        marks = [pytest.mark.slow] if mistake[0] in seen else []
        seen.add(mistake[0])
        yield pytest.param(*mistake, marks=marks)


@pytest.mark.parametrize(("name", "right", "wrong", "message"), list(mistakes()))
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


def test_the_modules_that_students_get_do_not_hold_a_part():
    code = (ROOT / "notebooks" / "parts.py").read_text()
    for exercise in PARTS.values():
        statements, _ = exercise.statements
        plumbing = {"optax.apply_updates(weights,updates)", "nnx.merge(graph,weights)"}
        assert given_in(code, statements) <= plumbing


def test_the_lesson_says_how_many_lines_the_solutions_have():
    lines = {}
    for name, exercise in PARTS.items():
        solution, _, _ = exercise.solution.partition("# Check")
        lines[name] = len([line for line in solution.splitlines() if line])
    parts = [
        lines["cross_entropy"] + lines["Embedding"],
        lines["Head"],
        lines["MultiHeadAttention"],
        lines["FeedForward"],
        lines["Block"],
        lines["GPT"],
        lines["loss_of"] + lines["train_step"],
        lines["generate"],
    ]
    table = re.findall(r"^\| [^|]* \| (\d+) \|", CELLS[0].source, re.MULTILINE)
    assert list(map(int, table)) == parts
