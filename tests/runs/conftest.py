import dataclasses
import shutil

import pytest

from jgpt import TrainConfig
from tests.browser import browser


@pytest.fixture(scope="module")
def page():
    """A page in Chromium."""
    with browser() as opened:
        yield opened


@pytest.fixture
def copy(trained, small_run, tmp_path) -> TrainConfig:
    """The finished run's config, in a copy of it."""
    out = shutil.copytree(trained.directory, tmp_path / "copy")
    return dataclasses.replace(small_run, out=str(out))
