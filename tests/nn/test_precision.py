"""Dtypes and kernels by platform: decided for one that is named, on a host that has none of it."""

import dataclasses

import pytest
from flax import nnx

from jgpt import GPT, ModelConfig
from jgpt.machine import Platform
from jgpt.nn.precision import cudnn_attends, for_platform

AUTO = ModelConfig(
    vocab_size=11, block_size=5, num_layers=1, num_heads=2, embed_dim=8, dtype="auto"
)
CPU = Platform("cpu")
TPU = Platform("tpu")
HOPPER, AMPERE, TURING = (Platform("gpu", capability) for capability in (9.0, 8.0, 7.5))
NO_CUDA = Platform("gpu")


@pytest.mark.parametrize(
    ("platform", "auto", "narrow"),
    [
        (CPU, "float32", "float32"),
        (TPU, "bfloat16", "bfloat16"),
        (HOPPER, "bfloat16", "bfloat16"),
        (AMPERE, "bfloat16", "bfloat16"),
        (TURING, "float16", "bfloat16"),
        (Platform("gpu", 6.0), "float32", "bfloat16"),
        (NO_CUDA, "float32", "bfloat16"),
    ],
    ids=str,
)
def test_what_is_left_to_the_platform_is_narrow_where_that_is_fast(platform, auto, narrow):
    """`auto`, and the activations of a model in bfloat16; a dtype that is given stays."""
    assert for_platform(AUTO, platform).dtype == auto
    for chosen, kept in (("bfloat16", narrow), ("float32", "float32"), ("float64", "float64")):
        decided = for_platform(dataclasses.replace(AUTO, dtype=chosen), platform)
        assert (decided.dtype, decided.activation_dtype) == (chosen, kept)
    given = dataclasses.replace(AUTO, activation_dtype="float64")
    assert for_platform(given, platform).activation_dtype == "float64"


@pytest.mark.parametrize(
    ("attends", "dtype", "head_dim", "platform"),
    [
        (True, "bfloat16", 64, HOPPER),
        (True, "float16", 128, AMPERE),
        (True, "bfloat16", 256, HOPPER),
        (True, "bfloat16", 256, Platform("gpu", 12.0)),
        (False, "float32", 64, HOPPER),
        (False, "bfloat16", 64, CPU),
        (False, "bfloat16", 64, TPU),
        (False, "bfloat16", 64, NO_CUDA),
        (False, "bfloat16", 64, TURING),
        (False, "bfloat16", 256, Platform("gpu", 8.9)),
        (False, "bfloat16", 264, HOPPER),
        (False, "bfloat16", 20, HOPPER),
    ],
    ids=str,
)
def test_cudnn_attends_where_it_can(attends, dtype, head_dim, platform):
    assert cudnn_attends(dtype, head_dim, platform) == attends


def test_the_kernel_follows_from_what_is_kept_and_can_be_chosen():
    config = dataclasses.replace(AUTO, embed_dim=32)  # heads of 16 features
    assert for_platform(config, HOPPER).attention_kernel == "cudnn"
    assert for_platform(AUTO, HOPPER).attention_kernel == "xla"  # of 4
    wide = dataclasses.replace(config, activation_dtype="float32")
    assert for_platform(wide, HOPPER).attention_kernel == "xla"
    chosen = dataclasses.replace(config, attention_kernel="xla")
    assert for_platform(chosen, HOPPER).attention_kernel == "xla"


def test_a_model_of_an_undecided_config_computes_as_on_a_cpu():
    model = GPT(AUTO, rngs=nnx.Rngs(0))
    assert (model.dtype, model.activation_dtype) == ("float32", "float32")
    assert not model.blocks[0].attention.fused
    assert model.config == AUTO  # which may be decided elsewhere
