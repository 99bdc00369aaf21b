import dataclasses
import shutil
from pathlib import Path

import pytest

from jgpt import TrainConfig
from jgpt.runs import fit as fit_module
from jgpt.runs import run as run_module

LONG = 1e9


@pytest.fixture(scope="session", autouse=True)
def a_slow_machine_saves_and_stops_where_a_fast_one_does():
    """Slow runs save more often, and their calls have fewer steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "SECONDS_BETWEEN_SAVES", LONG)
        patch.setattr(fit_module, "SECONDS_PER_CALL", LONG)
        yield


@pytest.fixture
def whole_fit() -> None:
    """For tests of what `fit` does beside the training: that it draws and gives memory back."""


@pytest.fixture(autouse=True)
def fits_that_only_train(request, monkeypatch):
    """To draw the losses takes as long as a run of a test; to collect garbage a fifth of it."""
    if "whole_fit" in request.fixturenames:
        return
    monkeypatch.setattr(fit_module, "draw_losses", lambda *_: None)
    monkeypatch.setattr(fit_module, "release_memory", lambda: None)


@pytest.fixture
def out(tmp_path) -> Path:
    """Where a test's run goes."""
    return tmp_path / "run"


@pytest.fixture
def copy(trained, small_run, tmp_path) -> TrainConfig:
    """The finished run's config, in a copy of it."""
    out = shutil.copytree(trained.path, tmp_path / "copy")
    return dataclasses.replace(small_run, out=str(out))
