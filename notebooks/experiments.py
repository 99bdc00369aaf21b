"""The experiment of lessons 11 to 13: a small model, 200 steps, three seeds.

A seed stands for initial weights and batches. All models see the same batches.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

import jgpt
from jgpt.data.batches import batches, evaluation_windows, resident
from jgpt.training.optimizer import make_optimizer

STEPS = 200
BATCH_SIZE = 8
BLOCK_SIZE = 48
SEEDS = 3

dataset = jgpt.load_dataset(
    jgpt.DataConfig(data=("shakespeare",)), block_size=BLOCK_SIZE
)
train = resident(dataset.train)
windows = [
    batches(train, seed, 0, STEPS, BATCH_SIZE, BLOCK_SIZE)
    for seed in range(SEEDS)
]
held_out = jnp.asarray(
    evaluation_windows(dataset.validation, BLOCK_SIZE, 128)[0][0]
)
"""128 windows of the validation text."""


def trained(
    model: jgpt.ModelConfig,
    settings: jgpt.OptimizerConfig,
    seeds: int = SEEDS,
    prepare: Callable[[jgpt.GPT], None] | None = None,
) -> list[jgpt.GPT]:
    """A model after 200 steps, for each seed.

    `prepare` may change the initial weights.
    """
    optimizer = make_optimizer(settings, steps=STEPS)
    graph = nnx.graphdef(jgpt.GPT(model, rngs=nnx.Rngs(0)))

    def loss_of(weights, window):
        logits = nnx.merge(graph, weights)(window[:, :-1])
        return jgpt.cross_entropy(logits, window[:, 1:])

    def step(carried, window):
        weights, state = carried
        gradient = jax.grad(loss_of)(weights, window)
        updates, state = optimizer.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    @jax.jit
    def run(weights, windows):
        start = (weights, optimizer.init(weights))
        (weights, _), _ = jax.lax.scan(step, start, windows)
        return weights

    models = []
    for seed in range(seeds):
        gpt = jgpt.GPT(model, rngs=nnx.Rngs(seed))
        if prepare is not None:
            prepare(gpt)
        weights = nnx.to_pure_dict(nnx.state(gpt))
        models.append(nnx.merge(graph, run(weights, windows[seed])))
    return models


@jax.jit
def loss_on_held_out(model: jgpt.GPT) -> Float[Array, ""]:
    """The loss of a model on text that it hasn't seen."""
    return jgpt.cross_entropy(model(held_out[:, :-1]), held_out[:, 1:])


def measure(
    model: jgpt.ModelConfig,
    settings: jgpt.OptimizerConfig,
    seeds: int = SEEDS,
    prepare: Callable[[jgpt.GPT], None] | None = None,
) -> np.ndarray:
    """The loss on held-out text after 200 steps, for each seed."""
    models = trained(model, settings, seeds, prepare)
    return np.array([float(loss_on_held_out(gpt)) for gpt in models])
