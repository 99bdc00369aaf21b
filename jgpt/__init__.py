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


_SUCCESSORS = {
    "LEGEND": "jgpt.words.LEGEND",
    "Platform": "jgpt.hardware.Platform",
    "Progress": "jgpt.fitting.progress.Progress",
    "Proof": "jgpt.shapes.proofs.Proof",
    "Run": "jgpt.fitting.fit.Run",
    "ShapeTrace": "jgpt.shapes.trace.ShapeTrace",
    "TypedCall": "jgpt.shapes.calls.TypedCall",
    "create_model": "jgpt.nn.models.create_model",
    "current_platform": "jgpt.hardware.current_platform",
    "for_platform": "jgpt.nn.precision.for_platform",
    "load_gpt2": "jgpt.load_hf",
    "next_token_loss": "jgpt.training.objective.next_token_loss",
    "record": "jgpt.shapes.contract.record",
    "save_gpt2": "jgpt.save_hf",
    "stream_text": "jgpt.generation.text.stream_text",
    "with_int8_weights": "jgpt.nn.int8.with_int8_weights",
}
"""Names that were here, and where what they named is now."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # takes as long as all else here

        return version("jgpt")
    if name in _SUCCESSORS:
        raise AttributeError(f"jgpt has no attribute {name!r}: it is {_SUCCESSORS[name]} now")
    if name not in _MODULES:
        from jgpt.words import did_you_mean

        raise AttributeError(f"jgpt has no attribute {name!r}{did_you_mean(name, __all__)}")
    # only now: `jgpt --help` doesn't import JAX
    return getattr(import_module(f"jgpt.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
