"""Each door speaks its own language: keywords in Python, flags on the command line."""

import ast
import copy
import inspect
import re
from pathlib import Path

import pytest

import jgpt
from jgpt.cli.commands.export import export
from jgpt.cli.commands.plot import plot
from jgpt.cli.commands.sample import sample
from jgpt.cli.options import TRAIN, in_options
from jgpt.refusal import Field, Message, Placeholder, message_of

SAMPLE, EXPORT, PLOT = (inspect.signature(it).parameters for it in (sample, export, plot))
SPELLED = [
    # a field, as Python spells it and as a command does
    (TRAIN, Field("resume", True), "resume=True", "--resume"),
    (TRAIN, Field("use_bias", False), "use_bias=False", "--no-use-bias"),
    (TRAIN, Field("out", "my run"), "out='my run'", "--out 'my run'"),
    (TRAIN, Field("out", Placeholder("RUN")), "out=RUN", "--out RUN"),
    (TRAIN, Field("positions", "rotary"), "positions='rotary'", "--positions rotary"),
    (
        TRAIN,
        Field("trackers", ("wandb", "a b")),
        "trackers=('wandb', 'a b')",
        "--trackers wandb 'a b'",
    ),
    (TRAIN, Field("ngram_sizes", (2, 3)), "ngram_sizes=(2, 3)", "--ngram-sizes 2 3"),
    (TRAIN, Field("dropout", -0.5), "dropout=-0.5", "--dropout -0.5"),
    (TRAIN, Field("out", None), "out=None", "--out None"),
    (TRAIN, Field("model.dropout"), "model.dropout", "--dropout"),
    (TRAIN, Field("keep_best"), "keep_best", "--keep-best"),
    (SAMPLE, Field("which", 4), "which=4", "--checkpoint 4"),
    (EXPORT, Field("zero_biases", True), "zero_biases=True", "--zero-biases"),
    # what a command has no option for stays as it is in Python
    (EXPORT, Field("qkv_bias", False), "qkv_bias=False", "qkv_bias=False"),
    (PLOT, Field("steps", 3), "steps=3", "steps=3"),
    (TRAIN, Field("other.dropout"), "other.dropout", "other.dropout"),
]


@pytest.mark.parametrize(("options", "field", "in_python", "in_a_command"), SPELLED)
def test_a_field_is_spelled_as_a_keyword_and_as_an_option(options, field, in_python, in_a_command):
    message = Message("before: ", field, " must be")

    assert message == f"before: {in_python} must be"
    assert in_options(message, options) == f"before: {in_a_command} must be"


def test_words_files_and_what_the_user_wrote_stay_as_they_are():
    name = "a split=test resume=True"
    message = Message(f"{name} is not a run: ", Field("resume", True), " needs one")

    assert in_options(message) == f"{name} is not a run: --resume needs one"
    assert in_options(f"{name} is not a run") == f"{name} is not a run"


def test_a_message_inside_another_keeps_its_fields_and_a_quoted_one_does_not():
    inner = Message("lower ", Field("learning_rate"))

    assert (
        in_options(Message("the loss is nan: ", inner)) == "the loss is nan: lower --learning-rate"
    )
    assert in_options(Message.join("; ", [inner, "or stop"])) == "lower --learning-rate; or stop"
    assert in_options(Message(f"run.json is damaged: {inner}")) == (
        "run.json is damaged: lower learning_rate"
    )


def test_a_message_keeps_its_fields_in_an_error_and_in_a_copy():
    message = Message(Field("steps", -4), " must be positive")

    assert in_options(message_of(ValueError(message))) == "--steps -4 must be positive"
    assert in_options(message_of(FileExistsError(message))) == "--steps -4 must be positive"
    assert in_options(copy.deepcopy(message)) == "--steps -4 must be positive"


def test_a_value_of_any_length_leaves_a_message_short():
    message = Message(Field("data", "x" * 10_000), " is not a text")

    assert len(message) < 300


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
