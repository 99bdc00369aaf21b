"""The page of a run in training, written again after each evaluation.

`main` writes it beside `jgpt train --page`, in a separate process that receives the run on its
standard input. It reads the run's files without a lock, so training never waits for it.
"""

import base64
import gc
import io
import json
import math
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.generation.text import generate_text
from jgpt.hardware import current_platform, enable_compilation_cache
from jgpt.nn.models import abstract_model
from jgpt.nn.precision import for_platform
from jgpt.pictures.numbers import Look, quantise_for_page
from jgpt.pictures.page import FirstText, ModelPages, first_text
from jgpt.runs.directory import CHECKPOINTS, PAGE, RunDirectory
from jgpt.runs.load import load, run_tokenizer
from jgpt.runs.manifest import MANIFEST, Manifest
from jgpt.user_code import with_code

MOST_POINTS = 400
"""The limit of points in a loss curve; if there are more steps, their means are drawn."""
SAMPLE_TOKENS = 100
MOST_SNAPSHOTS = 40
"""The limit of samples and maps on a page; of more, every second one is left out."""
MOST_EARLIER = 4
"""The limit of earlier checkpoints of a resumed run that get a sample and a map, too."""
MOST_MAP_WEIGHTS = 4096
"""The limit of attention weights in the maps of one checkpoint, which take a byte each."""
MOST_MAP_TOKENS = 32
SECONDS_PER_LOOK = 0.5
"""Between two looks for a new checkpoint, which take less than a millisecond."""
LEAST_SECONDS = 5.0
"""Between two pages, of which a reader sees each one."""
REST = 10.0
"""The time between two pages in relation to the processor time of the first one."""
FIRST_SECONDS = 10.0
"""The seconds after which the first page reloads itself. Later ones know how often they come."""


@dataclass(frozen=True)
class SavedAt:
    """The identity of a checkpoint and its evaluation."""

    step: int
    nanoseconds: int
    """The modification time of its manifest, which is written again with the loss."""


class TrainingPage:
    """The page of a run in training: its newest model, and how it came to be.

    `prompt` is the text that the page begins with. `model` and `tokenizer` are the run's custom
    code as FILE.py:NAME. Raises ValueError or OSError for a run that can't be read.
    """

    def __init__(
        self,
        directory: str | Path,
        prompt: str,
        *,
        model: str | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self._run = RunDirectory.open(directory)
        self._prompt = prompt
        self._model = model
        self._code = tokenizer
        self._name = self._run.path.resolve().name
        self._look: Look | None = None
        self._pages: ModelPages | None = None
        self._snapshots: dict[int, dict[str, Any]] = {}
        self._shown: SavedAt | None = None
        self._written: float | None = None
        self._writing = threading.Lock()
        for remains in self._run.path.glob(f"{PAGE}.*.partial"):  # of a killed process
            remains.unlink(missing_ok=True)

    def prepare(self) -> None:
        """Make the programs of the page before there is a checkpoint, with a model of zeros.

        This happens while training compiles, which uses one core, too. Raises Uncomputable if no
        page can compute with the model or the tokenizer.
        """
        config = with_code(self._run.config(), self._model, None)
        made = abstract_model(for_platform(config.model, current_platform()))
        graph, weights = nnx.split(made)
        # Arrays of a checkpoint are committed to a device, so these are, too: otherwise JAX would
        # compile the programs again.
        device = jax.devices()[0]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=device), weights)
        tokenizer = run_tokenizer(self._run, self._code)
        look = Look(nnx.merge(graph, zeros), tokenizer, self._name)
        self._look = look
        self._pages = ModelPages(look)
        self._prompt = _that_fits(look, self._prompt)
        first_text(look, self._prompt)
        _sample(look)

    def update(self, *, is_last: bool = False) -> bool:
        """Write the page if there is a new checkpoint or evaluation; return whether it was written.

        The last page is written in any case, unless there is no checkpoint. It doesn't reload
        itself.
        """
        found = self._evaluated()
        if not found:
            return False
        newest = found[-1]
        if newest == self._shown and not is_last:
            return False
        earlier: list[SavedAt] = []
        if self._shown is None:
            earlier = found[:-1][-MOST_EARLIER:]
        try:
            for saved_at in earlier:
                look = self._open(saved_at.step)
                self._add_snapshot(saved_at.step, look, first_text(look, self._prompt))
            look = self._open(newest.step)
        except (OSError, ValueError):
            steps = RunDirectory.open(self._run.path).checkpoint_steps()
            if {saved_at.step for saved_at in (*earlier, newest)} <= set(steps):
                raise
            return False  # training has deleted one meanwhile
        text = first_text(look, self._prompt)
        self._add_snapshot(newest.step, look, text)
        self._write(look, text, is_last)
        self._shown = newest
        return True

    def end(self) -> None:
        """End this process at once, but never while it writes."""
        with self._writing:
            os._exit(0)

    def _evaluated(self) -> list[SavedAt]:
        """Return the checkpoints whose evaluation is not going on, oldest first."""
        run = RunDirectory.open(self._run.path)
        found = []
        for step in run.checkpoint_steps():
            folder = run.path / CHECKPOINTS / str(step)
            try:
                saved_at = SavedAt(step, (folder / MANIFEST).stat().st_mtime_ns)
                # A manifest is read only once, since this happens twice a second.
                if saved_at != self._shown and Manifest.read(folder).unevaluated is not None:
                    continue
            except (OSError, ValueError):
                if folder.exists():
                    raise
                continue  # training has deleted it meanwhile
            found.append(saved_at)
        return found

    def _open(self, step: int) -> Look:
        """Open a checkpoint; the compiled programs are those of the one before."""
        model: Any
        model, tokenizer, _ = load(
            self._run.path, which=step, model=self._model, tokenizer=self._code
        )
        self._look = Look(model, tokenizer, self._name, like=self._look)
        return self._look

    def _add_snapshot(self, step: int, look: Look, text: FirstText) -> None:
        """Keep a sample and the attention of a checkpoint."""
        numbers = text.numbers
        snapshot: dict[str, Any] = {"checkpoint": step, "sample": _sample(look)}
        if numbers["attention"] is not None:
            tokens = _tokens_of_map(numbers)
            snapshot["tokens"] = numbers["tokens"][:tokens]
            snapshot["heads"] = numbers["heads"]
            snapshot["attention"] = _small_map(numbers["attention"], tokens)
        self._snapshots[step] = snapshot
        if len(self._snapshots) > MOST_SNAPSHOTS:
            for left_out in list(self._snapshots)[1:-1:2]:
                del self._snapshots[left_out]

    def _write(self, look: Look, text: FirstText, is_last: bool) -> None:
        assert self._pages is not None
        now = time.time()
        seconds = None
        if not is_last:
            seconds = FIRST_SECONDS
            if self._written is not None:
                seconds = now - self._written
        progress = _progress(self._run)
        progress["snapshots"] = list(self._snapshots.values())
        progress["written"] = now
        progress["seconds"] = seconds
        page = self._pages.page(look, text, progress)
        with self._writing:
            self._run.write(PAGE, page)
        self._written = now


