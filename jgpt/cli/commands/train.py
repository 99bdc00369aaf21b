"""`jgpt train`: train a GPT, in one process or in several."""

import dataclasses
import os
import sys
import time
from json import dumps
from typing import NoReturn

from jgpt.cli import terminal
from jgpt.cli.arguments import Lines, code_options, options_to_load, shell_command
from jgpt.cli.failing import source_shown
from jgpt.cli.options import OptionError, ProcessOptions, RunOptions, in_options
from jgpt.cli.terminal import on_one_line, open_console, spinner
from jgpt.config import TrainConfig


def train(config: TrainConfig, options: RunOptions, where: ProcessOptions) -> Lines:
    """Train a GPT."""
    began = time.perf_counter()
    if options.dry_run:
        return _dry_run(config, options)
    if options.on is not None or options.json:
        raise OptionError("--on and --json are for --dry-run: give it, too")
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


def _dry_run(config: TrainConfig, options: RunOptions) -> Lines:
    """What the run takes, here or on other chips."""
    if options.on is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # what this machine has isn't asked for
        if "jax" in sys.modules:  # a custom model imported it
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    with terminal.importing():
        from jgpt.cli import console, report
        from jgpt.runs.fit import plan
        from jgpt.training.ahead import compile_ahead

    if options.on is None:
        screen = open_console(stderr=options.json)
        shown = console.ConsoleProgress(screen, "reading the data")
        with source_shown(config), shown as progress:
            planned = plan(
                config,
                initial=options.initial,
                with_optimizer=options.with_optimizer,
                resume=options.resume,
                overwrite=options.overwrite,
                progress=progress,
            )
        lines = report.describe(planned)
    else:
        doing = f"compiling for {options.on}, which takes minutes"
        with spinner(open_console(stderr=True), doing):
            planned = compile_ahead(config, options.on)
        lines = report.describe_ahead(planned)
    if options.json:
        return [dumps(dataclasses.asdict(planned), default=str)]
    return lines


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
        from jgpt.runs.fit import StoppedBeforeTraining, TrainingStopped, fit

    screen = open_console()
    screen.quiet = process_index() != 0  # process 0 speaks for all
    shown = console.ConsoleProgress(screen, "reading the data")
    with shown as progress, signals.stop_requested(progress.stopping, progress.leaving) as codes:
        try:
            run = fit(
                config,
                initial=options.initial,
                with_optimizer=options.with_optimizer,
                resume=options.resume,
                overwrite=options.overwrite,
                progress=progress,
                should_stop=lambda: bool(codes) or progress.reader_left,
            )
        except StoppedBeforeTraining:
            sys.exit(max(codes, default=128 + signals.BROKEN_PIPE))
        except TrainingStopped as stopped:
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
    code = options_to_load(config)
    assert run.path is not None
    lines = []
    if sample := (run.path / SAMPLES).read_text():  # a custom model may have none
        lines += ["", sample, ""]
    seconds = time.perf_counter() - began
    sampling = shell_command("sample", run.path, *code)
    evaluate = shell_command("eval", run.path, *code)
    loss = "no validation loss"  # stopped in its only evaluation
    if run.validation_loss is not None:
        loss = f"best validation loss {run.validation_loss:.4f}"
    lines.append(f"{loss}, total time {seconds:.0f} s")
    files = "checkpoints, metrics.jsonl, samples.txt, loss.png"
    lines.append(f"run directory: {run.path} ({files})")
    lines.append(f"next: {sampling}   or   {evaluate}")
    return lines
