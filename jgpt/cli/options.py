"""The options of each command, parsed with tyro; attribute docstrings are the help."""

import contextlib
import dataclasses
import io
import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from jgpt.config import DataConfig, TokenizerName, TrainConfig

Options = TypeVar("Options")
FROM = "from"  # a Python keyword can't name a field


@dataclass(frozen=True)
class TrainOptions:
    """Train a GPT: a preset, with the options that you override."""

    run: TrainConfig
    config: str | None = None
    """A run's config.json, used instead of a preset to repeat that run in another directory."""
    resume: bool = False
    """Resume from the last checkpoint in --out, with that run's config by default; start the run
    if there is no checkpoint yet."""
    overwrite: bool = False
    """Delete the run in --out and start again."""
    dry_run: bool = False
    """Show the model, data, memory and compute of the run, without training or writing."""
    profile: int = 0
    """Profile this many steps after the first; the trace is written to RUN/profile."""


@dataclass(frozen=True)
class SampleOptions:
    """Generate text with a trained model, streamed as it is sampled. The context is the last
    block-size tokens."""

    run: Positional[str]
    """The run directory."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """The text to continue; the start of a line by default. Repeat the option for several prompts,
    which are sampled as a batch."""
    prompt_file: str | None = None
    """A UTF-8 file with the prompt; - is standard input."""
    max_new_tokens: int = 500
    """The number of tokens to generate."""
    temperature: float = 0.8
    """0 is greedy; 1 samples from the model's distribution."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""
    top_p: float | None = None
    """Nucleus sampling: sample from the smallest set of tokens with this total probability."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the highest probability only."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """Stop string: end a text before it. Repeat the option for several."""
    num_samples: int = 1
    """Samples per prompt."""
    seed: int = 1337
    """The random seed."""
    checkpoint: Literal["best", "last"] | int = "best"
    """The best by validation loss, the last, or a step."""


@dataclass(frozen=True)
class EvalOptions:
    """Compute a run's exact loss on its validation split: every target once."""

    run: Positional[str]
    """The run directory."""
    json: bool = False
    """Print one JSON object."""
    checkpoint: Literal["best", "last"] | int = "best"
    """The best by validation loss, the last, or a step."""


@dataclass(frozen=True)
class InfoOptions:
    """Show the parameters, bytes and FLOPs of a preset's or a run's model, and the memory of a
    training step by the compiler's analysis."""

    what: Positional[str]
    """A preset's name or a run directory."""


@dataclass(frozen=True)
class PrepareOptions:
    """Tokenize text, which may be larger than memory, into a folder for `jgpt train --data`."""

    files: Positional[tuple[str, ...]]
    """UTF-8 files, folders of .txt, or corpora."""
    out: str
    """The folder to write."""
    universal_newlines: bool = DataConfig.universal_newlines
    """Read CR LF and CR as newlines and drop a byte-order mark; off keeps the text as it is."""
    tokenizer: TokenizerName = "char"
    """Characters, bytes, byte-pairs trained on the text, or GPT-2's byte-pairs."""
    bpe_vocab_size: int = 1024
    """The vocabulary size of trained byte-pairs."""
    tokenizer_files: str | None = None
    """The folder of encoder.json and vocab.bpe (or vocab.json and merges.txt) for gpt2."""


@dataclass(frozen=True)
class ImportOptions:
    """Import GPT-2 or nanoGPT weights as a run, to sample, evaluate, or train further with
    `jgpt train --resume --out RUN`."""

    source: Positional[str]
    """A Hugging Face GPT-2 directory (config.json, model.safetensors), or nanoGPT's ckpt.pt."""
    out: str
    """The run directory to write."""
    format: Annotated[Literal["gpt2", "nanogpt"], arg(name=FROM)] = "gpt2"
    """The format of the weights."""
    tokenizer: str | None = None
    """A folder with GPT-2's vocabulary and merges (the source itself by default), a run's
    tokenizer.json, or the text whose characters are the vocabulary. nanoGPT's meta.pkl is not
    read: unpickling can run code."""
    data: tuple[str, ...] = DataConfig().data
    """The text to evaluate on and to train further with."""
    universal_newlines: bool = DataConfig.universal_newlines
    """Read CR LF and CR as newlines and drop a byte-order mark; off keeps the text as it is."""


@dataclass(frozen=True)
class ExportOptions:
    """Export a run's model as a Hugging Face GPT-2 directory."""

    run: Positional[str]
    """The run directory."""
    out: str
    """The directory to write."""
    zero_biases: bool = False
    """Write zeros for biases that the model lacks and GPT-2's format requires."""
    checkpoint: Literal["best", "last"] | int = "best"
    """The best by validation loss, the last, or a step."""


@dataclass(frozen=True)
class PresetsOptions:
    """List the presets of `jgpt train`."""


@dataclass(frozen=True)
class PlotOptions:
    """Plot the losses of runs against steps, tokens and seconds."""

    runs: Positional[tuple[str, ...]]
    """Run directories."""
    out: str = "losses.png"
    """The image to write: .png or .svg."""


@dataclass(frozen=True)
class AttentionOptions:
    """Plot the attention weights of each layer and head over a text."""

    run: Positional[str]
    """The run directory."""
    prompt: str
    """The text; its last block-size tokens are plotted."""
    out: str = "attention.png"
    """The image to write: .png or .svg."""
    checkpoint: Literal["best", "last"] | int = "best"
    """The best by validation loss, the last, or a step."""


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


def in_flags(message: str, options: type) -> str:
    """A library's message in a command's words: `--zero-biases` for `zero_biases=True`.

    Options that the command lacks stay as they are, and so does what quotes a file or the user.
    """
    names = _names(options) | {"which"}

    def flag(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if name not in names or not (value or re.search("[._]", name)):
            return found[0]
        name = "checkpoint" if name == "which" else name.rpartition(".")[2].replace("_", "-")
        if value in (None, "True", "False"):
            return f"--no-{name}" if value == "False" else f"--{name}"
        inner = value[1:-1]
        words = {"(": re.sub("[',]", "", inner), "'": shlex.quote(inner)}
        return f"--{name} {words.get(value[0], value)}"

    ours, *quoted = re.split("( is damaged: |Unrecognized options: )", message, maxsplit=1)
    keyword = r"(?<!\S)(?P<name>[a-z]\w*(?:\.\w+)*)"
    value = r"(?:=(?P<value>'[^']*'|\([^()]*\)|[^\s,;:()]+))?"
    return re.sub(keyword + value, flag, ours) + "".join(quoted)


def _names(options: Any) -> set[str]:
    """The fields of options; those of a config in them also with its name."""
    names = set()
    for field in dataclasses.fields(options):
        inner = _names(field.type) if dataclasses.is_dataclass(field.type) else set()
        names |= {field.name, *inner, *(f"{field.name}.{name}" for name in inner)}
    return names


def _unboxed(box: str) -> str:
    """The first paragraph of tyro's boxed message, and its suggestion."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    message = " ".join(lines[:end])
    meant = next((line.split()[0] for line in lines[end:] if line.startswith("--")), None)
    if meant and "nrecognized" in message:
        message += f" (did you mean {meant}?)"
    return re.sub(r"^Error parsing run[\w.]*: ", "", message)
