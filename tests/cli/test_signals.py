"""The first signal asks for a stop, the second leaves, and afterwards all is as it was."""

import os
import signal
import threading
import types

import pytest

from jgpt.cli import signals
from jgpt.cli.signals import SIGNALS, stop_requested


@pytest.fixture
def heard(monkeypatch):
    """What was called, in order; leaving doesn't end this process."""
    heard = types.SimpleNamespace(calls=[], left=threading.Event())

    def leave(code):
        heard.calls.append(code)
        heard.left.set()

    monkeypatch.setattr(signals, "os", types.SimpleNamespace(_exit=leave))
    return heard


def send(number):
    os.kill(os.getpid(), number)


def test_nothing_of_the_signals_is_left_when_it_ends():
    handlers = [lambda *_: None for _ in SIGNALS]
    before = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)
    try:
        threads = threading.active_count()
        with stop_requested(lambda: None, lambda: None):
            assert threading.active_count() == threads + 1
            assert not {signal.getsignal(number) for number in SIGNALS} & {*handlers}
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
        assert signal.set_wakeup_fd(-1) == -1
        assert threading.active_count() == threads

        class Failed(Exception):
            pass

        with pytest.raises(Failed), stop_requested(lambda: None, lambda: None):
            raise Failed
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_asks_and_the_second_leaves(heard, number, code):
    first = threading.Event()

    def asked():
        heard.calls.append("first")
        first.set()

    with stop_requested(asked, lambda: heard.calls.append("second")) as stop:
        assert not stop()
        send(number)
        assert first.wait(10)
        assert stop()
        assert stop.exit_code == code
        assert heard.calls == ["first"]
        send(signal.SIGTERM)
        assert heard.left.wait(10)
    assert heard.calls == ["first", "second", 143]
