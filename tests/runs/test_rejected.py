"""A start that is rejected leaves every byte of a run's directory as it was."""

import dataclasses
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
from jgpt.runs.directory import RunDirectory
from tests.runs import faults
from tests.runs.harness import contents, with_changes


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
    files = [path for path in (folder / "checkpoints" / "11").rglob("*") if path.is_file()]
    faults.flip_a_bit(files[-1])


def full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))


def little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jgpt.machine.memory_limit", lambda: 100)


def other_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "other.txt").write_text("So long as eyes can see or men can breathe.\n" * 40)
    monkeypatch.chdir(folder.parent)


def other_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = RunDirectory(folder).tokenizer()
    text = tokenizer.to_json()
    assert '"S"' in text or "S" in text
    (folder / "tokenizer.json").write_text(text.replace("S", "Z"))


REASONS = {
    "resume with a custom model": Reason("or of another model", options={"model": Table}),
    "resume with a custom optimizer": Reason(
        "can't be read: it is damaged, or of a", options={"optimizer": sgd}
    ),
    "resume from a damaged checkpoint": Reason("SHA-256 does not match", arrange=damage),
    "resume with another text": Reason(
        "text", {"dataset": {"data": ("other.txt",)}}, arrange=other_text
    ),
    "resume with another tokenizer": Reason("Z", arrange=other_tokenizer),
    "resume with another size": Reason("model.embed_dim` is 12", {"model": {"embed_dim": 16}}),
    "resume on a full disk": Reason("1,000 bytes free", {"steps": 12}, arrange=full_disk),
    "overwrite with a model that is not made": Reason("it is not made", options={"model": NotMade}),
    "overwrite with an optimizer that is not applied": Reason(
        "it is not updated", options={"optimizer": not_updated}
    ),
    "overwrite without memory": Reason("smaller model", arrange=little_memory),
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


@pytest.mark.parametrize("make", [NotMade, NotApplied])
def test_a_new_start_that_is_rejected_leaves_nothing(small_run, tmp_path, make):
    config = dataclasses.replace(small_run, out=str(tmp_path / "runs" / "new"))
    with pytest.raises(RuntimeError):
        fit(config, model=make, progress=None)
    assert not list(tmp_path.iterdir())
