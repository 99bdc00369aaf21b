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

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

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
    # The last run of JAX's frames is the operation. An earlier run is a transformation, such as
    # `vmap`, that has called a function of the program.
    start = len(entries)
    while start > 0 and _is_library(entries[start - 1].tb_frame):
        start -= 1
    has_no_caller = start == 0
    is_not_of_jax = start == len(entries)
    if has_no_caller or is_not_of_jax:
        return None
    caller = entries[start - 1]
    names = _Names(caller)
    # The outer functions come first: their arguments are those that the caller wrote.
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
        # Products.
        case "matmul":
            operands = names.operands(found["a"], found["b"])
            return _matmul(operands)
        case "dot" | "dot_general" if "lhs" in found:  # of jax.lax
            operands = names.operands(found["lhs"], found["rhs"])
            return _dot_general(operands, found["dimension_numbers"])
        case "dot":  # of jax.numpy; both functions sum over the same dimensions
            operands = names.operands(found["a"], found["b"])
            return _matmul(operands)
        case "einsum":
            # JAX puts the subscripts in front of the operands.
            arrays = [operand for operand in found["operands"] if is_shaped(operand)]
            operands = names.operands(*arrays)
            return _einsum(found["subscripts"], operands)

        # Operations element by element.
        case "where":
            operands = names.operands(found["condition"], found["x"], found["y"])
            return _broadcast(operands)
        case "promote_args" | "promote_shapes" | "_broadcast_arrays":  # of jax.numpy
            operands = names.operands(*found["args"])
            return _broadcast(operands)
        case "broadcasting_shape_rule":  # of jax.lax
            operands = names.operands(*found["avals"])
            return _equal_ranks(operands)

        # Other shapes.
        case "concatenate":
            arrays = _either(found, "arrays", "operands")
            axis = _either(found, "axis", "dimension")
            operands = names.operands(*arrays)
            return _concatenate(operands, axis)
        case "stack":
            arrays = _either(found, "arrays", "operands")
            operands = names.operands(*arrays)
            return _stack(operands)
        case "_compute_newshape":  # of `reshape`
            operand = names.operand(found["arr"])
            return _reshape(operand, found["newshape"])
        case "broadcast_to":
            array = _either(found, "array", "arr")
            operand = names.operand(array)
            return _broadcast_to(operand, found["shape"])
        case "_split":
            operand = names.operand(found["ary"])
            return _split(operand, found["indices_or_sections"], found["axis"])

        # Indices and axes.
        case "take_along_axis":
            operands = names.operands(found["arr"], found["indices"])
            return _take_along_axis(operands, found["axis"])
        case "rewriting_take":  # of `array[index]`
            return _index(found["arr"], found["idx"], names)
        case "swapaxes":
            operand = names.operand(found["a"])
            axes = (found["axis1"], found["axis2"])
            return _axes(operand, axes)
        case "canonicalize_axis":  # of functions with an axis; it gets no array
            operand = names.operand_of_rank(found["num_dims"])
            axes = (found["axis"],)
            return _axes(operand, axes)

        # Transformations.
        case "_mapped_axis_size":
            operands = names.operands(*found["vals"])
            return _vmap(operands, found["dims"])
        case "_check_carry_type":  # of `scan` and loops
            return _carry(found["body_fun"], found["in_carry"], found["out_carry"])
        case "_check_branch_outputs":  # of `cond` and `switch`
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
    columns = left.shape[-1]
    rows = right.shape[-1]  # of a vector
    if right.rank > 1:
        rows = right.shape[-2]
    if columns != rows:
        return _no_match(operands, columns, rows)
    # The dimensions before the matrices are broadcast.
    return _broadcast(operands, skip=2)


def _dot_general(operands: list[Operand], dimension_numbers: Any) -> str | None:
    left, right = operands
    # Two pairs: the axes that are summed over, and those of the batch.
    for left_axes, right_axes in dimension_numbers:
        for left_axis, right_axis in zip(left_axes, right_axes, strict=True):
            left_size = left.shape[left_axis]
            right_size = right.shape[right_axis]
            if left_size != right_size:
                return _no_match(operands, left_size, right_size)
    return None


