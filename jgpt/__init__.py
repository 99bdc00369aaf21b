"""A GPT in JAX and Flax NNX with checked array shapes."""

import ast
from importlib import import_module
from typing import Any


def _modules_of_names() -> dict[str, str | None]:
    """Return the module of each public name, as `__init__.pyi` imports it."""
    with open(f"{__file__}i", encoding="utf-8") as stub:
        statements = ast.parse(stub.read()).body
    modules = {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                modules[alias.name] = statement.module
    return modules


_MODULES = _modules_of_names()
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # takes as long as all else here

        return version("jgpt")
    if name not in _MODULES:
        from jgpt.words import did_you_mean

        raise AttributeError(f"jgpt has no attribute {name!r}{did_you_mean(name, __all__)}")
    # only now: `jgpt --help` doesn't import JAX
    return getattr(import_module(f"jgpt.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
