"""A start that is rejected leaves every byte of a run's directory as it was."""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jgpt
from jgpt import TrainConfig, fit
from tests.quick import only
from tests.runs import faults
from tests.runs.harness import contents


class Wider(jgpt.GPT):
    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.more = nnx.Param(jnp.ones(3))


class NotMade(jgpt.GPT):
    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        raise RuntimeError("it is not made")


class NotApplied(jgpt.GPT):
    def hidden(self, tokens, **_):
        raise RuntimeError("it is not applied")


def sgd(config: jgpt.OptimizerConfig, steps: int) -> optax.GradientTransformation:
    return optax.sgd(0.1, momentum=0.9)


def not_updated(config: jgpt.OptimizerConfig, steps: int) -> optax.GradientTransformation:
    def update(updates, state, params=None):
        raise RuntimeError("it is not updated")

    return optax.GradientTransformation(lambda params: (), update)


class Reason(NamedTuple):
    message: str
    options: dict[str, Any] = {}
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


REASONS = {
    "resume with a custom model": Reason("or of another model", {"model": Wider}),
    "resume with a custom optimizer": Reason("is damaged, or of another", {"optimizer": sgd}),
    "resume from a damaged checkpoint": Reason("SHA-256 does not match", arrange=damage),
    "resume on a full disk": Reason("1,000 bytes free", arrange=full_disk),
    "overwrite with a model that is not made": Reason("it is not made", {"model": NotMade}),
    "overwrite with a model that is not applied": Reason(
        "it is not applied", {"model": NotApplied}
    ),
    "overwrite with an optimizer that is not applied": Reason(
        "it is not updated", {"optimizer": not_updated}
    ),
    "overwrite with an objective of no scalar": Reason(
        "must return a scalar", {"objective": lambda model, tokens, rngs: model(tokens[:, 1:])}
    ),
    "overwrite without memory": Reason("smaller model", arrange=little_memory),
}


@pytest.mark.parametrize("name", only(lambda name: name != "resume with a custom model", REASONS))
def test_a_rejected_start_changes_no_byte(copy: TrainConfig, monkeypatch, broken_reads, name):
    reason = REASONS[name]
    folder = Path(str(copy.out))
    kind = name.split()[0]
    reason.arrange(folder, monkeypatch)
    config = dataclasses.replace(copy, steps=12)
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
