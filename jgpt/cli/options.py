"""Parsing options with tyro; attribute docstrings are the help."""

import contextlib
import dataclasses
import functools
import io
import os
import re
import shlex
import shutil
import textwrap
from collections import ChainMap
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, make_dataclass
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction, arg

from jgpt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.presets import DEFAULT_PRESET, PRESETS, preset

Result = TypeVar("Result")
EVERYDAY = (
    *("data", "out", "steps", "batch_size", "learning_rate", "eval_interval", "seed"),
    *("block_size", "num_layers", "num_heads", "embed_dim", "dropout"),
)
"""The fields of a config that people change; `jgpt train --help` shows these alone."""
GROUPS = ("training", "model", "optimizer", "dataset")
"""The groups of the other fields: those of the config itself and of its parts."""
METAVARS = {"data": "TEXT ...", "out": "RUN", "name": "NAME", "tokenizer_files": "DIR"}
PLAIN = {
    r"no type matching (\S+) could be instantiated from \[(.*?)\]": r"\1 must be \2, not \3",
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 must be a whole number, not \2",
    r"could not convert string to float: (.*)": r"\1 must be a number, not \2",
}
"""What tyro and Python say of a value, and the same in plain words."""


def described(metavar: str | None, hint: str = "", **others: Any) -> Any:
    """What the help shows of a value: its metavar, and its default unless that is none."""

    def shown(default: str) -> str:
        return hint if default in ("", "None") else f"(default: {default})"

    return arg(metavar=metavar, help_behavior_hint=shown, **others)


File = Annotated[str | None, described("FILE")]
Number = Annotated[int, described("N")]
Switch = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]


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
    """Show what the run takes, without training or writing."""
    profile: Number = 0
    """Trace this many steps into RUN/profile."""
    on: Annotated[str | None, described("CHIPS")] = None
    """With --dry-run, compile for chips like v5e:4x4, h100:8."""
    json: Switch = False
    """With --dry-run, print one JSON object."""


@dataclass(frozen=True)
class ProcessOptions:
    """How this process joins others."""

    distributed: Switch = False
    """Join the processes of a TPU pod, SLURM or Open MPI."""
    coordinator: Annotated[str | None, described("HOST:PORT")] = None
    """Join processes elsewhere: where process 0 listens."""
    processes: Annotated[int | None, described("N")] = None
    """How many there are."""
    process: Annotated[int | None, described("I")] = None
    """Which of them this one is, from 0."""


TRAIN = {
    each.name
    for kind in (RunOptions, ProcessOptions, TrainConfig, ModelConfig, OptimizerConfig, DataConfig)
    for each in dataclasses.fields(kind)
}
"""The names of the options of `jgpt train`."""


def parse_train(
    args: list[str], command: str = "train"
) -> tuple[TrainConfig, RunOptions, ProcessOptions]:
    """Parse the options of `jgpt train`: the config, what to do with the run, and where."""
    shown = next((PRESETS[word] for word in args if word in PRESETS), PRESETS[DEFAULT_PRESET])[1]
    if {"-h", "--help", "--help-all"} & {*args}:
        options = _train_options(shown, help=True, everything="--help-all" in args)
        presets = "\n".join(describe_presets(shutil.get_terminal_size().columns - 2))
        description = (
            "Train a GPT: a preset, with the options that you override:\n"
            f"{textwrap.indent(presets, '  ')}\n\n"
            f"jgpt {command} --help-all shows the options for all fields of the config."
        )
        parse(options, command, ["--help"], description=description)
    given = parse(_train_options(shown), command, args)
    config = _base_config(given)
    if config is not shown:
        given = parse(_train_options(config), command, args)
    values = dict(chain(*(vars(its).items() for its in (given, *map(vars(given).get, GROUPS)))))
    # an empty list was not given; of another, what was given each time
    values = {
        name: tuple(chain(*value)) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != ()
    }
    parts = {name: _override(getattr(config, name), values) for name in GROUPS[1:]}
    return _override(config, values | parts), given.run, given.processes


def _base_config(given: Any) -> TrainConfig:
    """The config that options override: of a preset, a file, or the run to resume."""
    if given.run.config is not None:
        if given.preset is not None:
            raise ValueError(f"give the preset {given.preset} or --config, not both")

        from jgpt.runs.directory import read_config

        return dataclasses.replace(read_config(Path(given.run.config)), out=None)
    if given.preset is None and given.out is not None and given.run.resume:
        from jgpt.runs.directory import RunDirectory

        return RunDirectory.open(given.out).config()
    for word in chain(*given.data):
        if given.preset is None and word in PRESETS and not Path(word).exists():
            raise ValueError(f"{word} is a preset: put it before --data")
    return preset(given.preset or DEFAULT_PRESET)


