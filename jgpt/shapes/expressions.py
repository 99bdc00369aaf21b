"""Sizes named by expressions in open sizes, such as `2*t`, from traces at a few points.

A point gives each open size a number. Expressions are sums, products and quotients of open sizes.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

LEAST_POINTS = 3
"""Two points always lie on a line; the third shows whether it is the right one."""
MOST_FACTORS = 3
"""The limit of open sizes in a product: all scores of attention are `b*t*t`, times the heads."""
MOST_DIVISOR = 128
_SIZE = r"(?<![\w.])(0|[1-9]\d*)(?!\w)"
"""A size in a text: no part of a word or of a decimal, and without leading zeros, which `int` would
remove."""


class NamedSizes(NamedTuple):
    """A tree in which open sizes have names."""

    tree: Any
    other_points: list[int]
    """The points at which the tree has other parts."""


def name_sizes(trees: Iterable[Any], symbols: Mapping[str, Sequence[int]]) -> NamedSizes:
    """Return the first tree, with expressions for the sizes that are not the same in all trees.

    Each tree has the sizes at one point: its leaves are sizes, or texts with sizes such as `5
    arrays`. `symbols` has the numbers of each open size at all points. Trees are taken until each
    size has exactly one expression; a size is `?` if none is left or several are. A tree with other
    parts or words than the first is skipped. If it is the second one, whose point is the nearest,
    sizes stay numbers.
    """
    remaining = iter(trees)
    first = next(remaining)
    form = _form(first)
    leaves_at_points = [jax.tree.leaves(first)]
    points = [0]
    other_points = []
    names: dict[tuple[str, ...], set[str]] = {}
    for point, tree in enumerate(remaining, start=1):
        if _form(tree) != form:
            other_points.append(point)
            if point == 1:
                break
            continue
        leaves_at_points.append(jax.tree.leaves(tree))
        points.append(point)
        symbols_at_points = {}
        for name, numbers in symbols.items():
            symbols_at_points[name] = [numbers[point] for point in points]
        names = _names_of_sizes(leaves_at_points, symbols_at_points)
        are_clear = all(len(expressions) == 1 for expressions in names.values())
        if len(points) >= LEAST_POINTS and are_clear:
            break  # each further tree would be one more trace
    named_leaves = []
    for values in zip(*leaves_at_points, strict=True):  # of one leaf, its value at each point
        named_leaves.append(_name(values, names))
    named_tree = jax.tree.unflatten(form[0], named_leaves)
    return NamedSizes(named_tree, other_points)


def _form(tree: Any) -> tuple[Any, list[list[str]]]:
    """Return what trees must have in common: the structure, and the words of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [_parts(leaf)[::2] for leaf in leaves]


def _parts(leaf: Any) -> list[str]:
    """Return the words of a leaf and the sizes between them, in turn."""
    return re.split(_SIZE, str(leaf))


def _names_of_sizes(
    leaves_at_points: list[list[Any]], symbols: Mapping[str, Sequence[int]]
) -> dict[tuple[str, ...], set[str]]:
    """Return the expressions that fit each size that differs between points."""
    names = {}
    different_leaves = set(zip(*leaves_at_points, strict=True))  # many have the same sizes
    for values in different_leaves:
        for sizes in _parts_at_points(values):
            if len(set(sizes)) > 1:
                names[sizes] = fitting_expressions(list(map(int, sizes)), symbols)
    return names


def _parts_at_points(values: Sequence[Any]) -> Iterable[tuple[str, ...]]:
    return zip(*map(_parts, values), strict=True)


def _name(values: Sequence[Any], names: Mapping[tuple[str, ...], set[str]]) -> Any:
    """Return the value of a leaf at the first point, with the one expression for each open size."""
    if values.count(values[0]) == len(values):
        return values[0]
    text = ""
    for parts in _parts_at_points(values):
        expressions = names.get(parts, {parts[0]})
        name = "?"
        if len(expressions) == 1:
            (name,) = expressions
        text += name
    return text


# --- expressions ---------------------------------------------------------------------------------


def fitting_expressions(sizes: Sequence[int], symbols: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the expressions that have the given sizes at all points.

    Each symbol has a number at each point. Sums of two products, such as `b*t+b`, have three
    numbers to find, so they need four points, and are tried where nothing simpler fits.
    """
    # A size that is the same at all points explains no difference.
    open_sizes = [name for name, numbers in symbols.items() if len(set(numbers)) > 1]
    found = set()
    values_of_products = {}
    for count in range(1, MOST_FACTORS + 1):
        for factors in itertools.combinations_with_replacement(open_sizes, count):
            product = "*".join(factors)
            values = np.prod([symbols[name] for name in factors], axis=0)
            found |= _fitting_sum({product: values}, sizes)
            # A quotient of a square is rare, and it is often like a size where sizes are small.
            is_square = len(set(factors)) < len(factors)
            if not is_square:
                values_of_products[product] = values
                found |= _fitting_quotients(product, values, sizes)
    if found or len(sizes) <= LEAST_POINTS:
        return found
    for products in itertools.combinations(values_of_products.items(), 2):
        found |= _fitting_sum(dict(products), sizes)
    return found


def _fitting_sum(products: Mapping[str, Any], sizes: Sequence[int]) -> set[str]:
    """Return such an expression as `2*t-1` or `b*t+2*b`, if it has the sizes for the values of the
    products."""
    values = np.array(list(products.values()))
    # From one point to the next the constant cancels.
    factors, _, rank, _ = np.linalg.lstsq(np.diff(values).T, np.diff(sizes), rcond=None)
    factors = np.rint(factors).astype(int)
    constants = set(sizes - factors @ values)
    if rank < len(products) or 0 in factors or len(constants) > 1:
        return set()
    terms = [*zip(factors, products, strict=True), (constants.pop(), "")]
    return {_sum_text(terms)}


def _fitting_quotients(product: str, values: Any, sizes: Sequence[int]) -> set[str]:
    """Return such expressions as `t//2` and `64*((t+63)//64)` with the given sizes."""
    found = set()
    common = math.gcd(*sizes)
    divisors = np.arange(2, MOST_DIVISOR + 1)
    # The quotient rounded down, rounded up, and that of one less.
    for constants in (0 * divisors, divisors - 1, 0 * divisors - 1):
        quotients = (values + constants[:, None]) // divisors[:, None]
        for factor in range(1, min(common, MOST_DIVISOR) + 1):
            if common % factor != 0:
                continue
            fits = (factor * quotients == sizes).all(axis=1)
            for constant, divisor in zip(constants[fits], divisors[fits], strict=True):
                found.add(_quotient_text(factor, product, constant, divisor))
    return found


def _quotient_text(factor: int, product: str, constant: int, divisor: int) -> str:
    """Return such an expression as `64*((t+63)//64)`."""
    dividend = _sum_text([(1, product), (constant, "")])
    if constant != 0:
        dividend = f"({dividend})"
    quotient = f"{dividend}//{divisor}"
    if factor == 1:
        return quotient
    return f"{factor}*({quotient})"


def _sum_text(terms: list[tuple[int, str]]) -> str:
    """Return a sum of products with factors; the empty product is 1."""
    # Negative terms come last: `64-t` rather than `-t+64`.
    ordered = sorted(terms, key=lambda term: term[0] < 0)
    text = ""
    for factor, product in ordered:
        if factor == 0:
            continue
        if factor < 0:
            text += "-"
        elif text:
            text += "+"
        if not product:
            text += str(abs(factor))
        elif abs(factor) == 1:
            text += product
        else:
            text += f"{abs(factor)}*{product}"
    return text
