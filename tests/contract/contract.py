"""What a callable promises about its arrays, said a second time and checked without jaxtyping."""

import dataclasses
import functools
import inspect
import operator
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import TypeCheckError

import jgpt
from tests.contract.inspection import modules

SIZES = {
    "batch": 3,
    "time": 7,
    "query": 4,
    "key": 5,
    "heads": 2,
    "head_dim": 11,
    "value_dim": 13,
    "embed_dim": 22,
    "features": 26,
    "vocab": 17,
    "hidden": 18,
    "choices": 19,
    "in_features": 23,
    "out_features": 29,
    "steps": 6,
    "window": 9,
    "batches": 8,
    "tokens": 31,
    "held_out": 37,
    "block_size": 64,
    "capacity": 15,
    "kv_heads": 10,
    "query_heads": 30,
    "rotary_dim": 12,
    "lookback": 14,
    "modern_dim": 360,
}
MODULES = {module.__name__: module for module in modules(jgpt)}
assert len(set(SIZES.values())) == len(SIZES), "equal sizes hide swapped axes"

KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype
DTYPES = ("float16", "bfloat16", "float32", "int8", "int32", "uint8", "uint32", "bool", "complex64")
ACCEPTED = {
    "float": {"float16", "bfloat16", "float32"},
    "int": {"int8", "int32"},
    "integer": {"int8", "int32", "uint8", "uint32"},
    "real": {"float16", "bfloat16", "float32", "int8", "int32", "uint8", "uint32"},
    "bool": {"bool"},
    "key": {KEY.name},
    "any": {*DTYPES, KEY.name},
}
FIRST = {
    "float": "float32",
    "int": "int32",
    "integer": "int32",
    "real": "float32",
    "bool": "bool",
    "key": KEY.name,
    "any": "float32",
}


@dataclass(frozen=True)
class Spec:
    """An array's contract, as in `Spec.of("float *batch query head_dim")`."""

    kind: str
    dims: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Spec":
        kind, *dims = text.split()
        return cls(kind, tuple(dims))

    def good(self, sizes: Mapping[str, int]) -> "Value":
        # a variadic name stands for two axes in a good call, so that dropping one still leaves one
        shape = []
        for dim in self.dims:
            shape += [sizes["batch"], 2] if dim[0] == "*" else [int(eval(dim, {}, dict(sizes)))]
        return Value(tuple(shape), FIRST[self.kind])


@dataclass(frozen=True)
class Value:
    """A shape and a dtype, to make an array of."""

    shape: tuple[int, ...]
    dtype: str

    def struct(self) -> jax.ShapeDtypeStruct:
        dtype = KEY if self.dtype == KEY.name else jnp.dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype)

    def jax(self) -> Any:
        if self.dtype == KEY.name:
            return jax.random.wrap_key_data(jnp.asarray(np.zeros((*self.shape, 2), np.uint32)))
        return jax.device_put(np.zeros(self.shape, jnp.dtype(self.dtype)))  # compiles nothing

    def numpy(self, fill: int = 0) -> Any:
        if self.dtype == KEY.name:  # NumPy has no keys
            return self.jax()
        return np.full(self.shape, fill, jnp.dtype(self.dtype))


