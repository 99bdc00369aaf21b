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
from jgpt.data.dataset import load_dataset, prepare
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
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_all_that_it_promises(trained, small_run, poem):
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
    assert (trained.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (trained.directory / "samples.txt").read_text() == trained.sample
    assert len(trained.sample) == 1 + small_run.sample_tokens
    assert set(trained.sample) <= set(poem.read_text())
    assert trained.tokenizer.vocab_size == trained.config.model.vocab_size
    assert trained.tokenizer.vocab_size == len(set(poem.read_text()))
    model, _, config = load(trained.directory)
    assert config == trained.config
    tokens = jnp.array([[0, 1, 2]])
    assert jnp.array_equal(model(tokens), trained.model(tokens))


def test_a_stop_while_the_text_is_tokenized_leaves_no_run(small_run, tmp_path):
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"))
    with pytest.raises(StoppedBeforeTraining, match=r"^stopped before training began"):
        fit(config, should_stop=lambda: True)
    assert not (tmp_path / "run").exists()


def test_one_of_several_processes_does_not_stop_alone_while_the_text_is_tokenized(
    small_run, tmp_path, monkeypatch
):
    """The others would wait for it; they agree on a stop between steps."""
    monkeypatch.setattr("jgpt.fitting.prepare.process_count", lambda: 2)
    config = with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"))
    target = choose_target(config, resume=False, overwrite=False)
    prepared = prepare_module.prepare(config, target, this_machine(), Heard(), lambda: True)
    assert len(prepared.dataset.train) > 0


def loss_by_hand(model, tokens, size: int) -> float:
    """The mean over all targets, in windows of a size."""
    run = nnx.jit(lambda model, window: token_losses(model(window[:, :-1]), window[:, 1:]).sum())
    starts = range(0, len(tokens) - 1, size)
    losses = (run(model, jnp.asarray(tokens[None, at : at + size + 1], jnp.int32)) for at in starts)
    return float(sum(losses)) / (len(tokens) - 1)


def test_the_validation_loss_is_the_model_s_on_every_held_out_target(trained):
    tokens = load_dataset(trained.config.dataset, 7).validation
    loss, shorter = (loss_by_hand(trained.model, tokens, size) for size in (7, 5))

    assert trained.validation_loss == pytest.approx(loss, rel=1e-5)
    assert evaluate(trained.directory, window=5).loss == pytest.approx(shorter, rel=1e-5)
    assert shorter != pytest.approx(loss, rel=3e-5)
    for size in (0, 8):
        with pytest.raises(ValueError, match=f"window={size} must be from 1 to block_size=7"):
            evaluate(trained.directory, window=size)


@pytest.mark.slow
def test_a_test_split_is_evaluated_alone_and_by_its_own_characters(small_run, tmp_path):
    """Characters of one byte in the training text, of two for validation, of four in the test.

    The whole split is evaluated, of which the run's own evaluations have a part.
    """
    text = "a" * 600 + "é" * 100 + "🙂" * 50
    (tmp_path / "text").write_text(text, encoding="utf-8")
    data = DataConfig((str(tmp_path / "text"),), True, "byte", 300, None, 0.2, 0.2)
    model = BigramLM(256, rngs=nnx.Rngs(3))
    its_config = ModelConfig("bigram", 256)
    config = dataclasses.replace(small_run, model=its_config, dataset=data, eval_tokens=150)
    save(model, tmp_path / "run", tokenizer=ByteTokenizer(), config=config)
    tokens = jnp.asarray(np.frombuffer(text.encode(), np.uint8), jnp.int32)
    losses = np.asarray(token_losses(model(tokens[None, :-1])[0], tokens[1:]))
    splits: list[tuple[Literal["validation", "test"], int, int, int]] = [
        ("validation", 600, 199, 99),
        ("test", 800, 199, 49),
    ]
    for split, first, targets, characters in splits:
        loss = losses[first : first + targets].mean()
        found = evaluate(tmp_path / "run", which="last", split=split)
        bits = losses[first : first + targets].sum() / characters / math.log(2)
        assert (found.tokens, found.loss) == (targets, pytest.approx(loss, rel=1e-5))
        assert found.bits_per_character == pytest.approx(bits, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_another_text_is_evaluated_whole_with_the_run_s_tokenizer(trained, tmp_path):
    text = trained.tokenizer.decode(list(range(trained.tokenizer.vocab_size)) * 3)
    table = tmp_path / "other.csv"
    table.write_text(f'id,body\n1,"{text}"\n', encoding="utf-8")
    tokens = trained.tokenizer.encode(f"{text}\n")

    found = evaluate(trained.directory, data=str(table), data_field="body")

    assert found.loss == pytest.approx(loss_by_hand(trained.model, tokens, 7), rel=1e-5)
    assert found.loss != pytest.approx(trained.validation_loss, rel=1e-3)
    assert (found.tokens, found.data) == (len(tokens) - 1, str(table))


def test_another_text_that_can_t_be_evaluated_is_named(trained, tmp_path):
    def refused(text, match, **options):
        other = tmp_path / "other.txt"
        other.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=match) as error:
            evaluate(trained.directory, data=(str(other),), **options)
        assert "\n" not in str(error.value)

    unknown = "unknown character '🙂' at position 0"
    refused("🙂", rf"other\.txt can't be encoded by the run's tokenizer: {unknown}")
    first = trained.tokenizer.decode([0])
    refused(first, r"other\.txt has 1 token: an evaluation needs two$")
    refused(first, "^give data or split='test', not both$", split="test")
    with pytest.raises(ValueError, match="data_field='body' is for another text: give data"):
        evaluate(trained.directory, data_field="body")


def test_a_run_for_a_mesh_is_evaluated_on_one_device_where_no_micro_batches_are_recorded(
    poem, tmp_path
):
    """A sequence at a time would be too few for the devices of the mesh."""
    model_config = ModelConfig("bigram", 256)
    data = DataConfig((str(poem),), tokenizer="byte")
    config = TrainConfig(
        model=model_config, dataset=data, batch_size=4, micro_batches="auto", mesh="data=2"
    )
    model = BigramLM(256, rngs=nnx.Rngs(3))
    save(model, tmp_path / "run", tokenizer=ByteTokenizer(), config=config)

    found = evaluate(tmp_path / "run", which="last")

    tokens = load_dataset(data, config.model.block_size).validation
    assert found.loss == pytest.approx(loss_by_hand(model, tokens, 7), rel=1e-5)


@pytest.mark.slow
def test_the_saved_config_repeats_the_run_and_progress_that_hears_sooner_changes_no_number(
    trained, tmp_path
):
    class Sooner(Heard):
        most_steps = 1

        def stepped(self, step, loss, tokens_per_second):
            super().stepped(step, loss, tokens_per_second)
            self.most_steps = 2 if step >= 5 else 1

    heard = Sooner()
    config = read_config(trained.directory / "config.json")
    again = fit(dataclasses.replace(config, out=str(tmp_path / "run")), progress=heard)

    assert fingerprint(again.directory) == fingerprint(trained.directory)
    assert again.sample == trained.sample
    assert heard.steps[:5] == [1, 2, 3, 4, 5]  # steps_per_call is 3
    # the call after step 5 may be under way when step 5 is heard
    assert heard.steps[5:] in ([6, 8, 10, 11], [7, 8, 10, 11])  # evaluated at 8


@pytest.mark.slow
def test_in_many_processes_a_call_has_as_many_steps_as_in_those_without_progress(
    small_run, tmp_path, monkeypatch
):
    class Sooner(Heard):
        most_steps = 1

    monkeypatch.setattr("jgpt.fitting.loop.process_count", lambda: 2)
    heard = Sooner()
    fit(dataclasses.replace(small_run, out=str(tmp_path / "run")), progress=heard)

    # steps_per_call is 3, early estimates at 1 and 2, evaluations at 4 and 8
    assert heard.steps == [1, 2, 4, 7, 8, 11]


class Observed(NamedTuple):
    """A run, and what was seen of it."""

    run: Run
    events: list[Any]
    """Calls of steps with their number, and what comes before and after."""
    log: list[str]
    tracked: list[dict[str, Any]]
    heard: Heard


@pytest.fixture(scope="module")
def observed(small_run, tmp_path_factory) -> Observed:
    events = []
    log = []
    tracked = []
    heard = Heard()

    def open_tracker(path, step, config, new):
        return types.SimpleNamespace(
            log=lambda values, step: tracked.append({"step": step, **values}),
            close=lambda: tracked.append({}),
        )

    def recorded_steps(config):
        return recorded(events, lambda *arguments: ("steps", arguments[3]), make(config))

    make = fit_module.make_train_steps
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    out = str(tmp_path_factory.mktemp("observed") / "run")
    config = dataclasses.replace(small_run, out=out, seed=3, trackers=("wandb",))
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patched, jax.log_compiles():
        patched.setattr(fit_module, "make_train_steps", recorded_steps)
        released = recorded(events, "release_memory", loop.release_memory)
        for module in (loop, fit_module):
            patched.setattr(module, "release_memory", released)
        patched.setattr(fit_module, "generate", recorded(events, "generate", fit_module.generate))
        drawn = recorded(events, "losses_image", plots.losses_image)
        patched.setattr(plots, "losses_image", drawn)
        for module in (prepare_module, trackers):
            patched.setattr(module, "require_tracker", lambda name: open_tracker)
        logging.getLogger().addHandler(handler)
        run = fit(config, progress=heard)
        logging.getLogger().removeHandler(handler)
    return Observed(run, events, log, tracked, heard)


@pytest.mark.slow
def test_compiling_takes_no_step_and_gives_its_memory_back(observed):
    events = observed.events
    steps = [event for event in events if event[0] == "steps"]

    assert steps == [("steps", count) for count in (0, 1, 1, 2, 3, 1, 3)]
    assert events[:2] == [("steps", 0), "release_memory"]
    assert events[-4:] == ["release_memory", "generate", "release_memory", "losses_image"]
    assert events.count("release_memory") == 4  # the other after the first evaluation
    assert len(events) == len(steps) + 6


@pytest.mark.slow
def test_a_run_compiles_each_function_once(observed):
    found = re.findall(r"Finished XLA compilation of jit\((\w+)\)", "\n".join(observed.log))
    for name in ("steps", "evaluate", "_window_starts", "_gather"):
        assert found.count(name) == 1, (name, found)
    assert observed.heard.messages == []


def test_trackers_are_given_every_line_and_closed(observed):
    assert observed.tracked == [*lines_of(observed.run.directory), {}]


@pytest.mark.slow
def test_what_training_needs_late_is_imported_late(small_run, tmp_path):
    config = tmp_path / "config.json"
    quick = with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"))
    config.write_text(to_json(quick))
    code = (
        "import pathlib, sys\n"
        "from jgpt import TrainConfig, fit\n"
        "from jgpt.fields import from_json\n"
        "late = {'orbax.checkpoint', 'matplotlib'}\n"
        "seen = []\n"
        "def stop(): seen.append(late & set(sys.modules)); return False\n"
        f"config = from_json(TrainConfig, pathlib.Path({str(config)!r}).read_text())\n"
        "fit(config, should_stop=stop)\n"
        "assert seen[0] == set() and seen[-1] == {'orbax.checkpoint'}, seen\n"
        "assert late <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_runs_without_a_place_are_numbered(small_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gpt").mkdir(parents=True)
    out = choose_target(small_run, resume=False, overwrite=False).path

    assert out.as_posix() == "runs/gpt-2"


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_what_explodes_stops_the_run_and_keeps_the_state_before_it(small_run, tmp_path, clip):
    rate = 1e30 if clip else 1e15
    wild = {"learning_rate": rate, "warmup_steps": 0, "gradient_clip": clip}
    out = str(tmp_path / "wild")
    interval = 1 if clip else 4
    config = with_changes(small_run, optimizer=wild, out=out, eval_interval=interval)
    with pytest.raises(FloatingPointError) as stopped:
        fit(config)
    found = re.fullmatch(
        r"(loss|gradient_norm) is (nan|inf) at step (\d+) \(learning_rate \S+, gradient_norm \S+; "
        r"the batch's windows start at tokens [\d, ]+ of the training text\): lower learning_rate; "
        r"(?:checkpoint (\d+) is kept|nothing was saved yet)",
        str(stopped.value),
    )
    assert found is not None
    step = int(found[3])
    run = RunDirectory.open(tmp_path / "wild")
    assert [line["step"] for line in run.metrics()] == list(range(step))
    assert all(math.isfinite(value) for line in run.metrics() for value in line.values())
    if clip == 0:  # the parameters are finite, of 1e15, but their loss is not: no use to resume
        assert (found[4], run.checkpoint_steps()) == (None, [])
        return
    assert int(found[4]) == step - 1
    with Checkpoints(run, read_only=True) as checkpoints:
        state = checkpoints.restore(run.config())
    assert int(state.step) == step - 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.weights))


