"""Options made from dataclasses and signatures, parsed by argparse; docstrings are the help."""

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

import docstring_parser

from jgpt.config import TOKENIZER_FIELDS, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.fields import Make
from jgpt.presets import DEFAULT_PRESET, PRESETS, preset
from jgpt.user_code import with_code
from jgpt.words import did_you_mean

NAMES = {int: ("N", "a whole number"), float: ("X", "a number"), NoneType: ("None", "None")}
GROUPS = ("model", "optimizer", "dataset")
"""The parts of a training config."""
COMMON_OPTIONS = {
    *("data", "tokenizer", "bpe_vocab_size"),
    *("out", "seed", "steps", "batch_size", "micro_batches", "eval_interval", "patience"),
    *("trackers", "mesh"),
    *("block_size", "num_layers", "num_heads", "embed_dim", "dropout", "dtype"),
    *("learning_rate", "warmup_steps", "weight_decay"),
}
"""The fields of a config that people change; `jgpt train --help` shows these alone."""
METAVARS = {"data": "TEXT", "out": "RUN", "name": "NAME", "tokenizer_files": "DIR", "mesh": "MESH"}
RENAMED = {"which": "checkpoint"}
"""Keywords of the library whose option has another name."""


@dataclass(frozen=True)
class OptionSpec:
    """How an annotated parameter or field is shown and given."""

    metavar: str | None = None
    help: str = ""
    positional: bool = False
    once: bool = False
    """Each time one value of a list, not several."""


File = Annotated[str | None, OptionSpec("FILE")]


@dataclass(frozen=True)
class RunOptions:
    """Start, resume or repeat a run."""

    resume: bool = False
    """Resume the run in --out. A preset or --config starts one if there is none."""
    overwrite: bool = False
    """Delete the run in --out and start again."""
    config: File = None
    """A run's config.json, used instead of a preset to repeat that run in another directory."""
    dry_run: bool = False
    """Show what the run needs, without training or writing."""
    model: Annotated[str | None, OptionSpec("FILE:NAME")] = None
    """A custom model: a class or function in a Python file. The file is executed."""
    optimizer: Annotated[str | None, OptionSpec("adamw|muon|FILE:NAME")] = None
    """AdamW for all parameters, Muon for the blocks' weight matrices and AdamW for the rest, or a
    custom optimizer: a function in a Python file."""
    initial: Annotated[str | None, OptionSpec("RUN|FOLDER")] = None
    """Start from the weights and tokenizer of RUN, RUN@STEP or a Hugging Face folder."""
    with_optimizer: bool = False
    """With --initial RUN@STEP, take its moments and its step, too."""
    objective: Annotated[str | None, OptionSpec("FILE:NAME")] = None
    """What to minimise instead of the cross-entropy: a function in a Python file."""
    on: Annotated[str | None, OptionSpec("CHIPS")] = None
    """With --dry-run, compile for chips like v5e:4x4, h100:8."""
    json: bool = False
    """With --dry-run, print one JSON object."""


@dataclass(frozen=True)
class ProcessOptions:
    """Train in many processes."""

    distributed: bool = False
    """Join the processes of a TPU pod, SLURM or Open MPI."""
    coordinator: Annotated[str | None, OptionSpec("HOST:PORT")] = None
    """Join processes elsewhere: where process 0 listens."""
    processes: Annotated[int | None, OptionSpec("N")] = None
    """The number of processes."""
    process: Annotated[int | None, OptionSpec("I")] = None
    """The number of this process, from 0."""


CONFIGS = TrainConfig, ModelConfig, OptimizerConfig, DataConfig
TRAIN = {
    field.name
    for kind in (RunOptions, ProcessOptions, *CONFIGS)
    for field in dataclasses.fields(kind)
}
"""The names of the options of `jgpt train`."""


class OptionError(ValueError):
    """A rejected option, in the words of the command line."""


