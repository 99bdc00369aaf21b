"""Nothing escapes the contract: the whole package is walked, and a planted escape is found."""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeGuard, get_args, get_origin, get_type_hints

import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax import Array

import jgpt
from jgpt.words import LEGEND

ARRAY_NAMES = {"Array", "ndarray", "PyTree"}
PARTS = ("describe", "matching", "calls", "contract")
SIGHT = ("abstract", "reading_rules", "interpreter", "reading_paths", "reading", "sight")
CONTRACT = [f"jgpt.shapes.{name}" for name in (*PARTS, *SIGHT)]
"""What checks the others can't check itself, and what works with arrays of any rank."""


def modules(package: ModuleType) -> list[ModuleType]:
    found = [package]
    for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if "__main__" not in name:  # which runs the command
            found.append(importlib.import_module(name))
    return found


def source_of(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8")


def callables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions, methods and properties that a module defines, by their full names.

    Left out, because nobody writes or calls them by name: what `dataclass` generates, a protocol's
    members, and dunder methods but `__init__` and `__call__`.
    """
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue  # it is imported
        if inspect.isclass(value):
            yield from _members(value)
        elif callable(value):
            written = inspect.unwrap(value)
            if inspect.isfunction(written):
                yield f"{module.__name__}.{written.__qualname__}", value


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    if getattr(kind, "_is_protocol", False):
        return
    for name, member in vars(kind).items():
        # of a class method its function, of a property its getter
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not inspect.isfunction(function):
            continue
        if name.startswith("__") and name not in ("__init__", "__call__"):
            continue
        # a dataclass's own __init__ is its fields, checked where they hold arrays
        is_generated = inspect.unwrap(function).__code__.co_filename == "<string>"
        if is_generated and not handles_arrays(function):
            continue
        yield f"{kind.__module__}.{kind.__qualname__}.{name}", function


def annotations(function: Any) -> dict[str, Any]:
    """What each parameter but `self` and `cls`, and the result, is annotated with."""
    written = inspect.unwrap(function)
    hints = get_type_hints(written, include_extras=True)
    found = {}
    for name in [*inspect.signature(written).parameters, "return"]:
        if name not in ("self", "cls"):
            found[name] = hints.get(name, inspect.Signature.empty)
    return found


def parts(hint: Any) -> Iterator[Any]:
    """A hint and everything inside it."""
    yield hint
    if get_origin(hint) in (Literal, Callable):  # a function's calls nobody can check ahead
        return
    for argument in get_args(hint):
        yield from parts(argument)


def is_array(hint: Any) -> bool:
    return getattr(hint, "__module__", None) == "jaxtyping" or hint in (Array, np.ndarray)


def handles_arrays(function: Any) -> bool:
    return any(_has_array(hint) for hint in annotations(function).values())


def _has_array(hint: Any) -> bool:
    return any(is_array(part) for part in parts(hint))


def _parameters(function: Any) -> list[Any]:
    return [hint for name, hint in annotations(function).items() if name != "return"]


def must_be_checked(package: ModuleType, name: str, function: Any) -> bool:
    """What takes or returns arrays, a module's sizes, or is one of the package's public functions.

    Sizes are those that make a module, and those of its public methods. A public function that
    takes a name alone rejects the wrong ones by itself, and one that takes nothing has no wrong
    call.
    """
    if handles_arrays(function):
        return True
    *_, parent_name, short_name = name.split(".")
    is_private = short_name.startswith("_")
    parent = getattr(sys.modules[function.__module__], parent_name, None)
    if isinstance(parent, type) and issubclass(parent, nnx.Module):
        if short_name == "__init__":
            return True
        if not is_private and int in _parameters(function):
            return True
    if is_private or getattr(package, short_name, None) is not function:
        return False
    return set(_parameters(function)) not in (set(), {str})


def violations(package: ModuleType, legend: set[str]) -> list[str]:
    """What is wrong, each with what to do about it."""
    found = []
    for module in modules(package):
        if module.__name__ in CONTRACT:
            continue
        for name, function in callables(module):
            if must_be_checked(package, name, function):
                found += _violations_of(name, function)
        found += _nested_violations(module)
        for name in sorted(dimension_names(source_of(module)) - legend):
            found.append(
                f"{module.__name__}: dimension {name!r} is not in LEGEND: use a name that is "
                "there, or add it to jgpt/words.py with its meaning"
            )
    return found


def _violations_of(name: str, function: Any) -> Iterator[str]:
    if not getattr(function, "__shape_checked__", False):
        kind = "@record above @dataclass" if "<string>" in _file(function) else "@typed"
        yield f"{name} is not checked: put {kind} on it, @typed as the innermost decorator"
    for parameter, hint in annotations(function).items():
        what = "its result" if parameter == "return" else parameter
        if hint is inspect.Signature.empty:
            yield f"{name}: {what} has no annotation: write one"
        for part in parts(hint):
            yield from _violations_of_hint(f"{name}: {what}", part)


def _violations_of_hint(where: str, hint: Any) -> Iterator[str]:
    if hint in (Array, np.ndarray, jaxtyping.PyTree):
        yield f'{where} has no shape: write Float[Array, "batch time"] or the like'
    dimensions = getattr(hint, "dim_str", "").split()
    if "_" in dimensions or "..." in dimensions:
        yield f"{where} leaves a dimension without a name: take one of LEGEND's"


def _file(function: Any) -> str:
    return inspect.unwrap(function).__code__.co_filename


def _nested_violations(module: ModuleType) -> Iterator[str]:
    """Of functions inside functions: they exist in the source alone."""
    for name, node in nested_functions(source_of(module)):
        if not annotates_arrays(node):
            continue  # what is handed to a scan or a loop takes what that hands it
        full = f"{module.__name__}.{name}"
        decorators = [_named(decorator) for decorator in node.decorator_list]
        if "typed" not in decorators:
            yield f"{full} annotates arrays and is not checked: put @typed on it"


def annotates_arrays(node: ast.FunctionDef) -> bool:
    for hint in _hints(node):
        if hint is None:
            continue
        for part in ast.walk(hint):
            if _named(part) in ARRAY_NAMES:
                return True
    return False


def _hints(node: ast.FunctionDef) -> list[ast.expr | None]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [node.returns, *(argument.annotation for argument in arguments)]


def nested_functions(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    def walk(node: ast.AST, inside: str, in_function: bool) -> Iterator[tuple[str, Any]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                if in_function:
                    yield inside + child.name, child
                yield from walk(child, f"{inside}{child.name}.<locals>.", True)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{inside}{child.name}.", in_function)
            else:
                yield from walk(child, inside, in_function)

    yield from walk(ast.parse(source), "", False)


def dimension_strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The shape strings of all array annotations in a source, wherever they stand."""
    for node in ast.walk(tree):
        if is_array_annotation(node):
            for each in ast.walk(node.slice.elts[-1]):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each


def is_array_annotation(node: ast.AST) -> TypeGuard[Any]:
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
        return False
    name = _named(node.value)
    dtype = getattr(jaxtyping, name, None) if name[:1].isupper() else None
    return isinstance(dtype, type) and issubclass(dtype, jaxtyping.AbstractDtype)


def _named(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def dimension_names(source: str) -> set[str]:
    """The names in them, but for those inside braces: they are of arguments."""
    names: set[str] = set()
    for string in dimension_strings(ast.parse(source)):
        names.update(re.findall(r"[A-Za-z]\w*", unbraced(str(string.value))))
    return names


def unbraced(dimensions: str) -> str:
    return re.sub(r"\{[^}]*\}", "", dimensions)


# --- tests ---------------------------------------------------------------------------------------


def test_every_callable_is_checked_and_annotated():
    found = violations(jgpt, set(LEGEND))
    assert not found, "\n" + "\n".join(found)


X = "x: Float[Array, 'batch']"
G = f"def g({X}) -> int: return 1"
PLANTED = [
    (f"def f({X}) -> {X[3:]}: return x", "f is not checked: put @typed on it"),
    ("@typed\ndef f(x: Array) -> None: ...", "f: x has no shape"),
    (
        "@typed\ndef f(x: Float[Array, 'batch tmie']) -> None: ...",
        "dimension 'tmie' is not in LEGEND",
    ),
    (
        "class C(nnx.Module):\n    def __init__(self, x: int) -> None: pass",
        "C.__init__ is not checked",
    ),
    (f"@typed\ndef f() -> None:\n    {G}", "f.<locals>.g annotates arrays and is not checked"),
]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def plant(source: str):
        package = tmp_path / "planted"
        package.mkdir()
        (package / "__init__.py").write_text("from planted.escape import *\n")
        (package / "escape.py").write_text(
            "import jax\nfrom flax import nnx\nfrom dataclasses import dataclass\n"
            "from jaxtyping import Array, Float, Shaped\n"
            f"from jgpt.shapes.contract import check, record, typed\n{source}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("planted", "planted.escape"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module("planted")

    return plant


@pytest.mark.parametrize(("source", "message"), PLANTED)
def test_an_escape_is_found(source: str, message: str, plant):
    found = violations(plant(source), set(LEGEND))
    assert any(message in each.removeprefix("planted.escape.") for each in found), found


def test_typed_is_innermost():
    """Below a decorator that hides the signature, sizes would not be checked."""
    for module in modules(jgpt):
        for node in ast.walk(ast.parse(source_of(module))):
            if isinstance(node, ast.FunctionDef):
                names = [getattr(each, "id", "") for each in node.decorator_list]
                assert "typed" not in names[:-1], f"{module.__name__}.{node.name}"
