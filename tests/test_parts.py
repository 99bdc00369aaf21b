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
window = jax.random.randint(jax.random.key(0), (3, 8), 0, 11)
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


MISTAKES = [
    ("cross_entropy", "-of_targets.mean()", "of_targets.mean()", "its negative"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets.sum()", "a sum: take the mean"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets.mean(axis=0).sum()", "a sum over time"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets.mean(axis=1).sum()",
     "a sum over the batch"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets", "take the mean of all"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets.mean(axis=1)", "take the mean of all"),
    ("cross_entropy", "return -of", "-of", "nothing is returned"),
    ("cross_entropy", "(logits, axis=-1)", "(logits, axis=1)", "a softmax over time"),
    ("cross_entropy", "(logits, axis=-1)", "(logits, axis=0)", "a softmax over the batch"),
    ("cross_entropy", "(logits, axis=-1)", "(logits, axis=None)", "a softmax over all logits"),
    ("cross_entropy", "jax.nn.log_softmax(logits, axis=-1)", "logits", "not normalised"),
    ("cross_entropy", "jax.nn.log_softmax", "jax.nn.softmax", "without a logarithm"),
    ("cross_entropy", "jax.nn.log_softmax(logits, axis=-1)",
     "jax.nn.log_softmax(jax.nn.softmax(logits))", "two softmaxes"),
    ("cross_entropy", "jax.nn.log_softmax(logits, axis=-1)", "jnp.log2(jax.nn.softmax(logits))",
     "base 2"),
    ("cross_entropy", "-of_targets.mean()", "-log_probability.mean()", "the whole vocabulary"),
    ("cross_entropy", "-of_targets.mean()", "-log_probability.max(-1).mean()", "the largest"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets[:, -1].mean()", "the last position"),
    ("cross_entropy", "-of_targets.mean()", "jnp.exp(-of_targets.mean())", "perplexity"),
    ("cross_entropy", "-of_targets.mean()", "-of_targets[0].mean()", "the first sequence alone"),
    ("cross_entropy", "jax.nn.log_softmax(logits, axis=-1)",
     "jnp.log(jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True))",
     "which doesn't overflow"),
    ("Embedding", "return self.table[...][tokens]", "self.table[...][tokens]",
     "is there a `return`"),
    ("Embedding", "self.table", "self.weight", "no weights table"),
    ("Embedding", "nnx.Param(deviation * numbers)", "nnx.Variable(deviation * numbers)",
     "nnx.Param"),
    ("Embedding", "deviation * numbers", "numbers", "deviation of"),
    ("Embedding", "deviation * numbers", "0.02 * numbers", "with `deviation=1.0`"),
    ("Embedding", "deviation * numbers", "deviation**2 * numbers", "deviation of 0.00"),
    ("Embedding", "(rows, features))", "(features, rows))", "has the shape"),
    ("Embedding", "deviation * numbers", "deviation * numbers * 0", "deviation of 0.00"),
    ("Embedding", "jax.random.normal", "jax.random.uniform", "deviation of 0.01"),
    ("Embedding", "rngs.params()", "jax.random.key(0)", "another seed gives the same"),
    ("Embedding", "[tokens]", "[tokens - 1]", "the row before"),
    ("Embedding", "[tokens]", "[(tokens + 1) % len(self.table[...])]", "the row after"),
    ("Embedding", "[tokens]", "[:, tokens]", "shape"),
    ("Embedding", "[tokens]", "[tokens[0]]", "shape"),
    ("Embedding", "self.table[...][tokens]", "jax.nn.softmax(self.table[...][tokens])",
     "a softmax"),
    ("Embedding", "self.table[...][tokens]", "self.table[...][tokens].mean(axis=1)", "shape"),
    ("Embedding", "self.table[...][tokens]",
     "self.table[...][jnp.arange(tokens.shape[1]) + 0 * tokens]", "of the position"),
    ("Embedding", "deviation * numbers", "deviation * numbers[:1].repeat(rows, 0)", "all rows"),
    ("train_loop", "weights, state, loss = train_step", "weights, _, loss = train_step",
     "state is still"),
    ("train_loop", "weights, state, loss = train_step", "_, state, loss = train_step",
     "the old ones"),
    ("train_loop", "    for step in range(steps):\n",
     "    for step in range(steps):\n        state = optimizer.init(weights)\n", "state is still"),
    ("train_loop", "    @jax.jit\n", "", "compile the step"),
    ("train_loop", "batch_at(step)", "batch_at(0)", "the first batch"),
    ("train_loop", "batch_at(step)", "batch_at(step + 1)", "begin at 1"),
    ("train_loop", "range(steps)", "range(1, steps + 1)", "begin at 1"),
    ("train_loop", "range(steps)", "range(steps - 1)", "5 losses"),
    ("train_loop", "range(steps)", "reversed(range(steps))", "reverse order"),
    ("train_loop", "return weights, losses", "return losses, weights", "come first"),
    ("train_loop", "return weights, losses", "return weights", "returns two things"),
    ("train_loop", "return weights, losses", "return weights, loss", "one loss"),
    ("train_loop", "    return weights, losses", "    weights, losses", "nothing is returned"),
    ("train_loop", "optax.apply_updates(weights, updates)", "updates", "alone"),
    ("train_loop", "optax.apply_updates(weights, updates)",
     "jax.tree.map(lambda w, u: w - u, weights, updates)", "uphill"),
    ("train_loop", "optax.apply_updates(weights, updates)",
     "jax.tree.map(lambda w, g: w - g, weights, gradient)", "as it is"),
    ("train_loop", "optax.apply_updates(weights, updates)", "weights", "the old ones"),
    ("train_loop", "(gradient, state, weights)", "(gradient, state)", "params"),
    ("train_loop", "jax.value_and_grad(loss_of)(weights, batch)",
     "loss_of(weights, batch), jax.tree.map(jnp.negative, jax.grad(loss_of)(weights, batch))",
     "uphill"),
    ("train_loop", "weights, updates), state, loss",
     "weights, updates), state, loss_of(optax.apply_updates(weights, updates), batch)",
     "before the step"),
    ("train_loop", "losses.append(loss)", "losses = [loss]", "1 losses"),
    ("Head", " * head_dim**-0.5", "", "without a scale"),
    ("Head", "head_dim**-0.5", "x.shape[-1] ** -0.5", "the scale of `embed_dim`"),
    ("Head", "head_dim**-0.5", "head_dim**-1.0", "not by its square root"),
    ("Head", "head_dim**-0.5", "head_dim**0.5", "multiplied by the square root"),
    ("Head", "head_dim**-0.5", "x.shape[1] ** -0.5", "the scale of `time`"),
    ("Head", "return weights @ value", "return weights @ value * head_dim**-0.5",
     "times what they"),
    ("Head", "jnp.where(mask, scores, -jnp.inf)", "scores", "without a mask"),
    ("Head", "jnp.tril", "jnp.triu", "an inverted mask"),
    ("Head", "jnp.where(mask, scores", "jnp.where(~mask, scores", "last position"),
    ("Head", "bool))", "bool), k=-1)", "the first position has no key"),
    ("Head", "bool))", "bool), k=1)", "one position of the future"),
    ("Head", "-jnp.inf", "0.0", "is 1"),
    ("Head", "(masked, axis=-1)", "(masked, axis=1)", "over the queries"),
    ("Head", "(masked, axis=-1)", "(masked, axis=0)", "not over the batch"),
    ("Head", "(masked, axis=-1)", "(masked, axis=None)", "over all numbers"),
    ("Head", "jax.nn.softmax(masked, axis=-1)", "jax.nn.softmax(scores) * mask",
     "after the softmax"),
    ("Head", "jax.nn.softmax(masked, axis=-1)", "jnp.where(mask, scores, 0)", "without a softmax"),
    ("Head", "weights @ value", "weights.swapaxes(1, 2) @ value", "weights that are transposed"),
    ("Head", "weights @ value", "weights @ key", "the keys in place of the values"),
    ("Head", "weights @ value", "weights @ query", "the queries in place of the values"),
    ("Head", "weights @ value", "weights", "shape"),
    ("Head", "weights @ value", "value", "the values alone"),
    ("Head", "weights @ value", "mask @ value", "a sum of the values"),
    ("Head", "weights @ value", "(mask / mask.sum(-1, keepdims=True)) @ value", "plain mean"),
    ("Head", "weights @ value", "weights @ x", "shape"),
    ("Head", "weights @ value", "weights @ value + x[..., :head_dim]", "residual"),
    ("Head", "weights @ value", "(weights @ value)[:, -1]", "shape"),
    ("Head", "weights @ value", "(weights @ value).mean(axis=1)", "shape"),
    ("Head", "weights @ value", "(weights @ value).swapaxes(1, 2)", "transposed"),
    ("Head", "query @ key.tr", "key @ query.tr", "exchanged"),
    ("Head", "query @ key.tr", "query @ query.tr", "the queries in place of the keys"),
    ("Head", "query @ key.tr", "key @ key.tr", "the keys in place of the queries"),
    ("Head", "query @ key.tr", "value @ key.tr", "the values in place of the queries"),
    ("Head", "value = self.value(x)", "query, value = self.value(x), query", "queries and values"),
    ("Head", "value = self.value(x)", "value = self.key(x)", "the keys in place of the values"),
    ("Head", "\"use_bias\": False, ", "", "key.bias, query.bias, value.bias are too many"),
    ("Head", "self.query =", "self.queries =", "no weights query.kernel"),
    ("Head", "self.value = nnx.Linear(embed_dim, head_dim",
     "self.value = nnx.Linear(embed_dim, embed_dim", "has the shape"),
    ("Head", "\"kernel_init\": SMALL, ", "", "begins with a deviation"),
    ("Head", "return weights @ value", "weights @ value", "is there a `return`"),
    ("Head", "time = x.shape[1]", "time = 5", "time 4"),
    ("Head", "key.transpose(0, 2, 1)", "key", "head_dim 4"),
    ("Head", "key.transpose(0, 2, 1)", "key.reshape(key.shape[0], -1, key.shape[1])",
     "reshaped: exchange"),
    ("Head", "weights @ value", "jnp.roll(weights @ value, 1, axis=1)", "the one before it"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "return jnp.concatenate(outputs, axis=-1)", "without their projection"),
    ("MultiHeadAttention", "return self", "self", "is there a `return`"),
    ("MultiHeadAttention", "(outputs, axis", "(outputs[::-1], axis", "reverse order"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jnp.stack(outputs, axis=-1).reshape(x.shape)", "interleaved"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jnp.stack(outputs, axis=1).reshape(x.shape)", "time and heads are mixed"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jnp.tile(outputs[0], (1, 1, len(outputs)))", "the first head, repeated"),
    ("MultiHeadAttention", "head(x) for head in self.heads",
     "self.heads[0](x) for _ in self.heads", "the first head, repeated"),
    ("MultiHeadAttention", "head(x) for head in self.heads",
     "self.heads[-1](x) for _ in self.heads", "the last head, repeated"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)", "sum(outputs)", "head_dim 4"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jnp.tile(sum(outputs), (1, 1, len(outputs)))", "summed"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jnp.tile(sum(outputs) / len(outputs), (1, 1, len(outputs)))", "mean is taken"),
    ("MultiHeadAttention", "outputs, axis=-1", "outputs, axis=1", "head_dim 4"),
    ("MultiHeadAttention", "outputs, axis=-1", "outputs, axis=0", "head_dim 4"),
    ("MultiHeadAttention", "kernel_init=SMALL", "kernel_init=SMALL, use_bias=False",
     "no weights projection.bias"),
    ("MultiHeadAttention", ", kernel_init=SMALL", "", "projection.kernel begins"),
    ("MultiHeadAttention", "self.projection(jnp.concatenate(outputs, axis=-1))",
     "jnp.concatenate(outputs, axis=-1) @ self.projection.kernel[...]", "without its bias"),
    ("MultiHeadAttention", "self.projection(jnp.concatenate(outputs, axis=-1))",
     "jnp.concatenate(outputs, axis=-1) @ self.projection.kernel[...].T + "
     "self.projection.bias[...]",
     "transposed kernel"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "joined = jnp.concatenate(outputs, axis=-1)\n        return joined + "
     "self.projection(joined)",
     "added to the heads"),
    ("MultiHeadAttention", "self.projection(jnp.concatenate(outputs, axis=-1))",
     "self.projection(x)", "project the heads"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "return jnp.concatenate([head(self.projection(x)) for head in self.heads], axis=-1)",
     "before the heads"),
    ("MultiHeadAttention", "self.projection(jnp.concatenate(outputs, axis=-1))",
     "self.projection(self.projection(jnp.concatenate(outputs, axis=-1)))", "two projections"),
    ("MultiHeadAttention", "self.projection(jnp.concatenate(outputs, axis=-1))",
     "jax.nn.relu(self.projection(jnp.concatenate(outputs, axis=-1)))", "ReLU after"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jax.nn.relu(jnp.concatenate(outputs, axis=-1))", "ReLU before"),
    ("MultiHeadAttention", "return self", "return x + self", "residual"),
    ("MultiHeadAttention", "jnp.concatenate(outputs, axis=-1)",
     "jax.nn.softmax(jnp.concatenate(outputs, axis=-1))", "normalised"),
    ("MultiHeadAttention", "for _ in range(num_heads)", "for _ in range(num_heads - 1)",
     "2 heads, not 3"),
    ("MultiHeadAttention", "for _ in range(num_heads)", "for _ in range(1)", "1 heads, not 3"),
    ("MultiHeadAttention", "head_dim = embed_dim // num_heads", "head_dim = embed_dim",
     "has the shape"),
    ("MultiHeadAttention", "head_dim = embed_dim // num_heads", "head_dim = num_heads",
     "has the shape"),
    ("MultiHeadAttention",
     "nnx.List(\n            Head(embed_dim, head_dim, rngs=rngs) for _ in "
     "range(num_heads)\n        )",
     "nnx.List([Head(embed_dim, head_dim, rngs=rngs)] * num_heads)",
     "the same module several times"),
    ("MultiHeadAttention", "self.heads", "self.parts", "no weights heads"),
    ("MultiHeadAttention", "self.projection", "self.output", "no weights projection"),
    ("MultiHeadAttention", "embed_dim, embed_dim, kernel_init", "embed_dim, head_dim, kernel_init",
     "has the shape"),
    ("MultiHeadAttention", "for head in self.heads]",
     "for head in self.heads]\n        outputs[-1] = 0 * outputs[-1]", "one is missing"),
    ("MultiHeadAttention", "head(x) for head in self.heads",
     "head(x.at[..., : 4 * number].set(0).at[..., 4 * number + 4 :].set(0)) for "
     "number, head in enumerate(self.heads)",
     "a slice of x"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "return self.projection(jnp.concatenate(outputs, axis=-1)).swapaxes(1, 2)", "transposed"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "return self.projection(jnp.concatenate(outputs, axis=-1))[:, -1]", "shape"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "return self.projection(jnp.concatenate(outputs, axis=-1)) / len(outputs)", "0.333 times"),
    ("MultiHeadAttention", "return self.projection(jnp.concatenate(outputs, axis=-1))",
     "return outputs", "of the type list"),
    ("MultiHeadAttention", "head(x) for head in self.heads",
     "head(x[::-1]) for head in self.heads", "sequences"),
    ("LayerNorm", "return normed", "normed", "is there a `return`"),
    ("LayerNorm", "x.mean(axis=-1,", "x.mean(axis=1,", "a mean over time"),
    ("LayerNorm", "axis=-1", "axis=1", "over time"),
    ("LayerNorm", "axis=-1", "axis=0", "over the batch"),
    ("LayerNorm", "axis=-1", "axis=(0, 1)", "batch norm"),
    ("LayerNorm", "axis=-1", "axis=(1, 2)", "for each sequence"),
    ("LayerNorm", "normed * self.scale[...] + self.bias[...]", "normed * self.scale[...]",
     "without its bias"),
    ("LayerNorm", "normed * self.scale[...] + self.bias[...]", "normed + self.bias[...]",
     "without its scale"),
    ("LayerNorm", "normed * self.scale[...] + self.bias[...]", "normed", "without scale and bias"),
    ("LayerNorm", "normed * self.scale[...] + self.bias[...]",
     "(normed + self.bias[...]) * self.scale[...]", "add it last"),
    ("LayerNorm", "jnp.sqrt(variance + 1e-5)", "(variance + 1e-5)", "take its root"),
    ("LayerNorm", "variance + 1e-5", "variance", "nan"),
    ("LayerNorm", "variance + 1e-5", "variance + 1e-3", "an epsilon of 1e-3"),
    ("LayerNorm", "x - x.mean(axis=-1, keepdims=True)", "x", "RMS norm"),
    ("LayerNorm", "centred / jnp.sqrt", "x / jnp.sqrt", "not centred"),
    ("LayerNorm", "jnp.ones(features)", "jnp.zeros(features)", "scale begins"),
    ("LayerNorm", "self.scale", "self.gamma", "no weights scale"),
    ("LayerNorm", "(centred**2).mean(axis=-1, keepdims=True)",
     "x.var(axis=-1, keepdims=True, ddof=1)", "n - 1"),
    ("FeedForward", "jax.nn.relu(self.expansion(x))", "self.expansion(x)", "non-linearity"),
    ("FeedForward", "jax.nn.relu", "jax.nn.gelu", "a GELU"),
    ("FeedForward", "jax.nn.relu", "jnp.tanh", "a tanh"),
    ("FeedForward", "jax.nn.relu", "jax.nn.softmax", "a softmax"),
    ("FeedForward", "return self.projection(hidden)",
     "return jax.nn.relu(self.projection(hidden))", "ReLU at the end"),
    ("FeedForward", "return self.projection(hidden)", "return x + self.projection(hidden)",
     "residual"),
    ("FeedForward", "return self.projection(hidden)", "return hidden", "shape"),
    ("FeedForward", "return self", "self", "is there a `return`"),
    ("FeedForward", "4 * embed_dim", "2 * embed_dim", "24 hidden features"),
    ("FeedForward", "\"kernel_init\": SMALL, ", "", "begins with a deviation"),
    ("FeedForward", "{\"kernel", "{\"use_bias\": False, \"kernel", "no weights expansion.bias"),
    ("FeedForward", "self.expansion(x)", "self.expansion(jax.nn.relu(x))", "ReLU of the input"),
    ("FeedForward", "self.projection", "self.contraction", "no weights projection"),
    ("Block", "attended = x + ", "attended = ", "attention without its residual"),
    ("Block", "return attended + ", "return ", "an MLP without its residual"),
    ("Block", "norm(attended)", "norm(x)", "both read the input"),
    ("Block", "self.feed_forward_norm(attended)", "self.attention_norm(attended)",
     "whose norm is attention's"),
    ("Block", "self.feed_forward_norm(attended)", "attended", "without the norm before the MLP"),
    ("Block", "self.attention(self.attention_norm(x))", "self.attention(x)",
     "without the norm before attention"),
    ("Block", "return attended +", "return x +", "added to the input of the block"),
    ("Block", "return attended + self.feed_forward(normed)", "return attended", "attention alone"),
    ("Block", "return attended + self.feed_forward(normed)",
     "return normed + self.feed_forward(normed)", "on the stream before the MLP"),
    ("Block", "attended = x + self.attention(self.attention_norm(x))",
     "x = self.attention_norm(x)\n        attended = x + self.attention(x)",
     "norm on the stream before attention"),
    ("Block", "self.attention(self.attention_norm(x))", "self.attention_norm(self.attention(x))",
     "of what attention returns"),
    ("Block", "return attended", "attended", "is there a `return`"),
    ("Block", "self.feed_forward_norm = LayerNorm(embed_dim, rngs=rngs)",
     "self.feed_forward_norm = self.attention_norm", "are the same module"),
    ("Block", "self.feed_forward = ", "self.mlp = ", "no weights feed_forward"),
    ("Block", "return attended", "return x + attended", "added twice"),
    ("Block", "attended = x + ", "attended = x * ", "a product"),
    ("GPT", "self.head(self.final_norm(x))", "self.head(x)", "without the final norm"),
    ("GPT", "in self.blocks", "in reversed(self.blocks)", "reverse order"),
    ("GPT", "x = block(x)", "x = self.blocks[0](x)", "the first block, repeated"),
    ("GPT", "            x = block(x)\n", "            block(x)\n", "without its blocks"),
    ("GPT", "            x = block(x)\n", "            last = block(x)\n        x = last\n",
     "the last block alone"),
    ("GPT", "return self.head(self.final_norm(x))",
     "return jax.nn.softmax(self.head(self.final_norm(x)))", "probabilities"),
    ("GPT", "return self.head(self.final_norm(x))",
     "return jax.nn.log_softmax(self.head(self.final_norm(x)))", "log probabilities"),
    ("GPT", " + self.position_embedding(positions)", "", "the tokens alone"),
    ("GPT", "jnp.arange(tokens.shape[1])", "1 + jnp.arange(tokens.shape[1])", "begin at 1"),
    ("GPT", "jnp.arange(tokens.shape[1])", "tokens", "read with the tokens"),
    ("GPT", "jnp.arange(tokens.shape[1])", "jnp.arange(tokens.shape[1])[::-1]",
     "positions in reverse order"),
    ("GPT", "jnp.arange(tokens.shape[1])", "jnp.zeros(tokens.shape[1], int)",
     "one position for all"),
    ("GPT", "jnp.arange(tokens.shape[1])", "jnp.arange(tokens.shape[0])", "batch is 3, time 5"),
    ("GPT", "self.token_embedding(tokens) +", "self.token_embedding(tokens) *",
     "a product of token"),
    ("GPT", "x = self.token_embedding(tokens) + self.position_embedding(positions)",
     "x = self.position_embedding(tokens) + self.token_embedding(positions)",
     "two tables, exchanged"),
    ("GPT", "self.vocab_size = vocab_size\n", "self.vocabulary = vocab_size\n",
     "doesn't keep `vocab_size`"),
    ("GPT", "        self.block_size = block_size\n", "", "doesn't keep `block_size`"),
    ("GPT", "for _ in range(num_layers)", "for _ in range(1)", "1 blocks, not 2"),
    ("GPT",
     "nnx.List(\n            Block(embed_dim, num_heads, rngs=rngs) for _ in "
     "range(num_layers)\n        )",
     "nnx.List([Block(embed_dim, num_heads, rngs=rngs)] * num_layers)",
     "the same module several times"),
    ("GPT", "vocab_size, kernel_init=SMALL", "vocab_size, use_bias=False, kernel_init=SMALL",
     "no weights head.bias"),
    ("GPT", ", kernel_init=SMALL", "", "head.kernel begins"),
    ("GPT", "return self.head(self.final_norm(x))", "return self.head(self.final_norm(x))[:, -1]",
     "returned a wrong result"),
    ("GPT", "@jgpt.typed\n    def __call__", "def __call__", "not rejected by the annotations"),
    ("loss_of", "window[:, 1:]", "window[:, :-1]", "targets that are the inputs"),
    ("loss_of", "window[:, :-1]", "window[:, 1:]", "inputs that are the targets"),
    ("loss_of", "cross_entropy(model(window[:, :-1]), window[:, 1:])",
     "cross_entropy(model(window[:, 1:]), window[:, :-1])", "a shift backwards"),
    ("loss_of", "nnx.merge(graph, weights)", "GPT(11, 7, 1, 2, 8, rngs=nnx.Rngs(0))",
     "make the model of `weights`"),
    ("loss_of", "return cross_entropy", "return -cross_entropy", "the negative"),
    ("loss_of", "return cross", "cross", "is there a `return`"),
    ("loss_of", "model(window[:, :-1])", "jax.nn.softmax(model(window[:, :-1]))",
     "a loss of probabilities"),
    ("loss_of", "cross_entropy(model(window[:, :-1]), window[:, 1:])",
     "cross_entropy(model(window[:, :-1])[:, -1:], window[:, -1:])", "the last position alone"),
    ("generate", "tokens[:, -model.block_size :]", "tokens", "isn't cropped"),
    ("generate", "-model.block_size :", ": model.block_size", "not to its last tokens"),
    ("generate", "[:, -1]", "[:, 0]", "at the last position"),
    ("generate", "jax.random.fold_in(key, step)", "key", "the same key"),
    ("generate", "jax.random.fold_in(key, step)", "jax.random.fold_in(jax.random.key(5), step)",
     "another key gives the same"),
    ("generate", ", logits)", ", jax.nn.softmax(logits) * 50)", "takes logits"),
    ("generate", "return tokens", "return tokens[:, 2:]", "return both"),
    ("generate", "jax.random.categorical(jax.random.fold_in(key, step), logits)",
     "logits.argmax(axis=-1)", "the likeliest token is always"),
    ("generate", "return tokens", "return drawn", "return both"),
    ("generate", "return tokens", "tokens", "is there a `return`"),
    ("generate", "range(count)", "range(count - 1)", "return both"),
    ("generate", "[tokens, drawn[:, None]]", "[drawn[:, None], tokens]", "begin with the prompt"),
]  # fmt: skip
"""A part, what is replaced by what in its solution, and what the check says."""


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
    with pytest.raises(Exception, match=message):
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
