"""Symbolic sizes as text: arrays, constraints, and the cases of an open question."""

import contextlib
import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import InconclusiveDimensionOperation

from jgpt.shapes.matching import SIZE_FUNCTIONS

COMPARISONS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}
Size: Any = type(jax.export.symbolic_shape("b")[0])


def _parsed(array: str) -> tuple[Any, str]:
    found = re.fullmatch(r"(\w+)\[([^\],]*)\]", array.strip())
    with contextlib.suppress(TypeError, ValueError):
        if found:
            sizes = _shape(found[2], jax.export.SymbolicScope())
            if all(isinstance(size, Size) or size >= 0 for size in sizes):
                return jnp.dtype(found[1]), found[2]
    raise ValueError(f"{array!r} is not an array such as 'float32[b t 8]'")


def _names(text: str) -> list[str]:
    """The sizes that a text names, not functions."""
    functions = ("max", "min", *SIZE_FUNCTIONS)
    return [name for name in re.findall(r"[A-Za-z_]\w*", text) if name not in functions]


def _ours(text: str) -> str:
    """Rename sizes to names that no dimension has."""
    return re.sub(r"[A-Za-z_]\w*", lambda it: f"{it[0]}_symbol" if _names(it[0]) else it[0], text)


def _theirs(text: str) -> str:
    return re.sub(r"\b(\w+?)_symbol\b", r"\1", text)


def _require_readable(where: tuple[str, ...], names: list[str]) -> None:
    """Raise ValueError for constraints that aren't any, of other sizes, or that contradict."""
    if others := {name for each in where for name in _names(each)} - set(names):
        raise ValueError(f"where={list(where)} names {min(others)}, a size that no array has")
    try:
        scope = _scope(where)
        for each in where:
            low, how, high = _sides(each, scope)
            with contextlib.suppress(InconclusiveDimensionOperation):
                if (low < high if how != "<=" else low > high) is True:
                    raise ValueError("unsatisfiable")
    except Exception as error:
        said = "holds for no sizes" if "nsatisfiable" in str(error) else f"can't be read: {error}"
        raise ValueError(f"where={list(where)} {said}") from None


def _scope(case: tuple[str, ...]) -> jax.export.SymbolicScope:
    """The constraints of a case, for JAX. Raises ValueError if no sizes meet them."""
    equal = [re.fullmatch(r"(\w+) == (\d+)", each) for each in case]
    fixed = {found[1]: int(found[2]) for found in equal if found}
    for each in case:  # JAX doesn't compare numbers with numbers
        if fixed.keys() >= set(_names(each)) and not _holds(each, fixed):
            raise ValueError("unsatisfiable")
    # sizes that are numbers first: JAX puts them into what comes later
    ordered = sorted(zip(equal, case, strict=True), key=lambda each: each[0] is None)
    return jax.export.SymbolicScope([_ours(each) for _, each in ordered])


def _holds(constraint: str, sizes: dict[str, int]) -> bool:
    """Whether a constraint holds for sizes that are numbers."""
    low, how, high = _sides(constraint, jax.export.SymbolicScope())
    ours = {_ours(name): size for name, size in sizes.items()}
    low, high = (it._evaluate(ours) if isinstance(it, Size) else it for it in (low, high))
    return COMPARISONS[how](low, high)


def _sides(constraint: str, scope: jax.export.SymbolicScope) -> tuple[Any, str, Any]:
    left, how, right = re.split("(==|>=|<=)", constraint)
    low, high = _shape(f"{left.replace(' ', '')} {right.replace(' ', '')}", scope)
    return low, how, high


def _shape(dimensions: str, scope: jax.export.SymbolicScope) -> Sequence[Any]:
    """Sizes; those that the case fixes are numbers."""
    return jax.export.symbolic_shape(_ours(", ".join(dimensions.split())), scope=scope)


def _is_open(size: Any) -> bool:
    """Whether a size may be 0 and may be something else."""
    for way in (size, -size):
        with contextlib.suppress(InconclusiveDimensionOperation):
            if (way >= 1) is True:
                return False
    return True


def _parts(question: str) -> list[str]:
    """The cases of a question that is open: all sizes are in one of them."""
    found = re.search(r"'([^']*)' (>=|>|<=|<|==) '([^']*)'", _theirs(question))
    if not found:
        return []
    left, how, right = found.groups()
    less = f"{left} <= {right} - 1"
    more = f"{left} >= {right} + 1"
    if right.isdigit():
        less = f"{left} <= {int(right) - 1}"
        more = f"{left} >= {int(right) + 1}"
    match how:
        case "==":
            no_less = right == "0" or (right == "1" and left.isidentifier())
            if no_less:
                return [f"{left} == {right}", more]
            return [f"{left} == {right}", more, less]
        case ">=" | "<":
            return [f"{left} >= {right}", less]
        case _:
            return [f"{left} <= {right}", more]
