"""Annotated sources and trees of calls: printed, or as JSON."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from json import dumps
from typing import Any

from jgpt.cli.arguments import Lines
from jgpt.cli.terminal import open_console, say
from jgpt.config import TrainConfig
from jgpt.user_code import describe_error

_STYLES = {
    "heading": "bold",
    "reached": "",
    "not reached": "dim",
    "failed": "red",
    "not finite": "red",
}


def lines_of_source(source: Any, *, json: bool) -> Lines:
    """Print an `AnnotatedSource`, or its JSON. Raises ValueError if it has an error."""
    if json:
        print(dumps(source.as_json(), allow_nan=False), flush=True)
    else:
        print_lines(source, open_console())
    if source.error is not None:
        raise ValueError(source.error)
    return []


def print_lines(source: Any, console: Any) -> None:
    """Print an `AnnotatedSource` without its error, which is a command's last line."""
    from jgpt.shapes.trace import name_colours

    colours = name_colours(str(source))
    for line, kind in dataclasses.replace(source, error=None).lines():
        say(console, line, colours=colours, style=_STYLES[kind])


def lines_of_tree(tree: Any, depth: int, *, json: bool) -> Lines:
    """Print a `ShapeTrace`, or return it as JSON."""
    from jgpt.shapes.trace import name_colours

    if json:
        return [dumps(tree.as_json(), allow_nan=False)]
    lines = tree.lines(depth)
    say(open_console(), *lines, colours=name_colours("\n".join(lines)))
    return []


def print_failing_source(make_source: Callable[[], Any]) -> None:
    """Print on standard error the function in which a call failed, up to its line.

    The call is traced again, which computes nothing.
    """
    # Whatever goes wrong here must not hide the error itself.
    with contextlib.suppress(Exception):
        source = make_source().failing()
        # An error that no trace has, such as one of the data, has no source.
        if source.error is not None:
            print_lines(source, open_console(stderr=True))


@contextlib.contextmanager
def source_shown(config: TrainConfig) -> Iterator[None]:
    """Print the source of a custom model on standard error if it is why the block fails."""
    try:
        yield
    except Exception as error:
        if config.model.make is not None and describe_error(error) is not None:
            from jgpt.training.programs import train_program

            whole = dataclasses.replace(config, micro_batches=1)
            print_failing_source(lambda: source_of_model(whole, train_program))
        raise


def source_of_model(
    config: TrainConfig,
    make_program: Callable[..., Any],
    batch: int | None = None,
    time: int | None = None,
) -> Any:
    """The source of the functions of a model that a program calls, and of the train step."""
    from jgpt.nn.models import abstract_model
    from jgpt.shapes.source import folders_of, source_of_calls
    from jgpt.training.programs import train_program
    from jgpt.training.step import make_train_steps

    folders = folders_of(abstract_model(config.model))
    if make_program is train_program:
        folders |= folders_of(make_train_steps)
    symbols, programs = programs_at_sizes(config, make_program, batch, time)
    return source_of_calls(programs, symbols, folders)


def programs_at_sizes(
    config: TrainConfig, make_program: Callable[..., Any], batch: int | None, time: int | None
) -> tuple[dict[str, tuple[int, ...]], Iterator[Any]]:
    """Sizes b and t, of which a given one is a number, and a program for each pair of them."""
    from jgpt.training.programs import sizes_to_trace

    symbols = sizes_to_trace(config.model.block_size)
    for name, value in (("b", batch), ("t", time)):
        if value is not None:
            symbols[name] = (value,) * len(symbols[name])
    # Making a program takes a part of a second, so each is made when it is needed.
    programs = (make_program(config, *sizes) for sizes in zip(*symbols.values(), strict=True))
    return symbols, programs
