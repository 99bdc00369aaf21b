"""Runs on a mesh of devices: the same run on one device, on eight, and on others when resumed."""

from typing import Any

import jax
import numpy as np
import pytest

from jgpt import generate, load
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
