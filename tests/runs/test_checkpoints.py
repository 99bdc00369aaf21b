"""A checkpoint is read wherever it lies, onto any device, or it is said what is wrong with it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import evaluate, fit, load
from jgpt.parallel.mesh import make_mesh
from jgpt.runs import checkpoints as module
from jgpt.runs.checkpoints import Checkpoints, load_checkpoint, loss_of
from tests.quick import only
from tests.runs import faults
from tests.runs.harness import contents


def state_of(step: int) -> dict[str, Any]:
    """A state that can be told from those of other steps."""
    return {"model": {"a": jnp.full(3, step, jnp.float32)}, "moments": {"b": jnp.ones(step)}}


def like(step: int) -> dict[str, Any]:
    return jax.eval_shape(lambda: {"model": state_of(step)["model"]})


@pytest.fixture
def folder(tmp_path) -> Path:
    """Checkpoints of which the second is the best."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    save_states(folder, {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5})
    return folder


def save_states(folder: Path, losses: dict[int, float], keep_last: int = 2) -> None:
    checkpoints = Checkpoints(folder, keep_last, keep_best=1, keep_every=None)
    for step, loss in losses.items():
        checkpoints.save(step, state_of(step), loss)
    checkpoints.close()


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("last", 4), (3, 3)])
def test_a_checkpoint_is_the_best_the_last_or_that_of_a_step(folder, which, step):
    found, state = load_checkpoint(folder, which, like(step))

    assert found == step
    assert state["model"]["a"].tolist() == [step] * 3
    assert loss_of(folder, step) == {2: 1.0, 3: 2.0, 4: 1.5}[step]


def test_a_checkpoint_that_is_not_there_is_named(folder):
    with pytest.raises(ValueError, match=r"has no checkpoint 1: it has 2, 3, 4$"):
        load_checkpoint(folder, 1, like(1))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"a": jnp.ones(4)}}, "it is damaged, or of another model"),
        ({"model": {"a": jnp.ones(3, jnp.bfloat16)}}, "model.a is float32, not bfloat16"),
    ],
)
def test_a_state_of_another_form_is_refused(folder, state, message, broken_reads):
    """Orbax would cast another dtype without a word."""
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(folder, "last", jax.eval_shape(lambda: state))
    assert "delete" not in str(error.value)


