"""The configs of a run: frozen dataclasses, validated when they are made.

Attribute docstrings are the command line's help. Nothing here imports jax.
"""

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Literal

from jgpt.fields import (
    FRACTION,
    INT32,
    NOT_NEGATIVE,
    POSITIVE,
    Fields,
    Make,
    Rule,
    require_multiple,
    validate,
)

Activation = Literal["relu", "gelu", "gelu_tanh", "relu_squared", "silu"]
Dtype = Literal["bfloat16", "float32", "float64"]
ComputeDtype = Literal["auto", "float16", "bfloat16", "float32", "float64"]
AttentionKernel = Literal["auto", "xla", "cudnn"]
TokenizerName = Literal["char", "byte", "bpe", "gpt2"]
TrackerName = Literal["tensorboard", "wandb"]
MESH_AXES = ("data", "fsdp", "tensor")
"""The axes of a mesh: data parallelism, fully sharded data parallelism, tensor parallelism."""
DEFAULT_TEMPERATURE = 0.8
"""The sampling temperature of every function and command that takes one."""
CHAT_TOP_P = 0.95
"""The nucleus of a chat. Chat models are tuned to be sampled with one: at the temperature alone, an
answer sometimes has a token of another language or subject, and goes on from there."""
TOKENIZER_FIELDS = ("tokenizer", "tokenizer_files", "bpe_vocab_size")
"""The fields of a DataConfig that say which tokenizer to make."""

BYTES_AND_A_MERGE = Rule("be at least 257: 256 bytes and one merge", lambda value: value >= 257)
ASCENDING = Rule("be above 1 and ascending", lambda sizes: [1, *sizes] == sorted({1, *sizes}))
SOURCES = Rule("name a corpus (pydocs, shakespeare) or a file", lambda data: data and all(data))
PATTERNS = Rule("have patterns that aren't empty", all)
SEED = Rule("be at least 0 and below 2**32", lambda value: 0 <= value < 2**32)
DIRECTORY = Rule("name a directory", lambda path: path != "")
FOLDER_NAME = Rule(
    "be a plain folder name",
    lambda name: name not in ("", ".", "..") and not set(name) & set("/\\\0"),
)
Count = Annotated[int, POSITIVE, INT32]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]


@dataclass(frozen=True)
class ModelConfig(Fields):
    """The model. Families of GPT differ only by values of these fields."""

    architecture: Literal["gpt", "bigram"] = "gpt"
    """A GPT, or a bigram model: a table of next-token logits, whose only size is vocab_size."""
    vocab_size: Count = 65
    """Tokens in the vocabulary. Training takes it from the tokenizer."""
    block_size: Count = 64
    """The context length, in tokens."""
    num_layers: Count = 4
    """Transformer blocks."""
    num_heads: Count = 4
    """Attention heads per block."""
    num_kv_heads: Count | None = None
    """Key-value heads, each shared by a group of query heads (GQA); num_heads by default."""
    head_dim: Count | None = None
    """Features of each head; embed_dim / num_heads by default."""
    embed_dim: Count = 128
    """Features of the residual stream."""
    hidden_dim: Count | None = None
    """Hidden features of the MLP; four times embed_dim by default."""
    activation: Activation = "gelu"
    """The MLP's activation function; gelu is exact (erf), gelu_tanh is GPT-2's, silu is Llama's."""
    gated: bool = False
    """A gated MLP, such as SwiGLU: one projection's activations multiply those of another."""
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
    rotary_base: Positive = 10_000.0
    """The base of rotary embedding's frequencies."""
    norm: Literal["layer", "rms"] = "layer"
    """Layer norm or RMS norm."""
    norm_scale: bool = True
    """Learned scales in the norms."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance or mean square in norms."""
    qk_norm: bool = False
    """QK-norm: RMS norm of queries and keys."""
    qk_norm_scale: bool = False
    """Learned scales in QK-norm."""
    qk_norm_epsilon: Positive = 1e-6
    """Added to the mean square in QK-norm."""
    attention_scale: Positive | None = None
    """The scale of attention scores; head_dim ** -0.5 by default."""
    attention_window: Count | None = None
    """Sliding-window attention: positions a query attends to, its own included; all by default."""
    ngram_sizes: Annotated[tuple[int, ...], ASCENDING] = ()
    """The sizes of n-grams, such as 2 3. Their hashed embeddings are added to the token
    embeddings."""
    ngram_rows: Count = 8192
    """Rows of the embedding table for the n-grams of each size."""
    ngram_dropout: Fraction = 0.0
    """Dropout of a position's n-gram embeddings, all features at once."""
    zero_init: bool = False
    """Initialise output projections and an untied head with zeros."""
    embedding_shortcut: bool = False
    """Add the embeddings to the input of each block, times a learned scalar."""
    logit_softcap: Positive | None = None
    """Softcap of logits: cap * tanh(logits / cap)."""
    dropout: Fraction = 0.0
    """Dropout of embeddings, attention weights and residual branches."""
    dtype: ComputeDtype = "float32"
    """The dtype of matrix products. Softmax, norms and loss are in at least float32. auto is
    bfloat16 on TPUs and on GPUs since Ampere, float16 with a loss scale on Volta and Turing (such
    as a T4), else float32."""
    activation_dtype: ComputeDtype = "auto"
    """The dtype of activations between products. auto is dtype, but at least float32 on CPUs,
    where that is faster."""
    attention_kernel: AttentionKernel = "auto"
    """The attention kernel. auto is cuDNN's fused kernel where the GPU supports it; attention
    dropout always uses XLA's."""
    param_dtype: Dtype = "float32"
    """The dtype of parameters."""
    remat: bool = False
    """Rematerialisation: recompute each block in the backward pass, instead of storing its
    activations."""
    scan_layers: bool = False
    """Scan over the blocks, so that one block is compiled instead of all. Slower on CPUs."""
    make: Make = None
    """A custom model's class or function, called as make(config, rngs=rngs) instead of
    `architecture`. A run records its name and SHA-256."""

    def __post_init__(self) -> None:
        validate(self)
        if self.head_dim is None:
            require_multiple(self, "embed_dim", "num_heads")
        require_multiple(self, "num_heads", "num_kv_heads")
        conflicts = {
            "`head_bias=True` needs `tie_embeddings=False`: a tied head has no bias": (
                self.head_bias and self.tie_embeddings
            ),
            "`qk_norm_scale=True` needs `qk_norm=True`, whose scale it is": (
                self.qk_norm_scale and not self.qk_norm
            ),
            f"`ngram_sizes={self.ngram_sizes!r}` needs a `block_size` as large": (
                max(self.ngram_sizes, default=0) > self.block_size
            ),
            f"`positions='rotary'` needs an even head size: `embed_dim={self.embed_dim!r}` over "
            f"`num_heads={self.num_heads!r}` is {self.head_size}": (
                self.positions == "rotary" and self.head_size % 2
            ),
        }
        for message, is_broken in conflicts.items():
            if is_broken:
                raise ValueError(message)

    @property
    def head_size(self) -> int:
        """Features of each head, also by default."""
        return self.head_dim or self.embed_dim // self.num_heads


