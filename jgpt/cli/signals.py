"""SIGINT and SIGTERM: the first requests a stop, the second exits at once."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal requested a stop, and the exit code for it."""

    exit_code: int | None = None
    """128 plus the signal, as shells report it."""

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self.exit_code is not None


@contextlib.contextmanager
def stop_requested(first: Callable[[], None], second: Callable[[], None]) -> Iterator[StopRequest]:
    """Handle both signals: call `first` at the first one, `second` before exiting at the next.

    A thread receives them through a wakeup socket: Python's handlers would run only when the main
    thread returns from a call of many steps, and merge two signals into one.
    """
    request, (here, there) = StopRequest(), socket.socketpair()
    there.setblocking(False)

    def listen() -> None:
        while data := here.recv(1):
            if data[0] in SIGNALS and not request():
                request.exit_code = 128 + data[0]
                first()
            elif data[0] in SIGNALS:
                second()
                os._exit(128 + data[0])

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    try:
        yield request
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        there.close()
        listener.join()
        here.close()
