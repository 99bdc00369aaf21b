"""The source of a call, with the shapes of the arrays that each line sets or returns."""

import ast
import bisect
import dataclasses
import functools
import html
import inspect
import itertools
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Shaped, TypeCheckError

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
_NUMBERS = (
    (101, 103, 50, 91),
    (211, 216, 105, 191),
    (307, 315, 153, 277),
    (401, 412, 200, 361),
    (503, 517, 251, 453),
)
"""The numbers of each open size, at each point: the first are near each other, since a function may
do something else at a half."""
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
"""What a statement may have inside it that is executed for itself."""
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions with variables of their own, which from Python 3.12 on are among the function's."""
_ANY = Shaped[Array, "..."]
"""The annotation of an array whose dimensions have no names."""
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)

Line = tuple[str, int]
"""The path and the number of a line."""
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
        texts = list(map(str, self.shapes))
        for position, of_array in enumerate(zip(*self.statistics, strict=True)):
            known = [statistics for statistics in of_array if statistics is not None]
            if known:
                texts[position] += f" {describe_statistics(known)}"
        text = ", ".join(texts)
        if len(texts) > 1:
            text = f"({text})"
        return f"{self.name}: {text}"


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
    error_place: Line | None = None
    """The line that failed, if it is in a function that is shown."""

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
        if self.note is not None:
            lines.extend([("", "reached"), (self.note, "reached")])
        # The error is the last line in a terminal, as that of a traceback is.
        for remark in (self.reason, self.error):
            if remark is not None:
                lines.extend([("", "reached"), (remark, "failed")])
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
        """Return the source as plain data; docs/api.md lists the fields."""
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
    folders = folders_of(function)
    if values:
        for leaf in jax.tree.leaves(arrays):
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float)):
                what = describe_value(leaf)
                raise ValueError(f"values=True needs arrays with values, not {what}")
        recording = _record(function, arrays, folders, has_values=True)
        source = _annotated(recording, recording.sized, recording.note)
    else:
        symbols = _open_sizes(arrays)
        calls = ((function, arguments) for arguments in _arguments_at_points(arrays, symbols))
        source = source_of_calls(calls, symbols, folders)
    if of is None:
        return source
    return source.of(of)


def source_of_calls(
    calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]],
    symbols: Mapping[str, Sequence[int]],
    folders: frozenset[str],
) -> AnnotatedSource:
    """Return the source of a call that is traced at some sizes.

    A call is a function and its arguments; there is one for each of the sizes of `symbols`, and
    only those that are needed are traced. `folders` are those of the functions that are shown.
    """
    # A generator, since `name_sizes` takes further traces only until each size has a name.
    recordings = (_record(*call, folders) for call in calls)
    first = next(recordings)
    others = (recording.sized for recording in recordings)
    named, other_points = name_sizes(itertools.chain([first.sized], others), symbols)
    note = None
    if other_points:
        # The second point is the nearest to the first: if the lines differ there, no size has a
        # name; if not, the names hold around these sizes.
        extent = "near"
        if 1 in other_points:
            extent = "for"
        sizes = {name: numbers[0] for name, numbers in symbols.items()}
        note = f"The lines depend on the sizes; these are the shapes {extent} {_text_of(sizes)}."
    return _annotated(first, named, note)


def lines_of_arrays(
    function: Callable[..., Mapping[Any, Any]],
    arguments: tuple[Any, ...],
    folders: frozenset[str],
) -> dict[Any, list[Line]]:
    """Return the line that made each of the arrays that a function returns, by their keys, followed
    by the lines that called its function, the nearest first.

    It is the first line in `folders` that set or returned the array; for one that was only passed
    on, such as the sum in `norm(x + y)`, it is the line of that call. Nothing is computed.
    """
    arrays: dict[Any, Any] = {}

    # The arrays that lines have set exist only inside the trace.
    def traced(*arguments: Any) -> None:
        arrays.update(function(*arguments))

    recording = _record(traced, arguments, folders)
    found = {}
    for key, array in arrays.items():
        if id(array) in recording.made:
            _, found[key] = recording.made[id(array)]
    return found


