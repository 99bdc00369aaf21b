"""Measure the pages of `jgpt look` in Chromium: one of each preset, with random weights.

    JAX_PLATFORMS=cpu python benchmarks/pages.py --rounds 2

`tables.py` makes the table of docs/look.md from the record. A page is opened from disk. Then
keys are pressed at the end of a text, which has 128 tokens with the new letter, or fewer where the
block or the page has no room. A keystroke lasts until the page has drawn all that follows; its
parts are measured, too. Half of the text is written on until the page is full. Sizes and times
don't depend on training. The differences to JAX are those of these weights, none of which is zero.
"""

import json
import os
import re
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro
from runner import ROOT, Figures, Measured, Rounds, Variant, call, compare
from tables import ON_A_CPU

from jgpt.presets import PRESETS

sys.path.insert(0, str(ROOT))  # for the tests' browser and weights

LETTERS = string.ascii_letters + "\n !$&',-.3:;?"
"""The 65 characters of tiny Shakespeare, which are the vocabulary of the small presets."""
TEXT = """To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
"""
KEYSTROKES = 7
CONTINUATIONS = 3
MOST_SECONDS = 30
"""A large model is measured less often: nothing is begun after so many seconds."""
MOST_TYPED = 128
"""The most tokens of the text that is typed at."""
SECONDS = 600
"""The longest wait for a page."""
OPENED = """
new Promise(done => {
  const look = () => {
    if ($("closeness").textContent) done(performance.now());
    else setTimeout(look, 20);
  };
  look();
})
"""
"""The milliseconds from the beginning of the page until all numbers of its text are shown."""
LISTENING = """
(() => {
  window.drawn = () => new Promise(done => requestAnimationFrame(() => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = done;  // after the styles, layout and painting of this frame
    port2.postMessage(0);
  }));
  const hear = worker.onmessage;
  let began, heard;
  worker.onmessage = message => {
    heard = performance.now();
    hear(message);
  };
  addEventListener("keydown", event => { began = event.timeStamp; }, { capture: true });
  $("prompt").addEventListener("input", () => {
    window.typed = (async () => {
      while (asking) await asking;
      const shown = performance.now();
      await drawn();
      const end = performance.now();
      return [end - began, heard - began, shown - heard, end - shown];
    })();
  });
})()
"""
"""Measure each key that is pressed: until the page has drawn all that follows."""
READY = """
(async () => {
  const prompt = $("prompt");
  prompt.value = TEXT;
  await change({ prompt: TEXT });
  prompt.focus();
  prompt.setSelectionRange(PLACE, PLACE);
  await drawn();
  await drawn();  // the caret
})()
"""
"""Show a text, put the caret at a place in it, and wait until the page is at rest.

A key that is pressed while the page still draws waits for it: 9 to 17 ms with `modern`."""
PARTS = ("keystroke", "worker", "scripts", "layout")
"""A whole keystroke; until the worker has answered; the page's scripts; style, layout and paint."""
WRITTEN = """
(async () => {
  await change({ prompt: TEXT });
  $("prompt").value = TEXT;
  await writeOnInWorker();
  return $("said").textContent;
})()
"""


def write_page(preset: str, path: str) -> Figures:
    """Write the page of a preset; return the tokens of the whole text."""
    from flax import nnx

    from jgpt import BPETokenizer, CharTokenizer
    from jgpt.machine import this_machine
    from jgpt.nn.models import abstract_model
    from jgpt.nn.precision import for_platform
    from jgpt.page.html import model_page
    from jgpt.page.numbers import Look
    from tests.models import randomised, weights_of

    _, config = PRESETS[preset]
    model = abstract_model(for_platform(config.model, this_machine().platform))
    nnx.update(model, randomised(weights_of(model)))
    tokenizer = CharTokenizer.from_text(LETTERS)
    if model.vocab_size != tokenizer.vocab_size:
        # A letter is a token, as with characters, since there is one merge alone.
        tokenizer = BPETokenizer.train([TEXT], 257).padded_to(model.vocab_size)
    length = min(Look(model, tokenizer, preset).most_tokens(), MOST_TYPED)
    Path(path).write_text(model_page(model, tokenizer, preset, TEXT[:length]))
    return {"length": length}


