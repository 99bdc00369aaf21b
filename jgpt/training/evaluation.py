"""Evaluations: the number of targets, and the mean loss over calls of bounded work."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from jgpt.config import TrainConfig
from jgpt.data.batches import windows_by_number
from jgpt.nn.models import Weights
from jgpt.parallel.rules import shard_by_name
from jgpt.shapes.contract import record, typed
from jgpt.training.objective import loss_dtype
from jgpt.training.step import make_eval_step

SMALL_SPLIT = 131_072
"""The number of targets up to which `eval_tokens=auto` evaluates the whole split."""
TRAINING_TO_EVALUATIONS = 19
"""The least ratio of training FLOPs to evaluation FLOPs: evaluations take at most 1/20 of both."""
WORK_PER_CALL = 100_000_000_000
"""The FLOPs of a call, chosen so that a laptop's processor answers a signal within a few
seconds."""
BATCHES_PER_SUM = 4096
"""The number of batches after which the float32 sum of losses is added to a float64 sum. Over 10
million batches, float32 alone is off by 0.0001 nats. Smaller splits keep the sum of earlier
versions."""
RESIDENT_WINDOWS = 1 << 26
"""The size in bytes up to which windows stay on the device between evaluations."""
ESTIMATE_TOKENS = 2048
"""The least number of validation tokens in an estimate."""

Between = Callable[[int, int], None]
"""A function that is called before each of several calls, with the number of targets evaluated so
far and the number of all targets."""


@dataclass(frozen=True)
class EvaluationPlan:
    """The number of evaluations of a run, and their validation targets."""

    evaluations: int
    targets: int
    """The number of targets in each evaluation."""
    split_targets: int
    """The number of targets in the whole validation split."""
    spread: bool
    """Whether the targets are spread evenly over the split; otherwise they are the first ones."""
    exact_last: bool
    """Whether the last step is evaluated on the whole split, too."""
    share: float
    """The evaluations' share of the run's FLOPs."""
    comparable_after: int = 0
    """Losses up to this step were computed over other targets. 0 means that all losses have the
    same targets."""
    interrupted: bool = False
    """Whether the run resumes at a step whose evaluation was interrupted, which then comes
    first."""

    @property
    def over(self) -> str:
        """The words after a loss if it is not over the whole split, else an empty text."""
        if self.targets == self.split_targets:
            return ""
        return f" over {self.targets:,} of {self.split_targets:,} tokens"


def plan_evaluations(
    config: TrainConfig,
    validation_tokens: int,
    *,
    targets: int | None = None,
    comparable_after: int = 0,
) -> EvaluationPlan:
    """Plan the evaluations of a config on a validation split.

    `targets` is the number that `eval_tokens=auto` chose when the run began. It stays when the run
    is trained further, so that the losses stay comparable. `comparable_after` is the step after
    which all losses have the same targets.
    """
    split = validation_tokens - 1  # the first token is not a target
    # rounded up: the last step is evaluated, too
    evaluations = -(-config.steps // config.eval_interval)
    # The unit is a forward pass over a token; a train step takes three times as many FLOPs.
    training = 3 * config.steps * config.batch_size * config.model.block_size
    budget = training // TRAINING_TO_EVALUATIONS
    spread = False
    exact_last = False
    if config.eval_tokens is None:  # every evaluation is over the whole split
        targets = split
    elif config.eval_tokens != "auto":
        # The first targets, not spread, and never more than the split has.
        targets = min(config.eval_tokens - 1, split)
    else:
        if targets is None:
            targets = _affordable_targets(config, split, evaluations, budget)
        spread = targets < split
        exact_last = spread and evaluations * targets + split <= budget
    taken = evaluations * targets
    if exact_last:
        taken += split
    return EvaluationPlan(
        evaluations=evaluations,
        targets=targets,
        split_targets=split,
        spread=spread,
        exact_last=exact_last,
        share=taken / (taken + training),
        comparable_after=comparable_after,
    )


def _affordable_targets(config: TrainConfig, split: int, evaluations: int, budget: int) -> int:
    """Return the number of targets in each evaluation: the whole split, or whole windows of it."""
    if split <= SMALL_SPLIT or evaluations * split <= budget:
        return split
    if split <= budget // 2:  # leaves room for the whole split after the last step
        budget -= split
    block_size = config.model.block_size
    affordable_windows = budget // evaluations // block_size
    windows = max(1, affordable_windows)  # one window even if it exceeds the budget
    return min(split, windows * block_size)


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
    as many batches as `WORK_PER_CALL` allows. If the windows are small, they stay on the device;
    otherwise only those of two calls are there.
    """

    @typed
    def __init__(
        self,
        config: TrainConfig,
        held_out: Integer[np.ndarray, " tokens"],
        parameters: int,
        *,
        spread_targets: int | None = None,
    ) -> None:
        """Prepare the windows. `spread_targets`, the number of targets in evenly spread windows, is
        by default that of all targets."""
        assert config.micro_batches != "auto"
        self._config = config
        self._tokens = held_out
        self._block_size = config.model.block_size
        self._rows = config.batch_size // config.micro_batches
        self.targets = len(held_out) - 1
        # the number of windows that cover the split
        self._covering = -(-self.targets // self._block_size)
        self._windows = self._covering  # the number of them that are evaluated
        if spread_targets is not None:
            self.targets = spread_targets
            self._windows = spread_targets // self._block_size
        self._batches = -(-self._windows // self._rows)
        work_per_batch = 2 * parameters * self._rows * self._block_size
        affordable_batches = max(WORK_PER_CALL // work_per_batch, 1)
        # Computed from all windows of the split, so that one program evaluates a part and the
        # whole.
        covering_batches = -(-self._covering // self._rows)
        self._batches_per_call = min(affordable_batches, covering_batches)
        self._evaluate_windows = make_eval_step(config.model)
        self._zero = np.zeros((), loss_dtype(config.model))
        self._all_batches = np.ones(self._batches, bool)
        self._few_batches = self._spread_batches()
        self._resident: tuple[list[Call], list[Call]] | None = None
        tokens = self._batches * self._rows * (self._block_size + 1)
        if 4 * tokens <= RESIDENT_WINDOWS:  # an int32 has 4 bytes
            self._resident = self._resident_calls()

    def _resident_calls(self) -> tuple[list[Call], list[Call]]:
        """Return the calls of an exact evaluation and those of an estimate, on the device."""
        all_calls = list(self._calls(self._all_batches))
        # An estimate counts other targets of the same windows, which are on the device only once.
        placed = {call.first_batch: call.windows for call in all_calls}
        few_calls = list(self._calls(self._few_batches, placed))
        return all_calls, few_calls

    @typed
    def exact(self, weights: Weights, between: Between = lambda done, targets: None) -> float:
        """Return the mean loss of all targets. `between` may raise an exception to end it early."""
        if self._resident is None:
            calls = self._calls(self._all_batches)
        else:
            calls = iter(self._resident[0])
        return self._mean(weights, calls, self.targets, between)

    @typed
    def estimate(self, weights: Weights) -> float:
        """Return the mean loss of a few batches spread over the windows.

        All estimates of a run together take about 1% of its time.
        """
        if self._resident is None:
            calls = self._calls(self._few_batches)
        else:
            calls = iter(self._resident[1])
        targets = 0
        for batch in np.flatnonzero(self._few_batches):
            targets += self._targets_of(int(batch))

        def uninterrupted(done: int, targets: int) -> None:
            """Do nothing: estimates end too soon to be interrupted."""

        return self._mean(weights, calls, targets, between=uninterrupted)

    @typed
    def _mean(
        self, weights: Weights, calls: Iterator[Call], targets: int, between: Between
    ) -> float:
        """Sum the losses over calls, and divide by `targets`.

        Each call adds to the sum of the call before on the device, so that the number of batches in
        a call changes no bit of the result.
        """
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
        return (total + float(partial)) / targets

    @typed
    def _spread_batches(self) -> Bool[np.ndarray, "{self._batches}"]:
        """Mark the batches of an estimate, spread evenly over all batches."""
        targets_per_batch = self._rows * self._block_size
        count = max(self._config.steps // 200, -(-ESTIMATE_TOKENS // targets_per_batch))
        numbers = np.linspace(0, self._batches - 1, min(count, self._batches)).astype(int)
        chosen = np.zeros(self._batches, bool)
        chosen[numbers] = True
        return chosen

    @typed
    def _calls(
        self,
        chosen: Bool[np.ndarray, "{self._batches}"],
        placed: Mapping[int, Int[Array, "batches batch window"]] | None = None,
    ) -> Iterator[Call]:
        """Yield the calls that evaluate the chosen batches; `placed` are windows on the device."""
        for first in range(0, self._batches, self._batches_per_call):
            # Every call has the same number of batches, so that there is one program.
            is_chosen = np.zeros(self._batches_per_call, bool)
            part = chosen[first : first + self._batches_per_call]
            is_chosen[: len(part)] = part
            if not is_chosen.any():
                continue
            windows, counts = self._read(first)
            counts &= is_chosen[:, None, None]
            if placed is None:
                device_windows = shard_by_name(jnp.asarray(windows), None, "batch", None)
            else:
                device_windows = placed[first]
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

    def _targets_of(self, batch: int) -> int:
        """Return the number of counted targets in a batch; the last batch has fewer."""
        targets_per_batch = self._rows * self._block_size
        return min(self.targets - batch * targets_per_batch, targets_per_batch)
