"""The parts of any model that can be drawn and changed, found in the trace of its forward pass."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jgpt.shapes.calls import TypedCall
from jgpt.shapes.contract import typed
from jgpt.shapes.edits import edit
from jgpt.shapes.trace import ShapeTrace, trace_calls

TRACED_TOKENS = 16
"""The number of tokens in the trace that the anatomy is found in; a smaller block has fewer."""


@dataclass(frozen=True)
class RecordedCall:
    """A call of the forward pass, with its values."""

    path: str
    module: Any
    """The module that is called; None for a function or another method."""
    arguments: dict[str, Any]
    result: Any

    @property
    def input(self) -> Any:
        """The first argument that is an array of real numbers, or None."""
        for value in self.arguments.values():
            if is_real(value):
                return value
        return None


def is_real(value: Any) -> bool:
    """Return whether a value is an array of real numbers rather than tokens or a mask."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def record_calls(
    model: Any, tokens: Any, edits: Mapping[str, Callable[[Any], Any]]
) -> tuple[ShapeTrace, dict[int, RecordedCall]]:
    """Trace a forward pass with edits; return the trace, and its calls by the id of their
    traces."""
    calls: dict[int, RecordedCall] = {}

    def record(trace: ShapeTrace, call: TypedCall, result: Any) -> None:
        module = None
        if call.function.__name__ == "__call__":
            module = call.arguments.get("self")
        calls[id(trace)] = RecordedCall(call.path, module, call.arguments, result)

    # This function stands for the model's own call, which may not be typed.
    @typed
    def __call__(
        tokens: Int[Array, "batch time"],
    ) -> Float[Array, "batch time vocab"]:
        return edit(model, edits)(tokens)

    trace = trace_calls(__call__, record, tokens)
    return trace, calls


@dataclass(frozen=True)
class Anatomy:
    """The paths of the parts of a model that can be drawn and changed."""

    blocks: tuple[str, ...]
    """Numbered modules that map a stream to another of the same shape, in order."""
    branches: tuple[tuple[str, ...], ...]
    """For each block, the modules whose results are added to the stream, since no other call gets
    them."""
    attention: tuple[str, ...]
    """Modules whose method `weights` returns attention weights."""
    head_outputs: tuple[str | None, ...]
    """For each of these, the last result with an axis of heads, at which a head can be switched
    off."""
    heads: int
    window: int | None
    width: int
    """The number of features in the stream that blocks map."""

    def switchable_blocks(self) -> list[bool]:
        """Return for each block whether what it adds to the stream can be switched off."""
        return [len(paths) > 0 for paths in self.branches]

    def switchable_layers(self) -> list[bool]:
        """Return for each layer of attention whether its heads can be switched off."""
        return [path is not None for path in self.head_outputs]


def anatomy_of(model: Any) -> Anatomy:
    """Find the anatomy of a model. Nothing is computed."""
    found: list[Anatomy] = []

    # Inside the trace, since recorded calls have no values after it has ended.
    def find(tokens: Any) -> None:
        _, calls = record_calls(model, tokens, {})
        found.append(_anatomy_in(list(calls.values())))

    time = min(TRACED_TOKENS, model.block_size)
    jax.eval_shape(find, jax.ShapeDtypeStruct((1, time), jnp.int32))
    return found[0]


def attention_weights_of(call: RecordedCall) -> Any:
    """Return the attention weights of a called module, for each head or for the only one."""
    weights = call.module.weights(call.input)
    return weights.reshape(-1, *weights.shape[-2:])


def _anatomy_in(calls: list[RecordedCall]) -> Anatomy:
    blocks = _blocks(calls)
    branches = []
    for block in blocks:
        branches.append(_branches(calls, block))
    width = 0
    for call in calls:
        if call.path in blocks:
            width = call.input.shape[-1]
            break

    attention, heads = _attention(calls)
    window = None
    if attention:
        window = getattr(attention[0].module, "window", None)
    head_outputs = []
    for call in attention:
        head_outputs.append(_head_output(calls, call.path, heads))
    return Anatomy(
        blocks=blocks,
        branches=tuple(branches),
        attention=tuple(call.path for call in attention),
        head_outputs=tuple(head_outputs),
        heads=heads,
        window=window,
        width=width,
    )


def _attention(calls: list[RecordedCall]) -> tuple[list[RecordedCall], int]:
    """Return the calls of modules with attention weights, and the number of heads in each."""
    attention = []
    shapes = set()
    for call in calls:
        if hasattr(call.module, "weights") and call.input is not None:
            attention.append(call)
            shapes.add(attention_weights_of(call).shape)
    # The page has one grid of layers and heads, which maps of different shapes don't fit.
    if len(shapes) != 1:
        return [], 0
    heads, _, _ = shapes.pop()
    return attention, heads


def _blocks(calls: list[RecordedCall]) -> tuple[str, ...]:
    """Return the paths of the blocks: modules of one list, which all keep the shape of their
    input."""
    candidates: dict[str, list[str]] = {}
    for call in calls:
        numbered = re.fullmatch(r"(.*)\.(\d+)", call.path)
        if call.module is None or numbered is None or call.input is None:
            continue
        # A result may also be a tuple, which has no shape.
        if getattr(call.result, "shape", None) == call.input.shape:
            candidates.setdefault(numbered[1], []).append(call.path)
    # The outermost list, since a block may have numbered modules, too.
    for name in sorted(candidates, key=lambda name: name.count(".")):
        paths = candidates[name]
        # Only a list whose modules are called once each, in order.
        if paths == [f"{name}.{index}" for index in range(len(paths))]:
            return tuple(paths)
    return ()


def _branches(calls: list[RecordedCall], block: str) -> tuple[str, ...]:
    """Return the modules of a block whose results are added to the stream.

    An addition is not a typed call, so it is not in the trace. A result counts as added if no other
    call gets it and the block doesn't return it.
    """
    (block_call,) = (call for call in calls if call.path == block)

    def is_added(branch: RecordedCall) -> bool:
        if branch.result is block_call.result:
            return False
        for call in calls:
            is_inside = f"{call.path}.".startswith(f"{branch.path}.")
            if is_inside:
                continue
            # By identity: two arrays that are traced have no values that could be compared.
            if any(value is branch.result for value in call.arguments.values()):
                return False
        return True

    branches = []
    for call in calls:
        parent, _, _ = call.path.rpartition(".")
        if call.module is None or parent != block:
            continue
        has_shape_of_stream = getattr(call.result, "shape", None) == block_call.result.shape
        if has_shape_of_stream and is_added(call):
            branches.append(call.path)
    return tuple(branches)


def _head_output(calls: list[RecordedCall], attention: str, heads: int) -> str | None:
    """Return the path of the last result (batch, head, ., .) of a function inside the attention."""
    path = None
    for call in calls:
        parent, _, _ = call.path.rpartition(".")
        is_function = call.module is None and parent == attention
        if not is_function or not is_real(call.result):
            continue
        if call.result.ndim == 4 and call.result.shape[1] == heads:
            path = call.path
    return path
