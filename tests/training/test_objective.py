"""Objectives: the built-in one given by hand, micro-batches, a teacher's arrays, and refusals."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgpt
from jgpt import Loss, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.nn.models import abstract_model
from jgpt.nn.stacking import model_merger, stack_blocks, unstack_blocks
from jgpt.parallel.mesh import use_mesh
from jgpt.training.objective import next_token_loss
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import make_train_steps, placed_arrays
from tests.models import compiled, loud, randomised, weights_of
from tests.quick import only

CONFIG = TrainConfig(
    model=ModelConfig(
        vocab_size=11, block_size=6, num_layers=1, num_heads=2, embed_dim=8, dropout=0.1
    ),
    optimizer=OptimizerConfig(gradient_clip=0, warmup_steps=3),
    steps=7,
    batch_size=6,
)
BIGRAM = dataclasses.replace(
    CONFIG, model=ModelConfig(architecture="bigram", vocab_size=11, block_size=6)
)
KEY = dropout_stream(3)
TOKENS = jnp.asarray(np.arange(6 * 7).reshape(6, 7) ** 2 % 11)  # batch window


def lowered(config: TrainConfig) -> str:
    windows = jax.ShapeDtypeStruct((5, 6, 7), jnp.int32)
    return make_train_steps(config).lower(abstract_state(config), windows, KEY, 2, 0).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", only([3], [1, 3]))
def test_the_built_in_objective_given_by_hand_is_the_same_program(micro_batches):
    def louder(model, tokens, rngs):
        return 2 * next_token_loss(model, tokens, rngs)

    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    own = dataclasses.replace(config, objective=next_token_loss)
    other = dataclasses.replace(config, objective=louder)

    assert lowered(own) == lowered(config)
    assert lowered(other) != lowered(config)


def test_metrics_of_micro_batches_are_averaged():
    def objective(model, tokens, rngs):
        return Loss(next_token_loss(model, tokens, rngs), {"first/token": tokens[0, 1]})

    config = dataclasses.replace(BIGRAM, micro_batches=2, objective=objective)
    _, metrics = make_train_steps(config)(init_state(config), TOKENS[None], KEY, 1, 0)

    first_tokens = (TOKENS[0, 1] + TOKENS[3, 1]) / 2
    np.testing.assert_allclose(metrics.extra["first/token"], [first_tokens], rtol=1e-6)


TEACHER = loud(abstract_model(CONFIG.model))  # each worker imports this, so nothing is compiled


def using_a_global_teacher(model, tokens, rngs):
    return jnp.square(model(tokens[:, :-1]) - TEACHER(tokens[:, :-1])).mean()


class Distillation(nnx.Module):
    def __init__(self) -> None:
        self.teacher = TEACHER

    def __call__(self, model, tokens, rngs):
        return jnp.square(model(tokens[:, :-1]) - self.teacher(tokens[:, :-1])).mean()


def test_a_teachers_arrays_are_arguments_of_the_program():
    def constants(objective) -> int:
        config = dataclasses.replace(CONFIG, objective=objective)
        windows = jax.ShapeDtypeStruct((5, 6, 7), jnp.int32)
        arrays = placed_arrays(objective)
        arguments = abstract_state(config), windows, KEY, 2, 0
        traced = make_train_steps(config).trace(*arguments, arrays=arrays)
        return sum(np.size(constant) for constant in traced.jaxpr.consts)

    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(TEACHER)))
    assert constants(using_a_global_teacher) >= size  # the control
    assert constants(Distillation()) < 100


def of(result) -> Any:
    """An objective, from a function of the cross-entropy to the result."""
    return lambda model, tokens, rngs: result(next_token_loss(model, tokens, rngs))


REFUSED = {
    "must return a scalar, the mean over the batch, or jgpt.Loss, not float32[3]": of(
        lambda loss: jnp.full(3, loss)
    ),
    "or jgpt.Loss, not int32[]": of(lambda loss: jnp.int32(3)),
    "metric 'tokens' is one of jgpt's: rename it": of(
        lambda loss: Loss(loss, metrics={"tokens": loss})
    ),
    "metric 'z' must be a scalar, not float32[2]": of(
        lambda loss: Loss(loss, metrics={"z": jnp.full(2, loss)})
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_objective_is_refused_in_one_line(message):
    config = dataclasses.replace(BIGRAM, objective=REFUSED[message])
    with pytest.raises(ValueError, match=r".") as caught:
        lowered(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


TRANSFORMED = (
    {"remat": True},
    {"scan_layers": True, "num_layers": 3},
    {"scan_layers": True, "num_layers": 3, "remat": True},
)


def keeping_values_of_blocks(model, tokens, rngs):
    """With the mean squares of what the MLPs receive."""

    def watch(call):
        if call.path.endswith("feed_forward"):
            call.keep(jnp.square(call.arguments["x"]).mean())

    with jgpt.watching(watch) as kept:
        loss = next_token_loss(model, tokens, rngs)
    # By layer with other factors, so that the order of layers matters.
    terms = [(layer + 1) * value for layer, value in enumerate(kept)]
    assert len(terms) == 3
    return loss + sum(terms)


@pytest.mark.parametrize("changes", only(lambda changes: len(changes) == 3, TRANSFORMED))
def test_a_kept_value_leaves_a_transformed_block_with_its_gradient(changes):
    model = dataclasses.replace(CONFIG.model, num_layers=3)
    weights = randomised(weights_of(abstract_model(model)))
    weights = jax.tree.map(lambda leaf: 0.3 * leaf, weights)

    def gradients(objective, config, weights):
        merge = model_merger(config)
        return compiled(jax.grad(lambda it: objective(merge(it), TOKENS, None)), weights)

    expected = gradients(keeping_values_of_blocks, model, weights)
    without_terms = gradients(next_token_loss, model, weights)
    transformed = dataclasses.replace(model, **changes)
    if transformed.scan_layers:
        stacked = gradients(keeping_values_of_blocks, transformed, stack_blocks(weights))
        found = unstack_blocks(stacked)
    else:
        found = gradients(keeping_values_of_blocks, transformed, weights)

    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    differences = jax.tree.map(lambda a, b: abs(a - b).max(), expected, without_terms)
    assert max(jax.tree.leaves(differences)) > 1e-4


def test_a_teacher_is_not_trained():
    config = dataclasses.replace(CONFIG, objective=Distillation())
    before = jax.tree.map(np.asarray, nnx.state(TEACHER))

    state, metrics = make_train_steps(config)(init_state(config), TOKENS[None], KEY, 1, 0)

    assert jax.tree.structure(state) == jax.tree.structure(abstract_state(CONFIG))
    student = model_merger(CONFIG.model)(init_state(config)["model"])
    expected = Distillation()(student, TOKENS, None)
    np.testing.assert_allclose(metrics.loss[0], expected, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(TEACHER), before)


def test_an_optimizer_gets_the_gradients_before_clipping_and_losses_of_the_whole_batch():
    def downhill(config, steps):
        def update(updates, state, params=None, **extra):
            whole = jax.tree.map(lambda gradient: -gradient, extra["grad"])
            doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
            return whole, {"value": extra["value"], "elsewhere": extra["value_fn"](doubled)}

        def init(params):
            return {"value": jnp.zeros(()), "elsewhere": jnp.zeros(())}

        return optax.GradientTransformationExtraArgs(init, update)

    optimizer = OptimizerConfig(make=downhill, gradient_clip=1e-3)
    config = dataclasses.replace(BIGRAM, optimizer=optimizer, micro_batches=3)
    before = init_state(config)["model"]
    merge = model_merger(config.model)

    def loss_of(weights):
        return next_token_loss(merge(weights), TOKENS)

    loss, gradients = jax.value_and_grad(loss_of)(before)
    after, metrics = make_train_steps(config)(init_state(config), TOKENS[None], KEY, 1, 0)

    moved = jax.tree.map(lambda new, old: old - new, after["model"], before)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), moved, gradients)
    elsewhere = loss_of(jax.tree.map(lambda leaf: 2 * leaf, before))
    assert abs(elsewhere - loss) > 1e-4
    for value in (metrics.loss[0], after["optimizer"]["value"]):
        np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(after["optimizer"]["elsewhere"], elsewhere, rtol=1e-6)


def test_each_device_has_the_arrays_of_an_objective():
    with use_mesh("data=8"):
        placed = placed_arrays(Distillation())

    assert placed
    assert all(len(array.devices()) == 8 for array in placed)
