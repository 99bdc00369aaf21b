"""A run from text to text: begun, stopped, gone on with, refused."""

import dataclasses
import json
import logging
import math
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt import (
    BigramLM,
    ByteTokenizer,
    DataConfig,
    ModelConfig,
    TrainConfig,
    fit,
    generate,
    load,
)
from jgpt.data.dataset import load_dataset
from jgpt.data.prepared import prepare
from jgpt.fields import to_json
from jgpt.fitting import fit as fit_module
from jgpt.fitting import loop, trackers
from jgpt.fitting import prepare as prepare_module
from jgpt.fitting.evaluate import _perplexity, evaluate
from jgpt.fitting.fit import Run, plan
from jgpt.fitting.loop import _stops_early
from jgpt.fitting.stopping import StoppedBeforeTraining
from jgpt.hardware import Platform, this_machine
from jgpt.nn.int8 import with_int8_weights
from jgpt.nn.loss import token_losses
from jgpt.parallel.mesh import current_mesh
from jgpt.pictures import plots
from jgpt.runs.checkpoints import Checkpoints, RunDirectory
from jgpt.runs.directory import read_config
from jgpt.runs.load import save
from jgpt.runs.target import choose_target
from jgpt.training.memory import TrainingMemory
from tests.commands import refused
from tests.runs.harness import BIGRAM, Heard, kill_resume, recorded, with_changes

fingerprint = kill_resume.fingerprint


def lines_of(directory):
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def values_of(lines, name):
    """What a metric was at each step that has it."""
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.fixture
def out(tmp_path):
    """Where a test's run goes."""
    return tmp_path / "run"


def test_a_run_leaves_all_that_it_promises(trained, small_run, poem):
    text = poem.read_text()
    tokens = jnp.array([[0, 1, 2]])

    model, _, config = load(trained.directory)

    assert sorted(path.name for path in trained.directory.iterdir()) == [
        "checkpoints",
        "config.json",
        "lock",
        "loss.png",
        "metrics.jsonl",
        "provenance.jsonl",
        "samples.txt",
        "tokenizer.json",
    ]
    picture = (trained.directory / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert (trained.directory / "samples.txt").read_text() == trained.sample
    assert len(trained.sample) == 1 + small_run.sample_tokens
    assert set(trained.sample) <= set(text)
    assert trained.tokenizer.vocab_size == trained.config.model.vocab_size
    assert trained.tokenizer.vocab_size == len(set(text))
    assert config == trained.config
    np.testing.assert_array_equal(model(tokens), trained.model(tokens))


def test_what_a_notebook_keeps_of_a_result_is_a_few_lines(trained):
    """Its text is stored in the notebook, beside the picture of a page."""
    loaded = jgpt.load(trained.directory)
    page = jgpt.look(loaded.model, loaded.tokenizer, "the")
    shown = [repr(result) for result in (trained, loaded, loaded.model, page)]

    assert [text for text in shown if len(text) > 500 or text.count("\n") > 6] == []
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(loaded.model)))
    for text in shown[:3]:
        assert f"GPT(vocab_size={loaded.tokenizer.vocab_size}, " in text
        assert f" {size:,} parameters" in text
    assert f"{trained.validation_loss:.4f} at step {trained.best_step}" in shown[0]


def test_a_stop_while_the_text_is_tokenized_leaves_no_run(small_run, out):
    config = dataclasses.replace(small_run, out=str(out))

    with pytest.raises(StoppedBeforeTraining, match=r"^stopped before training began"):
        fit(config, should_stop=lambda: True)

    assert not out.exists()


def test_one_of_several_processes_does_not_stop_alone_while_the_text_is_tokenized(
    small_run, out, monkeypatch
):
    """The others would wait for it; they agree on a stop between steps."""
    monkeypatch.setattr("jgpt.fitting.prepare.process_count", lambda: 2)
    config = with_changes(small_run, **BIGRAM, out=str(out))
    target = choose_target(config, resume=False, overwrite=False)

    prepared = prepare_module.prepare(config, target, this_machine(), Heard(), lambda: True)

    assert len(prepared.dataset.train) > 0


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

    found_of_5 = evaluate(trained.directory, window=5).loss

    assert trained.validation_loss == pytest.approx(loss, rel=1e-5)
    assert found_of_5 == pytest.approx(loss_of_5, rel=1e-5)
    assert loss_of_5 != pytest.approx(loss, rel=3e-5)


