"""Compile train steps for hardware that this machine lacks: the table in docs/scale.md.

    JAX_PLATFORMS=cpu python benchmarks/ahead.py

Each step is compiled for each mesh (jgpt[tpu] and jgpt[cuda12] bring the compilers).
"""

import argparse
import dataclasses
import time

import runner

from jgpt import preset
from jgpt.cli.console import describe_ahead
from jgpt.training.ahead import compile_ahead

CASES = (
    ("gpt2", "v5e:2x2", 16, ("data=4", "fsdp=4")),
    ("gpt2", "h100:8", 128, ("data=8", "fsdp=8")),
    ("gpt2-xl", "v5e:4x4", 32, ("fsdp=16", "fsdp=8,tensor=2")),
    ("modern-7b", "v5p:8x8x16", 1024, ("fsdp=1024", "data=16,fsdp=64", "fsdp=128,tensor=8")),
)
"""A preset, chips, sequences a step, and meshes to try."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="of this preset only")
    only = parser.parse_args().only
    steps = []
    for name, on, batch_size, meshes in CASES:
        for mesh in meshes if only in (None, name) else ():
            try:
                steps.append(measure(name, on, batch_size, mesh))
            except ValueError as error:  # it doesn't fit
                print(f"\n{name}, {mesh}: {error}")
    if only is None:
        print(runner.write("ahead", {"steps": steps}))


def measure(name: str, on: str, batch_size: int, mesh: str) -> dict:
    """A preset's step for chips on a mesh; its blocks are scanned, which changes no figure."""
    config = preset(name)
    model = dataclasses.replace(config.model, scan_layers=True)
    config = dataclasses.replace(
        config, model=model, batch_size=batch_size, micro_batches=1, mesh=mesh, steps_per_call=2
    )
    began, busy = time.perf_counter(), time.process_time()
    step = compile_ahead(config, on)
    took = time.perf_counter() - began, time.process_time() - busy
    print(f"\n{name}, {batch_size} sequences, compiled in {took[1]:.0f} CPU seconds")
    print(*describe_ahead(step), sep="\n", flush=True)
    return {
        "preset": name,
        "batch_size": batch_size,
        "compile_seconds": took[0],
        "compile_cpu_seconds": took[1],
        **dataclasses.asdict(step),
    }


if __name__ == "__main__":
    main()
