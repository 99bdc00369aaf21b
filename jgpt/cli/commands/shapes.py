"""`jgpt shapes`: a forward pass as a tree of calls."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from json import dumps
from typing import Annotated, Any

from jgpt.cli import functions, runs, sources, terminal
from jgpt.cli.arguments import Lines, ModelOption
from jgpt.cli.failing import source_shown
from jgpt.cli.options import OptionError, OptionSpec
from jgpt.cli.terminal import on_one_line
from jgpt.config import ModelConfig
from jgpt.presets import DEFAULT_PRESET, PRESETS
from jgpt.user_code import describe_error, place_of_error


def shapes(
    what: Annotated[
        str,
        OptionSpec(
            "PRESET|RUN|FILE:NAME",
            "A preset, a run directory, or a model or function such as my_gpt.py:GPT.",
            positional=True,
        ),
    ],
    arrays: Annotated[
        tuple[str, ...],
        OptionSpec(
            "ARRAY",
            "The arrays that a function gets, such as 'float32[b t 8]'.",
            positional=True,
        ),
    ] = (),
    model: ModelOption = None,
    batch: int | None = None,
    time: int | None = None,
    depth: int | None = None,
    decode: bool = False,
    train: bool = False,
    source: bool = False,
    of: Annotated[str | None, OptionSpec("TEXT")] = None,
    prompt: Annotated[str | None, OptionSpec("TEXT")] = None,
    causal: bool = False,
    json: bool = False,
) -> Lines:
    """Show the forward pass as a tree of calls, with the shape of each result.

    Args:
        batch: The number of sequences; the symbol b by default.
        time: The number of positions; the symbol t by default.
        depth: Levels of the tree; 3 by default.
        decode: Trace one step of decoding, over a KV cache.
        train: Trace a train step.
        source: Show the source instead, with the shapes of what each line computes.
        of: With --source, only functions with this text in their name or their file's.
        prompt: With --source, compute a run's model for this text, and show the mean, the
            standard deviation and what is not finite.
        causal: Prove instead that no output reads a later position, nor another sequence. The
            exit code is 1 if that is not proven.
        json: Print one JSON object.
    """
    is_code = functions.is_code(what)
    shows_values = prompt is not None
    are_sizes_given = batch is not None or time is not None or decode or train
    refusals = {
        "--batch, --time and --depth must be positive": any(
            size is not None and size < 1 for size in (batch, time, depth)
        ),
        "--decode and --train are two pictures: give one": decode and train,
        "--of selects functions of --source: give both": of is not None and not source,
        "--prompt shows values beside the lines of --source: give both": (
            shows_values and not source
        ),
        "--prompt shows the values of one text: leave out --batch, --time, --decode and --train": (
            shows_values and are_sizes_given
        ),
        f"--prompt needs a run, whose weights are trained: {what} has none": (
            shows_values and (is_code or what in PRESETS)
        ),
        "--causal proves, and shows no tree: leave out the other options": causal
        and (batch is not None or depth is not None or decode or train or source or json),
        f"give {what} or --model {model}, not both": is_code and model is not None,
        f"{' '.join(arrays)!r} was not expected: only a function gets arrays, as in "
        "jgpt shapes my.py:attend 'float32[b t 8]'": bool(arrays) and not is_code,
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise OptionError(message)
    with _strict_json(json, source):
        if prompt is not None:
            return functions.show_values(what, prompt, model, of=of, json=json)
        if causal:
            return _prove_causal(what, arrays, model, time)
        return _show(what, arrays, model, batch, time, depth, decode, train, source, of, json)


def _prove_causal(what: str, arrays: tuple[str, ...], model: str | None, time: int | None) -> Lines:
    """Print a proof of sight of a model, or of a function and its arrays."""
    sizes = None if time is None else {"t": time}
    with terminal.importing():
        if functions.is_code(what) and (arrays or not functions.is_model(what)):
            proof = functions.prove_causal(what, arrays, sizes)
        else:
            from jgpt.nn.models import abstract_model
            from jgpt.shapes.proofs import prove

            if functions.is_code(what):
                model = what
                what = DEFAULT_PRESET
            config = runs.config_of(what, model)
            with source_shown(dataclasses.replace(config, micro_batches=1)):
                asked = abstract_model(config.model)
                proof = prove(asked, "int32[b t]", causal="t", separate="b", sizes=sizes)
    print(proof)
    if not proof:
        raise SystemExit(1)
    return []


def _show(
    what: str,
    arrays: tuple[str, ...],
    model: str | None,
    batch: int | None,
    time: int | None,
    depth: int | None,
    decode: bool,
    train: bool,
    source: bool,
    of: str | None,
    json: bool,
) -> Lines:
    """Print the tree of calls or the source, or return it as JSON."""
    if functions.is_code(what):
        if arrays or not functions.is_model(what):
            return functions.show(what, arrays, depth or 3, source=source, of=of, json=json)
        model = what
        what = DEFAULT_PRESET
    with terminal.importing():
        from jgpt.training import programs

        config = dataclasses.replace(runs.config_of(what, model), micro_batches=1)
        make_program = programs.forward_program
        if decode:
            make_program = programs.decode_program
        elif train:
            make_program = programs.train_program
        symbols = programs.sizes_to_trace(config.model.block_size)
        # A size that was given stays a number.
        for name, value in (("b", batch), ("t", time)):
            if value is not None:
                symbols[name] = (value,) * len(symbols[name])
        points = list(zip(*symbols.values(), strict=True))
        if len(set(points)) == 1:
            del points[1:]
        with source_shown(config):
            first = make_program(config, *points[0])
        # Making a program takes a part of a second, so others are made when they are needed.
        others = (make_program(config, *point) for point in points[1:])
    if source:
        return _show_source(first, others, symbols, config.model, train, of, json)
    with source_shown(config):
        return _show_tree(first, others, symbols, depth or 3, json)


@contextlib.contextmanager
def _strict_json(json: bool, source: bool) -> Iterator[None]:
    """With --json, keep what a user's code prints apart from the JSON, and print errors as JSON.

    A program that reads the source as JSON reads standard output alone.
    """
    if not json:
        yield
        return
    stdout = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        if source:
            print(dumps(_document(error), allow_nan=False), file=stdout, flush=True)
        raise


def _document(error: Exception) -> dict[str, Any]:
    """Return an error as JSON, with the place in the user's file where there is one."""
    if isinstance(error, sources.SourceError):
        return error.document
    message = on_one_line(describe_error(error) or str(error) or repr(error))
    path, line = place_of_error(error) or (None, None)
    if path is not None:
        path = str(path)
    return {
        "functions": [],
        "error": {"message": message, "path": path, "line": line},
        "reason": None,
        "note": None,
    }


def _show_tree(
    first: Any,
    others: Iterable[Any],
    symbols: dict[str, tuple[int, ...]],
    depth: int,
    json: bool,
) -> Lines:
    """Print the tree of calls in a program at some sizes, or return it as JSON."""
    from jgpt.shapes.expressions import name_sizes

    traces = (program.trace() for program in chain([first], others))
    tree = name_sizes(traces, symbols).tree
    return sources.lines_of_tree(tree, depth, json=json)


def _show_source(
    first: Any,
    others: Iterable[Any],
    symbols: dict[str, tuple[int, ...]],
    model: ModelConfig,
    train: bool,
    of: str | None,
    json: bool,
) -> Lines:
    """Print the source of the model, and of the train step, or return it as JSON."""
    from jgpt.nn.models import abstract_model
    from jgpt.shapes.source import folders_of, source_of_calls

    folders = folders_of(abstract_model(model))
    if train:
        folders |= folders_of(first.function)
    source = source_of_calls(chain([first], others), symbols, folders)
    if of is not None:
        source = source.of(of)
    return sources.lines_of_source(source, json=json)
