"""A run directory holds all that a run needs, wherever it lies, or says what is wrong with it."""

import dataclasses
import json
import logging
import re
import shutil
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jgpt import CharTokenizer, ModelConfig, OptimizerConfig, TrainConfig, fit, load
from jgpt.config import to_json
from jgpt.runs import checkpoints as checkpoints_module
from jgpt.runs.checkpoints import Checkpoints, RunDirectory
from jgpt.runs.resume import require_same_run
from jgpt.training.step import TrainState, init_state


@pytest.fixture(scope="module")
def initial(small_run) -> TrainState:
    return init_state(small_run)


def numbered(initial, step) -> TrainState:
    """A state that can be told from those of other steps."""
    weights = jax.tree.map(lambda leaf: leaf + step, initial.weights)
    return TrainState(weights, initial.optimizer, jnp.int32(step))


def bits(tree):
    return [(np.asarray(leaf).tobytes(), leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.fixture
def saved(tmp_path, small_run, initial) -> RunDirectory:
    """A run whose losses were best at step 2 of 4."""
    tokenizer = CharTokenizer("".join(map(chr, range(32, 97))))
    run = RunDirectory.create(tmp_path / "run", small_run, tokenizer)
    with Checkpoints(run) as checkpoints:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.5)):
            checkpoints.save(numbered(initial, step), loss)
    return run


def test_the_best_and_the_last_two_checkpoints_are_kept(saved, small_run, initial):
    kept = {path.name for path in (saved.path / "checkpoints").iterdir() if path.is_dir()}
    assert kept == {"2", "3", "4"}
    with Checkpoints(saved, read_only=True) as checkpoints:
        assert (checkpoints.step("best"), checkpoints.step("last")) == (2, 4)
        best = checkpoints.restore_weights(small_run, "best")
        last = checkpoints.restore_weights(small_run, "last")
    assert bits(best) == bits(numbered(initial, 2).weights)
    assert bits(last) == bits(numbered(initial, 4).weights)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"keep_best": 1, "keep_last": 1}, {2, 7}),
        ({"keep_best": 3, "keep_last": 1}, {2, 4, 5, 7}),
        ({"keep_best": 1, "keep_last": 3}, {2, 5, 6, 7}),
        ({"keep_best": 2, "keep_last": 1, "keep_every": 3}, {2, 3, 4, 6, 7}),
    ],
    ids=str,
)
def test_the_config_says_how_many_are_kept(tmp_path, small_run, initial, policy, kept):
    config = dataclasses.replace(small_run, **policy)
    run = RunDirectory.create(tmp_path / "run", config, CharTokenizer("ab"))
    with Checkpoints(run) as checkpoints:
        # one that was stopped before its evaluation is never the best
        for step, loss in enumerate((9.0, 1.0, 7.0, 2.0, 3.0, None, 8.0), start=1):
            checkpoints.save(numbered(initial, step), loss)
        checkpoints.wait()
        assert {*checkpoints.steps()} == kept


def test_a_save_that_fails_leaves_nothing_and_is_told_at_the_latest_at_the_end(
    saved, initial, monkeypatch
):
    def write(manifest, folder):
        raise OSError(28, "No space left on device")

    before = {path.name for path in (saved.path / "checkpoints").iterdir()}
    monkeypatch.setattr("jgpt.runs.checkpoints.Manifest.write", write)
    failed = "the checkpoint of step 5 could not be written .*the last good checkpoint is step 4"
    checkpoints = Checkpoints(saved)
    checkpoints.save(numbered(initial, 5), 0.5)
    with pytest.raises(OSError, match=failed):
        checkpoints.wait()
    assert {path.name for path in (saved.path / "checkpoints").iterdir()} == before
    checkpoints.save(numbered(initial, 5), 0.5)
    with pytest.raises(OSError, match=failed):
        checkpoints.__exit__(None)
    assert {path.name for path in (saved.path / "checkpoints").iterdir()} == before


