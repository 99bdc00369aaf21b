"""Training progress: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.control import Control
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import ControlType

from jgpt.cli.options import in_options
from jgpt.cli.report import describe_batch, describe_objective, describe_optimizer, describe_run
from jgpt.cli.terminal import NowAndThen, say
from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.nn.models import weight_dimensions
from jgpt.runs.directory import RunDirectory
from jgpt.runs.progress import Progress as TrainingProgress
from jgpt.words import counted


class _Bar(Progress):
    """A bar of one line, with room for the ^C that a terminal echoes."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, a little narrower than the terminal."""
        if self.tasks:  # rich asks once before there is a console
            yield Constrain(self.make_tasks_table(self.tasks), self.console.width - 3)


class ConsoleProgress(TrainingProgress):
    """Shows losses, throughput and remaining time; until the first step, a spinner."""

    def __init__(self, console: Console, doing: str) -> None:
        self.console = console
        self.doing = doing
        self.spinner = console.status(doing)
        self.bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[details]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(doing, details="")
        self.steps = 0
        self.out = None
        self.reader_left = False
        self.details = ""
        self.validation = ""
        self.log = NowAndThen(console, self.say)

    def __enter__(self) -> Self:
        self.spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.spinner.stop()
        self.bar.stop()

    def tokenized(self, fraction: float) -> None:
        """Show the fraction beside the spinner."""
        doing = self.doing
        if 0 < fraction < 1:
            doing = f"tokenizing the text: {fraction:.0%}"
        self.spinner.update(doing)
        self.log(doing)

    def started(
        self, config: TrainConfig, dataset: Dataset, weights: Any, step: int, out: Path
    ) -> None:
        """Print model and data, and show that the steps are compiled."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
        self.out = out
        self.steps = config.steps
        dimensions = weight_dimensions(config.model)
        lines = describe_run(config, parameters, len(dataset.train), len(dataset.validation))
        lines.append(describe_optimizer(config.optimizer, weights, dimensions))
        lines += describe_objective(config)
        lines.append(_describe_start(config, step, out))
        self.say(*lines)
        self.spinner.update("compiling")
        self.spinner.start()

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Move the bar; without one, print a line now and then."""
        self.details = f"loss {loss:.3f}"
        if tokens_per_second is not None:
            self.details += f"  {tokens_per_second:,.0f} tokens/s"
        self._move_bar("train", step, self.steps)
        self.log(f"step {step}: {self.details}")

    def evaluating(self, done: int, targets: int) -> None:
        """Show the evaluation on the bar; without one, print a line now and then."""
        self._move_bar("evaluate", done, targets)
        self.log(f"evaluation: {done:,} of {targets:,} tokens")

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Print a line."""
        self.validation = f"  val {validation_loss:.3f}"
        self._move_bar("train", step, self.steps)
        self.say(f"step {step}: validation loss {validation_loss:.4f}  {self.details}")

    def stopping(self) -> None:
        """After the first signal."""
        self.say("stopping, and saving what is done; a second signal exits at once")

    def leaving(self) -> None:
        """After the second signal: restore the terminal, and tell what is lost."""
        erase = (ControlType.ERASE_IN_LINE, 2)
        self.console.control(Control(ControlType.CARRIAGE_RETURN, erase, ControlType.SHOW_CURSOR))
        self.console.quiet = True  # nothing is drawn again until the exit
        if self.out is not None:
            saved = max(RunDirectory(self.out).checkpoint_steps(), default=0)
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
        self.log.said()

    def _move_bar(self, doing: str, done: int, total: int) -> None:
        """Show how much is done, on the bar that takes the place of the spinner."""
        self.spinner.stop()
        if doing != self.bar.tasks[0].description:
            self.bar.reset(self.task, description=doing, total=total, completed=done)
        self.bar.update(self.task, completed=done, details=f"{self.details}{self.validation}")
        self.bar.start()


def _describe_start(config: TrainConfig, step: int, out: Path) -> str:
    """Where a run starts, and how far it goes."""
    where = f"step {step} of {config.steps}"
    if step > 0 and RunDirectory(out).checkpoint_steps():
        if step == config.steps:
            return f"finished at {where} already: {out}; --steps trains it further"
        return f"resumed at {where}: {out}"
    line = f"{counted(config.steps - step, 'step')} of {describe_batch(config)} into {out}"
    if step > 0:  # with the moments of another run
        line += f", from {where}"
    return line
