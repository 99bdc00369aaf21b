"""`jgpt plan`: what a training run takes, here or on other hardware."""

import dataclasses
import os
import sys
from json import dumps

from jgpt.cli import terminal
from jgpt.cli.arguments import Lines
from jgpt.cli.failing import source_shown
from jgpt.cli.options import (
    OptionError,
    ProcessOptions,
    RunOptions,
)
from jgpt.cli.terminal import open_console, spinner
from jgpt.config import (
    TrainConfig,
)


def plan(config: TrainConfig, options: RunOptions, where: ProcessOptions) -> Lines:
    """Show the memory and compute of a training run, here or on other hardware."""
    if where != ProcessOptions():
        raise OptionError("a plan is for one process: leave out --distributed and --coordinator")
    if options.on is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # what this machine has isn't asked for
        if "jax" in sys.modules:  # a custom model imported it
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    with terminal.importing():
        from jgpt.cli import console, report
        from jgpt.fitting import fit as fit_module
        from jgpt.training import ahead

    if options.on is None:
        screen = open_console(stderr=options.json)
        shown = console.ConsoleProgress(screen, "reading the data")
        with source_shown(config), shown as progress:
            planned = fit_module.plan(
                config,
                initial=options.initial,
                resume=options.resume,
                overwrite=options.overwrite,
                progress=progress,
            )
        lines = report.describe(planned)
    else:
        doing = f"compiling for {options.on}, which takes minutes"
        with spinner(open_console(stderr=True), doing):
            planned = ahead.compile_ahead(config, options.on)
        lines = report.describe_ahead(planned)
    if options.json:
        return [dumps(dataclasses.asdict(planned), default=str)]
    return lines
