"""The pictures of the README and of docs/look.md: `make pictures`.

In docs/pictures, shapes-light.svg and shapes-dark.svg show a model's drawn shapes beside the error
of a wrong one. From a model that is trained for a minute, terminal.svg shows the two commands on a
terminal, and look*.png its page, if there is a Chromium.
"""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from itertools import zip_longest
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

import jgpt
from jgpt.page.html import model_page
from jgpt.shapes.expressions import name_sizes
from jgpt.training.programs import forward_program

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
    program = [sys.executable, "-m", "jgpt", *shlex.split(command)[1:]]
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
    """Write the lines as a terminal."""
    console = _console(WIDTH)
    for line in lines:
        console.print(Text(line, style="bold" if line.startswith("$ ") else ""))
    _write_svg(console, "terminal", DIMMED_MONOKAI)


def draw_shapes() -> None:
    """Write the README's model with its shapes, beside the error of its wrong call."""
    config = jgpt.ModelConfig(vocab_size=65, num_layers=2)
    left = ["Drawn: jgpt shapes", "", *shapes_of(config)]
    (block,) = [row for row, line in enumerate(left) if line.lstrip().startswith("blocks.0 ")]
    blank = [""] * (block - 1)
    right = ["Checked: a wrong shape", *blank, *error_of(config)]  # the call stands by its block
    width = max(len(line) for line in left) + 3

    for name, theme in (("shapes-light", DEFAULT_TERMINAL_THEME), ("shapes-dark", DIMMED_MONOKAI)):
        console = _console(width + max(len(line) for line in right))
        for row, (drawn, message) in enumerate(zip_longest(left, right, fillvalue="")):
            text = Text(f"{drawn:{width}}{message}")
            if row in (0, block):
                text.stylize("bold")
            text.highlight_regex(r"embed_dim\}?=128", "green")
            text.highlight_regex(r"(?<=size )12|(?<=, )12(?=\))|(?<=,)12(?=\])", "bold red")
            console.print(text)
        _write_svg(console, name, theme)


def shapes_of(config: jgpt.ModelConfig) -> list[str]:
    """The lines of `jgpt shapes`, for any batch and length."""
    batches = (2, 4, 3)
    times = (config.block_size - 1, config.block_size, config.block_size // 2)
    run = jgpt.TrainConfig(model=config)
    traces = []
    for batch, length in zip(batches, times, strict=True):
        traces.append(forward_program(run, batch, length).trace())
    return name_sizes(traces, {"b": batches, "t": times}).tree.lines(2)


def error_of(config: jgpt.ModelConfig) -> list[str]:
    """The call of a block with 12 features, and the lines of its error."""
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    lines = [">>> model.blocks[0](jnp.ones((2, 3, 12)))"]
    try:
        model.blocks[0](jnp.ones((2, 3, 12)))
    except TypeError as error:
        for line in str(error).splitlines():
            label = re.match(r"\w+: ", line)
            indent = " " * len(label[0] if label else "")
            lines += textwrap.wrap(line, 56, subsequent_indent=indent)
        return lines
    raise AssertionError("a wrong shape was accepted")


def _console(width: int) -> Console:
    return Console(record=True, width=width, file=io.StringIO())


def _write_svg(console: Console, name: str, theme: TerminalTheme) -> None:
    """Write what was printed, drawn by rich, in the reader's monospaced font."""
    svg = console.export_svg(title="", theme=theme, unique_id=name)
    svg = re.sub(r"\s*@font-face {.*?}", "", svg, flags=re.DOTALL)  # fetched from another host
    (PICTURES / f"{name}.svg").write_text(svg.replace("Fira Code", "ui-monospace"))


def _wait(page: Page, condition: str) -> None:
    until = time.monotonic() + 120
    while not page.run(f"Boolean({condition})"):
        if time.monotonic() > until:
            raise TimeoutError(f"the page didn't come to {condition}")
        time.sleep(0.1)


def draw_look(run: Path) -> None:
    """Draw the run's page, and an answer that is found in it by clicking."""

    def clicked(page: Page, element: str) -> None:
        page.run(f"{element}.scrollIntoView({{ block: 'center' }})")
        middle = "(b => [b.left + b.width / 2, b.top + b.height / 2])"
        page.click(*page.run(f"{middle}({element}.getBoundingClientRect())"))

    def picture(page: Page, section: str, name: str) -> None:
        page.run("hideTip()")
        page.run(f"{section}.scrollIntoView()")
        (PICTURES / f"{name}.png").write_bytes(page.screenshot(whole=False))

    model, tokenizer, _ = jgpt.load(run)
    written = run / "look.html"
    written.write_text(model_page(model, tokenizer, run.name, LINE), encoding="utf-8")
    with browser() as page:
        page.open(written)
        _wait(page, "data && !asking")
        clicked(page, "textSpans[30]")
        clicked(page, "headButtons[heads + 2]")
        picture(page, "document.body", "look")
        page.run(
            "choose({ key: Array.from({ length: 31 }, (_, key) => weight(1, 2, 30, key))"
            ".reduce((best, w, key, all) => w > all[best] ? key : best, 0) })"
        )
        picture(page, "$('map').closest('section')", "look-letters")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    draw_shapes()
    with tempfile.TemporaryDirectory() as folder:
        train, sample = (shown(command, folder) for command in COMMANDS)
        if CHROMIUM is not None:
            draw_look(Path(folder, "runs/will"))
    steps = [line for line in train if line.startswith("step ")]
    results = [line for line in train if line.startswith("validation loss ")]
    trained = [*train[:2], "...", steps[-1], *results]
    draw_terminal([f"$ {COMMANDS[0]}", *trained, "", f"$ {COMMANDS[1]}", *sample])


if __name__ == "__main__":
    main()