def _einsum(subscripts: Any, operands: list[Operand]) -> str | None:
    inputs, _, _ = subscripts.replace(" ", "").partition("->")
    labels_of_operands = inputs.split(",")
    if len(labels_of_operands) != len(operands):
        return None
    owners: dict[str, tuple[Operand, int]] = {}  # of each label, the first operand, with its size
    for labels, operand in zip(labels_of_operands, operands, strict=True):
        sizes = _sizes_of_labels(labels, operand)
        if sizes is None:
            count = len(labels.replace("...", ""))
            wanted = f"{labels!r} in {subscripts!r} has {count} dimensions"
            return f"{operand}: {wanted}, and not {operand.rank}"
        for label, size in sizes:
            owner, owner_size = owners.setdefault(label, (operand, size))
            # A size of 1 is broadcast, as in NumPy.
            if size != owner_size and 1 not in (size, owner_size):
                both = _listed([owner, operand])
                return f"{both}: {label} in {subscripts!r} is {owner_size} and {size}"
    return None


def _sizes_of_labels(labels: str, operand: Operand) -> list[tuple[str, int]] | None:
    """Return each label with its size, or None if the operand has another number of dimensions."""
    before, ellipsis, after = labels.partition("...")
    # Those of the ellipsis: two of four dimensions in `i...k`.
    without_label = operand.rank - len(before) - len(after)
    if without_label < 0:
        return None
    if without_label > 0 and not ellipsis:
        return None
    sizes_before = operand.shape[: len(before)]
    sizes_after = operand.shape[len(before) + without_label :]
    sizes = sizes_before + sizes_after
    return list(zip(before + after, sizes, strict=True))


def _broadcast(operands: list[Operand], skip: int = 0) -> str | None:
    """Return a sentence on the first sizes, from the right, that don't fit.

    The last `skip` dimensions are not compared: those of matrices.
    """
    most_dimensions = max(operand.rank for operand in operands)
    for position in range(skip + 1, most_dimensions + 1):
        sizes = []
        for operand in operands:
            if position > operand.rank:  # missing dimensions are broadcast
                continue
            size = operand.shape[-position]
            if size != 1:  # so are sizes of 1
                sizes.append(size)
        for size in sizes:
            if size != sizes[0]:
                return _no_match(operands, sizes[0], size)
    return None


def _equal_ranks(operands: list[Operand]) -> str | None:
    ranks = {operand.rank for operand in operands}
    if len(ranks) == 1:
        return _broadcast(operands)
    return f"{_listed(operands)}: jax.lax needs arrays with the same number of dimensions"


def _concatenate(operands: list[Operand], axis: int) -> str | None:
    first = operands[0]
    for other in operands[1:]:
        both = _listed([first, other])
        if other.rank != first.rank:
            return f"{both}: arrays that are joined need the same number of dimensions"
        for position in range(first.rank):
            if position == axis % first.rank:  # a negative axis counts from the end
                continue
            size = first.shape[position]
            other_size = other.shape[position]
            if size != other_size:
                problem = f"{size} and {other_size} don't match"
                return f"{both}: they are joined along axis {axis}, and {problem}"
    return None


def _stack(operands: list[Operand]) -> str | None:
    first = operands[0]
    for other in operands[1:]:
        if first.shape != other.shape:
            both = _listed([first, other])
            return f"{both}: arrays that are stacked need the same shape"
    return None


def _reshape(operand: Operand, new_shape: Any) -> str | None:
    # `x.reshape((2, 3))` comes as a tuple in a tuple, and `x.reshape(2, 3)` doesn't.
    if len(new_shape) == 1 and not isinstance(new_shape[0], int):
        (new_shape,) = new_shape
    # Sizes on both sides are not the cause: of [5 6] to [5 7], it is that 6 is not 7.
    old_sizes = list(operand.shape)
    new_sizes = []
    for size in new_shape:
        if size in old_sizes:
            old_sizes.remove(size)
        elif size != -1:
            new_sizes.append(size)
    before = _product(old_sizes)
    after = _product(new_sizes)
    problem = f"{before} and {after} don't match"
    if -1 in new_shape:
        problem = f"{before} is not a multiple of {after}"
    return f"{operand}: it can't be reshaped to {_in_brackets(new_shape)}, since {problem}"


