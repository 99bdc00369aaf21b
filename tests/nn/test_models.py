"""How big a model is: counted by hand, and counted in the model itself."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jgpt import ModelConfig
from jgpt.nn.costs import flops_per_token, parts_of
from jgpt.nn.models import abstract_model, create_model
from tests.models import FAMILIES, config_of

MODERN = config_of("modern")
# the query's and the projection's kernels are square, the key's and the value's half as wide
ATTENTION = 2 * (24 * 24 + 2 * 24 * 12 + 24 * 24)
FEED_FORWARD = 2 * (2 * 24 * 29)


def parameters_by_part(config):
    return {part.name: part.parameters for part in parts_of(config)}


def test_the_parts_by_hand_in_the_order_of_a_forward_pass():
    config = config_of(
        "modern", use_bias=True, positions="learned", ngram_sizes=(2, 4), ngram_rows=19
    )

    counts = parameters_by_part(config)
    gpt2_counts = parameters_by_part(config_of("gpt2"))

    attention_bias = 2 * 24  # the projection's: MODERN has no bias in query, key and value
    feed_forward_bias = 2 * (29 + 24)
    assert list(counts.items()) == [
        ("token_embedding", 17 * 24),
        ("position_embedding", 11 * 24),
        ("ngram_embedding", 2 * 19 * 24),
        ("shortcut", 2),
        ("blocks.attention", ATTENTION + attention_bias),
        ("blocks.feed_forward", FEED_FORWARD + feed_forward_bias),
        ("head", 24 * 17),
    ]
    # scale and bias: modern's norms, without a scale, have neither
    norm = 2 * 21
    gpt2_norms = {name: count for name, count in gpt2_counts.items() if "norm" in name}
    assert gpt2_norms == {
        "blocks.attention_norm": 2 * norm,
        "blocks.feed_forward_norm": 2 * norm,
        "final_norm": norm,
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_are_the_model(family, dtype):
    config = config_of(family, param_dtype=dtype)
    # shapes and dtypes are all that is counted: nothing is drawn
    model = nnx.eval_shape(lambda: create_model(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))

    parts = parts_of(config)

    parameters = sum(leaf.size for leaf in leaves)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert sum(part.parameters for part in parts) == parameters
    assert sum(part.size for part in parts) == size


# each query meets 11 keys in its 24 features, and gathers 24 features of 11 values
MEETINGS = 2 * (2 * 11 * 24)


def test_an_abstract_model_is_the_caller_s_own():
    """Though it is traced once for a config."""

    def abstract(config: ModelConfig) -> Any:
        return abstract_model(config)

    first = abstract(MODERN)
    second = abstract(MODERN)
    first.blocks = nnx.List(first.blocks[:1])
    first.head.kernel.set_value(jnp.ones((2, 3)))
    third = abstract(MODERN)

    assert len(second.blocks) == MODERN.num_layers
    assert second.head.kernel.shape == (24, 17)
    assert third.head.kernel.shape == (24, 17)

    # nor does what was traced with float64 outlive its setting
    wide = dataclasses.replace(MODERN, param_dtype="float64")
    with jax.enable_x64(True):
        wide_model = abstract(wide)
    assert str(wide_model.head.kernel.dtype) == "float64"
    with pytest.raises(ValueError, match="JAX_ENABLE_X64"):
        abstract(wide)


def test_flops_by_hand():
    products = ATTENTION + FEED_FORWARD + 24 * 17
    assert flops_per_token(MODERN) == 2 * (products + MEETINGS)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"num_kv_heads": None}, 2 * (2 * 2 * 24 * 12)),
        ({"num_kv_heads": 1}, -2 * (2 * 2 * 24 * 8)),
        # what isn't a product costs nothing, and a tied head multiplies as much
        ({"positions": "learned", "ngram_sizes": (2, 4), "tie_embeddings": True}, 0),
        ({"norm": "layer", "norm_scale": True, "use_bias": True}, 0),
        ({"embedding_shortcut": False, "logit_softcap": 15.0, "qk_norm": False}, 0),
        ({"block_size": 13}, 2 * (2 * 2 * 2 * 24)),
        ({"attention_window": 7}, -2 * (2 * 2 * 4 * 24)),
        ({"attention_window": 13}, 0),  # the block is shorter
        ({"head_dim": 6}, 2 * (ATTENTION // 2 + 2 * (2 * 11 * 12))),  # heads of 6 features, not 4
    ],
    ids=str,
)
def test_what_changes_the_flops(change, more):
    config = dataclasses.replace(MODERN, **change)

    assert flops_per_token(config) - flops_per_token(MODERN) == more
