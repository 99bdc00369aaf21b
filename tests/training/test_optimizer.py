"""Schedules, decay, clipping, AdamW, Muon and averaged weights, number by number."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jgpt import ModelConfig, OptimizerConfig
from jgpt.nn.models import abstract_model
from jgpt.training.optimizer import (
    clip_by_global_norm,
    learning_rate_schedule,
    make_optimizer,
    partition,
    trained_weights,
)
from tests.models import randomised, weights_of

CONFIG = OptimizerConfig(learning_rate=0.6, min_learning_rate=0.06, warmup_steps=10)


def optimizer_of(config, steps):
    made = make_optimizer(config, steps)
    return optax.GradientTransformation(jax.jit(made.init), jax.jit(made.update))


def nanogpt(step, warmup=10, steps=110, peak=0.6, least=0.06):
    """`get_lr` of nanoGPT's train.py."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step > steps:
        return least
    ratio = (step - warmup) / (steps - warmup)
    return least + 0.5 * (1 + math.cos(math.pi * ratio)) * (peak - least)


def rates(config, steps, at, peak=None):
    """The learning rates of a run of `steps` steps at some of them."""
    schedule = learning_rate_schedule(config, steps, peak)
    return jax.jit(jax.vmap(schedule))(jnp.array(at)).tolist()


def test_the_schedule_is_nanogpt_s():
    expected = [nanogpt(step) for step in range(130)]
    np.testing.assert_allclose(rates(CONFIG, 110, range(130)), expected, rtol=1e-5)
    by_hand = [0.6 / 11, 0.6, 0.33, 0.06]
    np.testing.assert_allclose(rates(CONFIG, 110, (0, 10, 60, 110)), by_hand, rtol=1e-5)


def test_a_constant_schedule_stays_and_may_have_no_warmup():
    flat = OptimizerConfig(learning_rate=0.5, schedule="constant", warmup_steps=0)
    assert rates(flat, 9, (0, 5, 99)) == [0.5] * 3
    cosine = OptimizerConfig(learning_rate=0.5, min_learning_rate=0.0, warmup_steps=0)
    np.testing.assert_allclose(rates(cosine, 4, (0, 2, 4)), [0.5, 0.25, 0], atol=1e-7)


WSD = OptimizerConfig(
    learning_rate=0.4,
    min_learning_rate=0.0,
    schedule="wsd",
    warmup_steps=3,
    decay_fraction=0.4,
)


def test_warmup_stable_decay_by_hand():
    # 3 of 10 steps up, 3 stay, 4 go down: the tenth is above zero, and the eleventh would be zero
    up, flat, down = [0.1, 0.2, 0.3], [0.4] * 4, [0.3, 0.2, 0.1]
    np.testing.assert_allclose(rates(WSD, 10, range(10)), up + flat + down, rtol=1e-5)
    np.testing.assert_allclose(rates(WSD, 10, (10, 11, 99)), [0, 0, 0], atol=1e-7)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_schedule_may_span_fewer_steps_than_the_run(schedule):
    shorter = dataclasses.replace(WSD, schedule=schedule, min_learning_rate=0.1, schedule_steps=10)
    whole = dataclasses.replace(shorter, schedule_steps=None)
    assert rates(shorter, 25, range(25)) == rates(whole, 10, range(25))


def test_warmup_stable_decay_ends_at_the_least_rate():
    least = dataclasses.replace(WSD, min_learning_rate=0.2)
    np.testing.assert_allclose(rates(least, 10, (6, 8, 10, 99)), [0.4, 0.3, 0.2, 0.2], rtol=1e-5)


def test_a_decay_that_the_warmup_reaches_into_is_shorter_and_ends_at_the_minimum():
    late = dataclasses.replace(WSD, warmup_steps=8, min_learning_rate=0.1)
    expected = [0.4 * 8 / 9, 0.4, 0.25, 0.1, 0.1]
    np.testing.assert_allclose(rates(late, 10, (7, 8, 9, 10, 11)), expected, rtol=1e-5)
    sudden = dataclasses.replace(WSD, decay_fraction=0.0)
    np.testing.assert_allclose(rates(sudden, 10, (3, 9, 10)), [0.4, 0.4, 0.0], atol=1e-7)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
def test_another_peak_has_the_same_shape(schedule):
    config = dataclasses.replace(WSD, schedule=schedule, min_learning_rate=0.1)
    expected = [10 * rate for rate in rates(config, 10, range(12))]
    np.testing.assert_allclose(rates(config, 10, range(12), peak=4.0), expected, rtol=1e-5)


