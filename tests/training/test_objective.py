"""Objectives: the built-in one given by hand, weights, a teacher's arrays, and refusals."""

import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgpt
from jgpt import Batch, Loss, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.nn.loss import token_losses
from jgpt.nn.models import abstract_model
from jgpt.nn.stacking import model_merger, unstack_blocks
from jgpt.training.custom_objective import (
    require_gradient,
    split_arrays,
    trace_objective,
    unread_arrays,
)
from jgpt.training.objective import next_token_loss, target_losses
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import make_train_steps
from tests.models import loud
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
    def louder(config):
        return lambda model, batch, rngs: 2 * next_token_loss(model, batch, rngs).value

    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    own = dataclasses.replace(config, objective=lambda config: next_token_loss)
    other = dataclasses.replace(config, objective=louder)

    assert lowered(own) == lowered(config)
    assert lowered(other) != lowered(config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_micro_batches_and_their_metrics_are_averaged_by_weight(dtype):
    def make(config):
        def objective(model, batch, rngs):
            weight = 1 + batch.tokens[0, 1].astype(dtype)
            loss = next_token_loss(model, batch, rngs).value
            return Loss(loss, weight, {"first/weight": weight})

        return objective

    config = dataclasses.replace(BIGRAM, micro_batches=2, objective=make)
    merge = model_merger(BIGRAM.model)
    weights = init_state(BIGRAM).weights

    def loss_of(weights, tokens):
        return next_token_loss(merge(weights), Batch(tokens)).value

    differentiate = jax.value_and_grad(loss_of)
    first_loss, first_gradients = differentiate(weights, TOKENS[:3])
    second_loss, second_gradients = differentiate(weights, TOKENS[3:])
    first_weight = float(1 + TOKENS[0, 1])
    second_weight = float(1 + TOKENS[3, 1])
    assert first_weight != second_weight

    def weighted_mean(first, second):
        total = first_weight * first + second_weight * second
        return total / (first_weight + second_weight)

    loss = weighted_mean(first_loss, second_loss)
    gradients = jax.tree.map(weighted_mean, first_gradients, second_gradients)
    norm = optax.tree.norm(gradients)
    weight = weighted_mean(first_weight, second_weight)

    steps = make_train_steps(config)
    _, metrics = steps(init_state(config), TOKENS[None], KEY, 1, 0)

    np.testing.assert_allclose(metrics.loss, [loss], rtol=1e-6)
    np.testing.assert_allclose(metrics.gradient_norm, [norm], rtol=1e-5)
    np.testing.assert_allclose(metrics.extra["first/weight"], [weight], rtol=1e-6)
    # the control: a mean without weights is another
    assert abs(loss - (first_loss + second_loss) / 2) > 1e-4


@pytest.mark.parametrize("make", [None, lambda config: next_token_loss], ids=["built-in", "own"])
def test_weights_of_targets_give_the_weighted_mean_in_one_batch_and_in_micro_batches(make):
    targets = TOKENS[:, 1:]
    weights = jnp.where(targets > 4, 1.0, 0.0)  # batch time
    weights = weights.at[0].set(0.5)
    model = model_merger(BIGRAM.model)(init_state(BIGRAM).weights)
    losses = target_losses(model, TOKENS)
    expected = float((losses * weights).sum() / weights.sum())
    of_one_step = jax.tree.map(lambda leaf: leaf[None], Batch(TOKENS, weights))

    for micro_batches in (1, 3):
        config = dataclasses.replace(BIGRAM, micro_batches=micro_batches, objective=make)
        steps = make_train_steps(config)

        _, metrics = steps(init_state(config), of_one_step, KEY, 1, 0)

        np.testing.assert_allclose(metrics.loss, [expected], rtol=1e-6)
    # the control: a mean without weights is another
    assert abs(expected - float(losses.mean())) > 1e-3


TEACHER = loud(abstract_model(CONFIG.model))  # each worker imports this, so nothing is compiled


def closing_over_a_teacher(config: TrainConfig) -> Any:
    teacher = TEACHER

    def objective(model, batch, rngs):
        return jnp.square(model(batch.inputs) - teacher(batch.inputs)).mean()

    return objective


def using_a_global_teacher(config: TrainConfig) -> Any:
    return lambda model, batch, rngs: jnp.square(model(batch.inputs) - TEACHER(batch.inputs)).mean()


class Distillation(nnx.Module):
    def __init__(self, config: TrainConfig) -> None:
        self.teacher = TEACHER

    def __call__(self, model, batch, rngs):
        return jnp.square(model(batch.inputs) - self.teacher(batch.inputs)).mean()


def test_a_teachers_arrays_are_arguments_of_the_program():
    def constants(make) -> int:
        config = dataclasses.replace(CONFIG, objective=make)
        windows = jax.ShapeDtypeStruct((5, 6, 7), jnp.int32)
        traced = make_train_steps(config).trace(abstract_state(config), windows, KEY, 2, 0)
        return sum(np.size(constant) for constant in traced.jaxpr.consts)

    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(TEACHER)))
    assert constants(using_a_global_teacher) >= size  # the control
    assert constants(closing_over_a_teacher) < 100
    assert constants(Distillation) < 100


