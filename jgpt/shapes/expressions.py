"""Sizes named by expressions in open sizes, such as `2*t`, from traces at a few points.

A point gives each open size a number. Expressions are sums, products and quotients of open sizes.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

LEAST_POINTS = 3
"""Two points always lie on a line; the third shows whether it is the right one."""
MOST_FACTORS = 3
"""The limit of open sizes in a product: all scores of attention are `b*t*t`, times the heads."""
MOST_DIVISOR = 128
_COUNT = " arrays"
"""The end of a text that counts the arrays in a tree, such as `5 arrays`."""


class NamedSizes(NamedTuple):
    """A tree in which open sizes have names."""

    tree: Any
    other_points: list[int]
    """The points at which the tree has other parts."""


def name_sizes(trees: Iterable[Any], symbols: Mapping[str, Sequence[int]]) -> NamedSizes:
    """Return the first tree, with expressions for the sizes that are not the same in all trees.

    Each tree has the sizes at one point. `symbols` has the numbers of each open size at all points.
    Trees are taken until each size has exactly one expression; a size is `?` if none is left or
    several are. A tree with other parts than the first is skipped. If it is the second one, whose
    point is the nearest, sizes stay numbers.
    """
    remaining = iter(trees)
    first = next(remaining)
    structure = jax.tree.structure(first)
    leaves_at_points = [jax.tree.leaves(first)]
    points = [0]
    other_points = []
    names: dict[tuple[int, ...], set[str]] = {}
    for point, tree in enumerate(remaining, start=1):
        if jax.tree.structure(tree) != structure:
            other_points.append(point)
            if point == 1:
                break
            continue
        leaves_at_points.append(jax.tree.leaves(tree))
        points.append(point)
        names = _expressions_of_leaves(leaves_at_points, points, symbols)
        if len(points) >= LEAST_POINTS and _are_clear(names):
            break  # each further tree would be one more trace
    named_leaves = []
    for values in zip(*leaves_at_points, strict=True):  # of one leaf, its value at each point
        named_leaves.append(_name(values, names))
    named_tree = jax.tree.unflatten(structure, named_leaves)
    return NamedSizes(named_tree, other_points)


def _are_clear(names: Mapping[tuple[int, ...], set[str]]) -> bool:
    """Return whether each size has exactly one expression."""
    return all(len(expressions) == 1 for expressions in names.values())


def _expressions_of_leaves(
    leaves_at_points: list[list[Any]], points: list[int], symbols: Mapping[str, Sequence[int]]
) -> dict[tuple[int, ...], set[str]]:
    """Return the expressions that fit each size that differs between points."""
    symbols_at_points = {}
    for name, numbers in symbols.items():
        symbols_at_points[name] = [numbers[point] for point in points]
    names = {}
    leaves = zip(*leaves_at_points, strict=True)  # of each leaf, its values at all points
    different_leaves = set(leaves)  # many have the same sizes
    for values in different_leaves:
        sizes = _sizes(values)
        if sizes is None:
            continue
        is_open = len(set(sizes)) > 1
        if is_open:
            names[sizes] = fitting_expressions(sizes, symbols_at_points)
    return names


def _sizes(values: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the sizes in leaves, which are integers or such texts as `5 arrays`."""
    sizes = []
    for value in values:
        number = value
        if isinstance(value, str):
            number = value.removesuffix(_COUNT)
            if number == value or not number.isdigit():
                return None
        sizes.append(int(number))
    return tuple(sizes)


def _name(values: tuple[Any, ...], names: Mapping[tuple[int, ...], set[str]]) -> Any:
    """Return the value of a leaf at the first point, or the one expression for its size."""
    first = values[0]
    is_the_same = values.count(first) == len(values)
    if is_the_same:
        return first
    expressions: set[str] = set()
    sizes = _sizes(values)
    if sizes is not None:
        expressions = names[sizes]
    name = "?"
    if len(expressions) == 1:
        (name,) = expressions
    if isinstance(first, str) and first.endswith(_COUNT):
        return name + _COUNT
    return name


# --- expressions ---------------------------------------------------------------------------------


