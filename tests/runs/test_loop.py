"""`fit` from text to text: what it leaves, when it stops, and what it asks of the machine."""

import logging
import math
import re
import sys
import types
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt import ByteTokenizer, ModelConfig, evaluate, fit, load, save
from jgpt.data.batches import batches
from jgpt.data.dataset import load_dataset
from jgpt.nn.int8 import with_int8_weights
from jgpt.runs import checkpoints
from jgpt.runs import fit as fit_module
from jgpt.runs.directory import RunDirectory, read_config
from jgpt.runs.fit import TrainingStopped, plan
from jgpt.runs.progress import LineProgress, Progress, default_progress
from jgpt.training.objective import next_token_loss
from tests.models import weights_of
from tests.runs.harness import BIGRAM, Heard, Unread, kill_resume, with_changes

fingerprint = kill_resume.fingerprint


# --- what a run is -------------------------------------------------------------------------------


def test_a_run_leaves_all_that_it_promises(trained, small_run, poem):
    text = poem.read_text()
    tokens = jnp.array([[0, 1, 2]])

    model, tokenizer, config = load(trained.path)

    assert sorted(path.name for path in trained.path.iterdir()) == [
        *("checkpoints", "config.json", "lock", "loss.png", "metrics.jsonl"),
        *("provenance.jsonl", "samples.txt", "tokenizer.json"),
    ]
    assert (trained.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (trained.path / "samples.txt").read_text()
    assert len(sample) == 1 + small_run.sample_tokens
    assert set(sample) <= set(text)
    assert tokenizer.vocab_size == trained.config.model.vocab_size == len(set(text))
    assert config == trained.config
    np.testing.assert_array_equal(model(tokens), trained.model(tokens))
    continuation = trained.generate("So", 5, key=jax.random.key(3))
    assert continuation == jgpt.generate_text(model, tokenizer, "So", 5, key=jax.random.key(3))


def test_metrics_are_columns(trained):
    columns = trained.metrics

    assert columns.keys() == {
        *("step", "loss", "gradient_norm", "learning_rate", "validation_loss", "tokens"),
        *("seconds", "tokens_per_second", "memory_bytes"),  # the peak of a CPU is unknown
    }
    assert {len(column) for column in columns.values()} == {11}
    assert columns["step"] == list(range(1, 12))
    evaluated = [not math.isnan(loss) for loss in columns["validation_loss"]]
    assert evaluated == [step in (4, 8, 11) for step in range(1, 12)]
    assert min(columns["validation_loss"][index] for index in (3, 7, 10)) == trained.validation_loss
    assert columns["tokens"][-1] == 11 * 5 * 7
    assert columns["memory_bytes"][-1] > 1 << 20
    assert columns["seconds"][3] < columns["seconds"][7] < columns["seconds"][10]
    assert 1 < columns["tokens_per_second"][-1] < 1e7


@pytest.mark.slow
def test_the_saved_config_repeats_the_run_and_shorter_calls_change_no_number(
    trained, out, monkeypatch
):
    heard = Heard()
    monkeypatch.setattr(fit_module, "SECONDS_PER_CALL", 1e-9)
    config = replace(read_config(trained.path / "config.json"), out=str(out))

    fit(config, progress=heard)

    assert fingerprint(out) == fingerprint(trained.path)
    assert (out / "samples.txt").read_text() == (trained.path / "samples.txt").read_text()
    assert heard.steps == list(range(1, 12))  # steps_per_call is 3


def test_provenance_names_the_tokens(trained, poem):
    (line,) = RunDirectory.open(trained.path).provenance()
    assert line["tokens_sha256"] == load_dataset(trained.config.dataset, 7).digest
    assert line["tokens"] == len(poem.read_text())  # of characters, both splits
    assert (line["step"], line["seed"]) == (0, trained.config.seed)
    assert line["versions"]["jax"] == jax.__version__
    assert line["devices"] == ["cpu"] * jax.device_count()
    assert len(line["tokens_sha256"]) == len(line["tokenizer_sha256"]) == 64
    assert line["command"]
    assert (line["mesh"], line["micro_batches"], line["attention_kernel"]) == (None, 1, "xla")


# --- stops ---------------------------------------------------------------------------------------


def test_a_stop_while_the_text_is_tokenized_leaves_no_run(small_run, out):
    with pytest.raises(TrainingStopped, match=r"^stopped before training began"):
        fit(replace(small_run, out=str(out)), should_stop=lambda: True)

    assert not out.exists()


def test_one_of_several_processes_does_not_stop_alone_while_the_text_is_tokenized(
    small_run, out, monkeypatch
):
    monkeypatch.setattr(fit_module, "process_count", lambda: 2)
    config = with_changes(small_run, **BIGRAM, out=str(out))

    prepared = fit_module.prepare(config, progress=Heard(), should_stop=lambda: True)

    assert len(prepared.run.dataset.train) > 0


def test_patience_stops_says_so_and_keeps_the_best(small_run, out, monkeypatch):
    """The first evaluation is at an eighth of the interval."""
    losses = iter([2.5, 3.0, 2.0, 2.5, 2.6])
    monkeypatch.setattr(fit_module.Evaluator, "mean", lambda *_: next(losses))
    config = with_changes(small_run, **BIGRAM, out=str(out), steps=99, eval_interval=8, patience=2)

    heard = Heard()

    run = fit(config, progress=heard)

    lines = RunDirectory(out).metrics()
    evaluated = [line["step"] for line in lines if "validation_loss" in line]
    assert evaluated == [1, 8, 16, 24, 32]
    assert run.validation_loss == 2.0
    assert RunDirectory(out).checkpoint_steps() == [16, 24, 32]
    found, best, last = (
        weights_of(each.model) for each in (run, load(out, which=16), load(out, which="last"))
    )
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found, best))
    assert not jax.tree.all(jax.tree.map(jnp.array_equal, found, last))

    fit(config, resume=True, progress=heard)

    assert RunDirectory(out).metrics() == lines
    why = "no better validation loss in `patience=2` evaluations"
    assert heard.messages == [f"stopped at step 32 of 99: {why}"] * 2


