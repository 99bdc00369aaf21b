"""Each door speaks its own language: keywords in Python, flags on the command line."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import jgpt
from jgpt.cli.commands.export import export
from jgpt.cli.commands.plot import plot
from jgpt.cli.commands.sample import sample
from jgpt.cli.options import TRAIN, in_flags

SAMPLE, EXPORT, PLOT = (inspect.signature(it).parameters for it in (sample, export, plot))
IN_FLAGS = [
    (TRAIN, "r exists: resume=True continues it", "r exists: --resume continues it"),
    (TRAIN, "head_bias=True: use_bias=False", "--head-bias: --no-use-bias"),
    (TRAIN, "out='my run' must be", "--out 'my run' must be"),
    (TRAIN, "positions='rotary' needs", "--positions rotary needs"),
    (TRAIN, "trackers=('wandb', 'x') must", "--trackers wandb x must"),
    (TRAIN, "ngram_sizes=(2, 2) must", "--ngram-sizes 2 2 must"),
    (TRAIN, "dropout=-0.5, beta2=1.0: no", "--dropout -0.5, --beta2 1.0: no"),
    (TRAIN, "model.dropout is 0.1, not 0.2", "--dropout is 0.1, not 0.2"),
    (TRAIN, "lower keep_best and keep_last", "lower --keep-best and --keep-last"),
    (TRAIN, "(learning_rate 9): lower it_self", "..."),
    (
        TRAIN,
        "loss is nan: lower learning_rate; 1 is",
        "loss is nan: lower --learning-rate; 1 is",
    ),
    (SAMPLE, "it is intact: use which=4, or", "it is intact: use --checkpoint 4, or"),
    (EXPORT, "no qkv_bias=False: zero_biases=True", "no qkv_bias=False: --zero-biases"),
    # words, files and what the user wrote stay as they are
    (TRAIN, "resume and overwrite the data of steps", "..."),
    (TRAIN, "runs/steps=3 has no lr=0,steps=3/batch_size", "..."),
    (TRAIN, "config.json is damaged: steps=-4 must be positive", "..."),
    (TRAIN, "unknown preset 'steps=3'; set FLAGS=--x", "..."),
    (PLOT, "steps=3 and keep_best", "..."),
]


@pytest.mark.parametrize(("options", "message", "expected"), IN_FLAGS)
def test_a_keyword_becomes_the_flag_of_a_command_that_has_it(options, message, expected):
    assert in_flags(message, options) == (message if expected == "..." else expected)


def test_the_library_names_no_flag():
    """Beside the command itself: in any of its strings but docstrings."""
    package = Path(jgpt.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        if "cli" not in path.relative_to(package).parts:
            tree = ast.parse(path.read_text())
            documentation = {
                id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
            }
            found += [
                f"{path.name}:{node.lineno}: {node.value}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and id(node) not in documentation
                if isinstance(node.value, str) and re.search(r"(?<![\w-])--[a-z]", node.value)
            ]
    assert found == []
