"""The loss of a run: by hand on every target, on another text, and within training."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import (
    BigramLM,
    ByteTokenizer,
    DataConfig,
    ModelConfig,
    TrainConfig,
    evaluate,
    fit,
    load,
    save,
)
from jgpt.data.dataset import load_dataset
from jgpt.nn.loss import token_losses
from jgpt.runs import run as run_module
from jgpt.runs.checkpoints import loss_of
from jgpt.runs.directory import RunDirectory
from jgpt.runs.fit import TrainingStopped
from jgpt.training import evaluation
from tests.runs.harness import BIGRAM, Heard, kill_resume, path_of, with_changes


def loss_by_hand(model, tokens, size: int) -> float:
    """The mean over all targets, in windows of a size."""

    @nnx.jit
    def summed_loss(model, window):
        return token_losses(model(window[:, :-1]), window[:, 1:]).sum()

    num_targets = len(tokens) - 1
    total = 0.0
    for start in range(0, num_targets, size):
        window = tokens[None, start : start + size + 1]
        total += float(summed_loss(model, jnp.asarray(window, jnp.int32)))
    return total / num_targets


def test_the_validation_loss_is_the_model_s_on_every_held_out_target(trained):
    tokens = load_dataset(trained.config.dataset, 7).validation
    loss = loss_by_hand(trained.model, tokens, 7)
    loss_of_5 = loss_by_hand(trained.model, tokens, 5)

    assert trained.validation_loss == pytest.approx(loss, rel=1e-5)
    assert evaluate(trained.path, window=5).loss == pytest.approx(loss_of_5, rel=1e-5)
    assert evaluate(trained).loss == pytest.approx(loss, rel=1e-5)  # the run itself
    assert loss_of_5 != pytest.approx(loss, rel=3e-5)


@pytest.mark.parametrize("size", [0, 8])
def test_a_window_that_the_model_does_not_have_is_refused(trained, size):
    with pytest.raises(ValueError, match=f"`window={size}` must be from 1 to `block_size=7`"):
        evaluate(trained.path, window=size)


@pytest.mark.slow
def test_a_test_split_is_evaluated_alone_and_by_its_own_characters(small_run, tmp_path):
    """Characters of one byte in the training text, of two for validation, of four in the test.

    The whole split is evaluated, of which the run's own evaluations have a part.
    """
    out = tmp_path / "run"
    text = "a" * 600 + "é" * 100 + "🙂" * 50
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    data = DataConfig(
        data=(str(path),), tokenizer="byte", validation_fraction=0.2, test_fraction=0.2
    )
    model = BigramLM(256, rngs=nnx.Rngs(3))
    config = dataclasses.replace(
        small_run, model=ModelConfig("bigram", 256), dataset=data, eval_tokens=150
    )
    save(model, out, tokenizer=ByteTokenizer(), config=config)
    tokens = jnp.asarray(np.frombuffer(text.encode(), np.uint8), jnp.int32)
    logits = model(tokens[None, :-1])[0]
    losses = np.asarray(token_losses(logits, tokens[1:]))
    # of the first character of a split only the bytes after the first are predicted
    splits: list[tuple[Literal["validation", "test"], np.ndarray, int]] = [
        ("validation", losses[600:799], 99),
        ("test", losses[800:999], 49),
    ]
    for split, its_losses, characters in splits:
        loss = its_losses.mean()
        bits = its_losses.sum() / characters / math.log(2)

        found = evaluate(out, split=split)

        assert found.tokens == 199
        assert found.loss == pytest.approx(loss, rel=1e-5)
        assert found.bits_per_character == pytest.approx(bits, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_another_text_is_evaluated_whole_with_the_run_s_tokenizer(trained, tmp_path):
    every_token = list(range(trained.tokenizer.vocab_size))
    text = trained.tokenizer.decode(every_token * 3)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": 1, "body": text}) + "\n", encoding="utf-8")
    tokens = trained.tokenizer.encode(f"{text}\n")
    expected = loss_by_hand(trained.model, tokens, 7)

    found = evaluate(trained.path, data=str(other), data_field="body")

    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.loss != pytest.approx(trained.validation_loss, rel=1e-3)
    assert (found.tokens, found.data) == (len(tokens) - 1, str(other))


def test_another_text_is_read_as_the_run_s_was(copy, tmp_path):
    """Its field is that of the run, unless another one is named."""
    config = RunDirectory(Path(copy.out)).config()
    values = json.loads((Path(copy.out) / "config.json").read_text())
    values["dataset"]["data_field"] = "body"
    (Path(copy.out) / "config.json").write_text(json.dumps(values))
    assert config.dataset.data_field != "body"
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"body": "So long lives this" * 3, "text": "So"}) + "\n")

    assert evaluate(copy.out, data=str(other)).tokens == 18 * 3
    assert evaluate(copy.out, data=str(other), data_field="text").tokens == 2


def test_a_run_for_a_mesh_is_evaluated_on_one_device(poem, tmp_path):
    data = DataConfig((str(poem),), tokenizer="byte")
    config = TrainConfig(
        model=ModelConfig("bigram", 256), dataset=data, batch_size=4, mesh="data=2"
    )
    model = BigramLM(256, rngs=nnx.Rngs(3))
    save(model, tmp_path / "run", tokenizer=ByteTokenizer(), config=config)
    tokens = load_dataset(data, config.model.block_size).validation

    found = evaluate(tmp_path / "run")

    assert found.loss == pytest.approx(loss_by_hand(model, tokens, 7), rel=1e-5)


# --- within training -----------------------------------------------------------------------------


@pytest.fixture
def quick(small_run, tmp_path) -> TrainConfig:
    """Evaluations after steps 4, 8 and 11."""
    return with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def whole(small_run, tmp_path_factory):
    """The same run, uninterrupted."""
    out = str(tmp_path_factory.mktemp("whole") / "run")
    return fit(with_changes(small_run, **BIGRAM, out=out))


class Calls(Heard):
    """Keeps the calls of evaluations, each of which has one of six batches, and asks for a stop."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.heard: list[Any] = []
        self.stop_at = stop_at

    def evaluating(self, done, targets):
        self.heard.append((done, targets))

    def evaluated(self, step, validation_loss):
        self.heard.append(step)

    def should_stop(self) -> bool:
        calls = [event for event in self.heard if not isinstance(event, int)]
        return self.stop_at is not None and len(calls) >= self.stop_at


