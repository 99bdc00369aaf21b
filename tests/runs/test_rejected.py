"""A start that is rejected leaves every byte of a run's directory as it was."""

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jgpt
from jgpt import TrainConfig, fit
from jgpt.files import locked
from jgpt.fitting.progress import Progress
from jgpt.runs import directory, manifest
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from tests.runs import faults
from tests.runs.harness import BIGRAM, contents, with_changes


class Table(nnx.Module):
    """Another model, of one array."""

    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size
        self.table = nnx.Param(jnp.ones((config.vocab_size, config.vocab_size)))

    def hidden(self, tokens, *, rngs=None):
        return self.table[...][tokens]

    def logits(self, x):
        return x

    def __call__(self, tokens, *, rngs=None):
        return self.logits(self.hidden(tokens, rngs=rngs))


class NotMade(Table):
    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        raise RuntimeError("it is not made")


class NotApplied(Table):
    def hidden(self, tokens, *, rngs=None):
        raise RuntimeError("it is not applied")


def sgd(config: jgpt.OptimizerConfig, steps: int) -> optax.GradientTransformation:
    return optax.sgd(0.1, momentum=0.9)


def not_updated(config: jgpt.OptimizerConfig, steps: int) -> optax.GradientTransformation:
    def update(updates, state, params=None):
        raise RuntimeError("it is not updated")

    return optax.GradientTransformation(lambda params: (), update)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a start is rejected."""

    message: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the config."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `fit`, besides `resume` and `overwrite`."""
    arrange: Callable[[Path, pytest.MonkeyPatch], None] = lambda folder, monkeypatch: None
    """What is done before the start."""


def damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max((folder / "checkpoints" / "11" / "weights").rglob("*"), key=_size)
    faults.flip_a_bit(largest)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def without_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]


def wandb_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(dir: str, **_: Any) -> None:
        (Path(dir) / "wandb" / "run-1").mkdir(parents=True)
        raise RuntimeError("there is no key")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))  # type: ignore[arg-type]


def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))


def little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jgpt.hardware.memory_limit", lambda: 100)


def other_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "other.txt").write_text("So long as eyes can see or men can breathe.\n" * 40)
    monkeypatch.chdir(folder.parent)


def other_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = RunDirectory(folder).tokenizer()
    text = tokenizer.to_json()
    assert '"S"' in text or "S" in text
    (folder / "tokenizer.json").write_text(text.replace("S", "Z"))


def half_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process was still writing, and a state that is rejected."""
    partial = folder / "checkpoints" / "saving-12" / "weights"
    partial.mkdir(parents=True)
    (partial / "0.0").write_bytes(b"half")
    damage(folder, monkeypatch)


REASONS = {
    "resume with a custom model": Reason(
        "or of a model other than the config", options={"model": Table}
    ),
    "resume with a model that is not made": Reason("it is not made", options={"model": NotMade}),
    "resume with a custom optimizer": Reason(
        "can't be read: it is damaged, or of a", options={"optimizer": sgd}
    ),
    "resume from a damaged checkpoint": Reason("SHA-256 does not match", arrange=damage),
    "resume without a package": Reason(
        r"pip install 'jgpt\[wandb\]'", {"trackers": ("wandb",)}, arrange=without_wandb
    ),
    "resume with a tracker that can't be opened": Reason(
        "there is no key", {"trackers": ("tensorboard", "wandb")}, arrange=wandb_that_fails
    ),
    "resume with another text": Reason(
        "text", {"dataset": {"data": ("other.txt",)}}, arrange=other_text
    ),
    "resume without its text": Reason("none.txt", {"dataset": {"data": ("none.txt",)}}),
    "resume with another tokenizer": Reason("Z", arrange=other_tokenizer),
    "resume with another size": Reason("model.embed_dim` is 12", {"model": {"embed_dim": 16}}),
    "resume with another batch": Reason("batch_size` is 5", {"batch_size": 6}),
    "resume with fewer steps": Reason("below the 11 steps", {"steps": 10}),
    "resume on a full disk": Reason("1,000 bytes free", {"steps": 12}, arrange=full_disk),
    "resume without memory": Reason("smaller model", arrange=little_memory),
    "resume beside half a checkpoint": Reason("SHA-256", arrange=half_a_checkpoint),
    "overwrite with a model that is not made": Reason("it is not made", options={"model": NotMade}),
    "overwrite with a model that is not applied": Reason(
        "it is not applied", options={"model": NotApplied}
    ),
    "overwrite with an optimizer that is not applied": Reason(
        "it is not updated", options={"optimizer": not_updated}
    ),
    "overwrite with no text": Reason("none.txt", {"dataset": {"data": ("none.txt",)}}),
    "overwrite on a full disk": Reason("1,000 bytes free", arrange=full_disk),
    "overwrite without memory": Reason("smaller model", arrange=little_memory),
    "overwrite with a tracker that can't be opened": Reason(
        "there is no key", {"trackers": ("tensorboard", "wandb")}, arrange=wandb_that_fails
    ),
    "start where a run is": Reason("already exists: `resume=True` continues it"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_rejected_start_changes_no_byte(copy: TrainConfig, monkeypatch, broken_reads, name):
    reason = REASONS[name]
    folder = Path(str(copy.out))
    kind = name.split()[0]
    reason.arrange(folder, monkeypatch)
    config = with_changes(copy, **reason.changes)
    before = bytes_of_run(folder)

    with pytest.raises(Exception, match=reason.message):
        fit(
            config,
            resume=kind == "resume",
            overwrite=kind == "overwrite",
            progress=None,
            **reason.options,
        )
    assert bytes_of_run(folder) == before


def bytes_of_run(folder: Path) -> dict[str, bytes | None]:
    """All but the lock, which has the number of the process that held it last."""
    found = contents(folder)
    found.pop("lock", None)
    return found


@pytest.mark.slow
def test_a_start_reads_the_files_of_its_run_once(copy, monkeypatch):
    """What it decides by can't change in between, and a slow disk is asked once."""
    read = []
    parse_file = manifest.parse_file
    provenance = RunDirectory.provenance

    def recorded_file(path, parse):
        read.append(path.name)
        return parse_file(path, parse)

    def recorded_provenance(run):
        read.append("provenance.jsonl")
        return provenance(run)

    class Started(Progress):
        def started(self, config, dataset, state, out):
            read.append("started")

    for module in (manifest, directory):
        monkeypatch.setattr(module, "parse_file", recorded_file)
    monkeypatch.setattr(RunDirectory, "provenance", recorded_provenance)
    config = dataclasses.replace(copy, steps=12)
    fit(config, resume=True, progress=Started())
    of_the_start = read[: read.index("started")]

    # a checkpoint's own files are read by what verifies and restores it
    for name in ("config.json", "provenance.jsonl", "tokenizer.json"):
        assert of_the_start.count(name) == 1, name


