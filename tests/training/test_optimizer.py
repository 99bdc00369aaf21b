"""Schedules, decay, clipping, AdamW, Muon and averaged weights, number by number."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jgpt import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.data.batches import batches
from jgpt.nn.models import abstract_model, weight_dimensions
from jgpt.nn.stacking import unstack_blocks
from jgpt.training.optimizer import clip_by_global_norm, make_optimizer, partition
from jgpt.training.schedule import learning_rate_schedule
from jgpt.training.state import dropout_stream, init_state
from jgpt.training.step import make_train_steps
from tests.models import compiled, nanogpt_rate, randomised, weights_of

CONFIG = OptimizerConfig(learning_rate=0.6, min_learning_rate=0.06, warmup_steps=10)


def optimizer_of(config, steps):
    made = make_optimizer(config, steps, weight_dimensions(MODERN))
    return optax.GradientTransformation(jax.jit(made.init), jax.jit(made.update))


def rates(config, steps, some_steps, peak=None):
    schedule = learning_rate_schedule(config, steps, peak)
    found = compiled(jax.vmap(schedule), jnp.array(some_steps))
    return found.tolist()


WSD = OptimizerConfig(
    learning_rate=0.4, min_learning_rate=0.0, schedule="wsd", warmup_steps=3, decay_fraction=0.4
)
FLAT = dataclasses.replace(CONFIG, schedule="constant", warmup_steps=0)
# 3 of 10 steps up, 3 stay, 4 go down: the tenth is above zero, and the eleventh would be zero
UP_AND_DOWN = dict(enumerate([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0]))
NANOGPT = {step: nanogpt_rate(step) for step in range(130)}
NANOGPT_S_WARMUP = {step: NANOGPT[step] for step in range(5)}
LATE = dataclasses.replace(WSD, warmup_steps=8, min_learning_rate=0.1)


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        (CONFIG, 110, NANOGPT),
        (CONFIG, 110, {0: 0.6 / 11, 10: 0.6, 60: 0.33, 110: 0.06}),
        (CONFIG, 5, NANOGPT_S_WARMUP),  # a warmup longer than the run
        (FLAT, 9, {0: 0.6, 5: 0.6, 99: 0.6}),
        (dataclasses.replace(FLAT, schedule="cosine"), 4, {0: 0.6, 2: 0.33, 4: 0.06}),
        (WSD, 10, {**UP_AND_DOWN, 99: 0.0}),
        (dataclasses.replace(WSD, min_learning_rate=0.2), 10, {6: 0.4, 8: 0.3, 10: 0.2, 99: 0.2}),
        # a decay that the warmup reaches into is shorter, and ends at the minimum
        (LATE, 10, {7: 0.4 * 8 / 9, 8: 0.4, 9: 0.25, 10: 0.1, 11: 0.1}),
        (dataclasses.replace(WSD, decay_fraction=0.0), 10, {3: 0.4, 9: 0.4, 10: 0.0}),
    ],
)
def test_a_schedule_by_hand(config, steps, expected):
    """Also as a part of a longer run, and of the same shape below another peak."""
    some_steps = list(expected)
    expected_rates = np.array(list(expected.values()))
    as_a_part = dataclasses.replace(config, schedule_steps=steps)
    high_peak = 10 * config.learning_rate

    found = rates(config, steps, some_steps)
    found_as_a_part = rates(as_a_part, steps + 15, some_steps)
    higher = rates(config, steps, some_steps, peak=high_peak)

    np.testing.assert_allclose(found, expected_rates, rtol=1e-5)
    assert found_as_a_part == found
    np.testing.assert_allclose(higher, 10 * expected_rates, rtol=1e-5)


MODERN = ModelConfig(
    vocab_size=5,
    embed_dim=4,
    num_heads=2,
    num_layers=2,
    block_size=3,
    use_bias=True,
    qkv_bias=True,
    tie_embeddings=False,
    head_bias=True,
    embedding_shortcut=True,
)
MUON = OptimizerConfig(
    optimizer="muon",
    schedule="constant",
    warmup_steps=0,
    gradient_clip=0.0,
    muon_learning_rate=0.5,
    muon_weight_decay=0.2,
)


@pytest.mark.parametrize(
    ("changes", "tables", "matrices"),
    [
        ({"optimizer": "adamw"}, "adamw", "adamw"),
        ({"optimizer": "muon"}, "adamw", "muon"),
        ({"optimizer": "muon", "embedding_learning_rate": 0.1}, "embedding", "muon"),
        ({"optimizer": "adamw", "embedding_learning_rate": 0.1}, "embedding", "adamw"),
    ],
)
def test_muon_moves_the_matrices_inside_the_blocks_alone(changes, tables, matrices):
    weights = randomised(weights_of(abstract_model(MODERN)))
    config = OptimizerConfig(**changes)

    labels = jax.tree.leaves_with_path(partition(config, weights, weight_dimensions(MODERN)))

    # of two blocks, two tables, the last norm, the head, and the shortcut
    assert len(labels) == 2 * 16 + 2 + 2 + 2 + 1
    for path, label in labels:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name.startswith("blocks.") and name.endswith(".kernel"):
            assert label == matrices, name
        elif name.endswith(".embedding"):
            assert label == tables, name
        else:
            assert label == "adamw", name


def orthogonalised(x):
    """Five steps of the quintic iteration that Jordan et al. 2024 give, in float64."""
    x = np.asarray(x, np.float64)
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def in_a_block(kernel) -> dict[str, Any]:
    """Weights of one matrix, where Muon looks for matrices."""
    query = {"kernel": jnp.asarray(kernel, "float32")}
    return {"blocks": {"0": {"attention": {"query": query}}}}


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)], ids=str)
def test_muon_orthogonalises_a_momentum_that_looks_ahead(shape):
    """Nesterov's, with both means corrected for having begun at zero, as optax has it."""
    random = np.random.default_rng(0)
    kernel, first, second = random.standard_normal((3, *shape))
    mean = 0.95 * 0.05 * first + 0.05 * second
    corrected_mean = mean / (1 - 0.95**3)  # Nesterov's is one step ahead
    corrected_gradient = 0.05 * second / (1 - 0.95**2)
    ahead = 0.95 * corrected_mean + corrected_gradient
    rows, columns = shape
    scale = math.sqrt(max(1, columns / rows))
    optimizer = optimizer_of(MUON, 2)
    weights = in_a_block(kernel)
    state = optimizer.init(weights)

    for gradient, momentum in ((first, first), (second, ahead)):
        updates, state = optimizer.update(in_a_block(gradient), state, weights)
        step = scale * orthogonalised(momentum)
        expected = -0.5 * (step + 0.2 * kernel)
        (found,) = jax.tree.leaves(updates)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)

    # that it looks ahead is seen
    difference = orthogonalised(ahead) - orthogonalised(second)
    assert np.abs(difference).max() > 0.05