@dataclass(frozen=True)
class Case:
    """A good call of one callable, and which sizes its arrays share."""

    target: str
    """The callable's full name, as its errors give it."""
    arrays: dict[str, str]
    """Each array argument's spec. Equal names are equal sizes."""
    returns: Any = None
    """The dimensions of the result, or a tuple of such; None where it holds no array."""
    fixed: str = ""
    """The sizes that something else than an array argument decides."""
    owner: Any = None
    """The `self` of a method."""
    static: dict[str, Any] = field(default_factory=dict)
    """The other arguments. Functions among them are called inside the trace."""
    checks: int = 0
    """How many intermediates the call checks itself."""
    function: Any = None
    """The callable, where its name doesn't lead to it."""
    takes: Literal["traced", "values", "numpy"] = "traced"
    """Where the shapes are not all that counts, it is called rather than traced."""
    host: str = ""
    """The arguments that are NumPy's, and of ones, where the others are JAX's and of zeros."""
    result: Any = None
    """A good result, of what needs more than arrays to make one."""
    loose: bool = False
    """The sizes of its result depend on what is in its arguments."""
    blames: str = ""
    """Another callable that may say what is wrong: the first to see it."""
    note: str = ""
    """Tells cases of one callable apart."""

    def __str__(self) -> str:
        return self.target + (f"-{self.note}" if self.note else "")

    @property
    def callable(self) -> Any:
        if self.function is not None:
            return self.function
        names = self.target.split(".")
        depth = next(i for i in range(len(names), 0, -1) if ".".join(names[:i]) in MODULES)
        return operator.attrgetter(".".join(names[depth:]))(MODULES[".".join(names[:depth])])

    @functools.cached_property
    def specs(self) -> dict[str, Spec]:
        return {name: Spec.of(text) for name, text in self.arrays.items()}

    @functools.cached_property
    def good(self) -> dict[str, Value]:
        return {name: spec.good(SIZES) for name, spec in self.specs.items()}

    def accepts(self, values: Mapping[str, Value]) -> bool:
        """Whether the contract allows these arrays: the oracle that the annotations must equal."""
        bound: dict[str, Any] = {name: SIZES[name] for name in self.fixed.split()}
        for name, spec in self.specs.items():
            value = values[name]
            if value.dtype not in ACCEPTED[spec.kind]:
                return False
            dims, shape = list(spec.dims), value.shape
            if dims and dims[0][0] == "*":
                cut = len(shape) - len(dims) + 1
                if cut < 0 or bound.setdefault(dims.pop(0), shape[:cut]) != shape[:cut]:
                    return False
                shape = shape[cut:]
            if dims and dims[-1][0] == "*":  # nothing else is said of the last axes
                dims.pop()
                shape = shape[: len(dims)]
            if len(dims) != len(shape):
                return False
            for dim, size in zip(dims, shape, strict=True):
                wanted = bound.setdefault(dim, size) if dim.isidentifier() else eval(dim, {}, bound)
                if wanted != size:
                    return False
        return True

    def call(self, values: Mapping[str, Value], function: Callable[..., Any] | None = None) -> Any:
        """Trace the callable, or another in its place, on arrays of these shapes."""
        owner = [] if self.owner is None else [self.owner]
        bound = functools.partial(function or self.callable, *owner)
        if self.takes != "traced":
            make = Value.numpy if self.takes == "numpy" else Value.jax
            made = {name: make(value) for name, value in values.items()}
            made |= {name: values[name].numpy(fill=1) for name in self.host.split()}
            return bound(**made, **self.static)

        def traced(**arrays: Any) -> Any:
            static = {
                name: value() if inspect.isfunction(value) else value
                for name, value in self.static.items()
            }
            return bound(**arrays, **static)

        return jax.eval_shape(traced, **{name: value.struct() for name, value in values.items()})

    def outcome(self, values: Mapping[str, Value]) -> str:
        """`ok`, `contract` where this callable blames its own arguments, or what went wrong."""
        try:
            self.call(values)
        except TypeCheckError as error:
            blame = str(error).partition("\n")[0]
            ours = blame.startswith(
                tuple(
                    f"{name}() got a wrong argument `"
                    for name in (self.target, *self.blames.split())
                )
            )
            return "contract" if ours else f"late: {blame}"
        except ValueError as error:
            # what shapes can't say, said in jgpt's own words
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            return "ok" if "/jgpt/" in raised_in else f"leak: {error!r}"
        except Exception as error:
            return f"leak: {error!r}"
        return "ok"


def closure(function: Any, name: str) -> Any:
    """A function that another one closes over."""
    function = inspect.unwrap(function)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def mutations(values: Mapping[str, Value]) -> list[dict[str, Value]]:
    """Good arguments with one thing wrong, perhaps: a size, an axis, the axes' order, a dtype."""
    found = []
    for name, value in values.items():
        for shape in shape_mutations(value.shape):
            found.append({**values, name: dataclasses.replace(value, shape=shape)})
        for dtype in (*DTYPES, KEY.name):
            if dtype != value.dtype:
                found.append({**values, name: dataclasses.replace(value, dtype=dtype)})
    return found


def shape_mutations(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    resized = [
        (*shape[:axis], size, *shape[axis + 1 :])
        for axis, old in enumerate(shape)
        for size in (1, old + 1, 2 * old, 41)
        if size != old
    ]
    dropped = [(*shape[:axis], *shape[axis + 1 :]) for axis in range(len(shape))]
    added = [(1, *shape), (43, *shape), (*shape, 1)]
    swapped = [
        (*shape[:i], shape[j], *shape[i + 1 : j], shape[i], *shape[j + 1 :])
        for i in range(len(shape))
        for j in range(i + 1, len(shape))
    ]
    squares = [
        tuple(old + 1 if size == old else size for size in shape)
        for old in shape
        if shape.count(old) > 1
    ]
    found = dict.fromkeys(resized + dropped + added + swapped + squares)
    return [each for each in found if each != shape]
