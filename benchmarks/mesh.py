"""The train step on meshes of eight virtual CPU devices: differences, memory, communication.

    python benchmarks/mesh.py

For each run and mesh: the largest difference of a loss and of the weights' sum after 50 steps in
float64 from one device's, the bytes of the train state on a device, and the bytes that a step's
collectives give a device, as XLA's partitioner leaves them (bfloat16 products). The runs are those
of `tests/training/test_mesh.py`.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import record  # noqa: E402
import tyro  # noqa: E402

from jgpt.sharding import abstract_mesh, make_mesh  # noqa: E402
from jgpt.training.plan import bytes_of, bytes_on_each  # noqa: E402
from jgpt.training.step import abstract_state, state_specs  # noqa: E402
from tests.training.test_mesh import MESHES, RUNS, UNTIED, collectives, losses  # noqa: E402

ITEM_SIZES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2}


@dataclass(frozen=True)
class Options:
    steps: int = 50
    """Steps that are compared."""


def differences(name: str, mesh: str, steps: int, wanted: np.ndarray) -> dict[str, float | int]:
    config = RUNS[name]
    with jax.enable_x64(True), jax.set_mesh(make_mesh(mesh)):
        found = losses(config, steps)
        state, where = abstract_state(config), abstract_mesh(mesh)
        on_each = bytes_on_each(state, state_specs(config, where), where)
        return {
            "loss": float(np.abs(found[:-1] - wanted[:-1]).max()),
            "weights": float(abs(found[-1] / wanted[-1] - 1)),
            "state_bytes": bytes_of(state),
            "state_bytes_on_each": on_each,
        }


def communicated(mesh: str) -> dict[str, dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        found = collectives(UNTIED, mesh, Path(folder))
    totals: dict[str, dict[str, int]] = {}
    for (kind, dtype, shape), count in found.items():
        total = totals.setdefault(kind, {"count": 0, "bytes": 0})
        total["count"] += count
        total["bytes"] += count * math.prod(shape) * ITEM_SIZES[dtype]
    return totals


def main(options: Options) -> None:
    results: dict = {"differences": {}, "collectives": {}}
    for name, config in RUNS.items():
        with jax.enable_x64(True):
            wanted = losses(config, options.steps)
        for mesh in MESHES:
            measured = differences(name, mesh, options.steps, wanted)
            results["differences"].setdefault(name, {})[mesh] = measured
            print(f"{name:<12} {mesh:<24} {measured}", flush=True)
    for mesh in MESHES:
        results["collectives"][mesh] = communicated(mesh)
        print(f"{mesh:<24} {results['collectives'][mesh]}", flush=True)
    print(record.write("mesh", results))


if __name__ == "__main__":
    main(tyro.cli(Options))
