"""The files of "Read the model": each line with the shapes of the arrays that it sets or returns.

`conf.py` calls this while the site is built.
"""

import ast
import dataclasses
import functools
import html
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

import jgpt
from jgpt.presets import PRESETS
from jgpt.shapes.source import FunctionSource, SourceLine, source_of_calls
from jgpt.training.programs import forward_program, sizes_to_trace, train_program
from jgpt.training.state import abstract_state
from jgpt.training.step import make_eval_step

ROOT = Path(__file__).resolve().parents[1]
ONE_PAGE = ROOT / "docs" / "one_page_gpt.py"
SYMBOLS = sizes_to_trace(32)
"""The sizes of the batch and of the length: what differs between them is named by the symbols."""

LESSONS = {
    "causal_mask": "02_averaging_the_past",
    "document_mask": "02_averaging_the_past",
    "positions_in_documents": "05_the_block",
    "attention_weights": "03_one_head",
    "attend": "03_one_head",
    "apply_rotary": "11_the_modern_block",
    "split_heads": "04_many_heads_step_by_step",
    "merge_heads": "04_many_heads_step_by_step",
    "_Attention": "03_one_head",
    "Head": "03_one_head",
    "MultiHeadAttention": "04_many_heads_step_by_step",
    "activation": "05_the_block",
    "FeedForward": "05_the_block",
    "Block": "05_the_block",
    "GPT": "05_the_block",
    "Metrics": "07_a_pure_train_step",
    "StepSetup": "07_a_pure_train_step",
    "gradients_of": "07_a_pure_train_step",
    "make_train_steps": "07_a_pure_train_step",
    "placed_arrays": "07_a_pure_train_step",
    "make_eval_step": "07_a_pure_train_step",
    # of the GPT on one page
    "init_params": "05_the_block",
    "layer_norm": "05_the_block",
    "attention": "04_many_heads_step_by_step",
    "mlp": "05_the_block",
    "gpt": "05_the_block",
    "loss_of": "01_text_to_tokens_to_bigram",
    "init_adam": "07_a_pure_train_step",
    "adam": "07_a_pure_train_step",
    "train_step": "07_a_pure_train_step",
    "write": "10_sampling_and_the_cache",
    "sample": "10_sampling_and_the_cache",
    "main": "07_a_pure_train_step",
}
"""The lesson that builds each class and function of the files."""


# --- traces --------------------------------------------------------------------------------------

Calls = list[tuple[Callable[..., Any], tuple[Any, ...]]]


@functools.cache
def called_functions() -> dict[str, dict[int, FunctionSource]]:
    """Return the functions that were called, by their file and their first line.

    A function has the shapes of the first call here that reaches it: the forward pass of
    `nanogpt-cpu`, one of `modern`, a train step, or what none of them calls.
    """
    calls: list[Calls] = [
        [forward_program(_config("nanogpt-cpu"), *sizes) for sizes in _points()],
        [(_other_methods, (_tokens(*sizes),)) for sizes in _points()],
        [forward_program(_config("modern"), *sizes) for sizes in _points()],
        [train_program(_small_config(), *sizes) for sizes in _points()],
        [_evaluation(*sizes) for sizes in _points()],
        [(_one_page_step, (_tokens(batch, time + 1),)) for batch, time in _points()],
        [(_one_page_sample, (_tokens(*sizes),)) for sizes in _points()],
    ]
    folders = frozenset(str(folder) for folder in (ROOT / "docs", *_package_folders()))
    found: dict[str, dict[int, FunctionSource]] = {}
    for points in calls:
        source = source_of_calls(points, SYMBOLS, folders)
        assert source.error is None, source.error
        assert source.note is None, source.note
        for function in source.functions:
            in_file = found.setdefault(function.path, {})
            in_file.setdefault(function.lines[0].number, function)
    return found


def _package_folders() -> list[Path]:
    package = Path(jgpt.__file__).parent
    return [package / "nn", package / "training"]


def _points() -> Iterator[tuple[int, int]]:
    return zip(*SYMBOLS.values(), strict=True)


def _config(preset: str) -> jgpt.TrainConfig:
    return dataclasses.replace(PRESETS[preset][1], micro_batches=1)


def _small_config() -> jgpt.TrainConfig:
    """Return a config with one block: a train step of four takes 13 s to trace, line by line."""
    config = _config("nanogpt-cpu")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))


def _tokens(batch: int, time: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, time), jnp.int32)


def _other_methods(tokens: jax.Array) -> None:
    """Call what the forward pass of a model doesn't."""
    config = _small_config().model
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    model.attention_weights(tokens)
    model.empty_cache(tokens.shape[0])
    x = model.embed(tokens)
    head = model.blocks[0].attention.head(0)
    head(x)
    head.weights(x)


def _evaluation(batch: int, time: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    config = _small_config()
    weights = abstract_state(config)["model"]
    windows = jax.ShapeDtypeStruct((1, batch, time + 1), jnp.int32)
    counts = jax.ShapeDtypeStruct((1, batch, time), jnp.bool_)
    return make_eval_step(config.model), (weights, windows, counts)


@functools.cache
def _one_page() -> dict[str, Any]:
    return runpy.run_path(str(ONE_PAGE))


def _one_page_step(window: jax.Array) -> None:
    """Take a train step of the GPT on one page."""
    page = _one_page()
    params = _one_page_params()
    page["train_step"](params, page["init_adam"](params), window, 1e-3)


def _one_page_sample(window: jax.Array) -> None:
    _one_page()["sample"](_one_page_params(), window[:, :1], 1, jax.random.key(0))


def _one_page_params() -> Any:
    sizes = {"vocab_size": 65, "block_size": 32, "num_layers": 2, "num_heads": 4, "embed_dim": 64}
    return _one_page()["init_params"](jax.random.key(0), **sizes)


# --- pages ---------------------------------------------------------------------------------------


def annotated_file(path: Path, link: Callable[[str], str]) -> str:
    """Return a file as HTML: each line, and the shapes of what it sets or returns.

    `link` returns the address of a lesson.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    annotated: dict[int, tuple[FunctionSource, SourceLine]] = {}
    for function in called_functions().get(str(path), {}).values():
        for line in function.lines:
            # A function inside another one has its lines in both: the inner one's count.
            known = annotated.get(line.number)
            if known is None or len(known[0].lines) > len(function.lines):
                annotated[line.number] = (function, line)
    code = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")
    names = _names_defined(tree)
    rows = []
    for number, text in enumerate(code[: len(source.splitlines())], start=1):
        name = names.get(number)
        # A helper that no lesson builds has no link; a public name without a lesson is an error.
        is_helper = name is not None and name.startswith("_") and name not in LESSONS
        if name is not None and not is_helper:
            text = _with_link(text, name, link(LESSONS[name]))
        margin = ""
        kind = "line"
        if number in annotated:
            function, line = annotated[number]
            if line.values:
                margin = f'<span class="shape">{html.escape(function.margin(line))}</span>'
            if not line.is_reached:
                kind = "line not-reached"
        rows.append(f'<div class="{kind}"><code>{text or " "}</code>{margin}</div>')
    return f'<div class="highlight annotated">{"".join(rows)}</div>'


def _names_defined(tree: ast.Module) -> dict[int, str]:
    """Return the classes and functions of a module, by their line."""
    names = {}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names[node.lineno] = node.name
    return names


def _with_link(text: str, name: str, address: str) -> str:
    """Return a line of HTML in which the name that is defined is a link."""
    linked, count = re.subn(
        rf">{name}</span>", f'><a href="{html.escape(address)}">{name}</a></span>', text, count=1
    )
    assert count == 1, text
    return linked
