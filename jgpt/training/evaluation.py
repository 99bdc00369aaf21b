"""Evaluations: how many targets they take, and the mean loss in calls of bounded work."""

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
"""`eval_tokens=auto` takes all of a split with at most this many targets."""
TRAINING_TO_EVALUATIONS = 19
"""The least ratio of FLOPs in training and in evaluations: evaluations are at most 1/20 of both."""
WORK_PER_CALL = 100_000_000_000
"""FLOPs of a call, so that a laptop's processor answers a signal within a few seconds."""
BATCHES_PER_SUM = 4096
"""After so many batches the float32 sum of losses is added to one in float64. Over 10 million
batches float32 alone is off by 0.0001 nats. Smaller splits keep the sum that they always had."""
RESIDENT_WINDOWS = 1 << 26
"""Windows of up to this many bytes stay on the device between evaluations."""
ESTIMATE_TOKENS = 2048
"""The fewest validation tokens of an estimate."""

Between = Callable[[int, int], None]
"""Called before each of several calls, with the number of targets evaluated so far, and of all."""


@dataclass(frozen=True)
class EvaluationPlan:
    """The evaluations of a run: how many, and of which validation targets."""

    evaluations: int
    targets: int
    """The targets of each evaluation."""
    split_targets: int
    """The targets of the whole validation split."""
    spread: bool
    """Whether they are spread evenly over the split; if not, they are its first ones."""
    exact_last: bool
    """Whether the last step is evaluated on the whole split, too."""
    share: float
    """The evaluations' share of the run's FLOPs."""
    comparable_after: int = 0
    """Losses up to this step are of other targets. 0: all losses are of the same ones."""
    interrupted: bool = False
    """Whether the run is resumed at a step whose evaluation was interrupted: it comes first."""

    @property
    def over(self) -> str:
        """What to say after a loss, if it is not of the whole split."""
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
    """Return the evaluations of a config on a validation split: a pure function of these.

    `targets` is what `eval_tokens=auto` gave when the run began. It stays when the run is trained
    further, so that its losses can be compared.
    """
    split = validation_tokens - 1  # the first token is nobody's target
    evaluations = -(-config.steps // config.eval_interval)  # rounded up: the last step has one
    # in forward passes over a token; a train step takes three times as many FLOPs
    training = 3 * config.steps * config.batch_size * config.model.block_size
    budget = training // TRAINING_TO_EVALUATIONS
    spread = False
    exact_last = False
    if config.eval_tokens is None:  # an evaluation is of the whole split
        targets = split
    elif config.eval_tokens != "auto":  # the first ones, not spread, and never more of them
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
    """Return the targets of each evaluation: the whole split, or whole windows of it."""
    if split <= SMALL_SPLIT or evaluations * split <= budget:
        return split
    if split <= budget // 2:  # the whole split after the last step, too
        budget -= split
    block_size = config.model.block_size
    affordable_windows = budget // evaluations // block_size
    windows = max(1, affordable_windows)  # even where one is more than the budget
    return min(split, windows * block_size)


@record
@dataclass(frozen=True)
class Call:
    """The arguments of the evaluation step in one call, on the device."""

    first_batch: int
    windows: Int[Array, "batches batch window"]
    counts: Bool[Array, "batches batch window-1"]


class Evaluator:
    """The mean loss of held-out targets, for any weights of a config's model.

    Batches are as large as micro-batches, which fit the device. A call of the compiled step takes
    as many of them as `WORK_PER_CALL` allows. Few windows stay on the device; of many only those of
    two calls are there.
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
        """`spread_targets` are the targets of whole windows, spread evenly; by default all."""
        assert config.micro_batches != "auto"
        self._config = config
        self._tokens = held_out
        self._block_size = config.model.block_size
        self._rows = config.batch_size // config.micro_batches
        self.targets = len(held_out) - 1
        self._covering = -(-self.targets // self._block_size)  # windows that cover the split
        self._windows = self._covering  # those of them that are evaluated
        if spread_targets is not None:
            self.targets = spread_targets
            self._windows = spread_targets // self._block_size
        self._batches = -(-self._windows // self._rows)
        work_per_batch = 2 * parameters * self._rows * self._block_size
        affordable_batches = max(WORK_PER_CALL // work_per_batch, 1)
        # of all windows that cover the split: a part and the whole are evaluated by one program
        covering_batches = -(-self._covering // self._rows)
        self._batches_per_call = min(affordable_batches, covering_batches)
        self._evaluate_windows = make_eval_step(config.model)
        self._zero = np.zeros((), loss_dtype(config.model))
        self._all_batches = np.ones(self._batches, bool)
        self._few_batches = self._spread_batches()
        self._resident: tuple[list[Call], list[Call]] | None = None
        size = 4 * self._batches * self._rows * (self._block_size + 1)  # int32 has 4 bytes
        if size <= RESIDENT_WINDOWS:
            all_calls = list(self._calls(self._all_batches))
            # an estimate counts others of the same windows, which are on the device once
            placed = {call.first_batch: call.windows for call in all_calls}
            few_calls = list(self._calls(self._few_batches, placed))
            self._resident = (all_calls, few_calls)

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

        All estimates of a run take about 1% of its time.
        """
        if self._resident is None:
            calls = self._calls(self._few_batches)
        else:
            calls = iter(self._resident[1])
        targets = 0
        for batch in np.flatnonzero(self._few_batches):
            targets += self._targets_of(int(batch))

        def uninterrupted(done: int, targets: int) -> None:
            """Nothing ends an estimate early: all of them take about 1% of a run."""

        return self._mean(weights, calls, targets, between=uninterrupted)

    @typed
    def _mean(
        self, weights: Weights, calls: Iterator[Call], targets: int, between: Between
    ) -> float:
        """Return the sum of losses over calls, divided by `targets`.

        Each call adds to the last one's sum on the device, so that how many batches a call has
        changes no bit of the result.
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
            call = next(calls, None)  # read and moved to the device while the last one computes
            # By way of the host, for an array on the device could have another sharding than the
            # first zero, and the step would be compiled twice.
            partial = np.asarray(result)
            batches_in_partial += self._batches_per_call
            if batches_in_partial >= BATCHES_PER_SUM and call is not None:
                total += float(partial)
                partial = self._zero
                batches_in_partial = 0
        return (total + float(partial)) / targets

    @typed
    def _spread_batches(self) -> Bool[np.ndarray, "{self._batches}"]:
        """Return the batches of an estimate, spread evenly over all."""
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
            # every call has as many batches, so that there is one program
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
        # the windows of the evaluation are numbered from 0, and so are all that cover the split
        numbers = np.arange(first_batch * self._rows, last_batch * self._rows)
        padding = numbers >= self._windows
        if self._windows < self._covering:  # spread evenly over the split
            numbers = numbers * self._covering // self._windows
        numbers[padding] = self._covering  # past the last one: all of its targets are uncounted
        shape = (self._batches_per_call, self._rows)
        return windows_by_number(self._tokens, numbers.reshape(shape), self._block_size)

    def _targets_of(self, batch: int) -> int:
        """Return the counted targets of a batch; the last one has fewer."""
        targets_per_batch = self._rows * self._block_size
        return min(self.targets - batch * targets_per_batch, targets_per_batch)
