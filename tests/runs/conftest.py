import dataclasses
import shutil

import pytest

from jgpt import TrainConfig


@pytest.fixture
def copy(trained, small_run, tmp_path) -> TrainConfig:
    """The finished run's config, in a copy of it."""
    out = shutil.copytree(trained.directory, tmp_path / "copy")
    return dataclasses.replace(small_run, out=str(out))
