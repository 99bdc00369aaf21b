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
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import docstring_parser

from jgpt.config import (
    TOKENIZER_FIELDS,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from jgpt.fields import code_fields
from jgpt.presets import DEFAULT_PRESET, PRESETS, preset
from jgpt.user_code import with_code
from jgpt.words import did_you_mean

NAMES = {int: ("N", "a whole number"), float: ("X", "a number"), NoneType: ("None", "None")}
GROUPS = ("model", "optimizer", "dataset")
"""The parts of a training config."""
COMMON_OPTIONS = (
    *("data", "out", "steps", "batch_size", "learning_rate", "eval_interval", "seed"),
    *("block_size", "num_layers", "num_heads", "embed_dim", "dropout"),
)
"""The fields of a config that people change; `jgpt train --help` shows these alone."""
METAVARS = {"data": "TEXT", "out": "RUN", "name": "NAME", "tokenizer_files": "DIR", "mesh": "MESH"}
RENAMED = {"which": "checkpoint"}
"""Keywords of the library whose option has another name."""
PLAIN_MESSAGES = {
    "expected one argument": "needs a value",
    "ignored explicit argument": "takes no value, but was given",
}
"""What argparse says of an option, and the same in plain words."""
INSTEAD = {
    "--vocab-size": "can't be set: the tokenizer determines it; give --bpe-vocab-size with "
    "--tokenizer bpe",
    "--device": "is no option: JAX_PLATFORMS=cpu, cuda or tpu chooses the device",
    "--preset": "is no option: write the preset alone, as in jgpt train tiny",
    "--epochs": "is no option: set the length with --steps; --dry-run shows how many epochs it is",
    "--gradient-accumulation-steps": "is no option: --batch-size counts all sequences of a step, "
    "--micro-batches the parts that it is computed in",
    "--wandb": "is no option: --trackers wandb logs to Weights & Biases",
    "--wandb-log": "is no option: --trackers wandb logs to Weights & Biases",
    "--compile": "is no option: steps are always compiled",
    "--init-from": "is no option: --initial starts from a run or a Hugging Face folder",
}
"""The answer to an option of training that doesn't exist."""


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
TRAIN.remove("make")  # given as --model and as --optimizer


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
            exit_on_error=False,
        )
        self.command = command
        self.flags: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Raise an error where argparse would exit."""
        raise OptionError(f"{message}; see {self.prog.replace('jgpt', 'jgpt help')}")

    def add(
        self, group: Any, name: str, kind: Any, shown: OptionSpec, default: Any, help: str
    ) -> None:
        """Add the option for a parameter or field; a switch that is None can be given as either."""
        required = default is inspect.Parameter.empty
        many = get_origin(kind) is tuple
        settings = self._settings_of_value(name, kind, shown, default)
        settings["help"] = _help_with_default(help or shown.help, default, many)
        # argparse takes `required` for an option alone
        if shown.positional:
            settings["nargs"] = _count_of_positional(many, required)
            self.usage = f"{self.usage} {settings['metavar']}"
            self.add_argument(name, **settings)
            return
        if many and shown.once:
            settings["action"] = "append"
        elif many:
            settings["action"] = "extend"
            settings["nargs"] = "*"
        flag = f"--{name.rstrip('_').replace('_', '-')}"
        self.flags.append(flag)
        group.add_argument(flag, dest=name, required=required, **settings)

    def _settings_of_value(
        self, name: str, kind: Any, shown: OptionSpec, default: Any
    ) -> dict[str, Any]:
        """The arguments of argparse for an option's value: its type and its placeholder."""
        if kind is bool and default is False:
            return {"action": "store_true"}
        if kind is bool:
            return {"action": argparse.BooleanOptionalAction}
        kind_of_item = kind
        if get_origin(kind) is tuple:
            kind_of_item = get_args(kind)[0]
        read, metavar = _reader(kind_of_item)
        if get_origin(kind) is tuple and get_origin(kind_of_item) is Literal:
            read = _separated_by_commas(read)
        if name == "optimizer":
            # the name of a built-in one, or a user's own code
            read = _or_code(read)
            metavar = f"{metavar}|FILE:NAME"
        return {"type": read, "metavar": shown.metavar or METAVARS.get(name, metavar)}

    def parse(self, args: list[str]) -> dict[str, Any]:
        """The options that were given, lists as tuples."""
        args = [_with_dashes(word) for word in args]
        try:
            # intermixed: a preset may stand anywhere, also behind options
            parsed, unknown_words = self.parse_known_intermixed_args(args)
        except argparse.ArgumentError as error:
            if error.argument_name is None:  # of required ones, since Python 3.12
                self.error(error.message)
            flag = _flag_in(args, error.argument_name.split("/"))
            message = error.message
            for of_argparse, plain in PLAIN_MESSAGES.items():
                message = message.replace(of_argparse, plain)
            hint = ""
            if flag in args[:-1] and re.match("-[^-]", args[args.index(flag) + 1]):
                hint = f" (one that begins with - is written {flag}=-...)"
            raise OptionError(f"{flag} {message}{hint}") from None
        for word in unknown_words:
            self._require_known_option(word)
        if unknown_words:
            first = unknown_words[0]
            self.error(f"{first!r} was not expected{self._meant_by(first)}")
        values = vars(parsed)
        for name, value in values.items():
            if type(value) is list:
                values[name] = _flat(value)
        return values

    def _require_known_option(self, word: str) -> None:
        """Raise OptionError for what looks like an option and is none, saying what is meant."""
        flag = word.partition("=")[0]
        if self.command == "train" and flag in INSTEAD:
            raise OptionError(f"{flag} {INSTEAD[flag]}")
        if word.startswith("-") and word != "--":
            # without quotes, as the rest of the message writes an option
            meant = did_you_mean(flag, self.flags).replace("'", "")
            self.error(f"unknown option {flag}{meant}")

    def _meant_by(self, word: str) -> str:
        """The option that a word without one may have been meant for, as a question."""
        name, equals, value = word.partition("=")
        flag = f"--{name.replace('_', '-')}"
        if equals and flag in self.flags:
            return f" (did you mean {flag} {value}?)"
        if "--data" in self.flags and _is_text(word):
            return f" (did you mean --data {shlex.quote(word)}?)"
        return ""