@pytest.mark.parametrize("make", [closing_over_a_teacher, Distillation])
def test_an_objective_computes_with_the_arrays_that_it_is_given(make):
    objective = make(CONFIG)
    student = jgpt.GPT(CONFIG.model, rngs=nnx.Rngs(6))
    batch = Batch(TOKENS)
    with_arrays, arrays = split_arrays(objective)
    zeros = [jnp.zeros_like(leaf) for leaf in arrays]

    loss = with_arrays(arrays)(student, batch, None)
    loss_with_zeros = with_arrays(zeros)(student, batch, None)

    assert loss == objective(student, batch, None)
    logits = student(TOKENS[:, :-1])
    np.testing.assert_allclose(loss_with_zeros, jnp.square(logits).mean(), rtol=1e-6)
    assert loss_with_zeros != loss


def with_values_that_python_reads(config):
    """An objective that closes over what its trace needs as values, as any traced function may."""
    counts = np.array([True, False, True, False, True, False])
    largest = np.array(3)
    letters = np.array(["a", None], dtype=object)
    names = {"a": 1, 2: 2.0}
    deleted = TEACHER

    def objective(model, batch, rngs):
        assert len(letters) == len(names)
        if model is None:
            return deleted
        losses = token_losses(model(batch.inputs), batch.targets)
        return jax.lax.top_k(losses[:, counts], int(largest))[0].sum(-1).mean()

    del deleted
    return objective


def test_an_objective_reads_the_values_of_small_arrays_and_of_what_jax_cant_flatten():
    config = dataclasses.replace(CONFIG, objective=with_values_that_python_reads)

    _, metrics = make_train_steps(config)(init_state(config), TOKENS[None], KEY, 1, 0)

    loss = metrics.loss[0]
    model = model_merger(CONFIG.model)(init_state(config).weights)
    losses = np.asarray(token_losses(model(TOKENS[:, :-1]), TOKENS[:, 1:]))  # batch time
    np.testing.assert_allclose(loss, losses[:, ::2].sum(-1).mean(), rtol=1e-5)
    assert abs(loss - losses[:, 1::2].sum(-1).mean()) > 1e-3  # the control


def test_a_large_numpy_array_is_an_argument_of_the_program():
    table = np.zeros((1 << 18, 1), np.float32)
    names = np.array(["a"] * (1 << 18))

    def objective(model, batch, rngs):
        return table[0, 0] + len(names)

    _, arrays = split_arrays(objective)

    assert [array.shape for array in arrays] == [(1 << 18, 1)]


def of(result) -> Any:
    """An objective's maker, from a function of the cross-entropy to the result."""

    def make(config):
        return lambda model, batch, rngs: result(next_token_loss(model, batch, rngs).value)

    return make


calls = itertools.count()
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
    "must return the same metrics at each step: it returned at_": of(
        lambda loss: Loss(loss, metrics={f"at_{next(calls)}": loss})
    ),
    "must be a pure function of (model, batch, rngs)": of(
        # float32 has not enough digits for the clock itself
        lambda loss: loss * (time.perf_counter_ns() % 1_000_003)
    ),
    "the objective has no gradient: no floating-point numbers lead": of(
        lambda loss: jax.lax.stop_gradient(loss) * 2
    ),
    "the objective must take (model, batch, rngs): 7 is not a callable": lambda config: 7,
    "the objective must take (model, batch, rngs): too many": lambda config: lambda model, batch: 0,
}


