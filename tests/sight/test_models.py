"""Models are proven causal, and what else one asks of what an output reads."""

import dataclasses
import functools
import re
import runpy
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jaxtyping import Array

import jgpt
from jgpt.nn.models import abstract_model
from jgpt.presets import PRESETS, preset
from jgpt.shapes import Known, reads

ROOT = Path(jgpt.__file__).parents[1]
SIZES = {"lecture": 8, "modern-cpu": 9, "gpt2": 7, "bigram": 5, "shakespeare-best": 6}
TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)
SMALL = jgpt.ModelConfig(vocab_size=11, block_size=8, embed_dim=12, num_heads=3, num_layers=2)
ALL_TOGETHER = dataclasses.replace(
    SMALL,
    positions="rotary",
    norm="rms",
    num_kv_heads=1,
    attention_window=3,
    ngram_sizes=(2,),
    logit_softcap=15.0,
    scan_layers=True,
    remat=True,
    dtype="bfloat16",
)


def is_causal(found: Any) -> bool:
    last = found.last("t").max(axis=(0, 2))
    return bool((last <= np.arange(len(last))).all())


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_is_proven_at_one_length(name: str) -> None:
    model = abstract_model(preset(name).model)

    proof = jgpt.prove(model, "int32[b t]", causal="t", separate="b", sizes={"t": SIZES[name]})

    assert proof, str(proof)
    assert str(proof).startswith(f"proven for t = {SIZES[name]}\n")


@pytest.mark.parametrize("config", [SMALL, ALL_TOGETHER])
def test_by_default_each_length_of_a_small_model_is_proven(config: jgpt.ModelConfig) -> None:
    model = abstract_model(dataclasses.replace(config, block_size=5))

    proof = jgpt.prove(model, "int32[b t]", causal="t")

    assert str(proof).startswith("proven for t = 1 to 5, the block size\n")


def test_heads_that_look_ahead_are_not_proven() -> None:
    head = jgpt.Head(12, 4, causal=False, rngs=nnx.Rngs(0))

    proof = jgpt.prove(head, "float32[b t 12]", causal="t")

    assert not proof
    text = str(proof)
    assert text.startswith("not proven: output 0 can depend on input 4\n")
    assert re.search(r"comes in at dot_general +attention\.py:\d+: .*weights, value", text)
    assert jgpt.prove(
        jgpt.Head(12, 4, rngs=nnx.Rngs(0)), "float32[b t 12]", causal="t", sizes={"t": 5}
    )


def test_the_gpt_on_one_page_and_the_model_of_jgpt_new_are_proven() -> None:
    page = runpy.run_path(str(ROOT / "docs/one_page_gpt.py"))
    params = page["init_params"](jax.random.key(0), 11, 8, 2, 3, 12)
    on_one_page = functools.partial(page["gpt"], params)
    new = runpy.run_path(str(ROOT / "jgpt/cli/commands/new_gpt.py.txt"))
    config = new["Config"](vocab_size=11, block_size=8, embed_dim=12, num_heads=3, num_layers=2)
    written = new["GPT"](config, rngs=nnx.Rngs(0))

    for model in (on_one_page, written):
        proof = jgpt.prove(model, "int32[b t]", causal="t", separate="b", sizes={"t": [1, 3, 8]})
        assert proof, str(proof)


# --- other questions -----------------------------------------------------------------------------


def test_two_layers_with_windows_of_7_read_12_back() -> None:
    config = dataclasses.replace(SMALL, attention_window=7, block_size=20, positions="rotary")
    tokens = jax.ShapeDtypeStruct((1, 20), jnp.int32)

    found = reads(abstract_model(config), tokens, of={0: (None, "t")})

    position = np.arange(20)
    np.testing.assert_array_equal(found.first("t")[0, :, 0], np.maximum(position - 12, 0))
    np.testing.assert_array_equal(found.last("t")[0, :, 0], position)


@pytest.mark.parametrize(
    "changes", [{}, {"positions": "rotary", "attention_window": 3, "ngram_sizes": (2,)}]
)
def test_packed_documents_read_themselves_alone(changes: dict[str, Any]) -> None:
    model = abstract_model(dataclasses.replace(SMALL, **changes))
    documents = jnp.array([[0, 0, 0, 1, 1, 2, 2, 2]])
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    def packed(tokens: Array, documents: Array) -> Any:
        return model_of(model).hidden(tokens, documents=documents)

    known = reads(packed, tokens, Known(documents), of={0: (None, "t")})
    unknown = reads(packed, tokens, documents, of={0: (None, "t")})

    np.testing.assert_array_equal(known.first("t")[0, :, 0] >= [0, 0, 0, 3, 3, 5, 5, 5], True)
    np.testing.assert_array_equal(known.last("t")[0, :, 0], np.arange(8))
    assert unknown.first("t")[0, 5, 0] == 0
    assert is_causal(unknown)


