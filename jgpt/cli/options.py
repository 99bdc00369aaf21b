"""The options of each command, parsed with tyro; attribute docstrings are the help."""

import contextlib
import dataclasses
import functools
import io
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction, arg

from jgpt.config import DataConfig, TokenizerName, TrainConfig
from jgpt.presets import DEFAULT_PRESET, PRESETS

Options = TypeVar("Options")
FROM = "from"  # a Python keyword can't name a field
EVERYDAY = (
    *("data", "out", "steps", "batch_size", "learning_rate", "eval_interval", "seed"),
    *("block_size", "num_layers", "num_heads", "embed_dim", "dropout"),
)
"""The fields of a config that people change; `jgpt train --help` shows these alone."""
GROUPS = ("training", "model", "optimizer", "dataset")
"""The groups of the other fields: those of the config itself and of its parts."""
METAVARS = {"data": "TEXT ...", "out": "RUN", "name": "NAME", "tokenizer_files": "DIR"}
PYDOCS = f"(default: {' '.join(DataConfig().data)})"
PLAIN = {
    r"no type matching (\S+) could be instantiated from \[(.*?)\]": r"\1 must be \2, not \3",
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 must be a whole number, not \2",
    r"could not convert string to float: (.*)": r"\1 must be a number, not \2",
}
"""What tyro and Python say of a value, and the same in plain words."""


def _arg(metavar: str | None, hint: str = "", **others: Any) -> Any:
    """What the help shows of a value: its metavar, and its default unless that is none."""

    def shown(default: str) -> str:
        return hint if default in ("", "None") else f"(default: {default})"

    return arg(metavar=metavar, help_behavior_hint=shown, **others)


Run = Annotated[str, _arg("RUN", help="The run directory.")]
Directory = Annotated[str, _arg("DIR")]
Image = Annotated[str, _arg("FILE")]
Number = Annotated[int, _arg("N")]
Probability = Annotated[float | None, _arg("P")]
File = Annotated[str | None, _arg("FILE")]
Texts = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")]
Sources = Annotated[UseAppendAction[tuple[tuple[str, ...], ...]], _arg("TEXT ...", PYDOCS)]
Switch = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]
Checkpoint = Annotated[
    Literal["best", "last"] | int,
    _arg("best|last|N", help="The best by validation loss, the last, or a step."),
]


@dataclass(frozen=True)
class RunOptions:
    """What to do with the run."""

    resume: Switch = False
    """Resume the run in --out, which must exist; with a preset or --config it is started if not."""
    overwrite: Switch = False
    """Delete the run in --out and start again."""
    config: File = None
    """A run's config.json, used instead of a preset to repeat that run in another directory."""
    dry_run: Switch = False
    """Show the model, data, memory and compute of the run, without training or writing."""
    profile: Number = 0
    """Profile this many steps after the first; the trace is written to RUN/profile."""


@dataclass(frozen=True)
class SampleOptions:
    """Generate text with a trained model, streamed as it is sampled."""

    run: Positional[Run]
    prompt: Texts = ()
    """The text to continue, by default a newline. Several are sampled as a batch."""
    prompt_file: File = None
    """A UTF-8 file with the prompt; - is standard input."""
    max_new_tokens: Number = 500
    """The number of tokens to generate; the context is the last block-size tokens."""
    temperature: Annotated[float, _arg("X")] = 0.8
    """0 is greedy; 1 samples from the model's distribution."""
    top_k: Annotated[int | None, _arg("K")] = None
    """Sample from the k most likely tokens only."""
    top_p: Probability = None
    """Nucleus sampling: sample from the smallest set of tokens with this total probability."""
    min_p: Probability = None
    """Sample from tokens with at least this fraction of the highest probability only."""
    stop: Texts = ()
    """Stop string: end a text before it."""
    num_samples: Number = 1
    """Samples per prompt."""
    seed: Number = 1337
    """The random seed."""
    checkpoint: Checkpoint = "best"


@dataclass(frozen=True)
class EvalOptions:
    """Compute a run's exact loss on its validation split: every target once."""

    run: Positional[Run]
    json: Switch = False
    """Print one JSON object."""
    checkpoint: Checkpoint = "best"


@dataclass(frozen=True)
class InfoOptions:
    """Show the parameters, bytes, FLOPs and training memory of a model."""

    what: Positional[Annotated[str, _arg("PRESET|RUN")]]
    """A preset's name or a run directory."""


