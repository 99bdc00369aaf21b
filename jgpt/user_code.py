"""A user's own model and optimizer: loaded from a file that is named, and compared with a run."""

import dataclasses
import hashlib
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jgpt.config import ModelConfig, TrainConfig
from jgpt.fields import Code, Make, imported_beside, values_without_code
from jgpt.refusal import Field, Message
from jgpt.words import did_you_mean


class CustomCodeError(ValueError):
    """An error of a user's file, with its place: the file, the line and what it says."""


_loaded: list[Path] = []  # the files that `load_code` has run


def load_code(named: str) -> Callable[..., Any]:
    """Return the function or class FILE.py:NAME, from a file that the user names and that is run.

    The file may import others from its folder. Raises CustomCodeError if it raises, ValueError if
    there is no such name, and OSError if it can't be read.
    """
    file, _, name = named.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"{named!r} must be a file and a name in it, as in my_gpt.py:GPT")
    path = Path(file).resolve()
    # a file that was changed meanwhile is another module, and one of the same name in another
    # folder is, too
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    unique = f"{path.stem}_{digest[:12]}"
    if unique not in sys.modules:
        _load(path, unique)
    module = sys.modules[unique]
    found = getattr(module, name, None)
    if not callable(found):
        callables = [known for known, value in vars(module).items() if callable(value)]
        suggestion = did_you_mean(name, callables)
        raise ValueError(f"{file} has no function or class {name!r}{suggestion}")
    return found


def _load(path: Path, unique: str) -> None:
    """Run a file as a module of a unique name."""
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None  # of a .py there is one
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # before it runs: dataclasses look their module up
    sys.modules[unique] = module
    _loaded.append(path)
    # at the end and for this import alone: a file beside it must not stand in for a package that
    # this process imports later
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]  # or the next call would find half of it
        described = describe_error(error)
        raise CustomCodeError(described or f"{_shown(path)} can't be loaded: {error}") from error
    finally:
        sys.path.remove(str(path.parent))


def describe_error(error: BaseException) -> str | None:
    """One line for an error that was raised in, or through, a file that `load_code` has run.

    It has the file, the number of the line, the line and the error; None for any other error.
    """
    if isinstance(error, CustomCodeError):
        return str(error)
    message = " ".join(f"{type(error).__name__}: {error}".split())
    files = set(_loaded)
    for path in _loaded:
        files.update(imported_beside(path))
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) in files:
        line = (error.text or "").strip()
        return f"{_shown(Path(error.filename))}, line {error.lineno}: {line}: {message}"
    place = _place_of(error, files)
    if place is None:
        return None
    return f"{place}: {message}"


def _place_of(error: BaseException, files: set[Path]) -> str | None:
    """Return the last line of some files that an error has passed: the file, the line's number, the
    line.

    For a result that `jgpt.typed` doesn't accept, that is where the function begins.
    """
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if path not in files:
            # the call has returned, so only the function that was checked has a place in the file
            code = getattr(frame.f_locals.get("function"), "__code__", None)
            if code is None or Path(code.co_filename) not in files:
                continue
            path = Path(code.co_filename)
            number = code.co_firstlineno  # of the first decorator
            while linecache.getline(str(path), number).lstrip().startswith("@"):
                number += 1
        line = linecache.getline(str(path), number).strip()
        return f"{_shown(path)}, line {number}: {line}"
    return None


def _shown(path: Path) -> str:
    """Return a path as the user would type it."""
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(path)


def require_code(make: Make, what: str) -> Callable[..., Any]:
    """Return the code itself. Raises ValueError for a record of it."""
    if isinstance(make, Code):
        raise ValueError(
            Message(
                f"the run's {what} is {make.named}, which a run never loads by itself: give ",
                Field(what, make.named),
            )
        )
    assert make is not None
    return make


