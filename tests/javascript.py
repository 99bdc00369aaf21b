"""Programs of JAX, run by the page's interpreter in Node, or in Chromium where Node is missing."""

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.page.program import Program, encoded
from tests.browser import CHROMIUM, browser

NODE = shutil.which("node")
INTERPRETER = Path(jgpt.__file__).parent / "page" / "browser" / "interpreter.js"
PRODUCT = INTERPRETER.with_name("product.wasm")
MODEL = INTERPRETER.with_name("model.js")
UNPACKING = INTERPRETER.with_name("weights.js")
DRIVER = Path(__file__).with_name("run_programs.js")

needs_javascript = pytest.mark.skipif(
    NODE is None and CHROMIUM is None, reason="neither Node nor Chromium is installed"
)


class Call(NamedTuple):
    """A program with its arguments."""

    program: Program
    arguments: tuple[Any, ...]


def run_programs(calls: Sequence[Call], interpreter: Path = INTERPRETER) -> list[dict[str, Any]]:
    """Run all programs in one process; return their results as arrays, by name."""
    cases = _cases_of(calls)
    answers = _run("runCases", cases, interpreter)
    return [_decoded(call.program, answer) for call, answer in zip(calls, answers, strict=True)]


def _cases_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    cases = []
    for call in calls:
        leaves = jax.tree.leaves(call.arguments)
        inputs = {}
        for (path, number), leaf in zip(call.program.inputs.items(), leaves, strict=True):
            dtype, shape = call.program.types[number]
            array = np.asarray(leaf).astype(jnp.dtype(dtype))  # a Python integer has 64 bits
            inputs[path] = (dtype, shape, encoded(array))
        cases.append({"program": call.program.as_data(), "inputs": inputs})
    return cases


def run_model(
    description: dict[str, Any], weights: dict[str, Any], requests: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Ask the page's model for records; an error is `{"error": message}`."""
    arrays = {}
    for path, leaf in weights.items():
        array = np.asarray(leaf)
        arrays[path] = (array.dtype.name, array.shape, encoded(array))
    question = {"description": description, "weights": arrays, "requests": list(requests)}
    return _run("runModel", question, INTERPRETER)


def run_unpacking(packed: dict[str, Any]) -> dict[str, Any]:
    """Unpack weights; return dtype, shape and numbers of each array."""
    return _run("runUnpacking", packed, INTERPRETER)


def _run(function: str, question: Any, interpreter: Path) -> Any:
    """Call a function of the driver."""
    text = json.dumps(question, allow_nan=False)
    sources = [interpreter, MODEL, UNPACKING, DRIVER]
    if NODE is None:
        with browser() as page:
            product = base64.b64encode(PRODUCT.read_bytes()).decode()
            page.run(f'globalThis.PRODUCT = "{product}"')
            for path in sources:
                page.run(path.read_text())
            return page.run(f"{function}({text})")
    command = [NODE, DRIVER, function, PRODUCT, interpreter, MODEL, UNPACKING]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def _decoded(program: Program, answer: dict[str, str]) -> dict[str, Any]:
    results = {}
    for name, number in program.outputs.items():
        dtype, shape = program.types[number]
        if dtype in ("bfloat16", "float16"):  # the interpreter keeps them as float32
            dtype = "float32"
        results[name] = np.frombuffer(base64.b64decode(answer[name]), dtype).reshape(shape)
    return results
