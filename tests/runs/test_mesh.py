"""Runs on a mesh of devices: the same run on one device, on eight, and on others when resumed."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jgpt import fit, generate, load
from jgpt.runs.directory import RunDirectory
from jgpt.runs.loop import TrainingStopped
from jgpt.sharding import make_mesh
from tests.models import random_model, tokens_of

WIDE = {"dtype": "float64", "param_dtype": "float64", "activation_dtype": "float64"}


@pytest.fixture
def wide_run(small_run):
    """A run in float64 whose batch and sizes a mesh of eight can divide."""
    model = dataclasses.replace(small_run.model, embed_dim=16, **WIDE)
    return dataclasses.replace(small_run, model=model, batch_size=8, steps=9, sample_tokens=0)


def losses(path) -> np.ndarray:
    lines = [line for line in RunDirectory(path).metrics() if "loss" in line]
    return np.array([[line["loss"], line.get("validation_loss", 0.0)] for line in lines])


@pytest.mark.slow
def test_a_run_goes_on_on_other_meshes(wide_run, tmp_path):
    with jax.enable_x64(True):
        fit(dataclasses.replace(wide_run, out=str(tmp_path / "one")))
        config = dataclasses.replace(wide_run, out=str(tmp_path / "moved"))
        for mesh in ("data=2,fsdp=2,tensor=2", "fsdp=8"):
            stop = iter([False, True])
            with pytest.raises(TrainingStopped):
                fit(
                    dataclasses.replace(config, mesh=mesh),
                    resume=True,
                    should_stop=lambda stop=stop: next(stop),
                )
        fit(config, resume=True)
    moved, one = losses(tmp_path / "moved"), losses(tmp_path / "one")
    assert moved.shape == one.shape == (9, 2)
    assert np.abs(moved - one).max() < 1e-12
    assert np.ptp(one[:, 0]) > 1e-3
    assert RunDirectory(tmp_path / "moved").config().mesh is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "modern"])
def test_a_mesh_generates_the_same_tokens(family):
    model = random_model(family, num_heads=6, embed_dim=24, hidden_dim=32, vocab_size=18)
    prompt = tokens_of(3, batch=4, time=5)
    alone = generate(model, prompt, 9, key=jax.random.key(1), temperature=0.0)
    with jax.set_mesh(make_mesh("data=4,tensor=2")):
        found = generate(model, prompt, 9, key=jax.random.key(1), temperature=0.0)
    np.testing.assert_array_equal(found, alone)


def test_a_run_is_loaded_in_shards(trained):
    def kernel_of(model: Any) -> jax.Array:
        return model.blocks[0].feed_forward.expansion.kernel[...]

    alone = kernel_of(load(trained.directory)[0])
    with jax.set_mesh(make_mesh("fsdp=4,tensor=2")):
        kernel = kernel_of(load(trained.directory)[0])
    assert kernel.addressable_shards[0].data.shape == (12 // 4, 48 // 2)
    np.testing.assert_array_equal(kernel, alone)


def test_a_mesh_of_another_size_is_refused_before_anything_is_written(small_run, tmp_path):
    config = dataclasses.replace(small_run, out=str(tmp_path / "run"), mesh="tensor=3")
    with pytest.raises(ValueError, match=r"mesh=tensor=3 is of 3 devices, and there are 8"):
        fit(config)
    assert not (tmp_path / "run").exists()
