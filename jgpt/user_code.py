"""A user's own model and optimizer: loaded from a file that is named, and compared with a run."""

import dataclasses
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jgpt.config import Code, Make, ModelConfig, TrainConfig, did_you_mean, values_without_code


def load_code(named: str) -> Callable[..., Any]:
    """The function or class FILE.py:NAME, from a file that the user names and that is run.

    Raises ValueError if there is no such name or the file raises, and OSError if it can't be read.
    """
    file, _, name = named.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"{named!r} must be a file and a name in it, as in my_gpt.py:GPT")
    path = Path(file).resolve()
    unique = f"{path.stem}_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, path)
        assert spec is not None and spec.loader is not None  # noqa: PT018  # of a .py there is one
        sys.modules[unique] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[unique]
            lines = [each.lineno for each in traceback.extract_tb(error.__traceback__)]
            where = error.lineno if isinstance(error, SyntaxError) else lines[-1]
            raise ValueError(
                f"{file} can't be loaded: line {where}: {type(error).__name__}: {error}"
            ) from error
    found = getattr(sys.modules[unique], name, None)
    if not callable(found):
        own = (each for each, it in vars(sys.modules[unique]).items() if callable(it))
        raise ValueError(f"{file} has no function or class {name!r}{did_you_mean(name, own)}")
    return found


def require_code(make: Make, what: str) -> Callable[..., Any]:
    """The code itself. Raises ValueError for a record of it."""
    if isinstance(make, Code):
        raise ValueError(
            f"the run's {what} is {make.named}, which a run never loads by itself: "
            f"give {what}={make.named}"
        )
    assert make is not None
    return make


def with_code(
    config: TrainConfig,
    model: Make | str = None,
    optimizer: Make | str = None,
) -> TrainConfig:
    """The config with a user's own model and optimizer, given as they are or as FILE.py:NAME.

    `config.model` is converted to the class in the annotation of `make(config, rngs=)`.
    """
    if model is not None and not isinstance(model, Code):
        make = load_code(model) if isinstance(model, str) else model
        fields = values_without_code(config.model)
        if isinstance(config.model.make, Code):
            fields |= dict(config.model.make.fields)
        config = dataclasses.replace(config, model=config_class(make, config)(**fields, make=make))
    if optimizer is not None and not isinstance(optimizer, Code):
        make = load_code(optimizer) if isinstance(optimizer, str) else optimizer
        given = config.optimizer, config.steps
        _require_call(make, "the optimizer must take (config, steps)", *given)
        config = dataclasses.replace(
            config, optimizer=dataclasses.replace(config.optimizer, make=make)
        )
    return config


def config_class(make: Callable[..., Any], config: TrainConfig) -> type[ModelConfig]:
    """The config class that an argument of `make` is annotated with, or that of `config.model`."""
    _require_call(make, "the model must take (config, rngs=)", config.model, rngs=None)
    called = make.__init__ if isinstance(make, type) else make
    signature = inspect.signature(called, eval_str=True)
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, ModelConfig):
            return type(config.model) if isinstance(config.model, kind) else kind
    return type(config.model)


def _require_call(make: Callable[..., Any], rule: str, *given: Any, **named: Any) -> None:
    """Raise ValueError, which begins with the rule, for code that doesn't take these arguments."""
    called = make
    if isinstance(make, type):  # object's own __init__ says that it takes anything
        called = (lambda self: None) if make.__init__ is object.__init__ else make.__init__
        given = make, *given
    try:
        inspect.signature(called).bind(*given, **named)
    except TypeError as error:
        raise ValueError(f"{rule}: {error}") from None


def changed_code(saved: TrainConfig, given: TrainConfig) -> list[str]:
    """A line for the model and for the optimizer if the code is not that of the run."""
    lines = []
    for part in ("model", "optimizer"):
        old, new = (getattr(each, part).make for each in (saved, given))
        if new is not None:
            old, new = old and Code.of(old), Code.of(new)
            if old is None or (old.name, old.sha256) != (new.name, new.sha256):
                lines.append(f"the {part} {new.named} has changed since the run began")
    return lines
