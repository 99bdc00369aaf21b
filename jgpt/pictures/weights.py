"""A model's weights as text for a page: fewer bits for larger models, compressed."""

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

MOST_FULL_BYTES = 8_000_000
"""The limit of weights in float32; larger ones have 16 bits."""
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

    def as_data(self) -> dict[str, Any]:
        """Return what `page/weights.js` unpacks."""
        return {"table": self.table, "data": self.data, "precision": self.precision}


def pack_weights(
    weights: Mapping[str, Any], most_full_bytes: int = MOST_FULL_BYTES
) -> PackedWeights:
    """Pack arrays by name; equal arrays are stored once.

    Floats have 32 bits if all weights together are at most `most_full_bytes`, else 16. Those of a
    model with int8 weights keep their int8.
    """
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    total = sum(4 * array.size for array in arrays.values() if _is_float(array))
    total += sum(array.nbytes for array in arrays.values() if not _is_float(array))
    is_full = total <= most_full_bytes
    table = []
    parts: list[bytes] = []
    place_of: dict[tuple[str, bytes], int] = {}
    end = 0
    precision = "float32" if is_full else "float16"
    for name, array in arrays.items():
        stored = array
        if _is_float(array) and not is_full:
            stored = _in_16_bits(array)
        if array.dtype == np.int8:
            precision = "int8"
        little_endian = stored.astype(stored.dtype.newbyteorder("<"), copy=False)
        bytes_ = np.ascontiguousarray(little_endian).tobytes()
        identity = (stored.dtype.name, bytes_)
        if identity not in place_of:
            # Typed arrays of JavaScript begin at a multiple of their entries' size.
            padding = -end % 4
            parts.append(bytes(padding))
            end += padding
            place_of[identity] = end
            parts.append(bytes_)
            end += len(bytes_)
        row = {
            "name": name,
            "shape": array.shape,
            "dtype": array.dtype.name,
            "stored": stored.dtype.name,
            "start": place_of[identity],
            "bytes": len(bytes_),
        }
        table.append(row)
    return PackedWeights(table, _compressed(b"".join(parts)), precision)


def pack_json(values: Any) -> str:
    """Pack plain data as text, as `page/weights.js` unpacks it."""
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
    largest = float(np.abs(array[np.isfinite(array)]).max(initial=0))
    if largest > float(np.finfo(np.float16).max):
        return array.astype(jnp.bfloat16)
    return array.astype(np.float16)
