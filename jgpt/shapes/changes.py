"""A call of a model in which functions change results inside, by their paths."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jgpt.shapes.calls import TypedCall, is_nnx, watching

Edits = tuple[tuple[str, Callable[[Any], Any]], ...]
"""Patterns of paths, and the functions that change results. A tuple, since it is a part of the key
of `jit`'s programs."""


def call_edited(model: Callable[..., Any], edits: Edits, /, *args: Any, **kwargs: Any) -> Any:
    """Call the model with functions that replace results."""
    by_pattern = dict(edits)

    def replacing(_: str, pattern: str) -> Callable[[Any], Any]:
        return by_pattern[pattern]

    return call_changed(model, by_pattern, replacing, *args, **kwargs)


def call_changed(
    model: Callable[..., Any],
    patterns: Iterable[str],
    change: Callable[[str, str], Callable[[Any], Any]],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the model with `args` and `kwargs`, and change results whose paths match patterns.

    `change(path, pattern)` returns the function that replaces such a result. The first matching
    pattern applies. Raises ValueError for a pattern that matches no path.
    """
    # `/` in the signature, since the model's own call may have arguments `model` or `patterns`.
    patterns = list(patterns)
    paths: set[str] = set()  # of all calls, for a suggestion
    used: set[str] = set()

    def watch(call: TypedCall) -> Callable[[Any], Any] | None:
        paths.add(call.name)
        for pattern in patterns:
            if fits(pattern, call.name):
                used.add(pattern)
                return change(call.name, pattern)
        return None

    model_in_turn = in_turn(model)
    # A program that JAX has cached would not be traced again, and calls in it would not be heard.
    with watching(watch), jax.disable_jit():
        result = model_in_turn(*args, **kwargs)
    # Known only now, since a model decides at run time which calls it makes.
    for pattern in patterns:
        if pattern not in used:
            suggestion = _suggestion(pattern, paths)
            raise ValueError(f"no typed call has the path {pattern!r}{suggestion}")
    return result


def _suggestion(pattern: str, paths: Iterable[str]) -> str:
    """Return a similar path as a suggestion at the end of a message, or an empty string."""
    similar_paths = difflib.get_close_matches(pattern, paths, n=1)
    if not similar_paths:
        return ""
    return f" (did you mean {similar_paths[0]!r}?)"


def in_turn(model: Callable[..., Any]) -> Any:
    """Return a copy of the model that runs its blocks in a loop, so that no inner trace holds a
    result."""
    if not is_nnx(model, "Module"):
        return model
    # A custom model may have no config, or a config without these fields.
    config: Any = getattr(model, "config", None)
    scans = getattr(config, "scan_layers", False)
    rematerialises = getattr(config, "remat", False)
    if not scans and not rematerialises:
        return model

    from flax import nnx

    # A copy of the module's structure, with the same arrays.
    graph, arrays = nnx.split(model)
    copy: Any = nnx.merge(graph, arrays)
    copy.config = dataclasses.replace(config, scan_layers=False, remat=False)
    return copy


def fits(pattern: str, path: str) -> bool:
    """Return whether a path matches a pattern, in which `*` stands for one part."""
    escaped = re.escape(pattern)  # which writes `*` as `\*`
    expression = escaped.replace(r"\*", r"[^.]+")
    return re.fullmatch(expression, path) is not None
