"""Presets: named configs."""

from dataclasses import replace

from jgpt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.words import did_you_mean

_modern = TrainConfig(
    name="modern",
    model=ModelConfig(
        block_size=128,
        num_layers=4,
        num_heads=3,
        embed_dim=96,
        activation="relu_squared",
        tie_embeddings=False,
        positions="rotary",
        norm="rms",
        qk_norm=True,
        zero_init=True,
    ),
    optimizer=OptimizerConfig(
        optimizer="muon",
        muon_learning_rate=0.012,
        muon_weight_decay=0.1,
        learning_rate=8e-3,
        embedding_learning_rate=0.04,
        min_learning_rate=0.0,
        schedule="wsd",
        decay_fraction=0.75,
        warmup_steps=0,
        beta1=0.8,
        beta2=0.95,
        gradient_clip=0.0,
    ),
    steps=2000,
    batch_size=16,
    eval_interval=500,
)

_modern_cpu = replace(
    _modern,
    name="modern-cpu",
    model=replace(
        _modern.model,
        block_size=256,
        norm_scale=False,
        attention_scale=0.12,
        attention_window=32,
        ngram_sizes=(2, 3, 4),
        ngram_dropout=0.2,
        embedding_shortcut=True,
        logit_softcap=15.0,
    ),
    optimizer=replace(_modern.optimizer, decay_fraction=0.5),
    steps=1700,
    batch_size=8,
    eval_interval=425,
)

_shakespeare_best = replace(
    _modern_cpu,
    name="shakespeare-best",
    model=replace(_modern_cpu.model, block_size=512, dropout=0.05),
    optimizer=replace(_modern_cpu.optimizer, weight_decay=0.3, ema_decay=0.995),
    dataset=DataConfig(data=("shakespeare",)),
    batch_size=4,
    steps=5000,
    eval_interval=500,
)

# nanoGPT's train.py: 491,520 tokens a step, 295 billion together
_gpt2 = TrainConfig(
    name="gpt2",
    model=ModelConfig(
        vocab_size=50257,
        block_size=1024,
        num_layers=12,
        num_heads=12,
        embed_dim=768,
        activation="gelu_tanh",
        qkv_bias=True,
        use_bias=True,
        dtype="auto",
    ),
    optimizer=OptimizerConfig(
        learning_rate=6e-4, min_learning_rate=6e-5, warmup_steps=2000, beta2=0.95
    ),
    dataset=DataConfig(tokenizer="bpe", bpe_vocab_size=50257),
    steps=600_000,
    batch_size=480,
    micro_batches=40,
    steps_per_call=10,
    eval_interval=2000,
    eval_tokens=1 << 20,
)


def _larger_gpt2(
    name: str, num_layers: int, num_heads: int, embed_dim: int, rate: float, batch_size: int = 480
) -> TrainConfig:
    """A larger GPT-2 (Radford et al. 2019, table 2), over as many tokens.

    Learning rate and tokens a step are GPT-3's of the nearest size (Brown et al. 2020, table 2.1):
    350M, 760M and 1.3B parameters, 0.5M, 0.5M and 1M tokens.
    """
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "embed_dim": embed_dim}
    times = batch_size // _gpt2.batch_size
    return replace(
        _gpt2,
        name=name,
        model=replace(_gpt2.model, **sizes, remat=True, scan_layers=True),
        optimizer=replace(
            _gpt2.optimizer,
            learning_rate=rate,
            min_learning_rate=rate / 10,
            warmup_steps=_gpt2.optimizer.warmup_steps // times,
        ),
        steps=_gpt2.steps // times,
        batch_size=batch_size,
        micro_batches=_gpt2.micro_batches * times,
        eval_interval=_gpt2.eval_interval // times,
    )


