"""The presets have the values that were published, and each other value was chosen."""

import ast
import dataclasses
from typing import Any

import pytest

from jgpt import TrainConfig, preset
from jgpt.presets import DEFAULT_PRESET, PRESETS
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
NANOGPT_CPU = fields(
    """
    model: num_layers=4 num_heads=4 embed_dim=128 block_size=64 dropout=0.0 activation='gelu'
    model: qkv_bias=False use_bias=False head_bias=False tie_embeddings=True norm_epsilon=1e-5
    optimizer: optimizer='adamw' schedule='cosine' learning_rate=1e-3 min_learning_rate=1e-4
    optimizer: warmup_steps=100 beta1=0.9 beta2=0.99 weight_decay=0.1 gradient_clip=1.0
    dataset: tokenizer='char' validation_fraction=0.1 test_fraction=0.0
    run: steps=2000 batch_size=12 micro_batches=1 eval_interval=250
    """
)
# what it does not mention must do nothing by default; Muon's values are Jordan et al. 2024's, the
# vocabulary is tiny Shakespeare's characters
REST = fields(
    """
    model: architecture='gpt' vocab_size=65 num_kv_heads=None head_dim=None hidden_dim=None
    model: gated=False positions='learned' rotary_base=10000.0 norm='layer' norm_scale=True
    model: qk_norm_epsilon=1e-6
    model: qk_norm=False qk_norm_scale=False attention_scale=None attention_window=None
    model: ngram_sizes=() ngram_rows=8192 ngram_dropout=0.0 zero_init=False
    model: embedding_shortcut=False logit_softcap=None dtype='float32' activation_dtype='auto'
    model: attention_kernel='auto' param_dtype='float32' remat=False scan_layers=False
    model: make=None
    optimizer: make=None trainable=()
    optimizer: decay_fraction=0.5 schedule_steps=None embedding_learning_rate=None ema_decay=0.0
    optimizer: muon_learning_rate=0.02 muon_weight_decay=0.0
    dataset: data_field='text'
    dataset: data=('pydocs',) bpe_vocab_size=1024 tokenizer_files=None
    run: name='gpt' out=None seed=1337 eval_tokens=131_072 steps_per_call=50 patience=None
    run: objective=None
    run: keep_best=1 keep_last=2 keep_every=None trackers=() sample_tokens=500 mesh=None
    """
)
# the model: Radford et al. 2019 and Hugging Face's config.json; the training: nanoGPT's
# train.py, whose defaults are "designed to train a gpt2 (124M) on OpenWebText", and whose
# batch_size of 12 is times gradient_accumulation_steps of 5 * 8, our micro_batches
GPT2 = """
    model: vocab_size=50257 num_layers=12 num_heads=12 embed_dim=768 block_size=1024
    model: activation='gelu_tanh' qkv_bias=True use_bias=True dtype='auto'
    optimizer: learning_rate=6e-4 min_learning_rate=6e-5 warmup_steps=2000 beta2=0.95
    dataset: tokenizer='bpe' bpe_vocab_size=50257
    run: batch_size=480 steps=600_000 micro_batches=40 steps_per_call=10 eval_interval=2000
    run: eval_tokens=1_048_576
    """
# what lessons 11 and 12 teach; the rates are modded-nanogpt's and benchmarks/ablation.md's
MUON = """
    optimizer: optimizer='muon' muon_learning_rate=0.012 muon_weight_decay=0.1
    optimizer: learning_rate=8e-3 embedding_learning_rate=0.04 min_learning_rate=0.0
    optimizer: schedule='wsd' warmup_steps=0 beta1=0.8 beta2=0.95 gradient_clip=0.0
    """
PLAIN = """
    model: num_heads=3 embed_dim=96 activation='relu_squared' tie_embeddings=False
    model: positions='rotary' norm='rms' qk_norm=True zero_init=True
    """
# what benchmarks/ablation.md found; the softcap is modded-nanogpt's
MODERN = f"""{PLAIN}
    model: block_size=256 norm_scale=False attention_scale=0.12 attention_window=32
    model: ngram_sizes=(2,3,4) ngram_dropout=0.2 embedding_shortcut=True logit_softcap=15.0
    """
MODERN_CPU = f"""{MODERN}{MUON}
    run: batch_size=8 steps=1700 eval_interval=425
    """