@pytest.mark.parametrize("size", [0, 8])
def test_a_window_that_the_model_does_not_have_is_refused(trained, size):
    with pytest.raises(ValueError, match=f"`window={size}` must be from 1 to `block_size=7`"):
        evaluate(trained.directory, window=size)


@pytest.mark.slow
def test_a_test_split_is_evaluated_alone_and_by_its_own_characters(small_run, tmp_path, out):
    """Characters of one byte in the training text, of two for validation, of four in the test.

    The whole split is evaluated, of which the run's own evaluations have a part.
    """
    text = "a" * 600 + "é" * 100 + "🙂" * 50
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    data = DataConfig(
        data=(str(path),),
        tokenizer="byte",
        validation_fraction=0.2,
        test_fraction=0.2,
    )
    model = BigramLM(256, rngs=nnx.Rngs(3))
    config = dataclasses.replace(
        small_run,
        model=ModelConfig("bigram", 256),
        dataset=data,
        eval_tokens=150,
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

        found = evaluate(out, which="last", split=split)

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

    found = evaluate(trained.directory, data=str(other), data_field="body")

    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.loss != pytest.approx(trained.validation_loss, rel=1e-3)
    assert found.tokens == len(tokens) - 1
    assert found.data == str(other)


def test_another_text_that_can_t_be_evaluated_is_named(trained, tmp_path):
    def refused(text, match, **options):
        other = tmp_path / "other.txt"
        other.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=match) as error:
            evaluate(trained.directory, data=(str(other),), **options)
        assert "\n" not in str(error.value)

    unknown = "unknown character '🙂' at position 0"
    refused("🙂", unknown)
    refused(trained.tokenizer.decode([0]), "^give `data` or `split='test'`, not", split="test")


def test_a_run_for_a_mesh_is_evaluated_on_one_device_where_no_micro_batches_are_recorded(poem, out):
    """A sequence at a time would be too few for the devices of the mesh."""
    data = DataConfig((str(poem),), tokenizer="byte")
    config = TrainConfig(
        model=ModelConfig("bigram", 256),
        dataset=data,
        batch_size=4,
        micro_batches="auto",
        mesh="data=2",
    )
    model = BigramLM(256, rngs=nnx.Rngs(3))
    save(model, out, tokenizer=ByteTokenizer(), config=config)
    tokens = load_dataset(data, config.model.block_size).validation
    expected = loss_by_hand(model, tokens, 7)

    found = evaluate(out, which="last")

    assert found.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_saved_config_repeats_the_run_and_progress_that_hears_sooner_changes_no_number(
    trained, out
):
    class Sooner(Heard):
        most_steps = 1

        def stepped(self, step, loss, tokens_per_second):
            super().stepped(step, loss, tokens_per_second)
            self.most_steps = 2 if step >= 5 else 1

    heard = Sooner()
    saved = read_config(trained.directory / "config.json")
    config = dataclasses.replace(saved, out=str(out))

    again = fit(config, progress=heard)

    assert fingerprint(again.directory) == fingerprint(trained.directory)
    assert again.sample == trained.sample
    assert heard.steps[:5] == [1, 2, 3, 4, 5]  # steps_per_call is 3
    # the call after step 5 may be under way when step 5 is heard
    assert heard.steps[5:] in ([6, 8, 10, 11], [7, 8, 10, 11])  # evaluated at 8


@pytest.mark.slow
def test_in_many_processes_a_call_has_as_many_steps_as_in_those_without_progress(
    small_run, out, monkeypatch
):
    class Sooner(Heard):
        most_steps = 1

    monkeypatch.setattr("jgpt.fitting.loop.process_count", lambda: 2)
    heard = Sooner()

    fit(dataclasses.replace(small_run, out=str(out)), progress=heard)

    # steps_per_call is 3, early estimates at 1 and 2, evaluations at 4 and 8
    assert heard.steps == [1, 2, 4, 7, 8, 11]


class Observed(NamedTuple):
    """A run, and what was seen of it."""

    run: Run
    events: list[Any]
    """Calls of steps with their number, and what comes before and after."""
    log: list[str]
    heard: Heard


