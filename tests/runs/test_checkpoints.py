"""A run directory holds all that a run needs, wherever it lies, or says what is wrong with it."""

import dataclasses
import json
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jgpt import CharTokenizer, ModelConfig, OptimizerConfig, TrainConfig, load
from jgpt.fitting.resume import require_same_run
from jgpt.nn import models
from jgpt.nn.models import create_model
from jgpt.parallel.mesh import make_mesh
from jgpt.runs import checkpoints as checkpoints_module
from jgpt.runs.checkpoints import Checkpoints, RunDirectory
from jgpt.runs.load import save
from jgpt.runs.manifest import Manifest, verify
from jgpt.training.state import TrainState, init_state
from tests.models import weights_of
from tests.quick import only
from tests.runs import faults
from tests.runs.harness import contents


@pytest.fixture(scope="module")
def initial(small_run) -> TrainState:
    return init_state(small_run)


def numbered(initial, step) -> TrainState:
    """A state that can be told from those of other steps."""
    weights = jax.tree.map(lambda leaf: leaf + step, initial.weights)
    return TrainState(weights, initial.optimizer, jnp.int32(step))


def bits(tree):
    found = []
    for leaf in jax.tree.leaves(tree):
        data = np.asarray(leaf).tobytes()
        found.append((data, leaf.dtype))
    return found


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.fixture(scope="module")
def four_saves(tmp_path_factory, small_run, initial) -> Path:
    """A run whose losses were best at step 2 of 4."""
    characters = "".join(chr(code) for code in range(32, 97))
    path = tmp_path_factory.mktemp("saved") / "run"
    run = RunDirectory.create(path, small_run, CharTokenizer(characters))
    with Checkpoints(run) as checkpoints:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.5)):
            checkpoints.save(numbered(initial, step), loss)
    return run.path


@pytest.fixture
def saved(four_saves, tmp_path) -> RunDirectory:
    """A copy of that run."""
    return RunDirectory(shutil.copytree(four_saves, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        pytest.param({"keep_best": 3, "keep_last": 1}, {2, 4, 5, 7}, marks=pytest.mark.slow),
        ({"keep_best": 1, "keep_last": 3, "keep_every": 3}, {2, 3, 5, 6, 7}),
    ],
    ids=str,
)
def test_the_config_says_how_many_are_kept(tmp_path, small_run, initial, policy, kept):
    config = dataclasses.replace(small_run, **policy)
    run = RunDirectory.create(tmp_path / "run", config, CharTokenizer("ab"))
    # one that was stopped before its evaluation is never the best
    losses = (9.0, 1.0, 7.0, 2.0, 3.0, None, 8.0)

    with Checkpoints(run) as checkpoints:
        for step, loss in enumerate(losses, start=1):
            checkpoints.save(numbered(initial, step), loss)
        checkpoints.wait()
        steps = checkpoints.steps()

    assert set(steps) == kept


@pytest.mark.slow
def test_a_save_that_fails_leaves_nothing_and_is_told_at_the_latest_at_the_end(
    saved, initial, monkeypatch
):
    folder = saved.path / "checkpoints"
    before = names_in(folder)
    monkeypatch.setattr(Manifest, "write", faults.write_on_a_full_disk)
    failed = "the checkpoint of step 5 could not be written .*the last good checkpoint is step 4"
    checkpoints = Checkpoints(saved)

    checkpoints.save(numbered(initial, 5), 0.5)
    with pytest.raises(OSError, match=failed):
        checkpoints.wait()
    assert names_in(folder) == before

    checkpoints.save(numbered(initial, 5), 0.5)
    with pytest.raises(OSError, match=failed):
        checkpoints.__exit__(None)
    assert names_in(folder) == before


def test_the_error_of_a_save_is_not_replaced_by_one_of_closing(saved, initial, monkeypatch):
    """On a full disk Orbax fails a second time when it is closed, and names no file."""

    class FailsAgain(ocp.AsyncCheckpointer):
        def close(self):
            super().close()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp, "AsyncCheckpointer", FailsAgain)
    monkeypatch.setattr(Manifest, "write", faults.write_on_a_full_disk)
    absl = logging.getLogger("absl")
    filters = list(absl.filters)
    failed = "the checkpoint of step 5 could not be written .*the last good checkpoint is step 4"

    with pytest.raises(OSError, match=failed), Checkpoints(saved) as checkpoints:
        checkpoints.save(numbered(initial, 5), 0.5)

    assert absl.filters == filters


