"""A GPT in JAX and Flax NNX with checked array shapes."""

from typing import Any

import lazy_loader

# lazy imports: `jgpt --help` doesn't import jax
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # takes as long as all else here

        return version("jgpt")
    if name not in __all__:
        from jgpt.words import did_you_mean

        raise AttributeError(f"jgpt has no attribute {name!r}{did_you_mean(name, __all__)}")
    return _load(name)
