"""A function of JAX as plain data, which `browser/interpreter.js` runs in a browser."""

import base64
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.random import threefry_prng_impl

from jgpt.shapes.jaxprs import (
    inner_program,
    is_library_program,
    is_of_library,
    lines_of,
    scan_sizes,
)

Parameters = dict[str, Any]

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint32",
    "int16",
    "uint16",
    "int8",
    "uint8",
    "bool",
)
"""The dtypes of the interpreter."""
MOST_OPERATIONS = 50_000
"""The limit of operations in a program, which an unrolled scan can reach."""


@dataclass(frozen=True)
class Program:
    """A flat list of operations on numbered values."""

    types: list[tuple[str, tuple[int, ...]]]
    """The dtype and shape of each value, by its number."""
    inputs: dict[str, int]
    """The values that a caller gives, by the path of each array in the arguments."""
    constants: dict[int, Any]
    operations: list[tuple[str, list[int], list[int], Parameters]]
    """A primitive, the values it reads, the values it makes, and its parameters."""
    outputs: dict[str, int]
    """The results, by the path of each array in what the function returns."""

    def as_data(self) -> dict[str, Any]:
        """Return the program as it is written into JSON."""
        constants = []
        for number, value in self.constants.items():
            constants.append([number, encoded(value)])
        operations = []
        for primitive, read, made, parameters in self.operations:
            operations.append([primitive, read, made, _as_data(parameters)])
        return {
            "types": self.types,
            "inputs": self.inputs,
            "constants": constants,
            "operations": operations,
            "outputs": self.outputs,
        }


