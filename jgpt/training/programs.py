"""The shapes of a forward pass, a decoding step and a train step, traced without computing."""

import jax
import jax.numpy as jnp
from flax import nnx

from jgpt.config import TrainConfig
from jgpt.nn.models import CachedLanguageModel, abstract_model
from jgpt.refusal import Field, Message
from jgpt.shapes.trace import ShapeTrace, shape_trace
from jgpt.training.state import abstract_state
from jgpt.training.step import make_train_steps


def trace_forward(config: TrainConfig, batch: int, time: int) -> ShapeTrace:
    """Trace the forward pass of `batch` sequences of `time` tokens."""
    graph, weights = nnx.split(abstract_model(config.model))
    tokens = jax.ShapeDtypeStruct((batch, time), jnp.int32)

    def forward(weights, tokens):
        return nnx.merge(graph, weights)(tokens)

    return shape_trace(forward, weights, tokens)


def trace_decode(config: TrainConfig, batch: int, time: int) -> ShapeTrace:
    """Trace the decoding of one token for each of `batch` sequences, with a KV cache of `time`
    positions."""
    graph, weights = nnx.split(abstract_model(config.model))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def decode(weights, tokens):
        model = nnx.merge(graph, weights)
        if not isinstance(model, CachedLanguageModel):
            raise ValueError(
                Message("the model has no KV cache: leave out ", Field("decode", True))
            )
        return model(tokens, cache=model.empty_cache(batch, time))

    return shape_trace(decode, weights, tokens)


def trace_train(config: TrainConfig, batch: int, time: int) -> ShapeTrace:
    """Trace a train step over `batch` windows of `time` targets."""
    windows = jax.ShapeDtypeStruct((1, batch, time + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return shape_trace(make_train_steps(config), abstract_state(config), windows, key, count)
