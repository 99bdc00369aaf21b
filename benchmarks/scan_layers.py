"""Scanning over the blocks on this machine: what a step takes to compile, and to run.

    JAX_ENABLE_COMPILATION_CACHE=false python benchmarks/scan_layers.py

Compilation in seconds of processor time, with tracing; steps of both kinds are measured in turn.
"""

import dataclasses
import statistics
import time

import jax
import record
from stepping import jgpt_steps

from jgpt.config import TrainConfig
from jgpt.presets import preset
from jgpt.training.plan import compile_steps

LAYERS, ROUNDS, STEPS = (4, 12, 36), 5, 4


def config_of(layers: int, scan: bool) -> TrainConfig:
    config = preset("nanogpt-cpu")
    model = dataclasses.replace(config.model, num_layers=layers, scan_layers=scan)
    return dataclasses.replace(config, model=model, steps_per_call=STEPS)


def main() -> None:
    results = []
    print("| layers | compile: loop, s | scan, s | a step: loop, ms | scan, ms | scan / loop |")
    print("|---|---|---|---|---|---|")
    for layers in LAYERS:
        takers, compiled = {}, {}
        for scan in (False, True):
            jax.clear_caches()
            began = time.process_time()
            compile_steps(config_of(layers, scan))
            compiled[scan] = time.process_time() - began
            takers[scan] = jgpt_steps(config_of(layers, scan))
            takers[scan](STEPS)
        measured: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for scan, take in takers.items():
                began = time.perf_counter()
                take(STEPS)
                measured[scan].append(1e3 * (time.perf_counter() - began) / STEPS)
        loop, scanned = (statistics.median(measured[scan]) for scan in (False, True))
        ratio = statistics.median(map(lambda a, b: b / a, measured[False], measured[True]))
        cells = f"{compiled[False]:.1f} | {compiled[True]:.1f} | {loop:.1f} | {scanned:.1f}"
        print(f"| {layers} | {cells} | {ratio:.2f} |", flush=True)
        results.append(
            {
                "layers": layers,
                "compile_cpu_seconds": {"loop": compiled[False], "scan": compiled[True]},
                "milliseconds": {"loop": measured[False], "scan": measured[True]},
            }
        )
    record.write("scan_layers", {"preset": "nanogpt-cpu", "depths": results})


if __name__ == "__main__":
    main()