def _product(sizes: Sequence[int]) -> str:
    if not sizes:
        return "1"
    return "*".join(map(str, sizes))


def _broadcast_to(operand: Operand, shape: Any) -> str | None:
    place = _in_brackets(shape)
    if operand.rank > len(shape):
        return f"{operand}: it has more dimensions than {place}, to which it is broadcast"
    # Dimensions are compared from the right; those that the operand lacks may have any size.
    sizes_from_right = reversed(operand.shape)
    wanted_from_right = reversed(shape)
    for size, wanted in zip(sizes_from_right, wanted_from_right, strict=False):
        if size not in (1, wanted):
            problem = f"{size} and {wanted} don't match"
            return f"{operand}: it can't be broadcast to {place}, since {problem}"
    return None


def _split(operand: Operand, sections: Any, axis: int) -> str | None:
    size = operand.shape[axis]
    # At a list of indices, parts may have any size.
    if not isinstance(sections, int) or size % sections == 0:
        return None
    return f"{operand}: {size} can't be split into {sections} equal parts"


def _take_along_axis(operands: list[Operand], axis: int | None) -> str | None:
    array, indices = operands
    if axis is None or indices.rank != array.rank:
        return None
    for position in range(array.rank):
        if position == axis % array.rank:  # along it, there may be any number of indices
            continue
        size = array.shape[position]
        num_indices = indices.shape[position]
        # A size of 1 is broadcast, as in NumPy.
        if size != num_indices and 1 not in (size, num_indices):
            return _no_match(operands, size, num_indices)
    return None


def _index(array: Any, index: Any, names: "_Names") -> str | None:
    parts = index
    if not isinstance(index, tuple):
        parts = (index,)
    indexed = 0
    for part in parts:
        kind = ""  # of a slice, or of an integer of Python
        if is_shaped(part):
            kind = part.dtype.kind
        if kind == "f":
            operand = names.operand(part)
            return f"{operand} of {part.dtype}: an index is an integer or a bool"
        if kind == "b":  # a mask has several dimensions
            indexed += len(part.shape)
        elif part is not None and part is not Ellipsis:
            indexed += 1
    operand = names.operand(array)
    if indexed <= operand.rank:
        return None
    return f"{operand}: it has {_dimensions(operand.rank)}, and {indexed} are indexed"


def _axes(operand: Operand, axes: Sequence[int]) -> str | None:
    rank = operand.rank
    for axis in axes:
        if not -rank <= axis < rank:
            return f"{operand}: it has {_dimensions(rank)} and no axis {axis}"
    return None


def _dimensions(rank: int) -> str:
    if rank == 1:
        return "1 dimension"
    return f"{rank} dimensions"


def _vmap(operands: list[Operand], axes: Sequence[int | None]) -> str | None:
    examples = []  # each operand that is mapped, and its number of examples
    for operand, axis in zip(operands, axes, strict=True):
        if axis is not None:
            examples.append((operand, operand.shape[axis]))
    first, count = examples[0]
    for other, other_count in examples[1:]:
        if count != other_count:
            both = _listed([first, other])
            return f"{both}: vmap goes over {count} and {other_count} examples"
    return None


def _carry(body: Any, before: Any, after: Any) -> str | None:
    name = "it"
    code = getattr(body, "__code__", None)  # a partial or an object has none
    if code is not None and code.co_argcount > 0:
        name = code.co_varnames[0]
    for start, end in zip(before.vals, after.vals, strict=True):
        start_text = _typed_shape(start)
        end_text = _typed_shape(end)
        if start_text != end_text:
            return f"the carry {name} is {start_text} before a step and {end_text} after it"
    return None


