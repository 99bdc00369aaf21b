"""What a model, an optimizer and a run are made of: frozen dataclasses, checked when made.

Their attribute docstrings are the command line's help. Nothing here imports jax.
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
MAX_LAYERS = 1024  # a config from anywhere must not take hours to look at

_ints_are_floats = BeartypeConf(is_pep484_tower=True)


def _check_types(config: Any) -> None:
    """Wrong types come from JSON that somebody edited, and from Python callers."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        # bool is an int to Python, and never what a size means
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
    """The transformer's shape and parts. Families of GPT differ by these values alone."""

    architecture: Literal["gpt", "bigram"] = "gpt"
    """A transformer, or the lecture's table of next-token logits (which has no other size than
    the vocabulary's)."""
    vocab_size: int = 65
    """Tokens the model can name. Training takes it from the tokenizer."""
    block_size: int = 64
    """The longest context, in tokens."""
    num_layers: int = 4
    """Blocks on top of each other."""
    num_heads: int = 4
    """Attention heads in a block."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each read by a group of query heads; as many by default."""
    embed_dim: int = 128
    """Features of the residual stream."""
    hidden_dim: int | None = None
    """Features inside the feed-forward; four times embed_dim by default."""
    activation: Activation = "gelu"
    """The feed-forward's non-linearity; gelu is exact (erf), gelu_tanh is GPT-2's."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections."""
    use_bias: bool = False
    """Biases in the output projections, the feed-forward and layer norms."""
    head_bias: bool = False
    """A bias in the language-model head (untied heads only)."""
    tie_embeddings: bool = True
    """The language-model head is the token embedding transposed."""
    positions: Literal["learned", "rotary"] = "learned"
    """A vector learned for each position, or queries and keys turned by it."""
    norm: NormKind = "layer"
    """Layer norm, or division by the root of the mean square."""
    norm_scale: bool = True
    """A learned scale in the norms."""
    norm_epsilon: float = 1e-5
    """Added to the variance, or to the mean square, in norms."""
    qk_norm: bool = False
    """Queries and keys divided by the root of their mean square."""
    attention_scale: float | None = None
    """What affinities are multiplied with; one over the root of the head's size by default."""
    attention_window: int | None = None
    """The last positions that a query reads, its own included; all of the block by default."""
    ngram_sizes: tuple[int, ...] = ()
    """Lengths of n-grams whose embeddings are added to the tokens', such as (2, 3)."""
    ngram_rows: int = 8192
    """Rows of embeddings for the n-grams of each length, which a hash finds."""
    ngram_dropout: float = 0.0
    """How often, in training, a position goes without the embeddings of its n-grams."""
    zero_init: bool = False
    """Projections into the residual stream, and an untied head, begin at zero."""
    embedding_shortcut: bool = False
    """Each block also reads the embeddings, scaled by a number that it learns."""
    logit_softcap: float | None = None
    """Logits are bent, by a tanh, to stay below this."""
    dropout: float = 0.0
    """Dropout after the embeddings, on attention weights, and on each residual branch."""
    dtype: ComputeDtype = "float32"
    """What products are computed in. Softmax, norms and loss are never below float32. auto is
    bfloat16 on a TPU and on GPUs since Ampere, else float32."""
    activation_dtype: ComputeDtype = "auto"
    """What is kept between products. auto is dtype, but on a CPU at least float32, which is faster
    there."""
    attention_kernel: AttentionKernel = "auto"
    """What computes attention; auto is cuDNN's fused kernel on GPUs that have it for such heads,
    unless weights are dropped."""
    param_dtype: Dtype = "float32"
    """What parameters are stored in."""
    rematerialise: bool = False
    """Compute each block again in the backward pass instead of keeping its activations."""

    def __post_init__(self) -> None:
        """Refuse what can't be built."""
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
                f"positions=rotary turns pairs: embed_dim={self.embed_dim} over "
                f"num_heads={self.num_heads} must be even"
            )
        _require_fraction(self, "dropout", "ngram_dropout")
        if list(self.ngram_sizes) != sorted({n for n in self.ngram_sizes if n > 1}):
            raise ValueError(f"ngram_sizes={self.ngram_sizes} must be above 1, and ascend")
        if self.ngram_sizes and self.ngram_sizes[-1] > self.block_size:
            raise ValueError(
                f"ngram_sizes={self.ngram_sizes} must be at most block_size={self.block_size}"
            )
        if self.head_bias and self.tie_embeddings:
            raise ValueError("head_bias=True needs tie_embeddings=False: a tied head has no bias")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices, with decoupled decay, a schedule, and clipping."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all parameters, or Muon for the matrices inside the blocks."""
    learning_rate: float = 1e-3
    """The peak learning rate."""
    min_learning_rate: float = 1e-4
    """Where the cosine, or wsd's line, ends; peaks of their own end at the same part of theirs."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warmup: down a half cosine until the last step, flat, or flat and then down a line
    (warmup-stable-decay)."""
    decay_fraction: float = 0.5
    """The part of the steps in which wsd goes down."""
    warmup_steps: int = 100
    """Steps of linear warmup."""
    weight_decay: float = 0.1
    """Decoupled decay (times the learning rate) of matrices; vectors are never decayed."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.99
    """Decay of the mean of their squares."""
    gradient_clip: float = 1.0
    """The largest global gradient norm; 0 never clips."""
    muon_learning_rate: float = 0.02
    """Muon's peak learning rate; learning_rate is then that of all other parameters."""
    muon_weight_decay: float = 0.0
    """Muon's decoupled decay, times its learning rate."""
    muon_momentum: float = 0.95
    """Decay of Muon's mean of the gradients."""
    embedding_learning_rate: float | None = None
    """The embeddings' peak learning rate; learning_rate by default."""

    def __post_init__(self) -> None:
        """Refuse what can't train."""
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
    """Which text, and how it becomes tokens."""

    data: tuple[str, ...] = ("pydocs",)
    """The corpora pydocs or shakespeare, UTF-8 files, folders of .txt, or one folder that
    `jgpt prepare` wrote."""
    tokenizer: TokenizerName = "char"
    """Characters, bytes, byte-pairs trained on the text, or GPT-2's byte-pairs from
    tokenizer_files. Prepared data brings its own."""
    bpe_vocab_size: int = 1024
    """Vocabulary to train byte-pairs for."""
    tokenizer_files: str | None = None
    """The folder of encoder.json and vocab.bpe (or vocab.json and merges.txt) for gpt2."""
    validation_fraction: float = 0.1
    """The end of the text that is held out."""

    def __post_init__(self) -> None:
        """Refuse an empty selection and impossible splits."""
        _check_types(self)
        for source in self.data:
            if not isinstance(source, str):  # a tuple's type check samples one item
                raise ValueError(f"data={self.data!r} must be names and paths, not {source!r}")
        if not self.data or not all(self.data):
            raise ValueError("data is empty: name a corpus (pydocs, shakespeare) or a file")
        if self.bpe_vocab_size < 257:
            raise ValueError(
                f"bpe_vocab_size={self.bpe_vocab_size} is below 257: all 256 bytes and one merge"
            )
        _require_fraction(self, "validation_fraction")
        _require_positive(self, "validation_fraction")
        if self.tokenizer == "gpt2" and self.tokenizer_files is None:
            raise ValueError(
                "tokenizer=gpt2 needs tokenizer_files: the folder of encoder.json and vocab.bpe"
            )


