"""Configs: frozen dataclasses, validated when made, JSON on disk.

Attribute docstrings are the command line's help. Nothing here imports jax.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_type_hints

from beartype import BeartypeConf
from beartype.door import is_bearable

Config = TypeVar("Config")
Activation = Literal["relu", "gelu", "gelu_tanh", "relu_squared"]
NormKind = Literal["layer", "rms"]
Dtype = Literal["bfloat16", "float32", "float64"]
ComputeDtype = Literal["auto", "bfloat16", "float32", "float64"]
AttentionKernel = Literal["auto", "xla", "cudnn"]
TokenizerName = Literal["char", "byte", "bpe", "gpt2"]
TrackerName = Literal["tensorboard", "wandb"]
MAX_LAYERS = 1024  # bounds the work on a config from an untrusted file
MAX_BPE_VOCAB_SIZE = 1 << 20  # tokenizers reserves memory for all of it, and aborts if it can't

_ints_are_floats = BeartypeConf(is_pep484_tower=True)


def _check_types(config: Any) -> None:
    """Raise ValueError for a field of another type, as from edited JSON."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        # a bool is an int to Python
        if not is_bearable(value, hint, conf=_ints_are_floats) or (
            isinstance(value, bool) and hint is not bool
        ):
            expected = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ValueError(f"{name}={value!r} must be {expected.replace('typing.', '')}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite")


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) is not None and getattr(config, name) <= 0:
            raise ValueError(f"{name}={getattr(config, name)} must be positive")


def _require_not_negative(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)} must not be negative")


