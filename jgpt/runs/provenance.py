"""Provenance: versions, devices, data, tokenizer, command and seed of a run."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import sys
from typing import Any

from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.fields import as_dict
from jgpt.hardware import current_platform, device_kinds
from jgpt.training.evaluation import EvaluationPlan

_PACKAGES = ("jgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxtyping")


def provenance(
    config: TrainConfig, dataset: Dataset, evaluations: EvaluationPlan
) -> dict[str, Any]:
    """Return a line of provenance.jsonl for a start or a resumption, without the step.

    `config` is the one that is trained, with `micro_batches=auto` decided.
    """
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "seed": config.seed,
        "micro_batches": config.micro_batches,
        "eval_targets": evaluations.targets,
        "eval_spread": evaluations.spread,
        "comparable_after": evaluations.comparable_after,
        "optimizer": as_dict(config.optimizer),
        "tokens_sha256": dataset.digest,
        "tokens": len(dataset.train) + len(dataset.validation) + len(dataset.test),
        "tokenizer_sha256": hashlib.sha256(dataset.tokenizer.to_json().encode()).hexdigest(),
        "devices": device_kinds(),
        "backend": current_platform().name,
        # These may change the last bits of a step.
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def known_digest(lines: list[dict[str, Any]]) -> str | None:
    """Return the SHA-256 of the first start's tokens, or None for a run that was imported and not
    trained."""
    # A resumed run must have the first start's tokens, whatever later lines say.
    for line in lines:
        if "tokens_sha256" in line:
            return line["tokens_sha256"]
    return None


def known_micro_batches(lines: list[dict[str, Any]]) -> int | None:
    """Return the number of micro-batches in the last start that recorded it."""
    for line in reversed(lines):
        if "micro_batches" in line:
            return line["micro_batches"]
    return None


def known_targets(lines: list[dict[str, Any]]) -> tuple[int, bool] | None:
    """Return the number of targets of the last start's evaluations, and whether they are spread.

    None for a run that was imported and not trained.
    """
    # The last start, since a resumed run may have been given other `eval_tokens`.
    for line in reversed(lines):
        if "eval_targets" in line:
            return line["eval_targets"], line["eval_spread"]
    return None


def comparable_after(lines: list[dict[str, Any]]) -> int:
    """Return the step after which all evaluations have the same targets."""
    for line in reversed(lines):
        if "comparable_after" in line:
            return line["comparable_after"]
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
