"""`jgpt attention`: a model's attention weights as a picture."""

from typing import Annotated

from jgpt.cli import runs
from jgpt.cli.arguments import (
    Checkpoint,
    Image,
    LatestRun,
    Lines,
    ModelOption,
    TokenizerOption,
    path_to_write,
)
from jgpt.cli.options import (
    OptionSpec,
)
from jgpt.durable import write_file


def attention(
    prompt: Annotated[str, OptionSpec("TEXT")],
    run: LatestRun = None,
    out: Image = "attention.png",
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
) -> Lines:
    """Plot the attention weights of each layer and head over a text.

    Args:
        prompt: The text; its last block-size tokens are plotted.
    """
    path = path_to_write(out, ".png", ".svg")
    run = runs.run_or_latest(run)
    with runs.loaded_run(run, checkpoint, model=model, tokenizer=tokenizer) as opened:
        from jgpt.pictures.plots import attention_image

        loaded, used_tokenizer, _ = opened
        write_file(path, attention_image(loaded, used_tokenizer, prompt, path.suffix[1:]))
    return [f"wrote {out}"]