def test_a_validation_loss_that_is_not_finite_blames_averages_too(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.Evaluator, "exact", lambda *_: math.nan)
    config = with_changes(with_changes(small_run, **BIGRAM), optimizer={"ema_decay": 0.9})
    refusal = "nan after step 4: lower ema_decay or learning_rate; checkpoint 1 is kept$"

    with pytest.raises(FloatingPointError, match=refusal):
        fit(dataclasses.replace(config, out=str(tmp_path / "run")))


def test_metrics_are_on_disk_before_the_checkpoint_of_their_step(small_run, tmp_path, monkeypatch):
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
    config = with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"))
    run = fit(config, progress=None)
    assert {saved for saved, _, _ in seen} >= {1, 4, 8, 11}
    losses = {line["step"]: line.get("validation_loss") for line in lines_of(run.directory)}
    for saved, written, loss in seen:
        assert written == saved
        assert loss == losses[saved]
    assert {saved for saved, _ in waiting} >= {4, 8, 11}
    for saved, line in waiting:
        assert line == saved


def with_nan(directory):
    """The run at step 0 of a GPT, one of whose parameters is not finite."""
    config = ModelConfig(vocab_size=256, block_size=7, num_layers=1, num_heads=2, embed_dim=12)
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    kernel = model.blocks[0].feed_forward.expansion.kernel
    kernel[...] = kernel[...].at[2, 3].set(jnp.nan)
    save(model, directory, tokenizer=ByteTokenizer(), config=config)
    return model


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_evaluated_quantised_or_trained(poem, tmp_path):
    model = with_nan(tmp_path / "run")
    where = "blocks.0.feed_forward.expansion.kernel is not finite"
    for weights in ("saved", "int8"):
        words = ("sample", tmp_path / "run", "--weights", weights, "--max-new-tokens", 3)
        assert "not finite" in refused(*words)
    with pytest.raises(FloatingPointError, match=where):
        with_int8_weights(model)
    with pytest.raises(FloatingPointError, match=rf"loss of .*run is nan: {where}"):
        evaluate(tmp_path / "run", which="last")
    config = RunDirectory(tmp_path / "run").config()
    config = with_changes(config, dataset={"data": (str(poem),)}, steps=2)
    with pytest.raises(ValueError, match=r"checkpoint .*0 has values that are not finite"):
        fit(config, resume=True, progress=None)