def _annotated(recording: "_Recording", sized: "_Sized", note: str | None) -> AnnotatedSource:
    """Return the source of a call, whose sizes may have names."""
    functions = []
    for function in recording.functions.values():
        if function is not None:
            source = _function_source(function, sized.records, recording)
            has_values = any(line.values for line in source.lines)
            if has_values or _has_failed(source):
                functions.append(source)
    if not functions and recording.error is None:
        raise ValueError("no line sets an array: lambdas and code without source have no lines")
    functions.sort(key=_has_failed)  # what has failed is printed last, just above the error
    error_place = None
    if recording.failed is not None:
        place, line = recording.failed
        error_place = (place.file, line)
    return AnnotatedSource(tuple(functions), sized.error, note, sized.reason, error_place)


def _has_failed(function: FunctionSource) -> bool:
    return function.lines[-1].has_failed


def _function_source(
    function: "_Function", records: "list[_Record]", recording: "_Recording"
) -> FunctionSource:
    place = function.place
    values = _values_of_lines(place, records)
    lines = []
    for number in range(function.first, function.last + 1):
        line = SourceLine(
            number,
            linecache.getline(place.file, number).rstrip("\n"),
            tuple(values.get(number, ())),
            is_reached=function.is_reached(number),
            has_failed=recording.failed == (place, number),
            is_not_finite=recording.not_finite == (place, number),
        )
        lines.append(line)
        if line.has_failed:  # what is below hasn't run
            break
    return FunctionSource(_short(place.file), place.name, function.calls, tuple(lines), place.file)


def _values_of_lines(place: "_Place", records: "list[_Record]") -> dict[int, list[LineValue]]:
    """Return the values of each line of a function; records with the same shapes are one value."""
    records_alike: dict[tuple[int, str, tuple[Shape, ...]], list[_Record]] = {}
    for record in records:
        if record.place == place:
            key = (record.line, record.name, record.shapes)
            records_alike.setdefault(key, []).append(record)
    values: dict[int, list[LineValue]] = {}
    for (line, name, shapes), alike in records_alike.items():
        statistics = tuple(record.statistics for record in alike if record.statistics)
        values.setdefault(line, []).append(LineValue(name, shapes, len(alike), statistics))
    return values


def _short(file: str) -> str:
    """Return a file's path in the working directory, or in the folder that it is imported from."""
    path = Path(file)
    # Jupyter names a cell like a file in a temporary folder, with a number that differs each time.
    if path.parent.name.startswith("ipykernel_"):
        return "cell"
    paths = [path]
    for folder in (Path.cwd(), *sys.path):
        if path.is_relative_to(folder):
            paths.append(path.relative_to(folder))
    shortest = min(paths, key=lambda path: len(path.parts))
    return str(shortest)


# --- trees ---------------------------------------------------------------------------------------


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
        def call(*arguments: Any) -> None:
            results.append(function(*arguments))

        call.__name__ = getattr(function, "__name__", type(function).__name__)
        try:
            tree = trace_calls(call, lambda *_: None, *arguments)
        except ValueError:
            if not results:  # the function has raised it
                raise
            tree = ShapeTrace("", call.__name__, {})  # no call is typed
        if not tree.results:
            tree.results = list(_shapes(None, results[0]))
        if not tree.arguments:
            bound = inspect.signature(function).bind(*arguments)
            for name, argument in bound.arguments.items():
                tree.arguments[name] = list(_shapes(None, argument))
        trees.append(tree)

    with tracing_anew():
        jax.eval_shape(trace, *arguments)
    return trees[0]


# --- open sizes ----------------------------------------------------------------------------------