def opens_trackers(tracked: list[dict[str, Any]]) -> Any:
    """In place of `require_tracker`: trackers that append what they are given, at the end {}."""

    def open_tracker(path, step, config, new):
        return types.SimpleNamespace(
            log=lambda values, step: tracked.append({"step": step, **values}),
            close=lambda: tracked.append({}),
        )

    return lambda name: open_tracker


@pytest.fixture(scope="module")
def observed(small_run, tmp_path_factory) -> Observed:
    events = []
    log = []
    heard = Heard()
    out = str(tmp_path_factory.mktemp("observed") / "run")
    config = dataclasses.replace(small_run, out=out, seed=3)

    def number_of_steps(state, windows, key, count, *others):
        return "steps", count

    def make_recorded_steps(config):
        return recorded(events, number_of_steps, make_steps(config))

    make_steps = fit_module.make_train_steps
    released = recorded(events, "release_memory", loop.release_memory)
    generated = recorded(events, "generate", fit_module.generate)
    drawn = recorded(events, "losses_image", plots.losses_image)
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patched, jax.log_compiles():
        patched.setattr(fit_module, "make_train_steps", make_recorded_steps)
        patched.setattr(fit_module, "release_memory", released)
        patched.setattr(fit_module, "generate", generated)
        patched.setattr(loop, "release_memory", released)
        patched.setattr(plots, "losses_image", drawn)
        logging.getLogger().addHandler(handler)
        run = fit(config, progress=heard)
        logging.getLogger().removeHandler(handler)
    return Observed(run, events, log, heard)


@pytest.mark.slow
def test_compiling_takes_no_step_and_gives_its_memory_back(observed):
    events = observed.events
    steps = [event for event in events if event[0] == "steps"]

    counts = [count for _, count in steps]
    assert counts == [0, 1, 1, 2, 3, 1, 3]
    assert events[:2] == [("steps", 0), "release_memory"]
    assert events[-4:] == ["release_memory", "generate", "release_memory", "losses_image"]
    assert events.count("release_memory") == 4  # the other after the first evaluation
    assert len(events) == len(steps) + 6


@pytest.mark.slow
def test_a_run_compiles_each_function_once(observed):
    log = "\n".join(observed.log)

    found = re.findall(r"Finished XLA compilation of jit\((\w+)\)", log)

    for name in ("steps", "evaluate", "_window_starts", "_gather"):
        assert found.count(name) == 1, (name, found)
    assert observed.heard.messages == []


def test_trackers_are_given_every_line_and_closed(small_run, out, monkeypatch):
    tracked: list[dict[str, Any]] = []
    for module in (prepare_module, trackers):
        monkeypatch.setattr(module, "require_tracker", opens_trackers(tracked))
    config = with_changes(small_run, **BIGRAM, out=str(out), trackers=("wandb",))

    run = fit(config)

    lines = lines_of(run.directory)
    assert len(lines) > 11
    assert tracked == [*lines, {}]


LATE = """
import pathlib, sys
from jgpt import TrainConfig, fit
from jgpt.fields import from_json

late = {"orbax.checkpoint", "matplotlib"}
seen = []

def stop():
    seen.append(late & set(sys.modules))
    return False

text = pathlib.Path(sys.argv[1]).read_text()
fit(from_json(TrainConfig, text), should_stop=stop)
assert seen[0] == set(), seen
assert seen[-1] == {"orbax.checkpoint"}, seen
assert late <= set(sys.modules)
"""


@pytest.mark.slow
def test_what_training_needs_late_is_imported_late(small_run, tmp_path, out):
    path = tmp_path / "config.json"
    config = with_changes(small_run, **BIGRAM, out=str(out))
    path.write_text(to_json(config))

    subprocess.run([sys.executable, "-c", LATE, str(path)], check=True)


