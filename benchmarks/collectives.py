"""The collectives of a compiled step, counted in the text of its program.

JAX has no interface that counts them, and XLA's cost estimate has no bytes of network traffic. The
text is HLO, which differs between compilers: each rule below matches the form of one of them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

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
    """The bytes that each chip sends, assuming ring algorithms."""


def sum_by_kind(text: str) -> tuple[Collective, ...]:
    """Sum the collectives of a step by kind."""
    sizes = defaultdict(list)
    for kind, size in collectives(text):
        sizes[kind].append(size)
    summed = []
    for kind in sorted(sizes):
        summed.append(Collective(kind, count=len(sizes[kind]), sent=sum(sizes[kind])))
    return tuple(summed)


def collectives(text: str) -> Iterator[tuple[str, int]]:
    """Yield the kind of each collective in a step, and the number of bytes that each device sends.

    A collective in a loop is repeated for each trip; the loop over steps counts once.
    """
    computations = _COMPUTATION.findall(text)
    bodies = {name: body.splitlines() for _, name, body in computations}
    seen = set()  # a TPU's asynchronous collective appears several times with one channel

    def inside(name: str) -> Iterator[tuple[str, int]]:
        for line in bodies[name]:
            found = _COLLECTIVE.search(line)
            channel = re.search(r"channel_id=\d+", line)
            is_repeated = channel is not None and channel[0] in seen
            if found and not is_repeated:
                # A collective without a channel is never seen twice.
                if channel is not None:
                    seen.add(channel[0])
                if "reduce-scatter" in name:  # on a TPU, an all-reduce followed by a slice
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
        """Return the number of trips of a loop, from its line or its condition, else 1."""
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

    entry = next(name for is_entry, name, _ in computations if is_entry)
    yield from inside(entry)


def _sent(found: re.Match[str], line: str) -> int:
    """Return the number of bytes that each device of a group sends, assuming ring algorithms."""
    kind = found[2]
    devices = _group(line)
    size = _bytes_of_types(found[1])
    if found[3]:  # the type of an asynchronous start includes the operands
        match kind:
            case "all-gather":
                size = size * devices // (devices + 1)
            case "reduce-scatter":
                size //= devices + 1
            case "collective-permute" | "all-to-all":
                size //= 2
    if kind == "collective-permute":
        return size
    # In a ring, each device sends one part to the next device, devices - 1 times.
    match kind:
        case "all-reduce":  # an all-reduce is a reduce-scatter and an all-gather
            part = 2 * size / devices
        case "reduce-scatter":  # the type is that of the result, which is one part
            part = size
        case _:
            part = size / devices
    return round(part * (devices - 1))


def _bytes_of_types(types: str) -> int:
    """Return the total bytes of arrays in HLO's types, such as `(f32[8,128]{1,0}, bf16[])`."""
    total = 0
    for bits, shape in re.findall(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]", types):
        itemsize = math.ceil(int(bits or 8) / 8)  # pred has no bits in its name
        elements = 1  # a scalar has an empty shape
        for size in shape.split(","):
            if size:
                elements *= int(size)
        total += itemsize * elements
    return total


def _group(line: str) -> int:
    """Return the number of devices in a group, in any of HLO's notations for groups."""
    if found := re.search(r"replica_groups=mesh\[([^]]*)\][^{]*\{([^}]*)\}", line):
        size_of = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'", found[2])
        return math.prod(int(size_of[axis]) for axis in axes)
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if found is None:
        return 1
    return len(found[1].split(","))
