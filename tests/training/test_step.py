"""Training's steps: the same however they are grouped, and they learn."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import ModelConfig, OptimizerConfig, TrainConfig, cross_entropy
from jgpt.data.batches import batches
from jgpt.nn import loss
from jgpt.nn.models import abstract_model, create_model
from jgpt.training.memory import compile_steps
from jgpt.training.placement import bytes_of
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import make_eval_step, make_train_steps
from tests.quick import only

TOKENS = np.arange(211, dtype=np.int32) * 7 % 11
CONFIG = TrainConfig(
    model=ModelConfig(
        vocab_size=11, block_size=6, num_layers=1, num_heads=2, embed_dim=8, dropout=0.1
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=3),
    steps=7,
    batch_size=5,
    seed=2**32 - 1,
)


@pytest.fixture(scope="module")
def train_steps():
    return make_train_steps(CONFIG)


@pytest.fixture(scope="module")
def initial():
    """Fresh copies of the state at step 0, made once."""
    state = jax.device_get(init_state(CONFIG))
    return lambda: jax.tree.map(jnp.array, state)


def run(train_steps, state, calls, config=CONFIG, slots=7):
    """Take steps in calls of the given counts; return the state and each step's metrics."""
    key = dropout_stream(config.seed)
    taken = 0
    rows = []
    for count in calls:
        # a call has windows for `slots` steps, and takes `count` of them
        windows = batches(
            TOKENS, config.seed, taken, slots, config.batch_size, config.model.block_size
        )
        state, metrics = train_steps(state, windows, key, count, taken)
        of_slots = np.stack([metrics.loss, metrics.gradient_norm, metrics.learning_rate])
        rows.append(of_slots[:, :count])
        taken += count
        assert int(metrics.taken) == taken
    return state, np.concatenate(rows, axis=1)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_grouping_steps_into_calls_changes_no_bit(train_steps, initial):
    state, metrics = run(train_steps, initial(), [7])
    assert metrics.shape == (3, 7)
    assert np.isfinite(metrics).all()

    for calls in ([1] * 7, [3, 3, 1], [2, 5]):
        other_state, other_metrics = run(train_steps, initial(), calls)
        assert bits(other_state) == bits(state)
        assert other_metrics.tobytes() == metrics.tobytes()


def test_one_program_takes_any_count(train_steps, initial):
    run(train_steps, initial(), [1, 2, 3])

    assert train_steps._cache_size() == 1


