"""Training metrics: `metrics.jsonl`, one object per step (docs/runs.md has its fields)."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jgpt.config import TrainConfig
from jgpt.data.batches import batch_starts
from jgpt.data.mixture import Share
from jgpt.hardware import memory_in_use, peak_flops, process_index
from jgpt.nn.costs import flops_per_token
from jgpt.parallel.processes import raise_in_all_processes
from jgpt.runs.directory import METRICS, RunDirectory
from jgpt.training.statistics import is_statistic
from jgpt.training.step import Metrics

Log = Callable[[dict[str, Any], int], None]
"""A function that logs the metrics of a step."""
EACH_STEP = ("loss", "gradient_norm", "learning_rate")


class MetricsLogger:
    """A logger that writes the metrics of a call of steps while the next call runs."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        trackers: Sequence[Log],
        training_tokens: int,
        shares: tuple[Share, ...] = (),
        devices: int = 1,
        report: Callable[[int, float, float | None], None] = lambda *_: None,
    ) -> None:
        self._config = config
        self._run = run
        self._trackers = trackers
        self._report = report
        self._training_tokens = training_tokens
        self._shares = shares
        self._tokens_per_step = config.batch_size * config.model.block_size
        self._peak_speed = _peak_tokens_per_second(config, devices)
        self._pending: tuple[int, int, Metrics] | None = None
        self._unwritten: list[dict[str, Any]] = []
        seconds_before = 0.0  # a resumed run's seconds continue
        for line in run.metrics():
            seconds_before = line.get("seconds", seconds_before)
        self._started = time.perf_counter() - seconds_before
        self._clock: float | None = None
        self._tokens = 0
        self.tokens_per_second: float | None = None
        """The last throughput that was measured; None at the start."""
        self.failure: OSError | None = None
        """The error of process 0 in writing; `finish` raises it in all processes."""
        self.tracker_failure: OSError | None = None
        """The error of a tracker, which doesn't prevent the state from being saved."""

    def start_clock(self) -> None:
        """Measure throughput from now on, since compilation and evaluation don't count."""
        self._clock = time.perf_counter()
        self._tokens = 0

    def add(self, first_step: int, count: int, metrics: Metrics) -> None:
        """Record the previous call, and this one if it is ready."""
        self.wait()  # for the previous call, while this one computes
        self._pending = (first_step, count, metrics)
        # Dispatch is asynchronous, so usually this call is still running; waiting for it here would
        # leave the device idle between calls.
        if metrics.loss.is_ready():  # type: ignore[attr-defined]
            self.wait()

    def wait(self) -> None:
        """Record the pending call, except the last line, to which a validation loss may be added.

        Raises FloatingPointError for the first step whose loss or gradient is not finite.
        """
        if self._pending is None:
            return
        first_step, count, metrics = self._pending
        self._pending = None
        for line in self._lines_of(first_step, count, metrics):
            if not (math.isfinite(line["loss"]) and math.isfinite(line["gradient_norm"])):
                self._write(self._unwritten)
                raise FloatingPointError(self._not_finite_message(line))
            self._unwritten.append(line)
        self._tokens += count * self._tokens_per_step
        *lines, last = self._unwritten
        last |= self._measurements(last["step"])
        self._write(lines)
        self._unwritten = [last]
        self._report(last["step"], last["loss"], last.get("tokens_per_second"))

    def _lines_of(self, first_step: int, count: int, metrics: Metrics) -> list[dict[str, Any]]:
        """Return a line for each step of a call."""
        # One transfer for each metric rather than each step; entries from `count` on belong to no
        # step.
        columns = {}
        for name in EACH_STEP:
            values = np.asarray(getattr(metrics, name))  # steps
            columns[name] = values[:count].tolist()
        extra = {}
        for name, values in (metrics.extra or {}).items():
            extra[name] = np.asarray(values)[:count].tolist()
        lines = []
        for row in range(count):
            line: dict[str, Any] = {"step": first_step + 1 + row}
            for name, column in columns.items():
                line[name] = column[row]
            for name, column in extra.items():
                if self._has_value(name, line["step"], column[row]):
                    line[name] = column[row]
            lines.append(line)
        return lines

    def _has_value(self, name: str, step: int, value: float) -> bool:
        """Return whether a step's line has a metric of the objective or of `log`.

        A ratio to parameters that are all zero has no value, nor has a mean of nothing.
        """
        if is_statistic(name) and step % self._config.log_interval != 0:
            return False
        return math.isfinite(value)

    def add_evaluation(self, **losses: float) -> None:
        """Add losses to the last step's line, or begin that of step 0. Call `wait` before."""
        if not self._unwritten:
            self._unwritten = [{"step": 0}]
        self._unwritten[-1] |= losses

    def finish(self) -> None:
        """Record all calls durably."""
        self.wait()
        self._write(self._unwritten, durable=True)
        self._raise_failure()

    def unevaluated(self) -> dict[str, Any]:
        """Record all calls durably up to the last line, and return that line.

        The line is complete when the loss of an evaluation is added.
        """
        self.wait()
        (last,) = self._unwritten  # `wait` keeps one line
        self._write([], durable=True)  # syncs the lines before it
        self._unwritten = [last]
        self._raise_failure()
        return last.copy()

    def resume_unevaluated(self, line: dict[str, Any]) -> None:
        """Continue with a line that `unevaluated` returned, which is not recorded yet."""
        self._unwritten = [line]
        self._started = time.perf_counter() - line.get("seconds", 0.0)

    def _raise_failure(self) -> None:
        with raise_in_all_processes():
            if self.failure is not None:
                raise self.failure

    def _measurements(self, step: int) -> dict[str, Any]:
        """Return the measurements of a call, which only the line of its last step has."""
        now = time.perf_counter()
        tokens = step * self._tokens_per_step
        seconds = round(now - self._started, 3)
        measured: dict[str, Any] = {"tokens": tokens, "seconds": seconds}
        if self._clock is not None:  # over the calls since the last compilation or evaluation
            speed = self._tokens / (now - self._clock)
            self.tokens_per_second = speed
            measured["tokens_per_second"] = round(speed, 1)
            if self._peak_speed:
                measured["model_flops_utilisation"] = round(speed / self._peak_speed, 5)
        memory = memory_in_use()
        if memory is not None:
            measured["memory_bytes"] = memory
        return measured

    def _write(self, lines: list[dict[str, Any]], *, durable: bool = False) -> None:
        """Append lines to the file and log them to the trackers; keep an error for later.

        If one process raised here, the others would still be in a call of steps. The loop checks
        for the error, and all processes save the same step and end.
        """
        self._unwritten = []
        try:
            if process_index() == 0:
                self._run.append(METRICS, lines, durable=durable)
        except OSError as error:
            if self.failure is None:  # the first error is the cause
                self.failure = error
        for line in lines:
            values = dict(line)
            del values["step"]
            for log in self._trackers:
                try:
                    log(values, line["step"])
                except OSError as error:
                    if self.tracker_failure is None:
                        self.tracker_failure = error

    def _not_finite_message(self, line: dict[str, Any]) -> str:
        """Return the message for a step that is not finite: its number, its text, and what to
        change."""
        step = line["step"]
        name = "loss"
        if math.isfinite(line["loss"]):
            name = "gradient_norm"
        advice = "lower `learning_rate`"
        if step == 1:  # there was no update yet, so a lower rate changes nothing
            advice = (
                "the model gives it at its first step, before any update: look for the "
                "mistake in its forward pass or its initial parameters"
            )
        return (
            f"{name} is {line[name]} at step {step} (learning_rate "
            f"{line['learning_rate']:.3g}, gradient_norm {line['gradient_norm']:.3g}; "
            f"{self._describe_batch(step - 1)}): {advice}"
        )

    def _describe_batch(self, step: int) -> str:
        """Describe the batch of a step, counted from 0, so that it can be looked at."""
        config = self._config
        if config.batches is not None:
            return f"the batch is what `batches` returns for step {step}"
        # A batch is a function of the seed and the step, so it can be made again.
        starts = batch_starts(
            config.seed,
            step,
            config.steps_per_call,  # this shape is compiled already
            self._training_tokens,
            config.batch_size,
            config.model.block_size,
            shares=self._shares,
        )[0].tolist()
        tokens = ", ".join(str(start) for start in starts[:8])
        if len(starts) > 8:
            tokens += ", …"
        where = "the training text"
        if self._shares:
            where = "the training texts, which follow each other"
        return f"the batch's windows start at tokens {tokens} of {where}"


def _peak_tokens_per_second(config: TrainConfig, devices: int) -> float | None:
    """Return the tokens per second at the published peak of the devices, or None if unknown."""
    peak = peak_flops()
    if peak is None:
        return None
    # Computed only now, since counting the FLOPs lowers a custom model.
    # The backward pass has two products for each one of the forward pass.
    flops = 3 * flops_per_token(config.model)
    if flops == 0:  # a bigram model has no products
        return None
    return devices * peak / flops
