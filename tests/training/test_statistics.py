"""Statistics by part of the model: the numbers by hand, on each way to train, and refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.data.batch import Batch
from jgpt.data.batches import batches
from jgpt.nn.stacking import model_merger
from jgpt.parallel.mesh import use_mesh
from jgpt.training.objective import next_token_loss
from jgpt.training.state import dropout_stream, init_state
from jgpt.training.statistics import is_statistic, part_of
from jgpt.training.step import make_train_steps
from tests.models import compiled

TOKENS = np.arange(211, dtype=np.int32) ** 2 % 11
CONFIG = TrainConfig(
    model=ModelConfig(
        vocab_size=11, block_size=6, num_layers=2, num_heads=2, embed_dim=8, hidden_dim=14
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
    steps=7,
    batch_size=4,
    log=("gradient_norms", "update_ratios", "activation_rms"),
    log_interval=1,
)
PARTS = {
    *("token_embedding", "position_embedding", "final_norm"),
    *(f"blocks.{i}.{name}" for i in range(2) for name in ("attention", "feed_forward")),
    *(f"blocks.{i}.{name}_norm" for i in range(2) for name in ("attention", "feed_forward")),
}


def first_windows(config: TrainConfig, steps: int = 1) -> Any:
    return batches(TOKENS, config.seed, 0, steps, config.batch_size, config.model.block_size)


def logged(config: TrainConfig, steps: int = 1) -> dict[str, np.ndarray]:
    """The statistics of the first steps, by name."""
    key = dropout_stream(config.seed)
    windows = first_windows(config, steps)
    _, metrics = make_train_steps(config)(init_state(config), windows, key, steps, 0)
    return {name: np.asarray(values) for name, values in metrics.extra.items()}


def norm_of(tree: Any) -> float:
    squares = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(squares)))


def test_a_part_is_a_path_up_to_the_first_name_after_a_number():
    assert part_of(["blocks", "11", "attention", "query", "kernel"]) == "blocks.11.attention"
    assert part_of(["encoder", "layers", "0", "mlp", "3", "w"]) == "encoder.layers.0.mlp"
    assert part_of(["blocks", "2"]) == "blocks.2"
    assert part_of(["token_embedding", "embedding"]) == "token_embedding"


def test_gradient_norms_and_update_ratios_are_those_by_hand():
    state = init_state(CONFIG)
    before = jax.device_get(state.weights)
    windows = first_windows(CONFIG)
    key = dropout_stream(CONFIG.seed)
    merge = model_merger(CONFIG.model)
    steps = make_train_steps(CONFIG)

    def loss_of(weights):
        return next_token_loss(merge(weights), Batch(windows[0])).value

    gradients: Any = compiled(jax.grad(loss_of), before)
    after, metrics = steps(state, windows, key, 1, 0)

    found = {name: float(values[0]) for name, values in metrics.extra.items()}
    norms = [found[f"gradient_norms/{part}"] for part in PARTS]
    all_norms = [name for name in found if name.startswith("gradient_norms/")]
    assert len(all_norms) == len(norms)
    np.testing.assert_allclose(norm_of(norms), metrics.gradient_norm[0], rtol=1e-5)
    for block in (0, 1):
        for name in ("attention", "feed_forward"):
            part = f"blocks.{block}.{name}"
            weights = before["blocks"][block][name]
            weights_after = after.weights["blocks"][block][name]
            change = jax.tree.map(jnp.subtract, weights_after, weights)
            norm = norm_of(gradients["blocks"][block][name])
            ratio = norm_of(change) / norm_of(weights)
            np.testing.assert_allclose(found[f"gradient_norms/{part}"], norm, rtol=1e-4)
            np.testing.assert_allclose(found[f"update_ratios/{part}"], ratio, rtol=1e-4)
    first = found["gradient_norms/blocks.0.attention"]
    second = found["gradient_norms/blocks.1.attention"]
    assert first != second


def test_activation_rms_is_that_of_what_each_part_returns():
    config = dataclasses.replace(CONFIG, log=("activation_rms",))
    state = init_state(config)
    model: Any = model_merger(config.model)(state.weights)
    paths = ("blocks.*", "blocks.*.attention", "blocks.*.feed_forward", "token_embedding")
    tokens = first_windows(config)[0][:, :-1]
    expected = compiled(jgpt.capture(model, *paths), tokens)

    found = logged(config)

    assert set(found) == {f"activation_rms/{part}" for part in {*PARTS, "blocks.0", "blocks.1"}}
    assert len(expected) == 7
    for path, result in expected.items():
        rms = np.sqrt(np.square(np.asarray(result)).mean())
        np.testing.assert_allclose(found[f"activation_rms/{path}"], [rms], rtol=1e-5)


def test_statistics_are_computed_at_each_nth_step_alone():
    every = logged(CONFIG, steps=4)
    second = logged(dataclasses.replace(CONFIG, log_interval=2), steps=4)

    assert set(every) == set(second)
    for name, values in second.items():
        np.testing.assert_array_equal(values, every[name] * [0, 1, 0, 1])
        assert values[1] > 0


WAYS: dict[str, dict[str, Any]] = {
    "scanned": {"model": {"scan_layers": True}},
    "rematerialised": {"model": {"remat": True}},
    "accumulated": {"micro_batches": 2},
    "scanned, rematerialised and accumulated": {
        "model": {"scan_layers": True, "remat": True},
        "micro_batches": 2,
    },
}


def changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    changes = dict(changes)
    model = dataclasses.replace(config.model, **changes.pop("model", {}))
    return dataclasses.replace(config, model=model, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_train_logs_the_same_numbers(way):
    expected = logged(CONFIG, steps=2)

    found = logged(changed(CONFIG, WAYS[way]), steps=2)

    assert set(found) == set(expected)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=2e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_a_mesh_logs_the_same_numbers(mesh, scan):
    one_device = dataclasses.replace(CONFIG, batch_size=8)
    config = changed(one_device, {"mesh": mesh, "model": {"scan_layers": scan}})
    expected = logged(one_device, steps=2)

    with use_mesh(mesh):
        found = logged(config, steps=2)

    assert set(found) == set(expected)
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=2e-4, err_msg=name)


@pytest.mark.slow
def test_averaged_weights_log_the_updates_of_the_trained_ones():
    optimizer = dataclasses.replace(CONFIG.optimizer, ema_decay=0.9)
    averaged = dataclasses.replace(CONFIG, optimizer=optimizer)

    expected = logged(CONFIG, steps=3)
    found = logged(averaged, steps=3)

    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_training_is_the_same_with_statistics():
    plain = dataclasses.replace(CONFIG, log=())
    key = dropout_stream(CONFIG.seed)
    windows = first_windows(CONFIG, 3)
    state, metrics = make_train_steps(plain)(init_state(plain), windows, key, 3, 0)
    other, with_log = make_train_steps(CONFIG)(init_state(CONFIG), windows, key, 3, 0)

    assert metrics.extra is None
    np.testing.assert_allclose(with_log.loss, metrics.loss, rtol=1e-6)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


class RematGPT(jgpt.GPT):
    """A model that hides its blocks in a transformation of its own."""

    def hidden(self, tokens: Any, *, rngs: Any = None, **_: Any) -> Any:
        x = self.embed(tokens, rngs=rngs)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.final_norm(x)


class Untyped(nnx.Module):
    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size
        self.table = nnx.Param(jnp.ones((config.vocab_size, config.vocab_size)))

    def hidden(self, tokens: Any, *, rngs: Any = None) -> Any:
        return self.table[...][tokens]

    def logits(self, x: Any) -> Any:
        return x

    def __call__(self, tokens: Any, *, rngs: Any = None) -> Any:
        return self.logits(self.hidden(tokens))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (RematGPT, r"`log=\('activation_rms',\)` reads .* inside a transformation"),
        (Untyped, r"`log=\('activation_rms',\)` reads what .* this model has no part"),
    ],
)
def test_a_model_whose_parts_cannot_be_read_is_refused(make, message):
    model = dataclasses.replace(CONFIG.model, make=make)
    config = dataclasses.replace(CONFIG, model=model)
    with pytest.raises(ValueError, match=message):
        logged(config)
    other = dataclasses.replace(config, log=("gradient_norms",))
    assert min(values[0] for values in logged(other).values()) > 0


def test_an_objective_s_metric_may_not_have_the_name_of_a_statistic():
    def make(config):
        def objective(model, batch, rngs):
            loss = next_token_loss(model, batch, rngs).value
            return jgpt.Loss(loss, metrics={"gradient_norms/mine": loss})

        return objective

    config = dataclasses.replace(CONFIG, objective=make, log=())
    with pytest.raises(ValueError, match="'gradient_norms/mine' is one of jgpt's: rename it"):
        logged(config)
    assert is_statistic("update_ratios/final_norm")
    assert not is_statistic("my/update_ratios")