# --- numbers that are not finite -----------------------------------------------------------------


def test_what_explodes_stops_the_run_and_keeps_the_state_before_it(small_run, out):
    config = with_changes(small_run, **BIGRAM, out=str(out), eval_interval=11)
    tokens = load_dataset(config.dataset, 7).train
    sixth = int(batches(tokens, config.seed, 5, 1, config.batch_size, 7).sum())

    def exploding(model, tokens, rngs):
        loss = next_token_loss(model, tokens, rngs)
        return jnp.where(tokens.sum() == sixth, jnp.nan, loss)

    with pytest.raises(FloatingPointError) as stopped:
        fit(config, objective=exploding)

    assert re.fullmatch(
        r"loss is nan at step 6 \(learning_rate \S+, gradient_norm 0\): lower `learning_rate`; "
        "checkpoint 5 is kept",
        str(stopped.value),
    )
    run = RunDirectory(out)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert run.checkpoint_steps() == [1, 5]

    fit(config, objective=lambda *given: next_token_loss(*given), resume=True, progress=None)

    assert [line["step"] for line in run.metrics()] == list(range(1, 12))


def test_a_model_that_gives_nan_at_once_is_to_blame_itself(small_run, out):
    """Nothing was trained, so that the next start needs no `overwrite`."""
    config = with_changes(small_run, **BIGRAM, steps=1, out=str(out))

    def objective(model, tokens, rngs):
        return jnp.nan * next_token_loss(model, tokens, rngs)

    with pytest.raises(FloatingPointError, match="at its first step, before any update") as error:
        fit(config, objective=objective, progress=None)
    assert "lower `learning_rate`" not in str(error.value)
    assert RunDirectory(out).checkpoint_steps() == []
    fit(config, progress=None)
    with pytest.raises(FileExistsError, match="already exists"):
        fit(config, progress=None)


