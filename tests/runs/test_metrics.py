"""Training that looks after itself, and tells what it does."""

import dataclasses
import json
import logging
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import ModelConfig, OptimizerConfig, TrainConfig, fit
from jgpt.hardware import peak_flops
from jgpt.nn.models import create_model
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from jgpt.runs.loop import _out_of_patience, plan
from jgpt.runs.metrics import SCHEMA
from jgpt.runs.profiling import CompilationWatch
from jgpt.runs.progress import Progress
from jgpt.training.plan import bytes_of, training_memory
from jgpt.training.step import abstract_state, dropout_stream, init_state, make_train_steps

MODEL = ModelConfig(vocab_size=11, block_size=6, num_layers=2, num_heads=2, embed_dim=8)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=3),
    steps=5,
    batch_size=12,
)
WINDOWS = np.random.default_rng(0).integers(0, 11, (5, 12, 7), np.int32)


def changed(config: TrainConfig, **model: object) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def train(config: TrainConfig, windows=WINDOWS):
    """All steps' state and metrics."""
    key = dropout_stream(config.seed)
    state = init_state(config)
    return make_train_steps(config)(state, jnp.asarray(windows), key, len(windows))


def furthest(a, b) -> float:
    """The largest difference between two trees."""
    differences = jax.tree.map(lambda x, y: float(abs(x - y).max()), a, b)
    return max(jax.tree.leaves(differences))


def test_micro_batches_are_one_large_batch():
    with jax.enable_x64(True):
        config = changed(CONFIG, dtype="float64", param_dtype="float64")
        whole, measured = train(config)
        for count in (2, 3, 12):
            parts, same = train(dataclasses.replace(config, micro_batches=count))
            assert furthest(whole.weights, parts.weights) < 1e-12
            assert furthest(measured, same) < 1e-12
        # a mean over unequal parts, or a sum, would be further away than that
        other, _ = train(config, WINDOWS[:, ::-1] * 0)
        assert furthest(whole.weights, other.weights) > 1e-6


@pytest.mark.parametrize(("micro_batches", "rows"), [(1, 12), (3, 4)])
def test_a_micro_batch_is_all_that_is_computed_at_once(micro_batches, rows):
    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    lowered = make_train_steps(config).lower(
        abstract_state(config), jax.ShapeDtypeStruct(WINDOWS.shape, jnp.int32), dropout_stream(0), 2
    )
    logits = set(re.findall(r"tensor<(\d+)x6x11xf32>", lowered.as_text()))
    assert logits == {str(rows)}


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="batch_size=12 must be divisible by micro_batches=5"):
        dataclasses.replace(CONFIG, micro_batches=5)


def test_bfloat16_computes_and_float32_remembers():
    config = changed(CONFIG, dtype="bfloat16")
    state, measured = train(config)
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype.name for leaf in [*floats, measured.loss]} == {"float32"}
    model = create_model(config.model, rngs=nnx.Rngs(0))
    program = jax.make_jaxpr(model)(jnp.zeros((1, 6), jnp.int32)).pretty_print()
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", program)
    assert products
    assert "bf16" in program
    _, exact = train(CONFIG)
    assert 0 < furthest(measured.loss, exact.loss) < 0.01


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_rematerialised_blocks_give_the_same_and_keep_less(dropout):
    config = changed(CONFIG, dropout=dropout)
    state, measured = train(config)
    again, same = train(changed(config, rematerialise=True))
    assert furthest(state.weights, again.weights) < 1e-6
    assert furthest(measured.loss, same.loss) < 1e-6


def kept_for_the_backward_pass(config: TrainConfig) -> int:
    graph, weights = nnx.split(create_model(config.model, rngs=nnx.Rngs(0)))

    def loss(weights):
        return nnx.merge(graph, weights)(jnp.zeros((12, 6), jnp.int32)).sum()

    _, backward = jax.vjp(loss, weights)
    return bytes_of(backward)


def test_rematerialised_blocks_keep_less_for_the_backward_pass():
    kept = kept_for_the_backward_pass(CONFIG)
    assert kept_for_the_backward_pass(changed(CONFIG, rematerialise=True)) < kept / 2


