"""The page of a run, live: served on the loopback interface, to this machine alone.

`python -m jgpt.pictures.live` serves it beside `jgpt train --live`, in a process of its own, which
is told the run on its standard input. It reads the run's files without a lock, so training waits
for no reader.
"""

import json
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.config import Make
from jgpt.generation.text import default_prompt, generate_text
from jgpt.hardware import current_platform, enable_compilation_cache
from jgpt.nn.models import abstract_model
from jgpt.nn.precision import for_platform
from jgpt.pictures.look import Changes, Look, encode_text, page_of
from jgpt.runs.checkpoints import Checkpoints, Which, load
from jgpt.runs.directory import CHECKPOINTS, METRICS, RunDirectory
from jgpt.runs.manifest import MANIFEST
from jgpt.user_code import with_code

MOST_POINTS = 400
"""The limit of a loss curve: more steps are drawn as means."""
MOST_OPEN = 4
"""How many checkpoints are kept in memory."""
SAMPLE_TOKENS = 100
MOST_BYTES = 1 << 20
"""The limit of a request."""
MOST_REQUESTS = 16
"""Requests that are answered at once; more are refused."""
SECONDS = 10
"""How long a request may take to arrive."""


class RunPage:
    """The data of a run's page: the progress of training, and forward passes of checkpoints.

    The run's files are read when a page asks. `which` is the checkpoint that is shown first.
    Raises ValueError or OSError for a run, a checkpoint or a prompt that can't be shown.
    """

    def __init__(
        self,
        directory: str | Path,
        prompt: str | None = None,
        *,
        which: Which = "best",
        model: Make | str = None,
    ) -> None:
        self.run = RunDirectory.open(directory)
        self._model = model
        self.which: Which = which
        self.name, tokenizer = self.run.path.resolve().name, self.run.tokenizer()
        self.prompt = tokenizer.decode(default_prompt(tokenizer)) if prompt is None else prompt
        encode_text(tokenizer, self.prompt)
        self._opened: dict[tuple[int, int], Look] = {}
        self._snapshots: dict[tuple[int, int], dict[str, Any]] = {}
        self._computing = threading.Lock()
        if self.run.checkpoint_steps():
            self._open(which)

    def look(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers for a prompt and changes; with `other`, also those of that checkpoint."""
        with self._computing:
            (step, _), look = self._open(asked.get("checkpoint"))
            found = answer(look, asked) | {"checkpoint": step, "other": None}
            if (other := asked.get("other")) is not None:
                (step, _), look = self._open(other)
                found["other"] = answer(look, asked) | {"checkpoint": step}
        return found

    def training(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The loss curve so far, and the checkpoints; nothing is read unless files have changed."""
        run = RunDirectory.open(self.run.path)
        written = [run.path / name for name in (METRICS, CHECKPOINTS)]
        at = [path.stat().st_mtime_ns if path.exists() else 0 for path in written]
        if asked.get("since") == str(at):
            return {"unchanged": True}
        lines = run.metrics()
        losses = {}
        for name in ("loss", "validation_loss", "validation_estimate"):
            losses[name] = [[line["step"], line[name]] for line in lines if name in line]
        steps = losses["loss"]
        each = max(1, -(-len(losses["loss"]) // MOST_POINTS))
        parts = [steps[first : first + each] for first in range(0, len(steps), each)]
        losses["loss"] = [np.mean(part, axis=0).tolist() for part in parts]
        with Checkpoints(run, read_only=True) as checkpoints:
            saved = checkpoints.steps()
            named = {name: checkpoints.step(name) for name in ("best", "last")} if saved else {}
        last = lines[-1]["step"] if lines else 0
        of = run.config().steps
        told = {"at": str(at), "each": each, "step": last, "steps": of}
        return losses | told | {"checkpoints": saved, "named": named}

    def snapshot(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A sample of a checkpoint, and its attention over the prompt that the page began with."""
        with self._computing:
            at, look = self._open(asked.get("checkpoint"))
            if at not in self._snapshots:
                text = generate_text(look.model, look.tokenizer, "", SAMPLE_TOKENS, temperature=0.8)
                numbers = answer(look, {"prompt": self.prompt})
                names = ("attention", "tokens", "layers", "heads")
                found = {"checkpoint": at[0], "sample": text}
                self._snapshots[at] = found | {name: numbers[name] for name in names}
            return self._snapshots[at]

    def warm_up(self) -> None:
        """Load the programs of a page before there is a checkpoint, for a model of zeros.

        Beside training, while that compiles on one core too.
        """
        config = with_code(self.run.config(), self._model, None)
        made = abstract_model(for_platform(config.model, current_platform()))
        graph, weights = nnx.split(made)
        (here, *_) = jax.devices()  # arrays of a checkpoint are committed to it, and so are these
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=here), weights)
        # what can't be shown is said when a page asks for it
        with self._computing, suppress(ValueError):
            look = Look(nnx.merge(graph, zeros), self.run.tokenizer(), self.name)
            self._opened.setdefault((0, 0), look)
            answer(look, {"prompt": self.prompt})
            generate_text(look.model, look.tokenizer, "", SAMPLE_TOKENS, temperature=0.8)

    def _open(self, which: Any) -> tuple[tuple[int, int], Look]:
        """A checkpoint, by its step and the time when it was saved; None is the one shown first."""
        run = RunDirectory.open(self.run.path)
        with Checkpoints(run, read_only=True) as checkpoints:
            step = checkpoints.step(self.which if which is None else which)
        at = step, (run.path / CHECKPOINTS / f"{step}" / MANIFEST).stat().st_mtime_ns
        if at not in self._opened:
            model: Any
            model, tokenizer, _ = load(run.path, which=step, model=self._model)
            like = next(iter(self._opened.values()), None)
            look = Look(model, tokenizer, self.name, like=like)
            self._opened[at] = look
            for oldest in list(self._opened)[:-MOST_OPEN]:
                del self._opened[oldest]
        return at, self._opened[at]


@contextmanager
def serving(run: RunPage) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """Serve a page; yield its address, with a secret, and the server.

    Only requests with the secret, to this host and from this page are answered, and nothing but the
    page and its numbers.
    """
    secret = secrets.token_urlsafe(16)
    room = threading.Semaphore(MOST_REQUESTS)
    page = {"name": run.name, "live": True, "text": run.prompt, "checkpoint": run.which}
    answers = {"look": run.look, "training": run.training, "checkpoint": run.snapshot}

    class Handler(BaseHTTPRequestHandler):
        timeout = SECONDS
        server_version = "jgpt"
        sys_version = ""

        def do_GET(self) -> None:
            if self._allowed(f"/{secret}/"):
                self._send(200, page_of(page, live=True), "text/html; charset=utf-8")

        def do_POST(self) -> None:
            name = self.path.rpartition("/")[2]
            name = name if name in answers else "look"
            if not self._allowed(f"/{secret}/{name}"):
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
                if not isinstance(asked, Mapping):
                    raise ValueError("a request is a JSON object")
                answered = answers[name](asked)
            except (ValueError, OSError) as error:
                answered = {"error": " ".join(str(error).split())}
            self._send(200, json.dumps(answered, allow_nan=False))

        def _allowed(self, path: str) -> bool:
            here = {f"{name}:{server.server_port}" for name in ("127.0.0.1", "localhost")}
            origin = self.headers.get("Origin")
            if not set(self.headers.get_all("Host", [""])) <= here:
                self._refuse(403, "this server answers to its own address alone")
            elif origin is not None and origin.removeprefix("http://") not in here:
                self._refuse(403, "this server answers its own page alone")
            elif not secrets.compare_digest(self.path.encode(), path.encode()):
                self._refuse(404, "there is nothing here: open the address that was printed")
            else:
                return True
            return False

        def send_error(self, code: int, message: str | None = None, explain: Any = None) -> None:
            self._refuse(code, message or "that is no request for this page")

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
            """Print nothing."""

    class Server(ThreadingHTTPServer):
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
            """Ignore broken connections."""

    with Server(("127.0.0.1", 0), Handler) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/{secret}/", server


def answer(look: Look, asked: Any) -> dict[str, Any]:
    """The numbers that a page asks for. Raises ValueError for what is no request."""
    match asked:
        case {"prompt": str(prompt)}:
            tokens = encode_text(look.tokenizer, prompt)
        case _:
            raise ValueError("a request is a JSON object with a prompt")
    changes = _changes(look, asked, len(tokens))
    data = look(tokens.tolist(), len(tokens), changes)
    return data | {"live": True, "text": prompt, "code": changes.as_code(look.anatomy, prompt)}


def _changes(look: Look, asked: Mapping[str, Any], time: int) -> Changes:
    anatomy = look.anatomy

    def factors(name: str, places: dict[str, Any]) -> dict[Any, float]:
        given = asked.get(name, {})
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} must be an object of factors")
        for place, factor in given.items():
            if place not in places:
                raise ValueError(f"{name} has no {place!r}")
            if type(factor) not in (int, float) or not 0 <= factor <= 4:
                raise ValueError(f"{name} {place}: {factor!r} must be a factor from 0 to 4")
        return {places[place]: float(factor) for place, factor in given.items() if factor != 1}

    switched = [layer for layer, path in enumerate(anatomy.by_head) if path is not None]
    pairs = [(layer, head) for layer in switched for head in range(anatomy.heads)]
    heads = factors("heads", {f"{layer}.{head}": (layer, head) for layer, head in pairs})
    scaled = [layer for layer, paths in enumerate(anatomy.branches) if paths]
    blocks = factors("blocks", {f"{layer}": layer for layer in scaled})
    match asked.get("patch"):
        case None:
            return Changes(heads, blocks)
        case {"block": int(layer), "position": int(position), "prompt": str(other)} if not (
            isinstance(layer, bool) or isinstance(position, bool)
        ):
            if not (0 <= layer < len(anatomy.blocks) and 0 <= position < time):
                raise ValueError(f"a patch can't be at block {layer} and position {position}")
            return Changes(heads, blocks, (layer, position, other))
        case _:
            raise ValueError("a patch has a block, a position in the prompt and another prompt")


def main() -> None:
    """Serve a run beside its training, until the trainer's process closes standard input."""
    enable_compilation_cache()
    if not (line := sys.stdin.readline()):
        return  # nothing is trained
    directory, prompt, model = json.loads(line)
    page = RunPage(directory, prompt, which="last", model=model)
    with serving(page) as (address, server):
        print(address, flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.warm_up()
        sys.stdin.read()


if __name__ == "__main__":
    main()