def _that_fits(look: Look, text: str) -> str:
    """Return a text that a page can begin with.

    The text of some tokens may have more tokens than those, if it ends inside a character, or none.
    """
    tokens = look.tokenizer.encode(text)
    most = look.most_computed_tokens()
    if len(tokens) > most:
        text = look.tokenizer.decode(tokens[: max(1, most // 2)])
        tokens = look.tokenizer.encode(text)
    if 0 < len(tokens) <= most:
        return text
    return first_text(look, None).text


def _progress(run: RunDirectory) -> dict[str, Any]:
    """Return the loss curve so far, for `page/7_training.js`."""
    lines = run.metrics()
    losses: dict[str, Any] = {}
    for name in ("loss", "validation_loss", "validation_estimate"):
        losses[name] = [[line["step"], line[name]] for line in lines if name in line]
    steps_per_point = max(1, -(-len(losses["loss"]) // MOST_POINTS))  # rounded up
    losses["loss"] = _means(losses["loss"], steps_per_point)
    step = 0
    if lines:
        step = lines[-1]["step"]
    return losses | {"each": steps_per_point, "step": step, "steps": run.config().steps}


def _means(points: list[list[Any]], count: int) -> list[list[Any]]:
    """Shorten a curve to one point for every `count`, with their mean step and mean loss."""
    means = []
    for first in range(0, len(points), count):
        means.append(np.mean(points[first : first + count], axis=0).tolist())
    return means


def _sample(look: Look) -> str:
    return generate_text(look.model, look.tokenizer, "", SAMPLE_TOKENS)


def _tokens_of_map(numbers: dict[str, Any]) -> int:
    """Return the number of tokens whose maps of all heads are small enough."""
    maps = len(numbers["layers"]) * numbers["heads"]
    # A causal map of n tokens is a triangle of about n**2 / 2 weights.
    most = max(2, math.isqrt(2 * MOST_MAP_WEIGHTS // maps))
    return min(len(numbers["tokens"]), most, MOST_MAP_TOKENS)


def _small_map(attention: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the attention over the first tokens, with a byte for each weight."""
    dtype = np.dtype(f"<u{attention['bytes']}")
    steps = np.frombuffer(base64.b64decode(attention["data"]), dtype)
    steps = steps.reshape(attention["shape"])  # layer head pair
    extent = attention["high"] - attention["low"]
    weights = attention["low"] + steps * (extent / np.iinfo(dtype).max)
    pairs = tokens * (tokens + 1) // 2  # rows of a triangle, joined
    return quantise_for_page(weights[..., :pairs], fine=False)


# --- the process beside training ------------------------------------------------------------------


def main() -> None:
    """Write the page of a run until training says that it has ended.

    The first line of standard input is the run, and the second one its end; when standard input is
    closed, there is no training any more. Each line of standard output is a JSON object: `written`
    with the path of the page, or `failed` with the reason why it won't be.
    """
    # A copy of standard output, which a user's code may print to.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Without a buffer: Python ends with a fatal error if a thread waits in one.
    requests = io.FileIO(sys.stdin.fileno(), closefd=False)
    line = requests.readline()
    if not line:
        return

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    directory, prompt, model, tokenizer = json.loads(line)
    try:
        enable_compilation_cache()
        page = TrainingPage(directory, prompt, model=model, tokenizer=tokenizer)
        has_ended = threading.Event()
        listening = (requests, page, has_ended)
        threading.Thread(target=_listen, args=listening, daemon=True).start()
        page.prepare()
        gc.freeze()  # what is prepared stays
        gc.enable()
        rest = SECONDS_PER_LOOK
        while not has_ended.wait(rest):
            rest = SECONDS_PER_LOOK
            began = time.process_time()
            if page.update():
                answer(written=str(Path(directory, PAGE)))
                rest = max(LEAST_SECONDS, REST * (time.process_time() - began))
        if page.update(is_last=True):
            answer(written=str(Path(directory, PAGE)))
    except Exception as error:
        reason = " ".join(str(error).split())
        answer(failed=reason or type(error).__name__)


def _listen(requests: io.FileIO, page: TrainingPage, has_ended: threading.Event) -> None:
    """Wait for the end of training, or of its process."""
    if requests.readline():
        has_ended.set()
        requests.readall()
    page.end()
