"""A GPT in JAX and Flax NNX with checked array shapes."""

import lazy_loader

# lazy imports: `jgpt --help` doesn't import jax
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