def _require_fraction(config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 0 and below 1")


def _require_multiple(config: Any, name: str, of: str) -> None:
    value, divisor = getattr(config, name), getattr(config, of)
    if value % divisor:
        raise ValueError(f"{name}={value} must be divisible by {of}={divisor}")


@dataclass(frozen=True)
class ModelConfig:
    """The model. Families of GPT differ only by values of these fields."""

    architecture: Literal["gpt", "bigram"] = "gpt"
    """A GPT, or a bigram model: a table of next-token logits, whose only size is vocab_size."""
    vocab_size: int = 65
    """Tokens in the vocabulary. Training takes it from the tokenizer."""
    block_size: int = 64
    """The context length, in tokens."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads per block."""
    num_kv_heads: int | None = None
    """Key-value heads, each shared by a group of query heads (GQA); num_heads by default."""
    embed_dim: int = 128
    """Features of the residual stream."""
    hidden_dim: int | None = None
    """Hidden features of the MLP; four times embed_dim by default."""
    activation: Activation = "gelu"
    """The MLP's activation function; gelu is exact (erf), gelu_tanh is GPT-2's."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections."""
    use_bias: bool = False
    """Biases in output projections, MLP and layer norms."""
    head_bias: bool = False
    """A bias in the language-model head, which must be untied."""
    tie_embeddings: bool = True
    """Share the token embedding's weights with the language-model head."""
    positions: Literal["learned", "rotary"] = "learned"
    """Learned position embeddings, or rotary embedding of queries and keys."""
    norm: NormKind = "layer"
    """Layer norm or RMS norm."""
    norm_scale: bool = True
    """Learned scales in the norms."""
    norm_epsilon: float = 1e-5
    """Added to the variance or mean square in norms."""
    qk_norm: bool = False
    """QK-norm: RMS norm of queries and keys, without scales."""
    attention_scale: float | None = None
    """The scale of attention scores; head_dim ** -0.5 by default."""
    attention_window: int | None = None
    """Sliding-window attention: positions a query attends to, its own included; all by default."""
    ngram_sizes: tuple[int, ...] = ()
    """Sizes of n-grams whose hashed embeddings are added to the tokens', such as 2 3."""
    ngram_rows: int = 8192
    """Rows of the embedding table for the n-grams of each size."""
    ngram_dropout: float = 0.0
    """Dropout of a position's n-gram embeddings, all features at once."""
    zero_init: bool = False
    """Initialise output projections and an untied head with zeros."""
    embedding_shortcut: bool = False
    """Add the embeddings to the input of each block, times a learned scalar."""
    logit_softcap: float | None = None
    """Softcap of logits: cap * tanh(logits / cap)."""
    dropout: float = 0.0
    """Dropout of embeddings, attention weights and residual branches."""
    dtype: ComputeDtype = "float32"
    """The dtype of matrix products. Softmax, norms and loss are in at least float32. auto is
    bfloat16 on TPUs and on GPUs since Ampere, else float32."""
    activation_dtype: ComputeDtype = "auto"
    """The dtype of activations between products. auto is dtype, but at least float32 on CPUs,
    where that is faster."""
    attention_kernel: AttentionKernel = "auto"
    """The attention kernel. auto is cuDNN's fused kernel where the GPU supports it; attention
    dropout always uses XLA's."""
    param_dtype: Dtype = "float32"
    """The dtype of parameters."""
    rematerialise: bool = False
    """Rematerialise: recompute each block in the backward pass instead of storing activations."""

    def __post_init__(self) -> None:
        """Validate."""
        _check_types(self)
        _require_positive(self, "vocab_size", "block_size", "num_layers", "num_heads")
        _require_positive(self, "embed_dim", "hidden_dim", "norm_epsilon")
        _require_positive(self, "num_kv_heads", "attention_scale", "logit_softcap")
        _require_positive(self, "attention_window", "ngram_rows")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers={self.num_layers} must be at most {MAX_LAYERS}")
        _require_multiple(self, "embed_dim", "num_heads")
        if self.num_kv_heads is not None:
            _require_multiple(self, "num_heads", "num_kv_heads")
        if self.positions == "rotary" and self.embed_dim // self.num_heads % 2:
            raise ValueError(
                f"positions=rotary needs an even head size: embed_dim={self.embed_dim} over "
                f"num_heads={self.num_heads} is {self.embed_dim // self.num_heads}"
            )
        _require_fraction(self, "dropout", "ngram_dropout")
        if list(self.ngram_sizes) != sorted({n for n in self.ngram_sizes if n > 1}):
            raise ValueError(f"ngram_sizes={self.ngram_sizes} must be above 1 and ascending")
        if self.ngram_sizes and self.ngram_sizes[-1] > self.block_size:
            raise ValueError(
                f"ngram_sizes={self.ngram_sizes} must be at most block_size={self.block_size}"
            )
        if self.head_bias and self.tie_embeddings:
            raise ValueError("head_bias=True needs tie_embeddings=False: a tied head has no bias")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer: AdamW, or Muon for matrices, with a schedule and clipping."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all parameters, or Muon for the blocks' weight matrices and AdamW for the rest."""
    learning_rate: float = 1e-3
    """The peak learning rate."""
    min_learning_rate: float = 1e-4
    """The final learning rate of cosine and wsd; groups with another peak end at the same ratio."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warmup: cosine decay, constant, or wsd (warmup-stable-decay: constant, then linear
    decay)."""
    decay_fraction: float = 0.5
    """The fraction of the steps in which wsd decays."""
    warmup_steps: int = 100
    """Steps of linear warmup."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings, times the learning rate."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.99
    """Decay rate of the second moment."""
    gradient_clip: float = 1.0
    """Clip gradients to this global norm; 0 is off."""
    muon_learning_rate: float = 0.02
    """Muon's peak learning rate; learning_rate is that of the other parameters."""
    muon_weight_decay: float = 0.0
    """Muon's decoupled weight decay, times its learning rate."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    embedding_learning_rate: float | None = None
    """The embeddings' peak learning rate; learning_rate by default."""

    def __post_init__(self) -> None:
        """Validate."""
        _check_types(self)
        _require_positive(self, "learning_rate", "muon_learning_rate", "embedding_learning_rate")
        _require_not_negative(
            self, "min_learning_rate", "warmup_steps", "weight_decay", "gradient_clip"
        )
        _require_not_negative(self, "muon_weight_decay")
        _require_fraction(self, "beta1", "beta2", "muon_momentum", "decay_fraction")
        if self.schedule != "constant" and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate={self.min_learning_rate} is above "
                f"learning_rate={self.learning_rate}; lower it"
            )


