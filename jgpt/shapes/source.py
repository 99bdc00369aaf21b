"""The source of a call, with the shapes of the arrays that each line sets or returns."""

import ast
import dataclasses
import functools
import html
import inspect
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import TypeCheckError

from jgpt.shapes.calls import TypedCall, is_nnx, watching
from jgpt.shapes.contract import typed
from jgpt.shapes.describe import describe_value
from jgpt.shapes.expressions import name_sizes
from jgpt.shapes.sizes import evaluate_size, names_in, parse_array
from jgpt.shapes.trace import Shape, ShapeTrace, shapes_of, trace_calls, tracing_anew
from jgpt.shapes.values import Statistics, describe_statistics, statistics_of

MOST_LEAVES = 4
"""The limit of the arrays in a tuple, list or dict whose shapes are shown one by one."""
MOST_SHAPES = 4
"""The limit of the shapes that are printed for one name beside a line."""
MARGIN = 88
"""The column where shapes begin, unless the source's lines are shorter."""
_SIZES = (
    (101, 103, 50, 91),
    (211, 216, 105, 191),
    (307, 315, 153, 277),
    (401, 412, 200, 361),
    (503, 517, 251, 453),
)
"""The sizes of each symbol in texts, at each point: the first are near each other, since a function
may do something else at a half."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of a statement that have other statements."""
_ARRAYS = (jax.Array, np.ndarray)

Kind = Literal["heading", "reached", "not reached", "failed", "not finite"]
_STYLES: dict[Kind, str] = {
    "heading": "font-weight:bold",
    "reached": "",
    "not reached": "opacity:0.5",
    "failed": "color:#c03030",
    "not finite": "color:#c03030",
}


@dataclass(frozen=True)
class LineValue:
    """The arrays that a line sets or returns, under the name that it sets, or `return`."""

    name: str
    shapes: tuple[Shape, ...]
    times: int
    """How often a line set it with these shapes."""
    statistics: tuple[tuple[Statistics | None, ...], ...] = ()
    """With values, the statistics of each array for each time. None inside a transformation."""

    def __str__(self) -> str:
        texts = []
        for position, shape in enumerate(self.shapes):
            text = str(shape)
            statistics = self._statistics_of(position)
            if statistics:
                text += f" {describe_statistics(statistics)}"
            texts.append(text)
        text = ", ".join(texts)
        if len(self.shapes) > 1:
            text = f"({text})"
        return f"{self.name}: {text}"

    def _statistics_of(self, position: int) -> list[Statistics]:
        """Return the statistics of one of the arrays, for each time that has some."""
        found = []
        for arrays in self.statistics:
            statistics = arrays[position]
            if statistics is not None:
                found.append(statistics)
        return found


@dataclass(frozen=True)
class SourceLine:
    """A line of source."""

    number: int
    text: str
    values: tuple[LineValue, ...]
    is_reached: bool
    """Whether the statement on the line was executed, or for a comment the statement below it."""
    has_failed: bool = False
    is_not_finite: bool = False
    """With values, whether this is the first line that has set an array with NaN or inf."""


@dataclass(frozen=True)
class FunctionSource:
    """The lines of a function that was called."""

    file: str
    name: str
    calls: int
    lines: tuple[SourceLine, ...]
    path: str = ""
    """The file's whole path, or the name of what isn't on disk. `file` is short, to be read."""

    def margin(self, line: SourceLine) -> str:
        """Return the values of a line in one text; `x 3` is how often it has set one."""
        texts = []
        shapes_of_names: dict[str, int] = {}
        for value in line.values:
            shapes = shapes_of_names.get(value.name, 0) + 1
            shapes_of_names[value.name] = shapes
            # A loop over a size may set as many shapes as the size is.
            if shapes > MOST_SHAPES:
                continue
            text = str(value)
            # A call's own number is in the heading.
            if value.times not in (1, self.calls):
                if value.statistics:
                    text += ","
                text += f" x {value.times}"
            texts.append(text)
        for name, shapes in shapes_of_names.items():
            if shapes > MOST_SHAPES:
                texts.append(f"{name}: {shapes - MOST_SHAPES} more")
        return "; ".join(texts)


