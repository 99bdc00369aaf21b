"""Ahead-of-time compilation of the train step for other hardware, and its costs."""

import contextlib
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgpt.config import TrainConfig
from jgpt.hardware import Chip, topology
from jgpt.nn.costs import flops_per_token
from jgpt.nn.precision import run_for_platform
from jgpt.parallel.mesh import make_mesh
from jgpt.training.memory import TrainingMemory, compile_steps, memory_of, with_micro_batches
from jgpt.training.plan import default_mesh

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"\b(body|calls|\w*computations?)=(\{[^}]*\}|%?[\w.-]+)")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


@dataclass(frozen=True)
class Collective:
    """A step's collectives of one kind."""

    kind: str
    count: int
    sent: int
    """Bytes per chip, by ring algorithms."""


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step, and the least time for each resource."""

    on: str
    chip: Chip
    chips: int
    mesh: str
    micro_batches: int | str
    """As decided for the chips."""
    memory: TrainingMemory
    fits: bool
    flops: int
    """Per chip, from the config."""
    collectives: tuple[Collective, ...]
    kernels: tuple[str, ...]
    """Custom calls in the program, such as cuDNN's attention."""
    compute_seconds: float
    """At the chip's peak."""
    memory_seconds: float
    """To read and write state and working memory once."""
    interconnect_seconds: float
    """For the collectives, without overlap."""
    bound: str
    """The slowest: compute, memory or interconnect."""


def compile_ahead(config: TrainConfig, on: str) -> CompiledStep:
    """Compile a train step for chips such as `v5e:4x4`, on the config's mesh or the default one.

    Raises ValueError if the step doesn't fit into a chip's memory.
    """
    chip, devices = topology(on)
    mesh = config.mesh or default_mesh(config, len(devices), chip.memory) or "data=1"
    # with the mesh in it, a config whose batch it doesn't divide is refused
    config = dataclasses.replace(run_for_platform(config, chip.platform), mesh=mesh)
    with jax.set_mesh(make_mesh(mesh, devices)), _without_compilation_cache():
        try:
            config = with_micro_batches(config, chip.memory)
            compiled = compile_steps(config)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise ValueError(f"a step doesn't fit into {on}: {reason}") from None
        memory = memory_of(compiled, config)
        text = compiled.as_text()
    assert memory is not None and text is not None  # noqa: PT018  # these compilers report both
    by_kind = _by_kind(text)
    sent = sum(collective.sent for collective in by_kind)
    tokens = config.batch_size * config.model.block_size
    # the backward pass takes twice the forward pass: a gradient for each operand of a product
    flops = 3 * flops_per_token(config.model) * tokens // len(devices)
    # lower bounds: each as if the chip did nothing else, and what is held were moved once
    seconds = {
        "compute": flops / chip.peak_flops,
        "memory": 2 * (memory.state + memory.working) / chip.memory_bandwidth,
        "interconnect": sent / chip.interconnect,
    }
    kernels = set(re.findall(r'custom_call_target="([^"]+)"', text))
    return CompiledStep(
        on=on,
        chip=chip,
        chips=len(devices),
        mesh=mesh,
        micro_batches=config.micro_batches,
        memory=memory,
        fits=memory.state + memory.working <= chip.memory,
        flops=flops,
        collectives=by_kind,
        kernels=tuple(sorted(kernels)),
        compute_seconds=seconds["compute"],
        memory_seconds=seconds["memory"],
        interconnect_seconds=seconds["interconnect"],
        bound=max(seconds, key=lambda name: seconds[name]),
    )


def _by_kind(text: str) -> tuple[Collective, ...]:
    """The collectives of a step, those of one kind together."""
    sizes = defaultdict(list)
    for kind, size in collectives(text):
        sizes[kind].append(size)
    summed = []
    for kind in sorted(sizes):
        summed.append(Collective(kind, count=len(sizes[kind]), sent=sum(sizes[kind])))
    return tuple(summed)


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """The cache could be written, but not be read without the hardware."""
    was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def collectives(text: str) -> Iterator[tuple[str, int]]:
    """The kind of each collective in a step, and the bytes that each device sends.

    A collective in a loop is repeated for each trip; the loop over steps counts once.
    """
    computations = _COMPUTATION.findall(text)
    bodies = {name: body.splitlines() for _, name, body in computations}
    seen = set()  # a TPU's asynchronous collective stands in several places, with one channel

    def inside(name: str) -> Iterator[tuple[str, int]]:
        for line in bodies[name]:
            found = _COLLECTIVE.search(line)
            channel = re.search(r"channel_id=\d+", line)
            is_repeated = channel is not None and channel[0] in seen
            if found and not is_repeated:
                if channel is not None:
                    seen.add(channel[0])
                if "reduce-scatter" in name:  # a TPU's: an all-reduce of which a slice is kept
                    yield "reduce-scatter", _sent(found, line) // 2
                else:
                    yield found[2], _sent(found, line)
            for role, names in _CALLED.findall(line):
                times = 1
                if role == "body":
                    times = trips(line)
                for called in re.findall(r"[\w.-]+", names):
                    yield from list(inside(called)) * times

    def trips(line: str) -> int:
        """Trips of a loop, from its line or its condition, else 1."""
        if found := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
            return int(found[1])
        condition = re.search(r"condition=%?([\w.-]+)", line)
        if condition is None:
            return 1
        lines = "\n".join(bodies[condition[1]])
        root = re.search(r"ROOT .* compare\(.*%([\w.-]+)\), direction=LT", lines)
        if root is None:
            return 1
        limit = re.search(rf"%{re.escape(root[1])} = .*constant\((\d+)\)", lines)
        if limit is None:
            return 1
        return int(limit[1])

    yield from inside(next(name for entry, name, _ in computations if entry))


def _sent(found: re.Match[str], line: str) -> int:
    """The bytes that each device of a group sends, by ring algorithms."""
    kind = found[2]
    devices = _group(line)
    size = _bytes_of_types(found[1])
    if found[3]:  # the type of an asynchronous start holds the operands too
        match kind:
            case "all-gather":
                size = size * devices // (devices + 1)
            case "reduce-scatter":
                size //= devices + 1
            case "collective-permute" | "all-to-all":
                size //= 2
    if kind == "collective-permute":
        return size
    # in a ring each device sends a part to the next one, devices - 1 times
    match kind:
        case "all-reduce":  # a reduce-scatter and an all-gather
            part = 2 * size / devices
        case "reduce-scatter":  # its type is that of the result, a part already
            part = size
        case _:
            part = size / devices
    return round(part * (devices - 1))


def _bytes_of_types(types: str) -> int:
    """The bytes of all arrays in HLO's types, such as `(f32[8,128]{1,0}, bf16[])`."""
    total = 0
    for bits, shape in re.findall(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]", types):
        itemsize = -(-int(bits or 8) // 8)  # rounded up; pred has no bits in its name
        elements = 1  # of a scalar, whose shape is empty
        for size in shape.split(","):
            if size:
                elements *= int(size)
        total += itemsize * elements
    return total


def _group(line: str) -> int:
    """How many devices take part, in any of the notations for their groups."""
    if found := re.search(r"replica_groups=mesh\[([^]]*)\][^{]*\{([^}]*)\}", line):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(axes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if found is None:
        return 1
    return len(found[1].split(","))