def test_a_warmup_longer_than_the_run_only_warms_up():
    expected = [nanogpt(step) for step in range(5)]
    np.testing.assert_allclose(rates(CONFIG, 5, range(5)), expected, rtol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 2.5])
def test_two_steps_of_adamw_by_hand(clip):
    config = OptimizerConfig(
        learning_rate=0.5,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.1,
        beta1=0.8,
        beta2=0.9,
        gradient_clip=clip,
    )
    weights = {"matrix": jnp.array([[2.0, -1.0]]), "vector": jnp.array([3.0])}
    optimizer = optimizer_of(config, 2)
    state = optimizer.init(weights)
    expected = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    mean = {name: np.zeros_like(value) for name, value in expected.items()}
    square = {name: np.zeros_like(value) for name, value in expected.items()}
    for t in (1, 2):
        gradients = {"matrix": np.array([[3.0, 0.5]]) * t, "vector": np.array([-4.0]) / t}
        updates, state = optimizer.update(
            {name: jnp.asarray(g, jnp.float32) for name, g in gradients.items()}, state, weights
        )
        weights = {name: weights[name] + updates[name] for name in weights}  # type: ignore[index]
        norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, g in gradients.items():
            g = g * min(1.0, clip / (norm + 1e-6)) if clip else g
            mean[name] = 0.8 * mean[name] + 0.2 * g
            square[name] = 0.9 * square[name] + 0.1 * g**2
            step = mean[name] / (1 - 0.8**t) / (np.sqrt(square[name] / (1 - 0.9**t)) + 1e-8)
            decay = 0.1 * expected[name] if name == "matrix" else 0
            expected[name] = expected[name] - 0.5 * (step + decay)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5)


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


def names_of(labels) -> dict[str, set[str]]:
    """The leaves that each rule moves."""
    found: dict[str, set[str]] = {}
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found.setdefault(label, set()).add(name)
    return found


def test_muon_moves_the_matrices_inside_the_blocks_alone():
    weights = randomised(weights_of(abstract_model(MODERN)))
    matrices = {
        f"blocks.{layer}.{part}.kernel"
        for layer in (0, 1)
        for part in (
            "attention.query",
            "attention.key",
            "attention.value",
            "attention.projection",
            "feed_forward.expansion",
            "feed_forward.projection",
        )
    }
    everything = names_of(partition(OptimizerConfig(), weights))["adamw"]
    assert len(everything) == 2 * 16 + 2 + 2 + 2 + 1
    assert names_of(partition(MUON, weights)) == {
        "muon": matrices,
        "adamw": everything - matrices,
    }
    tables = {"token_embedding.embedding", "position_embedding.embedding"}
    apart = dataclasses.replace(MUON, embedding_learning_rate=0.1)
    assert names_of(partition(apart, weights)) == {
        "muon": matrices,
        "embedding": tables,
        "adamw": everything - matrices - tables,
    }
    adamw = OptimizerConfig(embedding_learning_rate=0.1)
    assert names_of(partition(adamw, weights)) == {
        "embedding": tables,
        "adamw": everything - tables,
    }


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
def test_muon_s_first_step_is_an_orthogonal_one(shape):
    random = np.random.default_rng(0)
    kernel, gradient = random.standard_normal(shape), random.standard_normal(shape)
    optimizer = optimizer_of(MUON, 2)
    weights = in_a_block(kernel)
    updates, _ = optimizer.update(in_a_block(gradient), optimizer.init(weights), weights)
    step = math.sqrt(max(1, shape[1] / shape[0])) * orthogonalised(gradient)
    np.testing.assert_allclose(
        kernel_of(updates), -0.5 * (step + 0.2 * kernel), rtol=1e-3, atol=1e-4
    )
    # that's nearly the nearest orthogonal matrix: the iteration stops at singular values around 1
    u, _, vh = np.linalg.svd(gradient, full_matrices=False)
    singular = np.linalg.svd(orthogonalised(gradient), compute_uv=False)
    assert ((singular > 0.5) & (singular < 1.3)).all()
    assert np.abs(orthogonalised(gradient) - u @ vh).max() < 0.4
    # and the size of a gradient says nothing
    small = jax.tree.map(lambda leaf: leaf / 1000, in_a_block(gradient))
    updates_of_small, _ = optimizer.update(small, optimizer.init(weights), weights)
    np.testing.assert_allclose(
        kernel_of(updates_of_small), kernel_of(updates), rtol=1e-3, atol=1e-4
    )