@pytest.mark.slow
@pytest.mark.parametrize(("waited_for", "is_waited"), [(1, True), (1 << 40, False)])
def test_training_waits_until_a_large_state_is_written_from_its_own_memory(
    saved, initial, monkeypatch, waited_for, is_waited
):
    monkeypatch.setattr("jgpt.runs.checkpoints.WAITED_FOR", waited_for)
    may_finish = threading.Event()
    sync_below = checkpoints_module.sync_below
    # nobody sets the event while a save is waited for
    longest_wait = 0.3 if is_waited else 10

    def slow_sync(path):
        may_finish.wait(longest_wait)
        sync_below(path)

    monkeypatch.setattr("jgpt.runs.checkpoints.sync_below", slow_sync)
    with Checkpoints(saved) as checkpoints:
        checkpoints.save(numbered(initial, 5), 0.5)
        written = 5 in checkpoints.steps()
        may_finish.set()

    assert written == is_waited
    assert 5 in checkpoints.steps()


def test_a_run_is_loaded_to_the_device_that_new_arrays_go_to(saved, small_run):
    device = jax.devices()[3]

    with jax.default_device(device):
        model, _, _ = load(saved.path)
        with Checkpoints(saved, read_only=True) as checkpoints:
            state = checkpoints.restore(small_run)

    leaves = jax.tree.leaves([nnx.state(model), state])
    assert len(leaves) > 10
    for leaf in leaves:
        assert leaf.devices() == {device}


def test_loading_traces_the_model_once(saved):
    models._traced.cache_clear()

    load(saved.path)

    traces = models._traced.cache_info().misses
    assert traces == 1


