"""What every benchmark shares: where and with what it ran, and its JSON result."""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "jax",
    "flax",
    "optax",
    "jaxtyping",
    "beartype",
    "torch",
    "transformers",
    "ctranslate2",
    "numpy",
)


def provenance() -> dict[str, Any]:
    """The machine, the versions and the command of this benchmark."""
    import jax

    return {
        "command": " ".join(
            ["python", *map(_portable, [os.path.relpath(sys.argv[0]), *sys.argv[1:]])]
        ),
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def write(name: str, results: dict[str, Any]) -> Path:
    """Write a result with its provenance to `results/NAME.json`."""
    return write_to(RESULTS / f"{name}.json", results)


def write_to(path: Path, results: dict[str, Any]) -> Path:
    """The same, to a file."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(provenance() | results, indent=2) + "\n")
    return path


def spread(values: list[float]) -> str:
    """The median, and the smallest and the largest."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _portable(argument: str) -> str:
    """A path of this machine says nothing elsewhere."""
    return "PATH" if os.path.isabs(argument) else argument


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
