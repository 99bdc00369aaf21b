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

from jgpt import GPT, ModelConfig, OptimizerConfig, TrainConfig, cross_entropy
from jgpt.data.batches import batches, evaluation_windows
from jgpt.nn.models import abstract_model, create_model
from jgpt.training.placement import bytes_of
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import make_eval_step, make_train_steps

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
    taken = int(state.step)
    rows = []
    for count in calls:
        windows = batches(
            TOKENS, config.seed, taken, slots, config.batch_size, config.model.block_size
        )
        state, metrics = train_steps(state, windows, dropout_stream(config.seed), count, taken)
        rows.append(np.stack(jax.tree.leaves(metrics))[:, :count])
        taken += count
    return state, np.concatenate(rows, axis=1)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_grouping_steps_into_calls_changes_no_bit(train_steps, initial):
    together, metrics = run(train_steps, initial(), [7])
    for calls in ([1] * 7, [3, 3, 1], [2, 5]):
        apart, same = run(train_steps, initial(), calls)
        assert bits(apart) == bits(together)
        assert same.tobytes() == metrics.tobytes()

    assert int(together.step) == 7
    assert metrics.shape == (3, 7)
    assert np.isfinite(metrics).all()


def test_one_program_takes_any_count_and_the_donated_state(train_steps, initial):
    state = initial()
    run(train_steps, state, [1, 2, 3])

    assert train_steps._cache_size() == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.weights))


@pytest.mark.parametrize(("parts", "ema_decay"), [(1, 0.0), (5, 0.0), (5, 0.5)])
def test_each_step_and_micro_batch_drops_out_with_a_key_of_its_own(parts, ema_decay):
    """The same window at each step, at a learning rate that moves nothing.

    Of averaged weights the gradient is that at the trained ones.
    """
    still: dict[str, Any] = dict.fromkeys(("learning_rate", "min_learning_rate"), 1e-30)
    config = dataclasses.replace(
        CONFIG,
        micro_batches=parts,
        model=dataclasses.replace(CONFIG.model, dropout=0.5),
        optimizer=OptimizerConfig(**still, weight_decay=0.0, ema_decay=ema_decay),
    )
    state = init_state(config)
    key = dropout_stream(config.seed)
    trained = jax.tree.map(lambda leaf: 1.5 * leaf, state.weights) if ema_decay else state.weights
    if ema_decay:
        state = dataclasses.replace(state, optimizer=state.optimizer._replace(trained=trained))
    graph = nnx.graphdef(abstract_model(config.model))
    window = batches(TOKENS, config.seed, 0, 1, 5, 6)[0]

    @jax.jit
    @jax.value_and_grad
    def loss_of(weights, window, key):
        model = nnx.merge(graph, weights)
        rngs = nnx.Rngs(dropout=key)
        return cross_entropy(model(window[:, :-1], rngs=rngs), window[:, 1:])

    expected = []
    norms = []
    for step in range(3):
        of_step = jax.random.fold_in(key, step)
        keys = jax.random.split(of_step, parts) if parts > 1 else [of_step]
        pieces = zip(jnp.split(window, parts), keys, strict=True)
        losses, gradients = zip(*(loss_of(trained, *given) for given in pieces), strict=True)
        expected.append(np.mean(losses))
        means = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *gradients)
        norms.append(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(means))))
    assert len(set(expected)) == 3
    windows = jnp.stack([window] * 3)
    _, metrics = make_train_steps(config)(state, windows, key, 3, 0)
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics.gradient_norm, norms, rtol=1e-4)


def test_a_new_seed_compiles_nothing_anew():
    other = dataclasses.replace(CONFIG, seed=CONFIG.seed - 1)

    def lowered(config):
        windows = jax.ShapeDtypeStruct((7, config.batch_size, 7), jnp.int32)
        steps = make_train_steps(config).lower(
            abstract_state(config), windows, dropout_stream(config.seed), 2
        )
        return steps.as_text()

    assert lowered(other) == lowered(CONFIG)
    assert lowered(dataclasses.replace(CONFIG, batch_size=4)) != lowered(CONFIG)


def test_seeds_decide_parameters_and_dropout(train_steps, initial):
    other = dataclasses.replace(CONFIG, seed=3)
    assert bits(init_state(CONFIG)) == bits(initial())
    drawn = create_model(CONFIG.model, rngs=nnx.Rngs(dropout_stream(CONFIG.seed)))
    of_dropout = nnx.to_pure_dict(nnx.state(drawn, nnx.Param))
    assert bits(init_state(other).weights) != bits(initial().weights) != bits(of_dropout)
    # the same parameters and batches, another dropout
    _, metrics = run(train_steps, initial(), [2])
    _, other_metrics = run(train_steps, initial(), [2], other)
    assert metrics[0, 0] != other_metrics[0, 0]


def test_an_abstract_state_describes_the_state(initial):
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), initial())
    assert jax.tree.structure(abstract_state(CONFIG)) == jax.tree.structure(described)
    assert jax.tree.leaves(abstract_state(CONFIG)) == jax.tree.leaves(described)