def _override(config: Any, values: dict[str, Any]) -> Any:
    names = {its.name for its in dataclasses.fields(config)} & {*values}
    return dataclasses.replace(config, **{name: values[name] for name in names})


@functools.lru_cache(maxsize=8)
def _train_options(config: TrainConfig, *, help: bool = False, everything: bool = True) -> Any:
    """Options for a preset, the fields that people change, the run, and all other fields.

    Only with `help` they have one, for which source is read.
    """
    parts = [_options(getattr(config, group, config), help) for group in GROUPS]
    known = ChainMap(*parts)
    preset = Positional[Annotated[str | None, described("[PRESET]", help="One of those above.")]]
    run = Annotated[RunOptions, arg(help="Start, resume or repeat a run.")]
    where = Annotated[ProcessOptions, arg(help="Train in many processes.")]
    fields: list[Any] = [("preset", preset, field(default=None))]
    fields += [*map(known.get, EVERYDAY), ("run", run, field(default=RunOptions()))]
    if everything:
        fields.append(("processes", where, field(default=ProcessOptions())))
    for group, part in zip(GROUPS, parts, strict=True) if everything else ():
        others = [option for name, option in part.items() if name not in EVERYDAY]
        kind = make_dataclass(group, others, frozen=True)
        fields.append((group, Annotated[kind, arg(help="")], field(default=kind())))
    return make_dataclass("Train", fields, frozen=True)


def _options(config: Any, help: bool) -> dict[str, tuple[str, Any, Any]]:
    documented = parse_from_object(type(config)).params if help else ()
    texts = {text.arg_name: " ".join((text.description or "").split()) for text in documented}
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
        kind = Annotated[kind, described(metavar, hint, help=text)]
        options[name] = name, kind, field(default=value)
    return options


def _metavar(kind: Any) -> str | None:
    """What a value is called: N, X, None, one of a few words, or several or a choice of these."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return "|".join(arguments)
    if get_origin(kind) is tuple:
        return f"{_metavar(arguments[0])} ..."
    if arguments:
        return "|".join(str(_metavar(argument)) for argument in arguments)
    return {int: "N", float: "X", NoneType: "None"}.get(kind)


def describe_presets(width: int) -> list[str]:
    """A line for each preset, wrapped."""
    marks, column = {DEFAULT_PRESET: " (the default)"}, max(map(len, PRESETS)) + 1
    lines = [
        f"{name:<{column}}{summary}{marks.get(name, '')}; {config.steps:,} steps"
        for name, (summary, config) in PRESETS.items()
    ]
    return [textwrap.fill(line, width, subsequent_indent=" " * column) for line in lines]


def parse(command: Callable[..., Result], name: str, args: list[str], **how: Any) -> Result:
    """Call a command with the options that tyro parses; its errors become one-line ValueErrors."""

    @functools.wraps(command, updated=())
    def parsed(*given: Any, **options: Any) -> Callable[[], Result]:
        return functools.partial(command, *given, **options)

    said = io.StringIO()
    if shutil.get_terminal_size().columns < 40:  # in very few, tyro never ends
        os.environ["COLUMNS"] = "40"
    try:
        with contextlib.redirect_stderr(said):
            call = tyro.cli(
                parsed, prog=f"jgpt {name}", args=args, config=(OmitArgPrefixes,), **how
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_unboxed(said.getvalue())) from None
    return call()


def in_flags(message: str, options: Collection[str]) -> str:
    """A library's message in a command's words: `--zero-biases` for `zero_biases=True`.

    Options that the command lacks stay as they are, and so does what quotes a file or the user.
    """

    def flag(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if name not in (*options, "which") or not (value or found["part"] or "_" in name):
            return found[0]
        name = "checkpoint" if name == "which" else name.replace("_", "-")
        if value in (None, "True", "False"):
            return f"--no-{name}" if value == "False" else f"--{name}"
        inner = value[1:-1]
        words = {"(": re.sub("[',]", "", inner), "'": shlex.quote(inner)}
        return f"--{name} {words.get(value[0], value)}"

    ours, *quoted = re.split("( is damaged: |Unrecognized options: )", message, maxsplit=1)
    keyword = rf"(?<!\S)(?P<part>(?:{'|'.join(GROUPS)})\.)?(?P<name>[a-z]\w*)(?!\w|\.\w)"
    value = r"(?:=(?P<value>'[^']*'|\([^()]*\)|[^\s,;:()]+))?"
    return re.sub(keyword + value, flag, ours) + "".join(quoted)


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
