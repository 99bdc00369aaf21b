"""The tree of the typed calls in a call, with the shapes of their arguments and results."""

import contextlib
import dataclasses
import html
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from jgpt.shapes.calls import TypedCall, is_nnx, watching
from jgpt.shapes.contract import typed
from jgpt.shapes.describe import by_dimension, is_array

NAME = r"[\w*/+()-]+(?==)"
"""The name of a dimension in a printed shape; it may be an expression such as `2*embed_dim`."""
_TRACES = itertools.count()
COLOURS = ("#008b8b", "#b0489c", "#3b8c3b", "#a87400", "#3a73c9")
"""Colours that are legible on black and on white."""


def name_colours(text: str) -> dict[str, str]:
    """Return a colour for each dimension name in printed shapes, in order of appearance."""
    names = dict.fromkeys(re.findall(NAME, text))
    return dict(zip(names, itertools.cycle(COLOURS), strict=False))


# --- the tree ------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shape:
    """The dtype of an array, and the name and the size of each dimension.

    The name is empty where the annotation has none, and may be an expression: `2*embed_dim`.
    """

    dtype: str
    dimensions: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        if not self.dimensions and " " in self.dtype:  # `5 arrays`
            return self.dtype
        sizes = []
        for name, size in self.dimensions:
            if name:
                sizes.append(f"{name}={size}")
            else:
                sizes.append(str(size))
        return f"{self.dtype}[{' '.join(sizes)}]"


