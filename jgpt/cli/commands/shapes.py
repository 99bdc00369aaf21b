"""`jgpt shapes`: a forward pass as a tree of calls."""

import dataclasses
from json import dumps
from typing import Annotated, Any

from jgpt.cli import functions, runs, terminal
from jgpt.cli.arguments import Lines, ModelOption
from jgpt.cli.failing import source_shown
from jgpt.cli.options import OptionError, OptionSpec
from jgpt.cli.terminal import open_console, say
from jgpt.config import ModelConfig
from jgpt.presets import DEFAULT_PRESET, PRESETS


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
        json: Print one JSON object.
    """
    for name, value in (("batch", batch), ("time", time), ("depth", depth)):
        if value is not None and value < 1:
            raise OptionError(f"--{name} {value} must be positive")
    if decode and train:
        raise OptionError("--decode and --train are two pictures: give one")
    if of is not None and not source:
        raise OptionError("--of selects functions of --source: give both")
    if source and depth is not None:
        raise OptionError(
            f"--depth {depth} is for the tree, and --source shows lines: give one of them"
        )
    if prompt is not None:
        if not source:
            raise OptionError("--prompt shows values beside the lines of --source: give both")
        sizes = {"--batch": batch, "--time": time, "--decode": decode, "--train": train}
        for flag, value in sizes.items():
            if value:
                raise OptionError(f"--prompt shows the values of one text: leave out {flag}")
        if functions.is_code(what) or what in PRESETS:
            raise OptionError(f"--prompt needs a run, whose weights are trained: {what} has none")
        return functions.show_values(what, prompt, model, of=of, json=json)
    if functions.is_code(what):
        if model is not None:
            raise OptionError(f"give {what} or --model {model}, not both")
        if arrays or not functions.is_model(what):
            options = {"--batch": batch, "--time": time, "--decode": decode, "--train": train}
            functions.require_none(options)
            return functions.show(what, arrays, depth or 3, source=source, of=of, json=json)
        model = what
        what = DEFAULT_PRESET
    elif arrays:
        raise OptionError(
            f"{arrays[0]!r} was not expected: only a function gets arrays, as in "
            "jgpt shapes my.py:attend 'float32[b t 8]'"
        )
    with terminal.importing():
        from jgpt.training import programs

        config = dataclasses.replace(runs.config_of(what, model), micro_batches=1)
        make_program = programs.forward_program
        if decode:
            make_program = programs.decode_program
        elif train:
            make_program = programs.train_program
        # Traced with two batches and two lengths: a size that differs is named after what fits
        # both. One that was given is the same in both, and stays a number.
        longest = config.model.block_size
        # The batches differ by 2 and the lengths by 1, so that the difference of a size tells which
        # of them it follows: `time + 1`, the length of a window, also differs by 1.
        batches = (batch or 2, batch or 4)
        times = (time or max(longest - 1, 1), time or longest)
        symbols = {"b": batches, "t": times}
        with source_shown(config):
            traced = [make_program(config, batches[0], times[0])]
            if batches[0] != batches[1] or times[0] != times[1]:
                traced.append(make_program(config, batches[1], times[1]))
    if source:
        return _show_source(traced, symbols, config.model, train, of, json)
    with source_shown(config):
        return _show_tree(traced, symbols, depth or 3, json)


def _show_tree(
    traced: list[Any], symbols: dict[str, tuple[int, int]], depth: int, json: bool
) -> Lines:
    """Print the tree of calls in one or two programs, or return it as JSON."""
    from jgpt.shapes.trace import name_colours, with_symbols

    traces = [program.trace() for program in traced]
    tree = traces[0]
    if len(traces) == 2:
        tree = with_symbols(traces[0], traces[1], symbols)
    if json:
        return [dumps(tree.as_json())]
    lines = tree.lines(depth)
    say(open_console(), *lines, colours=name_colours("\n".join(lines)))
    return []


def _show_source(
    traced: list[Any],
    symbols: dict[str, tuple[int, int]],
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
        folders |= folders_of(traced[0].function)
    source = source_of_calls(traced, symbols, folders)
    if of is not None:
        source = source.of(of)
    if json:
        return [dumps(source.as_json())]
    functions.print_source(source)
    return []
