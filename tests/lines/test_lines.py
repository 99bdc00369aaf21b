"""The shape beside each line is that of an independent run: with numbers, at other sizes."""

import ast
import dataclasses
import functools
import linecache
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgpt
from jgpt.presets import PRESETS
from jgpt.shapes.source import AnnotatedSource, annotated_source, folders_of, source_of_calls
from jgpt.training.programs import sizes_to_trace, train_program
from jgpt.training.state import init_state
from jgpt.training.step import make_train_steps
from tests.lines import models
from tests.quick import only

ROOT = Path(__file__).parents[2]
BATCH, TIME = 2, 13
"""Sizes of the independent run, at which nothing was traced."""
BLOCK = 512
"""More than the lengths that are traced."""

Found = dict[tuple[str, int, str], set[str]]
"""The arrays of a run, such as `float32[2,13]`, by file, line and name."""


# --- an independent run --------------------------------------------------------------------------


@functools.cache
def lines_of_returns(file: str) -> set[int]:
    found = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Return):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


@functools.cache
def first_lines(file: str) -> dict[int, int]:
    """The first line of the statement on each line of a file."""
    lines: dict[int, int] = {}
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.stmt) and not getattr(node, "body", None):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[line] = node.lineno
    return lines


def written(value: Any) -> str | None:
    if not isinstance(value, jax.Array):
        return None
    dtype = str(value.dtype)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        dtype = "key"
    return f"{dtype}{list(value.shape)}"


class Recorder:
    """Compares the local variables before and after each line that Python executes."""

    def __init__(self, folders: frozenset[str]) -> None:
        self.found: Found = defaultdict(set)
        self._folders = folders
        self._before: dict[Any, tuple[int, dict[str, Any]]] = {}
        self._return_line: dict[Any, int] = {}

    def run(self, function: Callable[..., Any], *arguments: Any) -> Found:
        sys.settrace(self._called)
        try:
            function(*arguments)
        finally:
            sys.settrace(None)
        return self.found

    def _called(self, frame: Any, event: str, argument: Any) -> Any:
        if str(Path(frame.f_code.co_filename).parent) not in self._folders:
            return None
        if frame.f_code.co_name.startswith("<"):  # a comprehension is a part of its line
            return None
        return self._executed

    def _executed(self, frame: Any, event: str, argument: Any) -> Any:
        now = dict(frame.f_locals)
        last = self._before.get(frame)
        if last is not None:
            line, before = last
            for name, value in now.items():
                if value is not before.get(name):
                    self._note(frame, line, name, value)
            if event == "return" and argument is not None:
                # Not always the last line: a `with` is executed once more after a return in it.
                self._note(frame, self._return_line.get(frame, line), "return", argument)
        self._before[frame] = (frame.f_lineno, now)
        if frame.f_lineno in lines_of_returns(frame.f_code.co_filename):
            self._return_line[frame] = frame.f_lineno
        return self._executed

    def _note(self, frame: Any, line: int, name: str, value: Any) -> None:
        text = written(value)
        if text is not None:
            file = frame.f_code.co_filename
            self.found[file, first_lines(file).get(line, line), name].add(text)


# --- what is shown -------------------------------------------------------------------------------


def number(size: Any, sizes: dict[str, int]) -> int:
    """The number of an expression such as `2*t+1`."""
    if isinstance(size, int):
        return size
    return int(eval(compile(size, "size", "eval"), {"__builtins__": {}}, sizes))


def shown(source: AnnotatedSource, sizes: dict[str, int]) -> Found:
    found: Found = defaultdict(set)
    for function in source.functions:
        for line in function.lines:
            for value in line.values:
                if len(value.shapes) != 1 or " " in value.shapes[0].dtype:
                    continue  # tuples and trees
                (shape,) = value.shapes
                numbers = [number(size, sizes) for _, size in shape.dimensions]
                key = (function.path, line.number, value.name)
                found[key].add(f"{shape.dtype}{numbers}")
    return found


def assert_same(expected: Found, found: Found) -> None:
    assert sorted(expected.keys() - found.keys()) == []
    for key, shapes in expected.items():
        assert found[key] == shapes, key


# --- the programs --------------------------------------------------------------------------------


def one_page_loss() -> tuple[Any, tuple[str, ...], tuple[Any, ...], int]:
    page = runpy.run_path(str(ROOT / "docs" / "one_page_gpt.py"))
    params = page["init_params"](jax.random.key(0), 17, BLOCK, 2, 3, 12)
    window = jnp.ones((BATCH, TIME), jnp.int32)
    return functools.partial(page["loss_of"], params), ("int32[b t]",), (window,), 20