def _open_sizes(arrays: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each name in the texts among some arrays."""
    symbols: dict[str, tuple[int, ...]] = {}
    for array in arrays:
        if not isinstance(array, str):
            continue
        _, dimensions = parse_array(array)
        for name in names_in(dimensions):
            if name in symbols:
                continue
            if len(symbols) == len(_NUMBERS):
                raise ValueError(f"{array!r}: at most {len(_NUMBERS)} names are open sizes")
            symbols[name] = _NUMBERS[len(symbols)]
    return symbols


def _arguments_at_points(
    arrays: Sequence[Any], symbols: Mapping[str, Sequence[int]]
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments with each of the numbers of the symbols."""
    points = list(zip(*symbols.values(), strict=True)) or [()]
    for numbers in points:
        sizes = dict(zip(symbols, numbers, strict=True))
        yield tuple(_array(array, sizes) for array in arrays)


def _array(array: Any, sizes: Mapping[str, int]) -> Any:
    """Return an abstract array for a text, and any other argument as it is."""
    if not isinstance(array, str):
        return array
    dtype, dimensions = parse_array(array)
    shape = []
    for size in dimensions.split():
        number = evaluate_size(size, sizes)
        if number < 0:  # such as `t-200`, where t is 101
            raise ValueError(f"{array!r}: {size} is {number} for {_text_of(sizes)}")
        shape.append(number)
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _text_of(sizes: Mapping[str, int]) -> str:
    """Return sizes as a text such as `b=101, t=103`."""
    return ", ".join(f"{name}={number}" for name, number in sizes.items())


# --- folders -------------------------------------------------------------------------------------


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
    codes = filter(None, map(_code_of, functions))
    return frozenset(_folder(code.co_filename) for code in codes)


def _methods_written_in(kind: type) -> Iterator[Any]:
    """Yield what a class's body defines, without the methods that a dataclass adds."""
    for attribute in vars(kind).values():
        code = _code_of(attribute)
        if code is not None and code.co_qualname.startswith(f"{kind.__qualname__}."):
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


_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Record:
    """A name that a statement has set, or an operand of the one that failed.

    As a tree it has the shapes alone, so that only calls that set the same names in the same lines
    are compared.
    """

    place: _Place = field(metadata=_STATIC)
    line: int = field(metadata=_STATIC)
    name: str = field(metadata=_STATIC)
    shapes: tuple[Shape, ...]
    statistics: tuple[Statistics | None, ...] = field(metadata=_STATIC)


class _Sized(NamedTuple):
    """What has sizes in a recording."""

    records: list[_Record]
    error: str | None
    reason: str | None


class _Recording:
    """What happened in the functions of some folders while a call ran."""

    def __init__(self, folders: frozenset[str], *, has_values: bool) -> None:
        self.folders = folders
        self.has_values = has_values
        self.records: list[_Record] = []
        self.functions: dict[_Place, _Function | None] = {}
        """The functions that were called, and None for what has no statements, such as a lambda."""
        self.made: dict[int, tuple[Any, list[Line]]] = {}
        """Without values, each array by its id, with the first line that had it and the callers."""
        self.not_finite: tuple[_Place, int] | None = None
        """The first line that has set an array with NaN or inf."""
        self.note: str | None = None
        self.failed: tuple[_Place, int] | None = None
        self.error: str | None = None
        self.reason: str | None = None
        self._running: list[tuple[_Function, types.FrameType]] = []
        """The calls of functions that are shown, the innermost last."""
        self._returned: tuple[_Place, int] | None = None
        """The line of the last `return`."""

    @property
    def sized(self) -> _Sized:
        """What has sizes."""
        return _Sized(self.records, self.error, self.reason)

    def watch(self, call: TypedCall) -> None:
        """Note the annotations of a typed function, which is called next."""
        code = _code_of(call.function)
        if code is not None:
            function = self._function(code)
            if function is not None:
                function.annotations = call.annotations

    def _function(self, code: types.CodeType) -> "_Function | None":
        """Return the function of some code, or None if it isn't shown."""
        if _folder(code.co_filename) not in self.folders:
            return None
        place = _Place(code.co_filename, code.co_qualname, code.co_firstlineno)
        if place not in self.functions:
            self.functions[place] = _read_function(place, code.co_name)
        return self.functions[place]

    def trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        """Return what Python calls for each event in a frame, or None for one that isn't shown."""
        function = self._function(frame.f_code)
        if function is None:
            return None
        # A generator that goes on after a `yield` has one already.
        trace_events = frame.f_trace
        if trace_events is None:
            function.calls += 1
            self._add_arguments(function, frame)
            trace_events = self._trace_events(function)
        self._running.append((function, frame))
        return trace_events

    def _add_arguments(self, function: "_Function", frame: types.FrameType) -> None:
        """Record the arguments of a call that begins, at the line of its `def`."""
        for name, value in frame.f_locals.items():
            self._add(function, function.first, name, function.annotations.get(name), value)
            # An argument that no line has set, such as a sum in the call, is made by the caller.
            for caller, frame_of_caller in self._running[-1:]:
                self._note(value, caller, caller.statement_at(frame_of_caller.f_lineno))

    def _trace_events(self, function: "_Function") -> Any:
        """Return the function that Python calls for each event in one call of a function.

        A `line` event comes before the line runs. So the variables that a statement has set are
        read at the event of the next one, unless the statement has raised an exception.
        """
        running: _Statement | None = None
        began = 0  # the instruction at which it began
        returning: _Statement | None = None

        def trace_event(frame: types.FrameType, event: str, value: Any) -> Any:
            nonlocal running, began, returning
            if event == "exception":
                running = None
            elif event == "line":
                statement = function.statement_at(frame.f_lineno)
                # The lines of a long statement run in any order, but only a repetition is back at
                # its first instruction.
                is_long = statement.last > statement.line
                if statement is running and is_long and frame.f_lasti > began:
                    return trace_event
                if running is not None:
                    self._add_variables(function, running, frame)
                running = statement
                began = frame.f_lasti
                function.reached.add(statement.line)
                if statement.is_return:
                    returning = statement
            # An exception that leaves the function ends it with such an event, too.
            elif event == "return":
                if running is not None:
                    self._add_variables(function, running, frame)
                    # A `with` statement ends after the `return` inside it.
                    last = returning or running
                    self._returned = (function.place, last.line)
                    annotation = function.annotations.get("return")
                    self._add(function, last.line, "return", annotation, value)
                    self._note(value, function, last)
                self._running.pop()
            return trace_event

        return trace_event

    def _add_variables(
        self, function: "_Function", statement: "_Statement", frame: types.FrameType
    ) -> None:
        """Record what a statement has set before the line at which the frame is."""
        if statement.block is not None and frame.f_lineno not in statement.block:
            return
        variables = frame.f_locals
        for name in statement.sets:
            variable, _, attribute = name.partition(".")
            value = variables.get(variable)
            if attribute:
                # Not getattr, which would call properties.
                value = getattr(value, "__dict__", {}).get(attribute)
            self._add(function, statement.line, name, None, value)
            self._note(value, function, statement)

    def _add(
        self, function: "_Function", line: int, name: str, annotation: Any, value: Any
    ) -> None:
        shapes = _shapes(annotation, value)
        if not shapes:
            return
        statistics: tuple[Statistics | None, ...] = ()
        if self.has_values:
            statistics = _statistics(value, len(shapes))
        self.records.append(_Record(function.place, line, name, shapes, statistics))
        is_alarming = any(found is not None and found.is_alarming for found in statistics)
        if is_alarming and self.not_finite is None:
            self.not_finite = (function.place, line)
            function_name = function.place.name.rpartition("<locals>.")[2]
            self.note = f"{name} in {function_name} is the first array that is not finite"

    def _note(self, value: Any, function: "_Function", statement: "_Statement") -> None:
        """Note the line that made an array, if it is the first that has it.

        The innermost call is that of the statement.
        """
        # An array with values must be let go, and the id of one that is gone may be another's.
        if self.has_values or not isinstance(value, jax.Array) or id(value) in self.made:
            return
        lines = [(function.place.file, statement.line)]
        for caller, frame in reversed(self._running[:-1]):
            lines.append((caller.place.file, caller.statement_at(frame.f_lineno).line))
        self.made[id(value)] = (value, lines)

    def fail(self, error: Exception) -> None:
        """Record an error, and the last line that is shown among those that it passed through."""
        text = str(error).strip()
        if isinstance(error, TypeCheckError):
            self.reason = _typed_reason(error)
            text = text.rpartition("\n")[2]
        text = " ".join(text.split())  # JAX's messages may have several lines
        self.error = f"{type(error).__name__}: {text}".removesuffix(": ")
        # A function whose result is rejected has returned, so it has no frame any more.
        if isinstance(error, TypeCheckError) and self._returned is not None:
            place, _ = self._returned
            subject = str(error).partition("\n")[0]
            if subject.endswith(f".{place.name}() returned a wrong result."):
                self.failed = self._returned
                return
        innermost = None  # of the functions that are shown
        for frame, line in traceback.walk_tb(error.__traceback__):
            function = self._function(frame.f_code)
            if function is not None and function.calls:
                statement = function.statement_at(line)
                innermost = function, statement, frame.f_locals
        if innermost is None:
            return
        function, statement, variables = innermost
        self.failed = (function.place, statement.line)
        # The line has set nothing, so it shows what it has read.
        for name in statement.reads:
            self._add(function, statement.line, name, None, variables.get(name))


def _typed_reason(error: Exception) -> str | None:
    """Return the first lines of the error of a typed function as a sentence."""
    lines = str(error).strip().splitlines()
    if len(lines) != 4:
        return None
    subject = lines[0].removesuffix(".")
    # The module of a user's file has a name that nobody has given it. It is that of a frame, or of
    # the function that a frame of the contract checks.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        checked = getattr(frame.f_locals.get("function"), "__module__", None)
        for module in (checked, frame.f_globals.get("__name__")):
            subject = subject.removeprefix(f"{module}.")
    expected = lines[1].removeprefix("Expected: ")
    got = lines[2].removeprefix("Got: ")
    return f"{subject}: {got}, and not {expected}"


def _record(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folders: frozenset[str],
    *,
    has_values: bool = False,
) -> _Recording:
    """Call a function, abstractly unless it `has_values`, and record what the functions in
    `folders` do."""
    # A thread has one trace function, so a debugger would lose its own.
    if sys.gettrace() is not None:
        raise RuntimeError(
            "a debugger or coverage traces this thread: end it, or call annotated_source elsewhere"
        )
    linecache.checkcache()  # a file may have been changed since it was read
    recording = _Recording(folders, has_values=has_values)

    def traced(*arguments: Any) -> None:
        sys.settrace(recording.trace)
        try:
            function(*arguments)
        finally:
            sys.settrace(None)

    with watching(recording.watch):
        try:
            if has_values:
                # A loop of JAX is then one of Python, whose steps have values.
                with jax.disable_jit():
                    traced(*arguments)
            else:
                with tracing_anew():
                    jax.eval_shape(traced, *arguments)
        # The source of a call that fails is shown with its error, so nothing is raised.
        except Exception as error:
            recording.fail(error)
    return recording


# --- arrays --------------------------------------------------------------------------------------


def _shapes(annotation: Any, value: Any) -> tuple[Shape, ...]:
    """Return the shapes of a value's arrays, by the annotation's names where there is one."""
    if annotation is not None:
        shapes = shapes_of(annotation, value)
        if shapes:
            return tuple(shapes)
    if is_nnx(value, "Variable"):
        value = jax.tree.leaves(value)
    # An object in a list, such as a module, is one leaf: its weights would fill pages.
    leaves = jax.tree.leaves(value, is_leaf=lambda part: not isinstance(part, (tuple, list, dict)))
    arrays = [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]
    if len(arrays) > MOST_LEAVES:
        return (Shape(f"{len(arrays)} arrays", ()),)
    if not arrays and dataclasses.is_dataclass(value):
        return tuple(shapes_of(type(value), value))
    shapes = [shapes_of(_ANY, array) for array in arrays]
    return tuple(itertools.chain(*shapes))


def _statistics(value: Any, count: int) -> tuple[Statistics | None, ...]:
    """Return the statistics of each array in a value, or of all of them if they have one shape."""
    arrays = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, _ARRAYS)]
    if len(arrays) == count:
        return tuple(statistics_of([array]) for array in arrays)
    return (statistics_of(arrays),) * count


