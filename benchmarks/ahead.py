"""Compile train steps for hardware that this machine lacks: the table in details.md.

    JAX_PLATFORMS=cpu python benchmarks/ahead.py
    JAX_PLATFORMS=cpu python benchmarks/ahead.py --budget

Each step is compiled for each mesh (jgpt[tpu] and jgpt[cuda12] bring the compilers). `--budget`
writes down the costs of a few programs, with which `make test-ahead` compares those of today: a
change that costs something has to change the record, too.
"""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import runner
import tyro
from collectives import sum_by_kind

from jgpt import TrainConfig, preset
from jgpt.cli.report import describe_ahead
from jgpt.training import ahead
from jgpt.training.state import abstract_state, dropout_stream
from jgpt.training.step import make_train_steps

CASES = (
    ("gpt2", "v5e:2x2", 16, ("data=4", "fsdp=4")),
    ("gpt2", "h100:8", 128, ("data=8", "fsdp=8")),
    ("gpt2-xl", "v5e:4x4", 32, ("fsdp=16", "fsdp=8,tensor=2")),
    ("modern-7b", "v5p:8x8x16", 1024, ("fsdp=1024", "data=16,fsdp=64", "fsdp=128,tensor=8")),
)
"""A preset, chips, sequences a step, and meshes to try."""
BUDGET = (
    ("modern", "h100:8", 16, "data=8"),
    ("modern", "v5e:2x2", 16, "data=4"),
    ("gpt2", "h100:8", 128, "fsdp=8"),
    ("gpt2", "v5e:2x2", 16, "data=4"),
)
"""The same, of programs whose costs are in the record `budget`."""


def main(budget: bool = False) -> None:
    """Compile the steps, print their costs, and write a record.

    Args:
        budget: Write the record of the budget instead.
    """
    if budget:
        print(runner.write("budget", {title(*case): costs(*case) for case in BUDGET}))
        return
    steps = []
    for name, on, batch_size, meshes in CASES:
        for mesh in meshes:
            began = time.perf_counter()
            busy = time.process_time()
            try:
                with compiled_text() as texts:
                    step = ahead.compile_ahead(configured(name, batch_size, mesh), on)
            except ValueError as error:  # it doesn't fit
                print(f"\n{name}, {mesh}: {error}")
                continue
            took = time.perf_counter() - began, time.process_time() - busy
            print(f"\n{name}, {batch_size} sequences, compiled in {took[1]:.0f} CPU seconds")
            print(*describe_ahead(step), sep="\n", flush=True)
            seconds = {"compile_seconds": took[0], "compile_cpu_seconds": took[1]}
            sizes = {"preset": name, "batch_size": batch_size}
            sent = [dataclasses.asdict(each) for each in sum_by_kind(texts[-1])]
            found = {"collectives": sent, "kernels": kernels(texts[-1])}
            steps.append({**sizes, **seconds, **dataclasses.asdict(step), **found})
    print(runner.write("ahead", {"steps": steps}))


def configured(name: str, batch_size: int, mesh: str) -> TrainConfig:
    """A preset with scanned blocks, which compile faster and change no figure."""
    config = preset(name)
    vocabulary = max(config.model.vocab_size, 65)  # data decides it in a run
    model = dataclasses.replace(config.model, scan_layers=True, vocab_size=vocabulary)
    return dataclasses.replace(
        config, model=model, batch_size=batch_size, micro_batches=1, mesh=mesh, steps_per_call=2
    )


@contextlib.contextmanager
def compiled_text() -> Iterator[list[str]]:
    """The programs that are compiled inside, as HLO."""
    texts = []
    compile_steps = ahead.compile_steps

    def kept(config: TrainConfig) -> jax.stages.Compiled:
        compiled = compile_steps(config)
        texts.append(str(compiled.as_text()))
        return compiled

    ahead.compile_steps = kept
    try:
        yield texts
    finally:
        ahead.compile_steps = compile_steps


def kernels(text: str) -> list[str]:
    """Custom calls in a program, such as cuDNN's attention."""
    return sorted(set(re.findall(r'custom_call_target="([^"]+)"', text)))


def title(name: str, on: str, batch_size: int, mesh: str) -> str:
    return f"{name} on {on}, {mesh}, {batch_size} sequences"


def costs(name: str, on: str, batch_size: int, mesh: str) -> dict[str, int | str]:
    """The costs of a step's program. Bytes are per chip; the FLOPs are those of all chips."""
    config = configured(name, batch_size, mesh)
    with compiled_text() as texts:
        step = ahead.compile_ahead(config, on)
    found: dict[str, int | str] = {
        "FLOPs of products": product_flops(config),
        "bytes of parameters and optimizer": step.memory.state,
        "bytes of temporaries": step.memory.working,
        "kernels": ", ".join(kernels(texts[-1])),
    }
    for each in sum_by_kind(texts[-1]):
        found[f"{each.kind}, count"] = each.count
        found[f"{each.kind}, bytes sent"] = each.sent
    return found


def product_flops(config: TrainConfig) -> int:
    """FLOPs of all matrix products that a step describes, without fused attention kernels."""
    windows = jax.ShapeDtypeStruct((2, config.batch_size, config.model.block_size + 1), jnp.int32)
    given = abstract_state(config), windows, dropout_stream(config.seed), 0, 0
    steps: Any = make_train_steps(dataclasses.replace(config, mesh=None))
    return flops_of(steps.trace(*given).jaxpr.jaxpr)


def flops_of(jaxpr: Any) -> int:
    """Those of a scan as often as it runs; those of a loop over steps once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * math.prod((*equation.outvars[0].aval.shape, *sizes))
        inside = jax.tree.leaves(list(equation.params.values()))
        jaxprs = [getattr(each, "jaxpr", each) for each in inside]
        within = sum(flops_of(each) for each in jaxprs if hasattr(each, "eqns"))
        total += within * equation.params.get("length", 1)
    return total


if __name__ == "__main__":
    tyro.cli(main)
