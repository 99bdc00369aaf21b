"""`jgpt look`: a page to look into a model."""

import warnings
from pathlib import Path
from typing import Annotated, Any

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import (
    Checkpoints,
    LatestRun,
    Lines,
    ModelOption,
    TokenizerOption,
    path_to_write,
)
from jgpt.cli.options import (
    OptionError,
    OptionSpec,
)
from jgpt.cli.terminal import open_console, spinner
from jgpt.durable import write_file
from jgpt.words import format_bytes


def look(
    run: LatestRun = None,
    prompt: Annotated[str | None, OptionSpec("TEXT")] = None,
    out: Annotated[
        str | None, OptionSpec("FILE", "The page to write, look.html unless given.")
    ] = None,
    max_new_tokens: int | None = None,
    checkpoint: Checkpoints = ("best",),
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
) -> Lines:
    """Write an HTML page that shows the inside of a model.

    The page holds the model itself: it computes what you type and change. Of a model that is too
    large for a page, it has the numbers of the prompt alone. With two checkpoints it shows both
    side by side, and their difference.

    Args:
        prompt: The text that the page begins with, at most block-size tokens. By default the
            beginning of the validation text, or one that the model writes if that is not at hand.
        max_new_tokens: The number of tokens to sample after the prompt. By default 48, or fewer if
            the block or the page is full.
    """
    if prompt is None and max_new_tokens is not None:
        raise OptionError(
            f"--max-new-tokens {max_new_tokens} has no effect without a prompt: give --prompt"
        )
    if len(checkpoint) > 2:
        given = " ".join(map(str, checkpoint))
        raise OptionError(
            f"--checkpoint is given {len(checkpoint)} times ({given}): give it once, "
            "or twice for two checkpoints side by side"
        )
    run = runs.run_or_latest(run)
    out = out or "look.html"
    path = path_to_write(out, ".html")
    name = Path(run).resolve().name
    which: Any = checkpoint
    if len(checkpoint) == 2:
        which = _steps_of_two(run, checkpoint)
    what = "the model is in it"
    pair: dict[str, Any] = {}
    with runs.loaded_run(run, which[0], model=model, tokenizer=tokenizer) as opened:
        from jgpt.pictures.opening import opening_text
        from jgpt.pictures.page import make_page

        loaded, used_tokenizer, config = opened
        # A model near the limit of a page takes half a minute.
        with spinner(open_console(stderr=True), "making the page"):
            if len(which) == 2:
                pair["other"] = _other_model(run, which[1], model, tokenizer)
                pair["names"] = tuple(f"step {step}" for step in which)
                what = f"the models of steps {which[0]} and {which[1]} are in it"
            if prompt is None:
                prompt = opening_text(run, config, used_tokenizer, loaded.block_size)
                max_new_tokens = 0
            page = make_page(loaded, used_tokenizer, name, prompt, max_new_tokens, **pair)
    write_file(path, page.html)
    if page.reason is not None:
        return [f"wrote {out}, the page of this text alone: {page.reason}"]
    size = format_bytes(len(page.html.encode()))
    return [f"wrote {out}, {size}: {what}; open it in a browser"]


def _steps_of_two(run: str, checkpoint: tuple[Any, ...]) -> list[int]:
    """The steps of two checkpoints. Raises OptionError if they are one."""
    with terminal.importing():
        from jgpt.runs.checkpoints import Checkpoints as RunCheckpoints
        from jgpt.runs.directory import RunDirectory
    with RunCheckpoints(RunDirectory.open(run), read_only=True) as saved:
        steps = [saved.step(which) for which in checkpoint]
    if steps[0] == steps[1]:
        given = " and ".join(f"--checkpoint {which}" for which in checkpoint)
        raise OptionError(f"{given} are both step {steps[0]}: give two different checkpoints")
    return steps


def _other_model(run: str, step: int, model: str | None, tokenizer: str | None) -> Any:
    from jgpt.runs.load import load

    # Warnings about the run's code have been shown with its first model.
    with warnings.catch_warnings(action="ignore"):
        other, _, _ = load(run, which=step, model=model, tokenizer=tokenizer)
    return other
