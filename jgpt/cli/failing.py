"""The source of a custom model up to the line that fails, above the error of a command."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from jgpt.cli.sources import print_lines
from jgpt.cli.terminal import open_console
from jgpt.config import TrainConfig
from jgpt.user_code import CustomCodeError, describe_error


@contextlib.contextmanager
def source_shown(config: TrainConfig) -> Iterator[None]:
    """Print the source of a custom model on standard error if it is why the block fails.

    The model is traced again, which computes nothing. An error that no trace has, such as one of
    the data, has no source.
    """
    try:
        yield
    except Exception as error:
        # Whatever goes wrong here must not hide the error itself.
        with contextlib.suppress(Exception):
            print_failing_source(config, error)
        raise


def print_failing_source(config: TrainConfig, error: Exception) -> None:
    """Print the source of a custom model on standard error if it is why a command has failed."""
    if config.model.make is None or describe_error(error) is None:
        return
    from jgpt.machine import process_index
    from jgpt.shapes.source import folders_of, source_of_calls
    from jgpt.training.programs import sizes_to_trace

    # An error of the import has no trace, and one process speaks for all.
    if isinstance(error, CustomCodeError) or process_index() != 0:
        return
    config = dataclasses.replace(config, micro_batches=1)
    make: Any = config.model.make
    folders = folders_of(make)
    symbols = sizes_to_trace(config.model.block_size)
    points = list(zip(*symbols.values(), strict=True))
    # The constructor comes first, since the programs are made of the model.
    for program in (_constructor, _forward, _train_step):
        calls = (program(config, *point) for point in points)
        with contextlib.suppress(ValueError):  # no line sets an array, and none fails
            source = source_of_calls(calls, symbols, folders).failing()
            if source.error is not None:
                print_lines(source, open_console(stderr=True))
                return


def _constructor(config: TrainConfig, batch: int, time: int) -> tuple[Any, tuple[Any, ...]]:
    from flax import nnx

    from jgpt.nn.models import create_model

    def construct() -> None:
        create_model(config.model, rngs=nnx.Rngs(0))

    return construct, ()


def _forward(config: TrainConfig, batch: int, time: int) -> tuple[Any, tuple[Any, ...]]:
    from jgpt.training.programs import forward_program

    return forward_program(config, batch, time)


def _train_step(config: TrainConfig, batch: int, time: int) -> tuple[Any, tuple[Any, ...]]:
    from jgpt.training.programs import train_program

    return train_program(config, batch, time)
