"""The runs and presets that commands are given: found, and loaded."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jgpt.cli import terminal
from jgpt.cli.terminal import open_console, say
from jgpt.config import TrainConfig
from jgpt.presets import PRESETS
from jgpt.user_code import with_code
from jgpt.words import did_you_mean


@contextlib.contextmanager
def loaded_run(
    run: str,
    which: Any,
    mesh: str | None = None,
    model: str | None = None,
    weights: str = "saved",
) -> Iterator[tuple[Any, Any, Any]]:
    """A run's model, tokenizer and config, with its mesh set inside the block."""
    with terminal.importing() as status:
        from jgpt.nn.int8 import with_int8_weights
        from jgpt.parallel.mesh import use_mesh
        from jgpt.runs.directory import run_and_step
        from jgpt.runs.load import load

        status.update("loading the model")
        path, step = run_and_step(run)
        if step is not None:
            which = step
        with use_mesh(mesh):
            loaded, tokenizer, config = load(path, which=which, model=model)
    # outside of the import, whose spinner is on the terminal
    with use_mesh(mesh):
        if weights == "int8":
            loaded = with_int8_weights(loaded)
        yield loaded, tokenizer, config


def run_or_latest(run: str | None) -> str:
    """The run that was named, or else the latest one, which is said."""
    if run is not None:
        return run

    from jgpt.runs.directory import RunDirectory

    latest = RunDirectory.latest()
    say(open_console(stderr=True), f"the latest run is {latest}")
    return str(latest)


def config_of(what: str, model: str | None = None, optimizer: str | None = None) -> TrainConfig:
    """The config of a preset or a run directory."""
    from jgpt.runs.directory import RunDirectory, run_and_step

    if what in PRESETS:
        return with_code(PRESETS[what][1], model, optimizer)
    path, _ = run_and_step(what)
    if path.exists():
        return with_code(RunDirectory.open(path).config(), model, optimizer)
    raise ValueError(
        f"{what!r} is neither a preset nor a run directory{did_you_mean(what, PRESETS)}"
    )
