"""The command `jgpt`: thin, and the only place that prints and exits.

Commands import what they need when they run: `jgpt --help` must not wait for jax.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from jgpt.config import (
    DEFAULT_PRESET,
    PRESETS,
    DataConfig,
    TokenizerName,
    TrainConfig,
    did_you_mean,
    preset,
)
from jgpt.contracts import typed

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a GPT: a preset, and whatever of it you change."""

    config: TrainConfig
    resume: bool = False
    """Go on from the last checkpoint of the run in --out, whose config is the default."""
    overwrite: bool = False
    """Delete the run in --out and start again."""


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """Write text with a trained model, as it is drawn. Past the block size the window slides: the
    model reads the last block-size tokens."""

    run: Positional[str]
    """The run directory."""
    prompt: str | None = None
    """The text to continue; a line's beginning by default."""
    prompt_file: str | None = None
    """A UTF-8 file with the text to continue; - is standard input."""
    max_new_tokens: int = 500
    """Tokens to write."""
    temperature: float = 0.8
    """0 always takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens that hold this probability only."""
    num_samples: int = 1
    """How many texts to write."""
    seed: int = 1337
    """The same seed writes the same text."""
    checkpoint: Literal["best", "last"] = "best"
    """By validation loss, or by age."""


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Measure a run's exact loss on the text that it held out: every target once."""

    run: Positional[str]
    """The run directory."""
    json: bool = False
    """One JSON object instead of lines to read."""
    checkpoint: Literal["best", "last"] = "best"
    """By validation loss, or by age."""


@dataclasses.dataclass(frozen=True)
class InfoOptions:
    """Show the size of a preset's or a run's model: parameters by part, bytes, FLOPs."""

    what: Positional[str]
    """A preset's name or a run directory."""


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Tokenize text, larger than memory too, into a folder for `jgpt train --data`."""

    files: Positional[tuple[str, ...]]
    """UTF-8 files, folders of .txt, or corpora."""
    out: str
    """The folder to write."""
    tokenizer: TokenizerName = "char"
    """Characters, bytes, byte-pairs trained on the text, or GPT-2's byte-pairs."""
    bpe_vocab_size: int = 1024
    """Vocabulary to train byte-pairs for."""
    tokenizer_files: str | None = None
    """The folder of encoder.json and vocab.bpe (or vocab.json and merges.txt) for gpt2."""


@dataclasses.dataclass(frozen=True)
class PresetsOptions:
    """List the presets of `jgpt train`."""


@typed
def train(args: list[str]) -> None:
    """`jgpt train [PRESET] ...`"""
    name, args = _preset_name(args)
    out = _value_after("--out", args)
    if name is None and out is not None and "--resume" in args:
        from jgpt.checkpoint import RunDirectory

        default = RunDirectory.open(out).config()
    else:
        default = preset(name or DEFAULT_PRESET)
    if _value_after("--vocab-size", args) is not None:
        raise ValueError("vocab-size can't be chosen: the tokenizer decides it; leave it out")
    options = _parse(TrainOptions, "train [PRESET]", args, default=TrainOptions(default))

    from rich.console import Console

    from jgpt.console import ConsoleProgress
    from jgpt.train import fit

    console = Console()
    with ConsoleProgress(console) as progress:
        run = fit(
            options.config, resume=options.resume, overwrite=options.overwrite, progress=progress
        )
    if run.sample:
        progress.say("", run.sample, "")
    progress.say(
        f"validation loss {run.validation_loss:.4f} at step {run.best_step}, "
        f"after {run.seconds:.0f} s in all",
        f"the run is {run.directory}: its checkpoints, metrics.jsonl, samples.txt and loss.png",
        f"next: jgpt sample {run.directory}   or   jgpt eval {run.directory}",
    )


