"""What can go wrong with the files of a run: the tables that tests and benchmarks share.

`FAULTS` are done to one file, `LEFTOVERS` are what a killed process leaves in a run. A new fault is
a new row: it is done to every file of a checkpoint and to the text files of a run. A new leftover
is left in the runs that are killed and resumed in a test or a benchmark.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# --- one file ------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """Something done to one file, after which nothing may be read from it."""

    name: str
    apply: Callable[[Path], object]
    said: str
    """A regular expression: what the message says of a text file of a run, besides its name."""


def flip_a_bit(file: Path) -> None:
    """In the last byte: the first ones of a compressed array are a header that is checked."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overwrite(data: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(data)


DAMAGED = r"is damaged"
FAULTS = (
    Fault("a flipped bit", flip_a_bit, DAMAGED),
    Fault("cut off", cut_off, DAMAGED),
    Fault("empty", overwrite(b""), DAMAGED),
    Fault("half of JSON", overwrite(b"{"), DAMAGED),
    Fault("not text", overwrite(b"\xff"), DAMAGED),
    Fault("other JSON", overwrite(b"[]"), DAMAGED),
    Fault("other fields", overwrite(b'{"model": {"embed_dim": "wide"}}'), DAMAGED),
    Fault("missing", lambda file: file.unlink(), ""),
)


@contextlib.contextmanager
def undone(file: Path) -> Iterator[None]:
    """Put a file back afterwards, whatever is there then."""
    original = file.read_bytes()
    try:
        yield
    finally:
        file.write_bytes(original)


# --- a run whose process was killed --------------------------------------------------------------


class Leftover(NamedTuple):
    """What a killed process leaves, after which a run goes on as if it were not there."""

    name: str
    apply: Callable[[Path], object]
    """Takes the run's directory."""


def append_half_a_line(name: str) -> Callable[[Path], None]:
    def append(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write('{"step": 9, "lo')

    return append


def leave_in_checkpoints(name: str) -> Callable[[Path], None]:
    def leave(run: Path) -> None:
        path = run / "checkpoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")

    return leave


LEFTOVERS_OF_A_START = (
    Leftover("a lock", lambda run: (run / "lock").write_text("")),  # no process has it
    Leftover("half a config", lambda run: (run / "config.json.partial").write_text("{")),
)
"""They are there before the run has a config: in a directory that has only these, one may begin."""
LEFTOVERS = (
    *LEFTOVERS_OF_A_START,
    Leftover("half a line of metrics", append_half_a_line("metrics.jsonl")),
    Leftover("half a line of provenance", append_half_a_line("provenance.jsonl")),
    Leftover("half a save", leave_in_checkpoints("9.orbax-checkpoint-tmp/half")),
    Leftover("half a deletion", leave_in_checkpoints("deleted-1/half")),
    Leftover("half of its sums", leave_in_checkpoints("9.sha256.json.0a1b2c3d.partial")),
    Leftover("sums of no checkpoint", leave_in_checkpoints("9.sha256.json")),
)


def leave_all(run: Path, leftovers: tuple[Leftover, ...] = LEFTOVERS) -> None:
    """As if a process had been killed at each of these moments."""
    for leftover in leftovers:
        leftover.apply(run)


# --- a full disk ---------------------------------------------------------------------------------


def full_disk(*_: object) -> None:
    """In place of a function that writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