# --- statements ----------------------------------------------------------------------------------


@dataclass
class _Statement:
    """What a statement sets and reads; several that begin in one line are one."""

    line: int
    last: int
    sets: dict[str, None] = field(default_factory=dict)
    """The names in their order, and such as `self.x`, without those of comprehensions."""
    reads: dict[str, None] = field(default_factory=dict)
    is_return: bool = False
    block: range | None = None
    """The lines of a loop or of a `with`, whose names are set when its block begins."""


@dataclass
class _Function:
    """A function that is shown, and what has happened in it."""

    place: _Place
    first: int
    last: int
    statements: dict[int, _Statement]
    """By each of their lines."""
    annotations: dict[str, Any] = field(default_factory=dict)
    """By the names of arguments; that of the result is `return`."""
    calls: int = 0
    reached: set[int] = field(default_factory=set)
    """The first lines of the statements that were executed."""

    def statement_at(self, line: int) -> _Statement:
        """Return the statement that a line is a part of. That of an `except` has the line alone."""
        return self.statements.get(line) or _Statement(line, line)

    def is_reached(self, line: int) -> bool:
        """Return whether the statement at a line was executed, or of a line without one that below.

        Such lines are comments, an `else:`, and those of the signature and the docstring. After the
        last statement it is that of the last one.
        """
        lines = sorted(self.statements)
        if not lines:  # a function of a docstring alone
            return True
        position = min(bisect.bisect_left(lines, line), len(lines) - 1)
        statement = self.statements[lines[position]]
        return statement.line in self.reached


