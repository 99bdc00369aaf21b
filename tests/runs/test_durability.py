"""What a killed process, or a power cut, leaves of a run: one that loads and goes on.

A process that is killed leaves every call that it made. After a power cut only that is certain
which was fsynced: a file's content, and in a directory the names of its entries. So each test
records the calls, and after each one looks at all that a crash could have left.
"""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from jgpt import CharTokenizer, ModelConfig, TrainConfig, create_model, durable, fit, load
from jgpt.runs import checkpoints, directory
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from jgpt.runs.load import save as save_model
from jgpt.runs.manifest import Manifest, verify
from jgpt.runs.target import choose_target
from jgpt.training.state import TrainState, init_state
from tests.disk import Disk
from tests.runs import faults

CONFIG = TrainConfig(
    model=ModelConfig(vocab_size=3, block_size=5, num_layers=1, num_heads=1, embed_dim=4),
    keep_last=1,
)
TOKENIZER = CharTokenizer("abc")


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Disk:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", tmp_path / "views")
    for module in (checkpoints, directory, durable):
        monkeypatch.setattr(module, "os", disk)
    for module in (directory, durable):
        monkeypatch.setattr(module, "shutil", disk)
    return disk


@pytest.fixture(scope="module")
def initial() -> TrainState:
    return init_state(CONFIG)


def state_of(initial: TrainState, step: int) -> TrainState:
    return dataclasses.replace(initial, step=jnp.int32(step))


def save(run: RunDirectory, initial: TrainState, losses: dict[int, float]) -> None:
    with Checkpoints(run) as saved:
        for step, loss in losses.items():
            saved.save(state_of(initial, step), loss)


def may_begin(view: Path) -> bool:
    """Whether a directory that isn't a run may become one, with or without `resume`."""
    return not view.exists() or RunDirectory.is_unused(view)


def steps_that_load(view: Path) -> list[int]:
    """The steps of a run's checkpoints, all of whose files are intact."""
    run = RunDirectory.open(view)
    assert run.config().model.vocab_size == run.tokenizer().vocab_size
    return [verify(view / "checkpoints" / str(step)).step for step in run.checkpoint_steps()]


def test_a_run_is_there_with_its_tokenizer_or_its_directory_may_be_used(disk):
    RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    found = [RunDirectory.exists(view / "run") for view in disk.views]
    # killed, and after a power cut without and with a loss
    assert found[-3:] == [True, True, False]
    for view, there in zip(disk.views, found, strict=True):
        if there:
            assert RunDirectory(view / "run").config() == CONFIG
            assert RunDirectory(view / "run").tokenizer().to_json() == TOKENIZER.to_json()
        else:
            assert may_begin(view / "run")
    assert disk.calls[-1] == "fsync run"


def test_a_config_that_is_written_again_is_the_old_or_the_new_one(disk):
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    before = len(disk.views)
    new = dataclasses.replace(CONFIG, steps=7)
    run.write_config(new)
    found = [RunDirectory(view / "run").config() for view in disk.views[before:]]

    assert found == [new, new, CONFIG]  # killed, and after a power cut without and with a loss