@dataclass(frozen=True)
class TrainConfig:
    """One training run, whole: the same config on the same machine gives the same run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dataset: DataConfig = field(default_factory=DataConfig)
    name: str = "gpt"
    """Names the run's folder below runs/ when out is not given."""
    out: str | None = None
    """The run directory; runs/NAME, numbered if taken, by default."""
    seed: int = 1337
    """Decides parameters, batches and dropout."""
    steps: int = 2000
    """Optimizer steps."""
    batch_size: int = 12
    """Sequences in a step."""
    micro_batches: int = 1
    """Parts that a step's batch is computed in, one after the other: less memory, same result."""
    eval_interval: int = 250
    """Steps between exact evaluations and checkpoints; the last step always has both."""
    eval_tokens: int | None = None
    """Held-out tokens in an evaluation; all of them by default."""
    steps_per_call: int = 50
    """Steps that the device takes without coming back."""
    patience: int | None = None
    """Evaluations in a row without a better loss after which training stops early."""
    keep_best: int = 1
    """Checkpoints to keep for their validation loss."""
    keep_last: int = 2
    """The newest checkpoints to keep; two, so that damage to the last one is no loss."""
    keep_every: int | None = None
    """Keep each checkpoint whose step is a multiple of this, too."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go besides metrics.jsonl; each is an extra of the same name."""
    sample_tokens: int = 500
    """Tokens in the sample at the end; 0 for none."""

    def __post_init__(self) -> None:
        """Refuse what can't run."""
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
    """A config as JSON text, one field a line."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(kind: type[Config], text: str) -> Config:
    """A config from what `to_json` wrote. Raises ValueError for anything else."""
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
    """A suggestion to put behind an unknown word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