def make_program(function: Callable[..., Any], *arguments: Any) -> Program:
    """Trace a function for arguments of these shapes, and return it as a flat program.

    An argument may be a `jax.ShapeDtypeStruct`. Raises Uncomputable if the function needs a
    primitive or a dtype that the interpreter lacks.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flattener = _Flattener()
    inputs: dict[str, int] = {}
    try:
        for path, variable in zip(_paths(arguments), closed.jaxpr.invars, strict=True):
            inputs[path] = flattener.new(variable.aval)
        results = flattener.run(closed.jaxpr, closed.consts, list(inputs.values()), None)
    except _Unsupported as error:  # of an argument or a constant
        raise Uncomputable(f"the page can't compute with {error}") from None
    outputs = dict(zip(_paths(shapes), results, strict=True))
    return _without_dead_operations(flattener, inputs, outputs)


def _paths(tree: Any) -> list[str]:
    paths = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        paths.append(jax.tree_util.keystr(path, simple=True, separator="/"))
    return paths


# --- primitives -----------------------------------------------------------------------------------


class Uncomputable(ValueError):
    """A model or a tokenizer that no page can compute with; the message is the reason."""


class _Unsupported(Exception):
    """Something that the interpreter lacks; its message says what."""


def _no_parameters(parameters: Parameters) -> Parameters:
    return {}


def _named(*names: str) -> Callable[[Parameters], Parameters]:
    """Keep these parameters."""

    def keep(parameters: Parameters) -> Parameters:
        return {name: parameters[name] for name in names}

    return keep


def _new_dtype(parameters: Parameters) -> Parameters:
    return {"dtype": _dtype_name(parameters["new_dtype"])}


def _round(parameters: Parameters) -> Parameters:
    to_even = int(parameters["rounding_method"]) == 1
    return {"to_even": to_even}


def _iota(parameters: Parameters) -> Parameters:
    return {"dimension": parameters["dimension"]}


def _reduce_precision(parameters: Parameters) -> Parameters:
    bits = (parameters["exponent_bits"], parameters["mantissa_bits"])
    names = {(8, 23): "float32", (8, 7): "bfloat16", (5, 10): "float16"}
    return {"dtype": names[bits]}


def _sort(parameters: Parameters) -> Parameters:
    return {"dimension": parameters["dimension"]}


def _top_k(parameters: Parameters) -> Parameters:
    return {"k": parameters["k"]}


def _dot_general(parameters: Parameters) -> Parameters:
    (left, right), (left_batch, right_batch) = parameters["dimension_numbers"]
    return {
        "left": left,
        "right": right,
        "left_batch": left_batch,
        "right_batch": right_batch,
    }


def _mode(parameters: Parameters) -> str:
    """Return what happens to an index past the end: `clip` or `drop`."""
    mode = jax.lax.GatherScatterMode.from_any(parameters["mode"])
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
        return "drop"
    return "clip"  # a promise that none is past the end makes both the same


def _gather(parameters: Parameters) -> Parameters:
    numbers = parameters["dimension_numbers"]
    fill = parameters["fill_value"]
    return {
        "offset_dims": numbers.offset_dims,
        "collapsed_slice_dims": numbers.collapsed_slice_dims,
        "start_index_map": numbers.start_index_map,
        "operand_batching_dims": numbers.operand_batching_dims,
        "start_indices_batching_dims": numbers.start_indices_batching_dims,
        "slice_sizes": parameters["slice_sizes"],
        "mode": _mode(parameters),
        "fill": fill,
    }


def _scatter(parameters: Parameters) -> Parameters:
    numbers = parameters["dimension_numbers"]
    return {
        "update_window_dims": numbers.update_window_dims,
        "inserted_window_dims": numbers.inserted_window_dims,
        "scatter_dims_to_operand_dims": numbers.scatter_dims_to_operand_dims,
        "operand_batching_dims": numbers.operand_batching_dims,
        "scatter_indices_batching_dims": numbers.scatter_indices_batching_dims,
        "mode": _mode(parameters),
    }


def _while(parameters: Parameters) -> Parameters:
    return {
        "condition": _program_of(parameters["cond_jaxpr"]),
        "body": _program_of(parameters["body_jaxpr"]),
        "condition_constants": parameters["cond_nconsts"],
        "body_constants": parameters["body_nconsts"],
    }


def _cond(parameters: Parameters) -> Parameters:
    return {"branches": [_program_of(branch) for branch in parameters["branches"]]}


_axes = _named("axes")
_cumulative = _named("axis", "reverse")

PRIMITIVES: dict[str, Callable[[Parameters], Parameters]] = {
    # one operand, element by element
    "abs": _no_parameters,
    "acos": _no_parameters,
    "acosh": _no_parameters,
    "asin": _no_parameters,
    "asinh": _no_parameters,
    "atan": _no_parameters,
    "atanh": _no_parameters,
    "bitcast_convert_type": _new_dtype,
    "cbrt": _no_parameters,
    "ceil": _no_parameters,
    "convert_element_type": _new_dtype,
    "cos": _no_parameters,
    "cosh": _no_parameters,
    "erf": _no_parameters,
    "erf_inv": _no_parameters,
    "erfc": _no_parameters,
    "exp": _no_parameters,
    "exp2": _no_parameters,
    "expm1": _no_parameters,
    "floor": _no_parameters,
    "integer_pow": _named("y"),
    "is_finite": _no_parameters,
    "log": _no_parameters,
    "log1p": _no_parameters,
    "logistic": _no_parameters,
    "neg": _no_parameters,
    "not": _no_parameters,
    "reduce_precision": _reduce_precision,
    "round": _round,
    "rsqrt": _no_parameters,
    "sign": _no_parameters,
    "sin": _no_parameters,
    "sinh": _no_parameters,
    "sqrt": _no_parameters,
    "square": _no_parameters,
    "tan": _no_parameters,
    "tanh": _no_parameters,
    # two or three operands, element by element
    "add": _no_parameters,
    "and": _no_parameters,
    "atan2": _no_parameters,
    "clamp": _no_parameters,
    "div": _no_parameters,
    "eq": _no_parameters,
    "ge": _no_parameters,
    "gt": _no_parameters,
    "le": _no_parameters,
    "lt": _no_parameters,
    "max": _no_parameters,
    "min": _no_parameters,
    "mul": _no_parameters,
    "ne": _no_parameters,
    "or": _no_parameters,
    "pow": _no_parameters,
    "rem": _no_parameters,
    "select_n": _no_parameters,
    "shift_left": _no_parameters,
    "shift_right_arithmetic": _no_parameters,
    "shift_right_logical": _no_parameters,
    "sub": _no_parameters,
    "threefry2x32": _no_parameters,
    "xor": _no_parameters,
    # shapes
    "broadcast_in_dim": _named("broadcast_dimensions"),
    "concatenate": _named("dimension"),
    "dynamic_slice": _named("slice_sizes"),
    "dynamic_update_slice": _no_parameters,
    "iota": _iota,
    "iota_2x32_shape": _no_parameters,
    "pad": _named("padding_config"),
    "reshape": _no_parameters,
    "rev": _named("dimensions"),
    "slice": _named("start_indices", "strides"),
    "split": _named("axis"),
    "squeeze": _no_parameters,
    "stack": _named("axis"),
    "tile": _named("reps"),
    "transpose": _named("permutation"),
    # reductions, orders and products
    "argmax": _axes,
    "argmin": _axes,
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumprod": _cumulative,
    "cumsum": _cumulative,
    "dot_general": _dot_general,
    "reduce_and": _axes,
    "reduce_max": _axes,
    "reduce_min": _axes,
    "reduce_or": _axes,
    "reduce_prod": _axes,
    "reduce_sum": _axes,
    "reduce_xor": _axes,
    "sort": _sort,
    "top_k": _top_k,
    # indices
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    # control
    "cond": _cond,
    "while": _while,
}
"""The primitives of the interpreter, each with a function that makes its parameters plain data."""


def _horner(x: Any, *coefficients: Any) -> Any:
    """Return a polynomial's value; the coefficient of the highest power is the last."""
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = coefficient + x * value
    return value


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "log2": lambda x: jnp.log(x) / math.log(2),
    # As JAX compiles it: 1 - x**2 would lose the digits of an x near 1.
    "one_minus_square": lambda x: (1 + x) * (1 - x),
    "polynomial": _horner,
}
"""Primitives since JAX 0.12, by operations that earlier versions have, too."""

