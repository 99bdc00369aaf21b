"""The schedule, the decay and the clipping are those of nanoGPT, number by number."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import GPT, ModelConfig, OptimizerConfig
from jgpt.optimizer import (
    clip_by_global_norm,
    decay_mask,
    learning_rate_schedule,
    make_optimizer,
)

CONFIG = OptimizerConfig(learning_rate=0.6, min_learning_rate=0.06, warmup_steps=10)


def nanogpt(step, warmup=10, steps=110, peak=0.6, least=0.06):
    """`get_lr` of nanoGPT's train.py."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step > steps:
        return least
    ratio = (step - warmup) / (steps - warmup)
    return least + 0.5 * (1 + math.cos(math.pi * ratio)) * (peak - least)


def rates(config, steps, at):
    """The learning rates of a run of `steps` steps at some of them."""
    schedule = learning_rate_schedule(config, steps)
    return [float(jnp.asarray(schedule(step))) for step in at]


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


def test_a_warmup_longer_than_the_run_only_warms_up():
    expected = [nanogpt(step) for step in range(5)]
    np.testing.assert_allclose(rates(CONFIG, 5, range(5)), expected, rtol=1e-5)


def test_matrices_decay_and_vectors_do_not():
    config = ModelConfig(
        vocab_size=5, embed_dim=4, num_heads=2, num_layers=1, block_size=3,
        use_bias=True, qkv_bias=True, tie_embeddings=False, head_bias=True,
    )  # fmt: skip
    weights = nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(0)), nnx.Param))
    mask = decay_mask(weights)
    attention = mask["blocks"][0]["attention"]
    assert attention["query"] == {"bias": False, "kernel": True}
    assert attention["projection"] == {"bias": False, "kernel": True}
    assert mask["blocks"][0]["attention_norm"] == {"bias": False, "scale": False}
    assert mask["token_embedding"] == {"embedding": True}
    assert mask["head"] == {"bias": False, "kernel": True}


def test_gradients_are_clipped_together_and_only_when_too_long():
    clip = clip_by_global_norm(1.0)
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clipped, _ = clip.update(gradients, clip.init(gradients))
    np.testing.assert_allclose(clipped["a"], [0.6, 0], rtol=1e-5)  # type: ignore[index]
    np.testing.assert_allclose(clipped["b"], [[0.8]], rtol=1e-5)  # type: ignore[index]
    small = {"a": jnp.array([0.3, 0.4])}
    unclipped, _ = clip.update(small, clip.init(small))
    assert jnp.array_equal(unclipped["a"], small["a"])  # type: ignore[index]


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
    optimizer = make_optimizer(config, 2)
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