@dataclass(frozen=True)
class OptimizerConfig(Fields):
    """The optimizer: AdamW, or Muon for matrices, with a schedule and clipping."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all parameters, or Muon for the blocks' weight matrices and AdamW for the rest."""
    learning_rate: Positive = 1e-3
    """The peak learning rate."""
    min_learning_rate: NotNegative = 1e-4
    """The final learning rate of cosine and wsd; groups with another peak end at the same ratio."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warmup: cosine decay, constant, or wsd (warmup-stable-decay: constant, then linear
    decay)."""
    decay_fraction: Fraction = 0.5
    """The fraction of the steps in which wsd decays."""
    schedule_steps: Count | None = None
    """The steps that the schedule spans, after which its last learning rate stays; all by
    default."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 100
    """Steps of linear warmup."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices and embeddings, multiplied by the learning rate."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.99
    """Decay rate of the second moment."""
    gradient_clip: NotNegative = 1.0
    """Clip gradients to this global norm; 0 is off."""
    muon_learning_rate: Positive = 0.02
    """Muon's peak learning rate; learning_rate is for the other parameters."""
    muon_weight_decay: NotNegative = 0.0
    """Muon's decoupled weight decay, multiplied by Muon's learning rate."""
    embedding_learning_rate: Positive | None = None
    """The embeddings' peak learning rate; learning_rate by default."""
    ema_decay: Fraction = 0.0
    """Decay rate of an exponential moving average of the weights, which is evaluated and saved in
    their place; 0 is off."""
    trainable: Annotated[tuple[str, ...], PATTERNS] = ()
    """Patterns of the parameters to train, such as blocks.*.attention.*; the rest is frozen and has
    no moments. All are trained by default."""
    make: Make = None
    """A custom optimizer's function, called as make(config, steps) instead of `optimizer`. A run
    records its name and SHA-256."""

    def __post_init__(self) -> None:
        validate(self)
        if self.schedule != "constant" and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"`min_learning_rate={self.min_learning_rate!r}` is above "
                f"`learning_rate={self.learning_rate!r}`; lower it"
            )


