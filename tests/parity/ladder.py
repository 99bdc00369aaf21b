"""The ladder: what jgpt and PyTorch compute from the same weights, rung by rung.

`ours` and `theirs` climb it, each in its own framework: logits, loss, the gradient of every leaf,
two AdamW steps from given gradients of which the first is clipped, ten whole steps of training,
and the weights after those.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from torch.nn import functional as F

from jgpt.config import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.nn.loss import cross_entropy, token_losses
from jgpt.nn.models import abstract_model
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import State, dropout_stream
from jgpt.training.step import make_train_steps
from tests import models
from tests.models import GROUPS, SIZES, nanogpt_rate, randomised, to_torch, weights_of
from tests.parity import torch_gpt

Arrays = dict[str, np.ndarray]
Rungs = dict[str, Arrays]
Decays = Callable[[str, torch.Tensor], bool]

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
STEPS, BATCH, TIME = 10, 2, 5

WINDOW = {"attention_window": 3}  # the tokens are one window and a part of another
NGRAMS = {"ngram_sizes": (2, 4), "ngram_rows": 19}
LECTURE = models.FAMILIES["lecture"]
MODERN = {**models.FAMILIES["modern"], **WINDOW, **NGRAMS, "logit_softcap": 2.0}
ALONE: dict[str, dict[str, Any]] = {
    "nanogpt, rotary": {"num_heads": 6, "embed_dim": 24, "positions": "rotary"},
    "nanogpt, RMS norms": {"norm": "rms"},
    "nanogpt, no norm scales": {"norm_scale": False},
    "nanogpt, normed queries and keys": {"qk_norm": True},
    "nanogpt, another scale": {"attention_scale": 0.7},
    "nanogpt, grouped heads": GROUPS,
    "nanogpt, window": WINDOW,
    "nanogpt, n-grams": NGRAMS,
    "nanogpt, shortcut": {"embedding_shortcut": True},
    "nanogpt, softcap": {"logit_softcap": 2.0},
    "nanogpt, squared ReLU": {"activation": "relu_squared"},
    "nanogpt, SiLU": {"activation": "silu"},
    "nanogpt, gated": {"gated": True},
    "nanogpt, another rotary base": {**GROUPS, "positions": "rotary", "rotary_base": 500.0},
    "nanogpt, another head size": {"head_dim": 5},
    "nanogpt, scaled queries and keys": {"qk_norm": True, "qk_norm_scale": True},
}
"""Each of the modern families' fields that is no matter of initial values, by itself."""
FAMILIES: dict[str, dict[str, Any]] = {
    **models.FAMILIES,
    "lecture, tied": {**LECTURE, "tie_embeddings": True, "head_bias": False},
    "nanogpt, biases": {"activation": "gelu", "qkv_bias": True, "use_bias": True},
    "nanogpt, untied": {"activation": "gelu", "tie_embeddings": False},
    "modern": MODERN,
    "modern, tied": {**MODERN, "tie_embeddings": True},
    **ALONE,
}
OPTIMIZER = OptimizerConfig(
    learning_rate=0.001,
    min_learning_rate=0.0001,
    warmup_steps=3,
    weight_decay=0.3,
    gradient_clip=0.5,
)


# Adam's first step hardly depends on its gradients' size; the second shows what clipping did
GIVEN_GRADIENTS = ((2, 1.0), (3, 1e-4))


@functools.cache
def config_of(family: str, dtype: Any) -> TrainConfig:
    """The run of a family in a precision."""
    model = ModelConfig(**{**SIZES, **FAMILIES[family]}, dtype=dtype, param_dtype=dtype)
    return TrainConfig(model=model, optimizer=OPTIMIZER, steps=STEPS, batch_size=BATCH)


def windows() -> np.ndarray:
    """Ten steps of tokens and the targets after them."""
    shape = (STEPS, BATCH, TIME + 1)
    return np.random.default_rng(0).integers(SIZES["vocab_size"], size=shape, dtype=np.int32)


@functools.cache
def ours(family: str, dtype: str) -> Rungs:
    """Every rung, by jgpt."""
    with jax.enable_x64(dtype == "float64"):
        config = config_of(family, dtype)
        model = abstract_model(config.model)
        weights = randomised(weights_of(model))
        graph = nnx.graphdef(model)
        steps = jnp.asarray(windows())
        tokens = steps[0, :, :-1]
        targets = steps[0, :, 1:]

        def loss_of(weights):
            logits = nnx.merge(graph, weights)(tokens)
            return cross_entropy(logits, targets), logits

        value_and_grad = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        (loss, logits), gradients = value_and_grad(weights)
        optimizer = make_optimizer(OPTIMIZER, STEPS)
        state = optimizer.init(weights)
        updated = weights
        update = jax.jit(optimizer.update)
        for seed, size in GIVEN_GRADIENTS:
            given = jax.tree.map(lambda leaf, size=size: size * leaf, randomised(weights, seed))
            updates, state = update(given, state, updated)
            updated = optax.apply_updates(updated, updates)
        end, trace = _ten_steps(config, weights)
        return {
            "logits": {"logits": np.asarray(logits)},
            "loss": {
                "mean": np.asarray(loss),
                "each target": np.asarray(token_losses(logits, targets)),
            },
            "gradients": to_torch(gradients),
            "AdamW": to_torch(updated),
            "ten steps": {
                name: np.asarray(getattr(trace, name))
                for name in ("loss", "gradient_norm", "learning_rate")
            },
            "weights after ten": to_torch(end["model"]),
        }