def test_runs_without_a_place_are_numbered(small_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gpt").mkdir(parents=True)

    target = choose_target(small_run, resume=False, overwrite=False)

    assert target.path.as_posix() == "runs/gpt-2"


EXPLODED = re.compile(
    r"(?P<name>loss|gradient_norm) is (nan|inf) at step (?P<step>\d+) "
    r"\(learning_rate \S+, gradient_norm \S+; "
    r"the batch's windows start at tokens [\d, ]+ of the training text\): lower `learning_rate`; "
    r"(checkpoint (?P<kept>\d+) is kept|nothing was saved yet)"
)


def exploding_run(small_run, out, **changes):
    """The step of the message that stopped a run, and the checkpoint that it says is kept."""
    config = with_changes(small_run, out=str(out), **changes)
    with pytest.raises(FloatingPointError) as stopped:
        fit(config)
    found = EXPLODED.fullmatch(str(stopped.value))
    assert found is not None, stopped.value
    step = int(found["step"])
    lines = RunDirectory.open(out).metrics()
    assert [line["step"] for line in lines] == list(range(step))
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
    return step, found["kept"]


@pytest.mark.slow
def test_a_state_whose_loss_is_not_finite_is_not_kept(small_run, out):
    """The parameters are finite, of 1e15, but their loss is not: no use to resume."""
    wild = {"learning_rate": 1e15, "warmup_steps": 0, "gradient_clip": 0.0}

    _, kept = exploding_run(small_run, out, optimizer=wild, eval_interval=4)

    assert kept is None
    assert RunDirectory.open(out).checkpoint_steps() == []


@pytest.mark.slow
def test_what_explodes_stops_the_run_and_keeps_the_state_before_it(small_run, out):
    wild = {"learning_rate": 1e30, "warmup_steps": 0, "gradient_clip": 1.0}

    step, kept = exploding_run(small_run, out, optimizer=wild, eval_interval=1)

    assert kept == str(step - 1)
    run = RunDirectory.open(out)
    with Checkpoints(run, read_only=True) as checkpoints:
        state = checkpoints.restore(run.config())
    assert int(state.step) == step - 1
    for leaf in jax.tree.leaves(state.weights):
        assert np.isfinite(leaf).all()


def test_a_validation_loss_that_is_not_finite_blames_averages_too(small_run, out, monkeypatch):
    monkeypatch.setattr(loop.Evaluator, "exact", lambda *_: math.nan)
    config = with_changes(small_run, **BIGRAM, out=str(out))
    config = with_changes(config, optimizer={"ema_decay": 0.9})
    refusal = "nan after step 4: lower `ema_decay` or `learning_rate`; checkpoint 1 is kept$"

    with pytest.raises(FloatingPointError, match=refusal):
        fit(config)


def test_metrics_are_on_disk_before_the_checkpoint_of_their_step(small_run, out, monkeypatch):
    """Or a crash between them leaves a checkpoint whose steps have no metrics.

    A state that is evaluated next has its line of metrics in the checkpoint until then.
    """
    waiting = []
    seen = []
    save_state = Checkpoints.save
    record_loss = Checkpoints.evaluated

    def save_after_looking(checkpoints, state, loss, *, unevaluated=None):
        step = int(state.step)
        if unevaluated is None:
            last = checkpoints.run.metrics()[-1]
            seen.append((step, last["step"], last.get("validation_loss")))
        else:
            waiting.append((step, unevaluated["step"]))
        save_state(checkpoints, state, loss, unevaluated=unevaluated)

    def record_after_looking(checkpoints, step, loss):
        last = checkpoints.run.metrics()[-1]
        seen.append((step, last["step"], last["validation_loss"]))
        record_loss(checkpoints, step, loss)

    monkeypatch.setattr(Checkpoints, "save", save_after_looking)
    monkeypatch.setattr(Checkpoints, "evaluated", record_after_looking)
    config = with_changes(small_run, **BIGRAM, out=str(out))

    run = fit(config, progress=None)

    losses = values_of(lines_of(run.directory), "validation_loss")
    for saved, written, loss in seen:
        assert written == saved
        assert loss == losses.get(saved)
    assert {saved for saved, _, _ in seen} >= {1, 4, 8, 11}
    for saved, line in waiting:
        assert line == saved
    assert {saved for saved, _ in waiting} >= {4, 8, 11}


def with_nan(directory):
    """The run at step 0 of a GPT, one of whose parameters is not finite."""
    config = ModelConfig(vocab_size=256, block_size=7, num_layers=1, num_heads=2, embed_dim=12)
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    kernel = model.blocks[0].feed_forward.expansion.kernel
    kernel[...] = kernel[...].at[2, 3].set(jnp.nan)
    save(model, directory, tokenizer=ByteTokenizer(), config=config)
    return model


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_evaluated_quantised_or_trained(poem, out):
    model = with_nan(out)
    where = "blocks.0.feed_forward.expansion.kernel is not finite"
    saved = RunDirectory(out).config()
    config = with_changes(saved, dataset={"data": (str(poem),)}, steps=2)

    for weights in ("saved", "int8"):
        line = refused("sample", out, "--weights", weights, "--max-new-tokens", 3)
        assert "not finite" in line
    with pytest.raises(FloatingPointError, match=where):
        with_int8_weights(model)
    with pytest.raises(FloatingPointError, match=r"loss of .*run is nan: it has diverged"):
        evaluate(out, which="last")
    with pytest.raises(FloatingPointError, match="loss is nan at step 1 "):
        fit(config, resume=True, progress=None)


def test_a_perplexity_that_no_float_holds_is_infinite():
    assert _perplexity(709.0) == math.exp(709)
    assert _perplexity(710.0) == math.inf


@pytest.mark.slow
@pytest.mark.usefixtures("whole_fit")
def test_a_picture_that_can_t_be_drawn_costs_a_warning(small_run, out, monkeypatch):
    def savefig(*_, **__):
        raise RuntimeError("latex could not be found\nsecond line")

    monkeypatch.setattr(plots, "losses_image", savefig)
    config = with_changes(small_run, **BIGRAM, steps=1, out=str(out))
    heard = Heard()

    run = fit(config, progress=heard)

    (message,) = heard.messages
    assert message.startswith("no picture of the losses: ")
    assert message.endswith("latex could not be found")
    assert (run.directory / "samples.txt").is_file()
    assert not (run.directory / "loss.png").exists()


@pytest.mark.slow
def test_byte_pairs_are_learnt_from_a_text_as_from_what_was_prepared(small_run, tmp_path):
    prepared = tmp_path / "prepared"
    config = with_changes(small_run, **BIGRAM, steps=40)
    config = with_changes(config, dataset={"tokenizer": "bpe", "bpe_vocab_size": 300})
    prepare(config.dataset, prepared)
    losses = []
    for data in (config.dataset.data, (str(prepared),)):
        out = str(tmp_path / f"run {len(losses)}")

        run = fit(with_changes(config, dataset={"data": data}, out=out))

        losses.append(run.metrics["loss"][1:])
        loaded = load(run.directory)
        assert loaded.tokenizer.to_json() == run.tokenizer.to_json()

    of_text, of_prepared = losses
    assert of_text == of_prepared
    assert of_text[-1] < of_text[0] - 1


def test_two_evaluations_without_a_better_loss_are_two():
    assert not _stops_early([3.0, 2.0, 2.5], 2)
    assert _stops_early([3.0, 2.0, 2.5, 2.2], 2)
    assert not _stops_early([3.0, 2.0, 2.5, 1.9], 2)
    assert not _stops_early([], 1)


@pytest.mark.slow
def test_patience_stops_says_so_and_keeps_the_best(small_run, out):
    # a learning rate at which it gets worse from the first evaluation on
    high = {"learning_rate": 9.0, "schedule": "constant", "warmup_steps": 0}
    config = with_changes(small_run, **BIGRAM)
    config = with_changes(config, optimizer=high, out=str(out), steps=400, patience=2)
    progress = Heard()

    run = fit(config, progress=progress)

    lines = lines_of(out)
    losses = list(values_of(lines, "validation_loss").values())
    best = min(losses)
    assert len(losses) < 100
    assert losses.index(best) == len(losses) - 3
    assert run.validation_loss == best

    fit(config, resume=True, progress=progress)

    assert len(lines_of(out)) == len(lines)
    last = lines[-1]["step"]
    why = "no better validation loss in `patience=2` evaluations"
    assert progress.messages == [f"stopped at step {last} of 400: {why}"] * 2


@pytest.fixture(scope="module")
def worsening(small_run, tmp_path_factory) -> Run:
    """A run of averaged weights whose best model is not the last one."""
    worse = {"learning_rate": 0.3, "schedule": "constant", "warmup_steps": 0, "ema_decay": 0.3}
    config = with_changes(
        small_run,
        optimizer=worse,
        # within a verse, with which the training text begins
        dataset={"validation_fraction": 0.15},
        steps=8,
        eval_interval=2,
        eval_tokens=50,
        sample_tokens=60,
        out=str(tmp_path_factory.mktemp("worsening") / "run"),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fit_module, "draw_losses", lambda *_: None)
        return fit(config)


@pytest.mark.slow
def test_the_model_of_a_run_is_its_best(worsening):
    losses = values_of(lines_of(worsening.directory), "validation_loss")

    assert list(losses) == [2, 4, 6, 8]
    assert worsening.best_step == min(losses, key=lambda step: losses[step])
    assert worsening.best_step < 8
    assert worsening.validation_loss == losses[worsening.best_step]
    with Checkpoints(RunDirectory(worsening.directory), read_only=True) as checkpoints:
        best = checkpoints.restore_weights(worsening.config, worsening.best_step)
    model = nnx.to_pure_dict(nnx.state(worsening.model))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, model, best))


