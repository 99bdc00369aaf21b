"""Runs on a mesh of devices: the same run on one device, on eight, and on others when resumed."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jgpt import fit, generate, load
from jgpt.sharding import make_mesh
from tests.models import random_model, tokens_of


@pytest.mark.slow
def test_a_mesh_generates_the_same_tokens():
    model = random_model("modern", num_heads=6, embed_dim=24, hidden_dim=32, vocab_size=18)
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
    with pytest.raises(
        ValueError, match=r"mesh=tensor=3 is of 3 devices, and there are 8: give sizes .* 8"
    ):
        fit(config)
    assert not (tmp_path / "run").exists()
