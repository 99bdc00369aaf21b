"""Resuming: which fields of a config may differ from those of the run."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jgpt.config import TOKENIZER_FIELDS, OptimizerConfig, TrainConfig
from jgpt.fields import values_without_code
from jgpt.training.schedule import learning_rate_schedule

MAY_DIFFER = (
    # The length, frequency and place of a run: none of them changes a step that is taken.
    "steps",
    "optimizer.schedule_steps",
    "steps_per_call",
    "sample_tokens",
    "patience",
    "eval_interval",
    "keep_best",
    "keep_last",
    "keep_every",
    "out",
    "name",
    "trackers",
    # what a machine decides
    "mesh",
    "micro_batches",
    "model.attention_kernel",
    "model.activation_dtype",
    # where the text lies, whose digest is compared, and what its tokenizer decides
    "dataset.data",
    "model.vocab_size",
)
MAY_BE_LOWERED = ("learning_rate", "muon_learning_rate", "embedding_learning_rate")
OF_THE_STATE = (
    "model.",
    "optimizer.optimizer",
    "optimizer.embedding_learning_rate",
    "optimizer.gradient_clip",
    "optimizer.ema_decay",
    "optimizer.trainable",
)
"""The prefixes of fields that decide which arrays a train state has."""
OF_THE_TOKENIZER = tuple(f"dataset.{name}" for name in TOKENIZER_FIELDS)
"""Another tokenizer would give each embedding another text."""


def require_same_run(saved: TrainConfig, config: TrainConfig, checkpoints: Sequence[int]) -> None:
    """Raise ValueError naming the fields of a config that a run can't be resumed with.

    Learning rates may be lower. An imported run, whose only checkpoint is of step 0, must keep only
    the fields that determine its state.
    """
    may_differ: set[str] = set(MAY_DIFFER)
    old_rates = saved.optimizer
    for name in MAY_BE_LOWERED:
        if _is_lowered(old_rates, config.optimizer, name):
            may_differ.add(f"optimizer.{name}")
    if _is_lowered(old_rates, config.optimizer, "learning_rate"):
        may_differ.add("optimizer.min_learning_rate")
    differences = []
    old_fields = dict(fields_of(saved))
    new_fields = dict(fields_of(config))
    for name in old_fields | new_fields:
        old = old_fields.get(name)
        new = new_fields.get(name)
        # Nothing has been trained yet that other values would contradict.
        is_free = list(checkpoints) == [0] and not name.startswith(
            (*OF_THE_STATE, *OF_THE_TOKENIZER)
        )
        if old != new and name not in may_differ and not is_free:
            differences.append(f"`{name}` is {old!r} in the run, {new!r} in the config")
    if differences:
        raise ValueError(
            f"the config doesn't match the run to resume: {'; '.join(differences)}. Use the "
            "same values, or another directory"
        )
    done = max(checkpoints, default=0)
    if config.steps < done:
        raise ValueError(
            f"`steps={config.steps!r}` is below the {done} steps that {config.out} has taken: "
            f"give `steps={done!r}` or more, or another directory"
        )


def with_lowered_floor(saved: OptimizerConfig, given: OptimizerConfig) -> OptimizerConfig:
    """Return the optimizer with `min_learning_rate` lowered by the factor of `learning_rate`."""
    if not _is_lowered(saved, given, "learning_rate"):
        return given
    floor = saved.min_learning_rate * given.learning_rate / saved.learning_rate
    return dataclasses.replace(given, min_learning_rate=min(given.min_learning_rate, floor))


def _is_lowered(saved: OptimizerConfig, given: OptimizerConfig, name: str) -> bool:
    old = getattr(saved, name, None)
    new = getattr(given, name, None)
    return old is not None and new is not None and new < old


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a config's fields, including nested ones, but not custom
    code."""
    for name, value in values_without_code(config).items():
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_learning_rate(saved: TrainConfig, config: TrainConfig, done: int) -> str | None:
    """Say that other steps make the learning rate jump at a resumed step; None if they don't."""
    if (
        not 0 < done < config.steps
        or saved.optimizer.learning_rate > config.optimizer.learning_rate
    ):
        return None  # no step is taken, or the rate was lowered on purpose
    before = _learning_rate(saved)(done - 1)
    after = _learning_rate(config)(done)
    expected = _learning_rate(saved)(done)
    if math.isclose(after, expected, rel_tol=1e-6, abs_tol=1e-12):
        return None
    span = saved.optimizer.schedule_steps or saved.steps
    return (
        f"{config.steps} steps instead of {saved.steps}: the learning rate jumps from "
        f"{before:.3g} to {after:.3g} at step {done + 1}; `schedule_steps={span!r}` keeps the "
        "schedule"
    )


def _learning_rate(config: TrainConfig) -> Callable[[int], float]:
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    return lambda step: float(jnp.asarray(schedule(step)))
