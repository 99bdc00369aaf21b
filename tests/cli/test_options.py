"""What can be typed: every field of the config, lists, presets, and what the help shows of them."""

import dataclasses
import importlib.metadata
import inspect

import pytest

from jgpt.cli.commands.export import export
from jgpt.cli.commands.import_ import import_
from jgpt.cli.commands.sample import sample
from jgpt.cli.commands.train import train
from jgpt.cli.options import COMMON_OPTIONS, TRAIN, in_options, parse
from jgpt.fields import to_json
from jgpt.presets import PRESETS
from tests.commands import refused, worked

TINY = PRESETS["tiny"][1]


def parsed(*args):
    return parse(train, "train", [str(word) for word in args])["config"]


def flags(help: str) -> list[str]:
    """The options that a help shows, in order, without those that switch others off."""
    words = [line.strip("│ ").split(" ")[0].rstrip(",") for line in help.splitlines()]
    return [word[2:] for word in words if word.startswith("--")]


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
    assert parse(import_, "import", options)["data"] == ("a", "b", "c")


def test_underscores_are_dashes_in_the_name_of_an_option_and_stay_in_its_value():
    words = ("--batch_size", 24, "--data=some_text.txt", "--name=--a_name", "--out=my_run")
    given = parsed("tiny", *words)
    assert given.out == "my_run"
    assert given.dataset.data == ("some_text.txt",)
    assert given.name == "--a_name"
    assert given.batch_size == 24


def test_a_list_that_is_not_given_stays_and_one_without_values_is_empty():
    assert parsed("tiny", "--steps", 7) == dataclasses.replace(TINY, steps=7)
    assert parsed("modern-cpu").model.ngram_sizes == (2, 3, 4)
    assert parsed("modern-cpu", "--ngram-sizes").model.ngram_sizes == ()


def test_a_file_s_own_options_stay_but_for_its_directory(tmp_path):
    """Of switches, too, which are on in the file and off in the preset that it isn't."""
    model = dataclasses.replace(TINY.model, use_bias=True, embed_dim=36, activation="relu")
    config = dataclasses.replace(TINY, model=model, out="elsewhere", seed=2, steps=19)
    (tmp_path / "config.json").write_text(to_json(config))
    again = dataclasses.replace(config, out=None)
    assert parsed("--config", tmp_path / "config.json") == again
    given = parsed("--steps", 7, "--config", tmp_path / "config.json", "--out", "here")
    assert given == dataclasses.replace(again, steps=7, out="here")
    off = dataclasses.replace(again, model=dataclasses.replace(model, use_bias=False))
    assert parsed("--config", tmp_path / "config.json", "--no-use-bias") == off


def test_the_preset_stands_anywhere():
    expected = dataclasses.replace(TINY, steps=10, seed=3)
    assert parsed("tiny", "--steps", 10, "--seed", 3) == expected
    assert parsed("--steps", 10, "tiny", "--seed", 3) == expected
    assert parsed("--steps", 10, "--seed", 3, "tiny") == expected
    assert parsed("--steps", 10) == dataclasses.replace(PRESETS["modern"][1], steps=10)


def test_the_help_of_train_shows_what_people_change():
    said = worked("train", "tiny", "--help")
    assert said == worked("help", "train", "tiny")
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines[4:23] if line.startswith("  ") and line[2] != " "]
    assert listed == [*PRESETS]
    common = {name.replace("_", "-") for name in COMMON_OPTIONS}
    assert common < set(flags(said))
    assert 28 <= len(flags(said)) <= 34  # and --help-all has three times as many
    assert "Sequences per step." in said
    assert "(default: 200)" in said  # the steps of the preset
    assert "--help-all" in said


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("shakespeare", "no preset; to train on a text: jgpt train --data shakespeare"),
        (
            "runs/a b",
            "a run, not a preset; to train it further: jgpt train --resume --out 'runs/a b'",
        ),
    ],
)
def test_a_run_or_a_text_where_a_preset_stands_is_answered_with_the_right_command(
    word, answer, tmp_path
):
    (tmp_path / "notes").mkdir()
    (tmp_path / "runs" / "a b" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "a b" / "config.json").touch()

    assert refused("train", word, cwd=tmp_path, columns=200) == f"jgpt: {word} is {answer}"


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        ("train", "--gradient_accumulation_steps", "--micro-batches"),
        ("train", "--vocab_size", "--bpe-vocab-size"),
        ("sample", "--start", "--prompt"),
    ],
)
def test_an_option_of_other_programs_is_answered_with_ours(command, flag, meant):
    assert meant in refused(command, flag, "x", columns=200)


def test_the_version_is_the_package_s():
    assert worked("--version") == f"jgpt {importlib.metadata.version('jgpt')}\n"


SAMPLE = inspect.signature(sample).parameters
EXPORT = inspect.signature(export).parameters


@pytest.mark.parametrize(
    ("options", "field", "option"),
    [
        (TRAIN, "`resume=True`", "--resume"),
        (TRAIN, "`use_bias=False`", "--no-use-bias"),
        (TRAIN, "`out='my run'`", "--out 'my run'"),
        (TRAIN, "`mesh=fsdp=N`", "--mesh fsdp=N"),
        (TRAIN, "`trackers=('wandb', 'a b')`", "--trackers wandb 'a b'"),
        (TRAIN, "`out=None`", "--out None"),
        (TRAIN, "`model.dropout`", "--dropout"),
        (TRAIN, "`keep_best`", "--keep-best"),
        (SAMPLE, "`which=4`", "--checkpoint 4"),
        (EXPORT, "`modelfile=True`", "--modelfile"),
        # what a command has no option for stays as it is in Python
        (EXPORT, "`qkv_bias=False`", "`qkv_bias=False`"),
        (TRAIN, "`other.dropout`", "`other.dropout`"),
        (TRAIN, "`git lfs pull`", "`git lfs pull`"),
    ],
)
def test_a_field_is_spelled_as_an_option(options, field, option):
    message = f"a split=test: {field} must be"

    assert in_options(message, options) == f"a split=test: {option} must be"