def test_the_last_state_is_restored_bit_by_bit(saved, small_run, initial):
    with Checkpoints(saved) as checkpoints:
        restored = checkpoints.restore(small_run)
    assert bits(restored) == bits(numbered(initial, 4))
    assert jax.tree.structure(restored) == jax.tree.structure(initial)


def test_a_run_is_loaded_to_the_device_that_new_arrays_go_to(saved, small_run):
    device = jax.devices()[3]
    with jax.default_device(device):
        model, _, _ = load(saved.path)
        with Checkpoints(saved, read_only=True) as checkpoints:
            state = checkpoints.restore(small_run)
    leaves = jax.tree.leaves([nnx.state(model), state])
    assert len(leaves) > 10
    assert {found for leaf in leaves for found in leaf.devices()} == {device}


def test_orbax_is_opened_when_it_is_needed_once_and_closed(saved, small_run, initial, monkeypatch):
    made, closed = [], []

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
        assert (len(made), closed) == (1, [])
    assert closed == made


def test_orbax_alone_is_quiet_and_only_while_a_run_is_open(saved, initial, caplog):
    absl = logging.getLogger("absl")
    before = (absl.level, list(absl.filters))
    with Checkpoints(saved) as checkpoints:
        checkpoints.save(numbered(initial, 5), 1.2)
        checkpoints.wait()
        assert caplog.records == []
        absl.warning("of another library")
    assert caplog.messages == ["of another library"]
    assert (absl.level, list(absl.filters)) == before