_ALIASES = {"add_any": "add"}
_SAME_VALUES = ("copy", "copy_p", "optimization_barrier", "sharding_constraint", "stop_gradient")
"""Primitives whose results are their operands."""
_UNREAD = ("empty", "empty2")
"""Primitives of arrays that may have any numbers: in the gradient of a branch, what others keep."""
_OF_KEYS = ("random_wrap", "random_unwrap", "random_bits", "random_fold_in", "random_split")


# --- flattening -----------------------------------------------------------------------------------


@dataclass
class _Flattener:
    """The operations and constants of nested jaxprs, in the order of evaluation."""

    types: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    operations: list[tuple[str, list[int], list[int], Parameters]] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    known: dict[Any, list[int]] = field(default_factory=dict)
    """The values that an operation on the same values has made: they are computed once."""

    def new(self, aval: Any) -> int:
        """Return the number of a new value."""
        self.types.append((_dtype_name(aval.dtype), _shape_of(aval)))
        return len(self.types) - 1

    def constant(self, value: Any) -> int:
        """Return the number of a constant; equal constants have one number."""
        array = _key_data(value)
        key = ("constant", array.dtype.name, array.shape, array.tobytes())
        if key not in self.known:
            number = self.new(array)
            self.constants[number] = array
            self.known[key] = [number]
        return self.known[key][0]

    def run(self, jaxpr: Any, constants: Sequence[Any], given: list[int], line: str | None):
        """Flatten a jaxpr for values; return its results. `line` is where the user calls it."""
        values: dict[Any, int] = {}

        def read(variable: Any) -> int:
            if isinstance(variable, core.Literal):
                # a literal may be a Python number, whose dtype its type says
                aval: Any = variable.aval
                return self.constant(np.asarray(variable.val, aval.dtype))
            return values[variable]

        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            values[variable] = self.constant(value)
        values.update(zip(jaxpr.invars, given, strict=True))
        for equation in jaxpr.eqns:
            operands = [read(variable) for variable in equation.invars]
            equation_line = line or line_of(equation)
            try:
                results = self._apply(equation, operands, equation_line)
            except _Unsupported as error:
                raise Uncomputable(_refusal(equation, error, equation_line)) from None
            values.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _apply(self, equation: Any, operands: list[int], line: str | None) -> list[int]:
        name = equation.primitive.name
        name = _ALIASES.get(name, name)
        parameters = equation.params
        if name in _SAME_VALUES:
            return operands
        if name == "scan":
            return self._unrolled(parameters, operands, line)
        if name == "unstack":  # since JAX 0.12
            axis = parameters["axis"]
            count = len(equation.outvars)
            return [self._part(operands[0], index, axis) for index in range(count)]
        if name in _OF_KEYS:
            return self._of_keys(equation, operands, line)
        if name in _UNREAD:
            (variable,) = equation.outvars
            return self._zeros(variable.aval)
        if name in DEFINITIONS:
            types = [variable.aval for variable in equation.invars]
            defined = jax.make_jaxpr(DEFINITIONS[name])(*types)
            return self.run(defined.jaxpr, defined.consts, operands, line)
        if name not in PRIMITIVES:
            inner = inner_program(parameters)
            if inner is None:
                raise _Unsupported("")
            inner_line = None
            if is_library_program(inner):
                inner_line = line
            return self.run(inner.jaxpr, inner.consts, operands, inner_line)
        self._require_possible(name, parameters, operands)
        if name == "convert_element_type":
            dtype, _ = self.types[operands[0]]
            if dtype == _dtype_name(parameters["new_dtype"]):
                return operands
        plain = PRIMITIVES[name](parameters)
        if any(_is_key(variable.aval.dtype) for variable in equation.invars):
            plain = _with_axis_of_words(name, plain)
        return self.emit(name, operands, equation.outvars, plain)

    def _require_possible(self, name: str, parameters: Parameters, operands: list[int]) -> None:
        """Raise _Unsupported for keys and dtypes that the interpreter's primitive lacks."""
        lacking = []
        if name == "sort" and parameters["num_keys"] != 1:
            lacking.append(f"num_keys={parameters['num_keys']}")
        if name == "bitcast_convert_type":
            dtype, _ = self.types[operands[0]]
            for bits_of in (dtype, _dtype_name(parameters["new_dtype"])):
                if bits_of not in ("float32", "int32", "uint32"):
                    lacking.append(f"the dtype {bits_of}")
        if lacking:
            raise _Unsupported(lacking[0])

    def emit(
        self, name: str, operands: list[int], outvars: Sequence[Any], parameters: Parameters
    ) -> list[int]:
        """Append an operation; return the values it makes, or those of an equal one before it."""
        types = []
        for variable in outvars:
            aval = getattr(variable, "aval", variable)
            types.append((_dtype_name(aval.dtype), _shape_of(aval)))
        text = json.dumps(_as_data(parameters))
        key = (name, tuple(operands), tuple(types), text)
        if key not in self.known:
            if len(self.operations) == MOST_OPERATIONS:
                raise _Unsupported(f"a program of more than {MOST_OPERATIONS} operations")
            first = len(self.types)
            self.types.extend(types)
            made = list(range(first, len(self.types)))
            self.operations.append((name, operands, made, parameters))
            self.known[key] = made
        return self.known[key]

    def _unrolled(self, parameters: Parameters, operands: list[int], line: str | None) -> list[int]:
        """Return the results of a scan, whose body is repeated: layers are few."""
        body = parameters["jaxpr"]
        length = parameters["length"]
        # A scan has its operands in this order: constants, what it carries, what it has stacked.
        first_carry, carried = scan_sizes(parameters)
        first_stacked = first_carry + carried
        constants = operands[:first_carry]
        carry = operands[first_carry:first_stacked]
        stacked = operands[first_stacked:]
        indices = list(range(length))
        if parameters["reverse"]:
            indices.reverse()
        made: dict[int, list[int]] = {}
        for index in indices:
            parts = [self._part(number, index) for number in stacked]
            results = self.run(body.jaxpr, body.consts, [*constants, *carry, *parts], line)
            carry = results[:carried]
            made[index] = results[carried:]
        outputs = list(carry)
        for place, variable in enumerate(body.jaxpr.outvars[carried:]):
            shape = (length, *variable.aval.shape)
            result = jax.ShapeDtypeStruct(shape, variable.aval.dtype)
            if length == 0:
                outputs += self._zeros(result)
                continue
            # By index, also where the scan is reversed and the last one was made first.
            parts = [made[index][place] for index in range(length)]
            outputs += self.emit("stack", parts, [result], {"axis": 0})
        return outputs

    def _zeros(self, aval: Any) -> list[int]:
        """Return an array of zeros, as the list of an operation's results."""
        zero = self.constant(np.zeros((), aval.dtype))
        return self.emit("broadcast_in_dim", [zero], [aval], {"broadcast_dimensions": ()})

    def _part(self, number: int, index: int, axis: int = 0) -> int:
        """Return one entry along an axis."""
        dtype, shape = self.types[number]
        starts = [0] * len(shape)
        starts[axis] = index
        before = shape[:axis]
        after = shape[axis + 1 :]
        part = jax.ShapeDtypeStruct((*before, 1, *after), dtype)
        slice_parameters = {"start_indices": tuple(starts), "strides": None}
        (sliced,) = self.emit("slice", [number], [part], slice_parameters)
        whole = jax.ShapeDtypeStruct((*before, *after), dtype)
        (squeezed,) = self.emit("squeeze", [sliced], [whole], {})
        return squeezed

    def _of_keys(self, equation: Any, operands: list[int], line: str | None) -> list[int]:
        """Return the results of a primitive of `jax.random`; a key is its words, as uint32."""
        name = equation.primitive.name
        if name in ("random_wrap", "random_unwrap"):
            return operands
        parameters = equation.params
        match name:
            case "random_bits":

                def program(words: Any) -> Any:
                    return threefry_prng_impl.random_bits(
                        words, parameters["bit_width"], parameters["shape"]
                    )
            case "random_fold_in":
                program = threefry_prng_impl.fold_in
            case _:

                def program(words: Any) -> Any:
                    return threefry_prng_impl.split(words, parameters["shape"])

        arguments = []
        for number in operands:
            dtype, shape = self.types[number]
            arguments.append(jax.ShapeDtypeStruct(shape, dtype))
        closed = jax.make_jaxpr(program)(*arguments)
        return self.run(closed.jaxpr, closed.consts, operands, line)