@typed
def sample(args: list[str]) -> None:
    """`jgpt sample RUN ...`"""
    options = _parse(SampleOptions, "sample", args)
    if options.num_samples < 1:
        raise ValueError(f"num_samples={options.num_samples} must be at least 1")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"seed={options.seed} must be at least 0 and below 2**32")

    import jax
    import jax.numpy as jnp
    import numpy as np

    from jgpt.checkpoint import load
    from jgpt.generation import decode_stream, opening, stream

    model, tokenizer, _ = load(options.run, which=options.checkpoint)
    prompt = _prompt(options)
    tokens = opening(tokenizer) if prompt is None else tokenizer.encode(prompt)
    key = jax.random.key(np.uint32(options.seed))
    for index in range(options.num_samples):
        pieces = stream(
            model,
            jnp.asarray(tokens)[None],
            options.max_new_tokens,
            key=jax.random.fold_in(key, index),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        if index:
            print("\n---------------")
        print(prompt or "", end="", flush=True)
        for text in decode_stream(tokenizer, (piece[0] for piece in pieces)):
            print(text, end="", flush=True)
        print()


@typed
def evaluate(args: list[str]) -> None:
    """`jgpt eval RUN`"""
    options = _parse(EvalOptions, "eval", args)

    from rich.console import Console

    from jgpt import train
    from jgpt.console import ConsoleProgress

    with ConsoleProgress(Console(stderr=True)) as progress:
        result = train.evaluate(options.run, which=options.checkpoint, progress=progress)
    if options.json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    print(f"validation loss     {result.loss:.4f} nats per token, exact over {result.tokens:,}")
    print(f"perplexity          {result.perplexity:.3f}")
    print(f"bits per character  {result.bits_per_character:.4f}")


@typed
def info(args: list[str]) -> None:
    """`jgpt info PRESET|RUN`"""
    options = _parse(InfoOptions, "info", args)

    from jgpt.checkpoint import RunDirectory
    from jgpt.size import flops_per_token, parts_of

    if options.what in PRESETS:
        model = preset(options.what).model
    elif Path(options.what).exists():
        model = RunDirectory.open(options.what).config().model
    else:
        raise ValueError(
            f"{options.what!r} is neither a preset nor a run directory"
            f"{did_you_mean(options.what, PRESETS)}"
        )
    rows = [(part.name, part.parameters, part.size) for part in parts_of(model)]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for name, parameters, size in rows:
        print(f"{name:<28} {parameters:>13,} parameters {size / 2**20:>9.2f} MiB")
    flops = flops_per_token(model)
    print(f"FLOPs per token at a full block: {flops:,} forward, {3 * flops:,} in training")


@typed
def prepare(args: list[str]) -> None:
    """`jgpt prepare FILES --out DIR`"""
    options = _parse(PrepareOptions, "prepare", args)
    config = DataConfig(
        data=options.files,
        tokenizer=options.tokenizer,
        bpe_vocab_size=options.bpe_vocab_size,
        tokenizer_files=options.tokenizer_files,
    )

    from jgpt import data

    count = data.prepare(config, Path(options.out))
    print(f"{count:,} tokens in {options.out}; next: jgpt train --data {options.out}")


@typed
def presets(args: list[str]) -> None:
    """`jgpt presets`"""
    _parse(PresetsOptions, "presets", args)
    for name, (promise, config) in PRESETS.items():
        default = " (the default)" if name == DEFAULT_PRESET else ""
        print(f"{name:<14} {promise}{default}; {config.steps:,} steps")


COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "train": ("train a GPT", train),
    "sample": ("write text with a trained model", sample),
    "eval": ("measure a run's exact validation loss", evaluate),
    "info": ("parameters, bytes and FLOPs of a preset or a run", info),
    "prepare": ("tokenize text larger than memory into a folder", prepare),
    "presets": ("list the presets", presets),
}


@typed
def main(args: Sequence[str] | None = None) -> None:
    """Run a command; a user's error is one line and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print("usage: jgpt COMMAND ...\n")
        for name, (promise, _) in COMMANDS.items():
            print(f"  {name:<9} {promise}")
        print("\njgpt COMMAND --help shows a command's options; start with: jgpt train")
        sys.exit(0)
    try:
        if args[0] not in COMMANDS:
            raise ValueError(
                f"unknown command {args[0]!r}{did_you_mean(args[0], COMMANDS)}; "
                f"the commands are {', '.join(COMMANDS)}"
            )
        COMMANDS[args[0]][1](args[1:])
    except (ValueError, OSError, ModuleNotFoundError, FloatingPointError) as error:
        if os.environ.get("JGPT_TRACEBACK") == "1":
            raise
        print(f"jgpt: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or repr(error)


def _parse(
    options: type[Options], command: str, args: list[str], default: Any = tyro.MISSING_NONPROP
) -> Options:
    """Parse with tyro; what it refuses in a box becomes a ValueError in a line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                options,
                prog=f"jgpt {command}",
                args=args,
                config=(OmitArgPrefixes,),
                default=default,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_unboxed(said.getvalue())) from None


def _unboxed(box: str) -> str:
    """The first paragraph of tyro's boxed message, and the option it thinks was meant."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    message = " ".join(lines[:end])
    meant = next((line.split()[0] for line in lines[end:] if line.startswith("--")), None)
    if meant and "nrecognized" in message:
        message += f" (did you mean {meant}?)"
    return re.sub(r"^Error parsing config[\w.]*: ", "", message)


def _preset_name(args: list[str]) -> tuple[str | None, list[str]]:
    return (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)


def _value_after(flag: str, args: list[str]) -> str | None:
    for index, argument in enumerate(args):
        if argument == flag:
            return args[index + 1] if index + 1 < len(args) else None
        if argument.startswith(flag + "="):
            return argument.partition("=")[2]
    return None


def _prompt(options: SampleOptions) -> str | None:
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("prompt and prompt_file are two prompts: give one")
    if options.prompt_file == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8")
    elif options.prompt_file is not None:
        from jgpt.corpus import read_text

        prompt = read_text((options.prompt_file,))
    else:
        prompt = options.prompt
    if prompt == "":
        raise ValueError("the prompt is empty: give at least one character, or no --prompt at all")
    return prompt


if __name__ == "__main__":
    main()
