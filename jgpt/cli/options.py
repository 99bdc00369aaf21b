"""The options of each command, parsed with tyro; attribute docstrings are the help."""

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from jgpt.config import DataConfig, TokenizerName, TrainConfig

Options = TypeVar("Options")
FROM = "from"  # a Python keyword can't name a field


@dataclass(frozen=True)
class TrainOptions:
    """Train a GPT: a preset, and whatever of it you change."""

    run: TrainConfig
    config: str | None = None
    """A run's config.json to begin with instead of a preset: the same run again, elsewhere."""
    resume: bool = False
    """Go on from the last checkpoint of the run in --out, whose config is the default; begin
    where there is none yet."""
    overwrite: bool = False
    """Delete the run in --out and start again."""
    dry_run: bool = False
    """Say what would be trained, where, and what it needs; train and write nothing."""
    profile: int = 0
    """Trace this many steps after the first into the run's folder profile."""


@dataclass(frozen=True)
class SampleOptions:
    """Write text with a trained model, as it is drawn. Past the block size the window slides: the
    model reads the last block-size tokens."""

    run: Positional[str]
    """The run directory."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """The text to continue, a line's beginning by default; give it again for more texts, which are
    continued side by side."""
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
    min_p: float | None = None
    """Draw from the tokens at least this fraction as likely as the likeliest only."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """End a text before this string; may be given again, the first to appear counts."""
    num_samples: int = 1
    """How many texts to write for each prompt."""
    seed: int = 1337
    """The same seed writes the same text."""
    checkpoint: Literal["best", "last"] | int = "best"
    """By validation loss, by age, or by its step."""


@dataclass(frozen=True)
class EvalOptions:
    """Measure a run's exact loss on the text that it held out: every target once."""

    run: Positional[str]
    """The run directory."""
    json: bool = False
    """One JSON object instead of lines to read."""
    checkpoint: Literal["best", "last"] | int = "best"
    """By validation loss, by age, or by its step."""


@dataclass(frozen=True)
class InfoOptions:
    """Show the size of a preset's or a run's model: parameters by part, bytes, FLOPs, and the
    memory that a training step needs, by the compiler's own analysis."""

    what: Positional[str]
    """A preset's name or a run directory."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ImportOptions:
    """Make a run of GPT-2's or nanoGPT's weights, to sample, to measure, or to train further with
    `jgpt train --resume --out RUN`."""

    source: Positional[str]
    """A Hugging Face GPT-2 directory (config.json, model.safetensors), or nanoGPT's ckpt.pt."""
    out: str
    """The run directory to write."""
    format: Annotated[Literal["gpt2", "nanogpt"], arg(name=FROM)] = "gpt2"
    """Who wrote the weights."""
    tokenizer: str | None = None
    """A folder with GPT-2's vocabulary and merges (the source itself by default), a run's
    tokenizer.json, or the text whose characters are the vocabulary: nanoGPT's meta.pkl could run
    code, so it isn't read."""
    data: tuple[str, ...] = DataConfig().data
    """The text to measure on and to train further with."""


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's model as a Hugging Face GPT-2 directory."""

    run: Positional[str]
    """The run directory."""
    out: str
    """The directory to write."""
    zero_biases: bool = False
    """Write zeros for the biases that the model lacks and GPT-2's format demands."""
    checkpoint: Literal["best", "last"] | int = "best"
    """By validation loss, by age, or by its step."""


@dataclass(frozen=True)
class PresetsOptions:
    """List the presets of `jgpt train`."""


@dataclass(frozen=True)
class PlotOptions:
    """Draw the losses of runs in one picture: against steps, tokens and seconds."""

    runs: Positional[tuple[str, ...]]
    """Run directories."""
    out: str = "losses.png"
    """The picture: .png or .svg."""


@dataclass(frozen=True)
class AttentionOptions:
    """Draw what each head of each layer reads: the attention weights over a text."""

    run: Positional[str]
    """The run directory."""
    prompt: str
    """The text; its last block-size tokens are drawn."""
    out: str = "attention.png"
    """The picture: .png or .svg."""
    checkpoint: Literal["best", "last"] | int = "best"
    """By validation loss, by age, or by its step."""


def parse(
    options: type[Options], command: str, args: list[str], default: Any = tyro.MISSING_NONPROP
) -> Options:
    """Parse with tyro; its boxed error messages become one-line ValueErrors."""
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
    """The first paragraph of tyro's boxed message, and its suggestion."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    message = " ".join(lines[:end])
    meant = next((line.split()[0] for line in lines[end:] if line.startswith("--")), None)
    if meant and "nrecognized" in message:
        message += f" (did you mean {meant}?)"
    return re.sub(r"^Error parsing run[\w.]*: ", "", message)