CHANGES = {
    # on all of tiny Shakespeare, where nanoGPT draws samples
    "nanogpt-cpu": "run: eval_interval=1000",
    # nanoGPT's config/train_shakespeare_char.py
    "nanogpt-char": """
    model: num_layers=6 num_heads=6 embed_dim=384 block_size=256 dropout=0.2 dtype='auto'
    run: batch_size=64 steps=5000
    """,
    # Radford et al. 2019, table 2; learning rates and tokens a step of Brown et al. 2020,
    # table 2.1: 0.5M for GPT-3 350M and 760M, 1M for 1.3B
    "gpt2": GPT2,
    "gpt2-medium": f"""{GPT2}
    model: num_layers=24 num_heads=16 embed_dim=1024 remat=True scan_layers=True
    optimizer: learning_rate=3e-4 min_learning_rate=2.9999999999999997e-05
    """,
    "gpt2-large": f"""{GPT2}
    model: num_layers=36 num_heads=20 embed_dim=1280 remat=True scan_layers=True
    optimizer: learning_rate=2.5e-4 min_learning_rate=2.5e-5
    """,
    "gpt2-xl": f"""{GPT2}
    model: num_layers=48 num_heads=25 embed_dim=1600 remat=True scan_layers=True
    optimizer: learning_rate=2e-4 min_learning_rate=2e-5 warmup_steps=1000
    run: batch_size=960 micro_batches=80 steps=300_000 eval_interval=1000
    """,
    # karpathy/ng-video-lecture's gpt.py, with torch.optim.AdamW's defaults
    "lecture": """
    model: num_layers=4 num_heads=4 embed_dim=64 block_size=32 activation='relu'
    model: use_bias=True head_bias=True tie_embeddings=False
    optimizer: schedule='constant' warmup_steps=0 beta2=0.999 weight_decay=0.01 gradient_clip=0.0
    run: batch_size=16 steps=5000 eval_interval=2000
    """,
    # the lecture's bigram.py, trained on more at once to converge in seconds
    "bigram": """
    model: architecture='bigram' block_size=8
    optimizer: learning_rate=0.02 min_learning_rate=0.0 warmup_steps=0 weight_decay=0.0
    optimizer: gradient_clip=0.0
    run: batch_size=128 steps=4000 eval_interval=1000 steps_per_call=200
    """,
    "modern": f"""{PLAIN}{MUON}
    model: block_size=128
    optimizer: decay_fraction=0.75
    run: batch_size=16 steps=2000 eval_interval=500
    """,
    "modern-cpu": MODERN_CPU,
    # what `benchmarks/compare.py shakespeare_best` trains
    "shakespeare-best": f"""{MODERN_CPU}
    model: block_size=512 dropout=0.05
    optimizer: weight_decay=0.3 ema_decay=0.995
    dataset: data=('shakespeare',)
    run: batch_size=4 steps=5000 eval_interval=500
    """,
    # the modern family without what is for small data; Touvron et al. 2023, section 2.3 and table 2
    "modern-7b": f"""{MODERN}
    model: num_layers=32 num_heads=32 embed_dim=4096 block_size=4096 vocab_size=32768
    model: attention_window=None ngram_sizes=() ngram_dropout=0.0 dtype='auto'
    model: remat=True scan_layers=True
    optimizer: learning_rate=3e-4 min_learning_rate=3e-5 warmup_steps=2000 beta2=0.95
    dataset: tokenizer='bpe' bpe_vocab_size=32768
    run: steps=250_000 batch_size=1024 micro_batches=1024 steps_per_call=10
    run: eval_interval=1000 eval_tokens=4_194_304
    """,
    "tiny": """
    model: num_layers=2 num_heads=2 embed_dim=32 block_size=16
    optimizer: learning_rate=3e-3 min_learning_rate=3e-4 warmup_steps=10
    run: batch_size=8 steps=200 eval_interval=200 sample_tokens=100
    """,
}
"""What each preset changes of nanoGPT's setting and of the rest."""


def flat(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_values_and_defaults_for_the_rest(name):
    expected = {**REST, **NANOGPT_CPU, **fields(CHANGES[name]), "name": name}
    assert dict(flat(preset(name))) == expected


TINY_SHAKESPEARE = 111_540
"""The tokens of its validation split, as characters."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_evaluates_all_of_tiny_shakespeare_s_split(name):
    assert targets_of(preset(name), TINY_SHAKESPEARE) == TINY_SHAKESPEARE - 1


def test_the_defaults_are_nanogpt_s_and_the_rest_is_off():
    assert dict(flat(TrainConfig())) == REST | NANOGPT_CPU
    assert DEFAULT_PRESET == "modern"