class _Parser(argparse.ArgumentParser):
    """A parser of a command's options. Raises OptionError."""

    def __init__(self, command: str, description: str | None) -> None:
        super().__init__(
            prog=f"jgpt {command}",
            usage=f"jgpt {command} [OPTIONS]",
            description=description,
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=28
            ),
            argument_default=argparse.SUPPRESS,  # what was not given is absent
            allow_abbrev=False,
        )
        self.command = command
        self.flags: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Raise an error where argparse would exit."""
        of_option = re.sub(r"^argument (\S+):", r"\1", message)
        raise OptionError(f"{of_option}; see jgpt help {self.command}")

    def add(
        self, group: Any, name: str, kind: Any, shown: OptionSpec, default: Any, help: str
    ) -> None:
        """Add the option for a parameter or field; a switch that is None can be given as either."""
        required = default is inspect.Parameter.empty
        settings: dict[str, Any] = {"help": _help_with_default(help or shown.help, default)}
        if kind is bool and default is False:
            settings["action"] = "store_true"
        elif kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings |= _settings_of_value(name, kind, shown, required)
        if shown.positional:
            self.usage = f"{self.usage} {settings['metavar']}"
            self.add_argument(name, **settings)
            return
        flag = f"--{name.rstrip('_').replace('_', '-')}"
        self.flags.append(flag)
        group.add_argument(flag, dest=name, required=required, **settings)

    def parse(self, args: list[str]) -> dict[str, Any]:
        """The options that were given, lists as tuples."""
        # intermixed: a preset may stand anywhere, also behind options
        parsed, unknown = self.parse_known_intermixed_args(list(map(_with_dashes, args)))
        if unknown:
            flag = unknown[0].partition("=")[0]
            self.error(f"unknown argument {flag!r}{did_you_mean(flag, self.flags)}")
        values = vars(parsed)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        return values


def _settings_of_value(name: str, kind: Any, shown: OptionSpec, required: bool) -> dict[str, Any]:
    """The arguments of argparse for an option's value."""
    settings: dict[str, Any] = {}
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        if shown.once:
            settings["action"] = "append"
        else:
            settings["nargs"] = "+" if required else "*"
        if not shown.positional:
            settings.setdefault("action", "extend")
    elif shown.positional and not required:
        settings["nargs"] = "?"
    settings["type"], metavar = _reader(kind)
    settings["metavar"] = shown.metavar or METAVARS.get(name, metavar)
    return settings


def _help_with_default(help: str, default: Any) -> str:
    """The help of an option for argparse, with the default where it is worth saying."""
    # a switch's default is in its name, and what is empty needs no mention
    is_empty = default is inspect.Parameter.empty or default in (None, "", ())
    if not is_empty and not isinstance(default, bool):
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        help = f"{help} (default: {default})"
    return help.replace("%", "%%")  # argparse formats it by %


def _with_dashes(word: str) -> str:
    """`--batch-size=4` for `--batch_size=4`: only the name, or a value would change."""
    return re.sub("^--[a-z][a-z0-9_-]*", lambda name: name[0].replace("_", "-"), word)


def _reader(kind: Any) -> tuple[Callable[[str], Any], str | None]:
    """A function from text to a value of a type, and the metavar of such a value.

    The types are words, an int, a float or a string, and unions of those with None.
    """
    kinds = (kind,)
    if get_origin(kind) in (Union, UnionType):
        kinds = get_args(kind)
    words: list[str] = []  # of a Literal; other kinds have no arguments
    for member in kinds:
        words.extend(get_args(member))
    named = [NAMES[member] for member in kinds if member in NAMES]

    def read(text: str) -> Any:
        if text in words:
            return text
        if text == "None" and NoneType in kinds:
            return None
        # a whole number is one where a float may be given, too
        for convert in (int, float, str):
            if convert in kinds:
                with contextlib.suppress(ValueError):
                    return convert(text)
        expected = " or ".join([*words, *(description for _, description in named)])
        raise argparse.ArgumentTypeError(
            f"must be {expected}, not {text!r}{did_you_mean(text, words)}"
        )

    metavar = "|".join([*words, *(letter for letter, _ in named)])
    return read, metavar or None


def parse(command: Callable[..., Any], name: str, args: list[str]) -> dict[str, Any]:
    """The arguments of a command, from its options."""
    if name != "train":
        return _parser_of(command, name).parse(args)
    # Code is asked for first: its config may have fields of its own, which are options.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model", nargs="?")
    first.add_argument("--optimizer", nargs="?")
    code, _ = first.parse_known_args(args)
    if ".py" not in (code.optimizer or ""):  # the name of a built-in one
        code.optimizer = None
    shown = with_code(PRESETS[DEFAULT_PRESET][1], **vars(code))
    values = _training_parser(command, shown).parse(args)
    options = _replace_given(RunOptions(), values)
    where = _replace_given(ProcessOptions(), values)
    # a config's fields of these names hold the loaded code
    values.pop("objective", None)
    if code.optimizer is not None:
        del values["optimizer"]
    if options.initial is not None:
        _require_no_tokenizer(options.initial, values)
    config = with_code(_base_config(values, options), **vars(code), objective=options.objective)
    if options.resume:
        _lower_floor(config.optimizer, values)
    # apart from `values`, in which `model` and `optimizer` are the options of those names
    parts = {part: _replace_given(getattr(config, part), values) for part in GROUPS}
    return {"config": _replace_given(config, values | parts), "options": options, "where": where}


