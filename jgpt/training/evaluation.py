"""Evaluations: the number of targets, and the mean loss over calls of bounded work."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from jgpt.config import TrainConfig
from jgpt.data.batches import windows_by_number
from jgpt.nn.models import Weights, abstract_model, named_parameters
from jgpt.parallel.rules import shard_by_name
from jgpt.shapes.contract import record, typed
from jgpt.training.objective import loss_dtype
from jgpt.training.step import make_eval_step

WORK_PER_CALL = 100_000_000_000
"""The FLOPs of a call, chosen so that a laptop's processor answers a signal within a few
seconds."""
BATCHES_PER_SUM = 4096
"""The number of batches after which the float32 sum of losses is added to a float64 sum. Over 10
million batches, float32 alone is off by 0.0001 nats."""

Between = Callable[[int, int], None]
"""A function that is called before each of several calls, with the number of targets evaluated so
far and the number of all targets."""


def targets_of(config: TrainConfig, validation_tokens: int) -> int:
    """Return the number of validation targets in each evaluation: the whole split, or windows."""
    split = validation_tokens - 1  # the first token is not a target
    if config.eval_tokens is None or split <= config.eval_tokens:
        return split
    block_size = config.model.block_size
    windows = max(1, config.eval_tokens // block_size)
    return min(split, windows * block_size)


def describe_targets(targets: int, split: int) -> str:
    """Return the words after a loss if it is not over the whole split, else an empty text."""
    if targets == split:
        return ""
    return f" over {targets:,} of {split:,} tokens"


@record
@dataclass(frozen=True)
class Call:
    """The arguments of the evaluation step in one call, on the device."""

    first_batch: int
    windows: Int[Array, "batches batch window"]
    counts: Bool[Array, "batches batch window-1"]


class Evaluator:
    """The mean loss of held-out targets, computed for any weights of a config's model.

    Batches are as large as micro-batches, which fit the device. A call of the compiled step takes
    as many batches as `WORK_PER_CALL` allows, and only the windows of two calls are on the device.
    """

    @typed
    def __init__(
        self,
        config: TrainConfig,
        held_out: Integer[np.ndarray, " tokens"],
    ) -> None:
        """Prepare the windows, which are spread evenly if `eval_tokens` are not all."""
        self._tokens = held_out
        self._block_size = config.model.block_size
        self._rows = config.batch_size // config.micro_batches
        self.targets = targets_of(config, len(held_out))
        # the number of windows that cover the split, and of those that are evaluated
        self._covering = -(-(len(held_out) - 1) // self._block_size)
        self._windows = min(self._covering, -(-self.targets // self._block_size))
        self._batches = -(-self._windows // self._rows)
        parameters = named_parameters(abstract_model(config.model)).values()
        size = sum(math.prod(parameter.shape) for parameter in parameters)
        work_per_batch = 2 * size * self._rows * self._block_size
        affordable_batches = max(WORK_PER_CALL // work_per_batch, 1)
        self._batches_per_call = min(affordable_batches, self._batches)
        self._evaluate_windows = make_eval_step(config.model)
        self._zero = np.zeros((), loss_dtype(config.model))

    @typed
    def mean(self, weights: Weights, between: Between = lambda done, targets: None) -> float:
        """Return the mean loss of the targets. `between` may raise an exception to end it early.

        Each call adds to the sum of the call before on the device, so that the number of batches in
        a call changes no bit of the result.
        """
        calls = self._calls()
        total = 0.0  # a Python float is a float64
        partial = self._zero
        batches_in_partial = 0
        several_calls = self._batches > self._batches_per_call
        call = next(calls, None)
        while call is not None:
            if several_calls:
                between(call.first_batch * self._rows * self._block_size, self.targets)
            result = self._evaluate_windows(weights, call.windows, call.counts, partial)
            # this is read and moved to the device while the last call computes
            call = next(calls, None)
            # The sum goes through the host: an array on the device could have another sharding than
            # the first zero, and the step would be compiled twice.
            partial = np.asarray(result)
            batches_in_partial += self._batches_per_call
            if batches_in_partial >= BATCHES_PER_SUM and call is not None:
                total += float(partial)
                partial = self._zero
                batches_in_partial = 0
        return (total + float(partial)) / self.targets

    def _calls(self) -> Iterator[Call]:
        """Yield the calls of an evaluation."""
        # Every call has the same number of batches, so that there is one program.
        for first in range(0, self._batches, self._batches_per_call):
            windows, counts = self._read(first)
            device_windows = shard_by_name(jnp.asarray(windows), None, "batch", None)
            device_counts = shard_by_name(jnp.asarray(counts), None, "batch", None)
            yield Call(first, device_windows, device_counts)

    @typed
    def _read(
        self, first_batch: int
    ) -> tuple[
        Int[np.ndarray, "{self._batches_per_call} {self._rows} {self._block_size}+1"],
        Bool[np.ndarray, "{self._batches_per_call} {self._rows} {self._block_size}"],
    ]:
        """Return the windows and the mask of a call; past the last window they are padding."""
        last_batch = first_batch + self._batches_per_call
        # The evaluated windows are numbered from 0, like all windows that cover the split.
        numbers = np.arange(first_batch * self._rows, last_batch * self._rows)
        padding = numbers >= self._windows
        if self._windows < self._covering:  # spread evenly over the split
            numbers = numbers * self._covering // self._windows
        numbers[padding] = self._covering  # past the last window, so that its targets don't count
        shape = (self._batches_per_call, self._rows)
        return windows_by_number(self._tokens, numbers.reshape(shape), self._block_size)