@dataclass(frozen=True)
class AnnotatedSource:
    """Functions in the order of their first call. It prints with shapes in the margin, and shows as
    HTML in a notebook."""

    functions: tuple[FunctionSource, ...]
    error: str | None = None
    """The error that ended the call, in one line."""
    note: str | None = None
    """A remark about the sizes, in one line."""
    reason: str | None = None
    """What a typed function was given or has returned, in one line, if it has rejected that."""
    error_place: tuple[str, int] | None = None
    """The path and the line that failed, if it is in a function that is shown."""

    def of(self, text: str) -> "AnnotatedSource":
        """Return the functions whose name, or the name of whose file, contains a text.

        Raises ValueError if there is none.
        """
        found = []
        for function in self.functions:
            if text in Path(function.file).stem or text in function.name:
                found.append(function)
        if not found:
            raise ValueError(f"no function that was called has {text!r} in its name or its file's")
        return dataclasses.replace(self, functions=tuple(found))

    def failing(self) -> "AnnotatedSource":
        """Return the function alone in which the call failed, if that is one that is shown."""
        found = tuple(filter(_has_failed, self.functions))
        return dataclasses.replace(self, functions=found)

    def lines(self) -> list[tuple[str, Kind]]:
        """Return the lines of the print, each with its kind."""
        lines: list[tuple[str, Kind]] = []
        for function in self.functions:
            if lines:
                lines.append(("", "reached"))
            lines.append((_heading(function), "heading"))
            longest = max(len(line.text) for line in function.lines)
            width = min(longest, MARGIN)
            for line in function.lines:
                text = _with_margin(function, line, width)
                lines.append((text, _kind(line)))
        # The error is the last line in a terminal, as that of a traceback is.
        remarks: list[tuple[str | None, Kind]] = [
            (self.note, "reached"),
            (self.reason, "failed"),
            (self.error, "failed"),
        ]
        for remark, kind in remarks:
            if remark is not None:
                lines.append(("", "reached"))
                lines.append((remark, kind))
        return lines

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self.lines())

    def _repr_html_(self) -> str:
        lines = []
        for line, kind in self.lines():
            style = _STYLES[kind]
            text = html.escape(line)
            lines.append(f'<span style="{style}">{text}</span>')
        return "<pre>" + "\n".join(lines) + "</pre>"

    def as_json(self) -> dict[str, Any]:
        """Return the source as plain data; docs/editors.md describes the fields."""
        error = None
        if self.error is not None:
            path, line = self.error_place or (None, None)
            error = {"message": self.error, "path": path, "line": line}
        functions = [dataclasses.asdict(function) for function in self.functions]
        return {
            "functions": functions,
            "error": error,
            "reason": self.reason,
            "note": self.note,
        }


@dataclass(frozen=True)
class MadeAt:
    """The line that made an array, and the lines that called its function, the nearest first."""

    path: str
    line: int
    callers: tuple[tuple[str, int], ...]
    """Paths and lines, of the functions that are shown."""


def _heading(function: FunctionSource) -> str:
    heading = f"{function.file}: {function.name}"
    if function.calls > 1:
        heading += f" x {function.calls}"
    return heading


def _kind(line: SourceLine) -> Kind:
    if line.has_failed:
        return "failed"
    if line.is_not_finite:
        return "not finite"
    if not line.is_reached:
        return "not reached"
    return "reached"


def _with_margin(function: FunctionSource, line: SourceLine, width: int) -> str:
    mark = "|"
    if line.has_failed or line.is_not_finite:
        mark = "!"
    if not line.values and not line.has_failed:
        return line.text
    return f"{line.text:<{width}} {mark} {function.margin(line)}".rstrip()


# --- public --------------------------------------------------------------------------------------


@typed
def annotated_source(
    function: Callable[..., Any], *arrays: Any, of: str | None = None, values: bool = False
) -> AnnotatedSource:
    """Return the source of a call, with the shapes of the arrays that each line sets or returns.

    `arrays` are arrays, `jax.ShapeDtypeStruct`, or texts such as `"float32[b t 8]"`, whose names
    are sizes that may be any number. Nothing is computed. The source is that of the functions in
    the folder of `function`, or in its cell of a notebook; `of` selects those with a text in their
    name or their file's.

    A line has the shapes that Python sees while JAX traces it: inside `jax.vmap` those of one
    example, inside `jax.lax.scan` and `jax.checkpoint` those of one step. A function under
    `jax.jit` is traced once for all calls with the same shapes. Arguments and results of `@typed`
    functions have the dimension names of their annotations. Raises RuntimeError while a debugger
    or coverage traces this thread, and ValueError for a function without Python source.

    With `values`, the function is computed, without `jax.jit`, and each array that is set has its
    mean, its standard deviation, and the number of its values that are not finite. The first line
    with NaN or inf is marked. A line with -inf alone is not, since a mask sets scores to -inf.
    `arrays` must then be arrays.
    """
    if values:
        source = _source_with_values(function, arrays)
    else:
        source = _source_with_shapes(function, arrays)
    if of is None:
        return source
    return source.of(of)


def _source_with_shapes(function: Callable[..., Any], arrays: tuple[Any, ...]) -> AnnotatedSource:
    symbols = _open_sizes(arrays)
    arguments_at_points = _arguments_at_points(arrays, symbols)
    calls = ((function, arguments) for arguments in arguments_at_points)
    return source_of_calls(calls, symbols, folders_of(function))


