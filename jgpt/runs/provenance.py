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
from jgpt.machine import current_platform, device_kinds

_PACKAGES = ("jgpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxtyping")


def provenance(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """Return a line of provenance.jsonl for a start or a resumption, without the step."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "seed": config.seed,
        **machine_choices(config),
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
        "versions": versions(),
    }


def machine_choices(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of a complete config that another machine would choose differently."""
    return {
        "mesh": config.mesh,
        "micro_batches": config.micro_batches,
        "attention_kernel": config.model.attention_kernel,
        "activation_dtype": config.model.activation_dtype,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that may change the numbers of a run."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