def fitting_expressions(sizes: Sequence[int], symbols: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the expressions that have the given sizes at all points.

    Each symbol has a number at each point. Sums of two products, such as `b*t+b`, have three
    numbers to find, so they need four points, and are tried where nothing simpler fits.
    """
    found = set()
    values_of_products = {}
    for factors in _products(symbols):
        product = "*".join(factors)
        values = _product_values(factors, symbols)
        line = _fitting_line(product, values, sizes)
        if line is not None:
            found.add(line)
        # A quotient of a square is rare, and it is often like a size where sizes are small.
        is_square = len(set(factors)) < len(factors)
        if not is_square:
            values_of_products[product] = values
    for product, values in values_of_products.items():
        found |= _fitting_quotients(product, values, sizes)
    if found or len(sizes) <= LEAST_POINTS:
        return found
    # Nothing simpler fits, so sums of two products are tried.
    for first, second in itertools.combinations(values_of_products, 2):
        first_values = values_of_products[first]
        second_values = values_of_products[second]
        plane = _fitting_plane(first, first_values, second, second_values, sizes)
        if plane is not None:
            found.add(plane)
    return found


def _products(symbols: Mapping[str, Sequence[int]]) -> list[tuple[str, ...]]:
    """Return the factors of the products of up to three open sizes."""
    open_sizes = []
    for name, numbers in symbols.items():
        # A size that is the same at all points explains no difference.
        if len(set(numbers)) > 1:
            open_sizes.append(name)
    products: list[tuple[str, ...]] = []
    for count in range(1, MOST_FACTORS + 1):
        products += itertools.combinations_with_replacement(open_sizes, count)
    return products


def _product_values(factors: tuple[str, ...], symbols: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the values of a product at all points."""
    numbers_of_factors = [symbols[name] for name in factors]
    values = []
    for numbers in zip(*numbers_of_factors, strict=True):
        values.append(math.prod(numbers))
    return values


def _fitting_line(product: str, values: Sequence[int], sizes: Sequence[int]) -> str | None:
    """Return such an expression as `2*t-1`, if it has the sizes for the values of a product."""
    slope = _slope(values, sizes)
    if slope == 0:
        return None
    constant = sizes[0] - slope * values[0]
    for value, size in zip(values, sizes, strict=True):
        if size != slope * value + constant:
            return None
    return _sum_text([(slope, product), (constant, "")])


def _slope(values: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the slope of the line through two points, or 0 if it is no integer."""
    for value, size in zip(values, sizes, strict=True):
        if value == values[0]:
            continue  # a line needs two values of the product
        slope, rest = divmod(size - sizes[0], value - values[0])
        if rest != 0:
            return 0
        return slope
    return 0


def _fitting_quotients(product: str, values: Sequence[int], sizes: Sequence[int]) -> set[str]:
    """Return such expressions as `t//2` and `64*((t+63)//64)` with the given sizes."""
    found = set()
    common = math.gcd(*sizes)
    for factor in range(1, min(common, MOST_DIVISOR) + 1):
        if common % factor != 0:
            continue
        quotients = [size // factor for size in sizes]
        for divisor in range(2, MOST_DIVISOR + 1):
            # The quotient rounded down, rounded up, and that of one less.
            for constant in (0, divisor - 1, -1):
                if _are_quotients(quotients, values, constant, divisor):
                    found.add(_quotient_text(factor, product, constant, divisor))
    return found


def _are_quotients(
    quotients: Sequence[int], values: Sequence[int], constant: int, divisor: int
) -> bool:
    """Return whether each quotient is `(value + constant) // divisor`."""
    # It is called for 127 divisors of each factor, so it ends at the first that differs.
    for quotient, value in zip(quotients, values, strict=True):
        if quotient != (value + constant) // divisor:
            return False
    return True


def _quotient_text(factor: int, product: str, constant: int, divisor: int) -> str:
    """Return such an expression as `64*((t+63)//64)`."""
    dividend = _sum_text([(1, product), (constant, "")])
    if constant != 0:
        dividend = f"({dividend})"
    quotient = f"{dividend}//{divisor}"
    if factor == 1:
        return quotient
    return f"{factor}*({quotient})"


def _fitting_plane(
    first: str,
    first_values: Sequence[int],
    second: str,
    second_values: Sequence[int],
    sizes: Sequence[int],
) -> str | None:
    """Return such an expression as `b*t+2*b` with the given sizes, for the values of two
    products."""
    # From one point to another the constant cancels, so three points are two equations for the
    # two slopes, a * x + b * y = e and c * x + d * y = f, which Cramer's rule solves.
    a, c = _differences(first_values)
    b, d = _differences(second_values)
    e, f = _differences(sizes)
    determinant = a * d - b * c
    if determinant == 0:
        return None
    first_slope, first_rest = divmod(e * d - b * f, determinant)
    second_slope, second_rest = divmod(a * f - e * c, determinant)
    if first_rest != 0 or second_rest != 0:
        return None
    if first_slope == 0 or second_slope == 0:  # that is a line
        return None
    constant = sizes[0] - first_slope * first_values[0] - second_slope * second_values[0]
    for value, other_value, size in zip(first_values, second_values, sizes, strict=True):
        if size != first_slope * value + second_slope * other_value + constant:
            return None
    return _sum_text([(first_slope, first), (second_slope, second), (constant, "")])


def _differences(values: Sequence[int]) -> tuple[int, int]:
    """Return how far the second and the third value are from the first."""
    return values[1] - values[0], values[2] - values[0]


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
