"""Whether a model is causal, and what a GPT has that its config doesn't describe."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt.nn.models import LanguageModel, Weights, named_parameters
from jgpt.nn.transformer import GPT
from jgpt.shapes.contract import typed

TIME = 8
"""The number of positions in the check."""
TOLERANCE = 0.03
"""The largest mean difference of logits, relative to their spread: bfloat16 stays below 0.01."""
NOISE = 0.05
"""The noise added to parameters, since parameters that begin as zeros would hide every
difference."""


def is_causal(model: LanguageModel, batch: int = 1) -> bool:
    """Return whether the logits of a model's call are the same whatever tokens follow, or none."""
    if isinstance(model, GPT) and not changed_parts(model):
        return True  # by its construction, which the tests of jgpt itself check
    # Whatever the model was initialised with, noise gives each weight a part in the logits: a
    # branch that begins as zero would hide what it reads.
    graph, weights, others = nnx.split(model, _is_float, ...)
    time = min(model.block_size, TIME)
    numbers = np.random.default_rng(0).integers(model.vocab_size, size=(batch, time))
    tokens = jnp.asarray(numbers, jnp.int32)
    difference = _run(_difference_by_padding, graph, weights, others, tokens)
    return not difference > TOLERANCE  # that of a model with NaN is NaN


def _is_float(path: Any, variable: Any) -> bool:
    """Return whether a variable is a parameter that can have noise; one in int8 can't."""
    return isinstance(variable, nnx.Param) and jnp.issubdtype(variable.dtype, jnp.floating)


def _run(function: Callable[..., Any], graph: nnx.GraphDef, *arrays: Any) -> Any:
    """Compile and call with few optimisations, since compiling takes longer than running."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    compiled = jax.jit(function, static_argnums=0, compiler_options=options)  # 0: the graph
    return compiled(graph, *arrays)


def changed_parts(model: GPT) -> list[str]:
    """Return the parts of a GPT that differ from those of its config, such as
    `blocks.0.feed_forward`.

    A subclass that only constructs its parts differently counts as unchanged. A subclass that
    overrides a method, and a part with other sizes or settings, count as changed.
    """
    # The same sizes without custom code; every difference from this comes from the custom code.
    config = dataclasses.replace(model.config, make=None)
    plain = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    expected = dict(nnx.iter_modules(plain))
    found = dict(nnx.iter_modules(model))
    changed = []
    for path, part in found.items():
        name = _name_of(path)
        if path not in expected:
            changed.append(f"{name} is added")
            continue
        plain_part = expected[path]
        overridden = _overridden(type(part), type(plain_part))
        if overridden is not None:
            changed.append(f"{name or 'the model'} overrides {overridden}")
        elif _settings(part) != _settings(plain_part):
            changed.append(f"{name or 'the model'} has other settings")
    for path in expected:
        if path not in found:
            changed.append(f"{_name_of(path)} is left out")
    if changed:
        return changed
    # Changes that no part explains: a parameter beside the parts, or one that was replaced.
    shapes = _shapes(model)
    expected_shapes = _shapes(plain)
    for name in sorted(shapes | expected_shapes):
        shape = shapes.get(name)
        expected_shape = expected_shapes.get(name)
        if shape != expected_shape:
            return [f"{name} is {shape} instead of {expected_shape}"]
    return []


def _name_of(path: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in path)


def _shapes(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named_parameters(model).items()}


def _overridden(kind: type, expected: type) -> str | None:
    """Return the name of a method that a class computes differently than the expected class, or
    None."""
    if kind is expected:
        return None
    if not issubclass(kind, expected):
        return f"all: it is a {kind.__name__}"
    subclasses = kind.__mro__[: kind.__mro__.index(expected)]  # and classes mixed in before it
    for subclass in subclasses:
        for name, value in vars(subclass).items():
            # `__init__` may construct parts differently; the parts themselves are compared.
            if name.startswith("__") and name != "__call__":
                continue
            # `empty_cache = None` means that there is no cache, and changes no computation.
            if value is not None and callable(getattr(expected, name, None)):
                return f"{name} in {subclass.__name__}"
    return None


def _settings(module: nnx.Module) -> dict[str, Any]:
    """Return the plain values of a module, except those that `train()` and `eval()` switch."""
    settings = {}
    for name, value in vars(module).items():
        if isinstance(value, (str, int, float, bool, type(None))):
            settings[name] = value
    settings.pop("deterministic", None)
    return settings


@typed
def _noisy(weights: Weights) -> Weights:
    """Add noise to weights that is the same on every machine.

    Its values are spread evenly from -NOISE to NOISE (Knuth, The Art of Computer Programming 3,
    section 6.4: Fibonacci hashing). `jax.random` is not used, because a program that draws takes
    several times as long to compile as the model.
    """

    def add_noise(leaf):
        # 2**32 / golden ratio; the product wraps around.
        numbers = jax.lax.iota(jnp.uint32, leaf.size) * jnp.uint32(0x9E3779B9)
        fractions = numbers.astype(jnp.float32) / 2.0**32
        noise = NOISE * (2 * fractions - 1)
        return leaf + noise.reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(add_noise, weights)


@typed
def _difference_by_padding(
    graph: nnx.GraphDef, weights: Weights, others: Any, tokens: Int[Array, "batch time"]
) -> Float[Array, ""]:
    """Return how much logits change when tokens are put behind them."""
    model: Any = nnx.merge(graph, _noisy(weights), others)
    known = (tokens.shape[1] + 1) // 2
    # Without later tokens, rather than with others: positions that are counted from the end change
    # with the number of tokens alone.
    alone = model(tokens[:, :known])  # batch known vocab
    return _difference(model(tokens)[:, :known], alone)


@typed
def _difference(
    found: Float[Array, "batch time vocab"], expected: Float[Array, "batch time vocab"]
) -> Float[Array, ""]:
    # The smallest normal number, since equal logits have no spread to divide by.
    spread = expected.std() + jnp.finfo(jnp.float32).tiny
    difference = jnp.abs(found - expected).mean()
    return (difference / spread).astype(jnp.float32)