def require_good(config: TrainConfig) -> None:
    require_gradient(trace_objective(config, Batch(TOKENS)), config)


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_objective_is_refused_in_one_line(message):
    config = dataclasses.replace(BIGRAM, objective=REFUSED[message])
    with pytest.raises(ValueError, match=r".") as caught:
        require_good(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def accuracy(config):
    def objective(model, batch, rngs):
        likeliest = model(batch.inputs, rngs=rngs).argmax(-1)
        return -(likeliest == batch.targets).mean()

    return objective


def test_an_objective_without_a_gradient_is_refused_although_it_reads_the_weights():
    config = dataclasses.replace(BIGRAM, objective=accuracy)
    with pytest.raises(ValueError, match="the objective has no gradient"):
        require_good(config)


def accuracy_in_a_jitted_function(config):
    @jax.jit
    def mean_error(logits, targets):
        return 1 - (logits.argmax(-1) == targets).mean()

    return lambda model, batch, rngs: mean_error(model(batch.inputs), batch.targets)


def loss_in_a_jitted_function(config):
    mean_loss = jax.jit(lambda logits, targets: (targets, token_losses(logits, targets).mean()))
    return lambda model, batch, rngs: mean_loss(model(batch.inputs), batch.targets)[1]


def test_a_gradient_is_looked_for_inside_jitted_functions():
    require_good(dataclasses.replace(BIGRAM, objective=loss_in_a_jitted_function))
    config = dataclasses.replace(BIGRAM, objective=accuracy_in_a_jitted_function)
    with pytest.raises(ValueError, match="the objective has no gradient"):
        require_good(config)


def penalty_of_positions(config):
    def objective(model, batch, rngs):
        return jnp.square(model.position_embedding.embedding[...]).sum()

    return objective


def test_an_objective_of_frozen_weights_alone_has_no_gradient():
    def config_of(*trainable):
        optimizer = dataclasses.replace(CONFIG.optimizer, trainable=trainable)
        return dataclasses.replace(CONFIG, optimizer=optimizer, objective=penalty_of_positions)

    def check(config):
        require_gradient(trace_objective(config, Batch(TOKENS)), config)

    check(config_of())
    check(config_of("position*"))
    with pytest.raises(
        ValueError, match=r"lead from the weights of `trainable=\('blocks.*',\)` to"
    ):
        check(config_of("blocks.*"))


def summed_in_a_reference(config, jitted):
    def objective(model, batch, rngs):
        total = jax.new_ref(jnp.zeros(()))

        def add(carry, column):
            total[...] += column.mean()
            return carry, None

        losses = token_losses(model(batch.inputs), batch.targets)  # batch time
        if jitted:
            jax.jit(lambda columns: jax.lax.scan(add, 0, columns))(losses.T)
        else:
            total[...] += losses.mean()
        return total[...]

    return objective


@pytest.mark.parametrize("jitted", [False, True])
def test_a_gradient_passes_through_a_reference(jitted):
    objective = functools.partial(summed_in_a_reference, jitted=jitted)
    require_good(dataclasses.replace(BIGRAM, objective=objective))


def test_a_good_objective_passes():
    config = dataclasses.replace(BIGRAM, objective=of(lambda loss: Loss(loss, 3, {"z": loss})))
    require_good(config)


def mean_of_all_targets(config):
    def objective(model, batch, rngs):
        return jgpt.cross_entropy(model(batch.inputs, rngs=rngs), batch.targets)

    return objective


def weighted_mean(config):
    def objective(model, batch, rngs):
        losses = token_losses(model(batch.inputs, rngs=rngs), batch.targets)
        return Loss((losses * batch.weights).mean())

    return objective


@pytest.mark.parametrize(
    ("make", "unread"),
    [
        (mean_of_all_targets, ["weights", "documents"]),
        (weighted_mean, ["documents"]),
        (lambda config: next_token_loss, []),
    ],
)
def test_arrays_that_an_objective_does_not_read_are_found(make, unread):
    weights = jnp.linspace(0, 1, 36).reshape(6, 6)
    batch = Batch(TOKENS, weights, jnp.zeros_like(TOKENS))

    config = dataclasses.replace(CONFIG, objective=make)
    assert unread_arrays(trace_objective(config, batch), batch) == unread


def squares(call) -> jax.Array | None:
    """The mean square of what a block's MLP receives."""
    if call.path.endswith("feed_forward"):
        return jnp.square(call.arguments["x"]).mean()
    return None


TRANSFORMED = (
    {"remat": True},
    {"scan_layers": True, "num_layers": 3},
    {"scan_layers": True, "num_layers": 3, "remat": True},
)


def keeping_values_of_blocks(config):
    def objective(model, batch, rngs):
        def watch(call):
            if (value := squares(call)) is not None:
                call.keep(value)

        with jgpt.watching(watch) as kept:
            loss = next_token_loss(model, batch, rngs).value
        # By layer with other factors, so that the order of layers matters.
        terms = [(layer + 1) * value for layer, value in enumerate(kept)]
        return Loss(loss + sum(terms), metrics={"layers": jnp.float32(len(kept))})

    return objective


@pytest.mark.parametrize("changes", only(lambda changes: len(changes) == 3, TRANSFORMED))
def test_a_kept_value_leaves_a_transformed_block_with_its_gradient(changes):
    model = dataclasses.replace(CONFIG.model, num_layers=3)
    plain = dataclasses.replace(
        CONFIG, model=model, micro_batches=3, objective=keeping_values_of_blocks
    )
    transformed = dataclasses.replace(plain, model=dataclasses.replace(model, **changes))
    without_terms = dataclasses.replace(plain, objective=None)

    def trained(config):
        windows = jnp.stack([TOKENS, (TOKENS + 1) % 11])
        state, metrics = make_train_steps(config)(init_state(config), windows, KEY, 2, 0)
        weights = state.weights
        if config.model.scan_layers:
            weights = unstack_blocks(weights)
        return jax.tree.leaves(weights), metrics

    expected, _ = trained(plain)
    found, metrics = trained(transformed)

    np.testing.assert_array_equal(metrics.extra["layers"], [3, 3])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    unlike, _ = trained(without_terms)
    differences = [jnp.abs(a - b).max() for a, b in zip(unlike, expected, strict=True)]
    assert max(differences) > 1e-4
