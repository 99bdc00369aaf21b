"""The processes of a run: how they join, agree and end. A single process pays nothing."""

import asyncio
import contextlib
import json
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
from jgpt.user_code import describe_error

HEARTBEAT_SECONDS = 10
"""JAX ends all processes when one has been silent this long."""
START_SECONDS = 50
"""How long the processes wait for each other at the start."""
GRACE_SECONDS = 3
"""How long process 0 stays after an error, since the end of its service aborts the others."""
_BLOCK = 4096
_EXPECTED = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, JaxRuntimeError)
Leave = Callable[[str], NoReturn]
"""Ends this process with a message, from any thread."""


@contextlib.contextmanager
def joined(
    coordinator: str | None, processes: int | None, process: int | None, leave: Leave
) -> Iterator[None]:
    """Join the processes of a run, before anything else has used JAX.

    JAX finds what is None: on a TPU pod, under SLURM and Open MPI. An error ends this process with
    `leave`, and with it the others.
    """
    _silence_gloo()
    refusal = (
        f"the processes can't be joined ({{}}): start all of them within {START_SECONDS} seconds, "
        "with distributed=True under a launcher that JAX knows, elsewhere with "
        "coordinator=HOST:PORT, processes=N and process=0 to N-1"
    )
    # JAX would abort, and wait for far longer
    timer = threading.Timer(START_SECONDS, leave, [refusal.format("some were not started")])
    timer.daemon = True
    bind = None
    try:
        if coordinator is not None and processes is not None and process is not None:
            bind = _meet(coordinator, processes, process)
        timer.start()
        jax.config.update("jax_enable_preemption_service", False)  # or it takes SIGTERM
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
        for index, count in enumerate(counts := devices_of_processes()):
            if count != counts[0]:
                raise ValueError(f"process {index} has {count} devices, process 0 has {counts[0]}")
    except (ValueError, OSError) as error:
        raise ValueError(refusal.format(error)) from None
    except RuntimeError as error:
        leave(refusal.format(str(error).splitlines()[0]))
    finally:
        timer.cancel()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        custom = describe_error(error)
        if custom is None and not isinstance(error, (*_EXPECTED, KeyboardInterrupt)):
            traceback.print_exc()
        message = (custom or " ".join(str(error).split()))[:1000] or repr(error)
        if "Gloo" in message:
            message = (
                "another process has ended: see its messages; resume=True goes on from the last "
                f"checkpoint ({message})"
            )
        if process_index() == 0:
            time.sleep(GRACE_SECONDS)
        leave(message)
    finally:
        jax.distributed.shutdown()


def _meet(coordinator: str, processes: int, process: int) -> str:
    """Wait for all processes at the coordinator's address. Returns the address to bind.

    JAX's service aborts a run if a second process registers with the same number, even by mistake
    for another run. So they only register when all of them are there.
    """
    if process == 0:
        coordinator = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
    found = re.fullmatch(r"\[?([^]]+)]?:([0-9]+)", coordinator)
    if not found or not 0 < (port := int(found[2])) < 2**16:
        raise ValueError(f"{coordinator} is not HOST:PORT, such as localhost:1234")
    if not 0 <= process < processes:
        raise ValueError(f"there is no process {process} of {processes}, which count from 0")
    try:
        flags = socket.AI_ADDRCONFIG
        family, *_, address = socket.getaddrinfo(found[1], port, flags=flags)[0]
        if process == 0:
            with socket.create_server(address[:2], family=family) as server:
                asyncio.run(_wait_for_others(server, processes))
        else:
            _ask(found[1], port, f"jgpt {process} of {processes}\n")
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ValueError(f"{coordinator}: {reason}") from None
    host = str(address[0])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _wait_for_others(server: socket.socket, processes: int) -> None:
    """Process 0: tell the others to go on when all are there, and why one can't."""
    there: dict[int, asyncio.StreamWriter] = {}

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # another program may say anything, or nothing until the end
        ignored = contextlib.suppress(OSError, ValueError, asyncio.CancelledError)
        with contextlib.closing(writer), ignored:
            _, process, _, count = (await reader.readline()).split()
            if int(count) != processes:
                writer.write(b"jgpt: process 0 was started with processes=%d" % processes)
            elif int(process) in there:
                writer.write(b"jgpt: another one was started with process=%d" % int(process))
            elif 0 < int(process) < processes:
                there[int(process)] = writer
                try:
                    while await reader.read(_BLOCK):
                        pass
                finally:  # it has gone, or was reset
                    del there[int(process)]

    await asyncio.start_server(greet, sock=server)
    before = None
    try:
        async with asyncio.timeout(START_SECONDS):
            # the same ones twice: one of them may have gone, which is read a moment later
            while len(there) < processes - 1 or there != before:
                before = dict(there)
                await asyncio.sleep(0.05)
    except TimeoutError:
        absent = sorted(set(range(1, processes)) - set(there))
        raise ValueError(f"not started: process {', '.join(map(str, absent[:8]))}") from None
    for writer in there.values():
        writer.write(b"jgpt: go")