def test_muon_s_momentum_looks_ahead():
    """Nesterov's, with both means corrected for having begun at zero, as optax has it."""
    random = np.random.default_rng(1)
    gradients = random.standard_normal((2, 3, 5))
    optimizer = optimizer_of(dataclasses.replace(MUON, muon_weight_decay=0.0), 2)
    weights = in_a_block(np.zeros((3, 5)))
    state = optimizer.init(weights)
    updates = {}
    for gradient in gradients:
        updates, state = optimizer.update(in_a_block(gradient), state, weights)
    mean = 0.9 * 0.1 * gradients[0] + 0.1 * gradients[1]
    ahead = 0.9 * mean / (1 - 0.9**3) + 0.1 * gradients[1] / (1 - 0.9**2)
    step = math.sqrt(5 / 3) * orthogonalised(ahead)
    np.testing.assert_allclose(kernel_of(updates), -0.5 * step, rtol=1e-3, atol=1e-4)
    without = math.sqrt(5 / 3) * orthogonalised(gradients[1])
    assert np.abs(kernel_of(updates) + 0.5 * without).max() > 0.05


def updates_of(config, weights, gradients):
    optimizer = optimizer_of(config, 2)
    return optimizer.update(gradients, optimizer.init(weights), weights)[0]


def test_what_muon_leaves_is_adamw_s_and_embeddings_may_have_their_own_rate():
    abstract = weights_of(abstract_model(MODERN))
    weights, gradients = randomised(abstract, 0), randomised(abstract, 1)
    plain = dataclasses.replace(MUON, optimizer="adamw", learning_rate=0.01)
    apart = dataclasses.replace(MUON, learning_rate=0.01, embedding_learning_rate=0.03)
    adamw, muon = updates_of(plain, weights, gradients), updates_of(apart, weights, gradients)
    labels = partition(apart, weights)
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
    plain, clip = optimizer_of(config, 2), clip_by_global_norm(1.0)
    kernel, table = np.eye(2, 3), np.eye(3, 2)
    weights = {**in_a_block(kernel), "token_embedding": {"embedding": jnp.asarray(table)}}
    states = [clipping.init(weights), plain.init(weights)]
    found, expected = weights, weights
    for size in (1000.0, 0.3):  # only the first is too long
        gradients = jax.tree.map(lambda leaf, size=size: size * leaf - 0.1, weights)
        found, states[0] = clipping.update(gradients, states[0], weights)
        clipped, _ = clip.update(gradients, clip.init(weights))
        expected, states[1] = plain.update(clipped, states[1], weights)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_muon_s_rate_has_the_schedule_s_shape():
    random = np.random.default_rng(2)
    weights, gradient = in_a_block(np.zeros((3, 5))), in_a_block(random.standard_normal((3, 5)))
    config = dataclasses.replace(WSD, optimizer="muon", muon_learning_rate=0.8, gradient_clip=0.0)
    optimizer = optimizer_of(dataclasses.replace(config, schedule_steps=10), 14)
    state, sizes = optimizer.init(weights), []
    for _ in range(10):
        updates, state = optimizer.update(gradient, state, weights)
        sizes.append(np.linalg.norm(kernel_of(updates)))
    expected = np.array(rates(config, 10, range(10))) / 0.4
    np.testing.assert_allclose(np.array(sizes) / sizes[3], expected, rtol=1e-3)


def test_averaged_weights_are_the_mean_of_what_the_optimizer_trains():
    """The newest counts most, and the first ones nothing special: 0.25, 0.5 and 1 of the sum."""
    config = OptimizerConfig(learning_rate=0.5, schedule="constant", warmup_steps=0)
    averaging = dataclasses.replace(config, ema_decay=0.5)
    gradients = [{"m": jnp.array([[g, 1.0]]), "v": jnp.array([-g])} for g in (3.0, -0.5, 0.1)]
    start = {"m": jnp.array([[2.0, -1.0]]), "v": jnp.array([3.0])}
    plain, average = optimizer_of(config, 3), optimizer_of(averaging, 3)
    trained, state, mean, its = start, plain.init(start), start, average.init(start)
    assert trained_weights(start, state) is start
    every = []
    for gradient in gradients:
        updates, state = plain.update(gradient, state, trained)
        trained = jax.tree.map(jnp.add, trained, updates)
        every.append(trained)
        updates, its = average.update(gradient, its, mean)
        mean = jax.tree.map(jnp.add, mean, updates)
        for name, array in trained.items():  # as if nothing were averaged
            assert jnp.array_equal(trained_weights(mean, its)[name], array)
        weights = 0.5 ** np.arange(len(every))[::-1]
        for name, array in mean.items():
            wanted = sum(w * np.asarray(one[name]) for w, one in zip(weights, every, strict=True))
            np.testing.assert_allclose(array, wanted / weights.sum(), rtol=1e-5)
    assert np.abs(mean["v"] - trained["v"]).max() > 0.05


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
