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

from jgpt import CharTokenizer, ModelConfig, TrainConfig, durable, fit, load
from jgpt.data.dataset import load_dataset
from jgpt.nn.models import create_model
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
    steps = []
    for step in run.checkpoint_steps():
        manifest = verify(view / "checkpoints" / str(step))
        steps.append(manifest.step)
    return steps


def test_a_run_is_there_with_its_tokenizer_or_its_directory_may_be_used(disk):
    RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)

    exists = [RunDirectory.exists(view / "run") for view in disk.views]
    # killed, and after a power cut without and with a loss
    assert exists[-3:] == [True, True, False]
    for view, is_there in zip(disk.views, exists, strict=True):
        if not is_there:
            assert may_begin(view / "run")
            continue
        run = RunDirectory(view / "run")
        assert run.config() == CONFIG
        assert run.tokenizer().to_json() == TOKENIZER.to_json()
    assert disk.calls[-1] == "fsync run"


def test_a_config_that_is_written_again_is_the_old_or_the_new_one(disk):
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    new = dataclasses.replace(CONFIG, steps=7)
    before = len(disk.views)

    run.write_config(new)

    killed, power_cut, power_cut_with_loss = disk.views[before:]
    assert RunDirectory(killed / "run").config() == new
    assert RunDirectory(power_cut / "run").config() == new
    assert RunDirectory(power_cut_with_loss / "run").config() == CONFIG


