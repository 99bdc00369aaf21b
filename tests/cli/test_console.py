"""What a person reads while a model is trained."""

import dataclasses
import io
import types
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from jgpt import preset
from jgpt.cli.console import ConsoleProgress
from tests.cli.screen import Screen


def test_a_terminal_shows_whole_words_and_one_bar():
    """All that it shows of a run that is stopped."""
    screen = Screen(80)
    seconds = [0.0]
    shown = ["=== 80 columns"]
    console = Console(
        file=screen,  # type: ignore[arg-type]
        width=80,
        force_terminal=True,
        color_system=None,  # or what is left of a bar is drawn in another colour
        get_time=lambda: seconds[0],
        _environ={},
    )

    def show(moment: str) -> None:
        progress.bar.refresh()
        console.print(end="")  # draws the spinner again
        shown.extend(["", f"--- {moment}", *screen.show()])

    config = preset("tiny")
    config = dataclasses.replace(
        config, steps=3000, model=dataclasses.replace(config.model, vocab_size=103)
    )
    text = types.SimpleNamespace(train=range(418_543), validation=range(46_505))
    weights: dict = {f"matrix {i}": jnp.zeros((37, 64)) for i in range(12)}
    weights |= {f"vector {i}": jnp.zeros(32) for i in range(3)}
    progress = ConsoleProgress(console, "reading the data")
    with progress:
        show("at once")
        progress.started(config, text, weights, 0, Path("runs/first try"))  # type: ignore[arg-type]
        show("started")
        for step in range(50, 1250, 50):
            seconds[0] += 0.25
            progress.stepped(step, 4 - step / 1000, 120_000 + step)
            if step == 100:
                show("the first steps")
            if step % 300 == 0:
                progress.evaluated(step, 3.9 - step / 1000)
        show("evaluated")
        screen.write("^C")
        progress.stopping()
        show("a signal")
    show("at the end")
    expected = Path(__file__).parent / "terminal_80.txt"
    assert shown == expected.read_text().splitlines()


@pytest.mark.parametrize(
    ("checkpoints", "lost"),
    [
        (None, []),
        ((), ["left without saving: the steps after checkpoint 0 are lost"]),
        ((50, 425), ["left without saving: the steps after checkpoint 425 are lost"]),
    ],
)
def test_a_second_signal_says_what_is_lost_and_leaves_no_bar_and_no_hidden_cursor(
    checkpoints, lost, tmp_path
):
    screen = Screen(80)
    console = Console(file=screen, width=80, force_terminal=True, _environ={})  # type: ignore[arg-type]
    with ConsoleProgress(console, "reading the data") as progress:
        console.print(end="")
        assert screen.show() == ["⠋ reading the data"]
        assert not screen.cursor
        if checkpoints is not None:
            progress.out = tmp_path
            for step in checkpoints:
                (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        progress.leaving()
        assert screen.show() == lost
        assert screen.cursor


def test_without_a_terminal_there_is_a_line_every_twenty_seconds():
    file = io.StringIO()
    seconds = [100.0]
    console = Console(file=file, width=80, get_time=lambda: seconds[0], _environ={})
    progress = ConsoleProgress(console, "reading the data")
    for waited in (0.0, 20.0, 20.5, 40.0, 41.0):
        seconds[0] = 100 + waited
        progress.stepped(round(10 * waited), 2.5, 1000.0)

    assert [line for line in file.getvalue().splitlines() if line] == [
        "step 205: loss 2.500  1,000 tokens/s",
        "step 410: loss 2.500  1,000 tokens/s",
    ]