@functools.cache
def ours_averaged(family: str, dtype: str, decay: float) -> Arrays:
    """The averaged weights after ten steps, by jgpt."""
    with jax.enable_x64(dtype == "float64"):
        averaging = dataclasses.replace(OPTIMIZER, ema_decay=decay)
        config = dataclasses.replace(config_of(family, dtype), optimizer=averaging)
        weights = randomised(weights_of(abstract_model(config.model)))
        return to_torch(_ten_steps(config, weights)[0]["model"])


def _ten_steps(config: TrainConfig, weights: Any) -> tuple[State, Any]:
    """Ten steps from weights, which are used up."""
    optimizer = make_optimizer(config.optimizer, STEPS)
    start = {"model": weights, "optimizer": optimizer.init(weights)}
    return make_train_steps(config)(start, jnp.asarray(windows()), dropout_stream(0), STEPS, 0)


def build(family: str, dtype: str) -> torch.nn.Module:
    """The port with the same weights; loading them is strict."""
    config = config_of(family, dtype).model
    bigram = config.architecture == "bigram"
    port = torch_gpt.BigramLM(config.vocab_size) if bigram else torch_gpt.GPT(config)
    port = port.to(getattr(torch, dtype))
    port.load_state_dict(_random_tensors(family, dtype, seed=1))
    return port


def _random_tensors(family: str, dtype: str, seed: int) -> dict[str, torch.Tensor]:
    with jax.enable_x64(dtype == "float64"):
        abstract = weights_of(abstract_model(config_of(family, dtype).model))
        arrays = to_torch(randomised(abstract, seed))
    return {name: torch.tensor(array) for name, array in arrays.items()}


learning_rate = functools.partial(
    nanogpt_rate,
    warmup=OPTIMIZER.warmup_steps,
    steps=STEPS,
    peak=OPTIMIZER.learning_rate,
    least=OPTIMIZER.min_learning_rate,
)


def decays(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim >= 2


def theirs(
    family: str,
    dtype: str,
    sabotage: Callable[[Any], None] = lambda port: None,
    decays: Decays = decays,
    clip: float = OPTIMIZER.gradient_clip,
    after_step: Callable[[torch.nn.Module], None] = lambda port: None,
) -> Rungs:
    """Every rung, by PyTorch; `sabotage` breaks the port first, for the negative controls."""
    port = build(family, dtype)
    sabotage(port)
    steps = torch.tensor(windows(), dtype=torch.int64)
    logits = port(steps[0, :, :-1])
    loss = _loss(logits, steps[0])
    loss.backward()
    gradients = {name: _numpy(leaf.grad) for name, leaf in port.named_parameters()}

    updated = copy.deepcopy(port)
    optimizer = _adamw(updated, decays)
    for step, (seed, size) in enumerate(GIVEN_GRADIENTS):
        given = _random_tensors(family, dtype, seed)
        for name, leaf in updated.named_parameters():
            leaf.grad = size * given[name]
        _step(updated, optimizer, step, clip)

    trace = {"loss": [], "gradient_norm": [], "learning_rate": []}
    optimizer = _adamw(port, decays)
    for step, window in enumerate(steps):
        optimizer.zero_grad()
        step_loss = _loss(port(window[:, :-1]), window)
        step_loss.backward()
        norm = _step(port, optimizer, step, clip)
        after_step(port)
        for name, value in zip(trace, (step_loss.item(), norm, learning_rate(step)), strict=True):
            trace[name].append(value)
    return {
        "logits": {"logits": _numpy(logits)},
        "loss": {
            "mean": _numpy(loss),
            "each target": _numpy(F.cross_entropy(logits.mT, steps[0, :, 1:], reduction="none")),
        },
        "gradients": gradients,
        "AdamW": {name: _numpy(leaf) for name, leaf in updated.named_parameters()},
        "ten steps": {name: np.array(values, dtype) for name, values in trace.items()},
        "weights after ten": {name: _numpy(leaf) for name, leaf in port.named_parameters()},
    }


def _loss(logits: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def _adamw(port: torch.nn.Module, decays: Decays) -> torch.optim.AdamW:
    decaying = []
    others = []
    for name, leaf in port.named_parameters():
        group = decaying if decays(name, leaf) else others
        group.append(leaf)
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), weight_decay=OPTIMIZER.weight_decay
    )


def _step(port: torch.nn.Module, optimizer: torch.optim.AdamW, step: int, clip: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    norm = torch.nn.utils.clip_grad_norm_(port.parameters(), clip)
    optimizer.step()
    return norm.item()


def _numpy(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().numpy().copy()


def errors(ours: Arrays, theirs: Arrays) -> tuple[float, float]:
    """The largest absolute difference, and the largest in units of its array's largest entry.

    Sums that cancel leave rounding of the size of their terms, so an entry near zero is measured
    by its array and not by itself. Arrays of other names are an error at once.
    """
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    absolute = relative = 0.0
    for name, wanted in theirs.items():
        difference = float(np.abs(ours[name].astype(np.float64) - wanted).max())
        # softmax forgets what all keys share, so the gradient of a key's bias is zero but for
        # rounding: it is measured by the query's
        scale = float(np.abs(theirs[name.replace("key.bias", "query.bias")]).max())
        absolute = max(absolute, difference)
        relative = max(relative, difference / scale)
    return absolute, relative