def _program_of(closed: Any) -> Program:
    """Return a branch or a loop's body as a program; its inputs and outputs are numbered."""
    flattener = _Flattener()
    inputs: dict[str, int] = {}
    for index, variable in enumerate(closed.jaxpr.invars):
        inputs[str(index)] = flattener.new(variable.aval)
    results = flattener.run(closed.jaxpr, closed.consts, list(inputs.values()), None)
    outputs = {str(index): number for index, number in enumerate(results)}
    return _without_dead_operations(flattener, inputs, outputs)


def _without_dead_operations(
    flattener: _Flattener, inputs: dict[str, int], outputs: dict[str, int]
) -> Program:
    """Keep what the outputs need, with numbers that have no gaps."""
    needed = set(outputs.values())
    operations = []
    for operation in reversed(flattener.operations):
        _, read, made, _ = operation
        if needed.isdisjoint(made):
            continue
        needed.update(read)
        needed.update(made)
        operations.append(operation)
    operations.reverse()
    needed.update(inputs.values())

    kept = sorted(needed)
    new_number = {}
    types = []
    for old in kept:
        new_number[old] = len(types)
        types.append(flattener.types[old])
    constants = {}
    for old, value in flattener.constants.items():
        if old in needed:
            constants[new_number[old]] = value
    renumbered = []
    for name, read, made, parameters in operations:
        new_read = [new_number[old] for old in read]
        new_made = [new_number[old] for old in made]
        renumbered.append((name, new_read, new_made, parameters))
    return Program(
        types=types,
        inputs={path: new_number[old] for path, old in inputs.items()},
        constants=constants,
        operations=renumbered,
        outputs={path: new_number[old] for path, old in outputs.items()},
    )