def updates_of(config, weights, gradients):
    optimizer = optimizer_of(config, 2)
    state = optimizer.init(weights)
    updates, _ = optimizer.update(gradients, state, weights)
    return updates


def test_what_muon_leaves_is_adamw_s_and_embeddings_may_have_their_own_rate():
    abstract = weights_of(abstract_model(MODERN))
    weights = randomised(abstract, 0)
    gradients = randomised(abstract, 1)
    plain = dataclasses.replace(MUON, optimizer="adamw", learning_rate=0.01)
    apart = dataclasses.replace(MUON, learning_rate=0.01, embedding_learning_rate=0.03)

    adamw_updates = updates_of(plain, weights, gradients)
    muon_updates = updates_of(apart, weights, gradients)

    labels = partition(apart, weights, weight_dimensions(MODERN))
    for label, muon, adamw in zip(
        jax.tree.leaves(labels),
        jax.tree.leaves(muon_updates),
        jax.tree.leaves(adamw_updates),
        strict=True,
    ):
        if label == "muon":
            assert float(jnp.abs(muon - adamw).max()) > 0.1
        elif label == "embedding":
            np.testing.assert_allclose(muon, 3 * adamw, rtol=1e-5)
        else:
            np.testing.assert_allclose(muon, adamw, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"ema_decay": 0.5}, {"optimizer": "adamw", "embedding_learning_rate": 0.1}],
    ids=["muon and averaged", "embeddings apart"],
)
def test_every_optimizer_is_given_clipped_gradients(changes):
    config = dataclasses.replace(MUON, **changes)
    clipping = optimizer_of(dataclasses.replace(config, gradient_clip=1.0), 2)
    plain = optimizer_of(config, 2)
    clip = clip_by_global_norm(1.0)
    weights = in_a_block(np.eye(2, 3))
    weights["token_embedding"] = {"embedding": jnp.asarray(np.eye(3, 2))}
    state = clipping.init(weights)
    plain_state = plain.init(weights)
    clip_state = clip.init(weights)
    found = None
    expected = None

    for size in (1000.0, 0.3):  # only the first is too long
        gradients = jax.tree.map(lambda leaf, size=size: size * leaf - 0.1, weights)
        found, state = clipping.update(gradients, state, weights)
        clipped, _ = clip.update(gradients, clip_state)
        expected, plain_state = plain.update(clipped, plain_state, weights)

    jax.tree.map(np.testing.assert_array_equal, found, expected)


