"""Nothing escapes the contract: the whole package is walked, and a planted escape is found."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, get_type_hints

import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax import Array

import jgpt
from jgpt.words import LEGEND

PARTS = ("describe", "matching", "calls", "contract")
SIGHT = ("abstract", "reading_rules", "interpreter", "reading_paths", "reading", "sight")
CONTRACT = [f"jgpt.shapes.{name}" for name in (*PARTS, *SIGHT)]
"""What checks the others can't check itself, and what works with arrays of any rank."""
WITHOUT_SHAPE = (Array, np.ndarray, jaxtyping.PyTree)


def modules(package: ModuleType) -> list[ModuleType]:
    found = [package]
    for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "__main__" not in name:  # which runs the command
            found.append(importlib.import_module(name))
    return found


def source_of(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8")


def functions(module: ModuleType) -> Iterator[tuple[str, ast.FunctionDef, Any]]:
    """The functions that a module defines, with their full names and the classes they are of."""

    def walk(node: ast.AST, inside: str, owner: Any) -> Iterator[tuple[str, Any, Any]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield inside + child.name, child, owner
                yield from walk(child, f"{inside}{child.name}.<locals>.", None)
            elif isinstance(child, ast.ClassDef):
                kind = vars(module).get(child.name)
                if not getattr(kind, "_is_protocol", False):
                    yield from walk(child, f"{inside}{child.name}.", kind)
            else:
                yield from walk(child, inside, owner)

    yield from walk(ast.parse(source_of(module)), "", None)


def annotations(node: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """What each parameter but `self` and `cls`, and the result, is annotated with."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    arguments += filter(None, (node.args.vararg, node.args.kwarg))
    found = {argument.arg: argument.annotation for argument in arguments}
    found["return"] = node.returns
    return {name: hint for name, hint in found.items() if name not in ("self", "cls")}


def parts(hint: ast.expr | None) -> Iterator[ast.expr]:
    """A hint and the hints inside it."""
    if hint is None:
        return
    yield hint
    if isinstance(hint, ast.Subscript):
        # the calls of a function nobody can check ahead
        if not is_array(hint) and ast.unparse(hint.value) not in ("Literal", "Callable", "PyTree"):
            yield from parts(hint.slice)
    elif isinstance(hint, ast.BinOp):
        yield from parts(hint.left)
        yield from parts(hint.right)
    elif isinstance(hint, ast.Tuple):
        for item in hint.elts:
            yield from parts(item)


def is_array(hint: ast.AST) -> TypeGuard[Any]:
    """Whether it is an array's annotation with a shape."""
    dtype = None
    if isinstance(hint, ast.Subscript) and isinstance(hint.value, ast.Name):
        dtype = getattr(jaxtyping, hint.value.id, None)
    return isinstance(dtype, type) and issubclass(dtype, jaxtyping.AbstractDtype)


def value_of(hint: ast.expr, module: ModuleType) -> Any:
    """What a name stands for, such as `np.ndarray` or `Weights`."""
    *outer, name = ast.unparse(hint).split(".")
    if outer:
        return getattr(vars(module).get(outer[0]), name, None)
    return vars(module).get(name)


def has_array(hint: ast.expr | None, module: ModuleType) -> bool:
    for part in parts(hint):
        value = value_of(part, module)
        is_named = value in WITHOUT_SHAPE or getattr(value, "__module__", None) == "jaxtyping"
        if is_named or is_array(part) or ast.unparse(part).startswith("PyTree["):
            return True
    return False


def must_be_checked(name: str, node: ast.FunctionDef, owner: Any, module: ModuleType) -> bool:
    """What takes or returns arrays, what makes a module, and a module's public methods of sizes."""
    hints = annotations(node)
    if "<locals>" in name:  # what is handed to a scan or a loop takes what that hands it
        return any(is_array(part) for hint in hints.values() for part in parts(hint))
    if node.name.startswith("__") and node.name not in ("__init__", "__call__"):
        return False  # nobody calls it by name
    if any(has_array(hint, module) for hint in hints.values()):
        return True
    if not (isinstance(owner, type) and issubclass(owner, nnx.Module)):
        return False
    hints.pop("return")
    takes_size = "int" in [ast.unparse(hint) for hint in hints.values() if hint is not None]
    return node.name == "__init__" or (takes_size and not node.name.startswith("_"))


def violations(package: ModuleType, legend: set[str]) -> Iterator[str]:
    """What is wrong, each with what to do about it."""
    for module in modules(package):
        if module.__name__ in CONTRACT:
            continue
        for name, node, owner in functions(module):
            if must_be_checked(name, node, owner, module):
                for wrong in violations_of(node, module):
                    yield f"{module.__name__}.{name}{wrong}"
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__:
                types = [
                    getattr(field.type, "__module__", "") for field in dataclasses.fields(kind)
                ]
                if "jaxtyping" in types and not hasattr(kind.__init__, "__shape_checked__"):
                    yield f"{kind} is not checked: put @record above @dataclass"
        for name in sorted(dimension_names(source_of(module)) - legend):
            yield (
                f"{module.__name__}: dimension {name!r} is not in LEGEND: use a name that is "
                "there, or add it to jgpt/words.py with its meaning"
            )
    for name in getattr(package, "__all__", ()):
        value = getattr(package, name)
        function = inspect.unwrap(value)
        if not inspect.isfunction(function) or value.__module__ in CONTRACT:
            continue
        hints = get_type_hints(function)
        hints.pop("return", None)
        # one that takes a name alone rejects the wrong ones by itself
        if set(hints.values()) - {str} and not hasattr(value, "__shape_checked__"):
            yield f"{name} is public and not checked: put @typed on it"


def violations_of(node: ast.FunctionDef, module: ModuleType) -> Iterator[str]:
    if "typed" not in map(ast.unparse, node.decorator_list[-1:]):
        yield " is not checked: put @typed on it, as the innermost decorator"
    for parameter, hint in annotations(node).items():
        what = "its result" if parameter == "return" else parameter
        if hint is None:
            yield f": {what} has no annotation: write one"
        for part in parts(hint):
            if value_of(part, module) in WITHOUT_SHAPE:
                yield f': {what} has no shape: write Float[Array, "batch time"] or the like'
            if is_array(part) and {"_", "..."} & set(" ".join(dimension_strings(part)).split()):
                yield f": {what} leaves a dimension without a name: take one of LEGEND's"


def dimension_strings(tree: ast.AST) -> Iterator[str]:
    """The shape strings of all array annotations in a source, wherever they stand."""
    for node in ast.walk(tree):
        if is_array(node) and isinstance(node.slice, ast.Tuple):
            for each in ast.walk(node.slice.elts[-1]):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value


def dimension_names(source: str) -> set[str]:
    """The names in them, but for those inside braces, which are of arguments."""
    names: set[str] = set()
    for dimensions in dimension_strings(ast.parse(source)):
        names.update(re.findall(r"[A-Za-z]\w*", re.sub(r"\{[^}]*\}", "", dimensions)))
    return names


# --- tests ---------------------------------------------------------------------------------------


def test_every_callable_is_checked_and_annotated():
    found = list(violations(jgpt, set(LEGEND)))
    assert not found, "\n" + "\n".join(found)


X = "x: Float[Array, 'batch']"
G = f"def g({X}) -> int: return 1"
PLANTED = [
    (f"def f({X}) -> {X[3:]}: return x", "f is not checked: put @typed on it"),
    ("@typed\ndef f(x: Array) -> None: ...", "f: x has no shape"),
    ("@typed\ndef f(x: Float[Array, 'batch tmie']) -> None: ...", "'tmie' is not in LEGEND"),
    (
        "class C(nnx.Module):\n    def __init__(self, x: int) -> None: pass",
        "C.__init__ is not checked",
    ),
    (f"@typed\ndef f() -> None:\n    {G}", "f.<locals>.g is not checked"),
]


@pytest.mark.parametrize(("source", "message"), PLANTED)
def test_an_escape_is_found(source: str, message: str, tmp_path: Path, monkeypatch):
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("from planted.escape import *\n")
    (package / "escape.py").write_text(
        "from flax import nnx\nfrom jaxtyping import Array, Float\n"
        f"from jgpt.shapes.contract import typed\n{source}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("planted", "planted.escape"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    found = list(violations(importlib.import_module("planted"), set(LEGEND)))

    assert any(message in each.removeprefix("planted.escape.") for each in found), found