@dataclass(frozen=True)
class PrepareOptions:
    """Tokenize text, which may be larger than memory, for `jgpt train --data`."""

    files: Positional[Annotated[tuple[str, ...], _arg("TEXT ...")]]
    """UTF-8 files, folders of .txt, or corpora."""
    out: Directory
    """The folder to write."""
    universal_newlines: bool = DataConfig.universal_newlines
    """Read CR LF and CR as newlines and drop a byte-order mark; off keeps the text as it is."""
    tokenizer: TokenizerName = "char"
    """Characters, bytes, byte-pairs trained on the text, or GPT-2's byte-pairs."""
    bpe_vocab_size: Number = 1024
    """The vocabulary size of trained byte-pairs."""
    tokenizer_files: Annotated[str | None, _arg("DIR")] = None
    """The folder of encoder.json and vocab.bpe (or vocab.json and merges.txt) for gpt2."""


@dataclass(frozen=True)
class ImportOptions:
    """Import GPT-2 or nanoGPT weights as a run, to sample, evaluate or resume."""

    source: Positional[Annotated[str, _arg("DIR|FILE")]]
    """A Hugging Face GPT-2 directory (config.json, model.safetensors), or nanoGPT's ckpt.pt."""
    out: Annotated[str, _arg("RUN")]
    """The run directory to write."""
    format: Annotated[Literal["gpt2", "nanogpt"], arg(name=FROM)] = "gpt2"
    """The format of the weights."""
    tokenizer: Annotated[str | None, _arg("DIR|FILE")] = None
    """GPT-2's folder (by default the source), a tokenizer.json, or a text with its characters."""
    data: Sources = ()
    """The text to evaluate on and to train further with."""
    universal_newlines: bool = DataConfig.universal_newlines
    """Read CR LF and CR as newlines and drop a byte-order mark; off keeps the text as it is."""


@dataclass(frozen=True)
class ExportOptions:
    """Export a run's model as a Hugging Face GPT-2 directory."""

    run: Positional[Run]
    out: Directory
    """The directory to write."""
    zero_biases: Switch = False
    """Write zeros for biases that the model lacks and GPT-2's format requires."""
    checkpoint: Checkpoint = "best"


@dataclass(frozen=True)
class PresetsOptions:
    """List the presets of `jgpt train`."""


@dataclass(frozen=True)
class PlotOptions:
    """Plot the losses of runs against steps, tokens and seconds."""

    runs: Positional[Annotated[tuple[str, ...], _arg("RUN ...")]]
    """Run directories."""
    out: Image = "losses.png"
    """The image to write: .png or .svg."""


@dataclass(frozen=True)
class AttentionOptions:
    """Plot the attention weights of each layer and head over a text."""

    run: Positional[Run]
    prompt: Annotated[str, _arg("TEXT")]
    """The text; its last block-size tokens are plotted."""
    out: Image = "attention.png"
    """The image to write: .png or .svg."""
    checkpoint: Checkpoint = "best"


def parse_train(
    args: list[str], base: Callable[[Any], TrainConfig]
) -> tuple[TrainConfig, RunOptions]:
    """Parse the options of `jgpt train`, which override the config that `base` returns for them.

    `base` is called with an object of all options, of which it needs `preset`, `out` and `run`.
    """
    shown = next((PRESETS[word] for word in args if word in PRESETS), PRESETS[DEFAULT_PRESET])[1]
    if {"-h", "--help", "--help-all"} & {*args}:
        options = _train_options(shown, help=True, everything="--help-all" in args)
        presets = "\n".join(describe_presets(shutil.get_terminal_size().columns - 2))
        description = (
            "Train a GPT: a preset, with the options that you override:\n"
            f"{textwrap.indent(presets, '  ')}\n\n"
            "jgpt train --help-all shows the options for all fields of the config."
        )
        parse(options, "train", ["--help"], description=description)
    given = parse(_train_options(shown), "train", args)
    config = base(given)
    if config is not shown:
        given = parse(_train_options(config), "train", args)
    values = vars(given).copy()
    for group in GROUPS:
        values |= vars(getattr(given, group))
    parts = {name: _override(getattr(config, name), values) for name in GROUPS[1:]}
    return _override(config, values | parts), given.run


def _override(config: Any, values: dict[str, Any]) -> Any:
    """The config with those of the values that it has fields for."""
    changes = {}
    for name in {its.name for its in dataclasses.fields(config)} & {*values}:
        value = values[name]
        if not isinstance(value, tuple):
            changes[name] = value
        elif value:  # of a list, what was given each time
            changes[name] = tuple(chain(*value))
    return dataclasses.replace(config, **changes)


