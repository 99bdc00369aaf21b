"""`jgpt look`: a page to look into a model."""

from typing import Annotated

from jgpt.cli import runs
from jgpt.cli.arguments import Checkpoint, LatestRun, Lines, ModelOption, path_to_write
from jgpt.cli.options import OptionSpec
from jgpt.cli.terminal import open_console
from jgpt.files import write_file
from jgpt.words import format_bytes


def look(
    run: LatestRun = None,
    prompt: Annotated[str | None, OptionSpec("TEXT")] = None,
    out: Annotated[str, OptionSpec("FILE", "The page to write.")] = "look.html",
    max_new_tokens: int | None = None,
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
) -> Lines:
    """Write an HTML page that shows the inside of a model.

    The page holds the model itself: it computes what you type and change.

    Args:
        prompt: The text that the page begins with, at most block-size tokens. By default the
            beginning of the validation text, or one that the model writes if that is not at hand.
        max_new_tokens: The number of tokens to sample after the prompt. By default 48, or fewer if
            the block or the page is full.
    """
    from jgpt.runs.directory import run_and_step

    run = runs.run_or_latest(run)
    path = path_to_write(out, ".html")
    folder, _ = run_and_step(run)
    name = folder.resolve().name
    with runs.loaded_run(run, checkpoint, model=model) as opened:
        from jgpt.page.html import model_page
        from jgpt.page.opening import opening_text

        loaded, used_tokenizer, config = opened
        # A model near the limit of a page takes half a minute.
        with open_console(stderr=True).status("making the page"):
            if prompt is None:
                prompt = opening_text(folder, config, used_tokenizer, loaded.block_size)
                max_new_tokens = max_new_tokens or 0
            page = model_page(loaded, used_tokenizer, name, prompt, max_new_tokens)
    write_file(path, page)
    size = format_bytes(len(page.encode()))
    return [f"wrote {out}, {size}: the model is in it; open it in a browser"]