def test_a_step_that_is_not_finite_is_not_taken_nor_any_after_it():
    train_steps, key = make_train_steps(CONFIG), dropout_stream(CONFIG.seed)
    good, _ = train_steps(init_state(CONFIG), jnp.asarray(WINDOWS), key, 2, 0)
    poisoned = jax.tree.map(jnp.array, good)
    poisoned.weights["final_norm"]["scale"] = jnp.full(8, jnp.nan)
    before = jax.tree.map(np.asarray, poisoned)
    after, measured = train_steps(poisoned, jnp.asarray(WINDOWS), key, 3, 2)
    assert int(after.step) == 2
    assert math.isnan(measured.loss[0])
    assert np.array_equal(measured.loss[1:], np.zeros(4))
    later, _ = train_steps(after, jnp.asarray(WINDOWS), key, 3, 5)  # the call in flight meanwhile
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(later), strict=True):
        assert np.array_equal(left, right, equal_nan=True)


def test_a_gradient_that_explodes_keeps_the_state_before_it(small_run, tmp_path):
    optimizer = dataclasses.replace(
        small_run.optimizer, learning_rate=1e15, warmup_steps=0, gradient_clip=0.0
    )
    config = dataclasses.replace(small_run, optimizer=optimizer, out=str(tmp_path / "wild"))
    with pytest.raises(FloatingPointError, match="at step") as stopped:
        fit(config)
    step = int(re.findall(r"at step (\d+)", str(stopped.value))[0])
    assert f"checkpoint {step - 1} is kept" in str(stopped.value)
    run = RunDirectory.open(tmp_path / "wild")
    assert [line["step"] for line in run.metrics()] == list(range(1, step))
    with Checkpoints(run, read_only=True) as checkpoints:
        state = checkpoints.restore(run.config())
    assert int(state.step) == step - 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.weights))


def test_patience_stops_and_the_best_is_kept(small_run, tmp_path):
    assert not _out_of_patience([3.0, 2.0, 2.5], 2)
    assert _out_of_patience([3.0, 2.0, 2.5, 2.2], 2)
    assert not _out_of_patience([3.0, 2.0, 2.5, 1.9], 2)
    assert not _out_of_patience([], 1)
    # a learning rate at which it gets worse from the first evaluation on
    optimizer = dataclasses.replace(
        small_run.optimizer, learning_rate=1.0, schedule="constant", warmup_steps=0
    )
    config = dataclasses.replace(
        small_run, optimizer=optimizer, out=str(tmp_path / "run"), steps=400, patience=2
    )
    run = fit(config)
    lines = RunDirectory.open(run.directory).metrics()
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert len(losses) < 100
    assert losses.index(min(losses)) == len(losses) - 3
    assert run.validation_loss == min(losses)
    again = fit(config, resume=True)
    assert len(RunDirectory.open(again.directory).metrics()) == len(lines)


def test_the_keep_policy_is_the_config_s(small_run, tmp_path):
    config = dataclasses.replace(
        small_run, out=str(tmp_path / "run"), eval_interval=1, keep_last=1, keep_every=4
    )
    run = fit(config)
    kept = {int(path.name) for path in (run.directory / "checkpoints").iterdir()}
    assert kept == {4, 8, 11, run.best_step}


def test_what_cannot_work_is_refused_before_it_compiles(small_run, tmp_path, monkeypatch):
    out = str(tmp_path / "run")
    double = changed(dataclasses.replace(small_run, out=out), param_dtype="float64")
    with pytest.raises(ValueError, match="param_dtype=float64 needs JAX_ENABLE_X64=1"):
        fit(double)
    full = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    with pytest.raises(OSError, match="MiB left, the checkpoints to keep need"):
        fit(dataclasses.replace(small_run, out=out))
    monkeypatch.setattr("jgpt.runs.loop.memory_limit", lambda: 100)
    with pytest.raises(ValueError, match="choose a smaller model"):
        fit(dataclasses.replace(small_run, out=out))
    assert not (tmp_path / "run").exists()


