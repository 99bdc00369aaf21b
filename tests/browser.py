"""A page in headless Chromium, driven over the DevTools protocol through a pair of pipes."""

import atexit
import base64
import contextlib
import functools
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60
TWO_FRAMES = (
    "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


class Page:
    """One page, with the console errors and the requested URLs."""

    def __init__(self, to: int, of: int) -> None:
        self._to = to
        self._of = of
        self._buffer = b""
        self._ids = itertools.count(1)
        self._session: dict[str, str] = {}
        self._metrics: dict[str, Any] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        (target,) = [
            each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"
        ]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **options: Any) -> dict[str, Any]:
        """Send a command and return the result; errors and requests before it are recorded."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": options, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._of], [], [], SECONDS)
            assert ready, f"Chromium said nothing for {SECONDS} s"
            read = os.read(self._of, 1 << 20)
            assert read, "Chromium ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        method = message.get("method")
        details = message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(details["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(details["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        return message

    def open(self, path: Path | str, width: int = 1280, scheme: str = "light") -> None:
        """Open a file or address at a width, in light or dark; a small width emulates a phone."""
        phone = width < 600
        self._metrics = {
            "width": width,
            "height": 844 if phone else 900,
            "deviceScaleFactor": 2 if phone else 1,
            "mobile": phone,
        }
        self.call("Emulation.setDeviceMetricsOverride", **self._metrics)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        url = path if isinstance(path, str) else path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        until = time.monotonic() + SECONDS
        while self.run("document.readyState") != "complete" or url not in self.run("location.href"):
            assert time.monotonic() < until, "the page never finished"

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        said = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def type(self, text: str) -> None:
        """Press the keys of a text, where the focus is."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def screenshot(self, *, whole: bool = True) -> bytes:
        """A PNG of the whole page, or of the visible part."""
        if not whole:
            return self._capture()
        # `captureBeyondViewport` does not wait for what it has to draw: on a busy machine most of
        # the page is missing
        height = self.run("document.documentElement.scrollHeight")
        self.call("Emulation.setDeviceMetricsOverride", **(self._metrics | {"height": height}))
        self.run(TWO_FRAMES)
        picture = self._capture()
        self.call("Emulation.setDeviceMetricsOverride", **self._metrics)
        return picture

    def _capture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A headless Chromium with one empty page."""
    assert CHROMIUM is not None
    their_input, to = os.pipe()
    of, their_output = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        # Chromium reads commands from descriptor 3 and answers to 4
        command = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'
        options = [*OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *options],
            pass_fds=(their_input, their_output),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        try:
            page = Page(to, of)
            yield page
            page._session = {}
            page.call("Browser.close")
        finally:
            os.close(to)
            os.close(of)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@functools.cache
def shared_browser() -> Page:
    """The browser of all tests in this process, with whose end it ends.

    To start one takes as long as a test of a small page.
    """
    started = contextlib.ExitStack()
    atexit.register(started.close)
    return started.enter_context(browser())
