"""`jgpt look`: a page to look into a model."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import (
    Checkpoint,
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
from jgpt.cli.terminal import open_console, say
from jgpt.durable import write_file
from jgpt.words import format_bytes


def look(
    run: LatestRun = None,
    prompt: Annotated[str | None, OptionSpec("TEXT")] = None,
    out: Annotated[
        str | None, OptionSpec("FILE", "The page to write, look.html unless given.")
    ] = None,
    max_new_tokens: int | None = None,
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    live: bool = False,
    browser: bool = True,
) -> Lines:
    """Write an HTML page that shows the inside of a model, or serve a live page.

    Without a prompt, the page holds the model itself: it computes what you type and change.

    Args:
        prompt: The text to continue and to look at, at most block-size tokens.
        max_new_tokens: The number of tokens to sample after the prompt. By default 48, or fewer if
            the block or the page is full.
        live: Serve the page to this machine: change the prompt, heads and blocks in it.
        browser: With --live, open the page in the browser.
    """
    if prompt is None and not live and max_new_tokens is not None:
        raise OptionError(
            f"--max-new-tokens {max_new_tokens} has no effect without a prompt: give --prompt"
        )
    run = runs.run_or_latest(run)
    if live:
        for option, value in (("--out", out), ("--max-new-tokens", max_new_tokens)):
            if value is not None:
                raise OptionError(
                    f"{option} {value} has no effect with --live, which writes no file: leave out "
                    "one of them"
                )
        with terminal.importing() as status:
            from jgpt.pictures.live import RunPage

            status.update("loading the model")
            page = RunPage(run, prompt, which=checkpoint, model=model, tokenizer=tokenizer)
        return _serve(page, browser)
    out = out or "look.html"
    path = path_to_write(out, ".html")
    name = Path(run).resolve().name
    with runs.loaded_run(run, checkpoint, model=model, tokenizer=tokenizer) as opened:
        from jgpt.pictures.page import look_page, model_page

        loaded, used_tokenizer, _ = opened
        if prompt is None:
            page = model_page(loaded, used_tokenizer, name)
        else:
            page = look_page(loaded, used_tokenizer, prompt, max_new_tokens, name)
    write_file(path, page)
    if prompt is None:
        size = format_bytes(len(page.encode()))
        return [f"wrote {out}, {size}: the model is in it; open it in a browser"]
    return [f"wrote {out}"]


def _serve(page: Any, browser: bool) -> Lines:
    """Serve the live page of a run until Ctrl-C, which is no error here."""
    import webbrowser

    from jgpt.pictures.live import serving

    with serving(page) as (address, server):
        say(open_console(), f"{page.name} is at {address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return []
