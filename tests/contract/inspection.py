"""Reads a package for callables that its shape contract doesn't cover."""

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
from flax import nnx
from jax import Array

ARRAY_NAMES = {"Array", "ndarray", "PyTree"}
CONTRACT = [f"jgpt.shapes.{name}" for name in ("describe", "matching", "calls", "contract")]
"""What checks the others can't check itself."""
ANY_DTYPE = {
    "jgpt.nn.cache.LayerCache.positions: new",
    "jgpt.training.placement.bytes_of: tree",
    "jgpt.nn.stacking.stack_blocks: its result",
    "jgpt.nn.stacking.stack_blocks: tree",
    "jgpt.nn.stacking.unstack_blocks: its result",
    "jgpt.nn.stacking.unstack_blocks: tree",
}


def modules(package: ModuleType) -> list[ModuleType]:
    names = [name for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return [package, *(importlib.import_module(name) for name in names if "__main__" not in name)]


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
            continue
        if inspect.isclass(value):
            yield from _members(value)
        elif inspect.isfunction(inspect.unwrap(value)) if callable(value) else False:
            yield f"{module.__name__}.{inspect.unwrap(value).__qualname__}", value


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    if getattr(kind, "_is_protocol", False):
        return
    for name, member in vars(kind).items():
        member = getattr(member, "__func__", getattr(member, "fget", member))
        if not inspect.isfunction(member):
            continue
        generated = inspect.unwrap(member).__code__.co_filename == "<string>"
        special = name.startswith("__") and name not in ("__init__", "__call__")
        # a dataclass's own __init__ is its fields, checked where they hold arrays
        if not special and not (generated and not handles_arrays(member)):
            yield f"{kind.__module__}.{kind.__qualname__}.{name}", member


def annotations(function: Any) -> dict[str, Any]:
    """What each parameter but `self` and `cls`, and the result, is annotated with."""
    written = inspect.unwrap(function)
    hints = get_type_hints(written, include_extras=True)
    names = [name for name in inspect.signature(written).parameters if name not in ("self", "cls")]
    return {name: hints.get(name, inspect.Signature.empty) for name in [*names, "return"]}


def parts(hint: Any) -> Iterator[Any]:
    """A hint and everything inside it."""
    yield hint
    if get_origin(hint) not in (Literal, Callable):  # whose calls nobody can check ahead
        for each in get_args(hint):
            yield from parts(each)


def is_array(hint: Any) -> bool:
    return getattr(hint, "__module__", None) == "jaxtyping" or hint in (Array, np.ndarray)


def handles_arrays(function: Any) -> bool:
    return any(is_array(each) for hint in annotations(function).values() for each in parts(hint))


def with_arrays(package: ModuleType) -> list[str]:
    """The full names of all callables that take or return arrays, those in functions too."""
    found: dict[str, None] = {}
    for module in modules(package):
        if module.__name__ in CONTRACT:
            continue
        names = [name for name, function in callables(module) if handles_arrays(function)]
        nested = nested_functions(source_of(module))
        names += [f"{module.__name__}.{name}" for name, node in nested if annotates_arrays(node)]
        found |= dict.fromkeys(names)
    return list(found)


def first_with_each_annotation(package: ModuleType) -> set[str]:
    """The callables whose arrays are annotated in a way that no callable before them is."""
    known: set[str] = set()
    found = set()
    for module in modules(package):
        for name, function in callables(module):
            if not handles_arrays(function):
                continue
            written = {str(hint) for hint in annotations(function).values() if _has_array(hint)}
            if not written <= known:
                found.add(name)
            known |= written
    return found


def _has_array(hint: Any) -> bool:
    return any(is_array(part) for part in parts(hint))


def takes_sizes(function: Any) -> bool:
    return int in annotations(function).values() or "<string>" in _file(function)


def _parameters(function: Any) -> list[Any]:
    return [hint for name, hint in annotations(function).items() if name != "return"]


def must_be_checked(package: ModuleType, name: str, function: Any) -> bool:
    """What takes or returns arrays, a module's sizes, or is one of the package's public functions.

    Sizes are those that make a module, and those of its public methods. A public function that
    takes a name alone rejects the wrong ones by itself, and one that takes nothing has no wrong
    call.
    """
    names = name.split(".")
    parent = getattr(sys.modules[function.__module__], names[-2], None)
    of_module = isinstance(parent, type) and issubclass(parent, nnx.Module)
    has_sizes = not names[-1].startswith("_") and int in _parameters(function)
    makes_module = of_module and (names[-1] == "__init__" or has_sizes)
    is_public = not names[-1].startswith("_") and getattr(package, names[-1], None) is function
    is_public = is_public and set(_parameters(function)) not in (set(), {str})
    return handles_arrays(function) or makes_module or is_public


def violations(package: ModuleType, legend: set[str]) -> list[str]:
    """What is wrong, each with what to do about it."""
    found = []
    for module in modules(package):
        if module.__name__ in CONTRACT:
            continue
        for name, function in callables(module):
            if must_be_checked(package, name, function):
                found += _violations_of(name, function)
            elif getattr(function, "__shape_checked__", False) and not takes_sizes(function):
                found.append(f"{name} has neither arrays nor sizes: pyright is enough for it")
        found += _nested_violations(module)
        found += [
            f"{module.__name__}: dimension {name!r} is not in LEGEND: use a name that is there, or "
            "add it to jgpt/words.py with its meaning"
            for name in sorted(dimension_names(source_of(module)) - legend)
        ]
    return found


def _violations_of(name: str, function: Any) -> Iterator[str]:
    if not getattr(function, "__shape_checked__", False):
        kind = "@record above @dataclass" if "<string>" in _file(function) else "@typed"
        yield f"{name} is not checked: put {kind} on it, @typed as the innermost decorator"
    for parameter, hint in annotations(function).items():
        where = f"{name}: {'its result' if parameter == 'return' else parameter}"
        if hint is inspect.Signature.empty:
            yield f"{where} has no annotation: write one"
        for each in parts(hint):
            if each in (Array, np.ndarray, jaxtyping.PyTree):
                yield f'{where} has no shape: write Float[Array, "batch time"] or the like'
            if get_origin(each) in (list, dict, set) and any(map(is_array, parts(each))):
                yield f"{where} holds arrays in a {each}, which is not checked whole: use a tuple"
            if {"_", "..."} & {*getattr(each, "dim_str", "").split()}:
                yield f"{where} leaves a dimension without a name: take one of LEGEND's"
            dtypes = [
                getattr(leaf, "dtype", None) for leaf in parts(getattr(each, "leaftype", each))
            ]
            if jaxtyping.Shaped in dtypes and where not in ANY_DTYPE:
                yield f"{where} has no dtype: write Float, Int, or what it is"


def _file(function: Any) -> str:
    return inspect.unwrap(function).__code__.co_filename


def _nested_violations(module: ModuleType) -> Iterator[str]:
    """Of functions inside functions: they exist in the source alone."""
    for name, node in nested_functions(source_of(module)):
        if not annotates_arrays(node):
            continue  # what is handed to a scan or a loop takes what that hands it
        full = f"{module.__name__}.{name}"
        if not any(
            isinstance(each, ast.Name) and each.id == "typed" for each in node.decorator_list
        ):
            yield f"{full} annotates arrays and is not checked: put @typed on it"
        if None in _hints(node):
            yield f"{full} is not annotated in full: annotate all parameters and the result"


def annotates_arrays(node: ast.FunctionDef) -> bool:
    parts = [each for hint in _hints(node) if hint for each in ast.walk(hint)]
    return any(isinstance(each, ast.Name) and each.id in ARRAY_NAMES for each in parts)


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
    strings = (unbraced(str(each.value)) for each in dimension_strings(ast.parse(source)))
    return {name for string in strings for name in re.findall(r"[A-Za-z]\w*", string)}


def unbraced(dimensions: str) -> str:
    return re.sub(r"\{[^}]*\}", "", dimensions)
