"""The presets that reproduce others' trainings have the values that were published."""

import ast
import dataclasses
from typing import Any

import pytest

from jgpt import TrainConfig, preset
from jgpt.presets import PRESETS
from jgpt.training.evaluation import targets_of


def fields(text: str) -> dict[str, Any]:
    """Values by the full names of their fields, from lines of `part: name=value name=value`."""
    found = {}
    for line in text.split("\n"):
        part, _, pairs = line.strip().partition(": ")
        for name, _, value in (pair.partition("=") for pair in pairs.split()):
            found[name if part == "run" else f"{part}.{name}"] = ast.literal_eval(value)
    return found


# nanoGPT's README, "I only have a macbook": config/train_shakespeare_char.py with
# --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000
# --lr_decay_iters=2000 --dropout=0.0; what that file leaves out is train.py's
NANOGPT_CPU = """
    model: num_layers=4 num_heads=4 embed_dim=128 block_size=64 dropout=0.0 activation='gelu'
    model: qkv_bias=False use_bias=False head_bias=False tie_embeddings=True norm_epsilon=1e-5
    optimizer: optimizer='adamw' schedule='cosine' learning_rate=1e-3 min_learning_rate=1e-4
    optimizer: warmup_steps=100 beta1=0.9 beta2=0.99 weight_decay=0.1 gradient_clip=1.0
    model: norm='layer' positions='learned' gated=False qk_norm=False zero_init=False
    model: norm_scale=True ngram_sizes=() logit_softcap=None attention_window=None
    dataset: tokenizer='char' validation_fraction=0.1 test_fraction=0.0
    run: steps=2000 batch_size=12 micro_batches=1
    """
# the model: Radford et al. 2019 and Hugging Face's config.json; the training: nanoGPT's
# train.py, whose defaults are "designed to train a gpt2 (124M) on OpenWebText", and whose
# batch_size of 12 is times gradient_accumulation_steps of 5 * 8, our micro_batches
GPT2 = f"""{NANOGPT_CPU}
    model: vocab_size=50257 num_layers=12 num_heads=12 embed_dim=768 block_size=1024
    model: activation='gelu_tanh' qkv_bias=True use_bias=True
    optimizer: learning_rate=6e-4 min_learning_rate=6e-5 warmup_steps=2000 beta2=0.95
    dataset: tokenizer='bpe' bpe_vocab_size=50257
    run: batch_size=480 steps=600_000 micro_batches=40
    """
PUBLISHED = {
    "nanogpt-cpu": NANOGPT_CPU,
    # nanoGPT's config/train_shakespeare_char.py
    "nanogpt-char": f"""{NANOGPT_CPU}
    model: num_layers=6 num_heads=6 embed_dim=384 block_size=256 dropout=0.2
    run: batch_size=64 steps=5000
    """,
    # Radford et al. 2019, table 2; learning rates and tokens a step of Brown et al. 2020,
    # table 2.1: 0.5M for GPT-3 350M and 760M, 1M for 1.3B
    "gpt2": GPT2,
    "gpt2-medium": f"""{GPT2}
    model: num_layers=24 num_heads=16 embed_dim=1024
    optimizer: learning_rate=3e-4 min_learning_rate=2.9999999999999997e-05
    """,
    "gpt2-large": f"""{GPT2}
    model: num_layers=36 num_heads=20 embed_dim=1280
    optimizer: learning_rate=2.5e-4 min_learning_rate=2.5e-5
    """,
    "gpt2-xl": f"""{GPT2}
    model: num_layers=48 num_heads=25 embed_dim=1600
    optimizer: learning_rate=2e-4 min_learning_rate=2e-5 warmup_steps=1000
    run: batch_size=960 micro_batches=80 steps=300_000
    """,
    # karpathy/ng-video-lecture's gpt.py, with torch.optim.AdamW's defaults
    "lecture": f"""{NANOGPT_CPU}
    model: num_layers=4 num_heads=4 embed_dim=64 block_size=32 activation='relu'
    model: use_bias=True head_bias=True tie_embeddings=False
    optimizer: schedule='constant' warmup_steps=0 beta2=0.999 weight_decay=0.01 gradient_clip=0.0
    run: batch_size=16 steps=5000
    """,
}


def flat(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_values(name):
    found = dict(flat(preset(name)))
    expected = fields(PUBLISHED[name])
    assert {field: found[field] for field in expected} == expected


TINY_SHAKESPEARE = 111_540
"""The tokens of its validation split, as characters."""


def test_all_of_tiny_shakespeare_s_split_is_evaluated():
    for config in (TrainConfig(), *map(preset, PRESETS)):
        assert targets_of(config, TINY_SHAKESPEARE) == TINY_SHAKESPEARE - 1