def with_code(
    config: TrainConfig,
    model: Make | str = None,
    optimizer: Make | str = None,
) -> TrainConfig:
    """Return the config with a user's own model and optimizer, given as they are or as
    FILE.py:NAME.

    `config.model` is converted to the class in the annotation of `make(config, rngs=)`.
    """
    # a record changes nothing: it is in the config already, and isn't code
    if model is not None and not isinstance(model, Code):
        make = _loaded_code(model)
        fields = values_without_code(config.model)
        if isinstance(config.model.make, Code):
            # those of the user's own class, which the saved config could not be made of
            fields |= dict(config.model.make.fields)
        make_config = config_class(make, config)
        config = dataclasses.replace(config, model=make_config(**fields, make=make))
    if optimizer is not None and not isinstance(optimizer, Code):
        make = _loaded_code(optimizer)
        rule = "the optimizer must take (config, steps)"
        _require_call(make, rule, config.optimizer, config.steps)
        custom_optimizer = dataclasses.replace(config.optimizer, make=make)
        config = dataclasses.replace(config, optimizer=custom_optimizer)
    return config


def _loaded_code(code: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a function or class as it is, or loaded if it is FILE.py:NAME."""
    if isinstance(code, str):
        return load_code(code)
    return code


def config_class(make: Callable[..., Any], config: TrainConfig) -> type[ModelConfig]:
    """Return the config class that an argument of `make` is annotated with, or that of
    `config.model`."""
    _require_call(make, "the model must take (config, rngs=)", config.model, rngs=None)
    called = make
    if isinstance(make, type):  # whose own signature NNX's metaclass hides
        called = make.__init__
    signature = inspect.signature(called, eval_str=True)
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, ModelConfig):
            if isinstance(config.model, kind):  # a subclass keeps its further fields
                return type(config.model)
            return kind
    return type(config.model)


def _require_call(make: Callable[..., Any], rule: str, *given: Any, **named: Any) -> None:
    """Raise ValueError, which begins with the rule, for code that doesn't take these arguments."""
    called = make
    arguments = given
    if isinstance(make, type):
        called = make.__init__
        if called is object.__init__:  # which says that it takes anything, and takes nothing
            called = _takes_nothing
        arguments = (make, *given)  # any object will do for `self`
    try:
        inspect.signature(called).bind(*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{rule}: {error}") from None


def _takes_nothing(self: Any) -> None:
    """The signature of a class without a constructor."""


def changed_code(saved: TrainConfig, given: TrainConfig) -> list[str]:
    """Return a line for each file of the model and the optimizer that is not as the run began
    with."""
    lines = []
    for part in ("model", "optimizer"):
        make = getattr(given, part).make
        if make is None:
            continue
        new = Code.of(make)
        changed = f"{part} {new.named} has changed since the run began"
        saved_make = getattr(saved, part).make
        if saved_make is None:
            lines.append(f"the {changed}")
            continue
        old = Code.of(saved_make)
        if (old.name, old.sha256) != (new.name, new.sha256):
            lines.append(f"the {changed}")
        if not old.modules:  # not recorded; a file that imported nothing has changed if it does now
            continue
        old_modules = dict(old.modules)
        new_modules = dict(new.modules)
        for file in sorted(old_modules | new_modules):
            if old_modules.get(file) != new_modules.get(file):
                lines.append(f"{file} of the {changed}")
    return lines


def code_facts(config: TrainConfig) -> dict[str, str | None]:
    """What processes that train together must agree on: the names and SHA-256 of custom code."""
    facts: dict[str, str | None] = {}
    for part in ("model", "optimizer"):
        make = getattr(config, part).make
        if make is None:
            facts[f"{part}_code"] = None
            continue
        code = Code.of(make)
        file = Path(code.file or "FILE.py").name  # its folder may be another on each machine
        facts[f"{part}_code"] = f"{file}:{code.name} of SHA-256 {code.sha256}"
        for module, sha256 in code.modules:
            facts[f"{module} of the {part}"] = f"SHA-256 {sha256}"
    return facts
