"""Resuming: the fields of a config that may differ, and their effect on the learning rate."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jgpt.config import TrainConfig
from jgpt.fields import values_without_code
from jgpt.runs.provenance import comparable_after, known_targets
from jgpt.training.evaluation import EvaluationPlan, plan_evaluations
from jgpt.training.schedule import learning_rate_schedule

_MAY_DIFFER = {
    # The length, frequency and place of a run: none of them changes a step that is taken.
    "steps",
    "eval_interval",
    "eval_tokens",
    "steps_per_call",
    "sample_tokens",
    "out",
    "name",
    "mesh",
    "patience",
    "keep_best",
    "keep_last",
    "keep_every",
    "trackers",
    "log",
    "log_interval",
    # from the tokenizer
    "model.vocab_size",
    # These may make the learning rate jump, which `describe_learning_rate` reports.
    "optimizer.schedule_steps",
}
_MAY_BE_LOWERED = (
    "learning_rate",
    "min_learning_rate",
    "muon_learning_rate",
    "embedding_learning_rate",
)
_OF_THE_STATE = (
    "model.",
    "optimizer.optimizer",
    "optimizer.embedding_learning_rate",
    "optimizer.gradient_clip",
    "optimizer.ema_decay",
    "optimizer.trainable",
)
"""The prefixes of fields that decide which arrays a train state has."""


def require_same_run(
    saved: TrainConfig,
    config: TrainConfig,
    checkpoints: Sequence[int] = (),
    *,
    text_is_known: bool = False,
) -> None:
    """Raise ValueError naming the fields of a config that a run can't be resumed with.

    The location of the text may differ if `text_is_known`, since the text itself is then compared.
    Learning rates may be lower. An imported run, whose only checkpoint is of step 0, must keep only
    the fields that determine its state.
    """
    may_differ = set(_MAY_DIFFER)
    if text_is_known:
        may_differ.add("dataset.data")
    for name, _, _ in _lowered_rates(saved, config):
        may_differ.add(f"optimizer.{name}")
    is_untrained = list(checkpoints) == [0]
    if is_untrained:
        # Nothing has been trained yet that other values would contradict.
        for name, _ in fields_of(saved):
            if not name.startswith(_OF_THE_STATE):
                may_differ.add(name)
    _require_equal_fields(saved, config, may_differ)
    done = max(checkpoints, default=0)
    if config.steps < done:
        raise ValueError(
            f"`steps={config.steps!r}` is below the {done} steps that {config.out} has taken: "
            f"give `steps={done!r}` or more, or another directory"
        )


def _require_equal_fields(saved: TrainConfig, config: TrainConfig, may_differ: set[str]) -> None:
    """Raise ValueError naming the fields that differ, but for those that may."""
    differences = []
    for (name, old), (_, new) in zip(fields_of(saved), fields_of(config), strict=True):
        if old != new and name not in may_differ:
            differences.append(f"`{name}` is {old!r} in the run, {new!r} in the config")
    if differences:
        raise ValueError(
            f"the config doesn't match the run to resume: {'; '.join(differences)}. Use the "
            "same values, or another directory"
        )


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a config's fields, including nested ones, but not custom
    code."""
    for name, value in values_without_code(config).items():
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_learning_rate(
    saved: TrainConfig, config: TrainConfig, checkpoints: list[int]
) -> str | None:
    """Describe how other steps and lower rates affect the learning rate; None if they don't.

    `checkpoints` are steps; the last one is resumed. If only the number of steps causes a jump, the
    text says how to avoid it.
    """
    done = max(checkpoints, default=0)
    if not 0 < done < config.steps:  # no step has been taken, or none will be
        return None
    span = saved.optimizer.schedule_steps or saved.steps
    new_span = config.optimizer.schedule_steps or config.steps
    is_same_schedule = (saved.steps, span) == (config.steps, new_span)
    lowered: list[str] = []
    for name, old, new in _lowered_rates(saved, config):
        lowered.append(f"`{name}={new:g}` instead of {old:g}")
    if is_same_schedule and not lowered:
        return None
    saved_rate = _learning_rate(saved)
    new_rate = _learning_rate(config)
    changes = lowered
    if not is_same_schedule:
        changes = [f"{config.steps} steps instead of {saved.steps}", *lowered]
    changed = f"{', '.join(changes)}: the learning rate"
    # A rate that was lowered on purpose may jump.
    if lowered:
        return (
            f"{changed} goes from {saved_rate(done - 1):.3g} to {new_rate(done):.3g} at step "
            f"{done + 1}"
        )
    # From a step where both schedules have the same rate, a run continues without a jump.
    steady = []
    for step in checkpoints:
        if math.isclose(saved_rate(step), new_rate(step), rel_tol=1e-6):
            steady.append(step)
    if done in steady:
        return (
            f"{changed} goes on from {saved_rate(done - 1):.3g} to {new_rate(done):.3g}, "
            "without a jump"
        )
    return (
        f"{changed} jumps from {saved_rate(done - 1):.3g} to {new_rate(done):.3g} at step "
        f"{done + 1}. Without a jump: {_way_without_a_jump(config, span, steady)}"
    )