def nanogpt() -> tuple[Any, tuple[str, ...], tuple[Any, ...], int]:
    model = models.NanoGPT(17, BLOCK, 2, 3, 12, nnx.Rngs(0))
    tokens = jnp.ones((BATCH, TIME), jnp.int32)
    return model, ("int32[b t]", "int32[b t]"), (tokens, tokens), 30


def equinox() -> tuple[Any, tuple[str, ...], tuple[Any, ...], int]:
    model = models.EquinoxMixer(7, 5, jax.random.key(0))
    return model, ("float32[b 7 5]",), (jnp.ones((BATCH, 7, 5)),), 4


def linen() -> tuple[Any, tuple[str, ...], tuple[Any, ...], int]:
    model = models.LinenCell(6)
    x = jnp.ones((BATCH, TIME, 6))
    weights = model.init(jax.random.key(0), x)
    bound = model.bind(weights)
    return bound, ("float32[b t 6]",), (x,), 5


def gpt(preset: str) -> tuple[Any, tuple[str, ...], tuple[Any, ...], int]:
    config = PRESETS[preset][1].model
    config = dataclasses.replace(config, vocab_size=17, block_size=BLOCK, num_layers=2)
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    return model, ("int32[b t]",), (jnp.ones((BATCH, TIME), jnp.int32),), 60


PROGRAMS = {
    "GPT on one page": one_page_loss,
    "nanoGPT in NNX": nanogpt,
    "Equinox": equinox,
    "Linen": linen,
    "lecture": functools.partial(gpt, "lecture"),
    "modern": functools.partial(gpt, "modern"),
}


QUICK = ("nanoGPT in NNX",)


@pytest.mark.parametrize("name", only(QUICK, PROGRAMS))
def test_each_line_has_the_shape_of_an_independent_run(name):
    function, texts, arrays, least = PROGRAMS[name]()
    source = annotated_source(function, *texts)
    assert (source.error, source.note) == (None, None)
    found = shown(source, {"b": BATCH, "t": TIME})

    with jax.disable_jit():
        expected = Recorder(folders_of(function)).run(function, *arrays)

    assert_same(expected, found)
    assert len(expected) >= least


@pytest.mark.slow
def test_each_line_of_a_train_step_has_the_shape_of_an_independent_run():
    """The lines of its optimizer too, whose arrays are leaves of the state."""
    config = PRESETS["tiny"][1]
    model = dataclasses.replace(config.model, vocab_size=17)
    config = dataclasses.replace(config, model=model, micro_batches=1)
    symbols = sizes_to_trace(config.model.block_size)
    calls = [train_program(config, *point) for point in zip(*symbols.values(), strict=True)]
    folders = folders_of(make_train_steps(config))
    source = source_of_calls(calls, symbols, folders)
    assert (source.error, source.note) == (None, None)
    found = shown(source, {"b": BATCH, "t": TIME})
    windows = jnp.ones((1, BATCH, TIME + 1), jnp.int32)
    numbers = jnp.int32(1), jnp.int32(0)
    arguments = (init_state(config), windows, jax.random.key(0), *numbers)

    with jax.disable_jit():
        expected = Recorder(folders).run(make_train_steps(config), *arguments)

    in_the_step = {}
    for key, shapes in expected.items():
        if key[0].endswith("step.py"):
            in_the_step[key] = shapes
    assert_same(in_the_step, found)
    assert len(in_the_step) >= 14


@pytest.mark.parametrize("name", ["Equinox", "Linen"])
def test_methods_that_a_library_adds_are_not_shown(name):
    """A dataclass has generated ones, on Python 3.13 also one of the standard library's."""
    module, *_ = PROGRAMS[name]()

    assert folders_of(module) == {str(Path(models.__file__).parent)}


@pytest.mark.parametrize("name", ["Equinox", "Linen"])
def test_methods_of_a_dataclass_are_not_those_of_a_command_line(monkeypatch, name):
    """Both have the file `<string>`, of which Python 3.13 keeps the text after `python -c`."""
    module, *_ = PROGRAMS[name]()
    text = "import this_is_not_the_module\n"
    monkeypatch.setitem(linecache.cache, "<string>", (len(text), None, [text], "<string>"))

    assert folders_of(module) == {str(Path(models.__file__).parent)}


def test_a_wrong_symbol_is_noticed():
    function, texts, arrays, _ = PROGRAMS["Linen"]()
    source = annotated_source(function, *texts)

    with jax.disable_jit():
        expected = Recorder(folders_of(function)).run(function, *arrays)

    with pytest.raises(AssertionError):
        assert_same(expected, shown(source, {"b": BATCH, "t": TIME + 2}))
    found = shown(source, {"b": BATCH, "t": TIME})
    found.popitem()
    with pytest.raises(AssertionError):
        assert_same(expected, found)
