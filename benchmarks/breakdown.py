"""Measure where a train step's time goes, by kind of operation, in this process.

The profiler names operations as the compiled program does. The text of the program says what is
inside each and which line of the model it comes from. Times are summed over a CPU's threads, which
run in parallel, so only the shares are meaningful.
"""

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from runner import Figures
from stepping import STEPS, take_compiled, traced

DENSE = "dense products"
ATTENTION = "attention's small products"
REDUCTIONS = "softmax, norms and loss"
ELEMENTWISE = "elementwise and moves"
OPTIMIZER = "optimizer, clipping and checks"
KINDS: tuple[str, ...] = DENSE, ATTENTION, REDUCTIONS, ELEMENTWISE, OPTIMIZER
REDUCING = {"reduce_max", "reduce_sum", "rsqrt", "exp", "log", "logsumexp", "take_along_axis"}
HOLDING_OTHERS = {"while", "call", "conditional"}
COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\(.*$", re.MULTILINE)
Instruction = re.Match[str]
"""A line of a program, with the groups name and opcode."""


def kinds(program: str) -> dict[str, str]:
    """The kind of each instruction of a program that a device runs as one operation."""
    bodies = {}
    for name, body in COMPUTATION.findall(program):
        bodies[name] = list(INSTRUCTION.finditer(body))

    def inside(instruction: Instruction) -> list[Instruction]:
        """The instruction, and those of the computations that it calls."""
        found = [instruction]
        for name in re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", instruction[0]):
            for called in bodies[name]:
                found += inside(called)
        return found

    kind = {}
    for instructions in bodies.values():
        for instruction in instructions:
            if instruction[2] not in HOLDING_OTHERS:
                kind[instruction[1]] = kind_of(inside(instruction))
    return kind


def kind_of(parts: list[Instruction]) -> str:
    products = []
    names = []
    for part in parts:
        names += re.findall(r'op_name="(jit\([^"]*)"', part[0])
        if part[2] in ("dot", "convolution"):
            products.append(part[0])
    # forward and backward operations have jvp() in their names; an optimizer update may have the
    # last operation of a gradient fused into it
    of_loss = sum("jvp(" in name for name in names)
    if 2 * of_loss < len(names):
        return OPTIMIZER
    if products:
        # A product of two activations is one for each sequence; one with a weight is one for all.
        if any("batch_dims={0" in product for product in products):
            return ATTENTION
        return DENSE
    primitives = {name.rpartition("/")[2] for name in names}
    if primitives & REDUCING:
        return REDUCTIONS
    return ELEMENTWISE


def traced_milliseconds(directory: Path, kind: dict[str, str]) -> Figures:
    """Milliseconds of a trace, by kind."""
    import jax

    file = next(directory.rglob("*.xplane.pb"))
    total: Figures = dict.fromkeys(KINDS, 0.0)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            if not line.name.startswith("tf_XLA"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                name = str(stats.get("hlo_op") or event.name)
                if name in kind:
                    total[kind[name]] += event.duration_ns / 1e6
    return total


def step(config: str) -> Figures:
    """Milliseconds a step, by kind, of a TrainConfig as JSON."""
    import jax

    from jgpt.config import TrainConfig
    from jgpt.fields import from_json
    from jgpt.machine import current_platform
    from jgpt.nn.precision import for_platform

    train_config = from_json(TrainConfig, config)
    model = for_platform(train_config.model, current_platform())
    train_config = replace(train_config, model=model)
    compiled = traced(train_config).lower().compile()
    take = take_compiled(train_config, compiled)
    take()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            take()
        program = compiled.as_text() or ""
        milliseconds = traced_milliseconds(Path(directory), kinds(program))
    return {name: time / STEPS for name, time in milliseconds.items()}
