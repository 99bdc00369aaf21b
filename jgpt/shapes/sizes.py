"""Symbolic sizes as text: arrays, constraints, and the cases of an open question."""

import contextlib
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import InconclusiveDimensionOperation

from jgpt.shapes.matching import SIZE_FUNCTIONS

COMPARISONS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}
Size: Any = type(jax.export.symbolic_shape("b")[0])
"""JAX's class of symbolic sizes, which has no public name."""
_NAME = r"[A-Za-z_]\w*"
_SHORT_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
    "pred": "bool",
}
"""The names of dtypes in JAX's printed programs."""


# --- arrays and names ----------------------------------------------------------------------------


def parse_array(array: str) -> tuple[Any, str]:
    """Return the dtype and the dimensions in a text such as `float32[b t 8]`."""
    found = re.fullmatch(r"(\w+)\[([^\],]*)\]", array.strip())
    # An unknown dtype raises TypeError, an expression that JAX can't read ValueError.
    with contextlib.suppress(TypeError, ValueError):
        if found is not None:
            dtype_name, dimensions = found.groups()
            dtype = jnp.dtype(_SHORT_DTYPES.get(dtype_name, dtype_name))
            sizes = make_shape(dimensions, jax.export.SymbolicScope())
            # Whether a symbolic size is negative is known only with its numbers.
            if all(isinstance(size, Size) or size >= 0 for size in sizes):
                return dtype, dimensions
    raise ValueError(f"{array!r} is not an array such as 'float32[b t 8]'")


def evaluate_size(text: str, numbers: Mapping[str, int]) -> int:
    """Return the number of a size such as `4*t`, where each name has a number."""
    (size,) = make_shape(text, jax.export.SymbolicScope())
    return _evaluate(size, numbers)


def make_shape(dimensions: str, scope: jax.export.SymbolicScope) -> Sequence[Any]:
    """Return the sizes in a text; sizes that the case fixes are numbers."""
    with_commas = ", ".join(dimensions.split())
    return jax.export.symbolic_shape(rename_for_jax(with_commas), scope=scope)


def names_in(text: str) -> list[str]:
    """Return the sizes that a text names, without functions."""
    functions = ("max", "min", *SIZE_FUNCTIONS)  # all functions in JAX's text of a size
    words = re.findall(_NAME, text)
    return [word for word in words if word not in functions]


def rename_for_jax(text: str) -> str:
    """Rename sizes to names that no dimension has.

    A typed call binds the symbols by their names, so a symbol `time` would be confused with its
    dimension `time`.
    """

    def rename(match: re.Match[str]) -> str:
        name = match[0]
        if names_in(name):
            return f"{name}_symbol"
        return name  # a function

    return re.sub(_NAME, rename, text)


def restore_names(text: str) -> str:
    """Undo `rename_for_jax` in messages, which use the user's names."""
    return re.sub(r"\b(\w+?)_symbol\b", r"\1", text)


# --- constraints ---------------------------------------------------------------------------------


def require_readable(where: tuple[str, ...], names: list[str]) -> None:
    """Raise ValueError for constraints that can't be read, name other sizes, or contradict each
    other."""
    names_in_constraints = set(names_in(" ".join(where)))
    unknown = names_in_constraints - set(names)
    if unknown:
        name = min(unknown)  # one of them, the same in each run
        raise ValueError(f"where={list(where)} names {name}, a size that no array has")
    problem = "holds for no sizes"
    try:
        scope = make_scope(where)
        is_met = not any(_is_never_met(constraint, scope) for constraint in where)
    except Exception as error:
        is_met = False
        if "nsatisfiable" not in str(error):  # JAX's error or jgpt's
            problem = f"can't be read: {error}"
    if not is_met:
        raise ValueError(f"where={list(where)} {problem}")


def _is_never_met(constraint: str, scope: jax.export.SymbolicScope) -> bool:
    """Return whether JAX knows that a constraint holds for no sizes of a scope."""
    left, comparison, right = _sides(constraint, scope)
    try:
        if comparison == "<=":
            return (left > right) is True
        # For `>=`, and for one of the two ways in which the sides of `==` may differ.
        return (left < right) is True
    except InconclusiveDimensionOperation:  # it holds for some sizes and not for others
        return False