def test_a_perplexity_that_no_float_holds_is_infinite():
    assert _perplexity(709.0) == math.exp(709)
    assert _perplexity(710.0) == math.inf


@pytest.mark.slow
@pytest.mark.usefixtures("whole_fit")
@pytest.mark.parametrize("wrong", ["usetex", "font"])
def test_a_picture_that_can_t_be_drawn_costs_a_warning(small_run, tmp_path, monkeypatch, wrong):
    def savefig(*_, **__):
        raise RuntimeError("latex could not be found\nsecond line")

    if wrong == "usetex":
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    else:
        monkeypatch.setattr(plots, "losses_image", savefig)
    heard = Heard()
    run = fit(with_changes(small_run, **BIGRAM, steps=1, out=str(tmp_path / "run")), progress=heard)
    (message,) = heard.messages
    assert message.startswith("no picture of the losses: ")
    assert message.endswith("latex could not be found")
    assert (run.directory / "samples.txt").is_file()
    assert not (run.directory / "loss.png").exists()
    if wrong == "usetex":
        assert "latex could not be found" in refused("plot", run.directory, cwd=tmp_path)


@pytest.mark.slow
def test_byte_pairs_are_learnt_from_a_text_as_from_what_was_prepared(small_run, tmp_path):
    config = with_changes(small_run, **BIGRAM, steps=40)
    config = with_changes(config, dataset={"tokenizer": "bpe", "bpe_vocab_size": 300})
    prepare(config.dataset, tmp_path / "prepared")
    losses = []
    for data in (config.dataset.data, (str(tmp_path / "prepared"),)):
        out = str(tmp_path / f"run {len(losses)}")
        run = fit(with_changes(config, dataset={"data": data}, out=out))
        losses.append(run.metrics["loss"][1:])
        assert load(run.directory)[1].to_json() == run.tokenizer.to_json()

    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 1