def _read_function(place: _Place, name: str) -> _Function | None:
    """Return a function of a file, or None if it has no statements there, such as a lambda."""
    source = "".join(linecache.getlines(place.file))
    node = _functions_in(source).get((name, place.line))
    if node is None:
        return None
    statements: dict[int, _Statement] = {}
    for statement in _statements_below(node):
        _read_statement(statement, statements)
    return _Function(place, node.lineno, node.end_lineno or node.lineno, statements)


@functools.lru_cache(maxsize=64)
def _functions_in(source: str) -> dict[tuple[str, int], ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions of a file by their name and line; two classes may have methods of one
    name."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the file was changed since it was imported
        return {}
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # Python counts decorators as a part of the function.
            first = [*node.decorator_list, node][0]
            functions[node.name, first.lineno] = node
    return functions


def _statements_below(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function that are executed, also those in blocks, without those of
    functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not _is_never_executed(child):
            yield child
        is_scope = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if isinstance(child, _BLOCKS) and not is_scope:
            yield from _statements_below(child)


def _is_never_executed(statement: ast.stmt) -> bool:
    """Return whether Python compiles nothing for a statement, as for a docstring."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None):
            return True
        case ast.Global() | ast.Nonlocal():
            return True
    return False


def _read_statement(node: ast.stmt, statements: dict[int, _Statement]) -> None:
    """Add a statement to those of a function, by each of its lines without those of its block."""
    statement = statements.setdefault(node.lineno, _Statement(node.lineno, node.lineno))
    parts = list(_parts(node))
    if not any(isinstance(child, _BLOCKS) for child in ast.iter_child_nodes(node)):
        parts.append(node)
    for part in parts:
        match part:
            case ast.Name(ctx=ast.Store()):
                statement.sets[part.id] = None
            case ast.Name():
                statement.reads[part.id] = None
            case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()):
                statement.sets[f"{owner}.{name}"] = None
            case ast.Return():
                statement.is_return = True
        statement.last = max(statement.last, getattr(part, "end_lineno", 0))
    for line in range(node.lineno, statement.last + 1):
        statements.setdefault(line, statement)
    if isinstance(node, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)):
        block = range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)
        if statement.last < block.start:
            statement.block = block


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement, without what has variables of its own or is executed for
    itself."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_BLOCKS, *_SCOPES)):
            yield child
            yield from _parts(child)
