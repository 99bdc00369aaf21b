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

from jgpt import ModelConfig, OptimizerConfig
from jgpt.nn.models import abstract_model, weight_dimensions
from jgpt.parallel.rules import Dimensions
from jgpt.training.optimizer import clip_by_global_norm, make_optimizer, partition, trained_weights
from jgpt.training.schedule import learning_rate_schedule
from tests.models import nanogpt_rate, randomised, weights_of

CONFIG = OptimizerConfig(learning_rate=0.6, min_learning_rate=0.06, warmup_steps=10)


def optimizer_of(config, steps):
    made = make_optimizer(config, steps, weight_dimensions(MODERN))
    return optax.GradientTransformation(jax.jit(made.init), jax.jit(made.update))


def rates(config, steps, at, peak=None):
    """The learning rates of a run of `steps` steps at some of them."""
    schedule = learning_rate_schedule(config, steps, peak)
    return jax.jit(jax.vmap(schedule))(jnp.array(at)).tolist()


WSD = OptimizerConfig(
    learning_rate=0.4,
    min_learning_rate=0.0,
    schedule="wsd",
    warmup_steps=3,
    decay_fraction=0.4,
)
FLAT = dataclasses.replace(CONFIG, schedule="constant", warmup_steps=0)
# 3 of 10 steps up, 3 stay, 4 go down: the tenth is above zero, and the eleventh would be zero
UP_AND_DOWN = [0.1, 0.2, 0.3, *[0.4] * 4, 0.3, 0.2, 0.1, 0.0, 0.0]
LATE = dataclasses.replace(WSD, warmup_steps=8, min_learning_rate=0.1)


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        (CONFIG, 110, {step: nanogpt_rate(step) for step in range(130)}),
        (CONFIG, 110, {0: 0.6 / 11, 10: 0.6, 60: 0.33, 110: 0.06}),
        (
            CONFIG,
            5,
            {step: nanogpt_rate(step) for step in range(5)},
        ),  # a warmup longer than the run
        (FLAT, 9, {0: 0.6, 5: 0.6, 99: 0.6}),
        (dataclasses.replace(FLAT, schedule="cosine"), 4, {0: 0.6, 2: 0.33, 4: 0.06}),
        (WSD, 10, {**dict(enumerate(UP_AND_DOWN)), 99: 0.0}),
        (dataclasses.replace(WSD, min_learning_rate=0.2), 10, {6: 0.4, 8: 0.3, 10: 0.2, 99: 0.2}),
        # a decay that the warmup reaches into is shorter, and ends at the minimum
        (LATE, 10, {7: 0.4 * 8 / 9, 8: 0.4, 9: 0.25, 10: 0.1, 11: 0.1}),
        (dataclasses.replace(WSD, decay_fraction=0.0), 10, {3: 0.4, 9: 0.4, 10: 0.0}),
    ],
)
def test_a_schedule_by_hand(config, steps, expected):
    """Also as a part of a longer run, and of the same shape below another peak."""
    at = [*expected]
    wanted = np.array([*expected.values()])
    found = rates(config, steps, at)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    part = dataclasses.replace(config, schedule_steps=steps)
    assert rates(part, steps + 15, at) == found
    higher = rates(config, steps, at, peak=10 * config.learning_rate)
    np.testing.assert_allclose(higher, 10 * wanted, rtol=1e-5)


MODERN = ModelConfig(
    vocab_size=5, embed_dim=4, num_heads=2, num_layers=2, block_size=3, use_bias=True,
    qkv_bias=True, tie_embeddings=False, head_bias=True, embedding_shortcut=True,
)  # fmt: skip
MUON = OptimizerConfig(
    optimizer="muon",
    schedule="constant",
    warmup_steps=0,
    gradient_clip=0.0,
    muon_learning_rate=0.5,
    muon_momentum=0.9,
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
    labels = jax.tree_util.tree_leaves_with_path(
        partition(config, weights, weight_dimensions(MODERN))
    )
    assert len(labels) == 2 * 16 + 2 + 2 + 2 + 1
    for path, label in labels:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        of_table = tables if name.endswith(".embedding") else "adamw"
        is_matrix = name.startswith("blocks.") and name.endswith(".kernel")
        assert label == (matrices if is_matrix else of_table), name


def orthogonalised(x):
    """Five steps of the quintic iteration that Jordan et al. 2024 give, in float64."""
    x = np.asarray(x, np.float64)
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def in_a_block(kernel):
    return {"blocks": {"0": {"attention": {"query": {"kernel": jnp.asarray(kernel, "float32")}}}}}


def kernel_of(tree):
    (kernel,) = jax.tree.leaves(tree)
    return np.asarray(kernel)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)], ids=str)