@pytest.mark.slow
def test_patience_stops_says_so_and_keeps_the_best(small_run, tmp_path):
    assert not _stops_early([3.0, 2.0, 2.5], 2)
    assert _stops_early([3.0, 2.0, 2.5, 2.2], 2)
    assert not _stops_early([3.0, 2.0, 2.5, 1.9], 2)
    assert not _stops_early([], 1)
    # a learning rate at which it gets worse from the first evaluation on
    high = {"learning_rate": 9.0, "schedule": "constant", "warmup_steps": 0}
    out = str(tmp_path / "run")
    progress = Heard()
    config = with_changes(small_run, **BIGRAM | {"optimizer": high}, out=out, steps=400, patience=2)
    run = fit(config, progress=progress)
    lines = RunDirectory.open(run.directory).metrics()
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert len(losses) < 100
    assert losses.index(min(losses)) == len(losses) - 3
    assert run.validation_loss == min(losses)
    again = fit(config, resume=True, progress=progress)
    assert len(RunDirectory.open(again.directory).metrics()) == len(lines)
    why = "no better validation loss in patience=2 evaluations"
    assert progress.messages == [f"stopped at step {lines[-1]['step']} of 400: {why}"] * 2


@pytest.mark.slow
def test_the_best_model_is_measured_on_eval_tokens_and_says_the_sample(small_run, tmp_path):
    """At a learning rate at which the last model is not the best; the average is measured."""
    worse = {"learning_rate": 0.3, "schedule": "constant", "warmup_steps": 0, "ema_decay": 0.3}
    sizes = {"steps": 8, "eval_interval": 2, "eval_tokens": 50, "sample_tokens": 60}
    within = {"validation_fraction": 0.15}  # of a verse: the training text begins with one
    options = {"optimizer": worse, "dataset": within, "out": str(tmp_path / "run"), **sizes}
    run = fit(with_changes(small_run, **options))
    losses = {
        line["step"]: line["validation_loss"]
        for line in lines_of(run.directory)
        if "validation_loss" in line
    }
    assert [*losses] == [2, 4, 6, 8]
    assert run.best_step == min(losses, key=lambda step: losses[step])
    assert run.best_step < 8
    with Checkpoints(RunDirectory(run.directory), read_only=True) as checkpoints:
        best = checkpoints.restore_weights(run.config, run.best_step)
    model = nnx.to_pure_dict(nnx.state(run.model))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, model, best))

    tokens = load_dataset(run.config.dataset, 7).validation[:50]
    loss = pytest.approx(loss_by_hand(run.model, tokens, 7), rel=1e-5)
    assert run.validation_loss == loss
    assert run.validation_loss == losses[run.best_step]
    assert (run.evaluations.targets, run.evaluations.spread) == (49, False)
    whole = load_dataset(run.config.dataset, 7).validation
    evaluation = evaluate(run.directory)
    assert evaluation.tokens == len(whole) - 1 > 49
    assert evaluation.loss == pytest.approx(loss_by_hand(run.model, whole, 7), rel=1e-5)

    def said(temperature):
        key = jax.random.key(2**32 - 1)
        prompt = jnp.asarray(run.tokenizer.encode("\n"))[None]
        drawn = generate(run.model, prompt, 60, key=key, temperature=temperature)
        return run.tokenizer.decode(np.asarray(drawn[0]))

    assert run.sample == said(0.8)  # as `jgpt sample`'s default
    assert len({said(0.0), said(0.7), said(0.8), said(0.9), said(1.0)}) > 3