def _lower_floor(optimizer: OptimizerConfig, values: dict[str, Any]) -> None:
    """Lower min_learning_rate by the factor of a learning rate that is lowered on resuming."""
    rate = values.get("learning_rate", optimizer.learning_rate)
    factor = min(rate / optimizer.learning_rate, 1.0)
    values.setdefault("min_learning_rate", factor * optimizer.min_learning_rate)


def help_of(command: Callable[..., Any], name: str, args: list[str]) -> str:
    """The help of a command; of `jgpt train`, with the defaults of the preset among `args`."""
    if name != "train":
        return _parser_of(command, name).format_help()
    named = [word for word in args if word in PRESETS]
    _, config = PRESETS[[*named, DEFAULT_PRESET][0]]
    everything = "--help-all" in args
    return _training_parser(command, config, everything=everything).format_help()


def _parser_of(command: Callable[..., Any], name: str) -> _Parser:
    parser = _Parser(name, _documentation(command).short_description)
    for option in _options(command):
        parser.add(parser, *option)
    return parser


def _training_parser(
    command: Callable[..., Any], config: TrainConfig, *, everything: bool = True
) -> _Parser:
    """The parser of `jgpt train`, with the options of everything or those that people change."""
    presets = "\n".join(describe_presets(shutil.get_terminal_size().columns - 2))
    parser = _Parser(
        "train",
        f"{_documentation(command).short_description}\n"
        "Give a preset, and the options that you override:\n"
        f"{textwrap.indent(presets, '  ')}\n\n"
        "jgpt train --help-all shows the options for all fields of the config.",
    )
    first = OptionSpec("[PRESET]", "One of the presets above.", positional=True)
    parser.add(parser, "preset", str | None, first, None, "")
    owners = {"run": RunOptions(), "training": config}
    for part in GROUPS:
        owners[part] = getattr(config, part)
    owners["processes"] = ProcessOptions()
    for title, owner in owners.items():
        group = parser.add_argument_group(title)
        for option in _options(owner):
            if everything or title == "run" or option[0] in COMMON_OPTIONS:
                parser.add(group, *option)
    return parser


def _options(owner: Any) -> Iterator[tuple[str, Any, OptionSpec, Any, str]]:
    """The name, type, way to show, default and help of each option of a command or config."""
    source = owner
    hidden: set[str] = set()
    if not inspect.isfunction(owner):
        source = type(owner)
    if isinstance(owner, CONFIGS):
        # the tokenizer determines the one, and the other is an option of the run
        hidden = {"vocab_size", "optimizer"}
    help_texts = {}
    for documented in _documentation(source).params:
        words = (documented.description or "").split()
        help_texts[documented.arg_name] = " ".join(words)  # on one line
    kinds = get_type_hints(source)
    annotated = get_type_hints(source, include_extras=True)
    for name, parameter in inspect.signature(source).parameters.items():
        kind = kinds[name]
        # a config's values are the defaults
        default = getattr(owner, name, parameter.default)
        is_part = dataclasses.is_dataclass(default)  # which has a group of options of its own
        if is_part or name in hidden or kind == Make:
            continue
        if kind is bool and isinstance(owner, CONFIGS):
            default = None  # a file's may be either
        notes = getattr(annotated[name], "__metadata__", ())
        specs = [note for note in notes if isinstance(note, OptionSpec)]
        yield name, kind, [*specs, OptionSpec()][0], default, help_texts.get(name, "")


@functools.cache
def _documentation(source: Any) -> docstring_parser.Docstring:
    """A docstring, also those of fields, which takes a while to read."""
    return docstring_parser.parse_from_object(source)


