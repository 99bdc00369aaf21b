"""An optimizer that asks for the loss at other weights, in micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgpt
from jgpt.nn.stacking import model_merger
from jgpt.training.state import dropout_stream


def recording(config, steps):
    """Plain descent; its state has the loss of the batch at twice the weights."""

    def init(params):
        return jnp.zeros(())

    def update(updates, state, params=None, **extra):
        others = jax.tree.map(lambda leaf: 2 * leaf, params)
        return jax.tree.map(lambda leaf: -0.1 * leaf, updates), extra["value_fn"](others)

    return optax.GradientTransformationExtraArgs(init, update)


def test_the_loss_at_other_weights_is_that_of_the_whole_batch():
    config = jgpt.TrainConfig(
        model=jgpt.ModelConfig(vocab_size=7, block_size=5, num_layers=1, num_heads=1, embed_dim=4),
        optimizer=jgpt.OptimizerConfig(make=recording),
        batch_size=6,
        micro_batches=3,
    )
    windows = jax.random.randint(jax.random.key(2), (1, 6, 6), 0, 7)
    start = jgpt.init_state(config)
    others = jax.tree.map(lambda leaf: 2 * leaf, start["model"])
    model = model_merger(config.model)(others)
    expected = jgpt.cross_entropy(model(windows[0, :, :-1]), windows[0, :, 1:])

    state, metrics = jgpt.make_train_steps(config)(start, windows, dropout_stream(0), 1, 0)

    assert abs(float(metrics.loss[0]) - float(expected)) > 1e-4
    np.testing.assert_allclose(state["optimizer"], expected, atol=1e-6)