def everything(directory):
    return {
        path.relative_to(directory): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def test_a_loaded_run_speaks_and_is_not_touched(saved, initial):
    before = everything(saved.path)
    best, tokenizer, config = load(saved.path)
    last, _, _ = load(saved.path, which="last")
    assert bits(nnx.state(best)) == bits(numbered(initial, 2).weights)
    assert bits(nnx.state(last)) == bits(numbered(initial, 4).weights)
    assert tokenizer.decode(tokenizer.encode("HELLO")) == "HELLO"
    assert config == saved.config()
    assert everything(saved.path) == before


def test_a_moved_run_works(saved, tmp_path, initial):
    shutil.move(saved.path, tmp_path / "elsewhere" / "moved")
    model, _, _ = load(str(tmp_path / "elsewhere" / "moved"))
    assert bits(nnx.state(model)) == bits(numbered(initial, 2).weights)


def test_a_run_or_checkpoint_that_is_not_there_is_named(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a run directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"is not a run directory: it has no config\.json"):
        load(tmp_path)
    for path in (saved.path / "checkpoints").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        load(saved.path)
    (saved.path / "checkpoints").rmdir()
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        load(saved.path)
    assert not (saved.path / "checkpoints").exists()


def flip(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if data else data)


def test_a_damaged_checkpoint_is_refused_and_never_half_loaded(saved, initial):
    """Whatever file of the best checkpoint is emptied, lost, or has one bit flipped."""
    folder = saved.path / "checkpoints" / "2"
    victims = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(victims) > 40
    for victim in victims:
        original = victim.read_bytes()
        for damage in (flip, lambda path: path.unlink(), lambda path: path.write_bytes(b"")):
            damage(victim)
            if victim.is_file() and victim.read_bytes() == original:
                continue  # it was empty
            name = str(victim.relative_to(folder))
            with pytest.raises(ValueError, match=re.escape(f"checkpoints/2/{name}")) as refusal:
                load(saved.path)
            advice = f"checkpoint 4 is intact: use which=4, or delete {folder} to resume from the"
            assert advice in str(refusal.value)
            victim.write_bytes(original)
    assert bits(nnx.state(load(saved.path)[0])) == bits(numbered(initial, 2).weights)


@pytest.mark.parametrize("changes", [{"embed_dim": 14}, {"num_layers": 2}, {"qkv_bias": True}])
def test_a_config_of_another_model_is_refused(saved, small_run, changes):
    other = dataclasses.replace(small_run, model=dataclasses.replace(small_run.model, **changes))
    (saved.path / "config.json").write_text(to_json(other))
    with pytest.raises(ValueError, match=r"checkpoint .*run/checkpoints/2"):
        load(saved.path)
    with Checkpoints(saved) as checkpoints, pytest.raises(ValueError, match="checkpoint"):
        checkpoints.restore(other)


def test_a_run_with_n_grams_is_saved_and_loaded_and_no_other_is(small_run, tmp_path):
    """Tuples are lists in JSON: the config's, and the manifest's."""
    model = ModelConfig(
        block_size=7, num_layers=1, num_heads=2, embed_dim=12, ngram_sizes=(2, 3), ngram_rows=5
    )
    out = tmp_path / "run"
    run = dataclasses.replace(
        small_run, model=model, steps=2, eval_interval=2, sample_tokens=0, out=str(out)
    )
    fit(run)
    loaded, _, config = load(out)
    assert config.model.ngram_sizes == (2, 3)
    table = nnx.to_pure_dict(nnx.state(loaded))["ngram_embedding"]["table"]["embedding"]
    assert table.shape == (2 * 5, 12)
    start = init_state(config).weights["ngram_embedding"]["table"]["embedding"]
    assert 0 < float(abs(table - start).max()) < 0.1  # it was trained

    other = dataclasses.replace(config.model, ngram_sizes=(2, 4))
    (out / "config.json").write_text(to_json(dataclasses.replace(config, model=other)))
    complaint = "was saved with ngram_sizes=[2, 3], the config has ngram_sizes=[2, 4]"
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load(out)


def test_another_vocabulary_is_refused(saved):
    (saved.path / "tokenizer.json").write_text(CharTokenizer("abc").to_json())
    with pytest.raises(ValueError, match=r"checkpoints/2 was saved with another tokenizer than"):
        load(saved.path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]"])
def test_a_damaged_file_is_named(saved, name, data):
    (saved.path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        load(saved.path)


def test_metrics_survive_a_crash_and_are_forgotten_after_a_step(saved):
    saved.append_metrics([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}])
    saved.append_metrics([{"step": 3, "loss": 1.0}])
    with (saved.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in saved.metrics()] == [1, 2, 3]
    saved.truncate_metrics(2)
    text = (saved.path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n'


def test_only_directories_are_checkpoints(saved):
    steps = saved.checkpoint_steps()
    assert steps
    (saved.path / "checkpoints" / "9999").write_text("a file")
    (saved.path / "checkpoints" / f"{steps[-1]} (copy)").mkdir()
    assert saved.checkpoint_steps() == steps


def test_clearing_a_run_deletes_nothing_else_and_leaves_it_a_run(saved):
    saved.append_metrics([{"step": 1}])
    (saved.path / "samples.txt").write_text("text")
    ours = ["profile/plugins/profile/1/trace", "tensorboard/events.out.tfevents.1"]
    ours += ["checkpoints/saving-5/half", "checkpoints/deleting-1/half"]
    foreign = ["notes.txt", "profile/mine", "tensorboard/mine", "wandb/run-1/theirs"]
    foreign += ["checkpoints/deleting-soon", "checkpoints/mine"]
    for name in ours + foreign:
        (saved.path / name).parent.mkdir(parents=True, exist_ok=True)
        (saved.path / name).write_text("text")

    def left():
        files = (path for path in saved.path.rglob("*") if path.is_file())
        return sorted(path.relative_to(saved.path).as_posix() for path in files)

    saved.clear()
    assert left() == sorted(["config.json", "tokenizer.json", *foreign])
    (saved.path / "wandb.id").write_text("abc")  # so wandb was started for this run
    (saved.path / "wandb" / "mine").write_text("text")
    saved.clear()
    foreign.remove("wandb/run-1/theirs")
    assert left() == sorted(["config.json", "tokenizer.json", "wandb/mine", *foreign])


def test_a_run_with_another_s_files_in_place_of_its_own_is_not_overwritten(saved):
    config = dataclasses.replace(saved.config(), out=str(saved.path))
    assert RunDirectory.choose(config, resume=False, overwrite=True) == saved.path
    (saved.path / "checkpoints" / "9").mkdir()
    with pytest.raises(
        ValueError, match=r"9/manifest\.json is missing: delete .*/9 if it is a run"
    ):
        RunDirectory.choose(config, resume=False, overwrite=True)
    (saved.path / "samples.txt").mkdir()
    with pytest.raises(ValueError, match=r"samples\.txt is not what a run has under that"):
        RunDirectory.choose(config, resume=True, overwrite=False)


@pytest.mark.parametrize("moment", ["listed", "verified"])
@pytest.mark.parametrize(("which", "next_one"), [("last", 5), ("best", 5), (4, None)])
def test_a_checkpoint_that_training_deletes_while_it_is_read_is_followed_by_the_next(
    saved, small_run, initial, monkeypatch, moment, which, next_one
):
    """The run trains on between the look at the directory and the look at a file."""
    one_each = dataclasses.replace(small_run, keep_best=1, keep_last=1)
    saved.write_config(one_each)
    place = "verify" if moment == "listed" else "_require_plausible"
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


def test_a_run_goes_on_only_with_what_it_was_begun_with():
    config = TrainConfig()
    longer = dataclasses.replace(
        config, steps=9, eval_interval=3, steps_per_call=2, sample_tokens=1, out="x", name="y"
    )
    require_same_run(config, longer)
    other = dataclasses.replace(
        config, seed=8, model=dataclasses.replace(config.model, embed_dim=256)
    )
    with pytest.raises(ValueError, match="doesn't match the run to resume") as error:
        require_same_run(config, other)
    assert "model.embed_dim is 128 in the run, 256 in the config; seed is 1337 in" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("model", {"num_kv_heads": 2}),
        ("optimizer", {"optimizer": "muon"}),
        ("optimizer", {"embedding_learning_rate": 0.03}),
        ("optimizer", {"gradient_clip": 0.0}),
        ("optimizer", {"ema_decay": 0.7}),
    ],
)
def test_an_imported_run_goes_on_with_what_its_state_was_made_with(part, changes):
    """Its optimizer's state has an array, or lacks one, for each of these."""
    imported = TrainConfig()
    other = dataclasses.replace(
        imported, **{part: dataclasses.replace(getattr(imported, part), **changes)}
    )
    (name,) = changes
    with pytest.raises(ValueError, match=f"run to resume: {part}.{name} is "):
        require_same_run(imported, other, [0])
    tuned = dataclasses.replace(imported.optimizer, learning_rate=0.1, beta2=0.9, warmup_steps=7)
    longer = dataclasses.replace(imported, optimizer=tuned, steps=5, batch_size=3, seed=9)
    require_same_run(imported, longer, [0])