def refusals() -> dict[str, str]:
    """Return the reason why a preset has no page, for each that has none."""
    from jgpt.nn.models import abstract_model
    from jgpt.page.html import require_room
    from jgpt.page.program import Uncomputable

    reasons = {}
    for name, (_, config) in PRESETS.items():
        try:
            require_room(abstract_model(config.model))
        except Uncomputable as error:
            reasons[name] = str(error)
    return reasons


def measure_page(path: str, length: int) -> Figures:
    """Open a page, type at a text of so many tokens, and write half of it on."""
    from tests import browser

    browser.SECONDS = SECONDS
    load, _, _ = os.getloadavg()
    with browser.browser() as page:
        page.open(Path(path))
        opened = page.run(OPENED)
        closeness = page.run("$('closeness').textContent")
        page.run(LISTENING)
        text = TEXT[: length - 1]
        keystrokes = _keystrokes(page, text)
        rates = []
        began = time.monotonic()
        # A page of one token, such as that of a bigram model, has no room to write on.
        wanted = CONTINUATIONS if length > 1 else 0
        while len(rates) < wanted and time.monotonic() < began + MOST_SECONDS:
            # Another text each time: a page remembers the tokens that were written after one, even
            # if they have no letters, as most of a vocabulary that is larger than its tokenizer's.
            start = len(rates)
            beginning = TEXT[start : start + length // 2]
            said = page.run(WRITTEN.replace("TEXT", json.dumps(beginning)))
            rates.append(float(re.search(r"(\d+) a second", said)[1]))
        precision = page.run("first.precision")
        assert page.errors == [], page.errors
    # With weights in float32, those of the page are the model's own.
    to_the_same, *_ = differences = re.findall(r"within (\S+) of", closeness)
    figures: Figures = {
        "bytes": Path(path).stat().st_size,
        "bits": int(re.search(r"\d+", precision)[0]),
        "open_milliseconds": opened,
        "difference": float(to_the_same),
        "difference_to_own_weights": float(differences[-1]),
        "load": load,
    }
    for part, milliseconds in zip(PARTS, keystrokes, strict=True):
        figures[f"{part}_milliseconds"] = milliseconds
    if rates:
        figures["tokens_per_second"] = max(rates)
    return figures


def _keystrokes(page: Any, text: str) -> list[float]:
    """Press keys at the end of a text; return the median of each of the PARTS."""
    measured = []
    until = time.monotonic() + MOST_SECONDS
    # A keystroke more than are counted, after which the program for this length is ready.
    while len(measured) <= KEYSTROKES and time.monotonic() < until:
        ready = READY.replace("TEXT", json.dumps(text)).replace("PLACE", str(len(text)))
        page.run(ready)
        page.type("ab"[len(measured) % 2])
        measured.append(page.run("typed"))
    counted = measured[1:] or measured
    return [statistics.median(part) for part in zip(*counted, strict=True)]


def _result_of(command: list[str]) -> Any:
    """What a command prints; this process imports no jax."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(options: Rounds) -> None:
    refused = _result_of(call("pages", "refusals"))
    with tempfile.TemporaryDirectory() as folder:
        variants = []
        for name in (*ON_A_CPU, "nanogpt-char", "gpt2"):
            path = f"{folder}/{name}.html"
            written = _result_of(call("pages", "write_page", preset=name, path=path))
            command = call("pages", "measure_page", path=path, length=written["length"])
            variants.append(Variant(name, command))

        def facts(measured: Measured) -> dict[str, Any]:
            return {"refused": refused}

        compare("pages", variants, options, facts)


if __name__ == "__main__":
    main(tyro.cli(Rounds, description=__doc__))
