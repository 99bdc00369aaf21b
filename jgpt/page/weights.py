"""A model's weights as text for a page: fewer bits for larger models, compressed."""

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jgpt.nn.int8 import quantise

MOST_FULL_BYTES = 8_000_000
"""The limit of weights in float32; larger ones have 16 bits."""
MOST_HALF_BYTES = 64_000_000
"""The limit of weights in 16 bits; larger ones are in int8."""
FEWEST_QUANTISED = 1 << 14
"""The limit of arrays that keep 16 bits beside others in int8: they take little room."""
COMPRESSION = 6
"""The level of gzip: level 9 took several times as long for the same size within 1%."""


@dataclass(frozen=True)
class PackedWeights:
    """Weights in one text, and where each array is in it."""

    table: list[dict[str, Any]]
    """For each array its name, shape, dtype in the program, and dtype in which it is stored."""
    data: str
    """The bytes of all arrays, one after the other: little-endian, gzip, base64."""
    precision: str
    """The dtype in which most weights are stored, for the page to say."""
    unpacked: dict[str, Any]
    """The arrays that the page makes of them, by name: those that were packed, but for rounding."""

    def as_data(self) -> dict[str, Any]:
        """Return what `browser/weights.js` unpacks."""
        return {"table": self.table, "data": self.data, "precision": self.precision}


def pack_weights(
    weights: Mapping[str, Any],
    most_full_bytes: int = MOST_FULL_BYTES,
    most_half_bytes: int = MOST_HALF_BYTES,
) -> PackedWeights:
    """Pack arrays by name; equal arrays are stored once.

    Floats have 32 bits if all weights together are at most `most_full_bytes`, 16 bits if they are
    at most `most_half_bytes` then, and else 8 bits with scales. Those of a model with int8 weights
    keep their int8.
    """
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    precision = _precision_for(arrays, most_full_bytes, most_half_bytes)
    packing = _Packing()
    table = []
    unpacked = {}
    for name, array in arrays.items():
        row = {"name": name, "shape": array.shape, "dtype": array.dtype.name}
        if not _is_float(array) or precision == "float32":
            row |= packing.add(array)
            unpacked[name] = array
        elif precision == "int8" and array.ndim > 1 and array.size >= FEWEST_QUANTISED:
            integers, scales, axis = _in_int8(name, array)
            row |= packing.add(integers)
            row["scales"] = packing.add(scales) | {"axis": axis}
            unpacked[name] = (integers * scales).astype(array.dtype)
        else:
            rounded = _in_16_bits(array)
            row |= packing.add(rounded)
            unpacked[name] = rounded.astype(array.dtype)
        table.append(row)
    if any(array.dtype == np.int8 for array in arrays.values()):
        precision = "int8"
    return PackedWeights(table, packing.text(), precision, unpacked)


def _precision_for(arrays: Mapping[str, Any], most_full_bytes: int, most_half_bytes: int) -> str:
    """Return the dtype in which the floats of a model are stored."""
    floats = 0
    other_bytes = 0
    for array in arrays.values():
        if _is_float(array):
            floats += array.size
        else:
            other_bytes += array.nbytes
    if 4 * floats + other_bytes <= most_full_bytes:
        return "float32"
    if 2 * floats + other_bytes <= most_half_bytes:
        return "float16"
    return "int8"


class _Packing:
    """Bytes of arrays, one after the other."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._place_of: dict[tuple[str, bytes], int] = {}
        self._end = 0

    def add(self, array: Any) -> dict[str, Any]:
        """Append an array, unless an equal one is there; return its dtype and its place."""
        little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
        contents = np.ascontiguousarray(little_endian).tobytes()
        identity = (array.dtype.name, contents)
        if identity not in self._place_of:
            # Typed arrays of JavaScript begin at a multiple of their entries' size.
            padding = -self._end % 4  # up to the next multiple of 4
            start = self._end + padding
            self._parts.append(bytes(padding))
            self._parts.append(contents)
            self._place_of[identity] = start
            self._end = start + len(contents)
        start = self._place_of[identity]
        return {"stored": array.dtype.name, "start": start, "bytes": len(contents)}

    def text(self) -> str:
        return _compressed(b"".join(self._parts))


def _in_int8(name: str, array: Any) -> tuple[Any, Any, int]:
    """Return an array as integers and scales, and the axis along which a scale is the same.

    A kernel has one scale for each output feature, as `jgpt sample --weights int8` has them. A
    table of embeddings has one for each row, which are the output features of a tied head.
    """
    axis = array.ndim - 2
    if name.endswith("/embedding"):
        axis = array.ndim - 1
    # `quantise` takes a matrix, and gives each of its rows a scale.
    rows = np.moveaxis(array, axis, -1)
    matrix = rows.reshape(-1, rows.shape[-1])
    integers, scales = quantise(jnp.asarray(matrix))
    # Back to the axes of the array; the scales have 1 where the rows were.
    integers = np.asarray(integers).reshape(rows.shape)
    integers = np.moveaxis(integers, -1, axis)
    scales = np.asarray(scales).reshape(rows.shape[:-1])
    scales = np.expand_dims(scales, axis)
    return integers, scales, axis


def pack_json(values: Any) -> str:
    """Pack plain data as text, as `browser/weights.js` unpacks it."""
    return _compressed(json.dumps(values, separators=(",", ":"), allow_nan=False).encode())


def _compressed(contents: bytes) -> str:
    # Without a time of writing, so that equal contents are equal text.
    return base64.b64encode(gzip.compress(contents, COMPRESSION, mtime=0)).decode()


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _in_16_bits(array: Any) -> Any:
    """Return an array in float16, which has three more digits than bfloat16; or in bfloat16, if
    float16 can't hold its largest number."""
    if array.dtype == jnp.bfloat16:
        return array
    finite = array[np.isfinite(array)]
    largest = float(np.abs(finite).max(initial=0))
    if largest > float(np.finfo(np.float16).max):
        return array.astype(jnp.bfloat16)
    return array.astype(np.float16)
