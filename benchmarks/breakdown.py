"""Measure where a train step's time goes, by kind of operation, in this process.

The profiler names operations as the compiled program does. The text of the program says what is
inside each and which line of the model it comes from. Times are summed over a CPU's threads, which
run in parallel, so only the shares are meaningful.
"""

import re
import tempfile
from collections.abc import Iterator
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
    computations = COMPUTATION.findall(program)
    bodies = {name: list(INSTRUCTION.finditer(body)) for name, body in computations}

    def inside(instruction: Instruction) -> Iterator[Instruction]:
        yield instruction
        for name in re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", instruction[0]):
            for each in bodies[name]:
                yield from inside(each)

    return {
        instruction[1]: kind_of(list(inside(instruction)))
        for body in bodies.values()
        for instruction in body
        if instruction[2] not in HOLDING_OTHERS
    }


def kind_of(parts: list[Instruction]) -> str:
    products = [part[0] for part in parts if part[2] in ("dot", "convolution")]
    names = [name for part in parts for name in re.findall(r'op_name="(jit\([^"]*)"', part[0])]
    # forward and backward operations have jvp() in their names; an optimizer update may have the
    # last operation of a gradient fused into it
    of_loss = sum("jvp(" in name for name in names)
    is_optimizer = 2 * of_loss < len(names)
    if products and not is_optimizer:
        batched = any("batch_dims={0" in product for product in products)
        return ATTENTION if batched else DENSE
    if is_optimizer:
        return OPTIMIZER
    primitives = {name.rpartition("/")[2] for name in names}
    return REDUCTIONS if primitives & REDUCING else ELEMENTWISE


def traced_milliseconds(directory: Path, kind: dict[str, str]) -> Figures:
    """Milliseconds of a trace, by kind."""
    import jax

    file = next(directory.rglob("*.xplane.pb"))
    total: Figures = dict.fromkeys(KINDS, 0.0)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events if line.name.startswith("tf_XLA") else ():
                name = str(dict(event.stats).get("hlo_op") or event.name)
                if name in kind:
                    total[kind[name]] += event.duration_ns / 1e6
    return total


def step(config: str) -> Figures:
    """Milliseconds a step, by kind, of a TrainConfig as JSON."""
    import jax

    from jgpt.config import TrainConfig
    from jgpt.fields import from_json
    from jgpt.hardware import current_platform
    from jgpt.nn.precision import run_for_platform

    its = run_for_platform(from_json(TrainConfig, config), current_platform())
    compiled = traced(its).lower().compile()
    take = take_compiled(its, compiled)
    take()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            take()
        found = traced_milliseconds(Path(directory), kinds(compiled.as_text() or ""))
    return {name: time / STEPS for name, time in found.items()}