@pytest.mark.parametrize("name", only(["cut off", "missing", "a flipped bit"], faults.FAULTS))
def test_damage_to_any_file_of_a_checkpoint_is_named(folder, name, broken_reads):
    """Whatever is done to whatever file of the best checkpoint."""
    best = folder / "2"
    victims = [path for path in best.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(victims) > 5
    advice = f"; delete {best} to use checkpoint 4"

    for victim in victims:
        said = re.escape(f"2/{victim.relative_to(best)} is ")
        with faults.undone(victim):
            faults.FAULTS[name](victim)
            with pytest.raises(ValueError, match=said) as error:
                load_checkpoint(folder, 2, like(2))
            assert str(error.value).endswith(advice)
    load_checkpoint(folder, "best", like(2))


@pytest.mark.parametrize("name", ["half of JSON", "other JSON", "not text"])
def test_damaged_sums_are_named(folder, name):
    faults.FAULTS[name](folder / "2.sha256.json")
    with pytest.raises(ValueError, match=r"2\.sha256\.json is damaged; delete"):
        load_checkpoint(folder, "best", like(2))


@pytest.mark.parametrize("moment", ["_load", "_verify"])
@pytest.mark.parametrize(("which", "next_one"), [("best", 5), (4, None)])
def test_a_checkpoint_that_training_deletes_while_it_is_read_is_followed_by_the_next(
    folder, monkeypatch, moment, which, next_one
):
    """The run trains on between the look at the folder and the look at a file."""
    read = getattr(module, moment)
    chosen = module.choose

    def choose(*arguments):
        step = chosen(*arguments)
        monkeypatch.setattr(module, "choose", chosen)
        monkeypatch.setattr(module, moment, read_late)
        return step

    def read_late(*arguments):
        monkeypatch.undo()
        save_states(folder, {5: 0.5}, keep_last=1)
        assert module.steps_in(folder) == [5]
        return read(*arguments)

    monkeypatch.setattr(module, "choose", choose)
    if next_one is None:
        with pytest.raises(ValueError, match=r"has no checkpoint 4: it has 5$"):
            load_checkpoint(folder, which, like(4))
    else:
        step, state = load_checkpoint(folder, which, like(4))
        assert (step, state["model"]["a"].tolist()) == (next_one, [next_one] * 3)


# --- models --------------------------------------------------------------------------------------


def test_a_run_is_loaded_to_the_device_that_new_arrays_go_to(trained):
    device = jax.devices()[3]

    with jax.default_device(device):
        model, _, _ = load(trained.path)

    leaves = jax.tree.leaves(nnx.state(model))
    assert len(leaves) > 10
    for leaf in leaves:
        assert leaf.devices() == {device}


def test_a_run_is_loaded_in_shards(trained):
    def load_kernel() -> jax.Array:
        model: Any
        model, _, _ = load(trained.path)
        return model.blocks[0].feed_forward.expansion.kernel[...]

    alone = load_kernel()
    with jax.set_mesh(make_mesh("fsdp=4,tensor=2")):
        kernel = load_kernel()

    first_shard = kernel.addressable_shards[0]
    assert first_shard.data.shape == (12 // 4, 48 // 2)
    np.testing.assert_array_equal(kernel, alone)


def test_a_run_without_a_checkpoint_is_not_loaded(copy):
    folder = Path(copy.out) / "checkpoints"
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    with pytest.raises(FileNotFoundError, match="has no checkpoint: the run never saved one"):
        load(copy.out)


@pytest.fixture
def run(copy) -> Path:
    return Path(copy.out)


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_fault_of_a_text_file_is_named(run, name, fault):
    faults.FAULTS[fault](run / name)
    reason = f"{name} is damaged"
    if fault == "missing":
        reason = f"no {name}|{name} is missing"

    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        load(run, which="last")


def test_a_damaged_checkpoint_can_be_deleted_to_go_on_from_the_one_before(copy, run, trained):
    files = [path for path in (run / "checkpoints" / "11").rglob("*") if path.is_file()]
    faults.flip_a_bit(files[-1])
    with pytest.raises(ValueError, match=r"SHA-256 does not match; delete .* to use checkpoint 8"):
        fit(copy, resume=True, progress=None)

    shutil.rmtree(run / "checkpoints" / "11")
    again = fit(copy, resume=True, progress=None)

    assert again.metrics["loss"] == trained.metrics["loss"]


def test_a_run_is_read_wherever_it_lies_and_is_not_touched(trained, run, tmp_path):
    moved = run.rename(tmp_path / " a%20b?c#d:e\n$HOME ~ *[f]{g}'\"|&; e\u0301 \u00e9 ")
    paths = [moved, *moved.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(moved), [path.stat().st_mtime_ns for path in paths]
    try:
        assert load(str(moved)).config == trained.config
        assert evaluate(moved).loss == pytest.approx(trained.validation_loss, rel=1e-6)
        assert (contents(moved), [path.stat().st_mtime_ns for path in paths]) == before
    finally:
        for path in paths:
            path.chmod(0o755)


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(run):
    """A limit on file sizes, as a quota sets it, that a file of a later save runs into."""
    code = f"""
import resource
import jax, jgpt.cli, jgpt.runs.checkpoints
jax.config.update("jax_enable_compilation_cache", False)  # or its programs would be cut off, too
save = jgpt.runs.checkpoints.Checkpoints.save
def limited(*args, **options):
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    save(*args, **options)
jgpt.runs.checkpoints.Checkpoints.save = limited
jgpt.cli.main(["train", "--out", {str(run)!r}, "--resume", "--steps", "12"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    # and nothing of the threads of Orbax and TensorStore
    assert done.stderr == (
        f"jgpt: the checkpoint of step 12 could not be written to {run}/checkpoints "
        "(File too large); the last good checkpoint is step 11: free some space and use --resume\n"
    )
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["11", "11.sha256.json", "8", "8.sha256.json"]
    load(run)


def test_loading_a_run_unpickles_nothing(trained, monkeypatch):
    """Importing pickle from our code is refused by the linter; here every unpickler is."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for library in ("pickle", "_pickle"):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(f"{library}.{name}", refuse)
    assert evaluate(trained.path).loss == pytest.approx(trained.validation_loss, rel=1e-6)
