"""What a page computes of a text, computed by JAX: the records of `browser/model.js`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jgpt.page.numbers import CANDIDATES, MOST_CANDIDATES, Look


@dataclass(frozen=True)
class Changes:
    """The changes inside a forward pass.

    Heads and blocks are multiplied by a factor. A patch replaces the output of a block at a
    position by that of the same position in another prompt, which has as many tokens.
    """

    heads: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Factors by layer and head."""
    blocks: Mapping[int, float] = field(default_factory=dict)
    """Factors by layer, for the part that the block adds to the residual stream."""
    patch: tuple[int, int, str] | None = None
    """A layer, a position and the other prompt."""


def record_of(
    look: Look, tokens: list[int], prompt: int | None = None, changes: Changes = Changes()
) -> dict[str, Any]:
    """The record of a text, of whose tokens the first `prompt` are the prompt."""
    time = len(tokens)
    outputs = _outputs_of(look, tokens, changes)
    count = CANDIDATES
    if time == 1:
        count = MOST_CANDIDATES
    before = None
    if changes != Changes():
        before = _last_predictions(_outputs_of(look, tokens, Changes()), time)
    record = {
        "name": look.name,
        "vocab_size": look.model.vocab_size,
        "block_size": look.model.block_size,
        "window": look.anatomy.window,
        "prompt": prompt or time,
        "tokens": tokens,
        "candidates": outputs["candidates"][:, :time, :count].tolist(),
        "log_probabilities": outputs["log_probabilities"][:, :time, :count],
        "next_ranks": outputs["next_ranks"][:, : time - 1].tolist(),
        "next_log_probabilities": outputs["next_log_probabilities"][:, : time - 1],
        "last": [
            outputs["candidates"][-1, time - 1].tolist(),
            outputs["log_probabilities"][-1, time - 1],
        ],
        "blocks": look.anatomy.switchable_blocks(),
        "layers": look.anatomy.switchable_layers(),
        "heads": look.anatomy.heads,
        "attention": None,
        "products": None,
        "before": before,
        "arrays": _arrays_of(look, outputs, time),
    }
    if outputs["attention"]:
        maps = np.stack(outputs["attention"])
        record["attention"] = maps[..., *np.tril_indices(time)]  # row by row, up to the diagonal
    if outputs["products"]:
        query, key, scale = (np.stack(each) for each in zip(*outputs["products"], strict=True))
        record["products"] = {
            "scale": float(scale[0]),
            "query": query[:, :, :time],
            "key": key[:, :, :time],
        }
    return record


def _outputs_of(look: Look, tokens: list[int], changes: Changes) -> dict[str, Any]:
    inputs = look.inputs(tokens)
    for (layer, head), factor in changes.heads.items():
        inputs["heads"][layer, head] = factor
    for layer, factor in changes.blocks.items():
        inputs["blocks"][layer] = factor
    if changes.patch is not None:
        layer, position, other_prompt = changes.patch
        other = look.tokenizer.encode(other_prompt).tolist()
        assert len(other) == len(tokens)
        inputs["replaced"][layer, position] = True
        inputs["streams"] = _outputs_of(look, other, Changes())["streams"]
    return jax.device_get(look.program(look.weights, inputs))


def _last_predictions(outputs: dict[str, Any], time: int) -> dict[str, Any]:
    """The predictions of the unchanged model."""
    return {
        "log_probabilities": outputs["log_probabilities"][-1, :time],
        "next_log_probabilities": outputs["next_log_probabilities"][-1, : time - 1],
        "candidates": outputs["candidates"][-1, :time].tolist(),
    }


def _arrays_of(look: Look, outputs: dict[str, Any], time: int) -> list[dict[str, Any]]:
    """Each array that grows with the tokens once, by token, without padding.

    One that a module returns unchanged is shown as the result of the outermost such module.
    """
    shown: dict[tuple[Any, bytes], dict[str, Any]] = {}
    rows = look.rows(outputs["candidates"].shape[1])
    for row, array in zip(rows, outputs["arrays"], strict=True):
        if not row.token_axes:
            continue
        without_padding = [slice(None)] * array.ndim
        for axis in row.token_axes:
            without_padding[axis] = slice(time)
        values = np.asarray(array, np.float32)[tuple(without_padding)]
        identity = (values.shape, values.tobytes())
        if identity in shown:
            if shown[identity]["path"].count(".") <= row.text["path"].count("."):
                continue
            del shown[identity]  # to get the outermost module's place in the order
        by_token = np.moveaxis(values, row.token_axes[0], 0)
        shown[identity] = row.text | {"sizes": values.shape, "values": by_token}
    return list(shown.values())