@pytest.mark.slow
def test_the_best_model_is_measured_on_eval_tokens_and_evaluated_on_all(worsening):
    tokens = load_dataset(worsening.config.dataset, 7).validation
    loss_of_50 = loss_by_hand(worsening.model, tokens[:50], 7)
    loss_of_all = loss_by_hand(worsening.model, tokens, 7)

    evaluation = evaluate(worsening.directory)

    assert worsening.validation_loss == pytest.approx(loss_of_50, rel=1e-5)
    assert worsening.evaluations.targets == 49
    assert worsening.evaluations.spread is False
    assert len(tokens) > 50
    assert evaluation.tokens == len(tokens) - 1
    assert evaluation.loss == pytest.approx(loss_of_all, rel=1e-5)


@pytest.mark.slow
def test_the_best_model_says_the_sample_at_the_default_temperature(worsening):
    prompt = jnp.asarray(worsening.tokenizer.encode("\n"))[None]
    key = jax.random.key(2**32 - 1)
    texts = {}
    for temperature in (0.0, 0.7, 0.8, 0.9, 1.0):
        drawn = generate(worsening.model, prompt, 60, key=key, temperature=temperature)
        texts[temperature] = worsening.tokenizer.decode(np.asarray(drawn[0]))

    assert worsening.sample == texts[0.8]  # as `jgpt sample`'s default
    assert len(set(texts.values())) > 3


