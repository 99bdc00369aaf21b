"""`jgpt prepare`: text of any size as tokens."""

import inspect
from pathlib import Path
from typing import Annotated

from jgpt.cli.arguments import Lines, Newlines, shell_command
from jgpt.cli.options import (
    OptionSpec,
    in_options,
)
from jgpt.cli.terminal import SECONDS_PER_LINE, open_console, say
from jgpt.config import (
    DataConfig,
    TokenizerName,
)
from jgpt.user_code import load_code


def prepare(
    out: Annotated[str, OptionSpec("DIR", "The folder to write.")],
    files: Annotated[tuple[str, ...], OptionSpec("TEXT", positional=True)] = (),
    data: Annotated[tuple[str, ...], OptionSpec("TEXT")] = (),
    data_field: Annotated[str, OptionSpec("NAME")] = DataConfig.data_field,
    universal_newlines: Newlines = DataConfig.universal_newlines,
    tokenizer: TokenizerName = "char",
    bpe_vocab_size: int = 1024,
    tokenizer_files: Annotated[str | None, OptionSpec("DIR")] = None,
) -> Lines:
    """Tokenize text of any size, for `jgpt train --data`.

    Args:
        files: Files and folders of text, JSON lines, CSV or Parquet, or corpora.
        data: More text, as for `jgpt train`.
        data_field: The field or column of JSON lines, CSV and Parquet that has the text.
        tokenizer: Characters, bytes, byte-pairs trained on the text, GPT-2's byte-pairs,
            numbers, or a tokenizer of your own.
        bpe_vocab_size: The vocabulary size of trained byte-pairs.
        tokenizer_files: For gpt2, a folder with encoder.json and vocab.bpe, or vocab.json and
            merges.txt.
    """
    if not files + data:
        raise ValueError("give a text to prepare: a file, a folder or a corpus")
    make = None
    if ".py:" in tokenizer:
        make = load_code(tokenizer)
        tokenizer = "char"
    config = DataConfig(
        make=make,
        data=(*files, *data),
        universal_newlines=universal_newlines,
        tokenizer=tokenizer,
        bpe_vocab_size=bpe_vocab_size,
        tokenizer_files=tokenizer_files,
        data_field=data_field,
    )

    from rich.progress import Progress

    from jgpt.data import dataset

    console = open_console()

    def warn(line: str) -> None:
        say(console, in_options(line, inspect.signature(prepare).parameters))

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=1.0)
        last_line = console.get_time()

        def progress(fraction: float) -> None:
            nonlocal last_line
            bar.update(task, completed=fraction)
            if not console.is_terminal and console.get_time() - last_line > SECONDS_PER_LINE:
                say(console, f"preparing: {fraction:.0%}")
                last_line = console.get_time()

        tokens = dataset.prepare(config, Path(out), warn=warn, progress=progress)
    return [f"{tokens:,} tokens in {out}; next: {shell_command('train', '--data', out)}"]
