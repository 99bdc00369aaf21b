"""A function in a user's file, traced with arrays that are written as text."""

import inspect
from collections.abc import Callable
from typing import Any

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Lines
from jgpt.cli.options import OptionError
from jgpt.cli.sources import lines_of_source, lines_of_tree, print_lines
from jgpt.cli.terminal import open_console
from jgpt.user_code import load_code


def is_code(what: str) -> bool:
    """Whether a word is FILE.py:NAME."""
    file, _, name = what.rpartition(":")
    return file.endswith(".py") and name != ""


def is_model(named: str) -> bool:
    """Whether FILE.py:NAME makes a model: it takes a config and `rngs`."""
    with terminal.importing():
        return "rngs" in _signature(load_code(named)).parameters


def show(
    named: str, arrays: tuple[str, ...], depth: int, *, source: bool, of: str | None, json: bool
) -> Lines:
    """Print the tree of calls or the source of FILE.py:NAME, or return it as JSON."""
    with terminal.importing():
        from jgpt.shapes.source import annotated_source

        function = load_code(named)
        _require_arrays(named, function, arrays)
        if not source:
            tree = _tree(function, arrays)
            return lines_of_tree(tree, depth, json=json)
        annotated = annotated_source(function, *arrays, of=of)
    return lines_of_source(annotated, json=json)


def prove_causal(named: str, arrays: tuple[str, ...], sizes: dict[str, int] | None) -> Any:
    """Return a proof that no output of FILE.py:NAME along t reads a later position."""
    from jgpt.shapes.proofs import prove

    function = load_code(named)
    _require_arrays(named, function, arrays)
    return prove(function, *arrays, causal="t", sizes=sizes)


def _tree(function: Callable[..., Any], arrays: tuple[str, ...]) -> Any:
    """Return the tree of calls. If the function fails, print its source up to that line."""
    from jgpt.shapes.source import annotated_source, annotated_tree

    try:
        return annotated_tree(function, *arrays)
    except Exception:
        failed = annotated_source(function, *arrays).failing()
        if failed.error is None:
            raise
        print_lines(failed, open_console(stderr=True))
        raise ValueError(failed.error) from None


def show_values(
    run: str,
    prompt: str,
    model: str | None,
    *,
    of: str | None,
    json: bool,
) -> Lines:
    """Print the source of a run's model with the values of a prompt, or return it as JSON."""
    with runs.loaded_run(run, "best", model=model) as opened:
        import jax.numpy as jnp

        from jgpt.shapes.source import annotated_source

        loaded, used_tokenizer, _ = opened
        tokens = used_tokenizer.encode(prompt)[-loaded.block_size :]
        annotated = annotated_source(loaded, jnp.asarray(tokens)[None], of=of, values=True)
    return lines_of_source(annotated, json=json)


def _require_arrays(named: str, function: Callable[..., Any], arrays: tuple[str, ...]) -> None:
    """Raise OptionError unless a function takes as many arrays."""
    signature = _signature(function)
    try:
        signature.bind(*arrays)
    except TypeError as error:
        name = named.rpartition(":")[2]
        raise OptionError(
            f"{name}{signature} has another number of arguments ({error}): write each as an "
            "array, such as 'float32[b t 8]'"
        ) from None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a call, without `self`."""
    if not isinstance(function, type):
        return inspect.signature(function)
    # NNX's metaclass hides the signature of a class.
    signature = inspect.signature(function.__init__)
    parameters = list(signature.parameters.values())[1:]
    return signature.replace(parameters=parameters)