def test_metrics_are_fsynced_when_they_shall_be_durable(disk):
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    before = len(disk.calls)
    run.append("metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert disk.calls[before:] == ["write run/metrics.jsonl"]
    run.append("metrics.jsonl", [{"step": 2, "loss": 1.5}], durable=True)
    run.append_provenance({"step": 0})
    assert disk.calls[before + 1 :] == [
        "write run/metrics.jsonl",
        "fsync run/metrics.jsonl",
        "fsync run",
        "write run/provenance.jsonl",
        "fsync run/provenance.jsonl",
        "fsync run",
    ]


def test_whenever_it_crashes_the_best_and_the_last_checkpoint_load(disk, initial):
    """All files and names are on disk before a checkpoint counts, and before others are deleted."""
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    kept = {0: set(), 1: {1}, 2: {1, 2}, 3: {3}}
    for step, loss in {1: 1.0, 2: 2.0, 3: 0.5}.items():
        before = len(disk.views)
        save(run, initial, {step: loss})
        assert len(disk.views) > before + 2
        for view in disk.views[before:]:
            found = {*steps_that_load(view / "run")}
            assert found >= kept[step - 1] or found >= kept[step], (view, found)
    deleted = [f"delete run/checkpoints/deleting-{step}" for step in (1, 2)]
    assert disk.calls[-3] == "fsync run/checkpoints"
    assert sorted(disk.calls[-2:]) == deleted
    load(run.path)


@pytest.mark.slow
def test_whenever_training_crashes_the_run_goes_on(disk, small_run, monkeypatch):
    """What a checkpoint's step needs is durable before it counts: metrics, and the provenance."""
    save = Checkpoints.save
    evaluated = Checkpoints.evaluated

    def save_and_wait(self, *arguments, **options):
        save(self, *arguments, **options)
        self.wait()  # or copies are made while Orbax renames

    def evaluated_and_wait(self, *arguments):
        evaluated(self, *arguments)
        self.wait()

    monkeypatch.setattr(Checkpoints, "save", save_and_wait)
    monkeypatch.setattr(Checkpoints, "evaluated", evaluated_and_wait)
    out = disk.root / "run"
    config = dataclasses.replace(small_run, out=str(out), sample_tokens=0, keep_last=1)
    fit(config, overwrite=True)
    last = []
    for view in disk.views:
        if not RunDirectory.exists(view / "run"):
            assert may_begin(view / "run")
            continue
        run = RunDirectory.open(view / "run")
        assert (run.config().steps, run.tokenizer().vocab_size) == (11, 21)
        steps = steps_that_load(run.path)
        last.append(steps[-1] if steps else 0)
        metrics = [line["step"] for line in run.metrics()]
        if steps:
            manifest = Manifest.read(run.path / "checkpoints" / str(steps[-1]))
            if manifest.unevaluated is not None and steps[-1] not in metrics:
                metrics.append(manifest.unevaluated["step"])  # whose loss is not known yet
        assert metrics[: last[-1] + 1] == list(range(last[-1] + 1)) or not steps
        assert len(run.provenance()) == 1 or not steps
    assert sorted(set(last)) == [0, 1, 4, 8, 11]  # 1 is the early checkpoint
    # the view after a power cut in the middle is a run like any other
    middle = next(
        view for view, step in zip(disk.views[-len(last) :], last, strict=True) if step == 8
    )
    monkeypatch.undo()
    faults.leave_all(middle / "run")
    resumed = fit(dataclasses.replace(config, out=str(middle / "run")), resume=True)
    assert [line["step"] for line in RunDirectory(resumed.directory).metrics()] == [*range(12)]


def test_an_imported_run_is_there_as_a_whole_or_not_at_all(disk):
    model = create_model(CONFIG.model, rngs=nnx.Rngs(0))
    save_model(model, disk.root / "run", tokenizer=TOKENIZER, config=CONFIG)
    assert disk.calls[-2:] == ["rename run.partial run", "fsync ."]
    there = [(view / "run").exists() for view in disk.views]
    assert there[-3:] == [True, True, False]  # as above
    assert not any(there[:-3])
    assert [steps_that_load(view / "run") for view in disk.views[-3:-1]] == [[0], [0]]


def test_whenever_an_overwriting_is_killed_the_same_command_goes_on(disk, initial, monkeypatch):
    """Beside a file that is not the run's: a directory without a config would be nobody's."""
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    save(run, initial, {1: 3.0})
    run.append("metrics.jsonl", [{"step": 1, "loss": 3.0}])
    run.append_provenance({"step": 0})
    (run.path / "samples.txt").write_text("text")
    (run.path / "notes.txt").write_text("mine")
    before = len(disk.views)
    unlink = Path.unlink

    def unlink_and_crash(path, missing_ok=False):
        unlink(path, missing_ok)
        if path.parent == run.path and path.suffix != ".partial":
            disk._crash()

    monkeypatch.setattr(Path, "unlink", unlink_and_crash)
    new = dataclasses.replace(CONFIG, seed=7, out=str(run.path))
    run.begin(new, TOKENIZER, "overwrite")
    with Checkpoints(run):
        pass
    monkeypatch.undo()
    assert len(disk.views) - before > 15
    found = []
    for view in disk.views[before:]:
        config = dataclasses.replace(new, out=str(view / "run"))
        assert choose_target(config, resume=False, overwrite=True).path == view / "run"
        assert choose_target(config, resume=True, overwrite=False).path == view / "run"
        found.append(RunDirectory.open(view / "run").config())
        assert found[-1] in (CONFIG, new)
    assert (found[0], found[-1]) == (CONFIG, CONFIG)  # the last name is lost by a power cut
    assert run.config() == new
    left = sorted(path.name for path in run.path.iterdir())
    assert left == ["checkpoints", "config.json", "notes.txt", "tokenizer.json"]


def test_every_directory_that_was_made_is_on_disk(disk, monkeypatch):
    run = RunDirectory(disk.root / "runs" / "deep" / "run")
    with run.locked():
        synced = [call for call in disk.calls if "fsync" in call]
        assert sorted(synced) == ["fsync .", "fsync runs", "fsync runs/deep"]
    before = len(disk.calls)
    RunDirectory.create(disk.root / "new" / "run", CONFIG, TOKENIZER)
    assert disk.calls[before : before + 2] == ["fsync .", "fsync new"]
    before = len(disk.calls)
    with run.locked():
        pass
    assert len(disk.calls) == before + 1  # the lock is written; nothing is new
