"""Steps that scan over stacked blocks: the numbers of a loop, in a program of constant size."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt.data.batches import batches
from jgpt.nn.models import weight_dimensions
from jgpt.nn.stacking import stack_blocks, unstack_blocks
from jgpt.parallel.mesh import use_mesh
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import abstract_state, dropout_stream, init_state
from jgpt.training.step import make_train_steps
from tests.training.test_mesh import ALL, RUNS, TOKENS, config_of

STEPS, LAYERS = 5, 2
MODERN = config_of("modern", "muon", model={"num_kv_heads": 4})


def with_layers(config: Any, layers: int = LAYERS, *, scan: bool) -> Any:
    model = dataclasses.replace(config.model, num_layers=layers, scan_layers=scan)
    return dataclasses.replace(config, model=model)


def trained(config: Any) -> tuple[np.ndarray, Any]:
    """The losses of a few steps, and the state after them with the blocks apart."""
    state = init_state(config)
    windows = batches(TOKENS, config.seed, 0, STEPS, config.batch_size, 10)
    key = dropout_stream(config.seed)
    state, metrics = make_train_steps(config)(state, windows, key, STEPS, 0)
    if config.model.scan_layers:
        state = unstack_blocks(state)
    return np.asarray(metrics.loss), state


@functools.cache
def trained_in_a_loop(name: str) -> tuple[np.ndarray, Any]:
    losses, state = trained(with_layers(RUNS[name], scan=False))
    return losses, jax.device_get(state)


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("lecture", None),  # with dropout
        ("modern", None),
        ("lecture", ALL),
        ("modern", ALL),
        ("accumulated", "fsdp=8"),
    ],
)
def test_a_scan_trains_as_a_loop_does(name, mesh):
    with jax.enable_x64(True):
        wanted, state = trained_in_a_loop(name)
        with use_mesh(mesh):
            found, scanned = trained(with_layers(RUNS[name], scan=True))
        scanned = jax.device_get(scanned)

    assert abs(found - wanted).max() < 1e-12
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-11)
    jax.tree.map(close, scanned, state)
    assert abs(np.diff(wanted)).min() > 1e-9  # each step would show a mistake


# --- stacking ------------------------------------------------------------------------------------


def test_blocks_are_stacked_in_order_and_nothing_else_is():
    blocks = {}
    for number in reversed(range(11)):  # more than ten: as texts, 10 would come before 2
        matrix = jnp.full((2, 3), number)
        vector = jnp.full((5,), -number)
        blocks[number] = {"a": {"b": matrix}, "c": vector}
    weights = {"blocks": blocks, "head": jnp.ones(7)}
    tree = (weights, [jnp.zeros(())])

    stacked = stack_blocks(tree)
    again = unstack_blocks(stacked)

    stacked_weights, _ = stacked
    stacked_blocks = stacked_weights["blocks"]["stacked"]
    assert stacked_blocks["a"]["b"].shape == (11, 2, 3)
    assert stacked_blocks["c"][:, 0].tolist() == [0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10]
    assert stacked_weights["head"] is weights["head"]
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    unstacked_weights, _ = again
    for number, block in enumerate(unstacked_weights["blocks"].values()):
        assert int(block["a"]["b"][0, 0]) == number


# --- one program ---------------------------------------------------------------------------------


def size_of(layers: int, *, scan: bool) -> int:
    """The number of operations of a program of train steps."""
    config = with_layers(MODERN, layers, scan=scan)
    windows = jax.ShapeDtypeStruct((3, config.batch_size, 11), jnp.int32)
    arguments = abstract_state(config), windows, dropout_stream(1), 3, 0
    return make_train_steps(config).lower(*arguments).as_text().count(" = ")


@pytest.mark.slow
def test_a_program_does_not_grow_with_its_layers():
    """But for the slice of each layer's input, which nothing reads."""
    assert size_of(7, scan=True) - size_of(5, scan=True) <= 2 * 2
    assert size_of(7, scan=False) - size_of(5, scan=False) > 100 * 2  # the control


def test_muon_takes_one_layer_at_a_time():
    config = with_layers(MODERN, 7, scan=True)
    state = abstract_state(config)
    optimizer = make_optimizer(config.optimizer, 1, weight_dimensions(config.model))
    weights = state["model"]
    text = str(jax.make_jaxpr(optimizer.update)(weights, state["optimizer"], weights))
    assert "48,56]" in text
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert not [line for line in products if "[7," in line]
