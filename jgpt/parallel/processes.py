"""The processes of a run: they join, agree and end. A single process skips all of this."""

import contextlib
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jgpt.machine import devices_of_processes, process_count, process_index
from jgpt.user_code import describe_error

HEARTBEAT_SECONDS = 10
"""The seconds of silence after which JAX ends all processes."""
GRACE_SECONDS = 3
"""The seconds that process 0 stays after an error, since the end of its service aborts the
others."""
_BLOCK = 4096
"""Texts that processes exchange are padded to a multiple of this number of bytes."""
_EXPECTED = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, JaxRuntimeError)
Leave = Callable[[str], NoReturn]
"""A function that ends this process with a message, from any thread."""


@contextlib.contextmanager
def joined(
    coordinator: str | None, processes: int | None, process: int | None, leave: Leave
) -> Iterator[None]:
    """Join the processes of a run, before anything else has used JAX.

    JAX finds the values that are None: on a TPU pod, under SLURM and Open MPI. An error ends this
    process with `leave`, and thereby the others.
    """
    # otherwise the service handles SIGTERM
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    try:
        _require_equal_devices()
        yield
    except (Exception, KeyboardInterrupt) as error:
        message = _last_words(error)
        # JAX's service is in it, so the others get time for their own messages
        if process_index() == 0:
            time.sleep(GRACE_SECONDS)
        leave(message)
    finally:
        jax.distributed.shutdown()


def _require_equal_devices() -> None:
    """Raise ValueError if a process has more or fewer devices than the first."""
    counts = devices_of_processes()
    for index, count in enumerate(counts):
        if count != counts[0]:
            raise ValueError(f"process {index} has {count} devices, process 0 has {counts[0]}")


def _last_words(error: BaseException) -> str:
    """Return an error's message; for an error inside jgpt, print its traceback, too."""
    custom = describe_error(error)
    if custom is None and not isinstance(error, (*_EXPECTED, KeyboardInterrupt)):
        traceback.print_exc()
    message = custom or str(error) or repr(error)
    message = " ".join(message.split())[:1000]
    # Gloo's connections break when a process ends, so its message is not the cause.
    if "Gloo" in message:
        return (
            "another process has ended: see its messages; `resume=True` goes on from the "
            f"last checkpoint ({message})"
        )
    return message


def gather(value: Any) -> list[Any]:
    """Return all processes' values, in order. All processes call this at the same point."""
    if process_count() == 1:
        return [value]
    # JSON in an array of bytes: JAX exchanges only arrays, and nothing received is executed.
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.int32(text.size))
    # All send arrays of one size, and few different sizes keep compilations few.
    padded_size = math.ceil(sizes.max() / _BLOCK) * _BLOCK
    rows = process_allgather(np.pad(text, (0, padded_size - text.size)))
    values = []
    for row, size in zip(rows, sizes, strict=True):
        values.append(json.loads(row[:size].tobytes()))
    return values


@contextlib.contextmanager
def raise_in_all_processes() -> Iterator[None]:
    """Run a block in all processes; an error in one is raised in all."""
    failure = None
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        failure = error
    # Processes without an error take part, too, or the others would wait for ever.
    message = None
    if failure is not None:
        message = str(failure)
    failures = gather(message)
    if failure is not None:  # of a class that callers handle
        raise failure
    for index, message in enumerate(failures):
        if message is not None:
            raise OSError(f"process {index}: {message}")


def require_same(facts: dict[str, Any]) -> None:
    """Raise ValueError in all processes if facts differ, with their names."""
    first, *others = gather(facts)
    for index, other in enumerate(others, 1):
        differences = []
        for name in first | other:  # only one process may have a custom model and its fields
            value = other.get(name)
            expected = first.get(name)
            if value != expected:
                difference = f"`{name}` is {value!r}, in process 0 {expected!r}"
                differences.append(difference)
        if differences:
            raise ValueError(f"process {index} differs: {'; '.join(differences)}; they must agree")


class Vote:
    """The largest wish of all processes. All vote at the same points.

    Votes are read one call late, so that no process waits for the device.
    """

    def __init__(self) -> None:
        self._pending: jax.Array | None = None

    def __call__(self, wanted: int) -> int:
        """Vote; return the largest wish at the call before. A single process has no delay."""
        if process_count() == 1:
            return wanted
        # Automatic, as that of the run, which may be set here.
        mesh = jax.make_mesh((len(jax.devices()),), ("all",), (AxisType.Auto,))
        one_for_each_device = NamedSharding(mesh, PartitionSpec("all"))
        own_votes = np.full(jax.local_device_count(), wanted, np.int32)
        votes = jax.make_array_from_process_local_data(one_for_each_device, own_votes)
        votes_before = self._pending
        # Dispatched now and read at the next call, when it has long been computed.
        self._pending = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(votes)
        if votes_before is None:  # the first call
            return 0
        agreed = int(votes_before)
        if agreed:
            self._pending = None  # wishes from before this answer are done
        return agreed
