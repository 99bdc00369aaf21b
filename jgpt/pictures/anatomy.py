"""What can be drawn and changed of any model, found in the trace of its forward pass."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jgpt.shapes.calls import TypedCall
from jgpt.shapes.capture import edit
from jgpt.shapes.contract import typed
from jgpt.shapes.trace import ShapeTrace, trace_calls

TOKENS = 16
"""Of the trace in which the anatomy is found."""


@dataclass(frozen=True)
class Heard:
    """A call of the forward pass."""

    path: str
    module: Any
    """The module that is called; None for a function that one calls."""
    arguments: dict[str, Any]
    result: Any

    @property
    def given(self) -> Any:
        """The first array that it was given."""
        return next((x for x in self.arguments.values() if is_real(x)), None)


def is_real(value: Any) -> bool:
    """Whether it is an array of real numbers, not of tokens or a mask."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def record_calls(
    model: Any, tokens: Any, edits: Mapping[str, Callable[[Any], Any]]
) -> tuple[ShapeTrace, dict[int, Heard]]:
    """The trace of a forward pass with edits, and its calls by the id of their traces, in order."""
    heard: dict[int, Heard] = {}

    def keep(trace: ShapeTrace, call: TypedCall, result: Any) -> None:
        module = call.arguments.get("self") if call.function.__name__ == "__call__" else None
        heard[id(trace)] = Heard(call.path, module, call.arguments, result)

    # stands for the model's own call, which may not be typed
    @typed
    def __call__(
        tokens: Int[Array, "batch time"],
    ) -> Float[Array, "batch time vocab"]:
        return edit(model, edits)(tokens)

    return trace_calls(__call__, keep, tokens), heard


@dataclass(frozen=True)
class Anatomy:
    """What can be drawn and changed of a model: paths, found in the trace of a forward pass."""

    blocks: tuple[str, ...]
    """Numbered modules that map a stream to another of its shape, in order."""
    branches: tuple[tuple[str, ...], ...]
    """Of each block, the modules whose results are added to the stream: no other call gets them."""
    attention: tuple[str, ...]
    """Modules that have their weights in a method `weights`."""
    by_head: tuple[str | None, ...]
    """Of each of these, the last result with an axis of heads, which can be switched off."""
    heads: int
    window: int | None
    width: int
    """Features of the stream that blocks map."""


def anatomy_of(model: Any) -> Anatomy:
    """The anatomy of a model. Nothing is computed."""
    found: list[Anatomy] = []
    tokens = jax.ShapeDtypeStruct((1, min(TOKENS, model.block_size)), jnp.int32)

    def look(tokens: Any) -> None:
        calls = list(record_calls(model, tokens, {})[1].values())
        blocks = _blocks(calls)
        branches = tuple(_branches(calls, block) for block in blocks)
        attention = [
            (call, weights_of(call))
            for call in calls
            if hasattr(call.module, "weights") and call.given is not None
        ]
        if len({weights.shape for _, weights in attention}) != 1:
            attention = []  # none, or not to be shown in one grid
        heads = attention[0][1].shape[0] if attention else 0
        paths = tuple(call.path for call, _ in attention)
        by_head = tuple(_by_head(calls, path, heads) for path in paths)
        window = getattr(attention[0][0].module, "window", None) if attention else None
        width = next((call.given.shape[-1] for call in calls if call.path in blocks), 0)
        found.append(Anatomy(blocks, branches, paths, by_head, heads, window, width))

    jax.eval_shape(look, tokens)
    return found[0]


def weights_of(call: Heard) -> Any:
    """The attention weights of a module that was called: by head, or of the only one."""
    weights = call.module.weights(call.given)
    return weights.reshape(-1, *weights.shape[-2:])


def _blocks(calls: list[Heard]) -> tuple[str, ...]:
    lists: dict[str, list[str]] = {}
    for call in calls:
        given = call.given
        numbered = re.fullmatch(r"(.*)\.(\d+)", call.path)
        if call.module and numbered and given is not None and given.shape == call.result.shape:
            lists.setdefault(numbered[1], []).append(call.path)
    for stem in sorted(lists, key=lambda stem: stem.count(".")):
        if lists[stem] == [f"{stem}.{index}" for index in range(len(lists[stem]))]:
            return tuple(lists[stem])
    return ()


def _branches(calls: list[Heard], block: str) -> tuple[str, ...]:
    (whole,) = (call for call in calls if call.path == block)

    def is_added(branch: Heard) -> bool:
        others = (call for call in calls if not f"{call.path}.".startswith(f"{branch.path}."))
        taken = {id(x) for call in others for x in call.arguments.values()}
        return id(branch.result) not in taken | {id(whole.result)}

    return tuple(
        call.path
        for call in calls
        if call.module and call.path.rpartition(".")[0] == block
        if call.result.shape == whole.result.shape and is_added(call)
    )


def _by_head(calls: list[Heard], module: str, heads: int) -> str | None:
    found = None
    for call in calls:
        inside = call.path.rpartition(".")[0] == module and not call.module
        if inside and is_real(call.result) and call.result.ndim == 4:
            found = call.path if call.result.shape[1] == heads else found
    return found
