"""Configs say no when they are made, and survive JSON."""

import dataclasses
import json
import math
import re
import traceback
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jgpt import (
    GPT,
    BigramLM,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    fields,
    preset,
)
from jgpt.data.dataset import load_dataset
from jgpt.fields import UnknownField, from_json, to_json
from jgpt.fitting.trackers import require_tracker
from jgpt.nn.models import abstract_model
from jgpt.presets import PRESETS
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import abstract_state
from jgpt.training.step import make_train_steps
from jgpt.words import did_you_mean
from tests.quick import only


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ModelConfig, {"embed_dim": 30}, "`embed_dim=30` must be divisible by `num_heads=4`"),
        (ModelConfig, {"vocab_size": 2.5}, "`vocab_size` must be an integer, not 2.5"),
        (ModelConfig, {"num_heads": True}, "`num_heads` must be an integer, not True"),
        (TrainConfig, {"mesh": "data=2,datta=2"}, "has no axis 'datta' (did you mean 'data'?)"),
        (TrainConfig, {"mesh": "data"}, "`mesh='data'` must give each axis once"),
        (TrainConfig, {"mesh": "data=0"}, "`mesh='data=0'` must give each axis once"),
        (TrainConfig, {"mesh": "data=2,data=2"}, "must give each axis once"),
        (
            TrainConfig,
            {"mesh": "data=1000000000"},
            "`mesh='data=1000000000'` must give each axis once",
        ),
        (TrainConfig, {"mesh": "fsdp=٢"}, "must give each axis once"),
        (TrainConfig, {"mesh": ""}, "has no axis ''"),
        (
            TrainConfig,
            {"mesh": "data=2,fsdp=4", "batch_size": 20},
            "over data x fsdp = 8 devices: `batch_size=20` / `micro_batches=1` is 20, which 8",
        ),
        (
            TrainConfig,
            {"mesh": "fsdp=4", "batch_size": 8, "micro_batches": 4},
            "`batch_size=8` / `micro_batches=4` is 2, which 4 doesn't divide",
        ),
        (
            ModelConfig,
            {"dtype": "float16"},
            "`dtype` must be one of auto, bfloat16, float32, float64, not 'float16'",
        ),
        (ModelConfig, {"dtype": ["auto"]}, "float64, not ['auto']"),
        (ModelConfig, {"hidden_dim": "7"}, "`hidden_dim` must be an integer or None, not '7'"),
        (ModelConfig, {"dropout": "x"}, "`dropout` must be a number, not 'x'"),
        (ModelConfig, {"dropout": 10**400}, "must be finite in float32"),
        (ModelConfig, {"ngram_sizes": [2]}, "must be a tuple, each item an integer, not [2]"),
        (ModelConfig, {"ngram_sizes": (2, True)}, "each item an integer, not (2, True)"),
        (ModelConfig, {"ngram_sizes": 2}, "must be a tuple, each item an integer, not 2"),
        (
            ModelConfig,
            {"ngram_sizes": (2, 2)},
            "`ngram_sizes=(2, 2)` must be above 1 and ascending",
        ),
        (
            ModelConfig,
            {"ngram_sizes": (64,), "block_size": 99},
            "at most 63 and at most `block_size=99`",
        ),
        (ModelConfig, {"head_bias": True}, "`head_bias=True` needs `tie_embeddings=False`"),
        (ModelConfig, {"qk_norm_scale": True}, "`qk_norm_scale=True` needs `qk_norm=True`"),
        (ModelConfig, {"positions": "rotary", "head_dim": 5}, "needs an even head size"),
        (ModelConfig, {"num_kv_heads": 8}, "`num_heads=4` must be divisible by `num_kv_heads=8`"),
        (
            ModelConfig,
            {"positions": "rotary", "embed_dim": 20},
            "`positions='rotary'` needs an even head size: `embed_dim=20` over `num_heads=4` is 5",
        ),
        (ModelConfig, {"norm_scale": 1}, "`norm_scale` must be True or False, not 1"),
        (OptimizerConfig, {"min_learning_rate": 0.5}, "`min_learning_rate=0.5` is above"),
        (DataConfig, {"data": ()}, "`data=()` must name a corpus"),
        (DataConfig, {"data": ("",)}, "`data=('',)` must name a corpus"),
        (DataConfig, {"bpe_vocab_size": 256}, "`bpe_vocab_size=256` must be at least 257"),
        (
            DataConfig,
            {"bpe_vocab_size": 2**31},
            "`bpe_vocab_size=2147483648` must be at most 1048576",
        ),
        (DataConfig, {"validation_fraction": 0.0}, "`validation_fraction=0.0` must be positive"),
        (DataConfig, {"validation_fraction": 0.7, "test_fraction": 0.3}, "leave no text for"),
        (DataConfig, {"tokenizer": "gpt2"}, "`tokenizer='gpt2'` needs tokenizer_files"),
        (TrainConfig, {"micro_batches": "all"}, "must be an integer or auto, not 'all'"),
        (TrainConfig, {"micro_batches": "auto", "mesh": "data=5"}, "is 12, which 5 doesn't divide"),
        (TrainConfig, {"eval_tokens": 64}, "`eval_tokens=64` must be above `block_size=64`"),
        (TrainConfig, {"seed": 2**32}, "`seed=4294967296` must be at most 4294967295"),
        (TrainConfig, {"name": "a/b"}, "`name='a/b'` must be a plain folder name"),
        (TrainConfig, {"name": ""}, "`name=''` must be a plain folder name"),
        (TrainConfig, {"name": "."}, "`name='.'` must be a plain folder name"),
        (TrainConfig, {"name": ".."}, "`name='..'` must be a plain folder name"),
        (TrainConfig, {"model": OptimizerConfig()}, "`model` must be a ModelConfig, not Optim"),
        (ModelConfig, {"embed_dim": np.int64(8)}, "an integer, not np.int64(8): its item() is one"),
        (TrainConfig, {"trackers": ("wandb", "x")}, "each item one of tensorboard, wandb, not"),
    ],
)
def test_a_bad_value_is_rejected_by_name(kind, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**fields)