@dataclass(frozen=True)
class DataConfig(Fields):
    """The data and its tokenizer."""

    data: Annotated[tuple[str, ...], SOURCES] = ("pydocs",)
    """The corpora pydocs or shakespeare, files and folders of text, JSON lines or Parquet, or a
    folder that `jgpt prepare` wrote."""
    tokenizer: TokenizerName = "char"
    """Characters, bytes, byte-pairs trained on the text, or GPT-2's byte-pairs from
    tokenizer_files. Prepared data brings its own."""
    bpe_vocab_size: Annotated[int, BYTES_AND_A_MERGE] = 1024
    """The vocabulary size of trained byte-pairs."""
    tokenizer_files: str | None = None
    """For gpt2, the folder with encoder.json and vocab.bpe, or vocab.json and merges.txt."""
    validation_fraction: Annotated[float, FRACTION, POSITIVE] = 0.1
    """The fraction of the text for validation, after the training text."""
    test_fraction: Fraction = 0.0
    """The fraction for testing, at the end of the text, for `jgpt eval --split test`."""
    data_field: str = "text"
    """The field or column of JSON lines and Parquet that has the text."""

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        validate(self)
        if self.held_out_fraction >= 1:
            raise ValueError(
                f"`validation_fraction={self.validation_fraction!r}` and "
                f"`test_fraction={self.test_fraction!r}` leave no text for training: lower them"
            )
        if self.tokenizer == "gpt2" and self.tokenizer_files is None:
            raise ValueError(
                f"`tokenizer={self.tokenizer!r}` needs `tokenizer_files`: the folder of "
                "encoder.json and vocab.bpe"
            )

    @property
    def held_out_fraction(self) -> float:
        """The fraction of the text that isn't trained on, in decimals: 0.01 and 0.06 give 0.07."""
        return float(Decimal(str(self.validation_fraction)) + Decimal(str(self.test_fraction)))


@dataclass(frozen=True)
class TrainConfig(Fields):
    """A training run. The same config on the same machine gives the same run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""
    dataset: DataConfig = field(default_factory=DataConfig)
    """The text and its tokenizer."""
    name: Annotated[str, FOLDER_NAME] = "gpt"
    """The name of the run's folder in runs/, unless out names one."""
    out: Annotated[str, DIRECTORY] | None = None
    """The run directory; runs/NAME by default, numbered if it exists."""
    seed: Annotated[int, SEED] = 1337
    """The seed of initial parameters, batches and dropout."""
    steps: Count = 2000
    """Optimizer steps."""
    batch_size: Count = 12
    """Sequences per step."""
    micro_batches: Count = 1
    """Gradient accumulation: split a batch into this many micro-batches, to save memory. A mesh
    that shards the batch needs fewer: the number is divided by data x fsdp."""
    eval_interval: Count = 250
    """Steps between evaluations and checkpoints; the last step always has both, and so has an
    eighth of the first interval."""
    eval_tokens: Count | None = 131_072
    """The most validation targets per evaluation, spread evenly over the split; None takes all."""
    steps_per_call: Count = 50
    """Steps per dispatch to the device."""
    patience: Count | None = None
    """Early stopping after this many evaluations without a better loss."""
    keep_best: Count = 1
    """The number of best checkpoints to keep."""
    keep_last: Count = 2
    """The number of last checkpoints to keep; two, in case one is damaged."""
    keep_every: Count | None = None
    """Also keep checkpoints whose step is a multiple of this."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers besides metrics.jsonl; each needs the extra of its name."""
    sample_tokens: Annotated[int, NOT_NEGATIVE] = 500
    """The length of the sample after training, in tokens; 0 for no sample."""
    mesh: str | None = None
    """The mesh of devices, such as data=2,fsdp=2,tensor=2: data shards the batch, fsdp also the
    train state, tensor heads and features. By default all accelerators over data, or over fsdp if
    one can't hold the train state."""
    objective: Make = None
    """What training minimises instead of the cross-entropy: the user's own function of (model,
    tokens, rngs). A run records its name and SHA-256."""

    def __post_init__(self) -> None:
        validate(self)
        require_multiple(self, "batch_size", "micro_batches")
        sizes = mesh_sizes(self.mesh or "data=1")
        parts = sizes["data"] * sizes["fsdp"]
        if self.batch_size % parts:
            raise ValueError(
                f"`mesh={self.mesh!r}` shards each batch over data x fsdp = {parts} devices, which "
                f"don't divide `batch_size={self.batch_size!r}`: give a multiple of {parts}"
            )


def mesh_sizes(mesh: str) -> dict[str, int]:
    """The sizes of a mesh's axes, from text such as `data=2,fsdp=4`. Raises ValueError."""
    sizes = {}
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES or axis in sizes or not re.fullmatch("[1-9][0-9]*", size):
            raise ValueError(
                f"`mesh={mesh!r}` must give sizes of the axes data, fsdp and tensor, each at most "
                "once, as in 'data=2,fsdp=4'"
            )
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in MESH_AXES}
