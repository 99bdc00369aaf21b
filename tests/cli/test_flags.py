"""Each door speaks its own language: fields in backticks in Python, options on the command line."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import jgpt
from jgpt.cli.commands.export import export
from jgpt.cli.commands.plot import plot
from jgpt.cli.commands.sample import sample
from jgpt.cli.options import TRAIN, in_options

SAMPLE, EXPORT, PLOT = (inspect.signature(it).parameters for it in (sample, export, plot))


@pytest.mark.parametrize(
    ("options", "field", "option"),
    [
        (TRAIN, "`resume=True`", "--resume"),
        (TRAIN, "`use_bias=False`", "--no-use-bias"),
        (TRAIN, "`out='my run'`", "--out 'my run'"),
        (TRAIN, "`out=RUN`", "--out RUN"),
        (TRAIN, "`mesh=fsdp=N`", "--mesh fsdp=N"),
        (TRAIN, "`positions='rotary'`", "--positions rotary"),
        (TRAIN, "`trackers=('wandb', 'a b')`", "--trackers wandb 'a b'"),
        (TRAIN, "`ngram_sizes=(2, 3)`", "--ngram-sizes 2 3"),
        (TRAIN, "`dropout=-0.5`", "--dropout -0.5"),
        (TRAIN, "`out=None`", "--out None"),
        (TRAIN, "`model.dropout`", "--dropout"),
        (TRAIN, "`keep_best`", "--keep-best"),
        (SAMPLE, "`which=4`", "--checkpoint 4"),
        (EXPORT, "`modelfile=True`", "--modelfile"),
        # what a command has no option for stays as it is in Python
        (EXPORT, "`qkv_bias=False`", "`qkv_bias=False`"),
        (PLOT, "`steps=3`", "`steps=3`"),
        (TRAIN, "`other.dropout`", "`other.dropout`"),
        (TRAIN, "`git lfs pull`", "`git lfs pull`"),
    ],
)
def test_a_field_is_spelled_as_an_option(options, field, option):
    message = f"a split=test: {field} must be"

    assert in_options(message, options) == f"a split=test: {option} must be"


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