@pytest.mark.slow
def test_an_estimate_is_of_the_averaged_weights_too(small_run, tmp_path):
    config = with_changes(small_run, **BIGRAM, steps=4, eval_tokens=50)
    config = with_changes(config, optimizer={"ema_decay": 0.7})
    evaluated = with_changes(config, eval_interval=2, out=str(tmp_path / "evaluated"))
    estimated = with_changes(config, eval_interval=4, out=str(tmp_path / "estimated"))

    losses = values_of(lines_of(fit(evaluated).directory), "validation_loss")
    estimates = values_of(lines_of(fit(estimated).directory), "validation_estimate")

    assert estimates[2] == pytest.approx(losses[2], rel=1e-6)  # so few windows are all estimated


@pytest.mark.slow
def test_overwriting_starts_again_with_another_text_and_keeps_what_is_not_the_run_s(copy, tmp_path):
    """The old text's provenance would stand in the way of resuming with the new one."""
    notes = tmp_path / "copy" / "notes.txt"
    notes.write_text("mine")
    other = tmp_path / "new.txt"
    other.write_text("so long lives this, and this gives life to thee " * 40)
    config = with_changes(copy, **BIGRAM, dataset={"data": (str(other),)}, steps=2)
    digest = load_dataset(config.dataset, 7).digest

    run = fit(config, overwrite=True)

    assert [line["step"] for line in lines_of(run.directory)] == [0, 1, 2]
    assert notes.read_text() == "mine"
    assert len(run.sample) == 1
    with Checkpoints(RunDirectory(run.directory), read_only=True) as checkpoints:
        assert checkpoints.step("best") == 2
        assert checkpoints.step("last") == 2
    (line,) = RunDirectory(run.directory).provenance()
    assert line["tokens_sha256"] == digest

    fit(dataclasses.replace(config, steps=3), resume=True)

    begun_at = [line["step"] for line in RunDirectory(run.directory).provenance()]
    assert begun_at == [0, 2]