def test_a_run_is_loaded_in_shards(trained):
    def load_kernel() -> jax.Array:
        model: Any
        model, _, _ = load(trained.directory)
        return model.blocks[0].feed_forward.expansion.kernel[...]

    alone = load_kernel()
    with jax.set_mesh(make_mesh("fsdp=4,tensor=2")):
        kernel = load_kernel()

    first_shard = kernel.addressable_shards[0]
    assert first_shard.data.shape == (12 // 4, 48 // 2)
    np.testing.assert_array_equal(kernel, alone)


def test_orbax_is_opened_when_it_is_needed_once_and_closed(saved, small_run, initial, monkeypatch):
    made = []
    closed = []

    class Counted(ocp.AsyncCheckpointer):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(ocp, "AsyncCheckpointer", Counted)
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.best().step == 2
        assert made == []
        for step in (5, 6):
            checkpoints.save(numbered(initial, step), 1.2)
        checkpoints.restore_weights(small_run, "last")
        assert len(made) == 1
        assert closed == []

    assert closed == made


def test_orbax_alone_is_quiet_and_only_while_a_run_is_open(saved, initial, caplog):
    absl = logging.getLogger("absl")
    level = absl.level
    filters = list(absl.filters)

    with Checkpoints(saved) as checkpoints:
        checkpoints.save(numbered(initial, 5), 1.2)
        checkpoints.wait()
        assert caplog.records == []
        absl.warning("of another library")

    assert caplog.messages == ["of another library"]
    assert absl.level == level
    assert absl.filters == filters


def test_a_run_is_loaded_wherever_it_lies_and_is_not_touched(saved, small_run, initial, tmp_path):
    moved = tmp_path / "elsewhere" / "moved"
    shutil.move(saved.path, moved)
    before = contents(moved)
    assert names_in(moved / "checkpoints") == {"2", "3", "4"}  # the best and the last two

    best, tokenizer, config = load(str(moved))
    last, _, _ = load(moved, which="last")

    assert bits(nnx.state(best)) == bits(numbered(initial, 2).weights)
    assert bits(nnx.state(last)) == bits(numbered(initial, 4).weights)
    assert tokenizer.decode(tokenizer.encode("HELLO")) == "HELLO"
    assert config == small_run
    written = json.loads((moved / "config.json").read_text())
    assert written["seed"] == small_run.seed
    assert contents(moved) == before


def test_a_run_or_checkpoint_that_is_not_there_is_named(saved, tmp_path):
    folder = saved.path / "checkpoints"

    with pytest.raises(FileNotFoundError, match="nowhere is not a run directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"is not a run directory: it has no config\.json"):
        load(tmp_path)

    for path in folder.iterdir():
        remove(path)
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        load(saved.path)

    folder.rmdir()
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        load(saved.path)
    assert not folder.exists()  # to load makes none


BY_NAME = {fault.name: fault for fault in faults.FAULTS}


@pytest.mark.parametrize("name", only(["cut off", "missing", "a flipped bit"], BY_NAME))
def test_damage_to_any_file_of_a_checkpoint_is_named(saved, name):
    """Whatever is done to whatever file of the best checkpoint."""
    fault = BY_NAME[name]
    folder = saved.path / "checkpoints" / "2"
    victims = []
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            victims.append(path)
    assert len(victims) > 40

    for victim in victims:
        name = f"2/{victim.relative_to(folder)}"
        with faults.undone(victim):
            fault.apply(victim)
            with pytest.raises(ValueError, match=re.escape(name)):
                verify(folder)


@pytest.mark.parametrize("name", only(["cut off"], BY_NAME))
def test_a_damaged_checkpoint_is_rejected_and_never_half_loaded(saved, initial, name):
    fault = BY_NAME[name]
    folder = saved.path / "checkpoints" / "2"
    *_, victim = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]

    advice = f"checkpoint 4 is intact: delete {folder} to use it"
    with faults.undone(victim):
        fault.apply(victim)
        with pytest.raises(ValueError, match=re.escape(advice)):
            load(saved.path)

    undamaged, _, _ = load(saved.path)
    assert bits(nnx.state(undamaged)) == bits(numbered(initial, 2).weights)


@pytest.mark.slow
def test_a_run_with_n_grams_is_saved_and_loaded_and_no_other_is(small_run, tmp_path):
    """Tuples are lists in JSON: the config's, and the manifest's."""
    path = tmp_path / "run"
    model_config = ModelConfig(
        vocab_size=3,
        num_layers=1,
        num_heads=2,
        embed_dim=12,
        ngram_sizes=(2, 3),
        ngram_rows=5,
    )
    config = dataclasses.replace(small_run, model=model_config)
    model = create_model(model_config, rngs=nnx.Rngs(0))

    save(model, path, tokenizer=CharTokenizer("abc"), config=config)
    loaded, _, found = load(path, which="last")

    assert found == dataclasses.replace(config, name="run", out=str(path))
    assert bits(nnx.state(loaded)) == bits(nnx.state(model))
    table = weights_of(loaded)["ngram_embedding"]["table"]["embedding"]
    assert table.shape == (2 * 5, 12)

    other_model = dataclasses.replace(model_config, ngram_sizes=(2, 4))
    other = dataclasses.replace(config, model=other_model)
    RunDirectory(path).write_config(other)
    complaint = "was saved with `ngram_sizes=[2, 3]` and not [2, 4]"
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load(path)


def test_only_directories_are_checkpoints(saved):
    folder = saved.path / "checkpoints"
    steps = saved.checkpoint_steps()
    assert steps

    (folder / "9999").write_text("a file")
    (folder / f"{steps[-1]} (copy)").mkdir()

    assert saved.checkpoint_steps() == steps


def test_clearing_a_run_deletes_nothing_else_and_leaves_it_a_run(saved):
    saved.append("metrics.jsonl", [{"step": 1}])
    (saved.path / "samples.txt").write_text("text")
    ours = [
        "tensorboard/events.out.tfevents.1",
        "checkpoints/saving-5/half",
        "checkpoints/deleting-1/half",
    ]
    foreign = {
        "notes.txt",
        "profile/mine",
        "tensorboard/mine",
        "wandb/run-1/theirs",
        "checkpoints/deleting-soon",
        "checkpoints/mine",
    }
    for name in (*ours, *foreign):
        path = saved.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")

    def files_left() -> set[str]:
        files = [path for path in saved.path.rglob("*") if path.is_file()]
        return {path.relative_to(saved.path).as_posix() for path in files}

    saved.clear(saved.tracker_files())
    assert files_left() == {"config.json", "tokenizer.json"} | foreign

    (saved.path / "wandb.id").write_text("abc")  # so wandb was started for this run
    (saved.path / "wandb" / "mine").write_text("text")
    saved.clear(saved.tracker_files())
    foreign.remove("wandb/run-1/theirs")
    assert files_left() == {"config.json", "tokenizer.json", "wandb/mine"} | foreign


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["listed", "verified"])
@pytest.mark.parametrize(("which", "next_one"), [("last", 5), ("best", 5), (4, None)])
def test_a_checkpoint_that_training_deletes_while_it_is_read_is_followed_by_the_next(
    saved, small_run, initial, monkeypatch, moment, which, next_one
):
    """The run trains on between the look at the directory and the look at a file."""
    one_each = dataclasses.replace(small_run, keep_best=1, keep_last=1)
    saved.write_config(one_each)
    # the function that is called after that moment
    place = {"listed": "verify", "verified": "_as_saved"}[moment]
    read = getattr(checkpoints_module, place)

    def read_late(directory, *arguments):
        monkeypatch.undo()
        with Checkpoints(saved) as training:
            training.save(numbered(initial, 5), 0.5)
        assert saved.checkpoint_steps() == [5]
        return read(directory, *arguments)

    monkeypatch.setattr(checkpoints_module, place, read_late)
    with Checkpoints(saved, read_only=True) as checkpoints:
        if next_one is None:
            with pytest.raises(ValueError, match=r"has no checkpoint 4: it has 5$"):
                checkpoints.restore_weights(one_each, which)
        else:
            weights = checkpoints.restore_weights(one_each, which)
            assert bits(weights) == bits(numbered(initial, next_one).weights)