@pytest.mark.slow
def test_an_estimate_is_of_the_averaged_weights_too(small_run, tmp_path):
    config = with_changes(small_run, **BIGRAM, steps=4, eval_tokens=50)
    losses = []
    for interval, name in ((2, "validation_loss"), (4, "validation_estimate")):
        out = str(tmp_path / name)
        its = with_changes(config, eval_interval=interval, optimizer={"ema_decay": 0.7}, out=out)
        losses.append(lines_of(fit(its).directory)[2][name])

    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # so few windows are all estimated


@pytest.mark.slow
def test_overwriting_starts_again_with_another_text_and_keeps_what_is_not_the_run_s(copy, tmp_path):
    """The old text's provenance would stand in the way of resuming with the new one."""
    (tmp_path / "copy" / "notes.txt").write_text("mine")
    (tmp_path / "new.txt").write_text("so long lives this, and this gives life to thee " * 40)
    data = {"data": (str(tmp_path / "new.txt"),)}
    config = with_changes(copy, **BIGRAM, dataset=data, steps=2)
    run = fit(config, overwrite=True)
    assert [line["step"] for line in lines_of(run.directory)] == [0, 1, 2]
    assert (tmp_path / "copy" / "notes.txt").read_text() == "mine"
    assert len(run.sample) == 1
    with Checkpoints(RunDirectory(run.directory), read_only=True) as checkpoints:
        assert checkpoints.step("best") == checkpoints.step("last") == 2
    (line,) = RunDirectory(run.directory).provenance()
    assert line["corpus_sha256"] == load_dataset(config.dataset, 7).text.tokens_digest
    fit(dataclasses.replace(config, steps=3), resume=True)
    assert [line["step"] for line in RunDirectory(run.directory).provenance()] == [0, 2]


