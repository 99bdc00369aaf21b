"""The processes of a run: they join, agree and end. A single process skips all of this."""

import asyncio
import contextlib
import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec

from jgpt.hardware import devices_of_processes, process_count, process_index
from jgpt.refusal import Field, Message, Placeholder, message_of
from jgpt.user_code import describe_error

HEARTBEAT_SECONDS = 10
"""The seconds of silence after which JAX ends all processes."""
START_SECONDS = 50
"""The seconds that processes wait for each other at the start."""
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
    _silence_gloo()
    _join(coordinator, processes, process, leave)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        message = _last_words(error)
        # JAX's service is in it, so the others get time for their own messages
        if process_index() == 0:
            time.sleep(GRACE_SECONDS)
        leave(message)
    finally:
        jax.distributed.shutdown()


def _join(
    coordinator: str | None, processes: int | None, process: int | None, leave: Leave
) -> None:
    """Wait for the other processes, and start JAX's service with them.

    Raises ValueError for errors that are known before JAX is asked.
    """
    # JAX would wait far longer and then abort, which Python can't catch, so a thread ends the
    # process earlier.
    timer = threading.Timer(START_SECONDS, leave, [_not_joined("some were not started")])
    timer.daemon = True  # an error in this block must not wait for it
    bind_address = None  # a launcher's coordinator knows its own address
    try:
        if coordinator is not None and processes is not None and process is not None:
            bind_address = _meet(coordinator, processes, process)
        timer.start()
        # otherwise the service handles SIGTERM
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            coordinator_bind_address=bind_address,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
        _require_equal_devices()
    except (ValueError, OSError) as error:
        raise ValueError(_not_joined(str(error))) from None
    except RuntimeError as error:
        leave(_not_joined(str(error).splitlines()[0]))
    finally:
        timer.cancel()


def _not_joined(reason: str) -> Message:
    return Message(
        f"the processes can't be joined ({reason}): start all of them within {START_SECONDS} "
        "seconds, with ",
        Field("distributed", True),
        " under a launcher that JAX knows, elsewhere with ",
        Field("coordinator", Placeholder("HOST:PORT")),
        ", ",
        Field("processes", Placeholder("N")),
        " and ",
        Field("process", Placeholder("0")),
        " to N-1",
    )


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
    message = custom or message_of(error)
    if not isinstance(message, Message):
        message = " ".join(message.split())[:1000]
    message = message or repr(error)
    # Gloo's connections break when a process ends, so its message is not the cause.
    if "Gloo" in message:
        return Message(
            "another process has ended: see its messages; ",
            Field("resume", True),
            f" goes on from the last checkpoint ({message})",
        )
    return message


def _meet(coordinator: str, processes: int, process: int) -> str:
    """Wait for all processes at the coordinator's address; return the address to bind.

    JAX's service aborts a run if a second process registers with the same number, even by mistake
    for another run. So processes register only when all are there. Without this, JAX 0.10 behaves
    as follows: if a process is missing or has a wrong address, each of the others ends by SIGABRT
    with a C++ stack trace that names neither the address nor the process; and a second process 1
    ends a run that has been training for hours.
    """
    if process == 0:
        coordinator = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
    host, port = _parse_address(coordinator)
    if not 0 <= process < processes:
        raise ValueError(f"process {process} of {processes} does not exist: processes count from 0")
    try:
        # An address of a kind that this machine has: IPv6 may be compiled in and switched off.
        addresses = socket.getaddrinfo(host, port, flags=socket.AI_ADDRCONFIG)
        family, *_, address = addresses[0]
        if process == 0:
            with socket.create_server(address[:2], family=family) as server:
                asyncio.run(_wait_for_others(server, processes))
        else:
            _ask(host, port, f"jgpt {process} of {processes}\n")
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ValueError(f"{coordinator}: {reason}") from None
    # The number instead of the name, so that JAX listens only where process 0 did.
    number = str(address[0])
    if ":" in number:
        return f"[{number}]:{port}"
    return f"{number}:{port}"


def _parse_address(address: str) -> tuple[str, int]:
    """Return the host and the port in HOST:PORT or [HOST]:PORT."""
    found = re.fullmatch(r"\[?([^]]+)]?:([0-9]+)", address)
    if found:
        host = found[1]
        port = int(found[2])
        if 0 < port < 2**16:
            return host, port
    raise ValueError(f"{address} is not HOST:PORT, such as localhost:1234")


