"""What a device is asked, and what follows from its answer."""

import dataclasses

import jax
import pytest
from flax import nnx

from jgpt import GPT, ModelConfig, device, preset
from jgpt.device import computes_narrow, with_dtype
from jgpt.train import plan

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
    monkeypatch.setattr(device, "cuda_capability", lambda: capability)
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
