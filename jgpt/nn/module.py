"""The base class of modules, with checked sizes and dropout keys, and the check of tokens."""

import inspect
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Int, Key

from jgpt.shapes.contract import typed
from jgpt.words import counted

SIZES = (
    "batch", "block_size", "capacity", "embed_dim", "head_dim", "hidden_dim", "in_features",
    "num_embeddings", "num_heads", "num_kv_heads", "out_features", "rotary_base",
    "vocab_size", "window",
)  # fmt: skip
"""Attributes that must be positive."""


class Module(nnx.Module):
    """An NNX module that shows the signature of `__init__`, which NNX's metaclass hides.

    Setting one of `SIZES` to 0 or less, or `dropout` outside [0, 1), raises ValueError.
    """

    deterministic = True  # `train()` sets it to False, `eval()` to True

    def __setattr__(self, name: str, value: Any) -> None:
        # Checked here instead of in constructors, so that attributes that a user sets later are
        # checked, too. `not` precedes the comparison, since NaN is not between any two numbers.
        requirement = None
        if name == "dropout" and not 0 <= value < 1:
            requirement = "at least 0 and below 1"
        elif name in SIZES and value is not None and not value > 0:
            requirement = "positive"
        if requirement is not None:
            raise ValueError(f"`{name}={value}` must be {requirement}")
        super().__setattr__(name, value)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        parameters = list(inspect.signature(cls.__init__).parameters.values())
        cls.__signature__ = inspect.Signature(parameters[1:])  # without self

    @typed
    def next_dropout_key(self, rngs: nnx.Rngs | None, rate: float) -> Key[Array, ""] | None:
        """Return the next key of the `dropout` stream, or None in evaluation.

        Raises ValueError after `train()` if dropout lacks `rngs`.
        """
        if rngs is not None:
            # Drawn even for a rate of 0, so that the keys of later layers don't depend on the rates
            # of earlier ones.
            return rngs.dropout()
        if rate > 0 and not self.deterministic:
            raise ValueError(
                f"after train(), `dropout={rate}` needs the call's rngs=nnx.Rngs(dropout=key); "
                "the model's eval method switches back to evaluation"
            )
        return None


def describe_model(model: Any) -> str:
    """Return the class, the sizes and the number of parameters of any model, in one line."""
    config = getattr(model, "config", None)
    sizes = []
    for name in ("vocab_size", "block_size", "num_layers", "num_heads", "embed_dim"):
        size = getattr(model, name, getattr(config, name, None))
        if size is not None:
            sizes.append(f"{name}={size}")
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return f"{type(model).__name__}({', '.join(sizes)}) with {counted(count, 'parameter')}"


@typed
def require_in_vocabulary(
    tokens: Int[Array | np.ndarray, "*rows"], vocab_size: int, what: str = "token"
) -> None:
    """Raise ValueError, naming the place, for the first token outside the vocabulary.

    Under a trace, where values are unknown, nothing is raised: the loss of a target outside is NaN,
    and so is an embedding, except that tokens from -vocab_size to -1 count from the vocabulary's
    end.
    """
    if isinstance(tokens, Tracer):
        return
    values = np.asarray(tokens)  # on the host, so that the check compiles nothing
    places = np.argwhere((values < 0) | (values >= vocab_size))
    if len(places) == 0:
        return
    first = places[0]
    *batch, position = first.tolist() or [0]  # a single token without an axis has no index
    place = f"position {position}"
    for index in reversed(batch):
        place = f"batch index {index}, {place}"
    raise ValueError(
        f"{what} {values[tuple(first)]} at {place} is outside the vocabulary of "
        f"{vocab_size}: 0 to {vocab_size - 1}"
    )