def test_a_run_in_use_is_left_alone(copy):
    folder = Path(str(copy.out))
    before = bytes_of_run(folder)
    for resume in (True, False):
        with locked(folder / "lock", folder), pytest.raises(BlockingIOError, match="in use by"):
            fit(copy, progress=None, resume=resume, overwrite=not resume)

    assert bytes_of_run(folder) == before


@pytest.mark.parametrize("make", [NotMade, NotApplied])
def test_a_new_start_that_is_rejected_leaves_nothing(small_run, tmp_path, make):
    config = dataclasses.replace(small_run, out=str(tmp_path / "runs" / "new"))
    with pytest.raises(RuntimeError):
        fit(config, model=make, progress=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_resumed_run_is_as_before_after_a_rejected_start(copy, trained):
    """The config's record of the model has not changed either, so the run loads."""
    with pytest.raises(ValueError, match="or of a model other than the config"):
        fit(copy, model=Table, resume=True, progress=None)
    model, _, config = jgpt.load(str(copy.out))
    assert config.model.make is None
    assert jnp.array_equal(model(jnp.array([[0, 1]])), trained.model(jnp.array([[0, 1]])))
    run = fit(copy, resume=True, progress=None)
    assert run.validation_loss == trained.validation_loss


@pytest.mark.slow
def test_a_run_that_was_never_trained_does_not_block_the_next(small_run, tmp_path):
    config = with_changes(small_run, **BIGRAM, steps=1, out=str(tmp_path / "run"))

    class NotANumber(Table):
        def logits(self, x):
            return x * jnp.nan

    with pytest.raises(FloatingPointError, match="at its first step, before any update") as error:
        fit(config, model=NotANumber, progress=None)
    assert "lower learning_rate" not in str(error.value)
    assert RunDirectory(tmp_path / "run").checkpoint_steps() == []
    run = fit(config, progress=None)
    assert run.config.model.make is None
    with pytest.raises(FileExistsError, match="already exists"):
        fit(config, progress=None)


def test_a_state_that_is_not_finite_is_neither_saved_nor_named(small_run, tmp_path):
    """At this rate the first update is finite in part, and the state is of no use."""
    wild = {"learning_rate": 3e38, "warmup_steps": 0}
    config = with_changes(small_run, optimizer=wild, out=str(tmp_path / "run"))

    with pytest.raises(FloatingPointError, match=r"nothing was saved yet$"):
        fit(config, progress=None)
    assert RunDirectory(tmp_path / "run").checkpoint_steps() == []


def test_checkpoints_compare_with_the_config_that_they_are_given(copy):
    run = RunDirectory(Path(str(copy.out)))
    other = with_changes(run.config(), model={"rotary_base": 77.0})
    with (
        Checkpoints(run, other, read_only=True) as checkpoints,
        pytest.raises(ValueError, match=r"saved with `rotary_base=10000\.0` and not 77\.0"),
    ):
        checkpoints.restore_weights(run.config(), "last")
