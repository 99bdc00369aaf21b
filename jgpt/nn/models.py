"""Models from configs: the LanguageModel protocol, create and abstract, parameters and FLOPs."""

import functools
from typing import Any, Protocol, assert_never, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jgpt.config import ModelConfig
from jgpt.nn.bigram import BigramLM
from jgpt.nn.cache import KVCache
from jgpt.nn.transformer import GPT
from jgpt.parallel.rules import Dimensions, dimensions_of
from jgpt.user_code import require_code

Weights = PyTree[Float[Array, "..."]]
"""A model's parameters as a plain tree of arrays."""


@runtime_checkable
class LanguageModel(Protocol):
    """The interface that training and generation require of an `nnx.Module`.

    The model is causal: the logits at a position depend on no later token.
    """

    vocab_size: int
    """The number of tokens in the vocabulary."""
    block_size: int
    """The length of the longest context, in tokens."""

    def hidden(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time features"]:
        """Return final hidden states; `rngs` has a stream `dropout` in training."""
        ...

    def logits(self, x: Float[Array, "batch time features"]) -> Float[Array, "batch time vocab"]:
        """Return the logits for hidden states, from the language-model head."""
        ...

    def __call__(
        self, tokens: Int[Array, "batch time"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch time vocab"]:
        """Return next-token logits: `logits(hidden(tokens))`."""
        ...


@runtime_checkable
class CachedLanguageModel(LanguageModel, Protocol):
    """A language model with a KV cache."""

    supports_rolling_cache: bool
    """Whether decoding with a cache may continue past `block_size`."""

    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time features"]:
        """Return final hidden states; `tokens` continue the sequences in a cache."""
        ...

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Return next-token logits; `tokens` continue the sequences in a cache."""
        ...

    def empty_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """Return an empty KV cache for `batch` sequences of up to `capacity` positions."""
        ...


@runtime_checkable
class GatheredHead(Protocol):
    """A language model that can gather its head over a mesh once, for many calls."""

    def gather_head(self) -> None:
        """Replace the head's weights by gathered ones, in a trace."""
        ...


def create_model(config: ModelConfig, *, rngs: nnx.Rngs) -> LanguageModel:
    """Make the model that a config describes.

    Raises ValueError if a custom model lacks a part of `LanguageModel`.
    """
    if config.make is not None:
        make = require_code(config.make, "model")
        model = make(config, rngs=rngs)
        _require_language_model(model, config)
        return model
    match config.architecture:
        case "gpt":
            return GPT(config, rngs=rngs)
        case "bigram":
            return BigramLM(config.vocab_size, param_dtype=config.param_dtype, rngs=rngs)
        case _:
            assert_never(config.architecture)


def is_built_in(model: LanguageModel) -> bool:
    """Return whether a config alone describes a model's class, without custom code."""
    return type(model) in (GPT, BigramLM)


def _require_language_model(model: nnx.Module, config: ModelConfig) -> None:
    kind = type(model).__name__
    # Before `isinstance` of a protocol, which doesn't name the missing attribute.
    required = ("vocab_size", "block_size", "hidden", "logits", "__call__")
    missing = [name for name in required if not hasattr(model, name)]
    if missing:
        raise ValueError(f"a {kind} lacks {', '.join(missing)}, which jgpt.LanguageModel has")
    # The config's sizes are those of the tokenizer and of the batches.
    for name in ("vocab_size", "block_size"):
        value = getattr(model, name)
        expected = getattr(config, name)
        if value != expected:
            raise ValueError(f"{kind}.{name} is {value}, not the config's {expected}")


def require_parameters_only(model: Any) -> None:
    """Raise ValueError for a model with other state, such as batch statistics.

    A train step of `fit` returns only weights, so that it would be lost.
    """
    kind = type(model).__name__
    others = set()
    for _, leaf in nnx.to_flat_state(nnx.state(model)):
        if not isinstance(leaf, nnx.Param):
            others.add(type(leaf).__name__)
    if others:
        raise ValueError(
            f"a {kind} holds {', '.join(sorted(others))}: `fit` trains nnx.Param alone, keys for "
            "dropout come in through the call's rngs, and a training of your own, begun with "
            "`jgpt.Run.start`, can keep other state"
        )


def abstract_model(config: ModelConfig) -> LanguageModel:
    """Make the model of `create_model` with abstract parameters: shapes and dtypes without
    memory."""
    if config.make is not None:  # never cached, since a notebook may change this code
        return nnx.eval_shape(lambda: create_model(config, rngs=nnx.Rngs(0)))
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    graph, state = _traced(config, jax.sharding.get_abstract_mesh(), x64)
    return nnx.merge(graph, state, copy=True)  # callers may change their copy; the cached one stays


def weights_of(model: Any) -> dict[str, Any]:
    """Return a model's parameters, also abstract ones, as a plain tree."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def named_parameters(model: Any) -> dict[str, nnx.Variable]:
    """Return a model's parameters by path, such as blocks.0.attention.query.kernel."""
    named = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(str(key) for key in path)
        named[name] = parameter
    return named


def weight_dimensions(config: ModelConfig) -> dict[str, Dimensions]:
    """Return the dimension names of a model's parameters by path."""
    parameters = named_parameters(abstract_model(config))
    return {path: dimensions_of(parameter) for path, parameter in parameters.items()}


@functools.lru_cache(maxsize=64)
def _traced(config: ModelConfig, *_context: object) -> tuple[nnx.GraphDef, nnx.State]:
    """Return a cached abstract model, since tracing it takes a tenth of a second.

    `_context` are the values besides the config that determine its arrays, so that each has an
    entry.
    """
    model = nnx.eval_shape(lambda: create_model(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)