def test_processes_must_agree_on_what_is_asked_and_on_what_they_see(copy, monkeypatch):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("jgpt.fitting.fit.require_same", seen.append)
    fit(copy, resume=True)
    (facts,) = seen
    line = RunDirectory(Path(str(copy.out))).provenance()[0]
    alike = {
        **{"resume": True, "overwrite": False, "checkpoints": [8, 11], "seed": copy.seed},
        **{name: line[name] for name in ("text_sha256", "corpus_sha256")},
        **line["versions"],
    }

    assert {name: facts.get(name) for name in alike} == alike
    assert {"model.dropout", "optimizer.beta2", "dataset.data", "mesh"} <= facts.keys()


def test_processes_compare_the_checkpoints_that_they_overwrite(copy):
    target = choose_target(copy, resume=False, overwrite=True)
    prepared = prepare_module.prepare(copy, target, this_machine(), Heard())

    facts = prepare_module.shared_facts(prepared, resume=False, overwrite=True)

    assert facts["checkpoints"] == [8, 11]


def test_a_model_that_is_too_large_is_rejected_before_it_compiles(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr("jgpt.hardware.memory_limit", lambda: 100)
    with pytest.raises(ValueError, match="choose a smaller model"):
        fit(dataclasses.replace(small_run, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_the_room_that_the_checkpoints_need_is_said(small_run, tmp_path, monkeypatch):
    """A state of 2 MiB: the best three, the last four, and the one that is being written."""
    monkeypatch.setattr("jgpt.fitting.prepare.bytes_of", lambda _: 2 << 20)
    config = with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"), keep_best=3, keep_last=4)
    disk = types.SimpleNamespace(free=16 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    assert plan(config).out == tmp_path / "run"
    for free, said in (((16 << 20) - 1, r"16\.0 MiB"), (1000, "1,000 bytes")):
        disk.free = free
        for start in (fit, plan):
            with pytest.raises(OSError, match=rf"{said} free, but the checkpoints need 16\.0 MiB"):
                start(config)
    assert not list(tmp_path.iterdir())


def test_all_that_depends_on_the_devices_is_decided_for_the_default_mesh(
    small_run, tmp_path, monkeypatch
):
    """Eight devices have three rows of the batch each, and one of them fits."""
    monkeypatch.setattr("jgpt.hardware.accelerators", lambda: 8)
    monkeypatch.setattr("jgpt.hardware.host_memory", lambda: 2 * 8 * 1)
    monkeypatch.setattr(
        "jgpt.fitting.prepare.describe_replicated", lambda config: f"replicated over {config.mesh}"
    )

    def memory_of_rows(config):
        return TrainingMemory(0, 24 // config.micro_batches // current_mesh().size)

    monkeypatch.setattr("jgpt.training.memory.training_memory", memory_of_rows)
    config = with_changes(
        small_run, **BIGRAM, out=str(tmp_path / "run"), batch_size=24, micro_batches="auto"
    )
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


def test_nothing_is_compiled_for_a_disk_that_is_too_small(small_run, tmp_path, monkeypatch):
    def compiled(config):
        raise AssertionError("steps were compiled")

    monkeypatch.setattr("jgpt.training.memory.training_memory", compiled)
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))
    config = with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"), micro_batches="auto")
    with pytest.raises(OSError, match="has 1,000 bytes free"):
        plan(config)


def buffers_alive() -> dict[int, int]:
    """The bytes of each buffer that arrays hold; arrays may share one."""
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    return {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}


@pytest.mark.slow
@pytest.mark.usefixtures("whole_fit")
def test_no_stage_of_training_holds_a_second_state(small_run, tmp_path, monkeypatch):
    model = {"embed_dim": 48, "num_heads": 3}
    config = with_changes(small_run, model=model, out=str(tmp_path / "run"), steps=6)
    monkeypatch.setattr("jgpt.runs.checkpoints.WAITED_FOR", 1)
    before = buffers_alive()
    stages = []

    def noted(name, function):
        def call(*args, **options):
            result = function(*args, **options)
            jax.block_until_ready(result)
            found = buffers_alive()
            stages.append((name, sum(found[each] for each in found.keys() - before.keys())))
            return result

        return call

    make_steps = fit_module.make_train_steps
    monkeypatch.setattr(
        fit_module, "make_train_steps", lambda given: noted("steps", make_steps(given))
    )
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
    fit(dataclasses.replace(config, steps=8), resume=True)
    fit(dataclasses.replace(config, steps=8), resume=True)  # takes no step
    state = 3 * weights  # with the two moments of AdamW

    assert {name for name, _ in stages} == {
        *("init_state", "steps", "save", "load", "_sample", "restore")
    }
    for name, alive in stages:
        expected = weights if name in ("load", "_sample") else state
        assert expected <= alive < 1.3 * expected, (name, alive / expected)


@pytest.mark.slow
def test_a_plan_is_of_one_device_of_the_mesh(small_run, tmp_path):
    config = dataclasses.replace(small_run, batch_size=8, out=str(tmp_path / "run"))
    replicated, sharded = (
        plan(dataclasses.replace(config, mesh=mesh)).memory for mesh in ("data=8", "data=2,fsdp=4")
    )

    assert replicated is not None
    assert sharded is not None
    assert 0 < sharded.state < replicated.state / 2


def test_a_plan_for_another_platform_and_all_devices_is_still_of_this_process(
    small_run, tmp_path, monkeypatch
):
    """What is planned is what would be trained, and not what would be recorded of it."""
    monkeypatch.setattr("jgpt.hardware.accelerators", lambda: 8)
    monkeypatch.setattr("jgpt.fitting.fit.memory_in_use", lambda: 10**9)
    config = with_changes(small_run, **BIGRAM, out=str(tmp_path / "run"), batch_size=24)

    made = plan(config, platform=Platform("tpu"))

    assert made.config.mesh == "data=8"
    assert made.memory is not None
    assert made.process_memory == 10**9 + 8 * (made.memory.state + made.memory.working)


@pytest.mark.slow
def test_the_model_of_a_run_is_of_the_platform_it_was_trained_for(small_run, tmp_path):
    config = with_changes(small_run, model={"dtype": "auto"}, out=str(tmp_path / "run"), steps=1)
    run = fit(config, platform=Platform("tpu"))
    assert (run.config.model.dtype, run.config.model.activation_dtype) == ("bfloat16", "auto")
    model: Any = run.model
    assert (model.config.dtype, model.config.activation_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "devices"), [(None, 1), ("data=2,fsdp=4", 8)])
def test_the_utilisation_is_that_of_all_devices(small_run, tmp_path, monkeypatch, mesh, devices):
    class Made(Exception):
        pass

    def logger(config, run, trackers, *, training_tokens, devices, report):
        raise Made(devices)

    monkeypatch.setattr(fit_module, "MetricsLogger", logger)
    out = str(tmp_path / "run")

    with pytest.raises(Made) as made:
        fit(dataclasses.replace(small_run, batch_size=8, mesh=mesh, out=out))
    assert made.value.args == (devices,)
