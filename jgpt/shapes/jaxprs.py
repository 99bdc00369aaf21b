"""JAX's programs: the program inside a call, and the line of source of an operation."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax.extend import core

Line = tuple[str, int]
"""A file and the number of a line."""
_LIBRARIES = ("site-packages", "dist-packages")


def inner_program(parameters: Mapping[str, Any]) -> Any:
    """Return the program that a call runs as it is, such as that of jit and of remat, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = parameters.get(name)
        if isinstance(inner, core.ClosedJaxpr):
            return inner
        if isinstance(inner, core.Jaxpr):
            return core.ClosedJaxpr(inner, ())
    return None


def scan_sizes(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of a scan's constants and of what it carries."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carry, _ = parameters["ft_in"].unpack()  # since JAX 0.12
    return len(constants), len(carry)


def lines_of(equation: Any) -> Iterator[Line]:
    """Yield the lines of source whose call made an operation, from the innermost."""
    traceback = equation.source_info.traceback
    if traceback is not None:
        for frame in traceback.frames:
            yield frame.file_name, frame.line_num


@functools.cache  # asked for each frame of each operation, of a few hundred files
def is_of_library(file: str) -> bool:
    """Return whether a file is one of an installed package, or generated code."""
    return file.startswith("<") or any(part in _LIBRARIES for part in Path(file).parts)


def is_library_program(program: Any) -> bool:
    """Return whether a program is that of a library's function.

    JAX traces such a function once, and its lines are then those of the first call alone.
    """
    function = program.jaxpr.debug_info.func_src_info or ""
    _, _, place = function.rpartition(" at ")
    file, _, _ = place.rpartition(":")
    return is_of_library(file or place)
