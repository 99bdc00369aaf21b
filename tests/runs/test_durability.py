"""What a killed process, or a power cut, leaves of a run: one that goes on.

A process that is killed leaves every call that it made. After a power cut only that is certain
which was fsynced: a file's content, and in a directory the names of its entries. So each test
looks at all that a crash could have left after each change of a name.
"""

from pathlib import Path

import jax
import pytest
from flax import nnx

from jgpt import files, load, save
from jgpt.nn.models import create_model
from jgpt.runs import checkpoints
from jgpt.runs import run as run_module
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from tests.disk import Disk
from tests.runs import faults
from tests.runs.test_run import CONFIG, MODEL, TOKENIZER, bits, init, lines_of, start, train


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Disk:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", tmp_path / "views")
    for module in (checkpoints, run_module, files):
        monkeypatch.setattr(module, "os", disk)
        monkeypatch.setattr(module, "shutil", disk)
    sync_below = checkpoints.sync_below
    rename = Path.rename
    save_state = Checkpoints.save

    def crash_and_sync(folder):
        disk._crash()  # Orbax has named a folder that isn't synced
        sync_below(folder)

    def rename_and_crash(path, target):
        rename(path, target)
        disk._crash()
        return target

    def save_and_wait(self, *arguments):
        save_state(self, *arguments)
        self.wait()  # or copies are made while Orbax renames

    monkeypatch.setattr(checkpoints, "sync_below", crash_and_sync)
    monkeypatch.setattr(Path, "rename", rename_and_crash)
    monkeypatch.setattr(Checkpoints, "save", save_and_wait)
    return disk


@pytest.mark.slow
def test_whenever_a_training_crashes_it_goes_on(disk, tmp_path, monkeypatch):
    """What a checkpoint needs is durable before it counts, and it before others are deleted."""
    state = train(disk.root / "run")
    monkeypatch.undo()

    views_by_step: dict[int, list[Path]] = {}
    best_by_step: dict[int, set[int | None]] = {}
    for view in disk.views:
        run = RunDirectory(view / "run")
        step = 0
        if RunDirectory.exists(run.path):
            assert run.config() == CONFIG
            assert len(run.provenance()) == 1
            step = max(run.checkpoint_steps(), default=0)
            measured = [line["step"] for line in run.metrics()]
            assert measured[:step] == list(range(1, step + 1))
        views_by_step.setdefault(step, []).append(run.path)
        with start(run.path, resume=True) as opened:
            assert opened.restore(init)[1] == step
            best_by_step.setdefault(step, set()).add(opened.best())
    assert sorted(views_by_step) == [0, 2, 4, 6]
    assert best_by_step == {0: {None}, 2: {2}, 4: {2}, 6: {2}}

    # a run that a power cut has left is like any other
    for step in (0, 2, 4):
        path = views_by_step[step][-1]
        faults.leave_all(path)
        assert bits(train(path, resume=True)) == bits(state)
        assert lines_of(path) == lines_of(disk.root / "run")


@pytest.mark.slow
def test_whenever_an_overwriting_crashes_the_same_command_goes_on(disk, monkeypatch):
    """Beside a file that is not the run's: a directory without a config would be nobody's."""
    out = disk.root / "run"
    train(out)
    (out / "notes.txt").write_text("mine")
    before = len(disk.views)

    with start(out, overwrite=True) as run:
        run.restore(init)
    monkeypatch.undo()

    views = disk.views[before:]
    assert len(views) > 5
    found = []
    for view in views:
        assert RunDirectory.exists(view / "run")
        with start(view / "run", resume=True) as run:
            found.append(run.restore(init)[1])
        with start(view / "run", overwrite=True) as run:
            assert run.restore(init)[1] == 0
    assert sorted(set(found)) == [0, 6]
    assert found[-1] == 0


def test_metrics_are_on_disk_before_the_checkpoint_of_their_step(disk):
    with start(disk.root / "run") as run:
        state, _ = run.restore(init)
        run.log(1, loss=1.0)
        disk.calls.clear()
        run.save(1, state)

    calls = [call for call in disk.calls if "checkpoints/1/" not in call]
    of_metrics = ["write run/metrics.jsonl", "fsync run/metrics.jsonl", "fsync run"]
    assert calls[:3] == of_metrics
    assert calls[3:] == [
        "fsync run/checkpoints/1",
        "fsync run/checkpoints/1.sha256.json.partial",
        "rename run/checkpoints/1.sha256.json.partial run/checkpoints/1.sha256.json",
        "fsync run/checkpoints",
        "fsync run/checkpoints",
    ]


@pytest.mark.slow
def test_an_imported_run_is_there_as_a_whole_or_not_at_all(disk):
    model = create_model(MODEL, rngs=nnx.Rngs(0))

    save(model, disk.root / "run", tokenizer=TOKENIZER, config=CONFIG)

    assert disk.calls[-2:] == ["rename run.new.jgpt.partial run", "fsync ."]
    *before_rename, killed, power_cut, power_cut_with_loss = disk.views
    for view in (*before_rename, power_cut_with_loss):
        assert not (view / "run").exists()
    for view in (killed, power_cut):
        loaded = load(view / "run").model
        assert jax.tree.all(
            jax.tree.map(
                lambda one, other: bool((one == other).all()), *map(nnx.state, (loaded, model))
            )
        )
