"""Training progress: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Self

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
from jgpt.cli.terminal import say, spinner
from jgpt.config import OptimizerConfig, TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.fields import Code
from jgpt.fitting.progress import Progress as TrainingProgress
from jgpt.hardware import device_kinds
from jgpt.nn.models import Weights, weight_dimensions
from jgpt.nn.stacking import STACKED
from jgpt.parallel.mesh import abstract_mesh
from jgpt.parallel.rules import Dimensions
from jgpt.runs.directory import RunDirectory
from jgpt.shapes.contract import typed
from jgpt.training.ahead import CompiledStep
from jgpt.training.evaluation import EvaluationPlan
from jgpt.training.optimizer import dimensions_in_block, partition
from jgpt.training.placement import bytes_on_each, placements, replicated_dimensions
from jgpt.training.plan import Plan
from jgpt.training.state import TrainState, abstract_state, state_specs
from jgpt.words import counted, format_bytes

SECONDS_PER_LINE = 20  # where the output is no terminal, such as the log of a job
SECONDS_PER_MOVE = 0.5  # of the bar, if a step takes less
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
        self.over = ""
        self.is_interrupted = False
        self.step = 0
        self.reader_left = False
        self.most_steps = None
        if console.is_terminal:
            self.most_steps = 1  # a first move of the bar, from which the speed is known
        self.tokens_per_step = 1
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

    def planned(self, evaluations: EvaluationPlan) -> None:
        """Keep what is said after a loss."""
        self.over = evaluations.over
        self.is_interrupted = evaluations.interrupted

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Print model and data, and start the bar."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
        self.out = out
        step = int(state.step)
        self.step = step
        self.tokens_per_step = config.batch_size * config.model.block_size
        dimensions = weight_dimensions(config.model)
        lines = _describe_run(config, parameters, len(dataset.train), len(dataset.validation))
        lines += describe_optimizer_groups(config.optimizer, state.weights, dimensions)
        lines.append(self._describe_start(config, step))
        self.say(*lines)
        self.steps = self.bar.add_task("train", total=config.steps, completed=step, details="")
        self.spinner.update("compiling")
        self.spinner.start()

    def _describe_start(self, config: TrainConfig, step: int) -> str:
        if step == 0:
            return f"{counted(config.steps, 'step')} of {_batch(config)} into {self.out}"
        where = f"step {step} of {config.steps}"
        if self.is_interrupted:
            return f"resumed at {where}: {self.out}; its evaluation was interrupted and comes first"
        if step == config.steps:
            return f"finished at {where} already: {self.out}; --steps trains it further"
        return f"resumed at {where}: {self.out}"

    def stepped(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Move the bar; without one, print a line now and then."""
        self.step = step
        self.details = f"loss {loss:.3f}"
        if tokens_per_second is not None:
            self.details += f"  {tokens_per_second:,.0f} tokens/s"
        if self.most_steps is not None and tokens_per_second is not None:
            # fewer steps in a call, or the bar would stand still for a call of hundreds
            steps = SECONDS_PER_MOVE * tokens_per_second / self.tokens_per_step
            self.most_steps = max(1, int(steps))
        self.spinner.stop()  # a console shows either the spinner or the bar
        self._move_bar(step)
        self.bar.start()
        waited = self.console.get_time() - self.last_line
        if not self.console.is_terminal and waited > SECONDS_PER_LINE:
            self.say(f"step {step}: {self.details}")

    def evaluating(self, done: int, targets: int) -> None:
        """Show a bar of its own; without one, print a line now and then."""
        self.spinner.stop()
        if self.evaluation is None:
            if self.steps is not None:
                self.bar.update(self.steps, visible=False)
            self.evaluation = self.bar.add_task(EVALUATE, total=targets, details="")
            self.bar.start()
        self.bar.update(self.evaluation, completed=done, total=targets)
        waited = self.console.get_time() - self.last_line
        if not self.console.is_terminal and waited > SECONDS_PER_LINE:
            self.say(f"evaluation: {done:,} of {targets:,} tokens")

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Print a line."""
        self.validation = f"  val {validation_loss:.3f}"
        self._end_evaluation()
        self._move_bar(step)
        loss = f"validation loss {validation_loss:.4f}{self.over}"
        self.say(f"step {step}: {loss}  {self.details}")

    def evaluated_exactly(self, step: int, validation_loss: float) -> None:
        """Print a line."""
        self.say(f"step {step}: validation loss {validation_loss:.4f} over all tokens")

    def _end_evaluation(self) -> None:
        if self.evaluation is not None:
            self.bar.remove_task(self.evaluation)
            self.evaluation = None
            if self.steps is not None:
                self.bar.update(self.steps, visible=True)

    def estimated(self, step: int, validation_loss: float) -> None:
        """Print a line."""
        self.say(f"step {step}: validation loss about {validation_loss:.3f}")

    def stopping(self) -> None:
        """After the first signal."""
        if self.is_tokenizing:
            self.say("stopping; the same command goes on with what is tokenized of a large text")
        elif self.evaluation is not None:
            self.say(
                "stopping this evaluation; the state is saved, and resuming evaluates it again"
            )
        else:
            self.say(
                "finishing this call and saving a checkpoint; a second signal exits without it"
            )

    def leaving(self) -> None:
        """After the second signal: restore the terminal, and tell what is lost."""
        erase = (ControlType.ERASE_IN_LINE, 2)
        self.console.control(Control(ControlType.CARRIAGE_RETURN, erase, ControlType.SHOW_CURSOR))
        self.console.quiet = True  # nothing is drawn again until the exit
        if self.out is not None:
            saved = max(RunDirectory(self.out).checkpoint_steps(), default=0)
            line = "left without saving: all steps are lost"
            if self.evaluation is not None and saved >= self.step:
                line = f"left; checkpoint {saved} has all steps"
            elif saved > 0:
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

    def _move_bar(self, step: int) -> None:
        if self.steps is not None:
            details = f"  {self.details}{self.validation}"
            self.bar.update(self.steps, completed=step, details=details)


@typed
def describe_optimizer_groups(
    config: OptimizerConfig,
    weights: Weights,
    dimensions: Mapping[str, Dimensions] | None = None,
) -> list[str]:
    """A line per optimizer group: its parameters, and which of them decay.

    Of a custom optimizer nothing is known but what is done around it.
    """
    if config.make is not None:
        return [_describe_custom_optimizer(config, weights)]
    sizes: dict[tuple[str, int], list[int]] = {}
    groups = jax.tree.leaves(partition(config, weights, dimensions))
    beyond_muon: list[str] = []
    for (path, leaf), group in zip(jax.tree.leaves_with_path(weights), groups, strict=True):
        # stacked blocks are described as the matrices that they are
        layers = 1
        if STACKED in path:
            layers = len(leaf)
        rank = min(dimensions_in_block(path, leaf), 3)
        sizes_of_kind = sizes.setdefault((group, rank), [])
        for _ in range(layers):
            sizes_of_kind.append(leaf.size // layers)
        if config.optimizer == "muon" and rank > 2:
            beyond_muon.append(jax.tree_util.keystr(path, simple=True, separator="."))
    parts: dict[str, list[str]] = {group: [] for group, _ in sizes}

    def most_dimensions_first(item: tuple[tuple[str, int], list[int]]) -> int:
        (_, rank), _ = item
        return -rank

    for (group, rank), counts in sorted(sizes.items(), key=most_dimensions_first):
        parts[group].append(_describe_kind(config, group, rank, counts))
    lines = [f"{group}: {', '.join(kinds)}" for group, kinds in parts.items()]
    if beyond_muon:
        others = ""
        if len(beyond_muon) > 1:
            others = f" and {len(beyond_muon) - 1} more"
        lines.append(
            f"muon moves matrices alone: adamw moves {beyond_muon[0]}{others}, "
            "of more than 2 dimensions"
        )
    return lines


def _describe_kind(config: OptimizerConfig, group: str, rank: int, counts: list[int]) -> str:
    """The parameters of a group that have the same number of dimensions; 3 are 3 or more."""
    if rank < 2:
        one_array = "vector"
        several = "vectors"
    elif rank == 2:
        one_array = "matrix"
        several = "matrices"
    else:
        one_array = "array of more than 2 dimensions"
        several = "arrays of more than 2 dimensions"
    kind = several
    if len(counts) == 1:
        kind = one_array
    if rank >= 2:  # vectors, biases and scales, don't decay
        decay = config.weight_decay
        if group == "muon":
            decay = config.muon_weight_decay
        kind += f" (decay {decay:g})"
    return f"{len(counts)} {kind} with {sum(counts):,} parameters"


@typed
def _describe_custom_optimizer(config: OptimizerConfig, weights: Weights) -> str:
    code = Code.of(config.make)
    name = code.named
    if code.file is None:  # typed into a notebook
        name = code.name
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    line = f"custom optimizer {name}: {parameters:,} parameters"
    if config.gradient_clip > 0:
        line += f", gradients clipped to norm {config.gradient_clip:g}"
    if config.ema_decay > 0:
        line += f", weights averaged with decay {config.ema_decay:g}"
    return line


def _describe_run(
    config: TrainConfig, parameters: int, training_tokens: int, validation_tokens: int
) -> list[str]:
    return [
        f"{config.name}: {parameters:,} parameters, vocabulary {config.model.vocab_size}, on "
        f"{device_kinds()[0]}",
        f"data: {' '.join(config.dataset.data)}: {training_tokens:,} training and "
        f"{validation_tokens:,} validation tokens",
    ]


def _batch(config: TrainConfig) -> str:
    parts = _parts(config.micro_batches)
    return f"{config.batch_size} x {config.model.block_size} tokens{parts}"


def _parts(micro_batches: int | str) -> str:
    if micro_batches == 1:
        return ""
    return f", in {micro_batches} micro-batches"


def describe(plan: Plan) -> list[str]:
    """A plan as lines of text."""
    config = plan.config
    tokens = config.batch_size * config.model.block_size
    epochs = config.steps * tokens / plan.training_tokens
    lines = [
        *_describe_run(config, plan.parameters, plan.training_tokens, plan.validation_tokens),
        f"{counted(config.steps, 'step')} of {_batch(config)} into {plan.out}: "
        f"{epochs:.1f} epochs, {plan.flops:.3g} FLOPs",
        f"an evaluation and a checkpoint every {counted(config.eval_interval, 'step')}",
        _describe_evaluations(plan.evaluations),
    ]
    if config.mesh is not None:
        replicated = replicated_dimensions(config.model, abstract_mesh(config.mesh))
        lines += [f"mesh: {config.mesh}", *replicated]
    if plan.memory is not None:
        lines.append(f"device memory: {plan.memory}")
        lines += _describe_process_memory(plan)
    return [*lines, "no run was written: leave out --dry-run to train"]


def _describe_evaluations(evaluations: EvaluationPlan) -> str:
    count = f"{evaluations.evaluations:,} evaluations"
    if evaluations.evaluations == 1:
        count = "1 evaluation"
    over = evaluations.over
    if not over:
        over = f" over all {evaluations.targets:,} tokens"
    if evaluations.spread:
        over += ", spread evenly"
    if evaluations.exact_last:
        over += "; after the last step over all, too"
    return f"{count}{over}: {evaluations.share:.1%} of the run's FLOPs"


def _describe_process_memory(plan: Plan) -> list[str]:
    """On a CPU, where a step's memory is not all that the process needs."""
    if plan.process_memory is None or plan.memory is None:
        return []
    devices = abstract_mesh(plan.config.mesh).size
    beside = plan.process_memory - devices * (plan.memory.state + plan.memory.working)
    return [
        f"memory of the process: {format_bytes(plan.process_memory)} "
        f"({format_bytes(beside)} more for Python, JAX and the data)"
    ]