def test_processes_must_agree_on_what_is_asked_and_on_what_they_see(copy, monkeypatch):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("jgpt.fitting.fit.require_same", seen.append)
    recorded_facts = RunDirectory(Path(str(copy.out))).provenance()[0]
    expected = {
        "resume": True,
        "overwrite": False,
        "checkpoints": [8, 11],
        "seed": copy.seed,
        "tokens_sha256": recorded_facts["tokens_sha256"],
        **recorded_facts["versions"],
    }

    fit(copy, resume=True)

    (facts,) = seen
    assert facts | expected == facts
    assert {"model.dropout", "optimizer.beta2", "dataset.data", "mesh"} <= facts.keys()


def test_processes_compare_the_checkpoints_that_they_overwrite(copy):
    target = choose_target(copy, resume=False, overwrite=True)
    prepared = prepare_module.prepare(copy, target, this_machine(), Heard())

    facts = prepare_module.shared_facts(prepared, resume=False, overwrite=True)

    assert facts["checkpoints"] == [8, 11]


def test_a_model_that_is_too_large_is_rejected_before_it_compiles(small_run, out, monkeypatch):
    monkeypatch.setattr("jgpt.hardware.memory_limit", lambda: 100)
    config = dataclasses.replace(small_run, out=str(out))

    with pytest.raises(ValueError, match="choose a smaller model"):
        fit(config)

    assert not out.exists()


def test_the_room_that_the_checkpoints_need_is_said(small_run, tmp_path, out, monkeypatch):
    """A state of 2 MiB: the best three, the last four, and the one that is being written."""
    monkeypatch.setattr("jgpt.fitting.prepare.bytes_of", lambda _: 2 << 20)
    config = with_changes(small_run, **BIGRAM, out=str(out), keep_best=3, keep_last=4)
    disk = types.SimpleNamespace(free=16 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)

    assert plan(config).out == out

    for free, said in (((16 << 20) - 1, r"16\.0 MiB"), (1000, "1,000 bytes")):
        disk.free = free
        message = rf"{said} free, but the checkpoints need 16\.0 MiB"
        with pytest.raises(OSError, match=message):
            fit(config)
        with pytest.raises(OSError, match=message):
            plan(config)
    assert list(tmp_path.iterdir()) == []


def test_all_that_depends_on_the_devices_is_decided_for_the_default_mesh(
    small_run, out, monkeypatch
):
    """Eight devices have three rows of the batch each, and one of them fits."""

    def memory_of_rows(config):
        rows = 24 // config.micro_batches // current_mesh().size
        return TrainingMemory(0, rows)

    def describe(config):
        return f"replicated over {config.mesh}"

    monkeypatch.setattr("jgpt.hardware.accelerators", lambda: 8)
    monkeypatch.setattr("jgpt.hardware.host_memory", lambda: 2 * 8 * 1)
    monkeypatch.setattr("jgpt.fitting.prepare.describe_replicated", describe)
    monkeypatch.setattr("jgpt.training.memory.training_memory", memory_of_rows)
    config = with_changes(small_run, **BIGRAM, out=str(out), batch_size=24, micro_batches="auto")
    target = choose_target(config, resume=False, overwrite=False)
    heard = Heard()

    prepared = prepare_module.prepare(config, target, this_machine(), heard)
    facts = prepare_module.shared_facts(prepared, resume=False, overwrite=False)

    assert prepared.config.recorded.mesh is None
    assert prepared.config.trained.mesh == "data=8"
    assert prepared.config.trained.micro_batches == 3
    assert heard.messages[-1] == "replicated over data=8"
    # what processes compare is what each of them has decided
    assert facts["mesh"] == "data=8"
    assert facts["micro_batches"] == 3


def test_nothing_is_compiled_for_a_disk_that_is_too_small(small_run, out, monkeypatch):
    def compiled(config):
        raise AssertionError("steps were compiled")

    monkeypatch.setattr("jgpt.training.memory.training_memory", compiled)
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))
    config = with_changes(small_run, **BIGRAM, out=str(out), micro_batches="auto")

    with pytest.raises(OSError, match="has 1,000 bytes free"):
        plan(config)