def _branches(first: Any, second: Any) -> str | None:
    for result, other_result in zip(first.vals, second.vals, strict=True):
        text = _typed_shape(result)
        other_text = _typed_shape(other_result)
        if text != other_text:
            return f"one branch returns {text}, the other {other_text}"
    return None


# --- texts ---------------------------------------------------------------------------------------


def _in_brackets(shape: Sequence[Any]) -> str:
    sizes = " ".join(map(str, shape))
    return f"[{sizes}]"


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
        frame = entry.tb_frame
        self._variables: Mapping[str, Any] = frame.f_globals | frame.f_locals
        self._candidates: list[tuple[str, Any]] = []
        """The text of each expression that may be an array, and its value where it is known."""
        expression = _expression(entry)
        for node in _operand_nodes(expression):
            value = self._value(node)
            is_no_array = value is not None and not is_shaped(value)
            if is_no_array:
                continue
            text = ast.unparse(node)
            if not isinstance(node, ast.Name | ast.Attribute):
                text = f"`{text}`"
            self._candidates.append((text, value))

    def operands(self, *arrays: Any) -> list[Operand]:
        """Return operands with their names."""
        operands = []
        for position, array in enumerate(arrays):
            shape = tuple(getattr(array, "shape", ()))  # a Python number has none
            text = self._text_of(array, shape, position, len(arrays))
            if text is None or len(text) > _LONGEST_NAME:
                text = _ordinal(position, len(arrays))
            operands.append(Operand(text, shape))
        return operands

    def operand(self, array: Any) -> Operand:
        """Return an only operand with its name."""
        (operand,) = self.operands(array)
        return operand

    def operand_of_rank(self, rank: int) -> Operand:
        """Return the first operand with as many dimensions."""
        for text, value in self._candidates:
            if value is not None and len(value.shape) == rank:
                return Operand(text, tuple(value.shape))
        raise ValueError("no operand has as many dimensions")

    def _text_of(self, array: Any, shape: tuple[int, ...], position: int, count: int) -> str | None:
        """Return the expression of one of `count` operands, or None if none is like it."""
        for text, value in self._candidates:
            if value is array:
                return text
        # The operands may be copies, as inside `jit`, so their places and shapes tell.
        if len(self._candidates) == count:
            text, value = self._candidates[position]
            if value is None or tuple(value.shape) == shape:
                return text
        for text, value in self._candidates:
            if value is not None and tuple(value.shape) == shape:
                return text
        return None

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a name or an attribute, without running any code."""
        if isinstance(node, ast.Name):
            return self._variables.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            attributes = getattr(owner, "__dict__", {})  # getattr would run a property
            return attributes.get(node.attr)
        if isinstance(node, ast.Constant):
            return node.value
        return None


def _ordinal(position: int, count: int) -> str:
    if count == 1:
        return "the array"
    return f"operand {position + 1}"


def _expression(entry: types.TracebackType) -> ast.expr | ast.stmt | None:
    """Return the expression that a frame was evaluating."""
    code = entry.tb_frame.f_code
    positions = list(code.co_positions())
    instruction = entry.tb_lasti // 2  # the offset is of bytes, and each instruction has two
    first, last, start, end = positions[instruction]
    if first is None or last is None or start is None or end is None:
        return None
    lines = []
    for number in range(first, last + 1):
        line = linecache.getline(code.co_filename, number)
        lines.append(line.encode())  # columns count bytes of UTF-8
    # The end is cut off first, since both may be in one line.
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
            if isinstance(node.func, ast.Attribute):  # `x` of `x.reshape(2, 3)`
                nodes.append(node.func.value)
            for argument in node.args:
                nodes += _items(argument)
            for keyword in node.keywords:
                nodes += _items(keyword.value)
            return nodes
    return []


def _items(node: ast.expr) -> list[ast.expr]:
    """Return the items of a list or tuple that is written out, such as that of `concatenate`."""
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    return [node]