@jax.tree_util.register_dataclass
@dataclass
class ShapeTrace:
    """A typed call and the calls inside it. It prints as a tree, and as HTML in a notebook."""

    path: str
    name: str
    arguments: dict[str, list[Shape]]
    results: list[Shape] = field(default_factory=list)
    calls: list["ShapeTrace"] = field(default_factory=list)

    def lines(self, depth: int | None = None) -> list[str]:
        """Return the lines of the tree up to a depth: the calls, and the shapes of their
        results."""
        # The call itself is the first line, and its results are the last ones.
        rows = self._rows(0, depth, "")[1:]
        rows.append(_Row(0, "result", self.results))
        width = 0
        for row in rows:
            if row.shapes:  # a row without shapes has nothing that must be aligned
                width = max(width, len(row.label))

        lines = [self._heading()]
        for row in rows:
            label = row.label
            if not row.shapes:
                lines.append(label)
            for shape in row.shapes:
                lines.append(f"{label:<{width}}  {shape}")
                label = ""  # further results are below the first
        return lines

    def _heading(self) -> str:
        """Return the call with the shapes of its arguments."""
        arguments = []
        for name, shapes in self.arguments.items():
            texts = ", ".join(map(str, shapes))
            arguments.append(f"{name}: {texts}")
        all_arguments = ", ".join(arguments)
        return f"{self.name}({all_arguments})"

    def _rows(self, level: int, depth: int | None, path: str) -> list["_Row"]:
        name_inside = self.name.removeprefix(f"{path}.")
        rows = [_Row(level, name_inside, self.results)]
        if depth is not None and level >= depth:
            return rows
        # The names of a module's calls begin with it; a function has no path of its own.
        path_inside = path
        if self.path == self.name:
            path_inside = self.path
        for call, names_alike in _without_repetition(self.calls):
            rows += call._rows(level + 1, depth, path_inside)
            if names_alike:
                text = names_alike[0]
                if len(names_alike) > 1:  # `blocks.1 to 11: the same`
                    _, _, last_number = names_alike[-1].rpartition(".")
                    text += f" to {last_number}"
                rows.append(_Row(level + 1, f"{text}: the same", []))
        return rows

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        text = html.escape(str(self))
        colours = name_colours(text)

        def in_colour(match: re.Match[str]) -> str:
            name = match[0]
            colour = colours[name]
            return f'<span style="color:{colour}">{name}</span>'

        coloured = re.sub(NAME, in_colour, text)
        return f"<pre>{coloured}</pre>"

    def as_json(self) -> dict[str, Any]:
        """Return the tree as plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Row:
    """A call in the printed tree."""

    level: int
    name: str
    shapes: list[Shape]

    @property
    def label(self) -> str:
        """The name, indented."""
        return "  " * self.level + self.name


def _without_repetition(calls: list[ShapeTrace]) -> Iterator[tuple[ShapeTrace, list[str]]]:
    """Yield each call, with the names of the next calls if they differ only in a number."""
    position = 0
    while position < len(calls):
        first = calls[position]
        position += 1
        names_alike = []
        while position < len(calls) and _are_alike(first, calls[position]):
            names_alike.append(calls[position].name)
            position += 1
        yield first, names_alike


def _are_alike(first: ShapeTrace, second: ShapeTrace) -> bool:
    # Two calls with one name, such as `split_heads` of query and of key, are both shown.
    return first.name != second.name and _unnumbered(first) == _unnumbered(second)


def _unnumbered(trace: ShapeTrace) -> str:
    return re.sub(r"\.\d+\b", ".*", repr(trace))


# --- tracing -------------------------------------------------------------------------------------


@typed
def shape_trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> ShapeTrace:
    """Return the tree of typed calls in a call, with the shapes of arguments and results.

    Arguments are arrays or `jax.ShapeDtypeStruct`; nothing is computed. A method or function that
    only calls modules is left out. Raises ValueError if no call in it is typed.
    """
    # The tree isn't returned by `trace`, since what `eval_shape` returns must be arrays.
    trees: list[ShapeTrace] = []

    def ignore(*_: Any) -> None:
        """Do nothing: `on_call` is for pictures, which draw the values."""

    def trace(*args: Any, **kwargs: Any) -> None:
        tree = trace_calls(function, ignore, *args, **kwargs)
        trees.append(tree)

    with tracing_anew():
        jax.eval_shape(trace, *args, **kwargs)
    return trees[0]


def tracing_anew() -> contextlib.AbstractContextManager[Any]:
    """Trace each program in the block anew, since the calls in a cached one are not heard."""
    # A part of the key of JAX's programs. Nothing is compiled here that it would be attached to.
    return set_xla_metadata(shape_trace=str(next(_TRACES)))


def trace_calls(
    function: Callable[..., Any],
    on_call: Callable[[ShapeTrace, TypedCall, Any], None],
    *args: Any,
    **kwargs: Any,
) -> ShapeTrace:
    """Record the tree of a call while it runs; `on_call` gets each node, the call and the
    result."""
    function_name = getattr(function, "__name__", type(function).__name__)  # a module has no name
    root = ShapeTrace("", function_name, {})
    # The calls that are running, and for each whether it is in a module's call.
    stack = [root]
    in_module = [False]

    def watch(call: TypedCall) -> Callable[[Any], Any]:
        owner = call.arguments.get("self")
        name = call.function.__name__
        is_module = name == "__call__"
        if is_module:
            name = call.name
        arguments = _shapes_of_arguments(call)
        traced = ShapeTrace(call.path, name, arguments)
        stack.append(traced)
        is_in_module = in_module[-1] or is_nnx(owner, "Module")
        in_module.append(is_in_module)

        def leave(result: Any) -> Any:
            annotation = call.annotations.get("return")
            traced.results = shapes_of(annotation, result)
            stack.pop()
            in_module.pop()
            caller = stack[-1]
            # A base class's call; the module's own call is in the tree.
            is_super = is_module and call.path.endswith("__call__")
            if is_super or _is_left_out(traced, is_module, is_in_module):
                caller.calls += traced.calls  # the calls inside take its place
            else:
                caller.calls.append(traced)
                on_call(traced, call, result)
            return result

        return leave

    with watching(watch):
        function(*args, **kwargs)
    if not root.calls:
        raise ValueError(f"{root.name} makes no typed call: decorate functions with @jgpt.typed")
    # A function that makes a single typed call is shown as that call.
    if len(root.calls) == 1:
        return root.calls[0]
    return root


def _is_left_out(traced: ShapeTrace, is_module: bool, is_in_module: bool) -> bool:
    """Return whether a call has no line of its own in the tree."""
    if not traced.results:
        return True
    if is_module:
        return False
    is_private = traced.name.startswith("_")
    # The name of a module's call is its path.
    calls_modules = any(inner.path == inner.name for inner in traced.calls)
    # Such as `hidden`, which would show each block one level deeper than in the code.
    passes_on = is_in_module and calls_modules
    return is_private or passes_on


def _shapes_of_arguments(call: TypedCall) -> dict[str, list[Shape]]:
    """Return the shapes of the arguments that have shapes."""
    found = {}
    for name, value in call.arguments.items():
        shapes = shapes_of(call.annotations.get(name), value)
        if shapes:
            found[name] = shapes
    return found


def shapes_of(annotation: Any, value: Any) -> list[Shape]:
    """Return the shapes of the arrays in a value, with the dimension names of its annotation."""
    if is_array(annotation):
        return _shapes_of_array(annotation, value)
    leaf_annotation = getattr(annotation, "leaftype", None)  # of a jaxtyping PyTree
    if leaf_annotation:
        return _shapes_of_tree(leaf_annotation, value)

    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _shapes_of_record(annotation, value)
    parts = get_args(annotation)
    if isinstance(value, tuple) and len(parts) == len(value):
        shapes = []
        for part, item in zip(parts, value, strict=True):
            shapes += shapes_of(part, item)
        return shapes
    # For a union, the first alternative with shapes.
    for part in parts:
        shapes = shapes_of(part, value)
        if shapes:
            return shapes
    return []


def _shapes_of_array(annotation: Any, value: Any) -> list[Shape]:
    if not hasattr(value, "shape"):  # None, where an array is optional
        return []
    dtype = value.dtype.name
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):  # its dtype's own name is `key<fry>`
        dtype = "key"
    dimensions = []
    for name, sizes in by_dimension(annotation, value.shape):
        plain_name = ""  # the sizes of `*batch` share one name, which names none of them
        if len(sizes) == 1:
            plain_name = _plain(name)
        for size in sizes:
            dimensions.append((plain_name, size))
    return [Shape(dtype, tuple(dimensions))]


def _shapes_of_record(record: type, value: Any) -> list[Shape]:
    """Return the shapes of a record of arrays, such as a batch; of other records there are none."""
    try:
        hints = get_type_hints(record, include_extras=True)
    except NameError:  # a name that only a type checker imports
        return []
    shapes = []
    for entry in dataclasses.fields(record):
        annotation = hints[entry.name]
        alternatives = (annotation, *get_args(annotation))  # an array may be optional
        # A train state has trees of arrays, which would fill pages.
        if not any(map(is_array, alternatives)):
            return []
        array = getattr(value, entry.name, None)
        shapes += shapes_of(annotation, array)
    return shapes


def _shapes_of_tree(leaf_annotation: Any, tree: Any) -> list[Shape]:
    shapes = []
    for leaf in jax.tree.leaves(tree):
        shapes += shapes_of(leaf_annotation, leaf)
    # The weights of a model would fill pages.
    if len(shapes) >= 4:
        return [Shape(f"{len(shapes)} arrays", ())]
    return shapes


def _plain(name: str) -> str:
    """Return the name of a dimension without marks, or an empty text for one without a name.

    `{self.config.embed_dim}` is embed_dim, and `2*{self.embed_dim}` is 2*embed_dim.
    """
    plain = name.lstrip("?*#")
    plain = re.sub(r"(?:\w+\.)+(\w+)", r"\1", plain)  # `self.config.embed_dim`
    plain = re.sub(r"^\{([^{}]*)\}$", r"\1", plain)  # one pair of braces around all
    plain = re.sub(r"\{(\w+)\}", r"\1", plain)  # braces around a single word
    # The other braces are computed before what is around them.
    plain = plain.replace("{", "(").replace("}", ")")
    # A number such as 4 is no name: its size would be shown as `4=4`.
    has_letter = re.search(r"[A-Za-z]", plain) is not None
    is_arithmetic = re.fullmatch(r"[\w*/+()-]+", plain) is not None
    has_call = re.search(r"\w\(", plain) is not None
    if has_letter and is_arithmetic and not has_call:
        return plain
    return ""
