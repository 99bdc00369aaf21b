"""The parts of a GPT that you write, as files beside the lessons.

Once its check has passed, `save` writes a part into a file, for example `Head`
into `my_head.py`. Later lessons take it from there with `part`, and where there
is no such file, they take the given one.
"""

import builtins
import dis
import importlib
import importlib.util
import inspect
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import given

IMPORTS = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgpt
from mine import found

SMALL = nnx.initializers.normal(0.02)
"""
PARTS = (
    "cross_entropy",
    "Embedding",
    "train_loop",
    "Head",
    "MultiHeadAttention",
    "LayerNorm",
    "FeedForward",
    "Block",
)


def file_of(name: str) -> Path:
    """The file of a part, in the folder of the lesson."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return Path(f"my_{words}.py")


def part(name: str) -> Any:
    """Your part of this name, or the given one; say which it is."""
    file = file_of(name)
    print(
        f"{name}: {f'yours, of {file}' if file.exists() else 'the given one'}"
    )
    return found(name)


def found(name: str) -> Any:
    """Your part of this name, or the given one."""
    file = file_of(name)
    if not file.exists():
        return getattr(given, name)
    importlib.invalidate_caches()
    module = importlib.import_module(file.stem)
    return getattr(importlib.reload(module), name)


def save(written: Any) -> None:
    """Write the cell that defines a part into the part's file."""
    name = written.__name__
    function = written.__call__ if isinstance(written, type) else written
    lines = linecache.getlines(inspect.unwrap(function).__code__.co_filename)
    cell, _, _ = "".join(lines).partition("# Check\n")
    used = set(names_in(compile(cell, name, "exec")))
    others = [each for each in PARTS if each in used and each != name]
    parts = "".join(f'{other} = found("{other}")\n' for other in others)
    code = f"{IMPORTS}{parts}\n\n{cell.strip()}\n"
    defined = {
        instruction.argval
        for instruction in dis.get_instructions(compile(code, name, "exec"))
        if instruction.opname == "STORE_NAME"
    }
    if missing := used - defined - vars(builtins).keys():
        raise NameError(
            f"{name} is right, but not saved: its cell reads "
            f"{', '.join(sorted(missing))} of another cell. Write both into one"
        )
    file = file_of(name)
    file.write_text(code, encoding="utf-8")
    # Python takes a compiled file of the same second and length for this one's.
    compiled = importlib.util.cache_from_source(str(file))
    Path(compiled).unlink(missing_ok=True)


def names_in(code: CodeType) -> Iterator[str]:
    """The names that compiled code reads, and doesn't define in a function."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