def make_scope(case: tuple[str, ...]) -> jax.export.SymbolicScope:
    """Give the constraints of a case to JAX. Raises ValueError if no sizes meet them."""
    fixing = []  # such as `t == 8`
    others = []
    numbers: dict[str, int] = {}
    for constraint in case:
        found = re.fullmatch(r"(\w+) == (\d+)", constraint)
        if found:
            fixing.append(constraint)
            numbers[found[1]] = int(found[2])
        else:
            others.append(constraint)
    # JAX doesn't compare numbers with numbers.
    for constraint in case:
        names = set(names_in(constraint))
        are_fixed = names <= numbers.keys()
        if are_fixed and not _holds(constraint, numbers):
            raise ValueError("unsatisfiable")
    # Fixed sizes come first, since JAX substitutes them in later constraints.
    constraints_for_jax = [rename_for_jax(constraint) for constraint in fixing + others]
    return jax.export.SymbolicScope(constraints_for_jax)


def _holds(constraint: str, numbers: dict[str, int]) -> bool:
    """Return whether a constraint holds for sizes that are numbers."""
    left, comparison, right = _sides(constraint, jax.export.SymbolicScope())
    left_number = _evaluate(left, numbers)
    right_number = _evaluate(right, numbers)
    compare = COMPARISONS[comparison]
    return compare(left_number, right_number)


def _evaluate(size: Any, numbers: Mapping[str, int]) -> int:
    """Return the number of a size in a scope without constraints."""
    if not isinstance(size, Size):
        return size
    values = {rename_for_jax(name): number for name, number in numbers.items()}
    # A private method: in a scope where `b == 1`, JAX leaves `mod(1, 8)` unevaluated. If JAX
    # changes the method, a test reports what broke.
    return size._evaluate(values)


def _sides(constraint: str, scope: jax.export.SymbolicScope) -> tuple[Any, str, Any]:
    """Return the two sides of a constraint as sizes, and the comparison between them."""
    left, comparison, right = re.split("(==|>=|<=)", constraint)
    # JAX reads shapes rather than sizes, so the sides are two dimensions, separated by a space.
    left = left.replace(" ", "")
    right = right.replace(" ", "")
    left_size, right_size = make_shape(f"{left} {right}", scope)
    return left_size, comparison, right_size


# --- open questions ------------------------------------------------------------------------------


def is_open(size: Any) -> bool:
    """Return whether a size may be 0 and may be another number."""
    # It isn't 0 if JAX knows that it is above or below 0; JAX raises an error if it doesn't know.
    for signed in (size, -size):
        with contextlib.suppress(InconclusiveDimensionOperation):
            if (signed >= 1) is True:
                return False
    return True


def split_question(question: str) -> list[str]:
    """Split an open question, JAX's text of a comparison, into cases that cover all sizes."""
    readable = restore_names(question)
    found = re.search(r"'([^']*)' (>=|>|<=|<|==) '([^']*)'", readable)
    if not found:
        return []
    left, comparison, right = found.groups()
    # JAX accepts no equality of a difference: `t - 4 == 0` becomes `t == 4`.
    difference = re.fullmatch(r"(.+) - (\d+)", left)
    if comparison == "==" and difference and right.isdigit():
        left, subtracted = difference.groups()
        right = str(int(right) + int(subtracted))
    # Sizes are integers, so the opposite of `t <= 8` is `t >= 9`.
    less = f"{left} <= {right} - 1"
    more = f"{left} >= {right} + 1"
    if right.isdigit():
        less = f"{left} <= {int(right) - 1}"
        more = f"{left} >= {int(right) + 1}"
    match comparison:
        case "==":
            equal = f"{left} == {right}"
            # No size is below 1, and a size without a subtraction is not below 0.
            is_least_size = right == "1" and left.isidentifier()
            is_least_sum = right == "0" and "-" not in left
            if is_least_size or is_least_sum:
                return [equal, more]
            return [equal, more, less]
        case ">=" | "<":
            return [f"{left} >= {right}", less]
        case _:
            return [f"{left} <= {right}", more]