def test_muon_orthogonalises_a_momentum_that_looks_ahead(shape):
    """Nesterov's, with both means corrected for having begun at zero, as optax has it."""
    kernel, first, second = np.random.default_rng(0).standard_normal((3, *shape))
    mean = 0.9 * 0.1 * first + 0.1 * second
    ahead = 0.9 * mean / (1 - 0.9**3) + 0.1 * second / (1 - 0.9**2)
    steps = [math.sqrt(max(1, shape[1] / shape[0])) * orthogonalised(x) for x in (first, ahead)]
    optimizer = optimizer_of(MUON, 2)
    weights = in_a_block(kernel)
    state = optimizer.init(weights)
    for gradient, step in zip((first, second), steps, strict=True):
        updates, state = optimizer.update(in_a_block(gradient), state, weights)
        expected = -0.5 * (step + 0.2 * kernel)
        np.testing.assert_allclose(kernel_of(updates), expected, rtol=1e-3, atol=1e-4)

    assert np.abs(orthogonalised(ahead) - orthogonalised(second)).max() > 0.05  # it is seen


def updates_of(config, weights, gradients):
    optimizer = optimizer_of(config, 2)
    return optimizer.update(gradients, optimizer.init(weights), weights)[0]


def test_what_muon_leaves_is_adamw_s_and_embeddings_may_have_their_own_rate():
    abstract = weights_of(abstract_model(MODERN))
    weights = randomised(abstract, 0)
    gradients = randomised(abstract, 1)
    plain = dataclasses.replace(MUON, optimizer="adamw", learning_rate=0.01)
    apart = dataclasses.replace(MUON, learning_rate=0.01, embedding_learning_rate=0.03)
    adamw = updates_of(plain, weights, gradients)
    muon = updates_of(apart, weights, gradients)
    labels = partition(apart, weights, weight_dimensions(MODERN))
    for label, mine, its in zip(*map(jax.tree.leaves, (labels, muon, adamw)), strict=True):
        if label == "muon":
            assert float(jnp.abs(mine - its).max()) > 0.1
        else:
            times = 3 if label == "embedding" else 1
            np.testing.assert_allclose(mine, times * its, rtol=1e-5)


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
    kernel = np.eye(2, 3)
    table = np.eye(3, 2)
    weights = {**in_a_block(kernel), "token_embedding": {"embedding": jnp.asarray(table)}}
    states = [clipping.init(weights), plain.init(weights)]
    found = weights
    expected = weights
    for size in (1000.0, 0.3):  # only the first is too long
        gradients = jax.tree.map(lambda leaf, size=size: size * leaf - 0.1, weights)
        found, states[0] = clipping.update(gradients, states[0], weights)
        clipped, _ = clip.update(gradients, clip.init(weights))
        expected, states[1] = plain.update(clipped, states[1], weights)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_muon_s_rate_has_the_schedule_s_shape():
    random = np.random.default_rng(2)
    weights = in_a_block(np.zeros((3, 5)))
    gradient = in_a_block(random.standard_normal((3, 5)))
    config = dataclasses.replace(WSD, optimizer="muon", muon_learning_rate=0.8, gradient_clip=0.0)
    optimizer = optimizer_of(dataclasses.replace(config, schedule_steps=10), 14)
    state = optimizer.init(weights)
    sizes = []
    for _ in range(10):
        updates, state = optimizer.update(gradient, state, weights)
        sizes.append(np.linalg.norm(kernel_of(updates)))
    expected = np.array(rates(config, 10, range(10))) / 0.4

    np.testing.assert_allclose(np.array(sizes) / sizes[3], expected, rtol=1e-3)


