"""The presets have the values that were published, and each other value was chosen."""

import dataclasses

import pytest

from jgpt import TrainConfig, preset
from jgpt.presets import DEFAULT_PRESET, PRESETS

# nanoGPT's README, "I only have a macbook": config/train_shakespeare_char.py with
# --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000
# --lr_decay_iters=2000 --dropout=0.0; what that file leaves out is train.py's
NANOGPT_CPU = {
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.embed_dim": 128,
    "model.block_size": 64,
    "model.dropout": 0.0,
    "model.activation": "gelu",  # model.py: nn.GELU()
    "model.qkv_bias": False,  # train.py: bias = False
    "model.use_bias": False,
    "model.head_bias": False,
    "model.tie_embeddings": True,
    "model.norm_epsilon": 1e-5,
    "optimizer.optimizer": "adamw",
    "optimizer.schedule": "cosine",
    "optimizer.learning_rate": 1e-3,
    "optimizer.min_learning_rate": 1e-4,
    "optimizer.warmup_steps": 100,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.99,
    "optimizer.weight_decay": 0.1,
    "optimizer.gradient_clip": 1.0,
    "dataset.tokenizer": "char",
    "dataset.validation_fraction": 0.1,
    "dataset.test_fraction": 0.0,
    "steps": 2000,
    "batch_size": 12,
    "micro_batches": 1,
    "eval_interval": 250,
}

# what each preset changes of that
CHANGES = {
    "nanogpt-cpu": {},
    # nanoGPT's config/train_shakespeare_char.py
    "nanogpt-char": {
        "model.num_layers": 6,
        "model.num_heads": 6,
        "model.embed_dim": 384,
        "model.block_size": 256,
        "model.dropout": 0.2,
        "model.dtype": "auto",
        "batch_size": 64,
        "steps": 5000,
    },
    # the model: Radford et al. 2019 and Hugging Face's config.json; the training: nanoGPT's
    # train.py, whose defaults are "designed to train a gpt2 (124M) on OpenWebText"
    "gpt2": {
        "model.vocab_size": 50257,
        "model.num_layers": 12,
        "model.num_heads": 12,
        "model.embed_dim": 768,
        "model.block_size": 1024,
        "model.activation": "gelu_tanh",
        "model.qkv_bias": True,
        "model.use_bias": True,
        "model.dtype": "auto",
        "optimizer.learning_rate": 6e-4,
        "optimizer.min_learning_rate": 6e-5,
        "optimizer.warmup_steps": 2000,
        "optimizer.beta2": 0.95,
        "dataset.tokenizer": "bpe",
        "dataset.bpe_vocab_size": 50257,
        "steps": 600_000,
        "batch_size": 12 * 5 * 8,  # its batch_size times gradient_accumulation_steps
        "micro_batches": "auto",
        "steps_per_call": 10,
        "eval_interval": 2000,
        "eval_tokens": 1 << 20,
    },
    # karpathy/ng-video-lecture's gpt.py, with torch.optim.AdamW's defaults
    "lecture": {
        "model.num_layers": 4,
        "model.num_heads": 4,
        "model.embed_dim": 64,
        "model.block_size": 32,
        "model.activation": "relu",
        "model.use_bias": True,
        "model.head_bias": True,
        "model.tie_embeddings": False,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.01,
        "optimizer.gradient_clip": 0.0,
        "batch_size": 16,
        "steps": 5000,
        "eval_interval": 500,
    },
    # the lecture's bigram.py, trained on more at once to converge in seconds
    "bigram": {
        "model.architecture": "bigram",
        "model.block_size": 8,
        "optimizer.learning_rate": 0.02,
        "optimizer.min_learning_rate": 0.0,
        "optimizer.warmup_steps": 0,
        "optimizer.weight_decay": 0.0,
        "optimizer.gradient_clip": 0.0,
        "batch_size": 128,
        "steps": 4000,
        "eval_interval": 1000,
        "steps_per_call": 200,
    },
    # what benchmarks/ablation.md found; the softcap and the rates are modded-nanogpt's
    "modern-cpu": {
        "model.num_heads": 3,
        "model.embed_dim": 96,
        "model.block_size": 256,
        "model.activation": "relu_squared",
        "model.tie_embeddings": False,
        "model.positions": "rotary",
        "model.norm": "rms",
        "model.norm_scale": False,
        "model.qk_norm": True,
        "model.attention_scale": 0.12,
        "model.attention_window": 32,
        "model.ngram_sizes": (2, 3, 4),
        "model.ngram_dropout": 0.2,
        "model.zero_init": True,
        "model.embedding_shortcut": True,
        "model.logit_softcap": 15.0,
        "optimizer.optimizer": "muon",
        "optimizer.muon_learning_rate": 0.012,
        "optimizer.muon_weight_decay": 0.1,
        "optimizer.learning_rate": 8e-3,
        "optimizer.embedding_learning_rate": 0.04,
        "optimizer.min_learning_rate": 0.0,
        "optimizer.schedule": "wsd",
        "optimizer.warmup_steps": 0,
        "optimizer.beta1": 0.8,
        "optimizer.beta2": 0.95,
        "optimizer.gradient_clip": 0.0,
        "batch_size": 8,
        "steps": 1700,
        "eval_interval": 425,
    },
    "tiny": {
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.embed_dim": 32,
        "model.block_size": 16,
        "optimizer.learning_rate": 3e-3,
        "optimizer.min_learning_rate": 3e-4,
        "optimizer.warmup_steps": 10,
        "batch_size": 8,
        "steps": 200,
        "eval_interval": 100,
        "sample_tokens": 100,
    },
}


