"""The processes of a run: how they find each other, agree, and end together.

A process that is alone agrees with itself, at no cost.
"""

import contextlib
import json
import os
import secrets
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

HEARTBEAT_SECONDS = 40
"""JAX ends all processes when one gives no sign of life for so long, as when a machine is gone."""
START_SECONDS = 50
"""How long the processes wait for each other to be started."""
GRACE_SECONDS = 5
"""How long a process may take to end by itself when another one has failed."""
_BLOCK = 4096
_EXPECTED = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, JaxRuntimeError)
Leave = Callable[[str], NoReturn]
"""Ends this process with a message, from any thread."""


@contextlib.contextmanager
def joined(
    coordinator: str | None, processes: int | None, process: int | None, leave: Leave
) -> Iterator[None]:
    """The processes of a run joined, before anything else has used JAX.

    None is for what JAX finds by itself: on a TPU pod, under SLURM and Open MPI. When one process
    fails or dies, `leave` is called in all, with its message.
    """
    _silence_gloo()
    where = (coordinator or "").rpartition(":")[0].strip("[]") or socket.gethostname()
    refusal = (
        f"the processes can't be joined ({{}}): start all of them within {START_SECONDS} seconds, "
        "with distributed=True under a launcher that JAX knows, elsewhere with "
        "coordinator=HOST:PORT, processes=N and process=0 to N-1"
    )
    # JAX would abort, and wait for far longer
    timer = threading.Timer(START_SECONDS, leave, [refusal.format("some were not started")])
    timer.daemon = True
    timer.start()
    try:
        jax.config.update("jax_enable_preemption_service", False)  # or it takes SIGTERM
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
        for index, count in enumerate(counts := devices_of_processes()):
            if count != counts[0]:
                raise ValueError(f"process {index} has {count} devices, process 0 has {counts[0]}")
        others = _Others(where, leave)
    except ValueError as error:
        raise ValueError(refusal.format(error)) from None
    except RuntimeError as error:
        leave(refusal.format(str(error).splitlines()[0]))
    finally:
        timer.cancel()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit):
            if isinstance(error, JaxRuntimeError):  # of one that has died the message comes first
                time.sleep(2 * GRACE_SECONDS)
            if not isinstance(error, (*_EXPECTED, KeyboardInterrupt)):
                traceback.print_exc()
            message = " ".join(str(error).split())[:1000] or repr(error)
            others.end(f"process {process_index()}: {message}")
            leave(message)
        raise
    finally:
        gather(None)
        others.tell("")
        jax.distributed.shutdown()


def _silence_gloo() -> None:
    """Python keeps the standard output; gloo, which writes a line per connection, loses it."""
    sys.stdout.flush()
    kept, how = os.dup(1), {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
    sys.stdout = open(kept, "w", buffering=1 if os.isatty(kept) else -1, **how)  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def gather(value: Any) -> list[Any]:
    """The values of all processes, which call this at the same point, in their order."""
    if process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.int32(text.size))
    size = -(-int(sizes.max()) // _BLOCK) * _BLOCK  # few sizes are few compilations
    rows = process_allgather(np.pad(text, (0, size - text.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block that ends for all processes at once: well, or with the error of one of them."""
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
    """Raise ValueError, in all processes, naming the facts that differ between them."""
    first, *others = gather(facts)
    for index, other in enumerate(others, 1):
        differ = [name for name, value in first.items() if other[name] != value]
        each = (f"{name} is {other[name]!r}, in process 0 {first[name]!r}" for name in differ)
        if differ:
            raise ValueError(f"process {index} differs: {'; '.join(each)}; they must agree")


class Vote:
    """Whether any process wants something. All ask at the same points.

    They hear it when they ask the next time: so none waits for the device.
    """

    def __init__(self) -> None:
        self._asked: jax.Array | None = None

    def __call__(self, wanted: bool) -> bool:
        """Whether this process wants it, or any did when it was asked before."""
        if process_count() == 1:
            return wanted
        mesh = jax.sharding.get_mesh()
        where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        votes = np.full(devices_of_processes()[process_index()], wanted, np.int32)
        cast, asked = jax.make_array_from_process_local_data(where, votes), self._asked
        self._asked = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(cast)
        return asked is not None and bool(asked)


class _Others:
    """Connections between process 0 and the others, to hear at once of one that fails or dies.

    A message is a line; an empty one is from a process that ends well.
    """

    def __init__(self, host: str, leave: Leave) -> None:
        self._leave, self._ending = leave, False
        self._connections: dict[int, socket.socket] = {}
        if process_index() == 0:
            with socket.create_server(("", 0)) as server:
                token = secrets.token_hex(8)
                gather([host, server.getsockname()[1], token])
                awaited = [index for index, connected in enumerate(gather(False)) if connected]
                while len(self._connections) < len(awaited):
                    connection = server.accept()[0]
                    said, _, index = connection.recv(64, socket.MSG_WAITALL).decode().partition(" ")
                    if said == token:
                        self._connections[int(index)] = connection
        else:
            host, port, token = gather(None)[0]
            with contextlib.suppress(OSError):  # if it is out of reach, JAX's heartbeats have to do
                self._connections[0] = socket.create_connection((host, port), 10)
                self._connections[0].settimeout(None)
                self._connections[0].sendall(f"{token} {process_index()}".ljust(64).encode())
            gather(bool(self._connections))
        for index in self._connections:
            threading.Thread(target=self._listen, args=(index,), daemon=True).start()

    def tell(self, message: str) -> None:
        """Send a message to those that are connected."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{message}\n".encode())

    def end(self, message: str) -> None:
        """Tell of a failure. Process 0 waits for the others to end: its end would end them."""
        self._ending = True
        self.tell(message)
        for connection in self._connections.values() if process_index() == 0 else ():
            connection.settimeout(2 * GRACE_SECONDS)
            with contextlib.suppress(OSError):
                while connection.recv(4096):
                    pass

    def _listen(self, index: int) -> None:
        heard = b""
        with contextlib.suppress(OSError):
            heard = self._connections[index].makefile("rb").readline()
        if heard.strip():
            time.sleep(GRACE_SECONDS)  # an error that all have ends each of them by itself
        if heard != b"\n" and not self._ending:
            message = heard.decode().strip() or (
                f"process {index} has ended: see its messages; resume=True goes on from the last "
                "checkpoint"
            )
            self.end(message)
            self._leave(message)
