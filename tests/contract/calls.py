"""Typed calls, overheard while programs run, to be made again with other arrays."""

import collections
import collections.abc
import functools
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from beartype import BeartypeConf
from beartype.door import is_bearable
from jax.core import Tracer
from jaxtyping import TypeCheckError, jaxtyped

from jgpt.shapes import contract
from jgpt.shapes.describe import by_dimension
from tests.contract.inspection import handles_arrays

KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype
DTYPES = ("bfloat16", "float32", "int32", "uint8", "bool", "complex64")
"""One or two of each kind that an annotation may name."""
TOWER = BeartypeConf(is_pep484_tower=True)  # 0 is a valid float


class Value(NamedTuple):
    """A shape and a dtype, to make an array of."""

    shape: tuple[int, ...]
    dtype: str

    def struct(self) -> jax.ShapeDtypeStruct:
        dtype = KEY if self.dtype == KEY.name else jnp.dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype)

    def jax(self) -> Any:
        if self.dtype == KEY.name:
            return jax.random.wrap_key_data(jnp.asarray(np.zeros((*self.shape, 2), np.uint32)))
        return jax.device_put(self.numpy())  # compiles nothing

    def numpy(self) -> Any:
        if self.dtype == KEY.name:  # NumPy has no keys
            return self.jax()
        return np.ones(self.shape, jnp.dtype(self.dtype))

    def like(self, other: Any) -> Any:
        """Such an array, of the same library."""
        if isinstance(other, jax.ShapeDtypeStruct):
            return self.struct()
        return self.numpy() if isinstance(other, np.ndarray) else self.jax()


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_iterator(value: Any) -> bool:
    return isinstance(value, collections.abc.Iterator)


class Call:
    """A good call of a typed callable."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any):
        self.written = function
        self.function = contract.typed(function)
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signature = inspect.signature(function)
        arguments = self.signature.bind(*args, **kwargs).arguments
        if function.__name__ == "__init__":  # the object isn't made yet
            self.function = type(arguments.pop("self"))
            _, *parameters = self.signature.parameters.values()
            self.signature = self.signature.replace(parameters=parameters)
        self.order = list(arguments)
        # what the contract can tell apart: arrays, None, and the classes of the others
        kinds = [(name, is_array(value) or type(value)) for name, value in arguments.items()]
        self.kind = (self.name, *kinds)
        self.arrays = [name for name in self.order if is_array(arguments[name])]

        values = {name: with_parameters(value) for name, value in arguments.items()}
        leaves, self.tree = jax.tree.flatten(values, is_iterator)
        self.traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        if self.traced:
            leaves = [struct_of(leaf) for leaf in leaves]
        self.leaves: list[Any] = leaves
        self.span: dict[str, slice] = {}
        """Where the leaves of each argument are."""
        start = 0
        for name in sorted(self.order):
            end = start + len(jax.tree.leaves(values[name], is_iterator))
            self.span[name] = slice(start, end)
            start = end

    def leaf_of(self, name: str) -> Any:
        """The array that is an argument."""
        return self.leaves[self.span[name].start]

    @functools.cached_property
    def good(self) -> dict[str, Value]:
        """The arrays that are arguments, in the order of the signature."""
        found = {}
        for name in self.arrays:
            leaf = self.leaf_of(name)
            found[name] = Value(leaf.shape, leaf.dtype.name)
        return found

    def arguments(self, leaves: list[Any]) -> inspect.BoundArguments:
        arguments = jax.tree.unflatten(self.tree, leaves)
        ordered = collections.OrderedDict()
        for name in self.order:
            ordered[name] = arguments[name]
        return inspect.BoundArguments(self.signature, ordered)

    def changed(self, values: Mapping[str, Value]) -> list[Any]:
        leaves = list(self.leaves)
        for name, value in values.items():
            if value != self.good[name]:
                leaves[self.span[name].start] = value.like(self.leaf_of(name))
        return leaves

    def again(self, values: Mapping[str, Value], function: Callable[..., Any] | None = None) -> Any:
        """Make the call with these arrays, of this function or another: traced if it was."""
        leaves = self.changed(values)
        called = function or self.function
        result = None
        traced = []
        if self.traced:
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, jax.ShapeDtypeStruct):
                    traced.append(number)

        def run(arrays: list[Any]) -> None:
            nonlocal result
            given = list(leaves)
            for number, array in zip(traced, arrays, strict=True):
                given[number] = array
            bound = self.arguments(given)
            result = called(*bound.args, **bound.kwargs)

        if self.traced:
            jax.eval_shape(run, [leaves[number] for number in traced])
        else:
            run([])
        return result

    def outcome(self, values: Mapping[str, Value], also: tuple[str, ...] = ()) -> str:
        """`ok`, `contract` where it blames its own arguments, or what went wrong.

        `also` names other callables that may say what is wrong: the first to see it.
        """
        try:
            self.again(values)
        except TypeCheckError as error:
            blame = str(error).partition("\n")[0]
            subject, _, said = blame.partition("() ")
            if "argument" not in said:
                return f"late: {blame}"
            if subject == self.name:
                return "contract"
            if subject in also:
                return "ok"
            return f"late: {blame}"
        except ValueError as error:
            # what shapes can't say, said in jgpt's own words
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            if "/jgpt/" in raised_in:
                return "ok"
            return f"leak: {error!r}"
        except Exception as error:
            return f"leak: {error!r}"
        return "ok"

    def fits(self, values: Mapping[str, Value], hints: Mapping[str, Any]) -> bool:
        """Whether the call with these arrays keeps some annotations, as jaxtyping reads them."""

        def judge(*args: Any, **kwargs: Any) -> bool:
            given = self.signature.bind(*args, **kwargs).arguments
            return all(is_bearable(given[name], hints[name], conf=TOWER) for name in hints)

        judge.__signature__ = self.signature  # type: ignore[attr-defined]  # for braces
        return self.again(values, jaxtyped(judge, typechecker=None))

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The annotations of the arguments that are arrays, or trees of arrays of a named size."""
        found = {}
        for name in self.order:
            hint = self.signature.parameters[name].annotation
            leaf = getattr(hint, "leaftype", None)
            if name in self.arrays or getattr(leaf, "dim_str", "").strip().isidentifier():
                found[name] = hint
        return found

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """What the dimensions in the annotations stand for, each `*batch` for several."""
        found = {}
        for name, value in self.good.items():
            hint = array_hint(self.hints[name], self.leaf_of(name))
            for dimension, sizes in by_dimension(hint, value.shape):
                found[dimension] = tuple(sizes)
        return found