@functools.lru_cache(maxsize=8)
def _train_options(config: TrainConfig, *, help: bool = False, everything: bool = True) -> Any:
    """Options for a preset, the fields that people change, the run, and all other fields.

    Only with `help` they have one, for which source is read.
    """
    parts = [config, *(getattr(config, name) for name in GROUPS[1:])]
    parts = [_options(part, help) for part in parts]
    known = dict(chain(*(part.items() for part in parts)))
    preset = Positional[Annotated[str | None, _arg("[PRESET]", help="One of those above.")]]
    fields: list[Any] = [("preset", preset, field(default=None))]
    fields += [known[name] for name in EVERYDAY]
    run = Annotated[RunOptions, arg(help="Start, resume or repeat a run.")]
    fields += [("run", run, field(default=RunOptions()))]
    for group, part in zip(GROUPS, parts, strict=True) if everything else ():
        others = [option for name, option in part.items() if name not in EVERYDAY]
        kind = make_dataclass(group, others, frozen=True)
        fields.append((group, Annotated[kind, arg(help="")], field(default=kind())))
    return make_dataclass("Train", fields, frozen=True)


def _options(config: Any, help: bool) -> dict[str, tuple[str, Any, Any]]:
    """An option for each field of a config: its name, its type, and its value as the default."""
    described = parse_from_object(type(config)).params if help else ()
    texts = {text.arg_name: " ".join((text.description or "").split()) for text in described}
    options = {}
    for name, kind in get_type_hints(type(config)).items():
        value, text = getattr(config, name), texts.get(name, "")
        if dataclasses.is_dataclass(value) or name == "vocab_size":
            continue  # a group of its own; the tokenizer determines it
        metavar, hint = METAVARS.get(name) or _metavar(kind), ""
        if get_origin(kind) is tuple:
            # an option takes several values, and repeating it appends more
            hint = f"(default: {' '.join(map(str, value))})" * bool(value)
            kind, value = UseAppendAction[tuple[kind, ...]], ()
        options[name] = name, Annotated[kind, _arg(metavar, hint, help=text)], field(default=value)
    return options


def _metavar(kind: Any) -> str | None:
    """What a value is called: N, X, one of a few words, several of these, or one or None."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return "|".join(arguments)
    if get_origin(kind) is tuple:
        return f"{_metavar(arguments[0])} ..."
    if arguments:
        return f"{_metavar(arguments[0])}|None"
    return {int: "N", float: "X"}.get(kind)


def describe_presets(width: int) -> list[str]:
    """A line for each preset, wrapped."""
    return [
        textwrap.fill(
            f"{name:<14} {summary}{' (the default)' * (name == DEFAULT_PRESET)}; "
            f"{config.steps:,} steps",
            width,
            subsequent_indent=" " * 15,
        )
        for name, (summary, config) in PRESETS.items()
    ]


def parse(
    options: type[Options], command: str, args: list[str], description: str | None = None
) -> Options:
    """Parse with tyro; its boxed error messages become one-line ValueErrors."""
    said = io.StringIO()
    if shutil.get_terminal_size().columns < 40:  # in very few, tyro never ends
        os.environ["COLUMNS"] = "40"
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                options,
                prog=f"jgpt {command}",
                args=args,
                config=(OmitArgPrefixes,),
                description=description,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_unboxed(said.getvalue())) from None


def in_flags(message: str, *options: type) -> str:
    """A library's message in a command's words: `--zero-biases` for `zero_biases=True`.

    Options that the command lacks stay as they are, and so does what quotes a file or the user.
    """
    names = {"which"}.union(*map(_names, options))

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
    for each in dataclasses.fields(options):
        inner = _names(each.type) if dataclasses.is_dataclass(each.type) else set()
        names |= {each.name, *inner, *(f"{each.name}.{name}" for name in inner)}
    return names


def _unboxed(box: str) -> str:
    """The first paragraph of tyro's boxed message, and its suggestion."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    if {*"".join(lines[1:2])} == {"-"}:  # where output is ASCII, a line that is the title
        lines = lines[2:]
    end = next((i for i, line in enumerate(lines) if {*line} in ({"─"}, {"-"})), len(lines))
    message = " ".join(lines[:end])
    meant = next((line.split()[0] for line in lines[end:] if re.match(r"--\w", line)), None)
    if meant and "nrecognized" in message and meant not in message.split():
        message += f" (did you mean {meant}?)"
    for pattern, plain in PLAIN.items():
        message = re.sub(rf"Error parsing (\S+): {pattern}.*", plain, message)
    return message
