"""The source of a model for a page: for each array of the forward pass, the line that makes it."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jgpt.page.anatomy import RecordedCall, is_real, record_calls
from jgpt.page.numbers import short_name
from jgpt.shapes.edits import edit
from jgpt.shapes.source import (
    AnnotatedSource,
    FunctionSource,
    Line,
    folders_of,
    lines_of_arrays,
    source_of_calls,
)
from jgpt.shapes.trace import ShapeTrace

LONGEST = 29
"""The largest number of tokens in the traces that find the shapes: prime, so that it is not also
the size of something else."""
SHORTEST = 5

Place = tuple[str, str]
"""The path and the name of an array on a page."""


def code_of(model: Any) -> dict[str, Any] | None:
    """Return the functions of a model with their shapes, and the lines that make its arrays.

    Nothing is computed. The result is None for a model without source, and under a debugger, whose
    trace this would replace.
    """
    if sys.gettrace() is not None:
        return None
    folders = folders_of(model)
    time = min(LONGEST, model.block_size)
    tokens = jax.ShapeDtypeStruct((1, time), jnp.int32)
    made = lines_of_arrays(functools.partial(_arrays_by_place, model), (tokens,), folders)
    if not made:
        return None
    return _as_data(made, _source_of(model, time, folders))


def _arrays_by_place(model: Any, tokens: Any) -> dict[Place, Any]:
    """Return the arrays of a forward pass by their places on a page."""
    trace, calls = record_calls(model, tokens, {})
    arrays = {}
    for inner in trace.calls:
        for place, array in _places_in(inner, calls):
            arrays.setdefault(place, array)
    arrays["", "logits"] = calls[id(trace)].result
    return arrays


def _places_in(traced: ShapeTrace, calls: dict[int, RecordedCall]) -> Iterator[tuple[Place, Any]]:
    call = calls[id(traced)]
    name = short_name(traced.path)
    for argument in traced.arguments:
        value = call.arguments.get(argument)
        if is_real(value):
            yield (traced.path, f"{name}({argument})"), value
    for inner in traced.calls:
        yield from _places_in(inner, calls)
    if is_real(call.result):
        yield (traced.path, name), call.result


def _source_of(model: Any, time: int, folders: frozenset[str]) -> AnnotatedSource:
    """Return the source of a forward pass; the size `time` has its name, where it may vary."""
    # The same call for several numbers of tokens: sizes that differ between them are of tokens.
    shortest = max(SHORTEST, time - 5)
    times = list(range(time, shortest - 1, -1))
    symbols = {}
    if len(times) > 1:
        symbols = {"time": times}
    # Blocks in a loop, even if the config scans them.
    call = edit(model, {})
    calls = []
    for size in times or [time]:
        tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
        calls.append((call, (tokens,)))
    return source_of_calls(calls, symbols, folders)


def _as_data(made: dict[Place, list[Line]], source: AnnotatedSource) -> dict[str, Any]:
    """Return the functions that make arrays, and the lines by their index, as plain data."""
    functions: list[dict[str, Any]] = []
    index_of: dict[tuple[str, int], int] = {}

    def line_of(path: str, number: int) -> list[int] | None:
        """Return the index of a function and the number of a line in it, or None."""
        function = _innermost_function(source, path, number)
        if function is None:
            return None
        identity = (path, function.lines[0].number)
        if identity not in index_of:
            index_of[identity] = len(functions)
            functions.append(_function_as_data(function))
        return [index_of[identity], number]

    arrays = []
    for (path, name), (maker, *callers) in made.items():
        line = line_of(*maker)
        if line is not None:
            shown = [line_of(*caller) for caller in callers]
            arrays.append([path, name, line, list(filter(None, shown))])
    return {"functions": functions, "arrays": arrays}


def _innermost_function(source: AnnotatedSource, path: str, number: int) -> FunctionSource | None:
    """Return the function that a line is in; of functions in one another, the last to begin."""
    innermost = None
    for function in source.functions:
        first = function.lines[0].number
        last = function.lines[-1].number
        if function.path != path or not first <= number <= last:
            continue
        if innermost is None or first > innermost.lines[0].number:
            innermost = function
    return innermost


def _function_as_data(function: FunctionSource) -> dict[str, Any]:
    file = function.file
    if Path(file).is_absolute():  # a page is for others, whom the folder doesn't concern
        file = Path(file).name
    lines = []
    for line in function.lines:
        lines.append([line.number, line.text, function.margin(line), line.is_reached])
    return {"file": file, "name": function.name, "lines": lines}