# --- the machine ---------------------------------------------------------------------------------


def test_a_step_that_is_too_large_is_rejected_with_what_to_raise(small_run, out, monkeypatch):
    """A CPU's system would kill the process without a word."""
    monkeypatch.setattr("jgpt.machine.host_memory", lambda: 1000)
    config = with_changes(small_run, **BIGRAM, out=str(out))

    with pytest.raises(ValueError, match="there are 1,000 bytes: raise `micro_batches=1`"):
        fit(config)

    assert not out.exists()


def test_the_room_that_the_checkpoints_need_is_said(small_run, tmp_path, out, monkeypatch):
    """A state of 2 MiB: the best three, the last four, and the one that is being written."""
    monkeypatch.setattr(fit_module, "bytes_of", lambda _: 2 << 20)
    config = with_changes(small_run, **BIGRAM, out=str(out), keep_best=3, keep_last=4)
    disk = types.SimpleNamespace(free=16 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)

    assert plan(config).out == out

    for free, said in (((16 << 20) - 1, r"16\.0 MiB"), (1000, "1,000 bytes")):
        disk.free = free
        message = rf"{said} free, but the checkpoints need 16\.0 MiB"
        for start in (fit, plan):
            with pytest.raises(OSError, match=message):
                start(config)
    assert list(tmp_path.iterdir()) == []


def test_what_the_devices_decide_is_trained_and_not_recorded(small_run, out, monkeypatch):
    """Eight devices share the rows of the six micro-batches."""
    monkeypatch.setattr("jgpt.machine.accelerators", lambda: 8)
    config = with_changes(small_run, **BIGRAM, out=str(out), batch_size=48, micro_batches=6)

    prepared = fit_module.prepare(config, progress=Heard())
    facts = fit_module._shared_facts(prepared)

    recorded = prepared.run.config
    assert (recorded.mesh, recorded.micro_batches) == (None, 6)
    assert (prepared.config.mesh, prepared.config.micro_batches) == ("data=8", 1)
    assert recorded.model.dtype == "float32"
    # what processes compare is what each of them has decided
    assert facts | {"mesh": "data=8", "micro_batches": 1, "seed": config.seed} == facts
    assert facts["tokens_sha256"] == prepared.run.dataset.digest
    assert {"model.dropout", "optimizer.beta2", "dataset.data", "jax", "resume"} <= facts.keys()


@pytest.mark.slow
def test_a_run_compiles_each_function_once(small_run, out):
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    jax.clear_caches()
    logging.getLogger().addHandler(handler)
    heard = Heard()
    try:
        with jax.log_compiles():
            fit(replace(small_run, out=str(out), seed=3), progress=heard)
    finally:
        logging.getLogger().removeHandler(handler)

    found = re.findall(r"Finished XLA compilation of jit\((\w+)\)", "\n".join(log))
    for name in ("steps", "evaluate", "_window_starts", "_gather"):
        assert found.count(name) == 1, (name, found)
    assert heard.messages == []


