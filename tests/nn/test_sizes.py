"""The sizes and dropout rates that modules refuse, when they are made and later."""

import inspect
from typing import Any

import pytest
from flax import nnx

import jgpt
from jgpt.nn.cache import KVCache, LayerCache
from jgpt.nn.int8 import Int8Linear
from jgpt.nn.layers import Embedding, LayerNorm, Linear, RMSNorm
from jgpt.nn.module import Module
from jgpt.nn.ngrams import NGramEmbedding

ARGUMENTS = {
    jgpt.Head: {"embed_dim": 10, "head_dim": 4, "window": 3},
    jgpt.BigramLM: {"vocab_size": 5},
    Linear: {"in_features": 3, "out_features": 5},
    Embedding: {"num_embeddings": 3, "embed_dim": 5},
    LayerNorm: {"embed_dim": 5},
    RMSNorm: {"embed_dim": 5},
    LayerCache: {"batch": 2, "capacity": 7, "num_kv_heads": 3, "head_dim": 5},
    KVCache: {"layers": (), "batch": 2},
}


def make(kind: type[Module], **changes: object) -> Any:
    def build():
        draws = "rngs" in inspect.signature(kind).parameters
        rngs = {"rngs": nnx.Rngs(0)} if draws else {}
        return kind(**{**ARGUMENTS[kind], **changes, **rngs})

    return nnx.eval_shape(build)


def sizes_of(kind: type[Module]) -> list[str]:
    """The arguments that are sizes, all of which `ARGUMENTS` gives."""
    parameters = inspect.signature(kind).parameters.items()
    sizes = [name for name, each in parameters if each.annotation in (int, int | None)]
    return [name for name in sizes if name != "lookback"]  # 0 where there are no n-grams


def subclasses_of(kind):
    """It and all classes below it."""
    found = {kind}
    for child in kind.__subclasses__():
        found |= subclasses_of(child)
    return found


def test_every_module_is_tried():
    """All but those of a config, which refuses them, and an Int8Linear, made of a whole kernel."""
    of_config = {
        jgpt.GPT,
        jgpt.Block,
        jgpt.FeedForward,
        jgpt.MultiHeadAttention,
        NGramEmbedding,
    }
    others = {Int8Linear, Module}
    known = set(ARGUMENTS) | of_config | others

    ours = {kind for kind in subclasses_of(Module) if kind.__module__.startswith("jgpt.")}

    assert {kind.__name__ for kind in ours - known} <= {"_Attention"}
    for kind, arguments in ARGUMENTS.items():
        assert set(sizes_of(kind)) <= set(arguments)


REFUSED = {
    "must be positive": (0, -3),
    "must be at least 0 and below 1": (-0.1, 1.0, 1.5, float("nan")),
}
FINE = {"dropout": (0, 0.0, 0.99)}
BOUNDS = {"dropout": "must be at least 0 and below 1"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in ARGUMENTS
        for name in [*sizes_of(kind), *(BOUNDS.keys() & inspect.signature(kind).parameters.keys())]
    ],
)
def test_a_number_is_within_its_bounds(kind, name):
    bound = BOUNDS.get(name, "must be positive")
    for value in REFUSED[bound]:
        with pytest.raises(ValueError, match=f"^`{name}={value}` {bound}"):
            make(kind, **{name: value})
    for value in FINE.get(name, ()):
        assert getattr(make(kind, **{name: value}), name) == value


def test_a_size_and_a_rate_stay_what_they_may_be():
    head = make(jgpt.Head)
    with pytest.raises(ValueError, match="`window=0` must be positive"):
        head.window = 0
    head.window = None
    assert (head.window, head.head_dim) == (None, 4)
