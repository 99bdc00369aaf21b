"""Inside a call: results captured and edited by their path, and the tree of shapes."""

import dataclasses
import difflib
import functools
import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jgpt.shapes.contract import TypedCall, by_dimension, called_in, is_array, typed, watching


@typed
def capture(model: nnx.Module, *paths: str) -> Callable[..., dict[str, Any]]:
    """A function that calls the model and returns results of typed calls inside, by their path.

    `blocks.1.attention` is a module, `blocks.1.attention.merge_heads` a function that it calls;
    `*` stands for any one part. Further calls of a path are numbered: `split_heads[1]`. Blocks
    run in turn, whatever the config says. Raises ValueError without a path, for one that nothing
    has, and under a mesh.
    """
    if not paths:
        raise ValueError("capture what? give a path, such as 'blocks.*.attention'")

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if not jax.sharding.get_abstract_mesh().empty:
            raise ValueError("capture results without a mesh: there, each device has a part")
        found: dict[str, Any] = {}

        def keep(path: str, result: Any) -> Any:
            calls = sum(name.partition("[")[0] == path for name in found)
            if calls > 0:
                path = f"{path}[{calls}]"
            found[path] = result
            return result

        def keeping(path: str, _: Any) -> Callable[[Any], Any]:
            return functools.partial(keep, path)

        _call_watched(model, paths, keeping, *args, **kwargs)
        return found

    return call


@typed
def edit(model: nnx.Module, edits: Mapping[str, Callable[[Any], Any]]) -> Any:
    """The model, to be called with results inside replaced by functions of them.

    Paths are those of `capture`. What replaces a result is checked like it. An edited language
    model can be sampled, by `generate`: without a KV cache, so that the functions see the whole
    context for each token, padded to `block_size` at its end. Raises ValueError for a path that
    nothing has.
    """
    is_language_model = hasattr(model, "hidden") and hasattr(model, "logits")
    kind = _EditedLanguageModel if is_language_model else _Edited
    return kind(model, edits)


class _Edited(nnx.Module):
    """A module that is called with results inside replaced."""

    @typed
    def __init__(self, model: nnx.Module, edits: Mapping[str, Callable[[Any], Any]]) -> None:
        self.model = model
        # not a dictionary: NNX compares and hashes what isn't an array, as `jit` caches by it
        self.edits = tuple(edits.items())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        edits = dict(self.edits)
        return _call_watched(self.model, edits, lambda _, pattern: edits[pattern], *args, **kwargs)


class _EditedLanguageModel(_Edited):
    """An edited language model, whose `logits(hidden(tokens))` is a call of the model."""

    @typed
    def __init__(self, model: Any, edits: Mapping[str, Callable[[Any], Any]]) -> None:
        super().__init__(model, edits)
        self.vocab_size = model.vocab_size
        self.block_size = model.block_size

    def hidden(self, tokens: Any, *, rngs: nnx.Rngs | None = None) -> Any:
        def unchanged(*_: Any) -> Callable[[Any], Any]:
            return lambda result: result

        # a path may be in `logits` alone, so that only a whole call knows all paths
        whole_call = functools.partial(_call_watched, self.model, dict(self.edits), unchanged)
        jax.eval_shape(whole_call, tokens)
        model = _in_turn(self.model)
        with called_in(model), watching(self._watch):
            return model.hidden(tokens, rngs=rngs)

    def logits(self, x: Any) -> Any:
        model = _in_turn(self.model)
        with called_in(model), watching(self._watch):
            logits = model.logits(x)
        of_model = dict(self.edits).get("")  # the model's own call isn't made
        return logits if of_model is None else of_model(logits)

    def _watch(self, call: TypedCall) -> Callable[[Any], Any] | None:
        for pattern, function in self.edits:
            if _fits(pattern, call.path):
                return function
        return None


def _fits(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def _call_watched(
    model: nnx.Module,
    patterns: Iterable[str],
    change: Callable[[str, str], Callable[[Any], Any]],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the model, with `change(path, pattern)` of each result whose path has a pattern.

    A path has the first pattern that fits. Raises ValueError for a pattern that fits none.
    """
    patterns = list(patterns)
    paths: set[str] = set()
    used: set[str] = set()

    def watch(call: TypedCall) -> Callable[[Any], Any] | None:
        paths.add(call.path)
        for pattern in patterns:
            if _fits(pattern, call.path):
                used.add(pattern)
                return change(call.path, pattern)
        return None

    with watching(watch):
        result = _in_turn(model)(*args, **kwargs)
    for pattern in patterns:
        if pattern not in used:
            raise ValueError(f"no typed call has the path {pattern!r}{_suggestion(pattern, paths)}")
    return result


def _suggestion(pattern: str, paths: Iterable[str]) -> str:
    """The path that was perhaps meant, to append to a message, or an empty string."""
    close = difflib.get_close_matches(pattern, paths, n=1)
    if not close:
        return ""
    return f" (did you mean {close[0]!r}?)"


def _in_turn(model: nnx.Module) -> Any:
    """The model with blocks in a loop, where a result belongs to no inner trace."""
    config = getattr(model, "config", None)
    options = {"scan_layers": False, "rematerialise": False}
    if config is None or not any(getattr(config, name, False) for name in options):
        return model
    copy: Any = nnx.merge(*nnx.split(model))
    copy.config = dataclasses.replace(config, **options)
    return copy


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
