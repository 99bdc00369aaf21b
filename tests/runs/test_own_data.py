"""Data of many kinds: each trains, is killed and resumed, and trains on a mesh of eight devices.

DNA, moves of chess and notes as tokens; padding and prompts that are not learned; a mixture of two
texts; and a curriculum of lengths. The resumed run ends bitwise equal to one without a kill.
"""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt import Batch, DataConfig, Dataset, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.fitting.progress import Progress
from jgpt.runs.directory import RunDirectory
from tests.runs.harness import Heard, kill_resume

BLOCK = 8
ROWS = 4
PAD = 0


class Words:
    """A tokenizer of words with a space or a newline after each."""

    words: tuple[str, ...]

    @property
    def vocab_size(self):
        return len(self.words)

    def encode(self, text):
        pieces = text.replace("\n", "\n ").replace(" ", "|").split("|")
        return [self.words.index(piece) for piece in pieces if piece]

    def decode(self, tokens):
        text = " ".join(self.words[token] for token in tokens)
        return text.replace("\n ", "\n")


class Codons(Words):
    words = ("\n", "ATG", "GCC", "TTA", "CGT", "TAA")


class Chess(Words):
    words = ("\n", "e2e4", "e7e5", "g1f3", "b8c6", "f1b5", "a7a6")


