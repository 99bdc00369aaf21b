"""The commands, one in each file: parameters are options, results are lines to print.

Each imports what it needs when it runs: `jgpt --help` must not wait for jax.
"""

from collections.abc import Callable

from jgpt.cli.arguments import Lines
from jgpt.cli.commands import (
    chat,
    eval_,
    export,
    import_,
    info,
    look,
    new,
    plot,
    prepare,
    sample,
    shapes,
    train,
)

COMMANDS: dict[str, Callable[..., Lines | None]] = {
    "train": train.train,
    "sample": sample.sample,
    "chat": chat.chat,
    "eval": eval_.eval_,
    "info": info.info,
    "shapes": shapes.shapes,
    "plot": plot.plot,
    "look": look.look,
    "new": new.new,
    "prepare": prepare.prepare,
    "import": import_.import_,
    "export": export.export,
}
"""In the order of the help."""