@pytest.mark.parametrize(
    ("saved", "given", "refused"),
    [
        ({"learning_rate": 2e-3}, {"learning_rate": 1.5e-3}, False),
        ({"learning_rate": 2e-3}, {"learning_rate": 2.5e-3}, True),
        ({"min_learning_rate": 2e-4}, {"min_learning_rate": 0.0}, False),
        ({"muon_learning_rate": 0.02}, {"muon_learning_rate": 0.01}, False),
        ({"muon_learning_rate": 0.02}, {"muon_learning_rate": 0.03}, True),
        ({"embedding_learning_rate": 0.02}, {"embedding_learning_rate": 0.01}, False),
        ({"embedding_learning_rate": 0.02}, {"embedding_learning_rate": None}, True),
        ({}, {"embedding_learning_rate": 1e-5}, True),
        ({"weight_decay": 0.2}, {"weight_decay": 0.1}, True),
    ],
)
def test_a_run_goes_on_with_lower_learning_rates_and_no_other_optimizer(saved, given, refused):
    before, after = (TrainConfig(optimizer=OptimizerConfig(**rates)) for rates in (saved, given))
    (name,) = given
    expected = pytest.raises(ValueError, match=f"optimizer.{name} is") if refused else nullcontext()
    with expected:
        require_same_run(before, after)


def test_the_config_on_disk_is_json_for_people(saved, small_run):
    assert saved.config() == small_run
    assert json.loads((saved.path / "config.json").read_text())["seed"] == small_run.seed
