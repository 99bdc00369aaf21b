"""Training metrics: `metrics.jsonl`, one object per step."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jgpt.config import TrainConfig
from jgpt.data.batches import window_starts
from jgpt.hardware import memory_in_use, peak_flops, process_index
from jgpt.nn.models import flops_per_token
from jgpt.runs.directory import RunDirectory
from jgpt.runs.trackers import Tracker
from jgpt.training.step import Metrics

SCHEMA = {
    "step": "optimizer steps taken; each appears once, in order; step 0 has an estimate only",
    "loss": "the step's training loss, in nats per token",
    "gradient_norm": "the gradient's global norm before clipping",
    "learning_rate": "the step's learning rate",
    "validation_loss": "exact, every validation target once; on the steps that were evaluated",
    "validation_estimate": "of a part of the validation split; a few, before the first evaluation",
    "tokens": "tokens trained on since step 0; this and the rest on the last step of each call",
    "seconds": "spent training since step 0, evaluations and resumed runs included",
    "tokens_per_second": "of training since the last evaluation; absent while compiling",
    "model_flops_utilisation": "of the devices' dense 16-bit peak; absent where that is unknown",
    "memory_bytes": "the most in use so far: on a device, or by the process on a CPU",
}
"""The fields of `metrics.jsonl`."""


class MetricsLogger:
    """Logs the metrics of a call of steps while the next call runs."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        trackers: Sequence[Tracker],
        training_tokens: int,
        devices: int = 1,
        report: Callable[[int, float, float | None], None] = lambda *_: None,
    ) -> None:
        self._config, self._run, self._trackers, self._report = config, run, trackers, report
        self._training_tokens = training_tokens
        self._tokens_per_step = config.batch_size * config.model.block_size
        self._flops_per_token = 3 * flops_per_token(config.model)
        peak = peak_flops()
        self._peak = peak and devices * peak
        self._pending: tuple[int, int, Metrics] | None = None
        self._held: dict[str, Any] | None = None
        seconds = [line["seconds"] for line in run.metrics() if "seconds" in line]
        self._started = time.perf_counter() - (seconds[-1] if seconds else 0.0)
        self._clock: float | None = None
        self._tokens = 0

    def start_clock(self) -> None:
        """Measure throughput from now on: compilation and evaluation don't count."""
        self._clock, self._tokens = time.perf_counter(), 0

    def add(self, first_step: int, count: int, metrics: Metrics) -> None:
        """Record the last call, and keep one that was just dispatched until it is ready."""
        self.wait()
        self._pending = first_step, count, metrics
        if _is_ready(metrics.loss):
            self.wait()

    def wait(self) -> None:
        """Record the pending call, but for its last line, which may get a validation loss.

        Raises FloatingPointError for the first step whose loss or gradient is not finite.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            *lines, last = self._lines(*pending)
            self._write(lines)
            self._held = last
            self._report(last["step"], last["loss"], last.get("tokens_per_second"))

    def add_evaluation(self, **losses: float) -> None:
        """Add to the last step's line, or begin that of step 0. Call `wait` before."""
        self._held = (self._held or {"step": 0}) | losses

    def finish(self) -> None:
        """Record all calls durably."""
        self.wait()
        self._write([], durable=True)

    def _lines(self, first_step: int, count: int, metrics: Metrics) -> list[dict[str, Any]]:
        rows = {
            name: np.asarray(getattr(metrics, name))[:count].tolist()
            for name in ("loss", "gradient_norm", "learning_rate")
        }
        lines: list[dict[str, Any]] = []
        for i in range(count):
            line = {"step": first_step + i + 1, **{name: row[i] for name, row in rows.items()}}
            if not (math.isfinite(line["loss"]) and math.isfinite(line["gradient_norm"])):
                self._write(lines)
                raise FloatingPointError(self._not_finite_message(line))
            lines.append(line)
        self._tokens += count * self._tokens_per_step
        lines[-1] |= self._measurements(lines[-1]["step"])
        return lines

    def _measurements(self, step: int) -> dict[str, Any]:
        now = time.perf_counter()
        measured: dict[str, Any] = {
            "tokens": step * self._tokens_per_step,
            "seconds": round(now - self._started, 3),
        }
        if self._clock is not None:
            speed = self._tokens / (now - self._clock)
            measured["tokens_per_second"] = round(speed, 1)
            if self._peak and self._flops_per_token:
                utilisation = speed * self._flops_per_token / self._peak
                measured["model_flops_utilisation"] = round(utilisation, 5)
        if (memory := memory_in_use()) is not None:
            measured["memory_bytes"] = memory
        return measured

    def _write(self, lines: list[dict[str, Any]], *, durable: bool = False) -> None:
        """Append the held line and these."""
        if self._held is not None:
            lines, self._held = [self._held, *lines], None
        if process_index() == 0:
            self._run.append_metrics(lines, durable=durable)
        for tracker in self._trackers:
            for line in lines:
                tracker.log(line)

    def _not_finite_message(self, line: dict[str, Any]) -> str:
        step = line["step"]
        starts = window_starts(
            self._config.seed,
            step - 1,
            self._config.steps_per_call,  # the shape that is compiled already
            self._training_tokens,
            self._config.batch_size,
            self._config.model.block_size,
        )[0].tolist()
        name = "gradient_norm" if math.isfinite(line["loss"]) else "loss"
        return (
            f"{name} is {line[name]} at step {step} (learning_rate {line['learning_rate']:.3g}, "
            f"gradient_norm {line['gradient_norm']:.3g}; the batch's windows start at tokens "
            f"{', '.join(map(str, starts[:8]))}{', …' if starts[8:] else ''} of the training text)"
        )


def _is_ready(array: Any) -> bool:
    return array.is_ready()
