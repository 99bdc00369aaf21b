"""Training progress: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.control import Control
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from jgpt.cli.options import in_options
from jgpt.cli.report import (
    describe_batch,
    describe_objective,
    describe_optimizer,
    describe_run,
)
from jgpt.cli.terminal import SECONDS_PER_LINE, say, spinner
from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.nn.models import weight_dimensions
from jgpt.runs.directory import RunDirectory
from jgpt.runs.progress import Progress as TrainingProgress
from jgpt.words import counted

BAR_WIDTH = 40
EVALUATE = "evaluate"
"""The task whose bar stands in the place of the steps' during a long evaluation."""


class _Bar(Progress):
    """A bar of one line, with room for the ^C that a terminal echoes."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, as wide as the numbers leave it."""
        for task in self.tasks:
            if not task.visible:
                continue
            width = self.console.width - len("^C") - 1
            seconds = task.time_remaining
            left = "--:--"
            if seconds is not None:
                left = str(timedelta(0, seconds)).removeprefix("0:")
            done = f"{task.completed:.0f}/{task.total}"
            if task.description == EVALUATE:  # of millions of tokens
                done = f"{task.percentage:.1f}%"
            numbers = f"{done} {left} left{task.fields['details']}"
            room = width - len(f"{task.description}  {numbers}")
            bar = ProgressBar(task.total, task.completed, width=max(1, min(BAR_WIDTH, room)))
            line = Table.grid(padding=(0, 1))
            line.add_row(task.description, bar, Text(numbers, no_wrap=True, overflow="ellipsis"))
            yield Constrain(line, width)


class ConsoleProgress(TrainingProgress):
    """Shows losses, throughput and remaining time; until the first step, a spinner."""

    def __init__(self, console: Console, doing: str) -> None:
        self.console = console
        self.doing = doing
        self.is_tokenizing = False
        self.spinner = spinner(console, doing)
        self.bar = _Bar(console=console, transient=True, disable=not console.is_terminal)
        # tasks of the bar, while they are shown
        self.steps = None
        self.evaluation = None
        self.out = None
        self.reader_left = False
        self.validation = ""
        self.details = ""
        self.last_line = console.get_time()

    def __enter__(self) -> Self:
        self.spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.spinner.stop()
        self.bar.stop()

    def tokenized(self, fraction: float) -> None:
        """Show the fraction beside the spinner."""
        self.is_tokenizing = fraction < 1
        doing = self.doing
        if 0 < fraction < 1:
            doing = f"tokenizing the text: {fraction:.0%}"
        self.spinner.update(doing)
        self._say_now_and_then(doing)

    def started(
        self, config: TrainConfig, dataset: Dataset, weights: Any, step: int, out: Path
    ) -> None:
        """Print model and data, and start the bar."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
        self.out = out
        dimensions = weight_dimensions(config.model)
        lines = describe_run(config, parameters, len(dataset.train), len(dataset.validation))
        lines += describe_optimizer(config.optimizer, weights, dimensions)
        lines += describe_objective(config)
        lines.append(self._describe_start(config, step, out))
        self.say(*lines)
        self.steps = self.bar.add_task("train", total=config.steps, completed=step, details="")
        self.spinner.update("compiling")
        self.spinner.start()

    def _describe_start(self, config: TrainConfig, step: int, out: Path) -> str:
        where = f"step {step} of {config.steps}"
        if step == 0 or not RunDirectory(out).checkpoint_steps():
            line = f"{counted(config.steps - step, 'step')} of {describe_batch(config)} into {out}"
            return f"{line}, from {where}" if step else line
        if step == config.steps:
            return f"finished at {where} already: {out}; --steps trains it further"
        return f"resumed at {where}: {out}"

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Move the bar; without one, print a line now and then."""
        self.details = f"loss {loss:.3f}"
        if tokens_per_second is not None:
            self.details += f"  {tokens_per_second:,.0f} tokens/s"
        self.spinner.stop()  # a console shows either the spinner or the bar
        self._move_bar(step)
        self.bar.start()
        self._say_now_and_then(f"step {step}: {self.details}")

    def evaluating(self, done: int, targets: int) -> None:
        """Show a bar of its own; without one, print a line now and then."""
        self.spinner.stop()
        if self.evaluation is None:
            if self.steps is not None:
                self.bar.update(self.steps, visible=False)
            self.evaluation = self.bar.add_task(EVALUATE, total=targets, details="")
            self.bar.start()
        self.bar.update(self.evaluation, completed=done, total=targets)
        self._say_now_and_then(f"evaluation: {done:,} of {targets:,} tokens")

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Print a line."""
        self.validation = f"  val {validation_loss:.3f}"
        self._end_evaluation()
        self._move_bar(step)
        self.say(f"step {step}: validation loss {validation_loss:.4f}  {self.details}")

    def _end_evaluation(self) -> None:
        if self.evaluation is not None:
            self.bar.remove_task(self.evaluation)
            self.evaluation = None
            if self.steps is not None:
                self.bar.update(self.steps, visible=True)

    def stopping(self) -> None:
        """After the first signal."""
        if self.is_tokenizing:
            self.say("stopping; the same command continues with the tokens of a large text so far")
        elif self.evaluation is not None:
            self.say("stopping this evaluation; the state is saved without a validation loss")
        else:
            self.say(
                "saving a checkpoint after the current steps; a second signal exits without one"
            )

    def leaving(self) -> None:
        """After the second signal: restore the terminal, and tell what is lost."""
        erase = (ControlType.ERASE_IN_LINE, 2)
        self.console.control(Control(ControlType.CARRIAGE_RETURN, erase, ControlType.SHOW_CURSOR))
        self.console.quiet = True  # nothing is drawn again until the exit
        if self.out is not None:
            saved = max(RunDirectory(self.out).checkpoint_steps(), default=0)
            line = "left without saving: all steps are lost"
            if saved > 0:
                line = f"left without saving: the steps after checkpoint {saved} are lost"
            print(line, file=self.console.file, flush=True)

    def warned(self, message: str) -> None:
        """Print a line."""
        self.say(in_options(message))

    def say(self, *lines: str) -> None:
        """Print plain text. A reader that has left, as `head` does, ends training cleanly."""
        try:
            say(self.console, *lines)
        except BrokenPipeError:
            self.reader_left = True
            self.console.quiet = True
        self.last_line = self.console.get_time()

    def _say_now_and_then(self, line: str) -> None:
        """Print a line where there is no bar, unless another one was printed a moment ago."""
        waited = self.console.get_time() - self.last_line
        if not self.console.is_terminal and waited > SECONDS_PER_LINE:
            self.say(line)

    def _move_bar(self, step: int) -> None:
        if self.steps is not None:
            details = f"  {self.details}{self.validation}"
            self.bar.update(self.steps, completed=step, details=details)
