"""Ctrl-C and SIGTERM: the first asks for a stop, the second leaves at once."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody wants the program to stop, and the exit code that says so."""

    def __init__(self) -> None:
        """Nobody does."""
        self._signal: int | None = None

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell reports of a program that a signal ended."""
        return 128 + (self._signal or 0)

    def receive(self, number: int) -> None:
        """Take a signal."""
        self._signal = number


@contextlib.contextmanager
def stop_requested(first: Callable[[], None], second: Callable[[], None]) -> Iterator[StopRequest]:
    """Catch both signals; call `first` at the first one, and `second` before leaving at the next.

    A thread of its own hears them: Python's handlers wait until the main thread comes back from a
    call of many steps, and would take two signals for one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()  # signals are the main thread's affair
        return
    request, (here, there) = StopRequest(), socket.socketpair()
    there.setblocking(False)

    def listen() -> None:
        while data := here.recv(1):
            if data[0] in SIGNALS and not request():
                request.receive(data[0])
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
