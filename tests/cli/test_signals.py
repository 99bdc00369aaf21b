"""The first signal asks for a stop, the second leaves, and afterwards all is as it was."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from jgpt.cli import signals
from jgpt.cli.signals import SIGNALS, stop_requested
from jgpt.runs.directory import RunDirectory
from tests.cli.screen import in_a_terminal


@pytest.fixture
def heard(monkeypatch):
    """What was called, in order; leaving doesn't end this process."""
    heard = types.SimpleNamespace(calls=[], left=threading.Event())

    def leave(code):
        heard.calls.append(code)
        heard.left.set()

    monkeypatch.setattr(signals, "os", types.SimpleNamespace(_exit=leave))
    # a test run under nohup ignores hang-ups, and so would these
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_asks_and_the_second_leaves(heard, number):
    first = threading.Event()

    def asked():
        heard.calls.append("first")
        first.set()

    with stop_requested(asked, lambda: heard.calls.append("second")) as codes:
        assert codes == []
        send(number)
        assert first.wait(10)
        assert codes == [128 + number]
        assert heard.calls == ["first"]
        send(signal.SIGTERM)
        assert heard.left.wait(10)

    assert heard.calls == ["first", "second", 143]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_what_is_told_twice_in_a_second_is_one_request(heard, monkeypatch, number, code):
    """Ctrl-C in a hurry, and a closed terminal."""
    first = threading.Event()
    with stop_requested(first.set, lambda: heard.calls.append("second")) as codes:
        send(number)
        assert first.wait(10)
        send(number)
        assert not heard.left.wait(0.3)
        assert codes == [code]
        monkeypatch.setattr(signals, "SECONDS_OF_A_PRESS", 0.3)
        send(signal.SIGINT)
        assert heard.left.wait(10)
    assert heard.calls == ["second", 130]


def test_under_nohup_a_closed_terminal_is_no_request(heard):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requested(lambda: heard.calls.append("first"), heard.left.set) as codes:
            send(signal.SIGHUP)
            time.sleep(0.3)
            assert codes == []
        assert heard.calls == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_a_checkpoint(poem, tmp_path):
    """The system tells the process, as a shell would, and what it still says goes nowhere."""
    train = ("train", "bigram", "--data", poem, "--out", tmp_path / "run")
    endless = ("--steps", 1_000_000, "--eval-interval", 1_000_000)
    with in_a_terminal(*train, *endless) as (process, screen):
        shown = b""
        while b" tokens/s" not in shown:  # the bar, after the first steps
            shown += os.read(screen, 4096)
        os.close(screen)
        assert process.wait(60) == 129
    run = RunDirectory.open(tmp_path / "run")

    assert run.checkpoint_steps()[-1] == run.metrics()[-1]["step"] > 0


IN_A_DESTRUCTOR = """
import signal, sys, time
from jgpt.cli import commands, main

class Thing:
    def __del__(self):
        print("here", flush=True)
        until = time.monotonic() + 20
        while time.monotonic() < until:  # in Python, where a handler can run
            pass

def nothing() -> None:
    thing = Thing()
    del thing
    print("went on")

# the tests may run in the background, where the signal is ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
commands.COMMANDS["nothing"] = nothing
main()
"""


def test_an_interruption_where_python_drops_what_is_raised_ends_the_command():
    command = [sys.executable, "-c", IN_A_DESTRUCTOR, "nothing"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=15) == ("", "")

    assert process.returncode == 130


STARTED = """
import signal, sys
# not in the child between fork and exec: that would fork this process, which JAX warns about
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored in the background
import jgpt.cli
print("started", file=sys.stderr, flush=True)
jgpt.cli.main()
"""


def start(arguments):
    """A command whose handlers are Python's own, and that has imported what is there at once."""
    command = [sys.executable, "-c", STARTED, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    return process


@pytest.mark.slow
def test_an_interruption_at_any_time_ends_a_command(trained):
    """Soon, and without a traceback."""
    sample = ("sample", trained.path, "--max-new-tokens", 1000, "--num-samples", 64)
    chance = random.Random(0)
    whole = start(sample)
    began = time.monotonic()
    whole.communicate()
    seconds = time.monotonic() - began
    interrupted = 0
    while interrupted < 4:
        process = start(sample)
        time.sleep(chance.uniform(0, seconds))
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            interrupted += 1
            _, said = process.communicate(timeout=30)
            assert process.returncode in (130, -signal.SIGINT), said
            assert "Traceback" not in said
            assert "Exception ignored" not in said
        process.communicate()
