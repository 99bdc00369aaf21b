"""What a device is asked, and what follows from its answer."""

import dataclasses
import platform
from pathlib import Path

import jax
import pytest
from flax import nnx

from jgpt import GPT, ModelConfig, preset
from jgpt.nn import precision
from jgpt.nn.precision import computes_narrow, with_dtype
from jgpt.runs.loop import plan
from jgpt.runs.profiling import keep_compilations

SMALL = ModelConfig(
    vocab_size=11, block_size=5, num_layers=1, num_heads=2, embed_dim=8, dtype="auto"
)


@pytest.mark.parametrize(
    ("narrow", "platform", "capability"),
    [
        (True, "tpu", None),
        (True, "gpu", 8.0),
        (True, "gpu", 10.3),
        (False, "gpu", 7.5),
        (False, "gpu", None),  # no CUDA
        (False, "cpu", None),
    ],
)
def test_auto_is_bfloat16_where_that_is_fast(monkeypatch, narrow, platform, capability):
    assert computes_narrow(platform, capability) == narrow
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(precision, "cuda_capability", lambda: capability)
    wanted = "bfloat16" if narrow else "float32"
    assert with_dtype(SMALL).dtype == wanted
    assert GPT(SMALL, rngs=nnx.Rngs(0)).config.dtype == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_dtype_that_is_chosen_is_kept(monkeypatch, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu" if dtype == "float32" else "cpu")
    assert with_dtype(dataclasses.replace(SMALL, dtype=dtype)).dtype == dtype


def test_a_run_says_what_auto_was(tmp_path):
    tiny = preset("tiny")
    config = dataclasses.replace(
        tiny, model=dataclasses.replace(tiny.model, dtype="auto"), out=str(tmp_path / "run")
    )
    expected = "bfloat16" if computes_narrow(jax.default_backend(), None) else "float32"
    assert plan(config).config.model.dtype == expected


@pytest.mark.parametrize("name", ["nanogpt-char", "gpt2"])
def test_the_presets_for_a_gpu_are_narrow_there(name):
    assert preset(name).model.dtype == "auto"


@pytest.mark.parametrize(
    ("platform", "dtype", "kept"),
    [
        ("cpu", "bfloat16", "float32"),
        ("cpu", "float16", "float32"),
        ("cpu", "float32", "float32"),
        ("cpu", "float64", "float64"),
        ("gpu", "bfloat16", "bfloat16"),
        ("tpu", "float32", "float32"),
    ],
)
def test_activations_are_narrow_only_where_that_is_fast(monkeypatch, platform, dtype, kept):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert precision.activation_dtype(dtype) == kept


COMPILATION_CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
)


@pytest.fixture
def compilation_cache():
    """What JAX is told of it, which a test may change."""

    def settings():
        return [getattr(jax.config, name) for name in COMPILATION_CACHE]

    before = settings()
    yield settings
    for name, value in zip(COMPILATION_CACHE, before, strict=True):
        jax.config.update(name, value)


def test_compilations_are_kept_in_a_folder_of_the_machine_in_the_users_cache(
    compilation_cache, user_cache
):
    jax.config.update("jax_compilation_cache_dir", None)
    keep_compilations()
    folder, seconds, size = compilation_cache()
    assert Path(folder) == user_cache / "compiled" / platform.node()
    assert 0 < seconds < 1  # JAX's own default leaves out what takes less than a second
    assert size == 2**30
    keep_compilations()
    assert compilation_cache() == [folder, seconds, size]


def test_a_compilation_cache_that_was_chosen_is_left_alone(compilation_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    chosen = compilation_cache()
    keep_compilations()
    assert compilation_cache() == chosen
    assert chosen[0] == str(tmp_path)