@dataclass(frozen=True)
class DataConfig:
    """The data and its tokenizer."""

    data: tuple[str, ...] = ("pydocs",)
    """The corpora pydocs or shakespeare, UTF-8 files, folders of .txt, or one folder that
    `jgpt prepare` wrote."""
    tokenizer: TokenizerName = "char"
    """Characters, bytes, byte-pairs trained on the text, or GPT-2's byte-pairs from
    tokenizer_files. Prepared data brings its own."""
    bpe_vocab_size: int = 1024
    """The vocabulary size of trained byte-pairs."""
    tokenizer_files: str | None = None
    """The folder of encoder.json and vocab.bpe (or vocab.json and merges.txt) for gpt2."""
    validation_fraction: float = 0.1
    """The fraction of the text, at its end, for validation."""

    def __post_init__(self) -> None:
        """Validate."""
        _check_types(self)
        for source in self.data:
            if not isinstance(source, str):  # beartype checks one item only
                raise ValueError(f"data={self.data!r} must be names and paths, not {source!r}")
        if not self.data or not all(self.data):
            raise ValueError("data is empty: name a corpus (pydocs, shakespeare) or a file")
        if self.bpe_vocab_size < 257:
            raise ValueError(
                f"bpe_vocab_size={self.bpe_vocab_size} is below 257: 256 bytes and one merge"
            )
        _require_fraction(self, "validation_fraction")
        _require_positive(self, "validation_fraction")
        if self.bpe_vocab_size > MAX_BPE_VOCAB_SIZE:
            raise ValueError(
                f"bpe_vocab_size={self.bpe_vocab_size} must be at most {MAX_BPE_VOCAB_SIZE}"
            )
        if self.tokenizer == "gpt2" and self.tokenizer_files is None:
            raise ValueError(
                "tokenizer=gpt2 needs tokenizer_files: the folder of encoder.json and vocab.bpe"
            )


@dataclass(frozen=True)
class TrainConfig:
    """A training run. The same config on the same machine gives the same run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dataset: DataConfig = field(default_factory=DataConfig)
    name: str = "gpt"
    """The name of the run's folder in runs/ if out is not given."""
    out: str | None = None
    """The run directory; runs/NAME by default, numbered if it exists."""
    seed: int = 1337
    """The seed of initial parameters, batches and dropout."""
    steps: int = 2000
    """Optimizer steps."""
    batch_size: int = 12
    """Sequences per step."""
    micro_batches: int = 1
    """Gradient accumulation: split a batch into this many micro-batches, to save memory."""
    eval_interval: int = 250
    """Steps between evaluations and checkpoints; the last step always has both."""
    eval_tokens: int | None = None
    """Validation tokens per evaluation; all by default."""
    steps_per_call: int = 50
    """Steps per dispatch to the device."""
    patience: int | None = None
    """Early stopping after this many evaluations without a better loss."""
    keep_best: int = 1
    """How many of the best checkpoints to keep."""
    keep_last: int = 2
    """How many of the last checkpoints to keep; two, in case one is damaged."""
    keep_every: int | None = None
    """Also keep checkpoints whose step is a multiple of this."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers besides metrics.jsonl; each needs the extra of its name."""
    sample_tokens: int = 500
    """Tokens of the sample after training; 0 for none."""

    def __post_init__(self) -> None:
        """Validate."""
        _check_types(self)
        _require_positive(self, "steps", "batch_size", "eval_interval", "steps_per_call")
        _require_positive(self, "micro_batches", "patience", "keep_best", "keep_last", "keep_every")
        _require_not_negative(self, "seed", "sample_tokens")
        _require_multiple(self, "batch_size", "micro_batches")
        if self.eval_tokens is not None and self.eval_tokens <= self.model.block_size:
            raise ValueError(
                f"eval_tokens={self.eval_tokens} must be above block_size={self.model.block_size}"
            )
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} must be below 2**32")
        if not self.name or set(self.name) & set("/\\\0"):
            raise ValueError(f"name={self.name!r} must be a plain folder name")


def to_json(config: Any) -> str:
    """Serialise as JSON, one field per line."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(kind: type[Config], text: str) -> Config:
    """The inverse of `to_json`. Raises ValueError for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return _from_dict(kind, values)


def _from_dict(kind: type[Config], values: Any) -> Config:
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} must be an object, not {type(values).__name__}")
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise ValueError(
                f"{kind.__name__} has no field {name!r}{did_you_mean(str(name), hints)}"
            )
    fields = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            value = _from_dict(hints[name], value)
        elif isinstance(value, list):
            value = tuple(value)
        fields[name] = value
    return kind(**fields)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown word, to append to a message, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