def model_of(model: Any) -> Any:
    """The model with weights that are made within the trace, and unknown to a proof."""
    graph, weights = nnx.split(model)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), weights)
    key = jax.random.key(0)
    noise = jax.tree.map(lambda leaf: leaf + jax.random.normal(key, leaf.shape, leaf.dtype), zeros)
    return nnx.merge(graph, noise)


def test_decoding_with_a_cache_is_causal_as_one_function() -> None:
    model = abstract_model(dataclasses.replace(SMALL, positions="rotary", attention_window=3))

    def decoded(tokens: Array) -> Array:
        called = model_of(model)
        cache = called.empty_cache(tokens.shape[0])
        parts = [called(tokens[:, :3], cache=cache)]
        for position in range(3, 8):
            parts.append(called(tokens[:, position : position + 1], cache=cache))
        return jnp.concatenate(parts, axis=1)

    assert is_causal(reads(decoded, TOKENS, of={0: ("b", "t")}))


def test_the_backward_pass_is_anticausal() -> None:
    block = jgpt.Block(SMALL, rngs=nnx.Rngs(0))

    def backward(x: Array, gradient: Array) -> Array:
        _, pull_back = jax.vjp(block, x)
        return pull_back(gradient)[0]

    x = jax.ShapeDtypeStruct((1, 5, 12), jnp.float32)
    found = reads(backward, x, x, of={1: (None, "t")})

    np.testing.assert_array_equal(found.first("t")[0, :, 0], np.arange(5))
    np.testing.assert_array_equal(found.last("t")[0, :, 0], [4] * 5)


# --- other libraries -----------------------------------------------------------------------------


class LinenGPT(linen.Module):
    masked: bool = True

    @linen.compact
    def __call__(self, tokens: Array) -> Array:
        x = linen.Embed(11, 12)(tokens) + linen.Embed(8, 12)(jnp.arange(tokens.shape[1]))
        mask = linen.make_causal_mask(tokens) if self.masked else None
        x = x + linen.MultiHeadDotProductAttention(3)(linen.LayerNorm()(x), mask=mask)
        return linen.Dense(11)(linen.LayerNorm()(x))


def applied(module: Any, *shape: int, dtype: Any = jnp.float32) -> Any:
    variables = module.init(jax.random.key(0), jnp.zeros(shape, dtype))
    return functools.partial(module.apply, variables)


@pytest.mark.slow
def test_models_of_other_libraries() -> None:
    sizes = {"t": [1, 5]}
    attention = eqx.nn.MultiheadAttention(3, 12, key=jax.random.key(0))
    lstm = applied(linen.RNN(linen.OptimizedLSTMCell(5)), 2, 5, 3)
    linen_gpt = applied(LinenGPT(), 2, 5, dtype=jnp.int32)
    unmasked = applied(LinenGPT(masked=False), 2, 5, dtype=jnp.int32)

    def of_equinox(x: Array) -> Array:
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return jax.vmap(lambda row: attention(row, row, row, mask))(x)

    assert jgpt.prove(linen_gpt, "int32[b t]", causal="t", separate="b", sizes=sizes)
    assert jgpt.prove(of_equinox, "float32[b t 12]", causal="t", separate="b", sizes=sizes)
    assert jgpt.prove(lstm, "float32[b t 3]", causal="t", sizes=sizes)
    proof = jgpt.prove(unmasked, "int32[b t]", causal="t", sizes=sizes)
    assert not proof
    # the library's line, and that of the program that calls it
    assert "attention.py" in str(proof)
    assert "test_models.py" in str(proof)
    assert jgpt.prove(unmasked, "int32[b t]", separate="b", sizes={"t": 3})


LIKE_OTHERS = {"gpt2-medium", "gpt2-large", "gpt2-xl", "modern-cpu", "nanogpt-cpu"}
"""Presets that differ in sizes from one that is proven."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PRESETS) - LIKE_OTHERS))
def test_a_preset_is_proven_at_small_lengths_and_the_block_size(name: str) -> None:
    config = preset(name).model
    # at 4,096 positions it takes minutes
    block_size = min(config.block_size, 256)
    config = dataclasses.replace(config, num_layers=2, vocab_size=65, block_size=block_size)
    lengths = [*range(1, 9), block_size]
    model = abstract_model(config)

    proof = jgpt.prove(model, "int32[b t]", causal="t", separate="b", sizes={"t": lengths})

    assert proof, str(proof)
    is_gpt = config.architecture == "gpt"  # a bigram has no longest context
    assert (", the block size" in str(proof)) == is_gpt
