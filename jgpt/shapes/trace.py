"""The tree of the typed calls in a call, with the shapes of their arguments and results."""

import dataclasses
import html
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jgpt.shapes.calls import TypedCall, watching
from jgpt.shapes.contract import typed
from jgpt.shapes.describe import by_dimension, is_array

NAME = r"[\w*]+(?==)"
COLOURS = ("#008b8b", "#b0489c", "#3b8c3b", "#a87400", "#3a73c9")
"""Legible on black and on white."""


def name_colours(text: str) -> dict[str, str]:
    """A colour for each dimension name in printed shapes, in order of appearance."""
    return dict(zip(dict.fromkeys(re.findall(NAME, text)), itertools.cycle(COLOURS), strict=False))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shape:
    """An array's dtype and dimensions; a dimension's name is empty for an expression."""

    dtype: str
    dimensions: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        if not self.dimensions and " " in self.dtype:
            return self.dtype
        sizes = " ".join(f"{name}={size}" if name else str(size) for name, size in self.dimensions)
        return f"{self.dtype}[{sizes}]"


@jax.tree_util.register_dataclass
@dataclass
class ShapeTrace:
    """A typed call and those inside it. It prints as a tree, in a notebook as HTML."""

    path: str
    name: str
    arguments: dict[str, list[Shape]]
    results: list[Shape] = field(default_factory=list)
    calls: list["ShapeTrace"] = field(default_factory=list)

    def lines(self, depth: int | None = None) -> list[str]:
        """The tree to a depth: what is called, and the shapes of its results."""
        given = ", ".join(
            f"{name}: {', '.join(map(str, shapes))}" for name, shapes in self.arguments.items()
        )
        rows = self._rows(0, depth, "")[1:]
        rows.append((0, "result", self.results))
        width = max(2 * level + len(name) for level, name, shapes in rows if shapes)
        lines = [f"{self.name}({given})"]
        for level, name, shapes in rows:
            label = "  " * level + name
            lines += [f"{label:<{width}}  {shape}" for shape in shapes[:1]] or [label]
            lines += [f"{'':<{width}}  {shape}" for shape in shapes[1:]]
        return lines

    def _rows(self, level: int, depth: int | None, path: str) -> list[tuple[int, str, list[Shape]]]:
        rows = [(level, self.name.removeprefix(f"{path}."), self.results)]
        if depth is None or level < depth:
            inside = self.path if self.path == self.name else path
            for call, others in _alike(self.calls):
                rows += call._rows(level + 1, depth, inside)
                if others:
                    names = others[0]
                    if len(others) > 1:
                        names += f" to {others[-1].rpartition('.')[2]}"
                    rows.append((level + 1, f"{names}: alike", []))
        return rows

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        text = html.escape(str(self))
        colours = name_colours(text)
        spans = {name: f'<span style="color:{its}">{name}</span>' for name, its in colours.items()}
        return f"<pre>{re.sub(NAME, lambda name: spans[name[0]], text)}</pre>"

    def as_json(self) -> dict[str, Any]:
        """The tree as plain data."""
        return dataclasses.asdict(self)


@typed
def shape_trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> ShapeTrace:
    """The tree of typed calls in a call, with the shapes of arguments and results.

    Arguments are arrays or `jax.ShapeDtypeStruct`; nothing is computed. A method or function
    that only passes work on to modules is left out. Raises ValueError if nothing in it is typed.
    """
    found: list[ShapeTrace] = []

    def trace(*args: Any, **kwargs: Any) -> None:
        found.append(heard_trace(function, lambda *_: None, *args, **kwargs))

    jax.eval_shape(trace, *args, **kwargs)
    return found[0]


