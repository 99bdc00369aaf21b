"""Where a train step's time goes, by kind of operation: a trace beside the compiled program.

    python benchmarks/step_breakdown.py [--preset nanogpt-cpu] [--dtype float32]

The profiler names operations as the compiled program does. The text of the program says what is
inside each and which line of the model it comes from. Times are summed over the threads or streams
of the device, which run in parallel, so only the shares are meaningful.
"""

import collections
import dataclasses
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import runner
import tyro
from stepping import some_tokens

import jgpt
from jgpt.config import ComputeDtype
from jgpt.data.batches import batches, resident
from jgpt.hardware import current_platform
from jgpt.nn.precision import run_for_platform
from jgpt.training.step import dropout_stream, init_state, make_train_steps

DENSE, ATTENTION = "dense products", "attention's small products"
REDUCTIONS, ELEMENTWISE = "softmax, norms and loss", "elementwise and moves"
OPTIMIZER, OTHER = "optimizer, clipping and checks", "not in the program's text"
KINDS = (DENSE, ATTENTION, REDUCTIONS, ELEMENTWISE, OPTIMIZER, OTHER)
REDUCING = {"reduce_max", "reduce_sum", "rsqrt", "exp", "log", "logsumexp", "take_along_axis"}
HOLDING_OTHERS = {"while", "call", "conditional"}


@dataclass(frozen=True)
class Instruction:
    """One operation of a compiled program."""

    opcode: str
    line: str

    @property
    def calls(self) -> list[str]:
        return re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", self.line)

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""


def computations(program: str) -> dict[str, dict[str, Instruction]]:
    """The instructions of a program's text, by computation and name."""
    found: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    for line in program.splitlines():
        if begins := re.match(r"(?:ENTRY )?%([\w.\-]+) .*\{$", line):
            current = found.setdefault(begins[1], {})
        elif made := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\(", line):
            current[made[1]] = Instruction(made[2], line)
    return found


def kinds(program: str) -> dict[str, str]:
    """The kind of each instruction that a device runs as one operation."""
    bodies = computations(program)

    def inside(instruction: Instruction) -> Iterator[Instruction]:
        yield instruction
        for name in instruction.calls:
            for each in bodies.get(name, {}).values():
                yield from inside(each)

    return {
        name: kind_of(list(inside(instruction)))
        for body in bodies.values()
        for name, instruction in body.items()
        if instruction.opcode not in HOLDING_OTHERS
    }


def kind_of(parts: list[Instruction]) -> str:
    products = [part for part in parts if part.opcode in ("dot", "convolution")]
    names = [part.op_name for part in parts if part.op_name.startswith("jit(")]
    # forward and backward operations have jvp() in their names; an optimizer update may have the
    # last operation of a gradient fused into it
    of_loss = sum("jvp(" in name for name in names)
    is_optimizer = 2 * of_loss < len(names)
    if any("custom-call" in part.opcode and "fmha" in part.line for part in parts):
        return ATTENTION
    if products and not is_optimizer:
        batched = any("batch_dims={0" in part.line for part in products)
        return ATTENTION if batched else DENSE
    if any(part.opcode == "custom-call" and "gemm" in part.line for part in parts):
        return DENSE
    if is_optimizer:
        return OPTIMIZER
    primitives = {name.rpartition("/")[2] for name in names}
    return REDUCTIONS if primitives & REDUCING else ELEMENTWISE


def traced_milliseconds(directory: Path, kind: dict[str, str]) -> dict[str, float]:
    """Milliseconds of a trace, by kind."""
    file = next(directory.rglob("*.xplane.pb"))
    total: dict[str, float] = collections.defaultdict(float)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            # a GPU's streams, a TPU's operations, a CPU's threads
            if not line.name.startswith(("Stream", "XLA Ops", "tf_XLA")):
                continue
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                name = str(operation or event.name)
                if name in kind:
                    total[kind[name]] += event.duration_ns / 1e6
                elif plane.name.startswith("/device:") and operation:
                    total[OTHER] += event.duration_ns / 1e6
    return dict(total)


def main(
    preset: str = "nanogpt-cpu", dtype: ComputeDtype | None = None, steps: int = 20, rounds: int = 3
) -> None:
    """Trace a preset's train step, and print where the time goes.

    Args:
        dtype: The compute dtype; by default the preset's.
        steps: Steps in a trace.
        rounds: Number of traces.
    """
    config = jgpt.preset(preset)
    model = dataclasses.replace(config.model, dtype=dtype or config.model.dtype)
    config = run_for_platform(dataclasses.replace(config, model=model), current_platform())
    state, tokens, key = (
        init_state(config),
        resident(some_tokens(config)),
        dropout_stream(config.seed),
    )
    windows = batches(tokens, config.seed, 0, steps, config.batch_size, config.model.block_size)
    step = make_train_steps(config).lower(state, windows, key, 0, 0).compile()
    kind = kinds(step.as_text() or "")
    state, metrics = step(state, windows, key, steps, 0)
    taken: dict[str, list[float]] = {name: [] for name in KINDS}
    for index in range(rounds):
        jax.block_until_ready(metrics)
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                state, metrics = step(state, windows, key, steps, (index + 1) * steps)
                jax.block_until_ready(metrics)
            found = traced_milliseconds(Path(directory), kind)
        for name in KINDS:
            taken[name].append(found.get(name, 0.0) / steps)
    whole = sum(map(sum, taken.values()))
    shares = {name: sum(its) / whole for name, its in taken.items()}
    print("| kind | milliseconds a step, median (range) | share |\n|---|---|---|")
    for name, its in taken.items():
        print(f"| {name} | {runner.spread(its)} | {shares[name]:.1%} |")
    setting = {"preset": preset, "dtype": config.model.dtype}
    found = setting | {"milliseconds": taken, "share": shares}
    print(runner.write(f"step_breakdown_{config.model.dtype}", found))


if __name__ == "__main__":
    tyro.cli(main)
