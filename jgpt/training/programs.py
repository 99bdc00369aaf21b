"""A forward pass, a decoding step and a train step, to trace without computing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jgpt.config import TrainConfig
from jgpt.nn.models import CachedLanguageModel, abstract_model
from jgpt.shapes.trace import ShapeTrace, shape_trace
from jgpt.training.state import abstract_state
from jgpt.training.step import make_train_steps


class Program(NamedTuple):
    """A function and its abstract arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def trace(self) -> ShapeTrace:
        """Return the tree of typed calls."""
        return shape_trace(self.function, *self.arguments)


def sizes_to_trace(block_size: int) -> dict[str, tuple[int, ...]]:
    """Return batches and lengths to trace, from which expressions in b and t are found.

    The first two lengths are near each other, since a program may do something else at a half. Some
    product of both is odd, so that it differs from itself rounded to an even number.
    """
    batches = (3, 4, 5, 9)
    if block_size == 1:
        return {"b": batches, "t": (1, 1, 1, 1)}
    shorter = max(block_size - 2, 1)
    times = (block_size - 1, block_size, block_size // 2 + 1, shorter)
    return {"b": batches, "t": times}


def forward_program(config: TrainConfig, batch: int, time: int) -> Program:
    """Return the forward pass of `batch` sequences of `time` tokens."""
    graph, weights = nnx.split(abstract_model(config.model))
    tokens = jax.ShapeDtypeStruct((batch, time), jnp.int32)

    def forward(weights, tokens):
        return nnx.merge(graph, weights)(tokens)

    return Program(forward, (weights, tokens))


def decode_program(config: TrainConfig, batch: int, time: int) -> Program:
    """Return the decoding of one token for each of `batch` sequences, with a KV cache of `time`
    positions."""
    graph, weights = nnx.split(abstract_model(config.model))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def decode(weights, tokens):
        model = nnx.merge(graph, weights)
        if not isinstance(model, CachedLanguageModel):
            raise ValueError("the model has no KV cache: leave out `decode=True`")
        # Made inside, since only the number of tokens and the weights are traced from outside.
        cache = model.empty_cache(batch, time)
        return model(tokens, cache=cache)

    return Program(decode, (weights, tokens))


def train_program(config: TrainConfig, batch: int, time: int) -> Program:
    """Return a train step over `batch` windows of `time` targets."""
    steps = make_train_steps(config)
    state = abstract_state(config)
    windows = jax.ShapeDtypeStruct((1, batch, time + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return Program(steps, (state, windows, key, count, count))
