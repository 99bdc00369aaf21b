"""Models from configs: the LanguageModel protocol, create and abstract, parameters and FLOPs."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jgpt.config import ModelConfig, missing_case
from jgpt.contracts import typed
from jgpt.nn.bigram import BigramLM
from jgpt.nn.cache import KVCache
from jgpt.nn.transformer import GPT

Weights = PyTree[Float[Array, "..."]]
"""A model's parameters as a plain tree of arrays."""


@runtime_checkable
class LanguageModel(Protocol):
    """What training and generation need of a model."""

    vocab_size: int
    """Tokens in the vocabulary."""
    block_size: int
    """The longest context, in tokens."""
    supports_rolling_cache: bool
    """Whether decoding with a cache may go past `block_size`."""

    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time features"]:
        """Final hidden states."""
        ...

    def logits(self, x: Float[Array, "batch time features"]) -> Float[Array, "batch time vocab"]:
        """The language-model head."""
        ...

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Next-token logits: `logits(hidden(tokens))`."""
        ...

    def empty_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty KV cache for `batch` sequences of up to `capacity` positions."""
        ...


@typed
def create_model(config: ModelConfig, *, rngs: nnx.Rngs) -> LanguageModel:
    """The model that a config describes."""
    match config.architecture:
        case "gpt":
            return GPT(config, rngs=rngs)
        case "bigram":
            return BigramLM(config.vocab_size, param_dtype=config.param_dtype, rngs=rngs)
        case _:
            missing_case("architecture", config.architecture, __file__)


def abstract_model(config: ModelConfig) -> LanguageModel:
    """The same with abstract parameters: shapes and dtypes without memory."""
    return nnx.eval_shape(lambda: create_model(config, rngs=nnx.Rngs(0)))


@dataclass(frozen=True)
class Part:
    """A part of a model, summed over all blocks."""

    name: str
    parameters: int
    size: int
    """In bytes."""
    product_parameters: int
    """Parameters that take part in a matrix product for each token."""


def parts_of(config: ModelConfig) -> tuple[Part, ...]:
    """A model's parts and their parameter counts, in the order of the forward pass."""
    leaves: dict[str, list[tuple[str, nnx.Variable]]] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(abstract_model(config), nnx.Param)):
        part = f"{path[0]}.{path[2]}" if path[0] == "blocks" else str(path[0])
        leaves.setdefault(part, []).append((str(path[-1]), leaf))
    tied = {"token_embedding"} if config.tie_embeddings else set()
    parts = (
        Part(
            name,
            parameters=sum(leaf.size for _, leaf in own),
            size=sum(leaf.size * leaf.dtype.itemsize for _, leaf in own),
            product_parameters=sum(
                leaf.size for kind, leaf in own if kind == "kernel" or name in tied
            ),
        )
        for name, own in leaves.items()
    )
    order = ("token", "position", "ngram", "shortcut", "blocks", "final", "head", "table")
    return tuple(sorted(parts, key=lambda part: order.index(part.name.split("_")[0].split(".")[0])))


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of a forward pass per token, at full context.

    Matrix products only, attention counted without the causal mask but within its window
    (Chowdhery et al. 2022, appendix B). A training step takes three times that.
    """
    if config.architecture == "bigram":
        return 0
    products = sum(part.product_parameters for part in parts_of(config))
    reach = min(config.block_size, config.attention_window or config.block_size)
    attention = 2 * config.num_layers * reach * config.num_heads * config.head_size
    return 2 * (products + attention)
