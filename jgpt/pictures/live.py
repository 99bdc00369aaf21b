"""The live page of a run, served on the loopback interface, to this machine alone.

`python -m jgpt.pictures.live` serves it beside `jgpt train --live`, in a separate process that
receives the run on its standard input. It reads the run's files without a lock, so training never
waits for a reader.
"""

import json
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.fields import Make
from jgpt.generation.text import default_prompt, generate_text
from jgpt.hardware import current_platform, enable_compilation_cache
from jgpt.nn.models import abstract_model
from jgpt.nn.precision import for_platform
from jgpt.pictures.anatomy import Anatomy
from jgpt.pictures.numbers import Changes, Look, encode_text
from jgpt.pictures.page import page_of
from jgpt.runs.checkpoints import Checkpoints, Which
from jgpt.runs.directory import CHECKPOINTS, METRICS, RunDirectory
from jgpt.runs.load import load, run_tokenizer
from jgpt.runs.manifest import MANIFEST
from jgpt.user_code import with_code

MOST_POINTS = 400
"""The limit of points in a loss curve; if there are more steps, their means are drawn."""
MOST_OPEN = 4
"""The number of checkpoints kept in memory; a page puts two of them side by side."""
SAMPLE_TOKENS = 100
MOST_BYTES = 1 << 20
"""The limit of a request in bytes."""
MOST_REQUESTS = 16
"""The number of requests answered at once; further ones are rejected."""
SECONDS = 10
"""The seconds in which a request must arrive."""


@dataclass(frozen=True)
class SavedAt:
    """The identity of a checkpoint: an overwritten run has another one with the same step."""

    step: int
    nanoseconds: int
    """The modification time of its manifest."""