def flat(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


# Radford et al. 2019, table 2; learning rates and tokens a step of Brown et al. 2020, table 2.1:
# 0.5M for GPT-3 350M and 760M, 1M for 1.3B
for name, layers, heads, features, rate in (
    ("gpt2-medium", 24, 16, 1024, 3e-4),
    ("gpt2-large", 36, 20, 1280, 2.5e-4),
    ("gpt2-xl", 48, 25, 1600, 2e-4),
):
    CHANGES[name] = {
        **CHANGES["gpt2"],
        "model.num_layers": layers,
        "model.num_heads": heads,
        "model.embed_dim": features,
        "model.rematerialise": True,
        "model.scan_layers": True,
        "optimizer.learning_rate": rate,
        "optimizer.min_learning_rate": rate / 10,
    }
CHANGES["gpt2-xl"] |= {
    "batch_size": 960,
    "steps": 300_000,
    "optimizer.warmup_steps": 1000,
    "eval_interval": 1000,
}
# what `benchmarks/shakespeare_best.py` trains
CHANGES["shakespeare-best"] = {
    **CHANGES["modern-cpu"],
    "model.block_size": 512,
    "model.dropout": 0.05,
    "optimizer.weight_decay": 0.3,
    "optimizer.ema_decay": 0.995,
    "dataset.data": ("shakespeare",),
    "batch_size": 4,
    "steps": 5000,
    "eval_interval": 500,
}
# the modern family without what is for small data; Touvron et al. 2023, section 2.3 and table 2
CHANGES["modern-7b"] = {
    **{name: it for name, it in CHANGES["modern-cpu"].items() if name.startswith("model.")},
    "model.vocab_size": 32768,
    "model.block_size": 4096,
    "model.num_layers": 32,
    "model.num_heads": 32,
    "model.embed_dim": 4096,
    "model.attention_window": None,
    "model.ngram_sizes": (),
    "model.ngram_dropout": 0.0,
    "model.dtype": "auto",
    "model.rematerialise": True,
    "model.scan_layers": True,
    "optimizer.learning_rate": 3e-4,
    "optimizer.min_learning_rate": 3e-5,
    "optimizer.warmup_steps": 2000,
    "optimizer.beta2": 0.95,
    "dataset.tokenizer": "bpe",
    "dataset.bpe_vocab_size": 32768,
    "steps": 250_000,
    "batch_size": 1024,
    "micro_batches": "auto",
    "steps_per_call": 10,
    "eval_interval": 1000,
    "eval_tokens": 1 << 22,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_values_and_defaults_for_the_rest(name):
    expected = {**dict(flat(TrainConfig())), **NANOGPT_CPU, **CHANGES[name], "name": name}
    assert dict(flat(preset(name))) == expected


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt2")])
def test_a_rate_meets_the_tokens_a_step_that_it_was_published_with(name):
    """GPT-3's tables say 0.5M and 1M, and 300 billion tokens in all; nanoGPT has 480 x 1024."""
    config = preset(name)
    a_step = config.batch_size * config.model.block_size
    assert a_step == pytest.approx({2e-4: 1e6}.get(config.optimizer.learning_rate, 5e5), rel=0.02)
    assert a_step * config.steps == pytest.approx(300e9, rel=0.02)


def test_the_rest_is_off():
    """The defaults of what nanoGPT's setting does not mention; Muon's are Jordan et al. 2024's."""
    rest = {name: value for name, value in flat(TrainConfig()) if name not in NANOGPT_CPU}
    assert rest == {
        "model.architecture": "gpt",
        "model.vocab_size": 65,  # tiny Shakespeare's characters
        "model.num_kv_heads": None,
        "model.head_dim": None,
        "model.hidden_dim": None,
        "model.gated": False,
        "model.positions": "learned",
        "model.rotary_base": 10_000.0,
        "model.norm": "layer",
        "model.norm_scale": True,
        "model.qk_norm": False,
        "model.qk_norm_scale": False,
        "model.attention_scale": None,
        "model.attention_window": None,
        "model.ngram_sizes": (),
        "model.ngram_rows": 8192,
        "model.ngram_dropout": 0.0,
        "model.zero_init": False,
        "model.embedding_shortcut": False,
        "model.logit_softcap": None,
        "model.dtype": "float32",
        "model.activation_dtype": "auto",
        "model.attention_kernel": "auto",
        "model.param_dtype": "float32",
        "model.rematerialise": False,
        "model.scan_layers": False,
        "optimizer.decay_fraction": 0.5,
        "optimizer.schedule_steps": None,
        "optimizer.muon_learning_rate": 0.02,
        "optimizer.muon_weight_decay": 0.0,
        "optimizer.muon_momentum": 0.95,
        "optimizer.embedding_learning_rate": None,
        "optimizer.ema_decay": 0.0,
        "dataset.data": ("pydocs",),
        "dataset.universal_newlines": True,
        "dataset.bpe_vocab_size": 1024,
        "dataset.tokenizer_files": None,
        "name": "gpt",
        "out": None,
        "seed": 1337,
        "eval_tokens": None,
        "steps_per_call": 50,
        "patience": None,
        "keep_best": 1,
        "keep_last": 2,
        "keep_every": None,
        "trackers": (),
        "sample_tokens": 500,
        "mesh": None,
    }


def test_the_default_is_what_learns_fastest_on_a_cpu():
    assert DEFAULT_PRESET == "modern-cpu"
