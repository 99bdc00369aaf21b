"""`jgpt train`: train a GPT, in one process or in several."""

import dataclasses
import os
import sys
import time
from json import dumps
from typing import Any, NoReturn

from jgpt.cli import terminal
from jgpt.cli.arguments import Lines, code_options, shell_command
from jgpt.cli.options import OptionError, ProcessOptions, RunOptions, in_options
from jgpt.cli.sources import source_shown
from jgpt.cli.terminal import on_one_line, open_console
from jgpt.config import TrainConfig


def train(config: TrainConfig, options: RunOptions, where: ProcessOptions) -> Lines:
    """Train a GPT."""
    began = time.perf_counter()
    if options.on is not None:
        return _compile_ahead(config, options.on, json=options.json)
    if options.dry_run or options.json:
        with source_shown(config):
            return _dry_run(config, options)
    if where == ProcessOptions():
        with source_shown(config):
            return _train(config, options, began)
    # with --distributed, JAX finds in the environment what is None
    addresses = (where.coordinator, where.processes, where.process)
    if not where.distributed and None in addresses:
        raise OptionError("give all of --coordinator HOST:PORT, --processes N and --process I")

    from jgpt.parallel.processes import joined

    with joined(*addresses, _leave), source_shown(config):
        return _train(config, options, began)


def _compile_ahead(config: TrainConfig, chips: str, *, json: bool) -> Lines:
    """What a step takes on chips that this machine may lack."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # what this machine has isn't asked for
    with terminal.importing() as status:
        from jgpt.cli import report
        from jgpt.training.ahead import compile_ahead

        status.update(f"compiling for {chips}, which takes minutes")
        step = compile_ahead(config, chips)
    if json:
        return [dumps(dataclasses.asdict(step), default=str)]
    return report.describe_ahead(step)


def _dry_run(config: TrainConfig, options: RunOptions) -> Lines:
    """What the run takes here."""
    with terminal.importing():
        from jgpt.cli import console, report
        from jgpt.runs.fit import plan

    screen = open_console(stderr=options.json)
    with console.ConsoleProgress(screen, "reading the data") as progress:
        planned = plan(config, progress=progress, **_beginning(options))
    if options.json:
        return [dumps(dataclasses.asdict(planned), default=str)]
    return report.describe(planned)


def _beginning(options: RunOptions) -> dict[str, Any]:
    """How a run begins, in the keywords of `fit` and of its plan."""
    return {
        "initial": options.initial,
        "with_optimizer": options.with_optimizer,
        "resume": options.resume,
        "overwrite": options.overwrite,
    }


def _leave(message: str) -> NoReturn:
    """End this process at once, from any thread, with a message."""
    sys.stdout.flush()
    open_console().show_cursor()
    print(f"jgpt: {on_one_line(in_options(message))}", file=sys.stderr, flush=True)
    os._exit(2)


def _train(config: TrainConfig, options: RunOptions, began: float) -> Lines:
    with terminal.importing():
        from jgpt.cli import console, signals
        from jgpt.machine import process_index
        from jgpt.parallel import processes
        from jgpt.runs.directory import SAMPLES
        from jgpt.runs.fit import TrainingStopped, fit

    screen = open_console()
    screen.quiet = process_index() != 0  # process 0 speaks for all
    shown = console.ConsoleProgress(screen, "reading the data")
    with shown as progress, signals.stop_requested(progress.stopping, progress.leaving) as codes:
        try:
            run = fit(
                config,
                progress=progress,
                should_stop=lambda: bool(codes) or progress.reader_left,
                **_beginning(options),
            )
        except TrainingStopped as stopped:
            if stopped.step == 0:  # while the text was tokenized: there is nothing to resume
                sys.exit(max(codes, default=128 + signals.BROKEN_PIPE))
            code = code_options(config)
            resume = shell_command("train", "--out", stopped.directory, "--resume", *code)
            lines = [str(stopped), f"resume with: {resume}"]
            progress.say(*lines)
            status = max(codes, default=0)
            if progress.reader_left and not codes:
                print("jgpt: the output was closed:", *lines, sep="\n", file=sys.stderr)
                status = 128 + signals.BROKEN_PIPE
            # the signal came to one process, and all exit with its code
            sys.exit(max(processes.gather(status)))
    if process_index() != 0:
        return []
    assert run.path is not None
    lines = []
    if sample := (run.path / SAMPLES).read_text():  # a custom model may have none
        lines += ["", sample, ""]
    loss = "no validation loss"  # stopped in its only evaluation
    if run.validation_loss is not None:
        loss = f"best validation loss {run.validation_loss:.4f}"
    code = code_options(config, "model")
    sampling = shell_command("sample", run.path, *code)
    evaluating = shell_command("eval", run.path, *code)
    return [
        *lines,
        f"{loss}, total time {time.perf_counter() - began:.0f} s",
        f"run directory: {run.path} (checkpoints, metrics.jsonl, samples.txt, loss.png)",
        f"next: {sampling}   or   {evaluating}",
    ]
