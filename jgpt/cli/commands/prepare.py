"""`jgpt prepare`: text of any size, or tokens of other programs, as a folder to train from."""

import functools
import inspect
from pathlib import Path
from typing import Annotated, Literal

from jgpt.cli.arguments import Lines, shell_command
from jgpt.cli.options import OptionSpec, in_options
from jgpt.cli.terminal import NowAndThen, open_console, say
from jgpt.config import DataConfig


def prepare(
    out: Annotated[str, OptionSpec("DIR", "The folder to write.")],
    files: Annotated[tuple[str, ...], OptionSpec("TEXT", positional=True)] = (),
    data_field: Annotated[str, OptionSpec("NAME")] = DataConfig.data_field,
    tokenizer: Literal["char", "byte", "bpe", "gpt2", "numbers"] = "char",
    bpe_vocab_size: int = 1024,
    tokenizer_files: Annotated[str | None, OptionSpec("DIR")] = None,
) -> Lines:
    """Tokenize text of any size, for `jgpt train --data`.

    Args:
        files: Files and folders of text, JSON lines or Parquet, or corpora; - is standard input.
            Or tokens: a .npy file, a .bin of nanoGPT or llm.c, or nanoGPT's folder.
        data_field: The field or column of JSON lines and Parquet that has the text.
        tokenizer: Characters, bytes, byte-pairs trained on the text, GPT-2's byte-pairs, or
            numbers for tokens without a text.
        bpe_vocab_size: The vocabulary size of trained byte-pairs.
        tokenizer_files: For gpt2, a folder with encoder.json and vocab.bpe, or vocab.json and
            merges.txt.
    """
    if not files:
        raise ValueError("give a text to prepare: a file, a folder or a corpus")

    from jgpt.data import prepared, sources

    path = Path(files[0])
    is_tokens = len(files) == 1 and sources.has_tokens(path)
    if tokenizer == "numbers":
        if not is_tokens:
            raise ValueError("`tokenizer='numbers'` is for tokens: a .npy file, or a .bin of llm.c")
        return _done(prepared.prepare_tokens(path, Path(out)), out)
    config = DataConfig(
        data=files,
        tokenizer=tokenizer,
        bpe_vocab_size=bpe_vocab_size,
        tokenizer_files=tokenizer_files,
        data_field=data_field,
    )
    if is_tokens:
        beside = prepared.tokenizer_beside(path, config)
        return _done(prepared.prepare_tokens(path, Path(out), beside), out)
    console = open_console()
    log = NowAndThen(console, functools.partial(say, console))

    def warn(line: str) -> None:
        say(console, in_options(line, inspect.signature(prepare).parameters))

    with console.status("preparing") as status:

        def progress(fraction: float) -> None:
            line = f"preparing: {fraction:.0%}"
            status.update(line)
            log(line)

        count = prepared.prepare(config, Path(out), warn=warn, progress=progress)
    return _done(count, out)


def _done(tokens: int, out: str) -> Lines:
    return [f"{tokens:,} tokens in {out}; next: {shell_command('train', '--data', out)}"]
