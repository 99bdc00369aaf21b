"""SIGINT, SIGTERM and SIGHUP: the first requests a stop, the second exits at once."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

HANG_UP = getattr(signal, "SIGHUP", None)
"""The terminal was closed. Windows has no such signal."""
SIGNALS = [number for number in (signal.SIGINT, signal.SIGTERM, HANG_UP) if number is not None]


class StopRequest:
    """Whether a signal requested a stop, and the exit code for it."""

    exit_code: int | None = None
    """128 plus the signal, as shells report it."""

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self.exit_code is not None


@contextlib.contextmanager
def stop_requested(first: Callable[[], None], second: Callable[[], None]) -> Iterator[StopRequest]:
    """Handle the signals: call `first` at the first one, `second` before exiting at the next.

    The system and the shell may both report a closed terminal: no second request, and under `nohup`
    none at all.
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
            elif data[0] in SIGNALS and data[0] != HANG_UP:
                second()
                os._exit(128 + data[0])

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    numbers = set(SIGNALS)
    if HANG_UP is not None and signal.getsignal(HANG_UP) == signal.SIG_IGN:
        numbers.remove(HANG_UP)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
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