class RunPage:
    """The data of a run's page: the progress of training, and forward passes of checkpoints.

    The run's files are read when a page asks. `which` is the checkpoint that is shown first. Raises
    ValueError or OSError for a run, a checkpoint or a prompt that can't be shown.
    """

    def __init__(
        self,
        directory: str | Path,
        prompt: str | None = None,
        *,
        which: Which = "best",
        model: Make | str = None,
        tokenizer: Any = None,
    ) -> None:
        self.run = RunDirectory.open(directory)
        self._model = model
        self._code = tokenizer
        self._tokenizer = run_tokenizer(self.run, tokenizer)
        self.which: Which = which
        self.name = self.run.path.resolve().name
        if prompt is None:
            prompt = self._tokenizer.decode(default_prompt(self._tokenizer))
        encode_text(self._tokenizer, prompt)  # raises for a prompt that can't be encoded
        self.prompt = prompt
        self._opened: dict[SavedAt, Look] = {}
        self._snapshots: dict[SavedAt, dict[str, Any]] = {}
        # Each request has a thread, but only one at a time computes or opens a checkpoint.
        self._computing = threading.Lock()
        if self.run.checkpoint_steps():
            self._open(which)

    def look(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers for a prompt and changes; with `other`, also those of that
        checkpoint."""
        other = asked.get("other")
        with self._computing:
            found = self._answer(asked.get("checkpoint"), asked)
            found["other"] = None
            if other is not None:
                found["other"] = self._answer(other, asked)
        return found

    def training(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss curve so far and the checkpoints; files are read only if they have
        changed."""
        run = RunDirectory.open(self.run.path)
        times = []
        for name in (METRICS, CHECKPOINTS):
            path = run.path / name
            changed_at = 0
            if path.exists():
                changed_at = path.stat().st_mtime_ns
            times.append(changed_at)
        # A page asks again and again, and a long run's metrics have many lines.
        if asked.get("since") == str(times):
            return {"unchanged": True}

        lines = run.metrics()
        losses = {}
        for name in ("loss", "validation_loss", "validation_estimate"):
            losses[name] = [[line["step"], line[name]] for line in lines if name in line]
        steps_per_point = max(1, -(-len(losses["loss"]) // MOST_POINTS))  # rounded up
        losses["loss"] = _means(losses["loss"], steps_per_point)

        named = {}
        with Checkpoints(run, read_only=True) as checkpoints:
            saved = checkpoints.steps()
            if saved:
                named = {"best": checkpoints.step("best"), "last": checkpoints.step("last")}
        return losses | {
            "at": str(times),
            "each": steps_per_point,
            "step": lines[-1]["step"] if lines else 0,
            "steps": run.config().steps,
            "checkpoints": saved,
            "named": named,
        }

    def snapshot(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample of a checkpoint, and its attention over the prompt that the page began
        with."""
        with self._computing:
            saved_at, look = self._open(asked.get("checkpoint"))
            if saved_at not in self._snapshots:
                snapshot = {"checkpoint": saved_at.step, "sample": _sample(look)}
                numbers = answer(look, {"prompt": self.prompt})
                for name in ("attention", "tokens", "layers", "heads"):
                    snapshot[name] = numbers[name]
                self._snapshots[saved_at] = snapshot
            return self._snapshots[saved_at]

    def warm_up(self) -> None:
        """Load the programs of a page before there is a checkpoint, with a model of zeros.

        This happens while training compiles, which uses one core, too.
        """
        config = with_code(self.run.config(), self._model, None)
        made = abstract_model(for_platform(config.model, current_platform()))
        graph, weights = nnx.split(made)
        # Arrays of a checkpoint are committed to a device, so these are, too: otherwise JAX would
        # compile the program again.
        device = jax.devices()[0]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=device), weights)
        # The page reports this error when it asks for the numbers.
        with self._computing, suppress(ValueError):
            look = Look(nnx.merge(graph, zeros), self._tokenizer, self.name)
            # No checkpoint has the step 0 and time 0; the first checkpoint that is opened reuses
            # this entry.
            self._opened.setdefault(SavedAt(0, 0), look)
            answer(look, {"prompt": self.prompt})
            _sample(look)

    def _answer(self, which: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
        saved_at, look = self._open(which)
        return answer(look, asked) | {"checkpoint": saved_at.step}

    def _open(self, which: Any) -> tuple[SavedAt, Look]:
        """Open a checkpoint and compute the numbers of its page; None is the checkpoint shown
        first."""
        if which is None:
            which = self.which
        run = RunDirectory.open(self.run.path)
        with Checkpoints(run, read_only=True) as checkpoints:
            step = checkpoints.step(which)
        manifest = run.path / CHECKPOINTS / str(step) / MANIFEST
        saved_at = SavedAt(step, manifest.stat().st_mtime_ns)
        if saved_at not in self._opened:
            model: Any
            model, tokenizer, _ = load(
                run.path, which=step, model=self._model, tokenizer=self._code
            )
            any_opened = next(iter(self._opened.values()), None)
            look = Look(model, tokenizer, self.name, like=any_opened)
            self._opened[saved_at] = look
            for oldest in list(self._opened)[:-MOST_OPEN]:
                del self._opened[oldest]
        return saved_at, self._opened[saved_at]


def _means(points: list[list[Any]], count: int) -> list[list[Any]]:
    """Shorten a curve to one point for every `count`, with their mean step and mean loss."""
    means = []
    for first in range(0, len(points), count):
        means.append(np.mean(points[first : first + count], axis=0).tolist())
    return means


def _sample(look: Look) -> str:
    return generate_text(look.model, look.tokenizer, "", SAMPLE_TOKENS)


@contextmanager
def serving(run: RunPage) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """Serve a page; yield its address, with a secret, and the server.

    The server answers only requests with the secret, to this host and from this page, and sends
    only the page and its numbers.
    """
    secret = secrets.token_urlsafe(16)
    with _Server(run, secret) as server:
        yield f"http://127.0.0.1:{server.server_port}/{secret}/", server


class _Server(ThreadingHTTPServer):
    """A server that answers requests in threads, up to a limit; it closes further connections."""

    request_queue_size = 128

    def __init__(self, run: RunPage, secret: str) -> None:
        self.secret = secret
        self.page = {"name": run.name, "live": True, "text": run.prompt, "checkpoint": run.which}
        self.answers = {"look": run.look, "training": run.training, "checkpoint": run.snapshot}
        self._room = threading.Semaphore(MOST_REQUESTS)
        super().__init__(("127.0.0.1", 0), _Handler)  # any free port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a request, if there is room."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""


class _Handler(BaseHTTPRequestHandler):
    """A handler for one request of the page."""

    server_version = "jgpt"
    sys_version = ""  # strangers need not know it

    def setup(self) -> None:
        """Limit the time in which a request must arrive, since a silent connection occupies a
        thread."""
        super().setup()
        self.connection.settimeout(SECONDS)

    @property
    def _server(self) -> _Server:
        assert isinstance(self.server, _Server)
        return self.server

    def do_GET(self) -> None:
        """Send the page."""
        if self._allowed(f"/{self._server.secret}/"):
            page = page_of(self._server.page, policy="connect-src 'self'")
            self._send(200, page, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        """Send the numbers that the page asks for."""
        name = self.path.rpartition("/")[2]
        if name not in self._server.answers:
            name = "look"  # any name is rejected here, since the path must be a known one
        if not self._allowed(f"/{self._server.secret}/{name}"):
            return
        size = self.headers.get("Content-Length", "")
        if self.headers.get("Content-Type") != "application/json" or not size.isdecimal():
            self._reject(415, "send JSON, with its length")
            return
        # The number of digits is checked first, since int() raises for thousands of them.
        if len(size) > 9 or int(size) > MOST_BYTES:
            self._reject(413, f"a request has at most {MOST_BYTES} bytes")
            return
        try:
            request = json.loads(self.rfile.read(int(size)))
        except (ValueError, RecursionError):  # RecursionError is for deeply nested lists
            self._reject(400, "that is not JSON")
            return
        try:
            if not isinstance(request, Mapping):
                raise ValueError("a request must be a JSON object")
            answered = self._server.answers[name](request)
        except (ValueError, OSError) as error:
            answered = {"error": " ".join(str(error).split())}
        self._send(200, json.dumps(answered, allow_nan=False))

    def _allowed(self, path: str) -> bool:
        """Return whether a request is for this path and from this page; if not, answer it with an
        error."""
        port = self._server.server_port
        own_hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        hosts = set(self.headers.get_all("Host", [""]))
        origin = self.headers.get("Origin")
        # A stranger's host name that resolves to this machine (DNS rebinding).
        if not hosts <= own_hosts:
            self._reject(403, "this server answers to its own address alone")
            return False
        # Another page that is open in the same browser.
        if origin is not None and origin.removeprefix("http://") not in own_hosts:
            self._reject(403, "this server answers its own page alone")
            return False
        # Another program or user of this machine. The comparison takes constant time, since the
        # path has a secret.
        if not secrets.compare_digest(self.path.encode(), path.encode()):
            self._reject(404, "there is nothing here: open the address that was printed")
            return False
        return True

    def send_error(self, code: int, message: str | None = None, explain: Any = None) -> None:
        """Reject an invalid request in one line, where the library would send a page."""
        self._reject(code, message or "that is no request for this page")

    def _reject(self, status: int, reason: str) -> None:
        self._send(status, f"{reason}\n", "text/plain; charset=utf-8")

    def _send(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": len(data),
            "Cache-Control": "no-store",
            # The address has the secret, so no other page may see it, read an answer or frame it.
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
        """Print nothing."""


def answer(look: Look, asked: Any) -> dict[str, Any]:
    """Return the numbers that a page asks for. Raises ValueError for an invalid request."""
    match asked:
        case {"prompt": str(prompt)}:
            tokens = encode_text(look.tokenizer, prompt)
        case _:
            raise ValueError("a request must be a JSON object with a prompt")
    changes = _changes(look.anatomy, asked, len(tokens))
    data = look(tokens.tolist(), len(tokens), changes)
    return data | {"live": True, "text": prompt, "code": changes.as_code(look.anatomy, prompt)}


def _changes(anatomy: Anatomy, asked: Mapping[str, Any], time: int) -> Changes:
    """Return the changes in a request. Raises ValueError for changes that this model doesn't
    have."""
    heads = {}
    for layer, path in enumerate(anatomy.head_outputs):
        if path is None:
            continue
        for head in range(anatomy.heads):
            heads[f"{layer}.{head}"] = (layer, head)
    blocks = {}
    for layer, branches in enumerate(anatomy.branches):
        if branches:
            blocks[str(layer)] = layer
    return Changes(
        heads=_factors(asked, "heads", heads),
        blocks=_factors(asked, "blocks", blocks),
        patch=_patch(asked.get("patch"), len(anatomy.blocks), time),
    )


def _factors(asked: Mapping[str, Any], name: str, places: dict[str, Any]) -> dict[Any, float]:
    """Return the factors in a request, by place, without those of 1, which change nothing."""
    requested = asked.get(name, {})
    if not isinstance(requested, Mapping):
        raise ValueError(f"{name} must be an object of factors")
    factors = {}
    for place, factor in requested.items():
        if place not in places:
            raise ValueError(f"{name} has no {place!r}")
        # isinstance counts true as an int.
        if type(factor) not in (int, float) or not 0 <= factor <= 4:
            raise ValueError(f"{name} {place}: {factor!r} must be a factor from 0 to 4")
        if factor != 1:
            factors[places[place]] = float(factor)
    return factors


def _patch(requested: Any, blocks: int, time: int) -> tuple[int, int, str] | None:
    """Return the layer, the position and the other prompt of a patch."""
    match requested:
        case None:
            return None
        case {"block": int(layer), "position": int(position), "prompt": str(other_prompt)} if not (
            isinstance(layer, bool) or isinstance(position, bool)
        ):
            if not (0 <= layer < blocks and 0 <= position < time):
                raise ValueError(f"a patch can't be at block {layer} and position {position}")
            return layer, position, other_prompt
        case _:
            raise ValueError("a patch has a block, a position in the prompt and another prompt")


def main() -> None:
    """Serve a run beside its training, until the trainer's process closes standard input."""
    enable_compilation_cache()
    line = sys.stdin.readline()
    if not line:
        return  # there is no training
    directory, prompt, model, tokenizer = json.loads(line)
    page = RunPage(directory, prompt, which="last", model=model, tokenizer=tokenizer)
    with serving(page) as (address, server):
        print(address, flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.warm_up()
        sys.stdin.read()


if __name__ == "__main__":
    main()
