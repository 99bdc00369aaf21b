"""Shapes and sight: checked, written down and proven; a library of its own, which imports nothing
of jgpt.

Its door are the names below.
"""

from importlib import import_module
from typing import Any

_DOOR = {
    "typed": "contract",
    "check": "contract",
    "shape_trace": "trace",
    "annotated_source": "source",
    "prove": "proofs",
    "reads": "reading",
    "Known": "interpreter",
    "watching": "calls",
    "capture": "edits",
    "edit": "edits",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"jgpt.shapes has no attribute {name!r}")
    # only now: a file that needs the contract alone loads no proofs
    return getattr(import_module(f"jgpt.shapes.{_DOOR[name]}"), name)
