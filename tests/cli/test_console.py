"""What a person reads while a model is trained."""

import dataclasses
import io
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from rich.console import Console

from jgpt import ModelConfig, OptimizerConfig, preset
from jgpt.cli.console import ConsoleProgress
from jgpt.cli.report import describe_optimizer
from jgpt.nn.models import abstract_model, weight_dimensions
from jgpt.nn.stacking import stack_blocks
from tests.cli.screen import Screen
from tests.nn.test_models import ATTENTION, FEED_FORWARD, MODERN

NGRAMS = ModelConfig(**{**vars(MODERN), "ngram_sizes": (2, 4), "ngram_rows": 19})
MUON = {"optimizer": "muon", "muon_learning_rate": 0.03, "learning_rate": 0.007}


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (
            {**MUON, "embedding_learning_rate": 0.5},
            "muon moves 6,240 parameters (learning rate up to 0.03), adamw 410 (0.007), "
            "embedding 1,320 (0.5)",
        ),
        (
            MUON,
            "muon moves 6,240 parameters (learning rate up to 0.03), adamw 1,730 (0.007)",
        ),
        (
            {"learning_rate": 0.005},
            "adamw moves 7,970 parameters (learning rate up to 0.005)",
        ),
    ],
    ids=["three rules", "two", "one"],
)
def test_each_rule_names_what_it_moves(optimizer, line):
    assert ATTENTION + FEED_FORWARD == 6240
    abstract = nnx.to_pure_dict(nnx.state(abstract_model(NGRAMS), nnx.Param))
    weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), abstract)
    for its in weights, stack_blocks(weights):
        config = OptimizerConfig(**optimizer)
        assert describe_optimizer(config, its, weight_dimensions(NGRAMS)) == line


def lion(config, steps):
    raise AssertionError("it is described without being made")


def test_a_custom_optimizer_is_not_described_as_adamw():
    weights = {"head": jnp.zeros((4, 7))}
    config = OptimizerConfig(make=lion)
    line = describe_optimizer(config, weights)
    assert line.startswith("custom optimizer ")
    assert line.endswith("test_console.py:lion")


def story(width: int) -> str:
    """What a terminal of some width shows of a run that is stopped."""
    screen = Screen(width)
    seconds = [0.0]
    shown = [f"=== {width} columns"]
    console = Console(
        file=screen,  # type: ignore[arg-type]
        width=width,
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
    text = types.SimpleNamespace(
        train=range(418_543),
        validation=range(46_505),
    )
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
    return "\n".join(shown) + "\n"


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_shows_whole_words_and_one_bar(width):
    assert story(width) == (Path(__file__).parent / f"terminal_{width}.txt").read_text()


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


@pytest.mark.parametrize(
    ("step", "is_new", "said"),
    [
        (0, True, "60 steps of 8 x 16 tokens into r"),
        (30, True, "30 steps of 8 x 16 tokens into r, from step 30 of 60"),  # with moments
        (30, False, "resumed at step 30 of 60: r"),
        (60, False, "finished at step 60 of 60 already: r; --steps trains it further"),
    ],
)
def test_the_last_line_before_the_steps_says_where_a_run_starts(
    tmp_path, monkeypatch, step, is_new, said
):
    monkeypatch.chdir(tmp_path)
    if not is_new:
        Path("r", "checkpoints", str(step)).mkdir(parents=True)
    file = io.StringIO()
    console = Console(file=file, width=80, _environ={})
    progress = ConsoleProgress(console, "reading the data")
    config = dataclasses.replace(preset("tiny"), steps=60)
    text = types.SimpleNamespace(train=range(418_543), validation=range(46_505))
    weights = {"matrix": jnp.zeros((37, 64))}

    progress.started(config, text, weights, step, Path("r"))  # type: ignore[arg-type]
    progress.spinner.stop()

    assert file.getvalue().splitlines()[-1] == said


def test_a_long_evaluation_has_a_bar_in_the_place_of_the_steps():
    screen = Screen(80)
    seconds = [0.0]
    console = Console(
        file=screen,  # type: ignore[arg-type]
        width=80,
        force_terminal=True,
        color_system=None,
        get_time=lambda: seconds[0],
        _environ={},
    )
    progress = ConsoleProgress(console, "reading the data")
    with progress:
        progress.steps = 60
        progress.stepped(30, 2.5, 1000.0)
        for done in (0, 100, 200):
            progress.evaluating(done, 400)
            seconds[0] += 2.0
        progress.bar.refresh()
        (bar,) = [line for line in screen.show() if "━" in line]
        assert bar.startswith("evaluate ━")
        assert " 200/400 00:04 " in bar
        progress.evaluated(30, 2.25)
        progress.bar.refresh()
        shown = screen.show()
        assert shown[0] == "step 30: validation loss 2.2500  loss 2.500  1,000 tokens/s"
        assert shown[-1].startswith("train ━")


def test_jgpt_eval_has_a_bar_too_and_lines_in_a_file():
    file = io.StringIO()
    seconds = [0.0]
    console = Console(file=file, width=80, get_time=lambda: seconds[0], _environ={})
    with ConsoleProgress(console, "evaluating") as progress:
        for done in range(0, 9000, 100):
            progress.evaluating(done, 9000)
            seconds[0] += 1.0

    assert [line for line in file.getvalue().splitlines() if line] == [
        f"evaluation: {done:,} of 9,000 tokens" for done in (2100, 4200, 6300, 8400)
    ]


def test_without_a_terminal_a_long_text_has_lines_too():
    """Byte-pairs of 60 MB take a minute, in which nothing was printed."""
    file = io.StringIO()
    seconds = [0.0]
    console = Console(file=file, width=80, get_time=lambda: seconds[0], _environ={})
    progress = ConsoleProgress(console, "reading the data")
    for fraction in (0.0, 0.0, 0.1, 0.6, 0.7, 1.0):
        seconds[0] += 15.0
        progress.tokenized(fraction)

    assert [line for line in file.getvalue().splitlines() if line] == [
        "reading the data",
        "tokenizing the text: 60%",
        "reading the data",
    ]


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
