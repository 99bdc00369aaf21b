"""`jgpt new`: a model, or a whole training, in one file, to change."""

import os
import shlex
from pathlib import Path
from typing import Annotated

from jgpt.cli.arguments import Lines, path_to_write, shell_command
from jgpt.cli.options import OptionSpec
from jgpt.files import write_file


def new(
    file: Annotated[str, OptionSpec("FILE", "The Python file to write.", positional=True)],
    training: bool = False,
) -> Lines:
    """Write a GPT or its training in one Python file, for you to change.

    Args:
        training: Write the training: data, initialisation, step, loop and evaluation.
    """
    path = path_to_write(file, ".py")
    if os.path.lexists(path):
        raise ValueError(f"{file} already exists: choose another name")
    if training:
        write_file(path, Path(__file__).with_name("new_training.py.txt").read_bytes())
        return [f"wrote {file}; next: {shlex.join(['python', file])}"]
    write_file(path, Path(__file__).with_name("new_gpt.py.txt").read_bytes())
    return [f"wrote {file}; next: {shell_command('train', '--model', f'{file}:GPT')}"]
