"""Custom models, optimizers, objectives and batches: loading them from a file, and
comparing them with those of a run."""

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
from jgpt.fields import Code, Make, imported_beside, values_without_code
from jgpt.words import did_you_mean


class CustomCodeError(ValueError):
    """An error in a user's file, with its file, line and message."""


_loaded: list[Path] = []  # the files that `load_code` has run
_beside: dict[Path, str] = {}  # the files in their folders that they imported, with their SHA-256


def load_code(named: str) -> Any:
    """Run the file in FILE.py:NAME and return its function or class NAME.

    The file may import others from its folder. Raises CustomCodeError if it raises, ValueError if
    there is no such name, and OSError if it can't be read.
    """
    file, _, name = named.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"{named!r} must be a file and a name in it, as in my_gpt.py:GPT")
    path = Path(file).resolve()
    beside = imported_beside(path)
    # A changed file is a different module, and so is one that imports a changed file, or one with
    # the same name in another folder.
    contents = [str(path), hashlib.sha256(path.read_bytes()).hexdigest(), *sorted(beside.values())]
    digest = hashlib.sha256(" ".join(contents).encode()).hexdigest()
    unique = f"{path.stem}_{digest[:12]}"
    if unique not in sys.modules:
        _forget_changed(path.parent, beside)
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
    _loaded.append(path)
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
        _beside.update(imported_beside(path))


def _forget_changed(folder: Path, beside: dict[Path, str]) -> None:
    """Forget the modules of a folder if one of them has changed, so that they are imported anew.

    All of them, since an unchanged one may have taken something from the changed one.
    """
    if all(_beside.get(file, digest) == digest for file, digest in beside.items()):
        return
    for name, module in list(sys.modules.items()):
        file = _file_of(module)
        if file in _beside and file.is_relative_to(folder):
            del sys.modules[name]


def _file_of(module: Any) -> Path | None:
    """Return the file of a module, if it has one."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    return Path(file).resolve()


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
    files = set(_loaded)
    for path in _loaded:
        files.update(imported_beside(path))
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) in files:
        return Path(error.filename), error.lineno or 1
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if path not in files:
            # The call has returned, so only the checked function has a place in the file.
            if frame.f_globals.get("__name__") != "jgpt.shapes.contract":
                continue
            code = getattr(frame.f_locals.get("function"), "__code__", None)
            if code is None or Path(code.co_filename) not in files:
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


def with_code(
    config: TrainConfig,
    model: Make | str = None,
    optimizer: Make | str = None,
    objective: Make | str = None,
    *,
    batches: Make | str = None,
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
        make = _loaded_code(objective)
        require_call(make, "the objective is made by a function of (config)", config)
        config = dataclasses.replace(config, objective=make)
    if batches is not None and not isinstance(batches, Code):
        make = _loaded_code(batches)
        _require_batches(make)
        config = dataclasses.replace(config, batches=make)
    return config


def _require_batches(make: Callable[..., Any]) -> None:
    """Raise ValueError for a function that makes no batches, by its parameters."""
    rule = "batches is a function of (dataset, seed, step), which may take config, too"
    options = {}
    if "config" in inspect.signature(make).parameters:
        options["config"] = None
    require_call(make, rule, None, 0, 0, **options)


def custom_code(config: TrainConfig) -> dict[str, Any]:
    """Return the custom code of a config by its name as an argument; None where it has none."""
    return {
        "model": config.model.make,
        "optimizer": config.optimizer.make,
        "objective": config.objective,
        "batches": config.batches,
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


def changed_code(saved: TrainConfig, given: TrainConfig) -> list[str]:
    """Return a line for each file of custom code that changed since the run began."""
    lines = []
    saved_code = custom_code(saved)
    for part, make in custom_code(given).items():
        if make is None:
            continue
        new = Code.of(make)
        changed = f"{part} {new.named} has changed since the run began"
        saved_make = saved_code[part]
        if saved_make is None:
            lines.append(f"the {changed}")
            continue
        old = Code.of(saved_make)
        if (old.name, old.sha256) != (new.name, new.sha256):
            lines.append(f"the {changed}")
        # not recorded: a file that imported nothing has changed if it now imports some
        if not old.modules:
            continue
        old_modules = dict(old.modules)
        new_modules = dict(new.modules)
        for file in sorted(old_modules | new_modules):
            if old_modules.get(file) != new_modules.get(file):
                lines.append(f"{file} of the {changed}")
    return lines


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
        for module, sha256 in code.modules:
            facts[f"{module} of the {part}"] = f"SHA-256 {sha256}"
    return facts