def heard_trace(
    function: Callable[..., Any],
    hear: Callable[[ShapeTrace, TypedCall, Any], None],
    *args: Any,
    **kwargs: Any,
) -> ShapeTrace:
    """The tree of a call while it runs; `hear` gets each node, with the call and the result."""
    root = ShapeTrace("", getattr(function, "__name__", type(function).__name__), {})
    stack = [root]
    in_module = [False]

    def watch(call: TypedCall) -> Callable[[Any], Any]:
        owner = call.arguments.get("self")
        name = call.function.__name__
        if is_module := name == "__call__":
            name = call.path or type(owner).__name__
        shapes = {
            each: shapes_of(call.annotations.get(each), value)
            for each, value in call.arguments.items()
        }
        given = {each: its for each, its in shapes.items() if its}
        traced = ShapeTrace(call.path, name, given)
        stack.append(traced)
        in_module.append(in_module[-1] or isinstance(owner, nnx.Module))

        def leave(result: Any) -> Any:
            traced.results = shapes_of(call.annotations.get("return"), result)
            stack.pop()
            calls_modules = any(it.path == it.name for it in traced.calls)
            passes_on = in_module.pop() and not is_module and calls_modules
            is_super = is_module and len(stack) > 1 and stack[-1].name == traced.name
            is_private = not is_module and name.startswith("_")
            if passes_on or is_super or is_private or not traced.results:
                stack[-1].calls += traced.calls
            else:
                stack[-1].calls.append(traced)
                hear(traced, call, result)
            return result

        return leave

    with watching(watch):
        function(*args, **kwargs)
    if not root.calls:
        raise ValueError(f"{root.name} makes no typed call: decorate functions with @jgpt.typed")
    return root.calls[0] if len(root.calls) == 1 else root


def shapes_of(annotation: Any, value: Any) -> list[Shape]:
    """The shapes of the arrays in a value, with the dimension names of its annotation."""
    if is_array(annotation):
        if not hasattr(value, "shape"):
            return []
        dtype = "key" if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value.dtype.name
        dimensions = [
            (_plain(name) if len(sizes) == 1 else "", size)
            for name, sizes in by_dimension(annotation, value.shape)
            for size in sizes
        ]
        return [Shape(dtype, tuple(dimensions))]
    if leaf := getattr(annotation, "leaftype", None):
        shapes = [shape for each in jax.tree.leaves(value) for shape in shapes_of(leaf, each)]
        return shapes if len(shapes) < 4 else [Shape(f"{len(shapes)} arrays", ())]
    parts = get_args(annotation)
    if isinstance(value, tuple) and len(parts) == len(value):
        return [shape for each in zip(parts, value, strict=True) for shape in shapes_of(*each)]
    found = (shapes_of(part, value) for part in parts)
    return next((shapes for shapes in found if shapes), [])


def _plain(name: str) -> str:
    """The name of a dimension without marks, empty for an expression or `...`."""
    plain = re.sub(r"^[*#?]*\{?(?:\w+\.)*(\w+)\}?$", r"\1", name).lstrip("?*#")
    return plain if re.fullmatch(r"\w+(\*\w+)?", plain) else ""


def _alike(calls: list[ShapeTrace]) -> Iterator[tuple[ShapeTrace, list[str]]]:
    """Each call, with the names of the next ones if they differ in a number only."""
    while calls:
        first, *calls = calls
        others = []
        while calls and first.name != calls[0].name and _unnumbered(calls[0]) == _unnumbered(first):
            others.append(calls.pop(0).name)
        yield first, others


def _unnumbered(trace: ShapeTrace) -> str:
    return re.sub(r"\.\d+\b", ".*", repr(trace))


def with_symbols(
    first: ShapeTrace, second: ShapeTrace, symbols: Mapping[str, tuple[int, int]]
) -> ShapeTrace:
    """A trace whose sizes are named where they differ from those of another trace.

    `symbols` has the two sizes of each name. Other sizes that differ are `?`.
    """
    named = {sizes: name for name, sizes in symbols.items()}
    one, other = (math.prod(sizes) for sizes in zip(*symbols.values(), strict=True))
    named[one, other] = "*".join(symbols)
    named |= {(a + 1, b + 1): f"{name}+1" for name, (a, b) in symbols.items()}

    return jax.tree.map(
        lambda one, other: one if one == other else named.get((one, other), "?"), first, second
    )