def _way_without_a_jump(config: TrainConfig, span: int, steady: list[int]) -> str:
    """Describe how to resume with other steps and no jump of the rate, if that is possible.

    `span` is the number of steps in the saved schedule, `steady` the checkpoints where both agree.
    """
    same_schedule = dataclasses.replace(config.optimizer, schedule_steps=span)
    rate = _learning_rate(dataclasses.replace(config, optimizer=same_schedule))
    last_rate = rate(config.steps - 1)
    if last_rate > 0:  # at 0 the further steps would train nothing
        return f"`schedule_steps={span!r}` keeps the schedule ({last_rate:.3g} at the last step)"
    if steady:
        return f"delete the checkpoints after {steady[-1]} to resume from that one"
    return (
        "nothing, for the schedule ends at 0; wsd can be extended from a checkpoint before "
        "its decay, which `keep_every` keeps"
    )


def describe_micro_batches(previous: int | None, config: TrainConfig) -> str | None:
    """Describe the effect of a changed number of micro-batches; None if it is unchanged."""
    if previous is None or previous == config.micro_batches:
        return None
    differences = "gradients differ in rounding"
    if config.model.dropout > 0:
        differences += ", and dropout in its random numbers"
    return (
        f"{config.micro_batches} micro-batches fit here, {previous} were used before: {differences}"
    )


def resume_evaluations(
    saved: TrainConfig,
    config: TrainConfig,
    lines: list[dict[str, Any]],
    *,
    step: int,
    validation_tokens: int,
) -> tuple[EvaluationPlan, str | None]:
    """Plan the evaluations of a run that is resumed at a step; warn if their targets changed.

    `lines` are its provenance. The targets stay the same unless `eval_tokens` differs, even if more
    steps would allow `auto` more targets.
    """
    recorded = known_targets(lines)
    same_targets = None
    if recorded is not None and saved.eval_tokens == config.eval_tokens == "auto":
        same_targets, _ = recorded
    evaluations = plan_evaluations(config, validation_tokens, targets=same_targets)
    if recorded is None:  # an imported run, of which nothing was evaluated
        return evaluations, None
    targets, spread = recorded
    if (targets, spread) == (evaluations.targets, evaluations.spread):
        same = dataclasses.replace(evaluations, comparable_after=comparable_after(lines))
        return same, None
    changed = dataclasses.replace(evaluations, comparable_after=step)
    if step == 0:
        return changed, None
    before = _describe_targets(targets, spread, evaluations.split_targets)
    after = _describe_targets(evaluations.targets, evaluations.spread, evaluations.split_targets)
    return (
        changed,
        f"`eval_tokens={config.eval_tokens!r}` instead of {saved.eval_tokens}: "
        f"validation losses up to step {step} are over {before}, later ones over "
        f"{after}, and can't be compared with them. The best checkpoint and "
        "patience go by the later ones",
    )


def _describe_targets(targets: int, spread: bool, split_targets: int) -> str:
    if targets == split_targets:
        return f"all {targets:,} tokens"
    where = "the first of"
    if spread:
        where = "spread over"
    return f"{targets:,} tokens, {where} {split_targets:,}"


def _lowered_rates(saved: TrainConfig, config: TrainConfig) -> Iterator[tuple[str, float, float]]:
    """Yield the name, old and new value of each learning rate that was lowered."""
    for name in _MAY_BE_LOWERED:
        old = getattr(saved.optimizer, name)
        new = getattr(config.optimizer, name)
        if old is not None and new is not None and new < old:
            yield name, old, new


def _learning_rate(config: TrainConfig) -> Callable[[int], float]:
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    return lambda step: float(jnp.asarray(schedule(step)))
