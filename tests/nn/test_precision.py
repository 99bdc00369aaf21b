"""Dtypes and kernels by platform: decided for one that is named, on a host that has none of it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jgpt import GPT, ModelConfig, preset
from jgpt.machine import Platform
from jgpt.nn.precision import cudnn_attends, for_platform
from jgpt.training.state import abstract_state, dropout_stream
from jgpt.training.step import make_train_steps
from tests.quick import only

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
        (TURING, "float32", "bfloat16"),
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


def products_and_kernels(config, platform) -> tuple[set[str], int]:
    """The dtypes that a train step's dense products read, and how often cuDNN attends in it."""
    config = dataclasses.replace(config, model=for_platform(config.model, platform))
    shape = (2, config.batch_size, config.model.block_size + 1)
    windows = jax.ShapeDtypeStruct(shape, jnp.int32)
    key = dropout_stream(0)
    traced = make_train_steps(config).trace(abstract_state(config), windows, key, 2, 0)
    dtypes = set()
    kernels = 0

    def walk(jaxpr):
        nonlocal kernels
        for equation in jaxpr.eqns:
            is_dense = all(len(operand.aval.shape) == 2 for operand in equation.invars)
            if equation.primitive.name == "dot_general" and is_dense:
                dtypes.update(operand.aval.dtype.name for operand in equation.invars)
            kernels += equation.primitive.name == "dot_product_attention_fwd_wrapper"
            for parameter in jax.tree.leaves(
                [*equation.params.values()], is_leaf=lambda leaf: hasattr(leaf, "eqns")
            ):
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(traced.jaxpr.jaxpr)
    return dtypes, kernels


@pytest.mark.parametrize(
    "name",
    only(
        ["bigram"],
        ["gpt2", "nanogpt-char", "modern-cpu", "modern-7b", "bigram"],
    ),
)
def test_the_steps_of_a_preset_are_traced_for_any_platform_on_this_one(name, monkeypatch):
    # what cuDNN's version is, JAX asks while it traces
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )
    config = preset(name)
    model = dataclasses.replace(config.model, num_layers=2)
    config = dataclasses.replace(config, model=model, batch_size=2, micro_batches=1)
    found = {
        platform.name: products_and_kernels(config, platform) for platform in (CPU, TPU, HOPPER)
    }
    large = ("gpt2", "modern-7b")
    narrow = {"bfloat16"} if name in ("nanogpt-char", *large) else {"float32"}
    if name == "bigram":
        narrow = set()  # it multiplies nothing
    assert {platform: dtypes for platform, (dtypes, _) in found.items()} == {
        "cpu": {"float32"} if narrow else set(),
        "tpu": narrow,
        "gpu": narrow,
    }
    # nanogpt-char drops attention weights, which cuDNN's kernel doesn't; two blocks, or the one of
    # a scan, which is there again for the backward pass
    attends = {"cpu": 0, "tpu": 0, "gpu": 2 if name in large else 0}
    assert {platform: kernels for platform, (_, kernels) in found.items()} == attends