def describe_ahead(step: CompiledStep) -> list[str]:
    """A step compiled for other hardware as lines of text."""
    chip = step.chip
    memory = step.memory
    verdict = "NOT enough"
    if step.fits:
        verdict = "enough"
    sent = 0
    kinds = []
    for collective in step.collectives:
        sent += collective.sent
        kinds.append(f"{collective.count} {collective.kind} ({format_bytes(collective.sent)})")

    def row(resource: str, seconds: float, amount: str, peak: float) -> str:
        return f"  {resource:<13} {1e3 * seconds:9.3f} ms  {amount} at {peak / 1e12:g} T/s"

    flops = f"{step.flops / 1e12:.3g} TFLOP"
    return [
        f"{step.chips} x {chip.kind} ({step.on}), mesh {step.mesh}{_parts(step.micro_batches)}",
        f"memory of each chip: {memory}; it has {format_bytes(chip.memory)}, which is {verdict}",
        f"collectives of a step: {', '.join(kinds) or 'none'}, as each chip sends them",
        "a step takes each chip at least, from published peaks:",
        row("compute", step.compute_seconds, flops, chip.peak_flops),
        row("memory", step.memory_seconds, "all of that memory twice", chip.memory_bandwidth),
        row("interconnect", step.interconnect_seconds, format_bytes(sent), chip.interconnect),
        f"bound by {step.bound}",
        f"custom kernels: {', '.join(step.kernels) or 'none'}",
    ]


def describe_placements(config: TrainConfig) -> list[str]:
    """A line per parameter: how the config's mesh shards it."""
    mesh = abstract_mesh(config.mesh)
    state = abstract_state(config)
    specs = state_specs(config, mesh)
    parameters = format_bytes(bytes_on_each(state.weights, specs.weights, mesh))
    everything = format_bytes(bytes_on_each(state, specs, mesh))
    lines = []
    for placement in placements(config.model, mesh):
        size = format_bytes(placement.on_each)
        lines.append(f"{placement.name:<40} {placement.sharding:<26} {size:>11}")
    lines.append(
        f"on each device: {parameters} of parameters, {everything} with the optimizer's state"
    )
    lines += replicated_dimensions(config.model, mesh)
    return lines