def _ask(host: str, port: int, who: str) -> None:
    """Wait until process 0 says that all are there."""
    answer = b""
    until = time.monotonic() + START_SECONDS
    while not answer:
        if (left := until - time.monotonic()) < 0:
            raise ValueError(f"process 0 doesn't answer at {host}:{port}")
        with contextlib.suppress(OSError), socket.create_connection((host, port), left) as asked:
            asked.sendall(who.encode())
            answer = asked.recv(100)
        time.sleep(0.1)
    program, _, said = answer.decode(errors="replace").partition(": ")
    if program != "jgpt":
        raise ValueError(f"another program answers at {host}:{port}")
    if said != "go":
        raise ValueError(said)


def _silence_gloo() -> None:
    """Discard what gloo writes to standard output, a line per connection."""
    sys.stdout.flush()
    kept = os.dup(1)
    how = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
    sys.stdout = open(kept, "w", buffering=1 if os.isatty(kept) else -1, **how)  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def gather(value: Any) -> list[Any]:
    """All processes' values, in order. All call this at the same point."""
    if process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.int32(text.size))
    size = -(-int(sizes.max()) // _BLOCK) * _BLOCK  # few sizes are few compilations
    rows = process_allgather(np.pad(text, (0, size - text.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def raise_in_all_processes() -> Iterator[None]:
    """Run a block in all processes; an error of one is raised in all."""
    failure = None
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        failure = error
    failures = gather(failure and str(failure))
    if failure is not None:
        raise failure
    for index, message in enumerate(failures):
        if message is not None:
            raise OSError(f"process {index}: {message}")


def require_same(facts: dict[str, Any]) -> None:
    """Raise ValueError in all processes if facts differ, with their names."""
    first, *others = gather(facts)
    for index, other in enumerate(others, 1):
        differences = []
        for name in first | other:  # one process alone may have a custom model and its fields
            value = other.get(name)
            expected = first.get(name)
            if value != expected:
                differences.append(f"{name} is {value!r}, in process 0 {expected!r}")
        if differences:
            raise ValueError(f"process {index} differs: {'; '.join(differences)}; they must agree")


class Vote:
    """Whether any process wants something. All ask at the same points.

    The result is one call late, so no process waits for the device.
    """

    def __init__(self) -> None:
        self._asked: jax.Array | None = None

    def __call__(self, wanted: bool) -> bool:
        """Whether any process wanted it at the call before; a single process learns at once."""
        if process_count() == 1:
            return wanted
        mesh = jax.sharding.get_mesh()
        where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        votes = np.full(devices_of_processes()[process_index()], wanted, np.int32)
        cast = jax.make_array_from_process_local_data(where, votes)
        asked = self._asked
        self._asked = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(cast)
        return asked is not None and bool(asked)
