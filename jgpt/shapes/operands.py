"""One sentence on an operation whose operands don't fit: which arrays, and which sizes.

It is made of the arguments of JAX's functions that were running when the error was raised. The
names of JAX's own variables may change; then there is no sentence, and JAX's message is enough.
"""

import ast
import contextlib
import linecache
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jgpt.shapes.describe import is_shaped

_LONGEST_NAME = 40
"""The limit of an expression that is quoted as the name of an operand."""
_LIBRARIES = ("jax", "opt_einsum")
"""Packages whose frames are parts of one operation."""


@dataclass(frozen=True)
class Operand:
    """An array that an operation got."""

    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} is {_in_brackets(self.shape)}"


def explain(traceback: types.TracebackType | None) -> str | None:
    """Return a sentence on the operation of JAX that raised an error, or None.

    The traceback must have JAX's own frames.
    """
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    # The last run of JAX's frames is the operation; the frame before it has called JAX.
    start = len(entries)
    while start > 0 and _is_library(entries[start - 1].tb_frame):
        start -= 1
    if start in (0, len(entries)):
        return None
    names = _Names(entries[start - 1])
    for entry in entries[start:]:
        # A version of JAX whose variables have other names raises any of several errors here.
        with contextlib.suppress(Exception):
            sentence = _sentence(entry.tb_frame, names)
            if sentence is not None:
                return sentence
    return None


