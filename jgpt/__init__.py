"""A GPT in JAX and Flax NNX whose every shape is written down and checked."""

import lazy_loader

# names are imported when they are first used: `jgpt --help` needs no jax
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
