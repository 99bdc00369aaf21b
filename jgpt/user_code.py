"""Custom models, optimizers and objectives: loading them from a file, and their errors."""

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

from jgpt.config import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.fields import Code, Make, file_of, values_without_code
from jgpt.words import did_you_mean


class CustomCodeError(ValueError):
    """An error in a user's file, with its file, line and message."""


_loaded: set[Path] = set()  # the files that `load_code` has run


def load_code(named: str) -> Any:
    """Run the file in FILE.py:NAME and return its function, class or object NAME.

    The file may import others from its folder. Raises CustomCodeError if it raises, ValueError if
    there is no such name, and OSError if it can't be read.
    """
    file, _, name = named.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"{named!r} must be a file and a name in it, as in my_gpt.py:GPT")
    path = Path(file).resolve()
    # A changed file is a different module, and so is one with the same name in another folder.
    content = f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    unique = f"{path.stem}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
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
    assert spec is not None  # a .py file always has one
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, since dataclasses look up their module.
    sys.modules[unique] = module
    _loaded.add(path)
    # At the end of the path and only for this import, so that a file beside it never replaces a
    # package that this process imports later.
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]  # otherwise the next call would find an incomplete module
        described = describe_error(error)
        raise CustomCodeError(described or f"{_shown(path)} can't be loaded: {error}") from error
    finally:
        sys.path.remove(str(path.parent))


def _is_users(file: str | None) -> bool:
    """Return whether a file is one that `load_code` has run, or stands in the folder of one."""
    if not file:
        return False
    path = Path(file)
    if "site-packages" in path.parts:
        return False
    return any(path.is_relative_to(loaded.parent) for loaded in _loaded)


def describe_error(error: BaseException) -> str | None:
    """Describe an error from a file that `load_code` has run, in one line; None for other errors.

    The line has the file, the line number, the source line and the error.
    """
    if isinstance(error, CustomCodeError):
        return str(error)
    place = place_of_error(error)
    if place is None:
        return None
    path, number = place
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__
    message = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line = (error.text or "").strip()
    else:
        line = linecache.getline(str(path), number).strip()
    return f"{_shown(path)}, line {number}: {line}: {message}"


def place_of_error(error: BaseException) -> tuple[Path, int] | None:
    """Return the file that `load_code` has run, and the line, where an error was raised.

    For a result that `jgpt.typed` rejects, this is where the function begins. Return None for an
    error that no such file has raised.
    """
    cause = error.__cause__
    if isinstance(error, CustomCodeError) and cause is not None:
        return place_of_error(cause)
    # A generator raises RuntimeError, from another place, in place of StopIteration.
    if isinstance(cause, StopIteration):
        return place_of_error(cause)
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return Path(error.filename), error.lineno or 1
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if not _is_users(frame.f_code.co_filename):
            # The call has returned, so only the checked function has a place in the file.
            if frame.f_globals.get("__name__") != "jgpt.shapes.contract":
                continue
            code = getattr(frame.f_locals.get("function"), "__code__", None)
            if code is None or not _is_users(code.co_filename):
                continue
            path = Path(code.co_filename)
            number = code.co_firstlineno  # that of the first decorator
            while linecache.getline(str(path), number).lstrip().startswith("@"):
                number += 1
        return path, number
    return None


def _shown(path: Path) -> str:
    """Return a path as the user would type it."""
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return str(path)


def require_code(make: Make, what: str) -> Callable[..., Any]:
    """Return the custom code. Raises ValueError if there is only a record of it."""
    if isinstance(make, Code):
        raise ValueError(
            f"the run's {what} is {make.named}, which a run never loads by itself: give "
            f"`{what}={make.named!r}`"
        )
    assert make is not None
    return make


def require_all_code(config: TrainConfig) -> None:
    """Raise ValueError for custom code of which a config has only a record."""
    for part, make in custom_code(config).items():
        if make is not None:
            require_code(make, part)