MODEL = TrainConfig().model
OPTIMIZER = OptimizerConfig(learning_rate=2e-3, muon_learning_rate=0.02, weight_decay=0.2)
BEGUN = TrainConfig(optimizer=dataclasses.replace(OPTIMIZER, embedding_learning_rate=0.02))
HARMLESS = {"steps": 9, "eval_interval": 3, "steps_per_call": 2, "sample_tokens": 1}


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize(
    ("part", "changes", "refused", "of_the_state"),
    [
        ("", {"seed": 8}, True, False),
        ("", {"batch_size": 3}, True, False),
        ("dataset", {"data_field": "body"}, True, False),
        ("", HARMLESS | {"out": "x", "name": "y"}, False, False),
        ("model", {"embed_dim": 256}, True, True),
        ("model", {"num_kv_heads": 2}, True, True),
        ("optimizer", {"optimizer": "muon"}, True, True),
        ("optimizer", {"gradient_clip": 0.0}, True, True),
        ("optimizer", {"ema_decay": 0.7}, True, True),
        ("optimizer", {"embedding_learning_rate": None}, True, True),
        ("optimizer", {"embedding_learning_rate": 0.03}, True, True),
        ("optimizer", {"embedding_learning_rate": 0.01}, False, False),
        ("optimizer", {"learning_rate": 1.5e-3}, False, False),
        ("optimizer", {"learning_rate": 2.5e-3}, True, False),
        ("optimizer", {"min_learning_rate": 0.0}, False, False),
        ("optimizer", {"muon_learning_rate": 0.01}, False, False),
        ("optimizer", {"muon_learning_rate": 0.03}, True, False),
        ("optimizer", {"weight_decay": 0.1}, True, False),
        ("optimizer", {"warmup_steps": 7}, True, False),
    ],
)
def test_what_a_run_goes_on_with(part, changes, refused, of_the_state, imported):
    """An imported run, with what its state was made with: arrays that it has, or lacks."""
    field = next(iter(changes))
    if part:
        changed_part = dataclasses.replace(getattr(BEGUN, part), **changes)
        config = dataclasses.replace(BEGUN, **{part: changed_part})
        field = f"{part}.{field}"
    else:
        config = dataclasses.replace(BEGUN, **changes)
    if imported:
        steps = [0]
        is_refused = of_the_state
    else:
        steps = [0, 1]
        is_refused = refused

    if not is_refused:
        require_same_run(BEGUN, config, steps)
        return
    message = f"run to resume: `{field}` is .* in the run, .* in the"
    with pytest.raises(ValueError, match=message):
        require_same_run(BEGUN, config, steps)


def test_all_that_differs_is_named_and_a_rate_may_not_come_where_none_was():
    wider_model = dataclasses.replace(MODEL, embed_dim=256)
    other = dataclasses.replace(BEGUN, seed=8, model=wider_model)
    with_rate = dataclasses.replace(OPTIMIZER, embedding_learning_rate=1e-5)

    with pytest.raises(ValueError, match=r"`model\.embed_dim` is 128 in .*, 256 in .*; `seed`"):
        require_same_run(BEGUN, other)
    with pytest.raises(ValueError, match=r"optimizer\.embedding_learning_rate` is None in the run"):
        require_same_run(TrainConfig(optimizer=OPTIMIZER), TrainConfig(optimizer=with_rate))


def test_a_run_is_stored_under_an_odd_name(initial, small_run, tmp_path):
    name = " a%20b?c#d:e\n$HOME ~ *[f]{g}'\"|&; e\u0301 \u00e9 "
    state = numbered(initial, 1)
    run = RunDirectory.create(tmp_path / name / "run", small_run, CharTokenizer("abc"))

    with Checkpoints(run) as checkpoints:
        checkpoints.save(state, 1.0)
    assert names_in(tmp_path) == {name}
    verify(run.path / "checkpoints" / "1")

    with Checkpoints(run, read_only=True) as checkpoints:
        restored = checkpoints.restore(small_run)
    assert bits(restored) == bits(state)