def with_parameters(value: Any) -> Any:
    """A method as a tree, which holds its module's parameters."""
    if inspect.ismethod(value):
        return jax.tree_util.Partial(value.__func__, value.__self__)
    return value


def struct_of(leaf: Any) -> Any:
    """A tracer's shape and dtype, which outlive its trace."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def array_hint(hint: Any, value: Any) -> Any:
    """Of what a value may be, the array annotation for its library, or None."""
    library = np.ndarray if isinstance(value, np.ndarray) else jax.Array
    for alternative in getattr(hint, "__args__", (hint,)):
        if getattr(alternative, "array_type", None) is library:
            return alternative
    return None


class Listener:
    """Stands in for the switch that each typed call looks at, and hears of the call."""

    def __init__(self) -> None:
        self.calls: dict[Any, Call] = {}
        self.interest: dict[Callable[..., Any], bool] = {}

    @property
    def jaxtyping_disable(self) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "wrapper":
            function = frame.f_locals["function"]
            if self.is_of_interest(function):
                call = Call(function, frame.f_locals["args"], frame.f_locals["kwargs"])
                self.calls.setdefault(call.kind, call)
        return False

    def is_of_interest(self, function: Callable[..., Any]) -> bool:
        # to resolve annotations takes as long as a call, and a function is called many times
        if function not in self.interest:
            is_ours = function.__module__.startswith("jgpt.")
            self.interest[function] = is_ours and handles_arrays(function)
        return self.interest[function]


def overheard(program: Callable[[], Any]) -> dict[str, list[Call]]:
    """The calls that a program makes of callables with arrays, by name, one of each kind."""
    listener = Listener()
    jax.clear_caches()  # or nothing is traced again
    with mock.patch.object(contract, "config", listener):
        program()
    found: dict[str, list[Call]] = {}
    for call in listener.calls.values():
        found.setdefault(call.name, []).append(call)
    return found


def shape_mutations(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Other shapes: an axis resized, dropped, added or swapped, or all axes of one size resized."""
    found = []
    for axis, old in enumerate(shape):
        for size in (1, old + 1):  # what broadcasts, and the nearest
            found.append((*shape[:axis], size, *shape[axis + 1 :]))
    for axis in range(len(shape)):
        found.append((*shape[:axis], *shape[axis + 1 :]))
    found += [(1, *shape), (43, *shape), (*shape, 1)]
    for first, second in itertools.combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[first] = shape[second]
        swapped[second] = shape[first]
        found.append(tuple(swapped))
    for old in shape:
        if shape.count(old) > 1:
            found.append(resized(shape, old, old + 1))
    different = dict.fromkeys(found)
    different.pop(shape, None)
    return list(different)


def resized(shape: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    """The shape with another size in place of one, on all of its axes."""
    return tuple(new if size == old else size for size in shape)


def mutations(values: Mapping[str, Value]) -> Iterator[dict[str, Value]]:
    """Good arguments with one change, perhaps wrong: a size, an axis, the axes' order, a dtype.

    Also one size in all of them: no two names have one size, so that is right if the name is free.
    """
    sizes = set()
    for name, value in values.items():
        sizes.update(value.shape)
        for shape in shape_mutations(value.shape):
            yield {**values, name: value._replace(shape=shape)}
        for dtype in (*DTYPES, KEY.name):
            if dtype != value.dtype:
                yield {**values, name: value._replace(dtype=dtype)}
    for old in sizes:
        changed = {}
        for name, value in values.items():
            changed[name] = value._replace(shape=resized(value.shape, old, 41))
        yield changed
