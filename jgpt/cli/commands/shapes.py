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
        batch: The number of sequences; the symbol b by default.
        time: The number of positions; the symbol t by default.
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
        if decode:
            trace = programs.trace_decode
        elif train:
            trace = programs.trace_train
        # Traced with two batches and two lengths: a size that differs is named after what fits
        # both. One that was given is the same in both, and stays a number.
        longest = config.model.block_size
        # Two batches differ by 2 and two lengths by 1, so that no batch is a length, nor one more.
        batches = (batch or 2, batch or 4)
        times = (time or max(longest - 1, 1), time or longest)
        traced = trace(config, batches[0], times[0])
        if batches[0] != batches[1] or times[0] != times[1]:
            second = trace(config, batches[1], times[1])
            traced = with_symbols(traced, second, {"b": batches, "t": times})
    if json:
        return [dumps(traced.as_json())]
    lines = traced.lines(depth)
    say(open_console(), *lines, colours=name_colours("\n".join(lines)))
    return []