def test_a_state_keeps_its_dtypes_and_owns_its_arrays():
    """A step is a loop over states of one type, and is given state and weights to overwrite."""
    averaging = make_optimizer(dataclasses.replace(CONFIG, ema_decay=0.5), 3)
    weights = {"m": jnp.ones((2, 3), jnp.bfloat16), "v": jnp.ones(3)}
    state = averaging.init(weights)
    for name, trained in trained_weights(weights, state).items():
        assert trained.unsafe_buffer_pointer() != weights[name].unsafe_buffer_pointer()
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, (weights, state))
    again = jax.eval_shape(averaging.update, weights, state, weights)
    assert jax.tree.map(lambda leaf: leaf.dtype, again) == dtypes


def mine(config, steps):
    return optax.sgd(0.5)


def test_a_custom_optimizer_is_given_clipped_gradients_and_averaged():
    """Its own state is on disk as before: clipping adds none."""
    weights: Any = {"v": jnp.array([3.0, 4.0])}
    gradients: Any = {"v": jnp.array([6.0, 8.0])}
    updates: Any
    average: Any
    state: Any
    config = OptimizerConfig(make=mine, gradient_clip=5.0)
    made = make_optimizer(config, 9)
    state = made.init(weights)
    assert jax.tree.structure(state) == jax.tree.structure(mine(config, 9).init(weights))
    updates, _ = made.update(gradients, state, weights)
    np.testing.assert_allclose(updates["v"], [-1.5, -2.0], rtol=1e-5)
    whole = make_optimizer(dataclasses.replace(config, gradient_clip=0.0), 9)
    unclipped: Any = whole.update(gradients, state, weights)[0]
    np.testing.assert_array_equal(unclipped["v"], [-3.0, -4.0])
    averaging = make_optimizer(dataclasses.replace(config, ema_decay=0.5), 9)
    state = averaging.init(weights)
    average = weights
    for _ in range(2):
        updates, state = averaging.update(gradients, state, average)
        average = optax.apply_updates(average, updates)
    # trained at (1.5, 2) and (0, 0); the second has 2/3 of the weight
    np.testing.assert_allclose(state.trained["v"], [0.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(average["v"], [0.5, 2 / 3], rtol=1e-4)


TABLES: dict[str, Dimensions] = {
    "wte": ("vocab_size", "embed_dim"),
    "positions": (None, "embed_dim"),
    "blocks.0.values": ("vocab_size", "embed_dim"),
}
OTHERS: dict[str, Dimensions] = {
    "blocks.0.projection": (("num_heads", 2), "embed_dim"),
    "blocks.0.adapter": (None, "embed_dim"),
    "blocks.0.experts": (None, "embed_dim", "hidden_dim"),
    "unembed": ("embed_dim", "vocab_size"),
    "embedding": (None, None),
    "scale": ("embed_dim",),
    "unknown": (),
}


def test_embeddings_are_known_by_their_dimensions_not_by_an_attribute_s_name():
    names = TABLES | OTHERS

    def tree(stacked):
        nested: dict = {"blocks": {}}
        for path, dimensions in names.items():
            leaf = jnp.zeros((2,) * len(dimensions))
            if path.startswith("blocks."):
                part = path.rpartition(".")[2]
                block = nested["blocks"].setdefault("stacked" if stacked else 0, {})
                block[part] = leaf[None] if stacked else leaf
            else:
                nested[path] = leaf
        return nested

    config = OptimizerConfig(embedding_learning_rate=0.1, optimizer="muon")
    for stacked in (False, True):
        labels = partition(config, tree(stacked), names)
        found = {
            jax.tree_util.keystr(path, simple=True, separator=".").replace("stacked", "0")
            for path, label in jax.tree_util.tree_leaves_with_path(labels)
            if label == "embedding"
        }
        assert found == {*TABLES}

    with pytest.raises(ValueError, match="needs the dimension names of the weights"):
        partition(config, tree(False))
