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


@contextlib.contextmanager
def stop_requested(first: Callable[[], None], second: Callable[[], None]) -> Iterator[list[int]]:
    """Handle the signals: call `first` at the first one, `second` before exiting at the next.

    Yields a list, to which the first one adds the exit code: 128 plus the signal, as shells report.
    The system and the shell may both report a closed terminal: no second request, and under `nohup`
    none at all.
    A thread receives them through a wakeup socket: Python's handlers would run only when the main
    thread returns from a call of many steps, and merge two signals into one.
    """
    codes, (here, there) = list[int](), socket.socketpair()
    there.setblocking(False)

    def listen() -> None:
        while data := here.recv(1):
            if data[0] in SIGNALS and not codes:
                codes.append(128 + data[0])
                first()
            elif data[0] in SIGNALS and data[0] != HANG_UP:
                second()
                os._exit(128 + data[0])

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    heard = [it for it in SIGNALS if it != HANG_UP or signal.getsignal(it) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda *_: None) for number in heard}
    wakeup = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    try:
        yield codes
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        there.close()
        listener.join()
        here.close()
