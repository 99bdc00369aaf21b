"""What machine this is."""

import contextlib
import platform
import resource
import types
import warnings
from pathlib import Path

import jax
import pytest

from jgpt.machine import (
    Platform,
    current_platform,
    describe_unused_gpu,
    enable_compilation_cache,
    memory_in_use,
    memory_limit,
)
from jgpt.runs.fit import plan
from tests.runs.harness import Heard


@pytest.mark.parametrize(
    ("platform", "version", "capability", "expected"),
    [
        ("gpu", "PJRT C API\ncuda 12090", "9.0", Platform("gpu", 9.0)),
        ("gpu", "PJRT C API\nrocm 60300", "9.0", Platform("gpu", None)),
        ("tpu", "PJRT C API\nTFRT TPU v5 lite", None, Platform("tpu", None)),
    ],
    ids=["NVIDIA", "AMD", "TPU"],
)
def test_only_cuda_gpus_have_a_cuda_capability(
    monkeypatch, platform, version, capability, expected
):
    client = types.SimpleNamespace(platform_version=version)
    device = types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)
    monkeypatch.setattr("jax.devices", lambda: [device])
    monkeypatch.setattr("jax.default_backend", lambda: platform)

    assert current_platform() == expected


def test_memory_is_the_device_s_if_it_says_so(monkeypatch):
    said = {"peak_bytes_in_use": 11, "bytes_limit": 13}
    device = types.SimpleNamespace(memory_stats=lambda: said)
    monkeypatch.setattr("jax.local_devices", lambda: [device])
    assert (memory_in_use(), memory_limit()) == (11, 13)
    said.clear()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # which Linux says in KiB
    assert memory_in_use() == pytest.approx(resident, rel=0.1)
    assert memory_limit() is None


def test_a_gpu_that_jax_does_not_use_is_named_unless_the_user_chose_the_cpu(monkeypatch, tmp_path):
    planted = tmp_path / "nvidia0"
    monkeypatch.setattr("jgpt.machine.NVIDIA_PATHS", (str(tmp_path / "none"), str(planted)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with jax_platforms(None):
        assert describe_unused_gpu() is None
        planted.touch()
        # another version than jaxlib's would be ignored
        assert f"'jax[cuda12]=={jax.__version__}'" in (describe_unused_gpu() or "")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert describe_unused_gpu() is None
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert describe_unused_gpu() is not None
        monkeypatch.setattr("jax.default_backend", lambda: "gpu")
        assert describe_unused_gpu() is None
    monkeypatch.undo()
    monkeypatch.setattr("jgpt.machine.NVIDIA_PATHS", (str(planted),))
    with jax_platforms("cpu"):
        assert describe_unused_gpu() is None


@contextlib.contextmanager
def jax_platforms(chosen: str | None):
    """With JAX_PLATFORMS as the user may have set it; the backend of this process stays."""
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.default_backend()
    jax.config.update("jax_platforms", chosen)
    yield
    jax.config.update("jax_platforms", before)


def test_training_names_the_unused_gpu_before_it_starts(monkeypatch, small_run, tmp_path):
    monkeypatch.setattr("jgpt.machine.NVIDIA_PATHS", (str(tmp_path),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    heard = Heard()

    with jax_platforms(None):
        plan(small_run, progress=heard)
    assert [line for line in heard.messages if "jax[cuda12]==" in line]


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


def test_compilations_are_kept_in_a_folder_of_the_machine_in_the_users_cache(
    settings, user_cache, tmp_path
):
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

    jax.config.update("jax_compilation_cache_dir", str(tmp_path))  # one that was chosen
    chosen = settings()
    enable_compilation_cache()
    assert settings() == chosen
