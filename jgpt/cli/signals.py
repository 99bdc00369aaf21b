"""SIGINT, SIGTERM and SIGHUP: the first requests a stop, the second exits at once."""

import _thread
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

HANG_UP = getattr(signal, "SIGHUP", None)
"""The terminal was closed. Windows has no such signal."""
SECONDS_UNTIL_AGAIN = 0.02
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
def exit_when_interrupted(tidy: Callable[[], None]) -> Iterator[None]:
    """Exit with 130 at Ctrl-C, after a call of `tidy`, where nothing is being written.

    While NumPy and JAX are imported, KeyboardInterrupt would be raised inside compiled code that
    doesn't expect it. Of 209 interruptions in the first three seconds of a command, 85 ended in a
    traceback about an import, 12 crashed, and one hung.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # it is ignored in the background, or somebody else's
        return

    def leave(*_: object) -> None:
        tidy()
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once_when_interrupted() -> None:
    """From now on the system ends the process at Ctrl-C: for a command that has done its work.

    What JAX does at exit takes some tenths of a second, and Python reports KeyboardInterrupt there
    with a traceback and exits with 0.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_again() -> threading.Event:
    """Interrupt the main thread once more, a moment later, unless the event is set by then.

    Ctrl-C raises KeyboardInterrupt wherever the main thread happens to be. In a callback of the
    garbage collector, of a weak reference or in a destructor Python only reports what is raised,
    and JAX has many of them: 36 of 200 interruptions were lost there. What reports it calls this.
    """
    returned = threading.Event()
    canceled = threading.Event()

    def interrupt() -> None:
        # not from here: the callback that was interrupted has not returned yet. On a busy machine
        # the main thread may take long to return, and what is raised before that is lost, too
        returned.wait()
        if canceled.wait(SECONDS_UNTIL_AGAIN):
            return
        main = threading.main_thread().ident
        if hasattr(signal, "pthread_kill") and main is not None:
            signal.pthread_kill(main, signal.SIGINT)  # ends a system call, too
        else:
            _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    returned.set()
    return canceled