@pytest.mark.parametrize(("parts", "ema_decay"), only([(5, 0.5)], [(1, 0.0), (5, 0.0), (5, 0.5)]))
def test_each_step_and_micro_batch_drops_out_with_a_key_of_its_own(parts, ema_decay):
    """The same window at each step, at a learning rate that moves nothing.

    Of averaged weights the gradient is that at the trained ones.
    """
    optimizer = OptimizerConfig(
        learning_rate=1e-30, min_learning_rate=1e-30, weight_decay=0.0, ema_decay=ema_decay
    )
    config = dataclasses.replace(
        CONFIG,
        micro_batches=parts,
        model=dataclasses.replace(CONFIG.model, dropout=0.5),
        optimizer=optimizer,
    )
    state = init_state(config)
    trained = state["model"]
    if ema_decay:
        # at first both are the same: then a gradient at the average would not be noticed
        trained = jax.tree.map(lambda leaf: 1.5 * leaf, trained)
        state["optimizer"] = state["optimizer"]._replace(trained=trained)
    key = dropout_stream(config.seed)
    graph = nnx.graphdef(abstract_model(config.model))
    window = batches(TOKENS, config.seed, 0, 1, 5, 6)[0]

    @jax.jit
    @jax.value_and_grad
    def loss_of(weights, window, key):
        model = nnx.merge(graph, weights)
        rngs = nnx.Rngs(dropout=key)
        return cross_entropy(model(window[:, :-1], rngs=rngs), window[:, 1:])

    expected_losses = []
    expected_norms = []
    for step in range(3):
        step_key = jax.random.fold_in(key, step)
        # a batch in one part takes the step's key itself
        keys = jax.random.split(step_key, parts) if parts > 1 else [step_key]
        losses = []
        gradients = []
        for part, part_key in zip(jnp.split(window, parts), keys, strict=True):
            loss, gradient = loss_of(trained, part, part_key)
            losses.append(loss)
            gradients.append(gradient)
        expected_losses.append(np.mean(losses))
        means = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *gradients)
        squares = [(leaf**2).sum() for leaf in jax.tree.leaves(means)]
        expected_norms.append(np.sqrt(sum(squares)))

    windows = jnp.stack([window] * 3)
    _, metrics = make_train_steps(config)(state, windows, key, 3, 0)

    assert len(set(expected_losses)) == 3  # of one window: only what is dropped differs
    np.testing.assert_allclose(metrics.loss, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(metrics.gradient_norm, expected_norms, rtol=1e-4)


def test_a_new_seed_compiles_nothing_anew():
    other_seed = dataclasses.replace(CONFIG, seed=CONFIG.seed - 1)
    other_batch = dataclasses.replace(CONFIG, batch_size=4)

    def program(config):
        state = abstract_state(config)
        windows = jax.ShapeDtypeStruct((7, config.batch_size, 7), jnp.int32)
        key = dropout_stream(config.seed)
        return make_train_steps(config).lower(state, windows, key, 2, 0).as_text()

    assert program(other_seed) == program(CONFIG)
    assert program(other_batch) != program(CONFIG)  # so the texts can tell programs apart


def test_seeds_decide_parameters_and_dropout(train_steps, initial):
    other = dataclasses.replace(CONFIG, seed=3)
    key = dropout_stream(CONFIG.seed)
    other_key = dropout_stream(other.seed)
    drawn_as_dropout = create_model(CONFIG.model, rngs=nnx.Rngs(key))
    weights_as_dropout = nnx.to_pure_dict(nnx.state(drawn_as_dropout, nnx.Param))
    windows = batches(TOKENS, CONFIG.seed, 0, 7, 5, 6)

    _, metrics = train_steps(initial(), windows, key, 2, 0)
    _, other_metrics = train_steps(initial(), windows, other_key, 2, 0)

    assert bits(init_state(CONFIG)) == bits(initial())
    weights = bits(initial()["model"])
    assert bits(init_state(other)["model"]) != weights
    # parameters and dropout have keys of their own, though both come from the seed
    assert bits(weights_as_dropout) != weights
    # the same parameters and batches, another dropout
    assert metrics.loss[0] != other_metrics.loss[0]


@pytest.mark.parametrize(("scale", "loss_is_finite"), [(math.nan, False), (1e25, True)])
def test_a_step_that_is_not_finite_is_not_taken_nor_any_after_it(
    scale, loss_is_finite, train_steps, initial
):
    """The second's gradient is infinite."""
    good, _ = run(train_steps, initial(), [2])
    poisoned = jax.tree.map(jnp.array, good)
    poisoned["model"]["final_norm"]["scale"] = jnp.full(8, scale)
    leaves_before = [np.asarray(leaf) for leaf in jax.tree.leaves(poisoned)]
    windows = batches(TOKENS, CONFIG.seed, 2, 7, 5, 6)
    key = dropout_stream(CONFIG.seed)

    after, metrics = train_steps(poisoned, windows, key, 3, 2)

    assert int(metrics.taken) == 2
    assert math.isfinite(metrics.loss[0]) == loss_is_finite
    assert not math.isfinite(metrics.gradient_norm[0])
    np.testing.assert_array_equal(metrics.loss[1:], np.zeros(6))

    # the call in flight meanwhile
    later, metrics = train_steps(after, windows, key, 3, 5, metrics.taken)

    assert int(metrics.taken) == 2

    for leaf, leaf_before in zip(jax.tree.leaves(later), leaves_before, strict=True):
        np.testing.assert_array_equal(leaf, leaf_before)


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_a_micro_batch_is_all_that_is_computed_at_once(micro_batches):
    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    windows = jax.ShapeDtypeStruct((7, 5, 7), jnp.int32)
    state = abstract_state(config)

    program = make_train_steps(config).lower(state, windows, dropout_stream(0), 2, 0).as_text()

    # the first size of all logits, whose others are 6 positions and 11 tokens
    batch_sizes = set(re.findall(r"tensor<(\d+)x6x11xf32>", program))
    assert batch_sizes == {str(5 // micro_batches)}


@pytest.mark.parametrize("scan", [False, True])
def test_rematerialised_blocks_keep_less_for_the_backward_pass(scan):
    def saved_bytes(**changes):
        """The bytes that the backward pass takes from the forward pass."""
        config = dataclasses.replace(CONFIG.model, num_layers=2, scan_layers=scan, **changes)
        graph, weights = nnx.split(abstract_model(config))
        tokens = jnp.zeros((12, 6), jnp.int32)

        def loss(weights):
            model = nnx.merge(graph, weights)
            return model(tokens).sum()

        def backward_pass(weights):
            # JAX's function of the cotangent is a tree, whose leaves are what it has saved
            _, pullback = jax.vjp(loss, weights)
            return pullback

        return bytes_of(jax.eval_shape(backward_pass, weights))

    assert saved_bytes(remat=True) < saved_bytes() / 2


def test_many_seeds_are_trained_in_one_program(train_steps):
    """As docs/scale.md says: each seed has the losses of its own training."""
    states, windows, keys, alone = [], [], [], []
    for seed in (3, 8):
        config = dataclasses.replace(CONFIG, seed=seed)
        states.append(init_state(config))
        windows.append(batches(TOKENS, seed, 0, 7, config.batch_size, config.model.block_size))
        keys.append(dropout_stream(seed))
        own = jax.tree.map(jnp.array, states[-1])
        _, metrics = train_steps(own, windows[-1], keys[-1], 7, 0)
        alone.append(metrics.loss)

    def stacked(trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    together = jax.vmap(train_steps, in_axes=(0, 0, 0, None, None))
    _, metrics = together(stacked(states), stacked(windows), stacked(keys), 7, 0)

    assert abs(alone[0] - alone[1]).max() > 0.01
    np.testing.assert_allclose(metrics.loss, np.stack(alone), rtol=1e-5)


# --- what steps hold -----------------------------------------------------------------------------


def test_the_whole_state_is_donated():
    program = compile_steps(CONFIG)

    analysis = program.memory_analysis()
    assert analysis is not None
    donated = analysis.alias_size_in_bytes
    assert donated >= bytes_of(abstract_state(CONFIG))


def test_a_gibibyte_of_logits_is_materialised_at_most():
    for vocab_size in (11, 50_257, 2**24):
        row = 4 * vocab_size
        rows = loss.rows_at_once(vocab_size)
        assert rows * row <= 2**30
        assert (rows + 1) * row > 2**30  # one more would be too many


def test_a_step_and_an_evaluation_hold_the_logits_of_one_chunk(monkeypatch):
    """All arrays of the vocabulary's size in their programs."""
    twelve_rows = 4 * 11 * 12
    monkeypatch.setattr(loss, "LOGITS_BYTES", twelve_rows)
    windows = jax.ShapeDtypeStruct((3, 5, 7), jnp.int32)
    counts = jax.ShapeDtypeStruct((3, 5, 6), bool)
    state: Any = abstract_state(CONFIG)
    train: Any = make_train_steps(CONFIG)
    evaluate: Any = make_eval_step(CONFIG.model)

    step = jax.make_jaxpr(train)(state, windows, dropout_stream(0), 2, 0)
    evaluation = jax.make_jaxpr(evaluate)(state["model"], windows, counts)

    for program in (step, evaluation):
        # of how many rows of 11 numbers its arrays are
        rows = set()
        for leading in re.findall(r"f32\[((?:\d+,)*)11\]", str(program)):
            rows.add(math.prod(int(size) for size in re.findall(r"\d+", leading)))
        assert 10 in rows  # two positions of five sequences
        assert max(rows) == 10