INF = math.inf
BOUNDS = {
    "be positive": (
        (0, -1),
        """vocab_size block_size num_layers num_heads num_kv_heads head_dim embed_dim hidden_dim
        rotary_base norm_epsilon attention_scale attention_window ngram_rows logit_softcap
        learning_rate schedule_steps muon_learning_rate embedding_learning_rate
        steps batch_size micro_batches eval_interval steps_per_call patience
        keep_best keep_last keep_every log_interval""",
    ),
    "not be negative": (
        (-1,),
        """min_learning_rate warmup_steps weight_decay gradient_clip muon_weight_decay
        seed sample_tokens""",
    ),
    "be at least 0 and below 1": (
        (1.0, 1.5, -0.1),
        "dropout ngram_dropout decay_fraction validation_fraction test_fraction",
    ),
    # what float32 rounds to 1: nothing is learned, and an average is 0 / 0
    "be at least 0 and below 1 in float32, which rounds 0.99999998 to 1": (
        (1.0, -0.1, 0.99999998),
        "beta1 beta2 muon_momentum ema_decay",
    ),
    "be finite in float32": (
        (INF, -INF, math.nan),
        "dropout rotary_base norm_epsilon attention_scale logit_softcap learning_rate weight_decay",
    ),
}
KIND_OF: dict[str, Any] = {
    field.name: kind
    for kind in (ModelConfig, OptimizerConfig, DataConfig, TrainConfig)
    for field in dataclasses.fields(kind)
}


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        (name, value, bound)
        for bound, (values, names) in BOUNDS.items()
        for name in names.split()
        for value in values
    ],
)
def test_a_number_out_of_bounds_is_rejected_by_name(name, value, bound):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value} must {bound}')}$"):
        KIND_OF[name](**{name: value})


def test_one_text_may_stand_alone():
    assert DataConfig(data="pydocs") == DataConfig()  # type: ignore[arg-type]


def test_what_is_odd_and_fine():
    ModelConfig(embed_dim=20)  # heads of an odd size, where nothing turns them
    ModelConfig(num_kv_heads=4)
    ModelConfig(num_kv_heads=1, positions="rotary")
    OptimizerConfig(schedule="constant", min_learning_rate=0.5)
    OptimizerConfig(decay_fraction=0.0, muon_momentum=0.0)
    OptimizerConfig(beta2=0.99999997, ema_decay=0.99999997)  # float32 keeps it below 1
    TrainConfig(micro_batches="auto", mesh="data=4")
    # the limits themselves
    ModelConfig(num_layers=1024)
    ModelConfig(ngram_sizes=(2, 8), block_size=8)
    DataConfig(bpe_vocab_size=257)
    DataConfig(bpe_vocab_size=2**20)
    TrainConfig(seed=2**32 - 1)


INTEGERS = [
    name
    for name, kind in KIND_OF.items()
    if {int} & {(hint := get_type_hints(kind)[name]), *get_args(hint)}
    and get_origin(hint) is not tuple
]


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_beyond_all_use_is_rejected_in_a_line(name):
    kind = KIND_OF[name]
    for value in (99_999_999_999_999_999_999, 2**32 + 1):
        with pytest.raises(ValueError, match=rf"^{name}={value} must be at most \d+$"):
            kind(**{name: value})
    with pytest.raises(ValueError, match=rf"^{name}=1000+\.\.\.0+ must be") as refusal:
        kind(**{name: 10**400})
    assert len(str(refusal.value)) < 99


def test_large_and_not_beyond_use():
    """Larger than anyone has trained, in each direction."""
    ModelConfig(embed_dim=2**20, hidden_dim=2**24, vocab_size=2**24)
    ModelConfig(block_size=2**27, ngram_sizes=(2, 63), ngram_rows=2**25, num_layers=1024)
    OptimizerConfig(warmup_steps=2**31 - 1, gradient_clip=10**12)
    big = TrainConfig(
        model=ModelConfig(block_size=2**17),
        steps=2**31 - 1,
        batch_size=2**9,
        steps_per_call=63,
        eval_tokens=2**32,
    )

    with pytest.raises(
        ValueError,
        match=r"`steps_per_call=64` times `batch_size=512` times `block_size=131072` is 4,294,967,296 ",
    ):
        dataclasses.replace(big, steps_per_call=64)


