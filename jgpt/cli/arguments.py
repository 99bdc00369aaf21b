"""Arguments that several commands have, and what is checked of them before anything is computed."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from jgpt.cli.options import OptionSpec
from jgpt.config import TrainConfig
from jgpt.fields import Code
from jgpt.user_code import custom_code

Run = Annotated[str, OptionSpec("RUN", "The run directory.", positional=True)]
LatestRun = Annotated[
    str | None,
    OptionSpec("[RUN]", "The run directory. By default, the latest run in runs/.", positional=True),
]
What = Annotated[
    str, OptionSpec("PRESET|RUN", "A preset's name or a run directory.", positional=True)
]
Image = Annotated[str, OptionSpec("FILE", "The image to write: .png or .svg.")]
Probability = Annotated[float | None, OptionSpec("P")]
Texts = Annotated[tuple[str, ...], OptionSpec("TEXT", once=True)]
Checkpoint = Annotated[
    Literal["best", "last"] | int,
    OptionSpec(help="The best by validation loss, the last, or a step."),
]
ModelOption = Annotated[
    str | None,
    OptionSpec(
        "FILE:NAME", "The custom model that the run was trained with, such as my_gpt.py:GPT."
    ),
]
MeshOption = Annotated[
    str | None, OptionSpec("MESH", "A mesh of devices, such as data=2,fsdp=2,tensor=2.")
]
Lines = list[str]


def path_to_write(path: str, *suffixes: str) -> Path:
    """The path of a file to write, checked before anything is computed."""
    if Path(path).suffix.lower() not in suffixes:
        raise ValueError(f"{path} must end in {' or '.join(suffixes)}")
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: create it, or choose another for {path}")
    return Path(path)


def shell_command(*words: object) -> str:
    """A command of jgpt to copy into a shell."""
    return shlex.join(["jgpt", *map(str, words)])


def code_options(config: TrainConfig, *parts: str) -> list[str]:
    """The options for custom code of a config: of some parts, or of all."""
    words = []
    for part, make in custom_code(config).items():
        if make is not None and part in (parts or (part,)):
            words.extend([f"--{part}", Code.of(make).named])
    return words