# --- dtypes and shapes ----------------------------------------------------------------------------


def _dtype_name(dtype: Any) -> str:
    if _is_key(dtype):
        return "uint32"
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        raise _Unsupported(f"the dtype {name}")
    return name


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _with_axis_of_words(name: str, parameters: Parameters) -> Parameters:
    """Return the parameters for keys, whose arrays have an axis more: that of their words."""
    if name in ("squeeze", "reshape", "cond", "while"):
        return parameters
    if name == "slice":
        steps = parameters["strides"] or (1,) * len(parameters["start_indices"])
        return {"start_indices": (*parameters["start_indices"], 0), "strides": (*steps, 1)}
    raise _Unsupported("keys of jax.random")


def _shape_of(aval: Any) -> tuple[int, ...]:
    shape = tuple(int(size) for size in aval.shape)
    if _is_key(aval.dtype):
        return (*shape, 2)  # a key of threefry2x32 has two words
    return shape


def _key_data(value: Any) -> Any:
    """Return a constant as an array of NumPy; that of a key are its words."""
    if hasattr(value, "dtype") and _is_key(value.dtype):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def encoded(array: Any) -> str:
    """Return the bytes of an array, little-endian and row by row, in base64."""
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(np.ascontiguousarray(little_endian).tobytes()).decode()


def _as_data(value: Any) -> Any:
    """Return a parameter as plain data."""
    if isinstance(value, Program):
        return value.as_data()
    if isinstance(value, dict):
        return {name: _as_data(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_as_data(inner) for inner in value]
    if isinstance(value, np.generic):  # sizes of padding are integers of NumPy
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    return value


# --- refusals -------------------------------------------------------------------------------------

_OURS = Path(__file__).parents[1]
_MACHINERY = (_OURS / "shapes", _OURS / "page")
"""What traces a model, rather than being a part of one."""


def _refusal(equation: Any, error: _Unsupported, line: str | None) -> str:
    text = f"the page can't compute {equation.primitive.name}"
    if str(error):
        text += f" with {error}"
    return with_line(text, line)


def with_line(text: str, line: str | None) -> str:
    """Return a refusal that names the line of the model, if one is known."""
    if line is not None:
        text += f", which {line} uses"
    return text


def line_of(equation: Any) -> str | None:
    """Return the file and line of the innermost code that belongs to a model."""
    for file, number in lines_of(equation):
        if not _is_machinery(file):
            return f"{file}:{number}"
    return None


@functools.cache  # asked for each frame of each operation, of a few hundred files
def _is_machinery(file: str) -> bool:
    path = Path(file)
    if _OURS in path.parents:  # the layers of a model are here too, beside what traces it
        return any(folder in path.parents for folder in _MACHINERY)
    return is_of_library(file)