def test_the_largest_number_of_float32_is_a_number_and_no_larger_one_is():
    largest = float(np.finfo(np.float32).max)
    assert OptimizerConfig(learning_rate=largest).learning_rate == largest
    with pytest.raises(ValueError, match=r"`learning_rate=1e\+40` must be finite in float32"):
        OptimizerConfig(learning_rate=1e40)


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (ModelConfig, "n_layer", "num_layers"),
        (ModelConfig, "n_embd", "embed_dim"),
        (ModelConfig, "blok_size", "block_size"),
        (TrainConfig, "max_iters", "steps"),
        (OptimizerConfig, "lr", "learning_rate"),
    ],
)
def test_an_unknown_field_gets_a_suggestion(kind, name, meant):
    message = f"{kind.__name__} has no field {name!r} (did you mean {meant!r}?)"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        kind(**{name: 3})
    with pytest.raises(UnknownField, match=f"^{re.escape(message)}$"):
        from_json(kind, json.dumps({name: 3}))


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


def test_every_source_is_checked_and_not_one_by_chance():
    for _ in range(20):
        with pytest.raises(ValueError, match="must be"):
            DataConfig(data=("a", "b", "c", 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "TrainConfig must be an object, not list"),
        ("null", "TrainConfig must be an object, not NoneType"),
        ('{"model": 3}', "ModelConfig must be an object, not int"),
        ('{"stepz": 3}', "TrainConfig has no field 'stepz' (did you mean 'steps'?)"),
        ('{"model": {"embed": 8}}', "ModelConfig has no field 'embed' (did you mean 'embed_dim'?)"),
        ('{"steps": "many"}', "`steps` must be an integer, not 'many'"),
        ('{"steps": null}', "`steps` must be an integer, not None"),
        (
            '{"dataset": {"data": [["a"]]}}',
            "`data` must be a tuple, each item a string, not (['a'],)",
        ),
    ],
)
def test_damaged_json_is_rejected(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_json(TrainConfig, text)


def test_json_is_one_field_a_line_for_people():
    lines = to_json(TrainConfig(steps=77)).splitlines()
    assert '  "steps": 77,' in lines
    assert to_json(OptimizerConfig()).endswith('": []\n}\n')
    assert json.loads("\n".join(lines))["model"]["embed_dim"] == 128


def test_an_unknown_preset_gets_a_suggestion_and_the_list():
    with pytest.raises(ValueError, match=r"'nanogpt-cpo' \(did you mean 'nanogpt-cpu'\?\)") as it:
        preset("nanogpt-cpo")
    assert all(name in str(it.value) for name in PRESETS)
    assert did_you_mean("zebra", PRESETS) == ""


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


def step_of(config):
    key = jax.random.key(0)
    windows = jax.ShapeDtypeStruct((1, config.batch_size, config.model.block_size + 1), "int32")
    make_train_steps(config).lower(abstract_state(config), windows, key, 0)


def forward_pass(config):
    model = abstract_model(config)
    return nnx.eval_shape(lambda model: model(jnp.zeros((1, 2), jnp.int32)), model)


@pytest.mark.parametrize(
    ("kind", "name", "file", "use"),
    [
        (ModelConfig, "architecture", "nn/models.py", abstract_model),
        (ModelConfig, "norm", "nn/layers.py", abstract_model),
        (ModelConfig, "positions", "nn/transformer.py", abstract_model),
        (ModelConfig, "activation", "nn/transformer.py", forward_pass),
        (ModelConfig, "attention_kernel", "nn/kernels.py", abstract_model),
        (OptimizerConfig, "optimizer", "training/optimizer.py", lambda its: make_optimizer(its, 9)),
        (OptimizerConfig, "schedule", "training/schedule.py", lambda its: make_optimizer(its, 9)),
        (DataConfig, "tokenizer", "data/dataset.py", lambda its: load_dataset(its, 8)),
        (
            TrainConfig,
            "trackers",
            "fitting/trackers.py",
            lambda its: require_tracker(*its.trackers),
        ),
        (TrainConfig, "log", "training/statistics.py", step_of),
    ],
)
def test_a_word_without_a_case_is_rejected_by_the_file_to_add_it_in(
    kind, name, file, use, monkeypatch
):
    """Rather than that a config which allows one more word is trained as if it said another."""
    known = get_type_hints(kind)[name]
    several = get_origin(known) is tuple
    words = Literal[(*get_args(get_args(known)[0] if several else known), "another")]
    monkeypatch.setitem(kind.__annotations__, name, tuple[words, ...] if several else words)
    monkeypatch.setattr(fields, "_hints", fields._hints.__wrapped__)  # uncached
    config = kind(**{name: ("another",) if several else "another"})
    with pytest.raises(AssertionError, match=r"unreachable.*'another'") as caught:
        use(config)
    *_, match, _ = traceback.extract_tb(caught.tb)  # the last is assert_never itself
    assert match.filename.endswith(f"jgpt/{file}")
