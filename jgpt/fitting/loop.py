"""The training loop, which decides when to step, estimate, evaluate, save and stop."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jgpt.data.batches import batches, resident
from jgpt.data.own_batches import own_batches
from jgpt.fitting.metrics import MetricsLogger
from jgpt.fitting.prepare import PreparedRun
from jgpt.fitting.profiling import compilations_watched
from jgpt.fitting.progress import Progress
from jgpt.fitting.stopping import TrainingStopped
from jgpt.hardware import process_count, process_index, release_memory
from jgpt.parallel.processes import Vote, raise_in_all_processes
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import CHECKPOINTS
from jgpt.training.evaluation import EvaluationPlan, Evaluator
from jgpt.training.state import TrainState, dropout_stream, is_finite

SECONDS_BETWEEN_SAVES = 30.0
"""The largest age of a checkpoint until the first evaluation, if saving is quick.

Without them, the first checkpoint of the default preset came at step 425.
"""
SAVING_SHARE = 0.01
"""The largest share of the time until the first evaluation that these checkpoints take."""
SECONDS_PER_CALL = 10.0
"""The longest call of steps until the first evaluation, so that checkpoints can be saved in
time."""


class Training:
    """A run's training: it makes calls of many steps, and reads the metrics of a call during the
    next.

    It takes over the state: each call of steps donates its arrays, so nothing else may keep them.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        state: TrainState,
        train_steps: jax.stages.Wrapped,
        checkpoints: Checkpoints,
        logger: MetricsLogger,
        progress: Progress,
        *,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config = prepared.config.trained
        self.dataset = prepared.dataset
        self.evaluations = prepared.evaluations
        self.state = state
        self.train_steps = train_steps
        self.checkpoints = checkpoints
        self.logger = logger
        self.progress = progress
        self.should_stop = should_stop

        self.own_batches = own_batches(self.config, self.dataset)
        if self.own_batches is None:
            self.tokens = resident(self.dataset.train)
        self.key = dropout_stream(self.config.seed)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
        self.evaluator = self._make_evaluator()
        self.first_step = int(state.step)
        self.step = self.first_step

        lines = checkpoints.run.metrics()
        self.losses = _comparable_losses(lines, self.evaluations)
        # Until the first evaluation, estimates are ever further apart, at 1/16 to 1/2 of its step,
        # and the first one saves a checkpoint.
        interval = self.config.eval_interval
        early_steps = {interval // 16, interval // 8, interval // 4, interval // 2}
        early_steps.discard(0)  # of a short interval
        self.estimate_steps = {step for step in early_steps if step > self.step}
        if self.step == 0 and not lines:
            self.estimate_steps.add(0)
        self.first_save = min(early_steps, default=interval)
        # Two votes, since processes have to agree on each: to stop, and to save.
        self.vote = Vote()
        self.save_vote = Vote()
        self.last_save = time.monotonic()

    def _make_evaluator(self) -> Evaluator:
        """Make the evaluator of the planned targets."""
        held_out = self.dataset.validation
        spread_targets = None
        if self.evaluations.spread:
            spread_targets = self.evaluations.targets
        else:
            held_out = held_out[: self.evaluations.targets + 1]  # the first token is not a target
        return Evaluator(self.config, held_out, self.parameters, spread_targets=spread_targets)

    def run(self, *, evaluate_first: bool) -> None:
        """Train to the last step, or until the losses stop falling.

        With `evaluate_first`, it begins with the interrupted evaluation of the first state.
        """
        patience = self.config.patience
        is_warm = False
        with contextlib.ExitStack() as watch, self._last_good_state_saved():
            if evaluate_first:
                self._evaluate()
            while self.step < self.config.steps and not _stops_early(self.losses, patience):
                if self.step in self.estimate_steps:
                    self._estimate()
                self._save_if_due()
                self._stop_if_asked()
                self._take_steps()
                is_last = self.step == self.config.steps
                if is_last or self.step % self.config.eval_interval == 0:
                    self._evaluate()
                    if not is_warm:
                        # All programs are compiled by now, so that a further compilation is a
                        # mistake.
                        release_memory()
                        watch.enter_context(compilations_watched(self.progress.warned))
                        is_warm = True
        if self.logger.tracker_failure is not None:  # during the last call
            self.progress.warned(str(self.logger.tracker_failure))
        if self.step < self.config.steps:
            self.progress.warned(
                f"stopped at step {self.step} of {self.config.steps}: no better validation loss "
                f"in `patience={patience!r}` evaluations"
            )

    @contextlib.contextmanager
    def _last_good_state_saved(self) -> Iterator[None]:
        """Save the last good state after a loss or gradient that is not finite, and name its
        checkpoint."""
        try:
            yield
        except FloatingPointError as error:
            self.logger.finish()
            step = int(self.state.step)
            is_good = self._state_is_good()
            # A step that was not finite was skipped; the state at the start needs no checkpoint.
            if is_good and self.first_step < step < self.step:
                self.checkpoints.save(self.state, None)
            # A pending checkpoint doesn't count yet: a loss that exploded right after an evaluation
            # was reported with "nothing was saved yet".
            self.checkpoints.wait()
            saved_steps = self.checkpoints.steps()
            good_steps = [saved for saved in saved_steps if is_good or saved < step]
            advice = "nothing was saved yet"
            if good_steps:
                advice = f"checkpoint {good_steps[-1]} is kept"
            if saved_steps and saved_steps[-1] not in good_steps:
                folder = self.checkpoints.run.path / CHECKPOINTS / str(saved_steps[-1])
                advice = f"delete {folder}, whose loss is not finite either; otherwise {advice}"
            raise FloatingPointError(f"{error}; {advice}") from None

    def _state_is_good(self) -> bool:
        """Return whether training can continue: the state may be finite although its loss is
        not."""
        if not is_finite(self.config, self.state):
            return False
        return math.isfinite(self.evaluator.estimate(self.state.weights))

    def _save(self) -> None:
        """Record the metrics and save the state. Raises FloatingPointError if it isn't finite."""
        self.logger.finish()
        self._require_finite_state()
        self.checkpoints.save(self.state, None)
        self.last_save = time.monotonic()

    def _require_finite_state(self) -> None:
        if not is_finite(self.config, self.state):
            raise FloatingPointError(
                f"the parameters are not finite after step {self.step}: lower `learning_rate`"
            )

    def _estimate(self) -> None:
        """Estimate the validation loss, and save at the first estimate."""
        # The estimates are about 1% of a run.
        self.logger.wait()
        loss = self.evaluator.estimate(self.state.weights)
        if math.isfinite(loss):  # if not, the next step stops the run
            self.logger.add_evaluation(validation_estimate=loss)
            self.progress.estimated(self.step, loss)
        if self.step == self.first_save and math.isfinite(loss):
            self._save()
        self.logger.start_clock()

    def _save_if_due(self) -> None:
        """Save often enough, until the first evaluation, that little is lost at any time.

        Process 0 decides by its clock. After that, each evaluation saves.
        """
        if self.step >= self.config.eval_interval:
            return
        is_due = False
        if process_index() == 0:
            waited = time.monotonic() - self.last_save
            # A save that takes one second pays after 100 seconds of steps.
            interval = max(SECONDS_BETWEEN_SAVES, self.checkpoints.seconds() / SAVING_SHARE)
            is_due = waited >= interval
        if self.save_vote(is_due):
            self._save()
            self.save_vote = Vote()  # requests from before this save are done
            self.logger.start_clock()

    def _stop_if_asked(self) -> None:
        """Save and stop if any process was asked to, or can't write."""
        has_failed = (
            self.checkpoints.have_failed()
            or self.logger.failure is not None
            or self.logger.tracker_failure is not None
        )
        # All processes vote, so that all stop at the same step.
        if self.vote(self.should_stop() or has_failed):
            self._save()
            self.checkpoints.wait()
            with raise_in_all_processes():
                if self.logger.tracker_failure is not None:
                    raise self.logger.tracker_failure
            raise TrainingStopped(self.step, self.checkpoints.run.path)

    def _take_steps(self) -> None:
        """Make one call of steps, at most to the next evaluation or estimate."""
        first = self.step
        count = self._steps_of_call(first)
        windows = self._windows(first, count)
        if first == self.first_step:
            # A call of no steps compiles the program, so that compilation isn't measured as
            # training.
            self.state, _ = self.train_steps(self.state, windows, self.key, 0, first)
            release_memory()
            self.logger.start_clock()
        self.state, metrics = self.train_steps(self.state, windows, self.key, count, first)
        self.step = first + count
        self.logger.add(first, count, metrics)

    def _windows(self, first: int, count: int) -> Any:
        """Return the windows of a call's steps, or the batches that the user's function makes."""
        config = self.config
        if self.own_batches is not None:
            try:
                return self.own_batches.of_steps(first, config.steps_per_call, count)
            except Exception:
                # The steps so far are not lost by a mistake in a later batch.
                if first > self.first_step:
                    self._save()
                    self.checkpoints.wait()
                raise
        return batches(
            self.tokens,
            config.seed,
            first,
            steps=config.steps_per_call,
            batch_size=config.batch_size,
            block_size=config.model.block_size,
            count=count,
            shares=self.dataset.shares,
        )

    def _steps_of_call(self, first: int) -> int:
        """Return the number of steps in the call that begins with step `first`."""
        config = self.config
        most = config.steps_per_call
        if process_count() == 1:
            # Only in a single process, since others lack this clock and display and must take equal
            # steps.
            most = min(most, self.progress.most_steps or most)
            speed = self.logger.tokens_per_second
            if speed is not None and first < config.eval_interval:
                tokens_per_step = config.batch_size * config.model.block_size
                steps_in_time = int(SECONDS_PER_CALL * speed / tokens_per_step)
                most = min(most, max(1, steps_in_time))
        next_evaluation = (first // config.eval_interval + 1) * config.eval_interval
        pauses = {next_evaluation, config.steps, *self.estimate_steps}
        next_pause = min(step for step in pauses if step > first)
        return min(most, next_pause - first)

    def _evaluate(self) -> None:
        """Save the state, evaluate it, and record its loss.

        An evaluation may take long, and a crash or a signal during it must lose no step. Until the
        loss is known, the line of metrics is kept in the checkpoint. A resumed run evaluates again.
        """
        line = self.logger.unevaluated()
        # A checkpoint that can't be trained further is never saved. The step that breaks the
        # weights has a finite loss itself, so its loss can't tell.
        if is_finite(self.config, self.state):
            self.checkpoints.save(self.state, None, unevaluated=line)
        loss = self.evaluator.exact(self.state.weights, self._between_calls)
        self._require_finite(loss)
        self._require_finite_state()
        losses = {"validation_loss": loss}
        exact = None
        if self.evaluations.exact_last and self.step == self.config.steps:
            all_targets = Evaluator(self.config, self.dataset.validation, self.parameters)
            exact = all_targets.exact(self.state.weights, self._between_calls)
            self._require_finite(exact)
            losses["exact_validation_loss"] = exact
        self.losses.append(loss)
        # The line is written before the checkpoint's loss: after a crash in between, it is
        # evaluated again.
        self.logger.add_evaluation(**losses)
        self.logger.finish()
        self.progress.evaluated(self.step, loss)
        if exact is not None:
            self.progress.evaluated_exactly(self.step, exact)
        self.checkpoints.evaluated(self.step, loss)
        self.logger.start_clock()

    def _between_calls(self, done: int, targets: int) -> None:
        """Report an evaluation and check for a stop between its calls."""
        self.progress.evaluating(done, targets)
        self._stop_if_asked()

    def _require_finite(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        # It was saved before its loss was known, and would be the one to resume from.
        self.checkpoints.discard(self.step)
        advice = "lower `learning_rate`"
        # The average is what was evaluated, so it may be the cause even if the weights are fine.
        if self.config.optimizer.ema_decay > 0:
            advice = "lower `ema_decay` or `learning_rate`"
        raise FloatingPointError(f"the validation loss is {loss} after step {self.step}: {advice}")


def _comparable_losses(lines: list[dict[str, Any]], evaluations: EvaluationPlan) -> list[float]:
    """Return the validation losses so far over the same targets as this start's evaluations."""
    losses = []
    for line in lines:
        if "validation_loss" in line and line["step"] > evaluations.comparable_after:
            losses.append(line["validation_loss"])
    return losses


def _stops_early(losses: list[float], patience: int | None) -> bool:
    """Return whether `patience` evaluations have passed since the first one with the lowest
    loss."""
    if patience is None or not losses:
        return False
    best = losses.index(min(losses))
    evaluations_since = len(losses) - 1 - best
    return evaluations_since >= patience
