"""Configs say no when they are made, and survive JSON."""

import dataclasses
import json
import math
import re
from typing import Any

import jax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jgpt import GPT, BigramLM, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, preset
from jgpt.fields import UnknownField, from_json, to_json
from jgpt.nn.models import abstract_model
from jgpt.presets import PRESETS
from tests.quick import only


@pytest.mark.parametrize(
    ("kind", "fields", "word"),
    [
        (ModelConfig, {"embed_dim": 30}, "`embed_dim=30` must be divisible by `num_heads=4`"),
        (ModelConfig, {"dtype": "float8"}, "one of auto, float16, bfloat16"),
        (ModelConfig, {"ngram_sizes": (7,), "block_size": 6}, "`ngram_sizes=(7,)`"),
        (ModelConfig, {"qk_norm_scale": True}, "`qk_norm=True`"),
        (ModelConfig, {"positions": "rotary", "embed_dim": 20}, "`num_heads=4` is 5"),
        (OptimizerConfig, {"min_learning_rate": 0.5}, "`min_learning_rate=0.5` is above"),
        (DataConfig, {"validation_fraction": 0.7, "test_fraction": 0.3}, "leave no text for"),
        (DataConfig, {"tokenizer": "gpt2"}, "`tokenizer_files`"),
        (TrainConfig, {"batch_size": 10, "micro_batches": 4}, "divisible by `micro_batches=4`"),
        (TrainConfig, {"name": "a/b"}, "`name='a/b'` must be a plain folder name"),
        (TrainConfig, {"mesh": "data=2,datta=2"}, "the axes data, fsdp and tensor"),
        (TrainConfig, {"mesh": "data=2,fsdp=4", "batch_size": 20}, "divide `batch_size=20`: give"),
    ],
)
def test_a_bad_value_is_rejected_by_name(kind, fields, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        kind(**fields)


BOUNDS = {
    "positive": (
        (0, -1, math.nan),
        """vocab_size block_size num_layers num_heads num_kv_heads head_dim embed_dim hidden_dim
        rotary_base norm_epsilon attention_scale attention_window ngram_rows logit_softcap
        learning_rate schedule_steps muon_learning_rate embedding_learning_rate
        steps batch_size micro_batches eval_interval steps_per_call patience
        keep_best keep_last keep_every eval_tokens""",
    ),
    "negative": (
        (-1, math.nan),
        "min_learning_rate warmup_steps weight_decay gradient_clip muon_weight_decay sample_tokens",
    ),
    "below 1": (
        (1.0, 1.5, -0.1, math.nan),
        """dropout ngram_dropout decay_fraction validation_fraction test_fraction
        beta1 beta2 ema_decay""",
    ),
    "finite": ((math.inf, -math.inf), "rotary_base logit_softcap learning_rate weight_decay"),
}
KIND_OF: dict[str, Any] = {
    field.name: kind
    for kind in (ModelConfig, OptimizerConfig, DataConfig, TrainConfig)
    for field in dataclasses.fields(kind)
}


def test_a_number_out_of_bounds_is_rejected_by_name():
    for word, (values, names) in BOUNDS.items():
        for name in names.split():
            for value in values:
                # Not a number is refused as an integer, or as what isn't finite.
                expected = word
                if math.isnan(value):
                    expected = "integer|finite"
                with pytest.raises(ValueError, match=rf"^`{name}\b.*(must|not) .*({expected})"):
                    KIND_OF[name](**{name: value})


def test_an_unknown_field_gets_a_suggestion():
    unknown: dict[str, Any] = {"n_layer": 3}
    message = r"^ModelConfig has no field 'n_layer' \(did you mean 'num_layers'\?\)$"
    with pytest.raises(TypeError, match=message):
        ModelConfig(**unknown)
    with pytest.raises(UnknownField, match=message):
        from_json(ModelConfig, json.dumps(unknown))


@given(
    model=st.fixed_dictionaries(
        {
            "vocab_size": st.integers(1, 2**24),
            "embed_dim": st.integers(1, 99).map(lambda n: 4 * n),
            "hidden_dim": st.none() | st.integers(1, 99),
            "dropout": st.floats(0, 0.99),
            "norm_epsilon": st.floats(5e-324, 1e38),
            "dtype": st.sampled_from(["bfloat16", "float32", "float64"]),
        }
    ),
    learning_rate=st.floats(1e-4, 1e38) | st.integers(1, 9),
    sources=st.lists(st.text(min_size=1), min_size=1, max_size=3),
    out=st.none() | st.text(min_size=1),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_config_survives_json_exactly(model, learning_rate, sources, out, seed):
    config = TrainConfig(
        model=ModelConfig(**model),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        dataset=DataConfig(data=tuple(sources)),
        out=out,
        seed=seed,
    )
    again = from_json(TrainConfig, to_json(config))

    assert again == config
    assert to_json(again) == to_json(config)


def test_a_mistake_in_json_is_named():
    with pytest.raises(ValueError, match="`steps` must be an integer, not 'many'"):
        from_json(TrainConfig, '{"steps": "many"}')


# counted by hand: the published models' sizes, and nanoGPT's and the lecture's own printouts
PARAMETERS = {
    "bigram": 65 * 65,
    "lecture": 209_729,
    # their parts: blocks, tokens and head, norms; n-grams, shortcut
    "modern": 4 * 12 * 96**2 + 2 * 65 * 96 + (2 * 4 + 1) * 96,
    "modern-cpu": 4 * 12 * 96**2 + 2 * 65 * 96 + 3 * 8192 * 96 + 4,
    "shakespeare-best": 4 * 12 * 96**2 + 2 * 65 * 96 + 3 * 8192 * 96 + 4,
    "nanogpt-cpu": 4 * (12 * 128**2 + 2 * 128) + (65 + 64 + 1) * 128,
    "nanogpt-char": 6 * (12 * 384**2 + 2 * 384) + (65 + 256 + 1) * 384,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    # attention's four square matrices and an MLP four times as wide, and a scale for each block
    "modern-7b": 32 * 12 * 4096**2 + 2 * 32768 * 4096 + 32,
    "tiny": 2 * (12 * 32**2 + 2 * 32) + (65 + 16 + 1) * 32,
}

LARGE = {"gpt2-medium", "gpt2-large", "gpt2-xl", "modern-7b"}
"""Those with the most blocks, each of which is traced."""


@pytest.mark.parametrize("name", only(set(PRESETS) - LARGE, PRESETS))
def test_each_preset_makes_the_model_that_it_promises(name):
    config = preset(name).model
    tokens = jax.ShapeDtypeStruct((3, config.block_size), "int32")

    model = abstract_model(config)
    logits = nnx.eval_shape(lambda model, tokens: model(tokens), model, tokens)

    expected_class = BigramLM if name == "bigram" else GPT
    assert isinstance(model, expected_class)
    parameters = 0
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        parameters += leaf.size
    assert parameters == PARAMETERS[name]
    assert logits.shape == (3, config.block_size, config.vocab_size)
