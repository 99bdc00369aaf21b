"""A page in headless Firefox, driven over Marionette, which geckodriver speaks to it."""

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
SECONDS = 60
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's reference in an answer: WebDriver, section 12.4."""

IN_THE_PAGE = """
const script = document.createElement("script");
script.textContent = arguments[0];
document.body.append(script);
script.remove();
"""
ANSWERING = """
Promise.resolve().then(() => EXPRESSION).then(
  value => ({ value }),
  error => ({ error: String(error) }),
).then(answer => { document.body.dataset.answer = JSON.stringify(answer); });
"""
READ = """
const { answer } = document.body.dataset;
delete document.body.dataset.answer;
return answer;
"""


class Page:
    """One page of a Firefox."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers = connection.makefile("rb")
        self._ids = itertools.count(1)
        self._receive()  # the greeting
        self.call("WebDriver:NewSession")

    def call(self, command: str, **parameters: Any) -> Any:
        """Send a command and return the result."""
        number = next(self._ids)
        message = json.dumps([0, number, command, parameters]).encode()
        self._connection.sendall(b"%d:%s" % (len(message), message))
        _, answered, error, result = self._receive()
        assert answered == number
        assert error is None, (command, error)
        return result

    def _receive(self) -> Any:
        size = b""
        while not size.endswith(b":"):
            read = self._answers.read(1)
            assert read, "Firefox ended"
            size += read
        return json.loads(self._answers.read(int(size[:-1])))

    def open(self, path: Path) -> None:
        self.call("WebDriver:Navigate", url=path.resolve().as_uri())

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of its promise."""
        # In a script of the page, which sees the page's names; its answer is in the document.
        self._execute(IN_THE_PAGE, ANSWERING.replace("EXPRESSION", expression))
        until = time.monotonic() + SECONDS
        while (answer := self._execute(READ)) is None:
            assert time.monotonic() < until, "the page never answered"
            time.sleep(0.02)
        found = json.loads(answer)
        assert "error" not in found, found
        return found.get("value")

    def _execute(self, script: str, *arguments: str) -> Any:
        return self.call("WebDriver:ExecuteScript", script=script, args=arguments)["value"]

    def type(self, element: str, text: str) -> None:
        """Type a text into the element with this id."""
        found = self.call("WebDriver:FindElement", using="css selector", value=f"#{element}")
        self.call("WebDriver:ElementSendKeys", id=found["value"][ELEMENT], text=text)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A headless Firefox with one empty page."""
    assert FIREFOX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _, port = free.getsockname()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        Path(profile, "user.js").write_text(f'user_pref("marionette.port", {port});\n')
        options = ["--headless", "--no-remote", "--marionette", "--profile", profile]
        process = subprocess.Popen(
            [FIREFOX, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with _connected(port) as connection:
                page = Page(connection)
                yield page
                page.call("Marionette:Quit", flags=["eForceQuit"])
        finally:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _connected(port: int) -> socket.socket:
    """A connection, as soon as Firefox listens."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), SECONDS)
        except ConnectionRefusedError:
            assert time.monotonic() < until, "Firefox never listened"
            time.sleep(0.1)
