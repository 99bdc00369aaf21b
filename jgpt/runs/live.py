"""The page of `jgpt look --live`: served on the loopback interface, to this machine alone."""

import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jgpt.runs.look import Changes, Look, encode_prompt, page_of

MOST_BYTES = 1 << 20
"""The limit of a request."""
MOST_REQUESTS = 16
"""Requests that are answered at once; more are refused."""
SECONDS = 10
"""How long a request may take to arrive."""


@contextmanager
def serving(look: Look, prompt: str) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """Serve a page; yield its address, with a secret, and the server.

    Only requests with the secret, to this host and from this page are answered, and nothing but the
    page and its numbers.
    """
    encode_prompt(look.model, look.tokenizer, prompt)
    first = answer(look, {"prompt": prompt})
    secret, room, computing = (
        secrets.token_urlsafe(16),
        threading.Semaphore(MOST_REQUESTS),
        threading.Lock(),
    )

    class Handler(BaseHTTPRequestHandler):
        timeout = SECONDS
        server_version, sys_version = "jgpt", ""

        def do_GET(self) -> None:
            if self._allowed(f"/{secret}/"):
                self._send(200, page_of(first, live=True), "text/html; charset=utf-8")

        def do_POST(self) -> None:
            if not self._allowed(f"/{secret}/look"):
                return
            size = self.headers.get("Content-Length", "")
            if self.headers.get("Content-Type") != "application/json" or not size.isdecimal():
                return self._refuse(415, "send JSON, with its length")
            if len(size) > 9 or int(size) > MOST_BYTES:
                return self._refuse(413, f"a request has at most {MOST_BYTES} bytes")
            try:
                asked = json.loads(self.rfile.read(int(size)))
            except (ValueError, RecursionError):
                return self._refuse(400, "that is not JSON")
            try:
                with computing:
                    answered = answer(look, asked)
            except ValueError as error:
                answered = {"error": str(error)}
            self._send(200, json.dumps(answered, allow_nan=False))

        def _allowed(self, path: str) -> bool:
            here = {f"{name}:{server.server_port}" for name in ("127.0.0.1", "localhost")}
            origin = self.headers.get("Origin")
            if self.headers.get("Host") not in here:
                self._refuse(403, "this server answers to its own address alone")
            elif origin is not None and origin.removeprefix("http://") not in here:
                self._refuse(403, "this server answers its own page alone")
            elif not secrets.compare_digest(self.path.encode(), path.encode()):
                self._refuse(404, "there is nothing here: open the address that was printed")
            else:
                return True
            return False

        def _refuse(self, status: int, why: str) -> None:
            self._send(status, f"{why}\n", "text/plain; charset=utf-8")

        def _send(self, status: int, body: str, kind: str = "application/json") -> None:
            data = body.encode()
            self.send_response(status)
            headers = {
                "Content-Type": kind,
                "Content-Length": len(data),
                "Cache-Control": "no-store",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Cross-Origin-Resource-Policy": "same-origin",
            }
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is printed of requests."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def process_request(self, request: Any, client_address: Any) -> None:
            if room.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                room.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A connection that broke concerns nobody else."""

    with Server(("127.0.0.1", 0), Handler) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/{secret}/", server


def answer(look: Look, asked: Any) -> dict[str, Any]:
    """The numbers that a page asks for. Raises ValueError for what is no request."""
    if not isinstance(asked, Mapping) or not isinstance(asked.get("prompt"), str):
        raise ValueError("a request is a JSON object with a prompt")
    _, tokens = encode_prompt(look.model, look.tokenizer, asked["prompt"])
    changes = _changes(look, asked, len(tokens))
    data = look(tokens.tolist(), len(tokens), changes)
    return data | {"live": True, "text": asked["prompt"], "code": changes.as_code(asked["prompt"])}


def _changes(look: Look, asked: Mapping[str, Any], time: int) -> Changes:
    config = look.model.config

    def factors(name: str, sizes: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        given = asked.get(name, {})
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} must be an object of factors")
        for place, factor in given.items():
            at = tuple(int(part) if part.isdecimal() else -1 for part in str(place).split("."))
            if len(at) != len(sizes) or not all(0 <= i < n for i, n in zip(at, sizes, strict=True)):
                raise ValueError(f"{name} has no {place!r}")
            if type(factor) not in (int, float) or not 0 <= factor <= 4:
                raise ValueError(f"{name} {place}: {factor!r} must be a factor from 0 to 4")
            if factor != 1:
                found[at] = float(factor)
        return found

    heads = factors("heads", (config.num_layers, config.num_heads))
    blocks = {layer: factor for (layer,), factor in factors("blocks", (config.num_layers,)).items()}
    patch, given = None, asked.get("patch")
    if given is not None:
        kinds = {"block": int, "position": int, "prompt": str}
        if not isinstance(given, Mapping) or any(
            type(given.get(name)) is not kind for name, kind in kinds.items()
        ):
            raise ValueError("a patch has a block, a position in the prompt and another prompt")
        layer, position, other = (given[name] for name in kinds)
        if not (0 <= layer < config.num_layers and 0 <= position < time):
            raise ValueError(f"a patch can't be at block {layer} and position {position}")
        patch = layer, position, other
    return Changes({(i, j): each for (i, j), each in heads.items()}, blocks, patch)
