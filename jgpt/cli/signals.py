"""SIGINT, SIGTERM and SIGHUP: the first requests a stop, the second exits at once."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

HANG_UP = getattr(signal, "SIGHUP", None)
"""The terminal was closed. Windows has no such signal."""
LINE_AND_CURSOR = "\r\x1b[2K\x1b[?25h"
"""Erase the line of a spinner or a bar, and show the cursor that it has hidden."""
SECONDS_OF_A_PRESS = 1.0
"""How long further signals of Ctrl-C are taken for the first one."""
BROKEN_PIPE = 13
"""The number of SIGPIPE."""
SIGNALS = [signal.SIGINT, signal.SIGTERM]
if HANG_UP is not None:
    SIGNALS.append(HANG_UP)


@contextlib.contextmanager
def stop_requested(first: Callable[[], None], second: Callable[[], None]) -> Iterator[list[int]]:
    """Handle the signals: call `first` at the first one, `second` before exiting at the next.

    Yields a list, to which the first one adds the exit code: 128 plus the signal, as shells report.
    A Ctrl-C within a second of the first one is the same request, so that a nervous second press
    does not lose the state.
    The system and the shell may both report a closed terminal: no second request, and under `nohup`
    none at all.
    A thread receives them through a wakeup socket: Python's handlers would run only when the main
    thread returns from a call of many steps, and merge two signals into one.
    """
    codes: list[int] = []
    here, there = socket.socketpair()
    there.setblocking(False)  # as `set_wakeup_fd` requires

    def listen() -> None:
        first_at = 0.0
        while data := here.recv(1):
            number = data[0]
            if number not in SIGNALS:
                continue
            if not codes:
                first_at = time.monotonic()
                codes.append(128 + number)
                first()
                continue
            is_pressed_again = number == signal.SIGINT and codes == [128 + number]
            if is_pressed_again and time.monotonic() < first_at + SECONDS_OF_A_PRESS:
                continue
            if number != HANG_UP:
                second()
                # `sys.exit` would end this thread alone.
                os._exit(128 + number)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    handlers = {}
    for number in SIGNALS:
        if number == HANG_UP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # under nohup
        # a handler is needed for the wakeup, and does nothing: the thread does all
        handlers[number] = signal.signal(number, _do_nothing)
    wakeup = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    try:
        yield codes
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        there.close()  # which ends the thread: it reads nothing
        listener.join()
        here.close()


def _do_nothing(*_: object) -> None:
    """The handler of a signal, which a thread reads from a pipe."""


@contextlib.contextmanager
def leaving_when_interrupted() -> Iterator[None]:
    """In the block and after it, Ctrl-C ends the process at once, with the exit code 130.

    It raises no KeyboardInterrupt. Compiled modules turn what is raised while they are imported
    into other errors, and Python drops what is raised in a callback of the garbage collector or in
    a destructor: 36 of 200 interruptions of a command were lost there.
    """
    # It is ignored in the background, and a program that calls `main` may have its own handler.
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_DFL, signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        # What JAX does at exit takes some tenths of a second, in which Python calls no handler.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _leave(*_: object) -> None:
    with contextlib.suppress(Exception):  # what was interrupted may be a write
        sys.stdout.flush()
        if sys.stderr.isatty():
            sys.stderr.write(LINE_AND_CURSOR)
            sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def interrupted_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Call another handler at Ctrl-C in the block."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:  # in the background
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
