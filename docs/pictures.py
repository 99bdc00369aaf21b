"""The README's pictures, from a model trained for a minute: `make pictures`.

docs/pictures/terminal.svg shows the two commands on a terminal, docs/pictures/attention.png two
heads of the model, and docs/pictures/look*.png the live page, if there is a Chromium.
"""

import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

import jgpt
from jgpt.pictures.live import RunPage, serving

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
COMMANDS = (
    "jgpt train --data shakespeare --steps 600 --out runs/will",
    'jgpt sample runs/will --prompt "ROMEO:" --max-new-tokens 100',
)
LINE = "To be, or not to be, that is the question"
WIDTH = 84

sys.path.insert(0, str(ROOT))
from tests.browser import CHROMIUM, Page, browser  # noqa: E402
from tests.cli.screen import Screen  # noqa: E402


def shown(command: str, folder: str) -> list[str]:
    """The lines that a command leaves on a terminal. Raises CalledProcessError if it fails."""
    screen, (ours, theirs) = Screen(WIDTH), pty.openpty()
    program = [sys.executable, "-m", "jgpt.cli", *shlex.split(command)[1:]]
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        program, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        written = b""
        while chunk := _read(ours):
            written += chunk
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program, written)
    screen.write(written.decode())
    return "\n".join(line.rstrip() for line in screen.lines).strip("\n").splitlines()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end was closed
        return b""


def draw_terminal(lines: list[str]) -> None:
    """Write the lines as a terminal drawn by rich, in the reader's monospaced font."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    for line in lines:
        console.print(Text(line, style="bold" if line.startswith("$ ") else ""))
    svg = console.export_svg(title="", theme=DIMMED_MONOKAI, unique_id="terminal")
    svg = re.sub(r"\s*@font-face {.*?}", "", svg, flags=re.DOTALL)  # fetched from another host
    (PICTURES / "terminal.svg").write_text(svg.replace("Fira Code", "ui-monospace"))


def draw_attention(model: jgpt.GPT, tokenizer: jgpt.CharTokenizer) -> None:
    """Write the weights of two heads: the sharpest of the first layer, the farthest of the last."""
    weights = np.asarray(model.attention_weights(jnp.asarray(tokenizer.encode(LINE))[None])[:, 0])
    position = np.arange(len(LINE))
    reach = (weights[-1] * (position[:, None] - position)).sum(-1).mean(-1)
    heads = (
        ("sharpest of the layer", 0, weights[0].max(-1).mean(-1).argmax()),
        ("one that looks back farthest", len(weights) - 1, reach.argmax()),
    )
    figure, panels = plt.subplots(1, 2, figsize=(10, 5.3), layout="constrained")
    for axes, (which, layer, head) in zip(panels, heads, strict=True):
        axes.imshow(weights[layer, head], cmap="Blues", vmin=0, vmax=0.5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(LINE)), LINE.replace(" ", "·"), family="monospace", fontsize=8)
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.set_title(f"layer {layer + 1}, head {head + 1}: the {which}", fontsize=11)
        axes.set_xlabel("key: the letters that it attends to; darkest from a weight of 0.5")
    panels[0].set_ylabel("query: the letter that attends")
    figure.savefig(PICTURES / "attention.png", dpi=120, bbox_inches="tight")


def _wait(page: Page, condition: str) -> None:
    until = time.monotonic() + 120
    while not page.run(f"Boolean({condition})"):
        if time.monotonic() > until:
            raise TimeoutError(f"the page didn't come to {condition}")
        time.sleep(0.1)


def draw_look(run: Path) -> None:
    """Write the live page, and three answers that are found in it by clicking."""

    def clicked(page: Page, element: str) -> None:
        page.run(f"{element}.scrollIntoView({{ block: 'center' }})")
        middle = "(b => [b.left + b.width / 2, b.top + b.height / 2])"
        page.click(*page.run(f"{middle}({element}.getBoundingClientRect())"))

    def picture(page: Page, section: str, name: str) -> None:
        page.run("hideTip()")
        page.run(f"{section}.scrollIntoView()")
        (PICTURES / f"{name}.png").write_bytes(page.screenshot(whole=False))

    with serving(RunPage(run, LINE)) as (address, server), browser() as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(address)
        _wait(page, "data && snapshots.size === training.checkpoints.length")
        clicked(page, "textSpans[30]")
        clicked(page, "headButtons[heads + 2]")
        picture(page, "document.body", "look")
        page.run(
            "choose({ key: Array.from({ length: 31 }, (_, key) => weight(1, 2, 30, key))"
            ".reduce((best, w, key, all) => w > all[best] ? key : best, 0) })"
        )
        picture(page, "$('map').closest('section')", "look-letters")
        picture(page, "$('why')", "look-weight")
        clicked(page, "document.querySelector('[name=\"1.2\"]')")
        _wait(page, "data.before && !asking")
        picture(page, "$('changes')", "look-without")
        server.shutdown()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        output = [shown(command, folder) for command in COMMANDS]
        model, tokenizer, _ = jgpt.load(Path(folder, "runs/will"))
        if CHROMIUM is not None:
            draw_look(Path(folder, "runs/will"))
    both = zip(COMMANDS, output, strict=True)
    draw_terminal([line for command, lines in both for line in (f"$ {command}", *lines, "")])
    draw_attention(model, tokenizer)


if __name__ == "__main__":
    main()
