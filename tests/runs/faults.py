"""What can go wrong with the files of a run: the tables that tests and benchmarks share.

`FAULTS` are done to one file, `LEFTOVERS` are what a killed process leaves in a run. A new fault is
a new row: it is done to every file of a checkpoint and to the text files of a run. A new leftover
is left in the runs that are killed and resumed in a test or a benchmark.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# --- one file ------------------------------------------------------------------------------------


def flip_a_bit(file: Path) -> None:
    """In the last byte: the first ones of a compressed array are a header that is checked."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overwrite(data: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(data)


FAULTS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip_a_bit,
    "cut off": cut_off,
    "empty": overwrite(b""),
    "half of JSON": overwrite(b"{"),
    "not text": overwrite(b"\xff"),
    "other JSON": overwrite(b"[]"),
    "other fields": overwrite(b'{"model": {"embed_dim": "wide"}}'),
    "missing": Path.unlink,
}
"""What is done to one file, after which nothing may be read from it."""


@contextlib.contextmanager
def undone(file: Path) -> Iterator[None]:
    """Put a file back afterwards, whatever is there then."""
    original = file.read_bytes()
    try:
        yield
    finally:
        file.write_bytes(original)


# --- a run whose process was killed --------------------------------------------------------------


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
    lambda run: (run / "lock").write_text(""),  # no process has it
    lambda run: (run / "config.json.partial").write_text("{"),
)
"""They are there before the run has a config: in a directory that has only these, one may begin."""
LEFTOVERS = (
    *LEFTOVERS_OF_A_START,
    append_half_a_line("metrics.jsonl"),
    append_half_a_line("provenance.jsonl"),
    leave_in_checkpoints("9.orbax-checkpoint-tmp/half"),
    leave_in_checkpoints("deleted-1/half"),
    leave_in_checkpoints("9.sha256.json.0a1b2c3d.partial"),
    leave_in_checkpoints("9.sha256.json"),  # of no checkpoint
)
"""What a killed process leaves in a run, which goes on as if they were not there."""


def leave_all(run: Path, leftovers: Iterable[Callable[[Path], object]] = LEFTOVERS) -> None:
    """As if a process had been killed at each of these moments."""
    for leave in leftovers:
        leave(run)


# --- a full disk ---------------------------------------------------------------------------------


def full_disk(*_: object) -> None:
    """In place of a function that writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