@pytest.mark.parametrize("architecture", ["gpt", "bigram"])
def test_an_evaluation_is_the_direct_mean_over_every_target(architecture):
    model_config = dataclasses.replace(CONFIG.model, architecture=architecture)
    model = create_model(model_config, rngs=nnx.Rngs(0))
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    windows, counts = evaluation_windows(TOKENS, 6, 4)
    total = make_eval_step(model_config)(weights, jnp.asarray(windows), jnp.asarray(counts))
    run_model = nnx.jit(lambda model, tokens: model(tokens))
    expected = 0.0
    for start in range(0, 210, 6):  # which divides into 35 windows
        piece = TOKENS[start : start + 7]
        logits = np.asarray(run_model(model, jnp.asarray(piece[None, :-1])), np.float64)[0]
        log_sum = np.log(np.exp(logits).sum(-1))
        expected += (log_sum - logits[np.arange(6), piece[1:]]).sum()

    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert counts.sum() == 210


def test_a_batch_of_which_nothing_counts_is_not_computed(monkeypatch):
    weights = nnx.to_pure_dict(nnx.state(create_model(CONFIG.model, rngs=nnx.Rngs(0)), nnx.Param))
    windows, counts = evaluation_windows(TOKENS, 6, 4)
    computed = []
    hidden = GPT.hidden

    def spy(self, *arguments):
        jax.debug.callback(lambda: computed.append(True))
        return hidden(self, *arguments)

    monkeypatch.setattr(GPT, "hidden", spy)
    evaluate = make_eval_step(CONFIG.model)
    totals = []
    for chosen in ([0, 3, 7], [1, 2, 4, 5, 6, 8], range(9)):
        some = np.zeros_like(counts)
        some[chosen] = counts[chosen]
        totals.append(float(evaluate(weights, jnp.asarray(windows), jnp.asarray(some))))
        jax.effects_barrier()
        assert len(computed) == len(chosen)
        computed.clear()

    assert totals[0] + totals[1] == pytest.approx(totals[2], rel=1e-5)
    assert totals[0] > 60  # of 72 targets, each about ln 11


@pytest.mark.parametrize(("scale", "loss_is_finite"), [(math.nan, False), (1e25, True)])
def test_a_step_that_is_not_finite_is_not_taken_nor_any_after_it(
    scale, loss_is_finite, train_steps, initial
):
    """The second's gradient is infinite."""
    good, _ = run(train_steps, initial(), [2])
    poisoned = jax.tree.map(jnp.array, good)
    poisoned.weights["final_norm"]["scale"] = jnp.full(8, scale)
    before = jax.tree.map(np.asarray, poisoned)
    windows = batches(TOKENS, CONFIG.seed, 2, 7, 5, 6)
    key = dropout_stream(CONFIG.seed)
    after, measured = train_steps(poisoned, windows, key, 3, 2)
    assert int(after.step) == 2
    assert math.isfinite(measured.loss[0]) == loss_is_finite
    assert not math.isfinite(measured.gradient_norm[0])
    assert np.array_equal(measured.loss[1:], np.zeros(6))
    later, _ = train_steps(after, windows, key, 3, 5)  # the call in flight meanwhile
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(later), strict=True):
        assert np.array_equal(left, right, equal_nan=True)


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_a_micro_batch_is_all_that_is_computed_at_once(micro_batches):
    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    windows = jax.ShapeDtypeStruct((7, 5, 7), jnp.int32)
    lowered = make_train_steps(config).lower(abstract_state(config), windows, dropout_stream(0), 2)
    logits = set(re.findall(r"tensor<(\d+)x6x11xf32>", lowered.as_text()))

    assert logits == {str(5 // micro_batches)}


@pytest.mark.parametrize("scan", [False, True])
def test_rematerialised_blocks_keep_less_for_the_backward_pass(scan):
    def kept(**changes):
        config = dataclasses.replace(CONFIG.model, num_layers=2, scan_layers=scan, **changes)
        graph, weights = nnx.split(abstract_model(config))

        def loss(weights):
            return nnx.merge(graph, weights)(jnp.zeros((12, 6), jnp.int32)).sum()

        return bytes_of(jax.eval_shape(lambda weights: jax.vjp(loss, weights)[1], weights))

    assert kept(remat=True) < kept() / 2


@pytest.mark.parametrize(
    ("dtype", "param_dtype"),
    [("bfloat16", "float32"), ("float64", "float32")],  # float64 alone: tests/parity
)
def test_every_dtype_is_kept_in_training_and_evaluation(dtype, param_dtype):
    model_config = dataclasses.replace(CONFIG.model, dtype=dtype, param_dtype=param_dtype)
    config = dataclasses.replace(CONFIG, model=model_config)
    wide = "float64" if dtype == "float64" else "float32"
    with jax.enable_x64(dtype == "float64"):
        state = abstract_state(config)
        windows = jax.ShapeDtypeStruct((7, 5, 7), jnp.int32)
        steps = make_train_steps(config)
        after, metrics = jax.eval_shape(steps, state, windows, dropout_stream(0), 7)
        assert {leaf.dtype for leaf in jax.tree.leaves(after.weights)} == {jnp.dtype(param_dtype)}
        assert after == state
        counts = jax.ShapeDtypeStruct((7, 5, 6), bool)
        total = jax.eval_shape(make_eval_step(model_config), state.weights, windows, counts)
        assert metrics.loss.dtype == total.dtype == wide