@pytest.fixture(autouse=True)
def many_calls(monkeypatch):
    """Each batch of an evaluation is a call of its own."""
    monkeypatch.setattr(evaluation, "WORK_PER_CALL", 1)


def test_a_signal_ends_an_evaluation_and_the_state_is_saved_without_a_loss(quick, whole):
    progress = Calls(stop_at=6 + 3)
    run = RunDirectory(Path(quick.out))

    with pytest.raises(TrainingStopped, match="stopped after step 8"):
        fit(quick, progress=progress, should_stop=progress.should_stop)

    # after two of six batches of 35 targets, not at the end of the evaluation
    assert progress.heard[-1] == (70, 191)
    assert run.metrics()[-1]["step"] == 8
    assert "validation_loss" not in run.metrics()[-1]
    assert loss_of(run.checkpoints, 8) is None

    resumed = fit(quick, resume=True)

    assert resumed.metrics["loss"] == whole.metrics["loss"]
    losses = [line["step"] for line in run.metrics() if "validation_loss" in line]
    assert losses == [4, 11]


def test_a_signal_in_the_last_evaluation_does_not_cost_its_loss(quick, whole):
    progress = Calls(stop_at=2 * 6 + 3)

    run = fit(quick, progress=progress, should_stop=progress.should_stop)

    assert kill_resume.fingerprint(path_of(run)) == kill_resume.fingerprint(path_of(whole))
    assert run.validation_loss == whole.validation_loss


def test_time_to_save_in_an_evaluation_does_not_cost_its_loss(quick, whole, monkeypatch):
    """A checkpoint is due at every request."""
    monkeypatch.setattr(run_module, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(run_module, "SAVING_SHARE", 1e9)

    run = fit(dataclasses.replace(quick, keep_every=1))

    saved = RunDirectory(path_of(run))
    losses = {step: loss_of(saved.checkpoints, step) for step in saved.checkpoint_steps()}
    evaluated = {line["step"]: line.get("validation_loss") for line in saved.metrics()}
    assert len(evaluated) == len(saved.metrics())  # one line a step
    assert losses == {step: evaluated[step] for step in losses}
    assert losses.keys() >= {3, 4, 7, 8, 11}
    assert run.validation_loss == whole.validation_loss
    assert run.metrics["loss"] == whole.metrics["loss"]


def test_evaluations_are_of_windows_spread_over_the_split(quick):
    """Of 28 windows the first, tenth and nineteenth."""
    config = dataclasses.replace(quick, eval_tokens=27, steps=4)

    run = fit(config)

    model, _, _ = load(path_of(run))
    tokens = load_dataset(config.dataset, 7).validation
    windows = jnp.asarray([tokens[7 * start : 7 * start + 8] for start in (0, 9, 18)], jnp.int32)
    losses = token_losses(model(windows[:, :-1]), windows[:, 1:])
    assert run.validation_loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert evaluate(run).tokens == 191