def test_the_next_call_is_dispatched_before_the_metrics_of_the_last_one_are_waited_for(
    small_run, out, monkeypatch
):
    events: list[Any] = []
    compiled_steps = fit_module._compiled_steps

    def unread_steps(config):
        steps = compiled_steps(config)

        def run(state, windows, key, count, first, taken, arrays):
            state, metrics = steps(state, windows, key, count, first, taken, arrays=arrays)
            last = int(first + count)
            events.append(("dispatched", last))
            assert (np.asarray(windows).any(axis=(1, 2)) == (np.arange(2) < count)).all()
            unread = {
                name: Unread(getattr(metrics, name), events, ("waited", last))
                for name in ("loss", "gradient_norm", "learning_rate")
            }
            return state, types.SimpleNamespace(**unread, taken=metrics.taken, extra=None)

        return run

    monkeypatch.setattr(fit_module, "_compiled_steps", unread_steps)
    config = with_changes(small_run, **BIGRAM, steps=6, eval_interval=6, steps_per_call=2)
    fit(replace(config, out=str(out)))

    dispatched_or_waited = [("dispatched", 2), ("dispatched", 4), ("waited", 2)]
    assert events[:3] == dispatched_or_waited
    assert events[3:] == [("dispatched", 6), ("waited", 4), ("waited", 6)]


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
    longer = replace(config, steps=8)
    monkeypatch.setattr(checkpoints, "WAITED_FOR", 1)
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

    compiled_steps = fit_module._compiled_steps
    monkeypatch.setattr(
        fit_module, "_compiled_steps", lambda config: noted("steps", compiled_steps(config))
    )
    for owner, name in (
        (fit_module, "init_state"),
        (fit_module, "load_model"),
        (fit_module, "_sample"),
        (fit_module.OpenRun, "restore"),
        (checkpoints.Checkpoints, "save"),
    ):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))

    run = fit(config)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(run.model)))
    del run
    fit(longer, resume=True)
    fit(longer, resume=True)  # takes no step

    state = 3 * weights  # with the two moments of AdamW
    expected = {
        **dict.fromkeys(("init_state", "steps", "save", "restore"), state),
        **dict.fromkeys(("load_model", "_sample"), weights),
    }
    assert {name for name, _ in stages} == expected.keys()
    for name, alive in stages:
        assert expected[name] <= alive < 1.3 * expected[name], (name, alive / expected[name])


@pytest.mark.slow
def test_a_state_whose_loss_is_not_finite_is_not_kept(small_run, out):
    """The parameters are finite, of 1e15, but their loss is not: no use to resume."""
    wild = {"learning_rate": 1e15, "warmup_steps": 0, "gradient_clip": 0.0}
    config = with_changes(small_run, optimizer=wild, out=str(out))

    with pytest.raises(FloatingPointError, match=r"lower `learning_rate`; nothing was saved yet$"):
        fit(config)
    assert RunDirectory(out).checkpoint_steps() == []
    assert all(math.isfinite(line["loss"]) for line in RunDirectory(out).metrics())


def test_weights_that_are_not_finite_are_not_evaluated_or_quantised(poem, out):
    config = ModelConfig(vocab_size=256, block_size=7, num_layers=1, num_heads=2, embed_dim=12)
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    kernel = model.blocks[0].feed_forward.expansion.kernel
    kernel[...] = kernel[...].at[2, 3].set(jnp.nan)
    save(model, out, tokenizer=ByteTokenizer(), config=config)

    with pytest.raises(FloatingPointError, match=r"expansion\.kernel is not finite"):
        with_int8_weights(model)
    with pytest.raises(FloatingPointError, match=r"loss of .*run is nan: it has diverged"):
        evaluate(out, data=str(poem))


def test_a_small_text_is_on_the_device_and_no_window_is_read_in_vain(small_run, out, monkeypatch):
    on_device = []
    counts = []

    def noting(tokens, *arguments, **options):
        on_device.append(isinstance(tokens, jax.Array))
        counts.append(options["count"])
        return batches(tokens, *arguments, **options)

    monkeypatch.setattr(fit_module, "batches", noting)
    fit(with_changes(small_run, out=str(out), steps=2, **BIGRAM), progress=None)

    assert all(on_device)
    assert sum(counts) == 2


def test_a_terminal_has_a_line_and_a_file_nothing(monkeypatch):
    for is_terminal, kind in ((True, LineProgress), (False, Progress)):
        stream = types.SimpleNamespace(isatty=lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        assert type(default_progress()) is kind
    monkeypatch.setattr(sys, "stderr", None)
    assert type(default_progress()) is Progress
