"""Random signatures and calls: what `typed` says is what jaxtyping's decorator says with beartype.

Each call follows others of the same function. The differences are known, and refuse more:

| annotation | jaxtyping and beartype | `typed` |
|---|---|---|
| a list, set or dict of arrays | check one item, at random | checks each |
| `#size`, and `?size` in a tree without a name | take them | refuses the annotation by name |
| a tree's structure of several names, `"T S"` | take it | refuses the annotation by name |
"""

import itertools
import random
import typing
from typing import Annotated, Any, NewType, TypeVar

import jax.numpy as jnp
import numpy as np
import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import (
    AnnotationError,
    Array,
    Bool,
    Float,
    Int,
    PyTree,
    Shaped,
    TypeCheckError,
    jaxtyped,
)

from jgpt.shapes.contract import typed
from tests.quick import only

REFERENCE = jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))
DIMENSIONS = (
    *("a", "b", "a b", "b a", "*r", "*r a", "a *r", "... a", "2", "a 3", "_", "_ a", "a+1", ""),
    *("a*2 b", "{n}", "{n} a", "a {n}+1", "{owner.width}", "rows=2 a"),
)
OWN_DIMENSIONS = ("?a", "?*x", "?a b")
DTYPES = {"Float": ["float32"], "Int": ["int32"], "Bool": ["bool"], "Shaped": ["float32", "int32"]}
SIZES = (1, 2, 3, 4)
OTHERS = {int: 2, float: 1, str: "t", bool: True, Any: 3, list[int]: [1], type(None): None}
"""Annotations without sizes, each with a value that it takes."""
WRONG = (None, 2, "t", [1], (1, 2), jnp.ones(5), np.ones((2, 5)), {"p": jnp.ones(2)})


NUMBERS = itertools.count()


class Owner:
    """Its width changes from call to call."""

    def __init__(self, width: int) -> None:
        self.width = width


class Case:
    """Annotations, and values for them that mostly fit together."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def array(self) -> Any:
        kind = self.random.choice([Float, Int, Shaped, Bool])
        library = self.random.choice([Array, Array, Array, np.ndarray])
        return kind[library, self.random.choice(DIMENSIONS)]

    def hint(self, depth: int = 0) -> Any:
        simple = [self.array() for _ in range(6)]
        if depth == 2:
            return simple[0]
        own = self.random.choice([Float, Int])[Array, self.random.choice(OWN_DIMENSIONS)]
        structure = self.random.choice(["T", "S"])
        number = next(NUMBERS)  # beartype keeps what it has made by the name
        others = [
            self.array() | None,
            self.array() | self.array(),
            self.array() | self.random.choice([int, str, float]),
            tuple[self.hint(depth + 1), self.hint(depth + 1)],
            PyTree[self.array()],
            PyTree[self.array(), structure],
            PyTree[own, structure],
            NewType(f"Named{number}", self.array()),  # pyright: ignore
            TypeVar(f"Bound{number}", bound=self.array()),  # pyright: ignore
            Annotated[self.array(), "noted"],
            self.random.choice(list(OTHERS)),
        ]
        return self.random.choice([*simple, *others])

    def value(self, hint: Any, sizes: dict[str, Any]) -> Any:
        """Mostly a value that the annotation takes, with these sizes."""
        if self.random.random() < 0.03:
            return self.random.choice(WRONG)
        origin = typing.get_origin(hint)
        if origin is Annotated:  # it has the attributes of what it annotates
            return self.value(hint.__origin__, sizes)
        if isinstance(hint, NewType):
            return self.value(hint.__supertype__, sizes)
        if isinstance(hint, TypeVar):
            return self.value(hint.__bound__, sizes)
        if hasattr(hint, "leaftype"):
            return self.tree(hint, sizes)
        if hasattr(hint, "dim_str"):
            return self.array_of(hint, sizes)
        if origin is tuple:
            return tuple(self.value(part, sizes) for part in typing.get_args(hint))
        if hint in OTHERS:
            return OTHERS[hint]
        return self.value(self.random.choice(typing.get_args(hint)), sizes)

    def tree(self, hint: Any, sizes: dict[str, Any]) -> Any:
        leaves = sizes.setdefault(f"leaves of {hint.structure}", self.random.choice([1, 2]))
        found = {}
        for leaf, name in enumerate("pq"[:leaves]):
            sizes["leaf"] = leaf
            found[name] = self.value(hint.leaftype, sizes)
        return found

    def array_of(self, hint: Any, sizes: dict[str, Any]) -> Any:
        shape = []
        for dimension in hint.dim_str.split():
            shape += self.sizes_of(dimension, sizes)
        if shape and self.random.random() < 0.04:
            shape[self.random.randrange(len(shape))] += 1
        dtype = self.random.choice(DTYPES[hint.__name__.partition("[")[0]])
        make = np.zeros if hint.array_type is np.ndarray else jnp.zeros
        return make(tuple(shape), dtype)

    def sizes_of(self, dimension: str, sizes: dict[str, Any]) -> list[int]:
        one = self.random.choice(SIZES)
        several = [self.random.choice(SIZES) for _ in range(self.random.choice([0, 1, 2]))]
        match dimension:
            case "...":
                return several
            case "_":
                return [one]
            case "*r":
                return sizes.setdefault("*r", several)
            case "?*x":
                return sizes.setdefault(f"*x{sizes['leaf']}", several)
            case "?a":
                return [sizes.setdefault(f"a{sizes['leaf']}", one)]
            case "{n}":
                return [sizes["n"]]
            case "{n}+1":
                return [sizes["n"] + 1]
            case "{owner.width}":
                return [sizes["owner"].width]
            case "a+1":
                return [sizes.setdefault("a", one) + 1]
            case "a*2":
                return [sizes.setdefault("a", one) * 2]
            case "rows=2":
                return [2]
        if dimension.isdigit():
            return [int(dimension)]
        return [sizes.setdefault(dimension, one)]


def function_of(hints: list[Any], decorator: Any) -> Any:
    def function(x, y, z, n, owner, result):
        return result

    x, y, z, result = hints
    function.__annotations__ = {"x": x, "y": y, "z": z, "n": Any, "owner": Any, "return": result}
    return decorator(function)


def verdict(function: Any, arguments: list[Any]) -> str:
    try:
        function(*arguments)
    except TypeCheckError:
        return "refused"
    except AnnotationError:  # a size that nothing has bound
        return "unbound"
    return "taken"


@pytest.mark.parametrize("seed", only([0], range(20)))
def test_both_say_the_same_of_random_calls(seed):
    """30 functions, 20 calls of each: writing a function takes longer than calling it."""
    case = Case(seed)
    taken = 0
    for _ in range(30):
        hints = [case.hint() for _ in range(4)]
        ours = function_of(hints, typed)
        theirs = function_of(hints, REFERENCE)
        for _ in range(20):
            owner = Owner(case.random.choice([2, 3]))
            sizes = {"n": case.random.choice([1, 2, 3]), "owner": owner, "leaf": 0}
            *given, result = [case.value(hint, sizes) for hint in hints]
            arguments = [*given, sizes["n"], owner, result]
            expected = verdict(theirs, arguments)
            assert verdict(ours, arguments) == expected, (hints, arguments)
            taken += expected == "taken"
    assert taken > 150