_modern_7b = TrainConfig(
    name="modern-7b",
    model=replace(
        _modern_cpu.model,
        vocab_size=32768,
        block_size=4096,
        num_layers=32,
        num_heads=32,
        embed_dim=4096,
        attention_window=None,
        ngram_sizes=(),
        ngram_dropout=0.0,
        dtype="auto",
        remat=True,
        scan_layers=True,
    ),
    # LLaMA 7B's (Touvron et al. 2023, section 2.3 and table 2)
    optimizer=replace(_gpt2.optimizer, learning_rate=3e-4, min_learning_rate=3e-5),
    dataset=DataConfig(tokenizer="bpe", bpe_vocab_size=32768),
    steps=250_000,
    batch_size=1024,
    micro_batches=1024,
    steps_per_call=10,
    eval_interval=1000,
    eval_tokens=1 << 22,
)

_plain = OptimizerConfig(warmup_steps=0, gradient_clip=0.0)
_bigram = TrainConfig(
    name="bigram",
    model=ModelConfig(architecture="bigram", block_size=8),
    optimizer=replace(_plain, learning_rate=0.02, min_learning_rate=0.0, weight_decay=0.0),
    steps=4000,
    batch_size=128,
    eval_interval=1000,
    steps_per_call=200,
)
_lecture = TrainConfig(
    name="lecture",
    model=ModelConfig(
        block_size=32,
        embed_dim=64,
        activation="relu",
        use_bias=True,
        head_bias=True,
        tie_embeddings=False,
    ),
    optimizer=replace(_plain, schedule="constant", weight_decay=0.01, beta2=0.999),
    steps=5000,
    batch_size=16,
    eval_interval=2000,
)
# nanoGPT evaluates every 250 steps, on samples; on all of tiny Shakespeare that is 16% of the FLOPs
_nanogpt_cpu = TrainConfig(name="nanogpt-cpu", eval_interval=1000)
_nanogpt_char = TrainConfig(
    name="nanogpt-char",
    model=ModelConfig(
        block_size=256, num_layers=6, num_heads=6, embed_dim=384, dropout=0.2, dtype="auto"
    ),
    steps=5000,
    batch_size=64,
)
_tiny = TrainConfig(
    name="tiny",
    model=ModelConfig(block_size=16, num_layers=2, num_heads=2, embed_dim=32),
    optimizer=OptimizerConfig(learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=10),
    steps=200,
    batch_size=8,
    eval_interval=200,
    sample_tokens=100,
)

_presets = (
    ("the lecture's bigram model", _bigram),
    ("the lecture's GPT: ReLU, biases, untied head", _lecture),
    ("rotary, RMS norm, QK-norm, squared ReLU, Muon", _modern),
    ("modern, windows and n-grams; fastest on a CPU", _modern_cpu),
    ("the lowest loss on tiny Shakespeare", _shakespeare_best),
    ("nanoGPT's laptop setting: 4 layers, 128 features, block 64", _nanogpt_cpu),
    ("nanoGPT's Shakespeare setting for a GPU: 6 layers, 384 features, block 256", _nanogpt_char),
    ("GPT-2 124M: 12 layers, 768 features, BPE", _gpt2),
    ("GPT-2 355M: 24 layers, 1024 features", _larger_gpt2("gpt2-medium", 24, 16, 1024, 3e-4)),
    ("GPT-2 774M: 36 layers, 1280 features", _larger_gpt2("gpt2-large", 36, 20, 1280, 2.5e-4)),
    ("GPT-2 1.6B: 48 layers, 1600 features", _larger_gpt2("gpt2-xl", 48, 25, 1600, 2e-4, 960)),
    ("a 7B of the modern family, block 4096", _modern_7b),
    ("a small GPT that trains in seconds", _tiny),
)
PRESETS = {config.name: (summary, config) for summary, config in _presets}
"""A description and a config per preset."""

DEFAULT_PRESET = "modern"


def preset(name: str) -> TrainConfig:
    """Return the config of a preset. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(
            f"unknown preset {name!r}{did_you_mean(str(name), PRESETS)}; "
            f"the presets are {', '.join(PRESETS)}"
        )
    return PRESETS[name][1]
