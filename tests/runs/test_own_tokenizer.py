"""A tokenizer of the user's own: an object in Python, whose tokens are a dataset."""

import dataclasses

import numpy as np
import pytest

import jgpt
from jgpt import DataConfig, ModelConfig, TrainConfig
from jgpt.runs.fit import TrainingStopped
from tests.commands import refused
from tests.runs.harness import path_of


class Letters:
    """Two letters and a newline."""

    def __init__(self, **wrong):
        self.vocab_size = 3
        self.__dict__.update(wrong)

    def encode(self, text):
        return np.array(["ab\n".index(letter) for letter in text])

    def decode(self, tokens):
        return "".join("ab\n"[token] for token in tokens)


def config_in(folder, **changes) -> TrainConfig:
    config = TrainConfig(
        model=ModelConfig("bigram", block_size=5),
        steps=6,
        batch_size=4,
        eval_interval=3,
        sample_tokens=4,
        out=str(folder / "run"),
    )
    return dataclasses.replace(config, **changes)


def dataset_of(tokenizer=None) -> jgpt.Dataset:
    tokens = Letters().encode("abba\n" * 60)
    return jgpt.Dataset.from_tokens(tokens, tokenizer=tokenizer or Letters())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> jgpt.Run:
    folder = tmp_path_factory.mktemp("letters")
    return jgpt.fit(config_in(folder), dataset=dataset_of(), progress=None)


@pytest.mark.slow
def test_a_run_is_trained_resumed_loaded_and_evaluated_with_the_object(whole, tmp_path):
    dataset = dataset_of()
    parted = config_in(tmp_path, out=str(tmp_path / "parted"), steps_per_call=2)
    with pytest.raises(TrainingStopped):
        jgpt.fit(parted, dataset=dataset, progress=None, should_stop=lambda: True)
    resumed = jgpt.fit(parted, dataset=dataset, progress=None, resume=True)

    assert resumed.metrics["loss"][-1] == whole.metrics["loss"][-1]
    assert resumed.validation_loss == whole.validation_loss
    assert set((path_of(whole) / "samples.txt").read_text()) <= set("ab\n")
    loaded = jgpt.load(path_of(whole), tokenizer=Letters())
    assert loaded.tokenizer.decode([0, 1]) == "ab"
    assert set(loaded.generate("ab", 5)) <= set("ab\n")
    evaluation = jgpt.evaluate(path_of(whole), dataset=dataset, tokenizer=Letters())
    assert evaluation.loss == pytest.approx(whole.validation_loss, rel=1e-6)
    with pytest.raises(ValueError, match="trained on a Dataset in Python: give it again"):
        jgpt.evaluate(path_of(whole), tokenizer=Letters())
    with pytest.raises(ValueError, match="give the tokens with dataset="):
        jgpt.evaluate(path_of(whole), data="pydocs", tokenizer=Letters())
    with pytest.raises(ValueError, match=r"has a vocab_size of 4, but that of .* has 3"):
        jgpt.load(path_of(whole), tokenizer=Letters(vocab_size=4))


def test_commands_refuse_such_a_run_by_name(whole):
    for command in ("sample", "eval", "look"):
        line = refused(command, "run", cwd=path_of(whole).parent)
        assert line == (
            "jgpt: the tokenizer of run is Letters, an object of your own, which no command can "
            "read: use Python, as in jgpt.load(RUN, tokenizer=...)"
        )


def test_a_run_starts_from_the_weights_of_one_with_an_own_tokenizer(whole, tmp_path):
    given = {"initial": path_of(whole), "progress": None}

    run = jgpt.fit(config_in(tmp_path), dataset=dataset_of(), **given)

    assert run.metrics["loss"][0] != whole.metrics["loss"][0]
    with pytest.raises(ValueError, match="is Letters, an object of your own"):
        jgpt.fit(config_in(tmp_path), overwrite=True, **given)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"encode": lambda text: [3]}, "token 3 at position 0 is outside the vocabulary of 3"),
        ({"encode": lambda text: [0.5]}, r"the tokenizer Letters gives float64\[1\] for a text"),
    ],
)
def test_what_such_a_tokenizer_makes_is_checked(wrong, message):
    """An embedding returns NaN for a token that it lacks, without an error."""
    tokenizer = dataset_of(Letters(**wrong)).tokenizer

    with pytest.raises(ValueError, match=message):
        tokenizer.encode("a")


def test_the_tokenizer_of_the_weights_is_not_replaced_by_an_own_one(tmp_path):
    """The run was trained with that of the weights, and could not be loaded with either."""
    (tmp_path / "text.txt").write_text("abba\n" * 60)
    of_text = DataConfig((str(tmp_path / "text.txt"),))
    first = jgpt.fit(config_in(tmp_path, dataset=of_text), progress=None)
    second = config_in(tmp_path, out=str(tmp_path / "second"))

    with pytest.raises(ValueError, match="the dataset has another tokenizer than `initial="):
        jgpt.fit(second, dataset=dataset_of(), initial=path_of(first), progress=None)

    assert not (tmp_path / "second").exists()