def source_of_calls(
    calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]],
    symbols: Mapping[str, Sequence[int]],
    folders: frozenset[str],
) -> AnnotatedSource:
    """Return the source of a call that is traced at some sizes.

    A call is a function and its arguments; there is one for each of the sizes of `symbols`, and
    only those that are needed are traced. `folders` are those of the functions that are shown.
    """
    recordings: list[_Recording] = []

    # A generator, since `name_sizes` takes further traces only until each size has a name.
    def trees() -> Iterator[dict[Any, tuple[Shape, ...]]]:
        for function, arguments in calls:
            recording = _record(function, arguments, folders)
            recordings.append(recording)
            yield _tree_of_records(recording.records)

    named, other_points = name_sizes(trees(), symbols)
    first = recordings[0]
    records = []
    for record, shapes in zip(first.records, named.values(), strict=True):
        records.append(dataclasses.replace(record, shapes=shapes))
    note = None
    if other_points:
        # The second point is the nearest to the first: if the lines differ there, no size has a
        # name; if not, the names hold around these sizes.
        extent = "near"
        if 1 in other_points:
            extent = "for"
        sizes = _numbers_text(_sizes_at(0, symbols))
        note = f"The lines depend on the sizes; these are the shapes {extent} {sizes}."
    return _annotated(first, records, note)


def lines_of_arrays(
    function: Callable[..., Mapping[Any, Any]],
    arguments: tuple[Any, ...],
    folders: frozenset[str],
) -> dict[Any, MadeAt]:
    """Return the line that made each of the arrays that a function returns, by their keys.

    It is the first line in `folders` that set or returned the array; for one that was only passed
    on, such as the sum in `norm(x + y)`, it is the line of that call. Nothing is computed.
    """
    recording = _Recording(folders, keeps_arrays=True)
    found: dict[Any, MadeAt] = {}

    def traced(*arguments: Any) -> None:
        # Inside the trace, where the arrays are those that the lines have set.
        for key, array in function(*arguments).items():
            made = recording.made.get(id(array))
            if made is not None:
                found[key] = made

    _fill(recording, traced, arguments)
    return found


def _source_with_values(function: Callable[..., Any], arrays: tuple[Any, ...]) -> AnnotatedSource:
    for leaf in jax.tree.leaves(arrays):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
            raise ValueError(f"values=True needs arrays with values, not {describe_value(leaf)}")
    folders = folders_of(function)
    recording = _record(function, arrays, folders, has_values=True)
    note = None
    if recording.not_finite is not None:
        place, _, name = recording.not_finite
        function_name = place.name.rpartition("<locals>.")[2]
        note = f"{name} in {function_name} is the first array that is not finite"
    return _annotated(recording, recording.records, note)


def _annotated(
    recording: "_Recording", records: "list[_Record]", note: str | None
) -> AnnotatedSource:
    """Return the source of a call, whose records may have names for open sizes."""
    functions = []
    for place in recording.calls:
        function = _function_source(place, records, recording)
        has_values = any(line.values for line in function.lines)
        if has_values or _has_failed(function):
            functions.append(function)
    if not functions and recording.error is None:
        raise ValueError("no line sets an array: lambdas and code without source have no lines")
    functions.sort(key=_has_failed)  # what has failed is printed last, just above the error
    error = _text_of(records, "error")
    reason = _text_of(records, "reason")
    error_place = None
    if recording.failed is not None:
        place, line = recording.failed
        error_place = (place.file, line)
    return AnnotatedSource(tuple(functions), error, note, reason, error_place)


def _has_failed(function: FunctionSource) -> bool:
    return any(line.has_failed for line in function.lines)


def annotated_tree(function: Callable[..., Any], *arrays: Any) -> ShapeTrace:
    """Return the tree of typed calls in a call whose arrays may be texts.

    It has the arguments and the result of the call itself, also if no function is typed.
    """
    symbols = _open_sizes(arrays)
    arguments_at_points = _arguments_at_points(arrays, symbols)
    trees = (_tree_of_call(function, arguments) for arguments in arguments_at_points)
    first = next(trees)
    order_of_arguments = list(first.arguments)
    named = name_sizes(itertools.chain([first], trees), symbols).tree
    # JAX sorts the keys of a dict.
    named.arguments = {name: named.arguments[name] for name in order_of_arguments}
    return named


def _tree_of_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> ShapeTrace:
    trees = []

    def trace(*arguments: Any) -> None:
        results: list[Any] = []

        # `trace_calls` returns no result, and the tree of the call shows it.
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            results.append(result)
            return result

        def ignore(*_: Any) -> None:
            """Do nothing: `on_call` is for pictures, which draw the values."""

        call.__name__ = getattr(function, "__name__", type(function).__name__)
        try:
            tree = trace_calls(call, ignore, *arguments)
        except ValueError:
            if not results:  # the function has raised it
                raise
            tree = ShapeTrace("", call.__name__, {})  # no call is typed
        if not tree.results:
            tree.results = list(_shapes(None, results[0]))
        if not tree.arguments:
            names = parameter_names(function, len(arguments))
            for name, argument in zip(names, arguments, strict=True):
                tree.arguments[name] = list(_shapes(None, argument))
        trees.append(tree)

    with tracing_anew():
        jax.eval_shape(trace, *arguments)
    return trees[0]


def parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first parameters of a function."""
    parameters = inspect.signature(function).parameters
    names = list(parameters)[:count]
    for position in range(len(names), count):  # those of `*arrays` have none
        number = position + 1
        names.append(f"argument {number}")
    return names


def _open_sizes(arrays: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of each name in the texts among some arrays."""
    symbols: dict[str, tuple[int, ...]] = {}
    for array in arrays:
        if not isinstance(array, str):
            continue
        _, dimensions = parse_array(array)
        for name in names_in(dimensions):
            if name in symbols:
                continue
            if len(symbols) == len(_SIZES):
                raise ValueError(f"{array!r}: at most {len(_SIZES)} names are open sizes")
            symbols[name] = _SIZES[len(symbols)]
    return symbols


def _arguments_at_points(
    arrays: Sequence[Any], symbols: Mapping[str, Sequence[int]]
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments with each of the sizes of the symbols."""
    points = 1
    if symbols:
        points = len(_SIZES[0])
    for point in range(points):
        sizes = _sizes_at(point, symbols)
        arguments = [_array(array, sizes) for array in arrays]
        yield tuple(arguments)


def _sizes_at(point: int, symbols: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {name: numbers[point] for name, numbers in symbols.items()}


def _numbers_text(sizes: Mapping[str, int]) -> str:
    """Return the sizes as a text such as `b=101, t=103`."""
    texts = []
    for name, number in sizes.items():
        texts.append(f"{name}={number}")
    return ", ".join(texts)


def _array(array: Any, sizes: Mapping[str, int]) -> Any:
    """Return an abstract array for a text, and any other argument as it is."""
    if not isinstance(array, str):
        return array
    dtype, dimensions = parse_array(array)
    shape = []
    for size in dimensions.split():
        number = evaluate_size(size, sizes)
        if number < 0:  # such as `t-200`, where t is 101
            numbers = _numbers_text(sizes)
            raise ValueError(f"{array!r}: {size} is {number} for {numbers}")
        shape.append(number)
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def folders_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the folder of a function, or those of the methods of a module's class and of its
    call."""
    written: Any = inspect.unwrap(function)
    if isinstance(written, functools.partial):
        return folders_of(written.func)
    if inspect.isroutine(written):
        functions = [written]
    elif isinstance(written, type):
        functions = [*_methods_written_in(written), written.__init__]
    else:
        kind = type(written)
        # The call may be inherited from another file than that of the methods.
        functions = [*_methods_written_in(kind), kind.__call__]
    folders = set()
    for function_of_call in functions:
        code = _code_of(function_of_call)
        if code is not None:
            folders.add(_folder(code.co_filename))
    return frozenset(folders)


def _methods_written_in(kind: type) -> Iterator[Any]:
    """Yield what a class's body defines, without the methods that a dataclass adds.

    From Python 3.13 on, one of these is a function of the standard library's folder. The others
    have no source, but the name of their file is `<string>`, which is also that of the text after
    `python -c`, whose lines Python keeps from 3.13 on.
    """
    for attribute in vars(kind).values():
        if not callable(attribute):
            continue
        code = _code_of(attribute)
        if code is None:
            continue
        is_own = inspect.unwrap(attribute).__module__ == kind.__module__
        has_source = bool(linecache.getlines(code.co_filename))
        is_generated = code.co_qualname.startswith("__create_fn__")  # by `dataclasses`
        if is_own and has_source and not is_generated:
            yield attribute


def _code_of(function: Any) -> types.CodeType | None:
    """Return the code of a function below its decorators; objects and built-in functions have
    none."""
    return getattr(inspect.unwrap(function), "__code__", None)


@functools.cache
def _folder(file: str) -> str:
    """Return a file's folder, or the name of what isn't on disk, such as a cell of a notebook."""
    path = Path(file)
    if path.is_file():
        return str(path.parent)
    return file


# --- recording -----------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The place of a function. Code objects of two files may be equal, so they are no keys."""

    file: str
    name: str
    line: int


def _place(code: types.CodeType) -> _Place:
    return _Place(code.co_filename, code.co_qualname, code.co_firstlineno)


@dataclass(frozen=True)
class _Record:
    """A name that a statement has set, or an operand of the one that failed."""

    place: _Place
    line: int
    name: str
    shapes: tuple[Shape, ...]
    statistics: tuple[Statistics | None, ...] = ()


class _Recording:
    """What happened in the functions of some folders while a call ran."""

    def __init__(
        self,
        folders: frozenset[str],
        *,
        has_values: bool = False,
        keeps_arrays: bool = False,
    ) -> None:
        self.folders = folders
        self.has_values = has_values
        self.keeps_arrays = keeps_arrays
        self.made: dict[int, MadeAt] = {}
        """With `keeps_arrays`, the first line that had each array, by the array's id."""
        self._arrays: list[Any] = []
        self.not_finite: tuple[_Place, int, str] | None = None
        """The first line that has set an array with NaN or inf, and the name that it has set."""
        self.records: list[_Record] = []
        self.calls: dict[_Place, int] = {}
        """How often each function was called."""
        self.statements: dict[_Place, _Statements | None] = {}
        self.reached: set[tuple[_Place, int]] = set()
        self.failed: tuple[_Place, int] | None = None
        self.error: str | None = None
        self._returned: dict[_Place, int] = {}
        """The line of the last `return` of each function."""
        self._annotations: dict[_Place, dict[str, Any]] = {}

    def watch(self, call: TypedCall) -> None:
        """Note the annotations of a typed function, which is called next."""
        code = _code_of(call.function)
        if code is not None:
            place = _place(code)
            self._annotations[place] = call.annotations

    def trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        """Return what Python calls for each line of a frame, or None for one that isn't shown."""
        code = frame.f_code
        # Comprehensions, lambdas, modules and class bodies have names in brackets or no lines of
        # their own.
        is_shown = _folder(code.co_filename) in self.folders and not code.co_name.startswith("<")
        if event != "call" or not is_shown:
            return None
        place = _place(code)
        if place not in self.statements:
            self.statements[place] = _read_statements(code)
        statements = self.statements[place]
        if statements is None:
            return None
        is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
        goes_on = is_generator and place in self.calls  # Python calls it again after each `yield`
        if not goes_on:
            self.calls[place] = self.calls.get(place, 0) + 1
        annotations = self._annotations.get(place, {})
        self._add_arguments(place, statements, annotations, frame)
        return self._trace_lines(place, statements, annotations.get("return"))

    def _add_arguments(
        self,
        place: _Place,
        statements: "_Statements",
        annotations: dict[str, Any],
        frame: types.FrameType,
    ) -> None:
        """Record the arguments of a call that begins, at the line of its `def`."""
        arguments = dict(frame.f_locals)
        for name, value in arguments.items():
            self._add(place, statements.first, name, annotations.get(name), value)
        if not self.keeps_arrays:
            return
        # An argument that no line has set, such as a sum in the call, is made by the caller's line.
        caller = self._shown_caller(frame)
        if caller is None:
            return
        for value in arguments.values():
            self._note(value, *caller)

    def _trace_lines(self, place: _Place, statements: "_Statements", annotation: Any) -> Any:
        """Return the function that Python calls for each event in one call of a function.

        A `line` event comes before the line runs. So the variables that a statement has set are
        read at the next event, unless it has raised an exception.
        """
        running: int | None = None  # the line of the statement that is running
        last_return: int | None = None
        is_raising = False

        def trace_line(frame: types.FrameType, event: str, value: Any) -> Any:
            nonlocal running, last_return, is_raising
            if event == "exception":
                is_raising = True
            elif event == "line":
                if running is not None and not is_raising:
                    self._add_variables(place, statements, running, frame)
                is_raising = False  # if there was an exception, an `except` has caught it
                running = statements.start_of(frame.f_lineno)
                self.reached.add((place, running))
                if running in statements.returns:
                    last_return = running
            # An exception that leaves the function ends it with such an event, too.
            elif event == "return" and not is_raising and running is not None:
                self._add_variables(place, statements, running, frame)
                # A `with` statement ends after the `return` inside it.
                line = last_return or running
                self._returned[place] = line
                self._add(place, line, "return", annotation, value)
                self._note(value, frame, place, line)
            return trace_line

        return trace_line

    def _add_variables(
        self, place: _Place, statements: "_Statements", line: int, frame: types.FrameType
    ) -> None:
        """Record what a statement has set."""
        variables = dict(frame.f_locals)
        for name in statements.names.get(line, ()):
            value = variables.get(name)
            self._add(place, line, name, None, value)
            self._note(value, frame, place, line)
        for name, attribute in statements.attributes.get(line, ()):
            owner = variables.get(name)
            # Not getattr, which would call properties.
            attributes = getattr(owner, "__dict__", {})
            value = attributes.get(attribute)
            self._add(place, line, f"{name}.{attribute}", None, value)

    def _add(self, place: _Place, line: int, name: str, annotation: Any, value: Any) -> None:
        shapes = _shapes(annotation, value)
        if not shapes:
            return
        statistics: tuple[Statistics | None, ...] = ()
        if self.has_values:
            statistics = _statistics(value, len(shapes))
        self.records.append(_Record(place, line, name, shapes, statistics))
        for found in statistics:
            if self.not_finite is None and found is not None and found.is_alarming:
                self.not_finite = (place, line, name)

    def _note(self, value: Any, frame: types.FrameType, place: _Place, line: int) -> None:
        """Note the line that made an array, if it is the first that has it."""
        if not self.keeps_arrays or not isinstance(value, jax.Array):
            return
        if id(value) in self.made:
            return
        self._arrays.append(value)  # since the id of an array that is gone may be another's
        callers = []
        caller = self._shown_caller(frame)
        while caller is not None:
            caller_frame, caller_place, caller_line = caller
            callers.append((caller_place.file, caller_line))
            caller = self._shown_caller(caller_frame)
        self.made[id(value)] = MadeAt(place.file, line, tuple(callers))

    def _shown_caller(self, frame: types.FrameType) -> tuple[types.FrameType, _Place, int] | None:
        """Return the nearest caller that is shown, with its place and the line that it runs."""
        caller = frame.f_back
        while caller is not None:
            place = _place(caller.f_code)
            statements = self.statements.get(place)
            if statements is not None:
                return caller, place, statements.start_of(caller.f_lineno)
            caller = caller.f_back
        return None

    def fail(self, error: Exception) -> None:
        """Record the last line that is shown among those that an error passed through."""
        text = str(error).strip()
        reason = None
        if isinstance(error, TypeCheckError):
            reason = _typed_reason(error)
            text = text.rpartition("\n")[2]
        text = " ".join(text.split())  # JAX's messages may have several lines
        self.error = f"{type(error).__name__}: {text}".removesuffix(": ")
        self._find_failed_line(error)
        # Texts are records too, so that their sizes get the same names.
        self.records.append(_text_record("error", self.error))
        if reason is not None:
            self.records.append(_text_record("reason", reason))

    def _find_failed_line(self, error: Exception) -> None:
        innermost = None  # of the frames that are shown
        traceback = error.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if _place(frame.f_code) in self.calls:
                innermost = traceback
            rejected = self._rejected_function(error, frame)
            if rejected is not None:
                self.failed = (rejected, self._returned[rejected])
                return
            traceback = traceback.tb_next
        if innermost is None:
            return
        place = _place(innermost.tb_frame.f_code)
        statements = self.statements[place]
        assert statements is not None
        line = statements.start_of(innermost.tb_lineno)
        self.failed = (place, line)
        # The line has set nothing, so it shows what it has read.
        variables = dict(innermost.tb_frame.f_locals)
        for name in statements.operands.get(line, ()):
            self._add(place, line, name, None, variables.get(name))

    def _rejected_function(self, error: Exception, frame: types.FrameType) -> _Place | None:
        """Return the function whose result is rejected in a frame of the contract.

        It has returned, so it has no frame any more.
        """
        if not isinstance(error, TypeCheckError) or not _is_contract(frame):
            return None
        first_line = str(error).partition("\n")[0]
        if " returned a wrong result." not in first_line:
            return None
        code = getattr(frame.f_locals.get("function"), "__code__", None)
        if code is None:
            return None
        place = _place(code)
        if place not in self._returned:  # one that isn't shown
            return None
        return place


def _is_contract(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__") == "jgpt.shapes.contract"


def _typed_reason(error: Exception) -> str | None:
    """Return the first lines of the error of a typed function as a sentence."""
    lines = str(error).strip().splitlines()
    if len(lines) != 4:
        return None
    subject_line, expected_line, got_line, _ = lines
    subject = subject_line.removesuffix(".")
    # The module of a user's file has a name that nobody has given it. It is that of a frame, or of
    # the function that a frame of the contract checks.
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        checked_function = frame.f_locals.get("function")
        module = frame.f_globals.get("__name__")
        module_of_checked = getattr(checked_function, "__module__", None)
        subject = subject.removeprefix(f"{module}.")
        subject = subject.removeprefix(f"{module_of_checked}.")
        traceback = traceback.tb_next
    expected = expected_line.removeprefix("Expected: ")
    got = got_line.removeprefix("Got: ")
    return f"{subject}: {got}, and not {expected}"


_TEXT = _Place("", "", 0)
"""The place of records that are texts."""


def _text_record(name: str, text: str) -> _Record:
    """Return a text as a record: each number in it is a size, and the words before it its name."""
    # Neither a part of a word or of a decimal, nor a number with leading zeros, which `int` would
    # remove.
    whole_number = r"(?<![\w.])(?:0|[1-9]\d*)(?!\w)"
    dimensions: list[tuple[str, Any]] = []
    end = 0
    for found in re.finditer(whole_number, text):
        words_before = text[end : found.start()]
        dimensions.append((words_before, int(found[0])))
        end = found.end()
    rest = text[end:]
    return _Record(_TEXT, 0, name, (Shape(rest, tuple(dimensions)),))


# The inverse of `_text_record`.
def _text_of(records: Sequence[_Record], name: str) -> str | None:
    for record in records:
        if record.place == _TEXT and record.name == name:
            (shape,) = record.shapes
            text = ""
            for words_before, size in shape.dimensions:
                text += f"{words_before}{size}"
            rest = shape.dtype
            return text + rest
    return None


def _record(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folders: frozenset[str],
    *,
    has_values: bool = False,
) -> _Recording:
    """Call a function, abstractly unless it `has_values`, and record what the functions in
    `folders` do."""
    recording = _Recording(folders, has_values=has_values)
    _fill(recording, function, arguments)
    return recording


def _fill(recording: _Recording, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a function, and record what the functions in the recording's folders do."""
    # A thread has one trace function, so a debugger would lose its own.
    if sys.gettrace() is not None:
        raise RuntimeError(
            "a debugger or coverage traces this thread: end it, or call annotated_source elsewhere"
        )
    linecache.checkcache()  # a file may have been changed since it was read

    def traced(*arguments: Any) -> None:
        sys.settrace(recording.trace)
        try:
            function(*arguments)
        finally:
            sys.settrace(None)

    with watching(recording.watch):
        try:
            if recording.has_values:
                # A loop of JAX is then one of Python, whose steps have values.
                with jax.disable_jit():
                    traced(*arguments)
            else:
                with tracing_anew():
                    jax.eval_shape(traced, *arguments)
        # The source of a call that fails is shown with its error, so nothing is raised.
        except Exception as error:
            recording.fail(error)


def _statistics(value: Any, count: int) -> tuple[Statistics | None, ...]:
    """Return the statistics of each array in a value, or of all of them if they have one shape."""
    if is_nnx(value, "Variable"):
        value = value[...]
    arrays = _arrays_among(jax.tree.leaves(value))
    if len(arrays) == count:
        return tuple(statistics_of([array]) for array in arrays)
    return (statistics_of(arrays),) * count


def _shapes(annotation: Any, value: Any) -> tuple[Shape, ...]:
    """Return the shapes of a value's arrays, by the annotation's names where there is one."""
    if annotation is not None:
        shapes = shapes_of(annotation, value)
        if shapes:
            return tuple(shapes)
    if isinstance(value, (*_ARRAYS, jax.ShapeDtypeStruct)) or is_nnx(value, "Variable"):
        return (_shape(value),)
    if dataclasses.is_dataclass(value):
        shapes = shapes_of(type(value), value)
        return tuple(shapes)
    if not isinstance(value, (tuple, list, dict)):
        return ()

    # An object in a list, such as a module, is one leaf: its weights would fill pages.
    def is_leaf(part: Any) -> bool:
        return part is not value and _is_object(part)

    arrays = _arrays_among(jax.tree.leaves(value, is_leaf=is_leaf))
    if not arrays:
        return ()
    if len(arrays) > MOST_LEAVES:
        return (Shape(f"{len(arrays)} arrays", ()),)
    return tuple(_shape(array) for array in arrays)


def _arrays_among(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]


def _is_object(value: Any) -> bool:
    return not isinstance(value, (tuple, list, dict))


def _shape(array: Any) -> Shape:
    dtype = array.dtype.name
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):  # its own name is `key<fry>`
        dtype = "key"
    dimensions = [("", size) for size in array.shape]
    return Shape(dtype, tuple(dimensions))


def _tree_of_records(records: list[_Record]) -> dict[Any, tuple[Shape, ...]]:
    """Return the shapes of records by what they are the shapes of, in their order."""
    # The keys are a part of the tree's structure, so that only calls that set the same names in
    # the same lines are compared.
    tree = {}
    for index, record in enumerate(records):
        key = (index, record.place, record.line, record.name)
        tree[key] = record.shapes
    return tree


# --- source --------------------------------------------------------------------------------------


class _Statements:
    """The statements of a function, by the number of their first lines."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.first = function.lineno
        self.last = function.end_lineno or function.lineno
        self.names: dict[int, list[str]] = {}
        """The names that a statement sets, without those of comprehensions."""
        self.attributes: dict[int, list[tuple[str, str]]] = {}
        """Such as `self` and `x` of `self.x = ...`."""
        self.operands: dict[int, list[str]] = {}
        """The names that a statement reads."""
        self.returns: set[int] = set()
        self._starts: dict[int, int] = {}
        for statement in _statements_below(function):
            self._read(statement)

    def _read(self, statement: ast.stmt) -> None:
        if _is_never_executed(statement):
            return
        line = statement.lineno
        self._starts[line] = line
        if isinstance(statement, ast.Return):
            self.returns.add(line)
        for part in _own_parts(statement):
            last = part.end_lineno or part.lineno
            for number in range(part.lineno, last + 1):
                self._starts.setdefault(number, line)
            for node in _walk(part):
                self._read_node(node, line)

    def _read_node(self, node: Any, line: int) -> None:
        if isinstance(node, ast.Name):
            names = self.operands
            if isinstance(node.ctx, ast.Store):
                names = self.names
            names_of_line = names.setdefault(line, [])
            if node.id not in names_of_line:
                names_of_line.append(node.id)
        elif _is_attribute_set(node):
            attributes = self.attributes.setdefault(line, [])
            attributes.append((node.value.id, node.attr))

    def start_of(self, line: int) -> int:
        """Return the first line of the statement that a line is a part of."""
        return self._starts.get(line, line)

    def start_below(self, line: int) -> int:
        """Return `start_of` a line, or of the next statement for a line without one.

        Such lines are comments, an `else:`, and those of the signature and the docstring. After the
        last statement it is that of the last one.
        """
        if line in self._starts:
            return self._starts[line]
        starts = sorted(self._starts.values())
        for start in starts:
            if start > line:
                return start
        if not starts:  # a function of a docstring alone
            return line
        return starts[-1]


def _is_never_executed(statement: ast.stmt) -> bool:
    """Return whether Python compiles nothing for a statement, as for a docstring."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, (ast.Global, ast.Nonlocal))


def _statements_below(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function, also those in blocks, without those of functions and
    classes inside it."""
    for field in _BLOCKS:
        children = getattr(node, field, [])
        if not isinstance(children, list):  # the body of a lambda
            continue
        for child in children:
            if isinstance(child, ast.stmt):
                yield child
            if not isinstance(child, _SCOPES):
                yield from _statements_below(child)


def _is_attribute_set(node: Any) -> bool:
    """Return whether a node is the `self.x` of `self.x = ...`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return isinstance(node.value, ast.Name)


def _own_parts(statement: ast.stmt) -> list[ast.expr | ast.stmt]:
    """Return the expressions of a statement without those of the statements in its blocks."""
    if isinstance(statement, _SCOPES):  # it sets a function or a class, which is no array
        return []
    if not hasattr(statement, "body"):  # it has no blocks
        return [statement]
    parts: list[ast.expr | ast.stmt] = []
    for field, child in ast.iter_fields(statement):
        if field in _BLOCKS:
            continue
        nodes = child
        if not isinstance(child, list):
            nodes = [child]
        for node in nodes:
            if isinstance(node, ast.expr):
                parts.append(node)
            elif isinstance(node, ast.withitem):  # `open(path) as file`
                parts.append(node.context_expr)
                if node.optional_vars is not None:
                    parts.append(node.optional_vars)
    return parts


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression, without those of scopes inside it.

    From Python 3.12 on, the variables of a comprehension are among the function's own.
    """
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_COMPREHENSIONS, *_SCOPES)):
            yield from _walk(child)


def _read_statements(code: types.CodeType) -> _Statements | None:
    """Return the statements of a function, or None if its source can't be read."""
    source = "".join(linecache.getlines(code.co_filename))
    tree = _tree(source)
    if tree is None:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        # Two classes of a file may have methods of one name; the line tells them apart.
        first_lines = [node.lineno]
        if node.decorator_list:  # Python counts decorators as a part of the function
            first_lines.append(node.decorator_list[0].lineno)
        if node.name == code.co_name and code.co_firstlineno in first_lines:
            return _Statements(node)
    return None


@functools.lru_cache(maxsize=64)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:  # the file was changed since it was imported
        return None


def _function_source(
    place: _Place, records: list[_Record], recording: _Recording
) -> FunctionSource:
    statements = recording.statements[place]
    assert statements is not None
    values_of_lines = _values_of_lines(place, records)
    not_finite = None
    if recording.not_finite is not None:
        not_finite_place, not_finite_line, _ = recording.not_finite
        not_finite = (not_finite_place, not_finite_line)
    lines = []
    for number in range(statements.first, statements.last + 1):
        text = linecache.getline(place.file, number).rstrip("\n")
        has_failed = recording.failed == (place, number)
        statement = (place, statements.start_below(number))
        line = SourceLine(
            number,
            text,
            tuple(values_of_lines.get(number, ())),
            is_reached=statement in recording.reached,
            has_failed=has_failed,
            is_not_finite=not_finite == (place, number),
        )
        lines.append(line)
        if has_failed:  # what is below hasn't run
            break
    calls = recording.calls[place]
    return FunctionSource(_short(place.file), place.name, calls, tuple(lines), place.file)


def _values_of_lines(place: _Place, records: list[_Record]) -> dict[int, list[LineValue]]:
    """Return the values of each line of a function; records with the same shapes are one value."""
    records_alike: dict[tuple[int, str, tuple[Shape, ...]], list[_Record]] = {}
    for record in records:
        if record.place == place:
            key = (record.line, record.name, record.shapes)
            records_alike.setdefault(key, []).append(record)
    values: dict[int, list[LineValue]] = {}
    for (line, name, shapes), alike in records_alike.items():
        statistics = []
        for record in alike:
            if record.statistics:
                statistics.append(record.statistics)
        value = LineValue(name, shapes, len(alike), tuple(statistics))
        values.setdefault(line, []).append(value)
    return values


def _short(file: str) -> str:
    """Return a file's path in the working directory, or in the folder that it is imported from."""
    path = Path(file)
    # Jupyter names a cell like a file in a temporary folder, with a number that differs each time.
    if path.parent.name.startswith("ipykernel_"):
        return "cell"
    shortest = path
    folders = [Path.cwd(), *map(Path, sys.path)]
    for folder in folders:
        # `sys.path` may have an empty entry, which is the working directory.
        if not folder.is_absolute() or not path.is_relative_to(folder):
            continue
        relative = path.relative_to(folder)
        if len(relative.parts) < len(shortest.parts):
            shortest = relative
    return str(shortest)
