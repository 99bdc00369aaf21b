"""What is compiled is kept for the next time."""

import platform
import warnings
from pathlib import Path

import jax
import pytest

from jgpt.machine import enable_compilation_cache

COMPILATION_CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
)


@pytest.fixture
def settings():
    """What JAX is told of it, which a test may change."""
    before = {name: getattr(jax.config, name) for name in COMPILATION_CACHE}
    yield lambda: [getattr(jax.config, name) for name in COMPILATION_CACHE]
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilations_are_kept_in_a_folder_of_the_machine_in_the_users_cache(settings, user_cache):
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    warnings.warn(
        "Error writing persistent compilation cache entry for 'f': no space", stacklevel=1
    )
    folder, seconds, size = settings()
    assert Path(folder) == user_cache / "compiled" / platform.node()
    assert seconds == 0  # JAX would leave out what compiles in less than a second
    assert size == 2**30
    enable_compilation_cache()
    assert settings() == [folder, seconds, size]


def test_a_compilation_cache_that_was_chosen_is_left_alone(settings, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    chosen = settings()
    enable_compilation_cache()

    assert settings() == chosen
    assert chosen[0] == str(tmp_path)