def _base_config(values: dict[str, Any], run: RunOptions) -> TrainConfig:
    """The config that options override: of a preset, a file, or the run to resume."""
    name = values.get("preset")
    # imported here, since the help needs none of it and has to be quick
    if run.config is not None:
        if name is not None:
            raise ValueError(f"give the preset {name} or --config, not both")

        from jgpt.runs.directory import read_config

        return dataclasses.replace(read_config(Path(run.config)), out=None)
    if name is None and run.resume and values.get("out") is not None:
        from jgpt.runs.directory import RunDirectory

        return RunDirectory.open(values["out"]).config()
    if name is None and run.initial is not None:
        return _config_of_initial(run.initial)
    for word in values.get("data", ()):
        if name is None and word in PRESETS:
            raise ValueError(f"{word} is a preset: put it before --data")
    if name is not None and name not in PRESETS:
        _raise_for_run_or_text(name)
    return preset(name or DEFAULT_PRESET)


def _config_of_initial(source: str) -> TrainConfig:
    """The config of the run or the folder whose weights another run starts from."""
    from jgpt.runs.directory import RunDirectory, run_and_step
    from jgpt.runs.load import load_pretrained

    path, _ = run_and_step(source)
    if RunDirectory.exists(path):
        config = RunDirectory.open(path).config()
        # The next run may be trained in another way, and needs only the code of the model.
        optimizer = dataclasses.replace(config.optimizer, make=None)
        return dataclasses.replace(
            config, name="gpt", out=None, optimizer=optimizer, objective=None
        )
    return load_pretrained(source).config


def _require_no_tokenizer(initial: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError for a tokenizer beside weights to start from, which have their own."""
    for name in TOKENIZER_FIELDS:
        if name in values:
            raise ValueError(
                f"`initial={initial!r}` has a tokenizer, which the run takes: leave out "
                f"`{name}={values[name]!r}`"
            )


def _raise_for_run_or_text(word: str) -> None:
    """Say with which option to give a run or a text that stands where a preset is expected."""
    from jgpt.data.sources import CORPORA
    from jgpt.runs.directory import RunDirectory

    quoted = shlex.quote(word)
    if RunDirectory.exists(Path(word)):
        raise OptionError(
            f"{word} is a run, not a preset; to train it further: "
            f"jgpt train --resume --out {quoted}"
        )
    if Path(word).exists() or word in CORPORA:
        raise OptionError(f"{word} is no preset; to train on a text: jgpt train --data {quoted}")


def _replace_given(config: Any, values: dict[str, Any]) -> Any:
    """The config with the values of those of its fields that were given."""
    changes = {}
    for field in dataclasses.fields(config):
        if field.name in values:
            changes[field.name] = values[field.name]
    return dataclasses.replace(config, **changes)


def describe_presets(width: int) -> list[str]:
    """A line for each preset, wrapped."""
    column = max(map(len, PRESETS)) + 1
    lines = []
    for name, (summary, config) in PRESETS.items():
        mark = ""
        if name == DEFAULT_PRESET:
            mark = " (the default)"
        line = f"{name:<{column}}{summary}{mark}; {config.steps:,} steps"
        lines.append(textwrap.fill(line, width, subsequent_indent=" " * column))
    return lines


_FIELD = re.compile(r"`([a-z_.]+)(?:=([^`]*))?`")
"""A field in a message, alone or with its value."""


def in_options(message: str, names: Collection[str] = TRAIN) -> str:
    """A message as a command says it: `--use-bias` for `use_bias=True` in backticks.

    `names` are the command's parameters; a field that it has no option for stays as it is.
    """

    def spell(found: re.Match[str]) -> str:
        part, _, name = found[1].rpartition(".")
        option = RENAMED.get(name, name)
        if option not in names or part not in ("", *GROUPS):
            return found[0]
        return _spell_option(option, found[2])

    return _FIELD.sub(spell, message)


def _spell_option(name: str, value: str | None) -> str:
    """An option with its value, which a message has as Python writes it."""
    option = name.replace("_", "-")
    if value in (None, "True"):
        return f"--{option}"
    if value == "False":
        return f"--no-{option}"
    try:
        given = ast.literal_eval(str(value))
    except (ValueError, SyntaxError):  # a word for what the user is to give, such as NAME
        return f"--{option} {value}"
    if not isinstance(given, tuple):
        given = (given,)
    return f"--{option} {' '.join(shlex.quote(str(item)) for item in given)}"