def _is_library(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _LIBRARIES


def _sentence(frame: types.FrameType, names: "_Names") -> str | None:
    """Return the sentence for a function of JAX that got operands that don't fit."""
    found = dict(frame.f_locals)
    function = frame.f_code.co_name
    match function:
        case "matmul":
            return _matmul(names.of(found["a"], found["b"]))
        case "dot" | "dot_general":
            if "lhs" not in found:  # that of jax.numpy, which is `matmul` for this
                return _matmul(names.of(found["a"], found["b"]))
            operands = names.of(found["lhs"], found["rhs"])
            return _dot_general(operands, found["dimension_numbers"])
        case "einsum":
            arrays = [operand for operand in found["operands"] if is_shaped(operand)]
            return _einsum(found["subscripts"], names.of(*arrays))
        case "where":
            return _broadcast(names.of(found["condition"], found["x"], found["y"]))
        case "promote_args" | "promote_shapes" | "_broadcast_arrays":
            return _broadcast(names.of(*found["args"]))
        case "broadcasting_shape_rule":
            return _equal_ranks(names.of(*found["avals"]))
        case "concatenate":
            arrays = _either(found, "arrays", "operands")
            axis = _either(found, "axis", "dimension")
            return _concatenate(names.of(*arrays), axis)
        case "stack":
            return _stack(names.of(*_either(found, "arrays", "operands")))
        case "_compute_newshape":
            return _reshape(names.one(found["arr"]), found["newshape"])
        case "broadcast_to":
            array = _either(found, "array", "arr")
            return _broadcast_to(names.one(array), found["shape"])
        case "_split":
            sections = found["indices_or_sections"]
            return _split(names.one(found["ary"]), sections, found["axis"])
        case "take_along_axis":
            return _take_along_axis(names.of(found["arr"], found["indices"]), found["axis"])
        case "rewriting_take":
            return _index(found["arr"], found["idx"], names)
        case "swapaxes":
            return _axes(names.one(found["a"]), (found["axis1"], found["axis2"]))
        case "canonicalize_axis":
            return _axes(names.of_rank(found["num_dims"]), (found["axis"],))
        case "_mapped_axis_size":
            return _vmap(found["vals"], found["dims"], names)
        case "_check_carry_type":
            return _carry(found["body_fun"], found["in_carry"], found["out_carry"])
        case "_check_branch_outputs":
            return _branches(found["out_avals1"], found["out_avals2"])
    return None


def _either(found: Mapping[str, Any], name: str, other: str) -> Any:
    """Return a variable that has one name in `jax.numpy` and another in `jax.lax`."""
    if name in found:
        return found[name]
    return found[other]


# --- operations ----------------------------------------------------------------------------------


def _matmul(operands: list[Operand]) -> str | None:
    left, right = operands
    if not left.shape or not right.shape:
        return None
    rows = right.shape[-1]
    if len(right.shape) > 1:
        rows = right.shape[-2]
    if left.shape[-1] != rows:
        return _no_match(operands, left.shape[-1], rows)
    # The dimensions before the matrices are broadcast.
    return _broadcast(operands, skip=2)


def _dot_general(operands: list[Operand], dimension_numbers: Any) -> str | None:
    left, right = operands
    for left_axes, right_axes in dimension_numbers:
        for left_axis, right_axis in zip(left_axes, right_axes, strict=True):
            left_size = left.shape[left_axis]
            right_size = right.shape[right_axis]
            if left_size != right_size:
                return _no_match(operands, left_size, right_size)
    return None


def _einsum(subscripts: Any, operands: list[Operand]) -> str | None:
    inputs = subscripts.replace(" ", "").partition("->")[0].split(",")
    if len(inputs) != len(operands):
        return None
    owners: dict[str, tuple[Operand, int]] = {}
    for labels, operand in zip(inputs, operands, strict=True):
        first, dots, last = labels.partition("...")
        rank = len(operand.shape)
        named = len(first) + len(last)
        if rank < named or (rank > named and not dots):
            return f"{operand}: {labels!r} in {subscripts!r} has {named} dimensions, and not {rank}"
        sizes = [*zip(first, operand.shape, strict=False)]
        sizes += zip(last, operand.shape[rank - len(last) :], strict=True)
        for label, size in sizes:
            other, other_size = owners.setdefault(label, (operand, size))
            if size != other_size and 1 not in (size, other_size):
                both = _listed([other, operand])
                return f"{both}: {label} in {subscripts!r} is {other_size} and {size}"
    return None


def _broadcast(operands: list[Operand], skip: int = 0) -> str | None:
    """Return the first sizes from the right that differ; the last `skip` dimensions are others."""
    longest = max(len(operand.shape) for operand in operands)
    for position in range(1 + skip, longest + 1):
        sizes = []
        for operand in operands:
            if len(operand.shape) >= position and operand.shape[-position] != 1:
                sizes.append(operand.shape[-position])
        for size in sizes:
            if size != sizes[0]:
                return _no_match(operands, sizes[0], size)
    return None


def _equal_ranks(operands: list[Operand]) -> str | None:
    ranks = [len(operand.shape) for operand in operands]
    if min(ranks) == max(ranks):
        return _broadcast(operands)
    return f"{_listed(operands)}: jax.lax needs arrays with the same number of dimensions"


def _concatenate(operands: list[Operand], axis: int) -> str | None:
    first = operands[0]
    rank = len(first.shape)
    for other in operands[1:]:
        if len(other.shape) != rank:
            both = _listed([first, other])
            return f"{both}: arrays that are joined need the same number of dimensions"
        for position in range(rank):
            if position != axis % rank and first.shape[position] != other.shape[position]:
                both = _listed([first, other])
                sizes = f"{first.shape[position]} and {other.shape[position]}"
                return f"{both}: they are joined along axis {axis}, and {sizes} don't match"
    return None


def _stack(operands: list[Operand]) -> str | None:
    first = operands[0]
    for other in operands[1:]:
        if first.shape != other.shape:
            return f"{_listed([first, other])}: arrays that are stacked need the same shape"
    return None


def _reshape(operand: Operand, new_shape: Any) -> str | None:
    if len(new_shape) == 1 and not isinstance(new_shape[0], int):
        (new_shape,) = new_shape
    sizes = list(operand.shape)
    others = []
    for size in new_shape:
        # Equal sizes on both sides are not the cause.
        if size in sizes:
            sizes.remove(size)
        elif size != -1:
            others.append(size)
    problem = f"{_product(sizes)} and {_product(others)} don't match"
    if -1 in new_shape:
        problem = f"{_product(sizes)} is not a multiple of {_product(others)}"
    return f"{operand}: it can't be reshaped to {_in_brackets(new_shape)}, since {problem}"


def _product(sizes: Sequence[int]) -> str:
    if not sizes:
        return "1"
    return "*".join(map(str, sizes))


def _broadcast_to(operand: Operand, shape: Any) -> str | None:
    place = _in_brackets(shape)
    if len(operand.shape) > len(shape):
        return f"{operand}: it has more dimensions than {place}, to which it is broadcast"
    for size, wanted in zip(reversed(operand.shape), reversed(shape), strict=False):
        if size not in (1, wanted):
            problem = f"{size} and {wanted} don't match"
            return f"{operand}: it can't be broadcast to {place}, since {problem}"
    return None


def _split(operand: Operand, sections: Any, axis: int) -> str | None:
    size = operand.shape[axis]
    if not isinstance(sections, int) or size % sections == 0:
        return None
    return f"{operand}: {size} can't be split into {sections} equal parts"


def _take_along_axis(operands: list[Operand], axis: int | None) -> str | None:
    array, indices = operands
    if axis is None or len(array.shape) != len(indices.shape):
        return None
    for position, (size, other) in enumerate(zip(array.shape, indices.shape, strict=True)):
        if position != axis % len(array.shape) and size != other and 1 not in (size, other):
            return _no_match(operands, size, other)
    return None


def _index(array: Any, index: Any, names: "_Names") -> str | None:
    if not isinstance(index, tuple):
        index = (index,)
    indexed = 0
    for part in index:
        if is_shaped(part) and part.dtype.kind == "f":
            operand = names.one(part)
            return f"{operand} of {part.dtype}: an index is an integer or a bool"
        if part is None or part is Ellipsis:
            continue
        indexed += 1
        if is_shaped(part) and part.dtype.kind == "b":  # a mask has several dimensions
            indexed += len(part.shape) - 1
    rank = len(array.shape)
    if indexed <= rank:
        return None
    operand = names.one(array)
    return f"{operand}: it has {_dimensions(rank)}, and {indexed} are indexed"


def _axes(operand: Operand, axes: Sequence[int]) -> str | None:
    rank = len(operand.shape)
    for axis in axes:
        if not -rank <= axis < rank:
            return f"{operand}: it has {_dimensions(rank)} and no axis {axis}"
    return None


def _dimensions(rank: int) -> str:
    if rank == 1:
        return "1 dimension"
    return f"{rank} dimensions"


def _vmap(arrays: Sequence[Any], axes: Sequence[int | None], names: "_Names") -> str | None:
    operands = names.of(*arrays)
    mapped = []
    for operand, axis in zip(operands, axes, strict=True):
        if axis is not None:
            mapped.append((operand, axis))
    first, first_axis = mapped[0]
    for other, axis in mapped[1:]:
        sizes = first.shape[first_axis], other.shape[axis]
        if sizes[0] != sizes[1]:
            both = _listed([first, other])
            return f"{both}: vmap goes over {sizes[0]} and {sizes[1]} examples"
    return None


def _carry(body: Any, before: Any, after: Any) -> str | None:
    code = getattr(body, "__code__", None)
    name = "it"
    if code is not None and code.co_argcount > 0:
        name = code.co_varnames[0]
    for start, end in zip(before.vals, after.vals, strict=True):
        if (start.shape, start.dtype) != (end.shape, end.dtype):
            texts = f"{_typed_shape(start)} before a step and {_typed_shape(end)} after it"
            return f"the carry {name} is {texts}"
    return None


def _branches(first: Any, second: Any) -> str | None:
    for one, other in zip(first.vals, second.vals, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"one branch returns {_typed_shape(one)}, the other {_typed_shape(other)}"
    return None


# --- texts ---------------------------------------------------------------------------------------


def _in_brackets(shape: Sequence[Any]) -> str:
    return f"[{' '.join(map(str, shape))}]"


def _typed_shape(array: Any) -> str:
    return f"{array.dtype.name}{_in_brackets(array.shape)}"


def _listed(operands: Sequence[Operand]) -> str:
    return ", ".join(map(str, operands))


def _no_match(operands: Sequence[Operand], size: int, other: int) -> str:
    return f"{_listed(operands)}: {size} and {other} don't match"


# --- names ---------------------------------------------------------------------------------------


class _Names:
    """The names of operands, from the expression that was evaluated in a frame."""

    def __init__(self, entry: types.TracebackType) -> None:
        self._variables: Mapping[str, Any] = entry.tb_frame.f_globals | entry.tb_frame.f_locals
        self._candidates: list[tuple[str, Any]] = []
        """The text of each expression that may be an array, and its value where it is known."""
        for node in _operand_nodes(_expression(entry)):
            value = self._value(node)
            text = ast.unparse(node)
            if value is not None and not is_shaped(value):
                continue
            if not isinstance(node, ast.Name | ast.Attribute):
                text = f"`{text}`"
            self._candidates.append((text, value))

    def of(self, *arrays: Any) -> list[Operand]:
        """Return operands with their names."""
        operands = []
        for position, array in enumerate(arrays):
            shape = tuple(getattr(array, "shape", ()))
            name = self._name(array, shape, position, len(arrays))
            operands.append(Operand(name, shape))
        return operands

    def one(self, array: Any) -> Operand:
        """Return an only operand with its name."""
        (operand,) = self.of(array)
        return operand

    def of_rank(self, rank: int) -> Operand:
        """Return the first operand with as many dimensions."""
        for text, value in self._candidates:
            if value is not None and len(value.shape) == rank:
                return Operand(text, tuple(value.shape))
        raise ValueError("no operand has as many dimensions")

    def _name(self, array: Any, shape: tuple[int, ...], position: int, count: int) -> str:
        named = self._candidates
        for text, value in named:
            if value is array:
                return _short(text, position, count)
        # The operands may be copies, as inside `jit`, so their places and shapes tell.
        if len(named) == count:
            text, value = named[position]
            if value is None or tuple(value.shape) == shape:
                return _short(text, position, count)
        for text, value in named:
            if value is not None and tuple(value.shape) == shape:
                return _short(text, position, count)
        return _ordinal(position, count)

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a name or an attribute, without running any code."""
        if isinstance(node, ast.Name):
            return self._variables.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return getattr(owner, "__dict__", {}).get(node.attr)
        if isinstance(node, ast.Constant):
            return node.value
        return None


def _short(text: str, position: int, count: int) -> str:
    if len(text) > _LONGEST_NAME:
        return _ordinal(position, count)
    return text


def _ordinal(position: int, count: int) -> str:
    if count == 1:
        return "the array"
    return f"operand {position + 1}"


def _expression(entry: types.TracebackType) -> ast.expr | ast.stmt | None:
    """Return the expression that a frame was evaluating."""
    code = entry.tb_frame.f_code
    positions = list(code.co_positions())
    first, last, start, end = positions[entry.tb_lasti // 2]
    if first is None or last is None or start is None or end is None:
        return None
    lines = []
    for number in range(first, last + 1):
        lines.append(linecache.getline(code.co_filename, number).encode())
    # The columns are of bytes. The end comes first, since both may be in one line.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    text = b"".join(lines).decode()
    with contextlib.suppress(SyntaxError):
        # In brackets, an expression may have several lines.
        return ast.parse(f"({text}\n)", mode="eval").body
    with contextlib.suppress(SyntaxError):
        return ast.parse(text).body[0]  # `x += y`
    return None


def _operand_nodes(node: ast.expr | ast.stmt | None) -> list[ast.expr]:
    """Return the expressions whose values an operation gets, in their order."""
    match node:
        case ast.BinOp():
            return [node.left, node.right]
        case ast.AugAssign():
            return [node.target, node.value]
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Subscript():
            return [node.value, *_items(node.slice)]
        case ast.Call():
            nodes = []
            if isinstance(node.func, ast.Attribute):
                nodes.append(node.func.value)
            for argument in node.args:
                nodes += _items(argument)
            for keyword in node.keywords:
                nodes += _items(keyword.value)
            return nodes
    return []


def _items(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    return [node]