def with_code(
    config: TrainConfig,
    model: Make | str = None,
    optimizer: Make | str = None,
    objective: Make | str = None,
) -> TrainConfig:
    """Put custom code into a config, as objects or as FILE.py:NAME.

    `config.model` is converted to the class in the annotation of `make(config, rngs=)`.
    """
    # A record changes nothing: it is in the config already, and isn't code.
    if model is not None and not isinstance(model, Code):
        make = _loaded_code(model)
        fields = values_without_code(config.model)
        if isinstance(config.model.make, Code):
            # The fields of the custom class, which the saved config could not have.
            fields |= dict(config.model.make.fields)
        make_config = config_class(make, config)
        config = dataclasses.replace(config, model=make_config(**fields, make=make))
    if optimizer is not None and not isinstance(optimizer, Code):
        make = _loaded_code(optimizer)
        rule = "the optimizer must take (config, steps) or (config, steps, model)"
        named = {}
        if takes_model(make):
            named["model"] = config.model
        require_call(make, rule, config.optimizer, config.steps, **named)
        fields = values_without_code(config.optimizer)
        if isinstance(config.optimizer.make, Code):
            fields |= dict(config.optimizer.make.fields)
        make_config = _annotated_class(make, config.optimizer, OptimizerConfig)
        custom_optimizer = make_config(**fields, make=make)
        config = dataclasses.replace(config, optimizer=custom_optimizer)
    if objective is not None and not isinstance(objective, Code):
        made = _loaded_code(objective)
        require_call(made, "the objective must take (model, tokens, rngs)", None, None, None)
        config = dataclasses.replace(config, objective=made)
    return config


def custom_code(config: TrainConfig) -> dict[str, Any]:
    """Return the custom code of a config by its name as an argument; None where it has none."""
    return {
        "model": config.model.make,
        "optimizer": config.optimizer.make,
        "objective": config.objective,
    }


def _loaded_code(code: Any) -> Any:
    """Return a function, class or object, loaded if it is FILE.py:NAME."""
    if isinstance(code, str):
        return load_code(code)
    return code


def config_class(make: Callable[..., Any], config: TrainConfig) -> type[ModelConfig]:
    """Return the config class in the annotation of an argument of `make`, or that of
    `config.model`."""
    require_call(make, "the model must take (config, rngs=)", config.model, rngs=None)
    return _annotated_class(make, config.model, ModelConfig)


def _annotated_class(make: Callable[..., Any], current: Any, base: type) -> type:
    """Return the subclass of `base` in the annotation of an argument of `make`, or that of
    `current`."""
    called = make
    if isinstance(make, type):  # NNX's metaclass hides the class's own signature
        called = make.__init__
    signature = inspect.signature(called, eval_str=True)
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, base):
            if isinstance(current, kind):  # a subclass keeps its additional fields
                return type(current)
            return kind
    return type(current)


def takes_model(make: Callable[..., Any]) -> bool:
    """Return whether an optimizer's maker asks for the model's config, as muP does."""
    return "model" in inspect.signature(make).parameters


def require_call(make: Callable[..., Any], rule: str, *given: Any, **named: Any) -> None:
    """Raise ValueError, whose message begins with `rule`, if code doesn't accept these
    arguments."""
    called = make
    arguments = given
    if isinstance(make, type):
        called = make.__init__
        # its signature accepts anything, but its call accepts nothing
        if called is object.__init__:
            called = _takes_nothing
        arguments = (make, *given)  # any object can stand for `self`
    try:
        inspect.signature(called).bind(*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{rule}: {error}") from None


def _takes_nothing(self: Any) -> None:
    """Stand for a class without a constructor, which takes no arguments."""


def files_of_code(config: TrainConfig) -> list[Path]:
    """Return the files of a config's custom code, each once."""
    files = []
    for make in custom_code(config).values():
        file = None
        if make is not None and not isinstance(make, Code):
            file = file_of(make)
        if file is not None and file not in files:
            files.append(file)
    return files


def code_facts(config: TrainConfig) -> dict[str, str | None]:
    """Return the facts about custom code on which processes must agree: its names and SHA-256."""
    facts: dict[str, str | None] = {}
    for part, make in custom_code(config).items():
        if make is None:
            facts[f"{part}_code"] = None
            continue
        code = Code.of(make)
        file = Path(code.file or "FILE.py").name  # the folder may differ between machines
        facts[f"{part}_code"] = f"{file}:{code.name} of SHA-256 {code.sha256}"
    return facts