def mine(config, steps):
    return optax.sgd(0.5)


def test_a_custom_optimizer_is_given_clipped_gradients_and_averaged():
    """Its own state is on disk as before: clipping adds none."""
    weights: Any = {"v": jnp.array([3.0, 4.0])}
    gradients: Any = {"v": jnp.array([6.0, 8.0])}
    config = OptimizerConfig(make=mine, gradient_clip=5.0)
    clipping: Any = make_optimizer(config, 9)
    plain: Any = make_optimizer(dataclasses.replace(config, gradient_clip=0.0), 9)
    averaging: Any = make_optimizer(dataclasses.replace(config, ema_decay=0.5), 9)

    state = clipping.init(weights)
    updates, _ = clipping.update(gradients, state, weights)
    unclipped, _ = plain.update(gradients, state, weights)
    custom_state = mine(config, 9).init(weights)
    assert jax.tree.structure(state) == jax.tree.structure(custom_state)
    # a gradient whose norm is 10 is halved, and the rate is a half
    np.testing.assert_allclose(updates["v"], [-1.5, -2.0], rtol=1e-5)
    np.testing.assert_array_equal(unclipped["v"], [-3.0, -4.0])

    state = averaging.init(weights)
    average: Any = weights
    for _ in range(2):
        updates, state = averaging.update(gradients, state, average)
        average = optax.apply_updates(average, updates)
    # trained at (1.5, 2) and (0, 0); the second has 2/3 of the weight
    np.testing.assert_allclose(state.trained["v"], [0.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(average["v"], [0.5, 2 / 3], rtol=1e-4)


def decaying_matrices(config, steps):
    def mask(weights):
        return jax.tree.map(lambda leaf: leaf.ndim >= 2, weights)

    return optax.adamw(1e-2, weight_decay=1.0, mask=mask)


def test_a_custom_optimizer_sees_the_same_weights_with_and_without_a_scan():
    """Stacked, the scales of norms would be matrices, and would decay."""
    model = ModelConfig(vocab_size=11, block_size=6, num_layers=2, num_heads=2, embed_dim=8)
    config = TrainConfig(model, OptimizerConfig(make=decaying_matrices), batch_size=4)
    windows = batches(np.arange(211, dtype=np.int32) ** 2 % 11, 0, 0, 3, 4, 6)

    def trained(**changes):
        changed = dataclasses.replace(config, model=dataclasses.replace(model, **changes))
        steps = make_train_steps(changed)
        state, _ = steps(init_state(changed), windows, dropout_stream(0), 3, 0)
        return state["model"]

    looped = trained()
    scanned = unstack_blocks(trained(scan_layers=True))

    assert jax.tree.structure(scanned) == jax.tree.structure(looped)
    for found, expected in zip(jax.tree.leaves(scanned), jax.tree.leaves(looped), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
