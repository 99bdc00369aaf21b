"""A tokenizer of the user's own: recorded, never loaded by itself, and checked."""

import dataclasses
import json

import numpy as np
import pytest

import jgpt
from jgpt import DataConfig, ModelConfig, TrainConfig
from jgpt.data.dataset import load_dataset
from jgpt.fields import Code
from jgpt.fitting.stopping import TrainingStopped
from jgpt.runs.load import load
from jgpt.user_code import load_code
from tests.commands import jgpt as command
from tests.commands import refused, worked
from tests.runs.harness import Heard

MOVES = ["e2e4", "e7e5", "g1f3", "b8c6", "f1b5", "a7a6"]
GAMES = "\n".join(" ".join(MOVES[:count]) for count in (6, 4, 5, 6, 3) * 9)
FILE = """
MOVES = ["\\n", "e2e4", "e7e5", "g1f3", "b8c6", "f1b5", "a7a6"]


class Chess:
    vocab_size = 8

    def encode(self, text):
        words = text.replace("\\n", " \\n ").split(" ")
        return [MOVES.index(word) for word in words if word]

    def decode(self, tokens):
        text = " ".join("?" if token == 7 else MOVES[token] for token in tokens)
        return text.replace(" \\n ", "\\n").replace(" \\n", "\\n").replace("\\n ", "\\n")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my.py").write_text(FILE)
    (tmp_path / "games.txt").write_text(GAMES)
    return tmp_path


def config_in(folder, **changes) -> TrainConfig:
    config = TrainConfig(
        model=ModelConfig("bigram", block_size=5),
        dataset=DataConfig((str(folder / "games.txt"),)),
        steps=6,
        batch_size=4,
        eval_interval=3,
        sample_tokens=4,
        out=str(folder / "run"),
    )
    return dataclasses.replace(config, **changes)


@pytest.mark.slow
def test_a_run_of_an_own_tokenizer_is_trained_resumed_sampled_and_evaluated(folder):
    """By commands, each of which is given the tokenizer again."""
    train = ("train", "tiny", "--data", "games.txt", "--block-size", 5, "--out", "r")
    own = ("--tokenizer", "my.py:Chess")

    said = worked(*train, *own, "--steps", 4, "--sample-tokens", 3, cwd=folder)
    assert "jgpt sample r --tokenizer my.py:Chess" in said
    assert worked("sample", "r", "--prompt", "e2e4 e7e5", *own, cwd=folder).startswith("e2e4 e7e5")
    assert "validation loss" in worked("eval", "r", *own, cwd=folder)
    values = ("shapes", "r", "--source", "--of", "GPT.hidden", "--prompt", "e2e4 e7e5")
    assert "float32[1 2 32]" in worked(*values, *own, cwd=folder)
    for words in (
        ("sample", "r"),
        ("eval", "r"),
        ("look", "r", "--prompt", "e2e4"),
        ("shapes", "r", "--source", "--prompt", "e2e4"),
        ("train", "--out", "r", "--resume", "--steps", 5),
    ):
        done = command(*words, cwd=folder)
        assert done.code == 2
        assert "the run's tokenizer is my.py:Chess, which a run never loads by" in done.stderr
        assert done.stderr.rstrip().endswith("give --tokenizer my.py:Chess")
    worked("train", "--out", "r", "--resume", "--steps", 5, *own, cwd=folder)
    recorded = json.loads((folder / "r" / "config.json").read_text())["dataset"]["make"]
    assert (recorded["name"], recorded["file"]) == ("Chess", "my.py")

    (folder / "my.py").write_text(FILE + "# changed\n")
    done = command("eval", "r", *own, cwd=folder)
    assert "tokenizer my.py:Chess has changed since the run began" in done.stderr


def test_a_tokenizer_that_makes_other_tokens_of_the_text_is_not_taken_for_another_text(folder):
    """Its vocabulary is as large as before: only the order of two moves has changed."""
    config = config_in(folder, steps=1, eval_interval=1, sample_tokens=0)
    (folder / "other.py").write_text(FILE.replace('"e2e4", "e7e5"', '"e7e5", "e2e4"'))
    run = jgpt.fit(config, tokenizer=f"{folder / 'my.py'}:Chess", progress=None)

    with (
        pytest.warns(UserWarning, match="has changed since the run began"),
        pytest.raises(ValueError, match=r"the tokenizer has changed .* is the same text, but has"),
    ):
        jgpt.evaluate(run.directory, tokenizer=f"{folder / 'other.py'}:Chess")


def test_what_is_wrong_with_an_own_tokenizer_is_one_line(folder):
    """Even if it is noticed in the middle of a sample, and where no option could give it."""
    jgpt.fit(config_in(folder), tokenizer=f"{folder / 'my.py'}:Chess", progress=None)
    said = refused("export", "run", "--out", "exported", cwd=folder)
    assert said.endswith("my.py:Chess is code, which can't be exported")
    said = refused("chat", "run", cwd=folder)
    assert said.endswith("run has a custom tokenizer, without the special tokens of a chat")

    (folder / "my.py").write_text(FILE.replace('"?" if token == 7 else ', ""))
    sample = ("sample", "run", "--prompt", "e2e4", "--tokenizer", "my.py:Chess")
    said = refused(*sample, cwd=folder)
    assert "can't decode" in said


def test_text_is_prepared_with_an_own_tokenizer(folder, monkeypatch):
    """Into a folder, and for a large text into the cache."""
    worked("prepare", "games.txt", "--tokenizer", "my.py:Chess", "--out", "prepared", cwd=folder)
    data = (str(folder / "prepared"),)
    with pytest.raises(ValueError, match=r"my\.py:Chess, which a run never loads by itself"):
        load_dataset(DataConfig(data), 5)
    monkeypatch.chdir(folder)
    make = load_code("my.py:Chess")
    prepared = load_dataset(DataConfig(data, make=make), 5)
    whole = load_dataset(DataConfig(("games.txt",), make=make), 5)
    monkeypatch.setattr("jgpt.data.dataset.LARGE_TEXT", 100)
    large = load_dataset(DataConfig(("games.txt",), make=make), 5)

    for dataset in (prepared, large):
        assert dataset.train.tolist() == whole.train.tolist()
        assert dataset.tokenizer.decode(dataset.train[:3]) == "e2e4 e7e5 g1f3"


class Letters:
    """Two letters, as an object and not as a class."""

    def __init__(self, **wrong):
        self.vocab_size = 3
        self.__dict__.update(wrong)

    def encode(self, text):
        return np.array(["ab\n".index(letter) for letter in text])

    def decode(self, tokens):
        return "".join("ab\n"[token] for token in tokens)


@pytest.mark.slow
def test_an_object_is_a_tokenizer_and_a_stopped_run_ends_as_an_uninterrupted_one(folder):
    (folder / "games.txt").write_text("abba\n" * 60)
    whole = jgpt.fit(config_in(folder), tokenizer=Letters(), progress=None)
    parted = config_in(folder, out=str(folder / "parted"), steps_per_call=2)
    with pytest.raises(TrainingStopped):
        jgpt.fit(parted, tokenizer=Letters(), progress=None, should_stop=lambda: True)
    resumed = jgpt.fit(parted, tokenizer=Letters(), progress=None, resume=True)

    assert resumed.metrics["loss"][-1] == whole.metrics["loss"][-1]
    assert resumed.validation_loss == whole.validation_loss
    assert set(whole.sample) <= set("ab\n")
    loaded = load(whole.directory, tokenizer=Letters)
    assert loaded.tokenizer.decode([0, 1]) == "ab"
    with pytest.raises(ValueError, match="a run never loads by itself: give `tokenizer="):
        load(whole.directory)
    with pytest.raises(ValueError, match="has a vocab_size of 4, but that of the run has 3"):
        load(whole.directory, tokenizer=Letters(vocab_size=4))


@pytest.mark.slow
def test_a_token_that_cannot_be_decoded_costs_the_sample_and_not_the_run(folder):
    """As of a vocabulary that is padded to a round number. Most sampled tokens are such tokens."""
    (folder / "games.txt").write_text("abba\n" * 60)
    said = Heard()

    run = jgpt.fit(config_in(folder), tokenizer=Letters(vocab_size=64), progress=said)

    assert run.sample == ""
    assert run.best_step in (3, 6)
    (line,) = [line for line in said.messages if line.startswith("no sample: ")]
    assert line.startswith("no sample: the tokenizer ")
    assert "py:Letters can't decode [" in line


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_one_with_an_own_tokenizer(folder):
    (folder / "games.txt").write_text("abba\n" * 60)
    first = jgpt.fit(config_in(folder), tokenizer=Letters(), progress=None)
    second = config_in(folder, out=str(folder / "second"))

    run = jgpt.fit(second, tokenizer=Letters(), initial=first.directory, progress=None)

    assert set(run.sample) <= set("ab\n")
    assert run.metrics["loss"][0] != first.metrics["loss"][0]
    with pytest.raises(ValueError, match="which a run never loads by itself: give `tokenizer="):
        jgpt.fit(config_in(folder, out="third"), initial=first.directory, progress=None)


@pytest.mark.slow
def test_the_tokenizer_of_the_weights_is_not_replaced_by_an_own_one(folder):
    """The run was trained with that of the weights, and could not be loaded with either."""
    (folder / "games.txt").write_text("abba\n" * 60)
    first = jgpt.fit(config_in(folder), progress=None)
    second = config_in(folder, out=str(folder / "second"))

    with pytest.raises(ValueError, match=r"has a tokenizer, which the run takes: leave out `token"):
        jgpt.fit(second, tokenizer=Letters(), initial=first.directory, progress=None)

    assert not (folder / "second").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decode": lambda tokens: "a" * len(tokens)}, "isn't reversible: from position 1 on, 'b"),
        ({"encode": lambda text: [3] * len(text)}, "gives token 3, outside its vocab_size of 3"),
        ({"encode": lambda text: [-1] * len(text)}, "gives token -1, outside its vocab_size of 3"),
        ({"encode": lambda text: [0.5]}, r"encodes .* as float64\[1\], not as a row of whole"),
        ({"encode": lambda text: {}[0]}, r"can't encode 'abba.*: KeyError: 0"),
        ({"vocab_size": 0}, r"a vocab_size from 1 to 16,777,216; its vocab_size is 0"),
        ({"decode": None}, "can't decode"),
    ],
)
def test_a_wrong_tokenizer_is_one_line_before_anything_is_written(folder, wrong, message):
    (folder / "games.txt").write_text("abba\n" * 60)

    with pytest.raises(ValueError, match=message) as error:
        jgpt.fit(config_in(folder), tokenizer=Letters(**wrong), progress=None)

    assert "\n" not in str(error.value)
    assert not (folder / "run").exists()


def test_a_dataset_may_have_an_own_tokenizer(folder):
    tokens = Letters().encode("abba\n" * 60)
    dataset = jgpt.Dataset.from_tokens(tokens, tokenizer=Letters())

    run = jgpt.fit(config_in(folder), dataset=dataset, progress=None)

    assert set(run.sample) <= set("ab\n")
    evaluation = jgpt.evaluate(run.directory, dataset=dataset, tokenizer=Letters())
    assert evaluation.loss == pytest.approx(run.validation_loss, rel=1e-6)
    with pytest.raises(ValueError, match="trained on a Dataset in Python: give it again"):
        jgpt.evaluate(run.directory, tokenizer=Letters())


def test_an_object_is_recorded_by_the_name_with_which_it_is_loaded_again(tmp_path):
    """Its class alone may not make it: this one has an argument."""
    source = FILE + "\n    def __init__(self, vocab_size):\n        self.vocab_size = vocab_size\n"
    (tmp_path / "my.py").write_text(source + "\n\nchess = Chess(8)\n")
    named = f"{tmp_path / 'my.py'}:chess"
    chess = load_code(named)

    assert Code.of(chess).named == named
    assert Code.of(type(chess)).name == "Chess"
    assert Code.of(type(chess)(9)).name == "Chess"  # an object without a name in its file
