"""`jgpt shapes`: a forward pass as a tree of calls."""

import dataclasses
from json import dumps

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Lines, ModelOption, What
from jgpt.cli.options import OptionError
from jgpt.cli.terminal import open_console, say


def shapes(
    what: What,
    model: ModelOption = None,
    batch: int | None = None,
    time: int | None = None,
    depth: int = 3,
    decode: bool = False,
    train: bool = False,
    json: bool = False,
) -> Lines:
    """Show the forward pass as a tree of calls, with the shape of each result.

    Args:
        batch: Sequences; by default any number, written b.
        time: Positions; by default any number, written t.
        depth: Levels of the tree.
        decode: Trace one step of decoding, over a KV cache.
        train: Trace a train step.
        json: Print one JSON object.
    """
    for name, value in (("batch", batch), ("time", time), ("depth", depth)):
        if value is not None and value < 1:
            raise OptionError(f"--{name} {value} must be positive")
    if decode and train:
        raise OptionError("--decode and --train are two pictures: give one")
    with terminal.importing():
        from jgpt.shapes.trace import name_colours, with_symbols
        from jgpt.training import programs

        config = dataclasses.replace(runs.config_of(what, model), micro_batches=1)
        trace = programs.trace_forward
        if decode or train:
            trace = programs.trace_decode if decode else programs.trace_train
        most = config.model.block_size
        first = (batch or 2, time or max(most - 1, 1))
        second = (batch or 3, time or most)
        traced = trace(config, *first)
        if first != second:
            symbols = {"b": (first[0], second[0]), "t": (first[1], second[1])}
            traced = with_symbols(traced, trace(config, *second), symbols)
    if json:
        return [dumps(traced.as_json())]
    lines = traced.lines(depth)
    say(open_console(), *lines, colours=name_colours("\n".join(lines)))
    return []
