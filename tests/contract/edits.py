"""Small edits of a source that tests should notice: of its contract, and of its values."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.inspection import dimension_strings, is_array_annotation, unbraced

LAZY = {"Callable", "Iterator", "Iterable"}


@dataclass(frozen=True)
class Edit:
    """Replace the bytes from `start` to `end`."""

    file: str
    where: str
    """The full name of the function or class that holds it."""
    kind: str
    before: str
    after: str
    start: int
    end: int
    ties: bool = True
    """Whether the changed dimension is used a second time in its function, or is an argument's."""
    number: int = 1
    """Of those that are alike in the function."""

    @property
    def stem(self) -> str:
        return Path(self.file).stem

    def __str__(self) -> str:
        """As reports name it, wherever in the file its function moves to."""
        place = self.where.removeprefix(module_name(self.file)).removeprefix(".")
        number = f" ({self.number})" if self.number > 1 else ""
        text = f"{self.kind}: {self.before} -> {self.after or 'nothing'}"
        return f"{self.file}:{place} {text}{number}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def module_name(file: str) -> str:
    return f"jgpt.{file.removesuffix('.py').replace('/', '.')}"


class Editor:
    """Walks a source and collects its edits."""

    def __init__(self, file: str, source: str):
        self.file, self.source = file, source.encode()
        self.lines = [0]
        for line in self.source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.module = module_name(file)
        self.edits: list[Edit] = []
        self.alike: Counter[tuple[str, ...]] = Counter()
        self.names: list[str] = []
        self._walk(ast.parse(source), self.module, lazy=False)

    def _span(self, node: Any) -> tuple[int, int]:
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: Any) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _add(
        self, node: Any, where: str, kind: str, after: str, span: Any = None, ties: bool = True
    ) -> None:
        start, end = span or self._span(node)
        before = self.source[start:end].decode()
        if before != after:
            what = where, kind, before, after
            self.alike[what] += 1
            self.edits.append(Edit(self.file, *what, start, end, ties, self.alike[what]))

    def _walk(self, node: ast.AST, where: str, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = where
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                local = ".<locals>" if isinstance(node, ast.FunctionDef) else ""
                inside = f"{where}{local}.{child.name}"
                self._decorators(child, inside)
                outer, self.names = self.names, _names_in(child)
                self._walk(child, inside, lazy)
                self.names = outer
                continue
            its_lazy = lazy or (isinstance(child, ast.Subscript) and _name(child.value) in LAZY)
            if is_array_annotation(child):
                self._annotation(child, inside, its_lazy)
                continue
            if _is_call(child, "check"):
                self._add(child, where, "drop check", f"({self._text(child.args[0])})")  # type: ignore
            elif where != self.module:
                self._value(child, where)
            self._walk(child, inside, its_lazy)

    def _decorators(self, node: Any, where: str) -> None:
        for each in node.decorator_list:
            if _name(each) in ("typed", "record", "host_record"):
                start, end = self._span(each)
                self._add(each, where, f"drop @{_name(each)}", "", (start - 1, end))

    def _annotation(self, node: Any, where: str, lazy: bool) -> None:
        kind = "lazy " if lazy else ""
        shaped = '__import__("jaxtyping").Shaped'
        self._add(node.value, where, f"{kind}dtype", shaped)
        string = node.slice.elts[-1]
        dims = str(getattr(string, "value", "")).split()
        if not isinstance(string, ast.Constant) or not dims:
            return
        for i, dim in enumerate(dims):
            free = "..." if dim[0] in "*?" else "_"
            ties = self._ties(dim)
            self._dims(string, where, f"{kind}weaken", [*dims[:i], free, *dims[i + 1 :]], ties)
            renamed = dim[: len(dim) - len(dim.lstrip("*?"))] + "held_out"
            self._dims(string, where, f"{kind}rename", [*dims[:i], renamed, *dims[i + 1 :]], ties)
            if i and dims[i - 1] != dim:
                swapped = [*dims[: i - 1], dim, dims[i - 1], *dims[i + 1 :]]
                self._dims(string, where, f"{kind}swap", swapped, ties or self._ties(dims[i - 1]))
        if dims != ["..."] and (len(dims) > 1 or dims[0][0] not in "*?"):  # weakened to that above
            self._dims(string, where, f"{kind}any shape", ["..."])

    def _ties(self, dim: str) -> bool:
        name = dim.lstrip("*?")
        return not name.isidentifier() or self.names.count(name) > 1

    def _dims(
        self, string: ast.Constant, where: str, kind: str, dims: list[str], ties: bool = True
    ) -> None:
        after = f'"{" ".join(dims)}"' if len(dims) > 1 else f'" {dims[0]}"'
        self._add(string, where, kind, after, ties=ties)

    def _value(self, node: Any, where: str) -> None:
        for kind, after in value_edits(node, self._text):
            self._add(node, where, kind, after)


SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
OTHERS = {"tril": "triu", "softmax": "log_softmax", "relu": "gelu"}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def value_edits(node: Any, text: Any) -> Iterator[tuple[str, str]]:
    """What keeps the shapes, most of the time, and changes the numbers."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
            yield "operator", ast.unparse(ast.BinOp(left, SIGNS[type(op)](), right))
            yield "drop right operand", text(left)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield "comparison", ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float())):
            yield "sign", text(node.operand)
        case ast.Constant(value=float(value)):
            yield "constant", repr(value + 1.0 if value < 1e6 else 2 * value)
        case ast.keyword(arg="axis", value=value):
            yield "axis", f"axis={text(value)} - 1"
        case ast.Attribute(value=value, attr="T"):
            yield "transpose", f"{text(value)}.T.T"
        case ast.Attribute(value=value, attr="tril" | "softmax" | "relu" as name):
            yield "function", f"{text(value)}.{OTHERS[name]}"
        case ast.Call(func=ast.Attribute(attr="transpose", value=value)):
            yield "transpose", text(value)
        case ast.Call(func=ast.Attribute(attr="where"), args=[test, yes, no]):
            yield "where", f"jnp.where({text(test)}, {text(no)}, {text(yes)})"
            yield "where", text(yes)
        case ast.Call(func=ast.Attribute(attr="mean"), keywords=[_, *_]):
            yield "mean", text(node).replace(".mean(", ".sum(")
        case ast.Constant(value=str(equation)) if "->" in equation:
            left, right = equation.split("->")
            operands = left.split(",")
            yield "einsum", repr(f"{left}->{_swapped(right)}")
            for i, operand in enumerate(operands):
                rest = [*operands[:i], _swapped(operand), *operands[i + 1 :]]
                yield "einsum", repr(f"{','.join(rest)}->{right}")
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "condition", f"{text(orelse)} if {text(test)} else {text(body)}"
        case ast.If(test=test):
            yield "condition", text(node).replace(text(test), f"not ({text(test)})", 1)


def _names_in(scope: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """The dimension names that a function, or a record's fields, use: as often as they do."""
    if isinstance(scope, ast.ClassDef):
        fields: list[ast.stmt] = [each for each in scope.body if isinstance(each, ast.AnnAssign)]
        scope = ast.ClassDef("", [], [], fields, [])
    strings = [str(each.value) for each in dimension_strings(scope)]
    return [name for string in strings for name in re.findall(r"[A-Za-z]\w*", unbraced(string))]


def _swapped(letters: str) -> str:
    return re.sub(r"(\w)(\w)$", r"\2\1", letters)


def _name(node: Any) -> str:
    return getattr(node, "id", "")


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == name