def test_metrics_say_what_the_schema_says_and_no_more(trained):
    lines = RunDirectory.open(trained.directory).metrics()
    assert set().union(*lines) <= set(SCHEMA)
    last = lines[-1]
    assert last["tokens"] == 11 * 5 * 7
    assert last["memory_bytes"] > 1 << 20
    assert peak_flops() is None  # nobody knows a CPU's, so nothing is made up
    assert not any("model_flops_utilisation" in line for line in lines)
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    assert seconds == sorted(seconds)
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    assert speeds
    assert all(1 < speed < 1e7 for speed in speeds)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v9", None),
        ("NVIDIA L40S", None),
    ],
)
def test_a_peak_is_the_maker_s_or_unknown(monkeypatch, kind, peak):
    monkeypatch.setattr("jax.devices", lambda: [types.SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr("jax.device_count", lambda: 8)
    assert peak_flops() == peak  # of one device, however many the host has


def test_provenance_tells_what_a_run_was_made_with(trained):
    (line,) = RunDirectory.open(trained.directory).provenance()
    assert line["step"] == 0
    assert line["seed"] == trained.config.seed
    assert line["versions"]["jax"] == jax.__version__
    assert line["devices"] == ["cpu"] * jax.device_count()
    assert len(line["corpus_sha256"]) == len(line["tokenizer_sha256"]) == 64
    assert line["command"]


def test_a_run_compiles_each_function_once(small_run, tmp_path, caplog):
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"), seed=3)
    warned = []

    class Listening(Progress):
        def warned(self, message):
            warned.append(message)

    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        fit(config, progress=Listening())
    assert warned == []
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    for name in ("steps", "evaluate", "_window_starts", "_gather"):
        assert compiled.count(name) == 1, (name, compiled)


def test_a_recompilation_is_told_once_by_name():
    told = []
    double = jax.jit(lambda x: 2 * x)
    small, larger, largest = (jnp.zeros(size) for size in (3, 4, 5))
    with CompilationWatch(told.append) as watch:
        double(small)
        watch.arm()
        double(small)
        assert told == []
        double(larger)
        watch.arm()
        double(largest)
    assert told == [
        "compiled again after warm-up: jit(<lambda>); JAX_EXPLAIN_CACHE_MISSES=1 says why"
    ]


def test_a_recompilation_after_the_watch_is_nobody_s_business():
    told = []
    with CompilationWatch(told.append) as watch:
        watch.arm()
    jax.jit(lambda x: 3 * x)(jnp.zeros(3))
    assert told == []


def test_a_watch_for_an_event_that_jax_does_not_have_hears_nothing(monkeypatch):
    monkeypatch.setattr(CompilationWatch, "EVENT", "/jax/renamed")
    told = []
    with CompilationWatch(told.append) as watch:
        watch.arm()
        jax.jit(lambda x: 4 * x)(jnp.zeros(3))
    assert told == []


def test_memory_is_the_compiler_s_and_grows_with_the_batch(small_run):
    small = training_memory(CONFIG)
    large = training_memory(dataclasses.replace(CONFIG, batch_size=120))
    assert small is not None
    assert large is not None
    assert small.state == large.state == bytes_of(init_state(CONFIG))
    assert large.working > 2 * small.working


def test_a_dry_run_plans_and_writes_nothing(small_run, tmp_path):
    planned = plan(dataclasses.replace(small_run, out=str(tmp_path / "run")))
    assert planned.out == tmp_path / "run"
    assert planned.parameters > 0
    assert planned.memory is not None
    assert not list(tmp_path.iterdir())


def test_profile_writes_a_trace(small_run, tmp_path):
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"), sample_tokens=0)
    run = fit(config, profile_steps=4)
    assert list((run.directory / "profile").rglob("*.xplane.pb"))


class FakeTracker:
    def __init__(self):
        self.logged, self.closed = [], False

    def log(self, line):
        self.logged.append(line)

    def close(self):
        self.closed = True


def test_trackers_are_given_every_line_and_closed(small_run, tmp_path, monkeypatch):
    tracker = FakeTracker()
    monkeypatch.setattr("jgpt.runs.loop.open_tracker", lambda *_: tracker)
    run = fit(dataclasses.replace(small_run, out=str(tmp_path / "run"), trackers=("wandb",)))
    written = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert tracker.logged == [json.loads(line) for line in written]
    assert tracker.closed


def test_tensorboard_writes_events_into_the_run(small_run, tmp_path):
    config = dataclasses.replace(
        small_run, out=str(tmp_path / "run"), trackers=("tensorboard",), sample_tokens=0
    )
    run = fit(config)
    (events,) = (run.directory / "tensorboard").iterdir()
    assert b"validation_loss" in events.read_bytes()


def test_a_missing_tracker_names_its_extra(small_run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"), trackers=("wandb",))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jgpt\[wandb\]'"):
        fit(config)