def text_of(words, seed: int) -> str:
    """Words that a model can learn to predict a little, with newlines between."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(60):
        start = random.integers(1, len(words) - 2)
        lines.append(" ".join(words[start:] + words[1:start]) + " \n")
    return "".join(lines)


def notes() -> Dataset:
    random = np.random.default_rng(3)
    steps = random.integers(-2, 3, 600)
    return Dataset.from_tokens(60 + np.cumsum(steps) % 24, vocab_size=128)


def padded(dataset, seed, step):
    """Rows of several lengths, padded, of whose padding and prompts nothing is learned."""
    random = np.random.default_rng((seed, step))
    tokens = np.full((ROWS, BLOCK + 1), PAD)
    weights = np.zeros((ROWS, BLOCK), np.float32)
    for row in range(ROWS):
        length = random.integers(4, BLOCK + 2)
        start = random.integers(0, len(dataset.train) - length)
        tokens[row, :length] = dataset.train[start : start + length]
        weights[row, 1 : length - 1] = 1  # the first target belongs to the prompt
    return Batch(jnp.asarray(tokens), jnp.asarray(weights))


def lengthening(dataset, seed, step, config):
    """A curriculum: a window begins as two documents, and is one from half of the steps on."""
    random = np.random.default_rng((seed, step))
    starts = random.integers(0, len(dataset.train) - BLOCK, ROWS)
    tokens = dataset.train[starts[:, None] + np.arange(BLOCK + 1)].astype(np.int32)
    documents = np.zeros_like(tokens)
    if step < config.steps // 2:
        documents[:, BLOCK // 2 :] = 1
    return Batch(jnp.asarray(tokens), None, jnp.asarray(documents))


def written(folder, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def dna(folder):
    tokens = Codons().encode(text_of(Codons.words, 1))
    return {"dataset": Dataset.from_tokens(tokens, tokenizer=Codons())}, ("pydocs",)


def chess(folder):
    tokens = Chess().encode(text_of(Chess.words, 2))
    return {"dataset": Dataset.from_tokens(tokens, tokenizer=Chess())}, ("pydocs",)


def midi(folder):
    return {"dataset": notes()}, ("pydocs",)


def prompts(folder):
    return {"dataset": notes(), "batches": padded}, ("pydocs",)


def mixture(folder):
    first = written(folder, "a.txt", "ab ba " * 60)
    second = written(folder, "b.txt", "xyz" * 60)
    return {}, (f"{first}=0.7", f"{second}=0.3")


def curriculum(folder):
    return {"dataset": notes(), "batches": lengthening}, ("pydocs",)


KINDS = (dna, chess, midi, prompts, mixture, curriculum)


class Killed(BaseException):
    """The end of a process, which nothing catches."""


class KillAt(Progress):
    """Ends a run once it has taken a step."""

    most_steps = 1

    def __init__(self, at: int) -> None:
        self._at = at

    def stepped(self, step, loss, tokens_per_second):
        if step >= self._at:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "data=4,tensor=2"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_trains_and_a_killed_run_ends_as_one_that_was_not(tmp_path, kind, mesh):
    options, data = kind(tmp_path)
    config = TrainConfig(
        model=ModelConfig(block_size=BLOCK, num_layers=1, num_heads=2, embed_dim=16),
        dataset=DataConfig(data),
        # twelve of the default's 100 warm-up steps learn less than two batches differ by
        optimizer=OptimizerConfig(learning_rate=0.03, warmup_steps=0),
        steps=12,
        batch_size=ROWS,
        eval_interval=4,
        steps_per_call=2,
        sample_tokens=3,
        mesh=mesh,
        out=str(tmp_path / "whole"),
    )
    fit = functools.partial(jgpt.fit, **options)
    parted = dataclasses.replace(config, out=str(tmp_path / "parted"))

    whole = fit(config, progress=None)
    with pytest.raises(Killed):
        fit(parted, progress=KillAt(6))
    resumed = fit(parted, progress=None, resume=True)

    assert whole.metrics["loss"][-1] < whole.metrics["loss"][1]
    # NaN where a step has no value, so as JSON
    assert json.dumps(resumed.metrics["loss"]) == json.dumps(whole.metrics["loss"])
    fingerprint = kill_resume.fingerprint
    assert fingerprint(resumed.directory) == fingerprint(whole.directory)


@pytest.mark.slow
def test_nothing_is_learned_where_weights_are_zero(tmp_path):
    """Other tokens of the padding change no loss."""

    def other_padding(dataset, seed, step):
        batch = padded(dataset, seed, step)
        assert batch.weights is not None
        first = batch.tokens[:, :1]
        targets = jnp.where(batch.weights > 0, batch.targets, 7)
        replaced = jnp.concatenate([first, targets], axis=1)
        # inputs before the first counted target stay, since they are its context
        tokens = jnp.where(batch.tokens == PAD, replaced, batch.tokens)
        return Batch(tokens, batch.weights)

    def losses(name, **batches):
        config = TrainConfig(
            model=ModelConfig("bigram", block_size=BLOCK),
            steps=3,
            batch_size=ROWS,
            sample_tokens=0,
            out=str(tmp_path / name),
        )
        run = jgpt.fit(config, dataset=notes(), progress=None, **batches)
        return run.metrics["loss"][1:]

    with_padding = losses("one", batches=padded)
    with_other_padding = losses("other", batches=other_padding)
    without_weights = losses("plain")

    assert with_padding == with_other_padding
    assert with_padding != without_weights


def forgetful(config):
    """The mean of all targets, whatever they weigh."""

    def objective(model, batch, rngs):
        return jgpt.cross_entropy(model(batch.inputs, rngs=rngs), batch.targets)

    return objective


@pytest.mark.parametrize(
    ("objective", "message"),
    [(forgetful, ["the objective does not read the weights that the batches have"]), (None, [])],
)
def test_an_objective_that_forgets_the_weights_is_warned_of(tmp_path, objective, message):
    config = TrainConfig(
        model=ModelConfig("bigram", block_size=BLOCK),
        steps=1,
        batch_size=ROWS,
        sample_tokens=0,
        out=str(tmp_path / "run"),
    )
    heard = Heard()

    jgpt.fit(config, dataset=notes(), batches=padded, objective=objective, progress=heard)

    assert heard.messages == message


def changed(**changes):
    """Batches of which one part is wrong."""

    def wrong(dataset, seed, step):
        return dataclasses.replace(padded(dataset, seed, step), **changes)

    return wrong


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (changed(tokens=jnp.zeros((ROWS, BLOCK), jnp.int32), weights=None), "has tokens of shape"),
        (changed(tokens=jnp.zeros((2, BLOCK + 1), jnp.int32), weights=None), r"not \[4, 9\], for"),
        (changed(tokens=jnp.full((ROWS, BLOCK + 1), 128)), "contains token 128, outside"),
        (changed(tokens=jnp.full((ROWS, BLOCK + 1), -1)), "contains token -1, outside"),
        (lambda dataset, seed, step: dataset.train, "must be a jgpt.Batch, not "),
    ],
)
def test_a_wrong_batch_is_one_line_before_anything_is_written(tmp_path, batches, message):
    config = TrainConfig(
        model=ModelConfig("bigram", block_size=BLOCK), batch_size=ROWS, out=str(tmp_path / "run")
    )

    with pytest.raises(ValueError, match=f"^the batch of step 0 .*{message}") as error:
        jgpt.fit(config, dataset=notes(), batches=batches, progress=None)

    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_wrong_batch_of_a_later_step_loses_none_of_those_before(tmp_path):
    def wrong_later(dataset, seed, step):
        batch = padded(dataset, seed, step)
        if step == 5:
            return dataclasses.replace(batch, tokens=batch.tokens + 128)
        return batch

    config = TrainConfig(
        model=ModelConfig("bigram", block_size=BLOCK),
        batch_size=ROWS,
        steps=9,
        eval_interval=9,
        steps_per_call=1,
        sample_tokens=0,
        out=str(tmp_path / "run"),
    )

    with pytest.raises(ValueError, match="the batch of step 5 contains token "):
        jgpt.fit(config, dataset=notes(), batches=wrong_later, progress=None)
    run = jgpt.fit(config, dataset=notes(), batches=padded, progress=None, resume=True)

    assert [line["step"] for line in RunDirectory.open(run.directory).provenance()] == [0, 5]