async def _wait_for_others(server: socket.socket, processes: int) -> None:
    """In process 0, tell the others to continue when all are there, or why one can't."""
    connections: dict[int, asyncio.StreamWriter] = {}

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Another program may send anything, or nothing until the end.
        ignored = contextlib.suppress(OSError, ValueError, asyncio.CancelledError)
        with contextlib.closing(writer), ignored:
            words = (await reader.readline()).split()
            _, number, _, count = words  # `jgpt 1 of 3`
            process = int(number)
            if int(count) != processes:
                writer.write(b"jgpt: process 0 was started with processes=%d" % processes)
            elif process in connections:
                writer.write(b"jgpt: another one was started with process=%d" % process)
            elif 0 < process < processes:
                connections[process] = writer
                try:
                    while await reader.read(_BLOCK):
                        pass
                finally:  # the other process has ended, or reset the connection
                    del connections[process]

    await asyncio.start_server(greet, sock=server)
    previous_connections = None
    try:
        async with asyncio.timeout(START_SECONDS):
            # The same connections twice: if one of them has closed, that is read a moment later.
            while len(connections) < processes - 1 or connections != previous_connections:
                previous_connections = dict(connections)
                await asyncio.sleep(0.05)
    except TimeoutError:
        absent = sorted(set(range(1, processes)) - set(connections))
        some = ", ".join(str(process) for process in absent[:8])  # if hundreds are absent, one line
        raise ValueError(f"not started: process {some}") from None
    for writer in connections.values():
        writer.write(b"jgpt: go")


def _ask(host: str, port: int, who: str) -> None:
    """Wait until process 0 reports that all are there."""
    answer = b""
    deadline = time.monotonic() + START_SECONDS
    # Until process 0 listens, connections fail; it closes the connection if it gives up.
    while not answer:
        seconds_left = deadline - time.monotonic()
        if seconds_left < 0:
            raise ValueError(f"process 0 doesn't answer at {host}:{port}")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), seconds_left) as connection,
        ):
            connection.sendall(who.encode())
            answer = connection.recv(100)
        time.sleep(0.1)
    program, _, message = answer.decode(errors="replace").partition(": ")
    if program != "jgpt":
        raise ValueError(f"another program answers at {host}:{port}")
    if message != "go":
        raise ValueError(message)


def _silence_gloo() -> None:
    """Discard gloo's output on standard output, one line for each connection.

    Gloo is C++ and writes to descriptor 1; Python's standard output continues on a copy of it.
    """
    sys.stdout.flush()
    copy = os.dup(1)
    buffering = -1  # the default
    if os.isatty(copy):  # line by line, like Python's own on a terminal
        buffering = 1
    sys.stdout = open(  # noqa: SIM115
        copy,
        "w",
        buffering=buffering,
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
    )
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)


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
                difference = Message(Field(name), f" is {value!r}, in process 0 {expected!r}")
                differences.append(difference)
        if differences:
            raise ValueError(
                Message(
                    f"process {index} differs: ",
                    Message.join("; ", differences),
                    "; they must agree",
                )
            )


class Vote:
    """Whether any process wants something. All processes vote at the same points.

    Votes are read one call late, so that no process waits for the device.
    """

    def __init__(self) -> None:
        self._pending: jax.Array | None = None

    def __call__(self, wanted: bool) -> bool:
        """Vote; return whether any process wanted it at the call before. A single process has no
        delay."""
        if process_count() == 1:
            return wanted
        mesh = jax.sharding.get_mesh()
        one_for_each_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        replicated = NamedSharding(mesh, PartitionSpec())
        own_devices = devices_of_processes()[process_index()]
        own_votes = np.full(own_devices, wanted, np.int32)
        votes = jax.make_array_from_process_local_data(one_for_each_device, own_votes)
        votes_before = self._pending
        # Dispatched now and read at the next call, when it has long been computed.
        self._pending = jax.jit(jnp.max, out_shardings=replicated)(votes)
        if votes_before is None:  # the first call
            return False
        return bool(votes_before)
