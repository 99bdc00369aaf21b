"""Scanning over the blocks on this machine: what a step takes to compile, and to run.

    JAX_ENABLE_COMPILATION_CACHE=false python benchmarks/scan_layers.py

Compilation is in seconds of processor time, with tracing and one step.
"""

from dataclasses import replace

import tyro
from runner import Rounds, compare
from stepping import variant

from jgpt.presets import preset


def main(options: Rounds) -> None:
    variants = []
    for layers in (4, 12, 36):
        for name, scan in (("loop", False), ("scan", True)):
            config = preset("nanogpt-cpu")
            model = replace(config.model, num_layers=layers, scan_layers=scan)
            config = replace(config, model=model, steps_per_call=4)
            variants.append(variant(f"{name}, {layers} layers", config, "--steps", 4))
    compare("scan_layers", variants, options)


if __name__ == "__main__":
    main(tyro.cli(Rounds))