def buffers_alive() -> dict[int, int]:
    """The bytes of each buffer that arrays hold; arrays may share one."""
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return buffers


@pytest.mark.slow
@pytest.mark.usefixtures("whole_fit")
def test_no_stage_of_training_holds_a_second_state(small_run, out, monkeypatch):
    model = {"embed_dim": 48, "num_heads": 3}
    config = with_changes(small_run, model=model, out=str(out), steps=6)
    longer = dataclasses.replace(config, steps=8)
    monkeypatch.setattr("jgpt.runs.checkpoints.WAITED_FOR", 1)
    before = buffers_alive()
    stages = []

    def noted(name, function):
        def call(*args, **options):
            result = function(*args, **options)
            jax.block_until_ready(result)
            alive = 0
            for buffer, size in buffers_alive().items():
                if buffer not in before:
                    alive += size
            stages.append((name, alive))
            return result

        return call

    make_steps = fit_module.make_train_steps

    def make_noted_steps(config):
        return noted("steps", make_steps(config))

    monkeypatch.setattr(fit_module, "make_train_steps", make_noted_steps)
    for owner, name in (
        (fit_module, "init_state"),
        (fit_module, "load"),
        (fit_module, "_sample"),
        (Checkpoints, "restore"),
        (Checkpoints, "save"),
    ):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))

    run = fit(config)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(run.model)))
    del run
    fit(longer, resume=True)
    fit(longer, resume=True)  # takes no step

    state = 3 * weights  # with the two moments of AdamW
    expected = {
        "init_state": state,
        "steps": state,
        "save": state,
        "restore": state,
        "load": weights,
        "_sample": weights,
    }
    assert {name for name, _ in stages} == expected.keys()
    for name, alive in stages:
        assert expected[name] <= alive < 1.3 * expected[name], (name, alive / expected[name])


@pytest.mark.slow
def test_a_plan_is_of_one_device_of_the_mesh(small_run, out):
    config = dataclasses.replace(small_run, batch_size=8, out=str(out))

    replicated = plan(dataclasses.replace(config, mesh="data=8")).memory
    sharded = plan(dataclasses.replace(config, mesh="data=2,fsdp=4")).memory

    assert replicated is not None
    assert sharded is not None
    assert 0 < sharded.state < replicated.state / 2


def test_a_plan_for_another_platform_and_all_devices_is_still_of_this_process(
    small_run, out, monkeypatch
):
    """What is planned is what would be trained, and not what would be recorded of it."""
    monkeypatch.setattr("jgpt.hardware.accelerators", lambda: 8)
    monkeypatch.setattr("jgpt.fitting.fit.memory_in_use", lambda: 10**9)
    config = with_changes(small_run, **BIGRAM, out=str(out), batch_size=24)

    made = plan(config, platform=Platform("tpu"))

    assert made.config.mesh == "data=8"
    assert made.memory is not None
    of_a_device = made.memory.state + made.memory.working
    assert made.process_memory == 10**9 + 8 * of_a_device


@pytest.mark.slow
def test_the_model_of_a_run_is_of_the_platform_it_was_trained_for(small_run, out):
    config = with_changes(small_run, model={"dtype": "auto"}, out=str(out), steps=1)

    run = fit(config, platform=Platform("tpu"))

    assert run.config.model.dtype == "bfloat16"
    assert run.config.model.activation_dtype == "auto"
    model: Any = run.model
    assert model.config.dtype == "bfloat16"
    assert model.config.activation_dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "devices"), [(None, 1), ("data=2,fsdp=4", 8)])
def test_the_utilisation_is_that_of_all_devices(small_run, out, monkeypatch, mesh, devices):
    class Made(Exception):
        pass

    def logger(config, run, trackers, *, training_tokens, shares, devices, report):
        raise Made(devices)

    monkeypatch.setattr(fit_module, "MetricsLogger", logger)
    config = dataclasses.replace(small_run, batch_size=8, mesh=mesh, out=str(out))

    with pytest.raises(Made) as made:
        fit(config)

    assert made.value.args == (devices,)