def _count_of_positional(many: bool, required: bool) -> str | None:
    """How many words a positional argument takes, in argparse's signs."""
    if many and required:
        return "+"
    if many:
        return "*"
    if required:
        return None  # exactly one
    return "?"


def _help_with_default(help: str, default: Any, many: bool) -> str:
    """The help of an option for argparse, with the default where it is worth saying."""
    # a switch's default is in its name, and what is empty needs no mention
    is_empty = default is inspect.Parameter.empty or default in (None, "", ())
    if not is_empty and not isinstance(default, bool):
        shown: Any = default
        if many:
            shown = " ".join(str(value) for value in shown)
        help = f"{help} (default: {shown})"
    return help.replace("%", "%%")  # argparse formats it by %


def _or_code(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Read a value, or leave FILE.py:NAME as it is."""

    def read_value_or_code(text: str) -> Any:
        if ".py:" in text:
            return text
        try:
            return read(text)
        except argparse.ArgumentTypeError as error:
            # without the name of what is in the file
            if not text.endswith(".py"):
                raise
            raise argparse.ArgumentTypeError(
                f"{error}: name what the file has, as in {text}:NAME"
            ) from None

    return read_value_or_code


def _separated_by_commas(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Read several values in one word, such as wandb,tensorboard."""

    def read_each(text: str) -> list[Any]:
        return [read(item) for item in text.split(",")]

    return read_each


def _flat(values: list[Any]) -> tuple[Any, ...]:
    """The values of a list, some of which are lists of values themselves."""
    items = []
    for value in values:
        if isinstance(value, list):
            items.extend(value)
        else:
            items.append(value)
    return tuple(items)


def _with_dashes(word: str) -> str:
    """`--batch-size=4` for `--batch_size=4`: only the name, or a value would change."""
    name = re.match("--[a-z][a-z0-9_-]*", word)
    if name is None:
        return word
    return name[0].replace("_", "-") + word[name.end() :]


def _flag_in(args: list[str], flags: list[str]) -> str:
    """The flag of an option as the user wrote it: a switch has two, such as --no-qkv-bias."""
    for word in args:
        flag = word.partition("=")[0]
        if flag in flags:
            return flag
    return flags[0]


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
        return _parser(command, name).parse(args)
    # Code is asked for first: its config may have fields of its own, which are options.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model", nargs="?")
    first.add_argument("--optimizer", nargs="?")
    code, _ = first.parse_known_args(args)
    model = code.model
    optimizer = None
    if ".py:" in (code.optimizer or ""):  # and not the name of a built-in one
        optimizer = code.optimizer
    values = _parser(command, name, model=model, optimizer=optimizer).parse(args)
    options = _replace_given(RunOptions(), values)
    processes = _replace_given(ProcessOptions(), values)
    # a config's fields of these names hold the loaded code
    codes = {}
    codes["objective"] = values.pop("objective", None)
    if ".py:" in values.get("optimizer", ""):
        codes["optimizer"] = values.pop("optimizer")
    if options.initial is not None:
        _require_its_tokenizer(options.initial, values)
    config = with_code(_base_config(values, options), model, **codes)
    # apart from `values`, in which `model` and `optimizer` are the options of those names
    if options.resume:
        _lower_floor(config.optimizer, values)
    parts = {part: _replace_given(getattr(config, part), values) for part in GROUPS}
    return {
        "config": _replace_given(config, values | parts),
        "options": options,
        "where": processes,
    }


def _lower_floor(optimizer: OptimizerConfig, values: dict[str, Any]) -> None:
    """Lower min_learning_rate by the factor of a learning rate that is lowered on resuming."""
    rate = values.get("learning_rate", optimizer.learning_rate)
    if rate < optimizer.learning_rate and "min_learning_rate" not in values:
        factor = rate / optimizer.learning_rate
        values["min_learning_rate"] = optimizer.min_learning_rate * factor


def help_of(command: Callable[..., Any], name: str, args: list[str]) -> str:
    """The help of a command; of `jgpt train`, with the defaults of the preset among `args`."""
    presets = [word for word in args if word in PRESETS]
    shown = DEFAULT_PRESET
    if presets:
        shown = presets[0]
    return _parser(command, name, shown, everything="--help-all" in args).format_help()


def _parser(
    command: Callable[..., Any],
    name: str,
    shown: str = DEFAULT_PRESET,
    *,
    everything: bool = True,
    model: str | None = None,
    optimizer: str | None = None,
) -> _Parser:
    """A command's parser; to train, with the defaults of a preset and the common options first."""
    summary = _documentation(command).short_description
    if name != "train":
        parser = _Parser(name, summary)
        for option in _options(command):
            parser.add(parser, *option)
        return parser
    presets = "\n".join(describe_presets(shutil.get_terminal_size().columns - 2))
    parser = _Parser(
        name,
        f"{summary}\n"
        "Give a preset, and the options that you override:\n"
        f"{textwrap.indent(presets, '  ')}\n\n"
        f"jgpt {name} --help-all shows the options for all fields of the config.",
    )
    first = OptionSpec("[PRESET]", "One of the presets above.", positional=True)
    parser.add(parser, "preset", str | None, first, None, "")
    _, config = PRESETS[shown]
    # the common ones first, in an order of their own, and no option twice
    groups = _groups_of_options(with_code(config, model, optimizer))
    by_name = {}
    for options in groups.values():
        for option in options:
            by_name[option[0]] = option
    for field in COMMON_OPTIONS:
        parser.add(parser, *by_name[field])
    for title, options in groups.items():
        if not everything and title != "run":
            continue
        group = parser.add_argument_group(title)
        for option in options:
            if option[0] not in COMMON_OPTIONS:
                parser.add(group, *option)
    return parser


def _groups_of_options(config: TrainConfig) -> dict[str, list[tuple[Any, ...]]]:
    """The options of a training run by the titles of their groups, in the order of the help."""
    groups = {"run": list(_options(RunOptions())), "training": list(_options(config))}
    for part in GROUPS:
        groups[part] = list(_options(getattr(config, part)))
    groups["processes"] = list(_options(ProcessOptions()))
    return groups


def _options(owner: Any) -> Iterator[tuple[str, Any, OptionSpec, Any, str]]:
    """The name, type, way to show, default and help of each option of a command or config."""
    is_function = inspect.isfunction(owner)
    source = owner
    if not is_function:  # a config, whose values are the defaults
        source = type(owner)
    help_texts = {}
    for documented in _documentation(source).params:
        words = (documented.description or "").split()
        help_texts[documented.arg_name] = " ".join(words)  # on one line
    hidden = {"vocab_size"}  # the tokenizer determines it
    if not is_function:
        hidden |= set(code_fields(source))  # options of their own give it
    kinds = get_type_hints(source)
    annotated = get_type_hints(source, include_extras=True)
    for name, parameter in inspect.signature(source).parameters.items():
        kind = kinds[name]
        default = parameter.default
        if not is_function:
            default = getattr(owner, name)
        is_part = dataclasses.is_dataclass(default)  # which has a group of options of its own
        if is_part or name in hidden:
            continue
        if kind is bool and isinstance(owner, CONFIGS):
            default = None  # a file's may be either
        yield name, kind, _spec_in(annotated[name]), default, help_texts.get(name, "")


def _spec_in(annotation: Any) -> OptionSpec:
    """The way to show an option, which its annotation may have."""
    for note in getattr(annotation, "__metadata__", ()):
        if isinstance(note, OptionSpec):
            return note
    return OptionSpec()


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
    for word in (values.get("out"), run.initial):
        if word is not None:
            _require_no_checkpoint(Path(word))
    if name is None and run.resume and values.get("out") is not None:
        from jgpt.runs.directory import RunDirectory

        return RunDirectory.open(values["out"]).config()
    if name is None and run.initial is not None:
        return _config_of_initial(run.initial)
    for word in values.get("data", ()):
        if name is None and word in PRESETS and not Path(word).exists():
            raise ValueError(f"{word} is a preset: put it before --data")
    if name is not None and name not in PRESETS:
        _raise_if_it_is_a_path(name)
    return preset(name or DEFAULT_PRESET)


def _require_no_checkpoint(path: Path) -> None:
    """Raise OptionError for a checkpoint in place of its run: training has no --checkpoint."""
    run = path.parent.parent
    if path.parent.name == "checkpoints" and (run / "config.json").is_file():
        raise OptionError(f"{path} is a checkpoint, not a run directory: give {run}")


def _config_of_initial(source: str) -> TrainConfig:
    """The config of the run or the folder whose weights another run starts from."""
    from jgpt.runs.directory import RunDirectory, run_and_step
    from jgpt.runs.load import load_pretrained

    path, _ = run_and_step(source)
    if RunDirectory.is_run(path):
        config = RunDirectory.open(path).config()
        # The next run may be trained in another way, and needs only the code of the model.
        optimizer = dataclasses.replace(config.optimizer, make=None)
        return dataclasses.replace(
            config, name="gpt", out=None, optimizer=optimizer, objective=None
        )
    return load_pretrained(source).config


def _require_its_tokenizer(initial: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError for options of another tokenizer than that of the weights to start from.

    Here, because a config doesn't say whether the default was given.
    """
    named = {name: values[name] for name in TOKENIZER_FIELDS if name in values}
    if not named:
        return

    from jgpt.runs.initial import require_named_tokenizer, tokenizer_of

    require_named_tokenizer(f"`initial={initial!r}`", tokenizer_of(initial), named)


def _raise_if_it_is_a_path(word: str) -> None:
    """Say with which option to give a run or a text that stands where a preset is expected."""
    path = Path(word)
    if (path / "config.json").is_file() and (path / "checkpoints").is_dir():
        kind = "a run, not a preset; to train it further"
        options = ["--resume", "--out", word]
    elif path.suffix == ".py" or ".py:" in word:
        kind = "Python code, not a preset; to train its model"
        options = ["--model", word]
        if ".py:" not in word:
            options = ["--model", f"{word}:GPT"]  # the class that `jgpt new` writes
    elif _is_text(word):
        kind = "a text, not a preset; to train on it"
        options = ["--data", word]
    else:
        return
    raise OptionError(f"{word} is {kind}: {shlex.join(['jgpt', 'train', *options])}")


def _is_text(word: str) -> bool:
    """Whether a word is what --data takes: a file, a folder or the name of a corpus."""
    from jgpt.data.sources import CORPORA  # the help needs none of it

    return Path(word).exists() or word in CORPORA


def _replace_given(config: Any, values: dict[str, Any]) -> Any:
    """The config with the values of those of its fields that were given."""
    changes = {}
    for field in dataclasses.fields(config):
        if field.name in values:
            changes[field.name] = values[field.name]
    return dataclasses.replace(config, **changes)


def describe_presets(width: int) -> list[str]:
    """A line for each preset, wrapped."""
    column = max(len(name) for name in PRESETS) + 1
    indent = " " * column
    lines = []
    for name, (summary, config) in PRESETS.items():
        mark = ""
        if name == DEFAULT_PRESET:
            mark = " (the default)"
        line = f"{name:<{column}}{summary}{mark}; {config.steps:,} steps"
        lines.append(textwrap.fill(line, width, subsequent_indent=indent))
    return lines


_FIELD = re.compile(r"`([a-z_.]+)(?:=([^`]*))?`")
"""A field in a message, alone or with its value."""


def in_options(message: str, names: Collection[str] = TRAIN) -> str:
    """A message as a command says it: `--zero-biases` for `zero_biases=True` in backticks.

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
    option = f"--{name.replace('_', '-')}"
    if value in (None, "True"):
        return option
    if value == "False":
        return f"--no-{name.replace('_', '-')}"
    try:
        given = ast.literal_eval(str(value))
    except (ValueError, SyntaxError):  # a word for what the user is to give, such as NAME
        return f"{option} {value}"
    if not isinstance(given, tuple):
        given = (given,)
    return f"{option} {' '.join(shlex.quote(str(item)) for item in given)}"