def test_metrics_are_fsynced_when_they_shall_be_durable(disk):
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    disk.calls.clear()

    run.append("metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert disk.calls == ["write run/metrics.jsonl"]

    disk.calls.clear()
    run.append("metrics.jsonl", [{"step": 2, "loss": 1.5}], durable=True)
    run.append_provenance({"step": 0})
    assert disk.calls == [
        "write run/metrics.jsonl",
        "fsync run/metrics.jsonl",
        "fsync run",
        "write run/provenance.jsonl",
        "fsync run/provenance.jsonl",
        "fsync run",
    ]


@pytest.mark.slow
def test_whenever_it_crashes_the_best_and_the_last_checkpoint_load(disk, initial):
    """All files and names are on disk before a checkpoint counts, and before others are deleted."""
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    losses = {1: 1.0, 2: 2.0, 3: 0.5}
    # the best one and the last one: after the third step they are the same
    kept_after = {0: set(), 1: {1}, 2: {1, 2}, 3: {3}}

    for step, loss in losses.items():
        before = len(disk.views)
        save(run, initial, {step: loss})
        assert len(disk.views) > before + 2
        for view in disk.views[before:]:
            found = set(steps_that_load(view / "run"))
            is_old = found >= kept_after[step - 1]
            is_new = found >= kept_after[step]
            assert is_old or is_new, (view, found)

    assert disk.calls[-3] == "fsync run/checkpoints"
    assert sorted(disk.calls[-2:]) == [
        "delete run/checkpoints/deleting-1",
        "delete run/checkpoints/deleting-2",
    ]
    load(run.path)


@pytest.fixture
def tokenized(small_run, user_cache):
    """The text's tokens, which are on another disk."""
    load_dataset(small_run.dataset, 7)


@pytest.mark.slow
@pytest.mark.usefixtures("tokenized")
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

    first_view_with: dict[int, Path] = {}  # by the last step that loads
    for view in disk.views:
        if not RunDirectory.exists(view / "run"):
            assert may_begin(view / "run")
            continue
        run = RunDirectory.open(view / "run")
        assert run.config().steps == 11
        assert run.tokenizer().vocab_size == 21
        last = last_step_with_its_metrics(run)
        first_view_with.setdefault(last, run.path)
    assert sorted(first_view_with) == [0, 1, 4, 8, 11]  # 1 is the early checkpoint

    # the view after a power cut in the middle is a run like any other
    middle = first_view_with[8]
    monkeypatch.undo()
    faults.leave_all(middle)
    resumed = fit(dataclasses.replace(config, out=str(middle)), resume=True)
    steps = [line["step"] for line in RunDirectory(resumed.directory).metrics()]
    assert steps == list(range(12))


def last_step_with_its_metrics(run: RunDirectory) -> int:
    """The last checkpoint's step, or 0; before it no step lacks its metrics or the provenance."""
    steps = steps_that_load(run.path)
    if not steps:
        return 0
    last = steps[-1]
    measured = [line["step"] for line in run.metrics()]
    manifest = Manifest.read(run.path / "checkpoints" / str(last))
    if manifest.unevaluated is not None and last not in measured:
        measured.append(manifest.unevaluated["step"])  # whose loss is not known yet
    assert measured[: last + 1] == list(range(last + 1))
    assert len(run.provenance()) == 1
    return last


@pytest.mark.slow
def test_an_imported_run_is_there_as_a_whole_or_not_at_all(disk):
    model = create_model(CONFIG.model, rngs=nnx.Rngs(0))

    save_model(model, disk.root / "run", tokenizer=TOKENIZER, config=CONFIG)

    assert disk.calls[-2:] == ["rename run.new.jgpt.partial run", "fsync ."]
    *before_rename, killed, power_cut, power_cut_with_loss = disk.views
    for view in (*before_rename, power_cut_with_loss):
        assert not (view / "run").exists()
    for view in (killed, power_cut):
        assert steps_that_load(view / "run") == [0]


@pytest.mark.slow
def test_whenever_an_overwriting_is_killed_the_same_command_goes_on(disk, initial, monkeypatch):
    """Beside a file that is not the run's: a directory without a config would be nobody's."""
    run = RunDirectory.create(disk.root / "run", CONFIG, TOKENIZER)
    save(run, initial, {1: 3.0})
    run.append("metrics.jsonl", [{"step": 1, "loss": 3.0}])
    run.append_provenance({"step": 0})
    (run.path / "samples.txt").write_text("text")
    (run.path / "notes.txt").write_text("mine")
    new = dataclasses.replace(CONFIG, seed=7, out=str(run.path))
    before = len(disk.views)
    unlink = Path.unlink

    def unlink_and_crash(path, missing_ok=False):
        unlink(path, missing_ok)
        if path.parent == run.path and path.suffix != ".partial":
            disk._crash()

    monkeypatch.setattr(Path, "unlink", unlink_and_crash)
    run.begin(new, TOKENIZER, "overwrite")
    with Checkpoints(run):
        pass
    monkeypatch.undo()

    views = disk.views[before:]
    assert len(views) > 15
    configs = []
    for view in views:
        path = view / "run"
        config = dataclasses.replace(new, out=str(path))
        assert choose_target(config, resume=False, overwrite=True).path == path
        assert choose_target(config, resume=True, overwrite=False).path == path
        configs.append(RunDirectory.open(path).config())
        assert configs[-1] in (CONFIG, new)
    assert configs[0] == CONFIG
    assert configs[-1] == CONFIG  # the last name is lost by a power cut
    assert run.config() == new
    left = sorted(path.name for path in run.path.iterdir())
    assert left == ["checkpoints", "config.json", "notes.txt", "tokenizer.json"]


def test_every_directory_that_was_made_is_on_disk(disk, monkeypatch):
    run = RunDirectory(disk.root / "runs" / "deep" / "run")

    with run.locked():
        synced = [call for call in disk.calls if "fsync" in call]
        assert sorted(synced) == ["fsync .", "fsync runs", "fsync runs/deep"]

    disk.calls.clear()
    RunDirectory.create(disk.root / "new" / "run", CONFIG, TOKENIZER)
    assert disk.calls[:2] == ["fsync .", "fsync new"]

    disk.calls.clear()
    with run.locked():
        pass
    assert disk.calls == []  # nothing is new
