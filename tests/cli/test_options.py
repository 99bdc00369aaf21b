"""What can be typed: every field of the config, lists, presets, and what the help shows of them."""

import dataclasses
import functools
import importlib.metadata
import inspect
import io
import re

import pytest

from jgpt.cli.commands import COMMANDS, import_
from jgpt.cli.options import (
    EVERYDAY,
    ProcessOptions,
    RunOptions,
    describe_presets,
    parse,
    parse_train,
)
from jgpt.presets import PRESETS
from tests.commands import refused, worked

TINY = PRESETS["tiny"][1]


def parsed(*args):
    return parse_train([str(word) for word in args])[0]


@functools.wraps(import_)
def bind_import(*args, **kwargs):
    return inspect.signature(import_).bind(*args, **kwargs)


def flags(help: str) -> list[str]:
    """The options that a help shows, in order, without those that switch others off."""
    words = [line.strip("│ ").split(" ")[0].rstrip(",") for line in help.splitlines()]
    return [word[2:] for word in words if word.startswith("--")]


def fields(config) -> list[str]:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts = [fields(value) for value in values.values() if dataclasses.is_dataclass(value)]
    own = [name for name, value in values.items() if not dataclasses.is_dataclass(value)]
    return sum(parts, own)


def test_repeating_a_list_appends():
    given = parsed(
        *("tiny", "--data", "a", "--data", "b", "c", "--trackers", "wandb"),
        *("--ngram-sizes", 2, "--steps", 7, "--ngram-sizes", 3, 5, "--trackers", "tensorboard"),
    )
    assert given.dataset.data == ("a", "b", "c")
    assert given.trackers == ("wandb", "tensorboard")
    assert given.model.ngram_sizes == (2, 3, 5)
    assert given.steps == 7
    options = ["x", "--out", "y", "--data", "a", "--data", "b", "c"]
    imported = parse(bind_import, "import", options)
    assert imported.arguments["data"] == (("a",), ("b", "c"))


def test_a_list_that_is_not_given_stays_and_one_without_values_is_empty():
    assert parsed("tiny", "--steps", 7) == dataclasses.replace(TINY, steps=7)
    assert parsed().model.ngram_sizes == (2, 3, 4)
    assert parsed("--ngram-sizes").model.ngram_sizes == ()


def test_the_preset_stands_anywhere():
    expected = dataclasses.replace(TINY, steps=10, seed=3)
    assert parsed("tiny", "--steps", 10, "--seed", 3) == expected
    assert parsed("--steps", 10, "tiny", "--seed", 3) == expected
    assert parsed("--steps", 10, "--seed", 3, "tiny") == expected
    assert parsed("--steps", 10) == dataclasses.replace(PRESETS["modern-cpu"][1], steps=10)


def test_a_preset_among_the_data_is_no_file(tmp_path):
    said = refused("train", "--data", "notes.txt", "tiny", cwd=tmp_path)
    assert said == "jgpt: tiny is a preset: put it before --data"
    (tmp_path / "tiny").write_text("a text of that name")
    assert "notes.txt" in refused("train", "--data", "notes.txt", "tiny", cwd=tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_refusal_is_the_same_whatever_the_output_can_show(encoding, monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    for options, message in (
        (["--stepz", "3"], "Unrecognized options: --stepz, 3 (did you mean --steps?)"),
        (["--steps", "x"], "--steps must be a whole number, not 'x'"),
        (["--steps"], "Missing value for argument '--steps'. Expected 1 values."),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            parsed("tiny", *options)


def test_every_field_of_the_config_is_an_option():
    shown = flags(worked("train", "--help-all"))
    kinds = (RunOptions, ProcessOptions)
    switches = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    assert sorted(shown) == sorted(
        name.replace("_", "-") for name in {*fields(TINY), *switches} - {"vocab_size"}
    )


def test_the_help_of_train_begins_with_what_people_change():
    said = worked("train", "tiny", "--help")
    assert said == worked("help", "train", "tiny")
    lines = said.splitlines()
    assert len(lines) < 60  # and --help-all has three times as many
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines[3:24] if line.startswith("  ") and line[2] != " "]
    assert listed == [*PRESETS]
    common = [name.replace("_", "-") for name in EVERYDAY]
    assert flags(said)[: len(common)] == common
    assert "(default: 200)" in said  # the steps of the preset
    assert "--help-all" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_says_what_a_value_is(command):
    said = worked("help", command) + worked(command, "--help-all" if command == "train" else "-h")
    assert f"usage: jgpt {command}" in said
    for word in ("STR", "INT", "FLOAT", "{None}", "(default: None)", "(default: )"):
        assert word not in said


def test_presets_are_wrapped_at_words_of_a_terminal():
    whole = worked("presets").splitlines()
    assert [line.split()[0] for line in whole] == [*PRESETS]
    assert max(map(len, whole)) > 80
    for line, wrapped in zip(whole, describe_presets(80), strict=True):
        assert max(map(len, wrapped.splitlines())) <= 80
        assert wrapped.split() == line.split()
        assert all(rest.startswith(" " * 17) for rest in wrapped.splitlines()[1:])


def test_the_version_is_the_package_s():
    assert worked("--version") == f"jgpt {importlib.metadata.version('jgpt')}\n"


def test_help_lists_the_commands():
    assert worked() == worked("help") == worked("--help")
    assert "unknown command 'trian' (did you mean 'train'?)" in refused("help", "trian")
    for name, command in COMMANDS.items():
        assert f"{name} " in worked("help")
        assert str(command.__doc__).splitlines()[0] in worked("help")
