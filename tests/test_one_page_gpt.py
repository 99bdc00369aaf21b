"""`docs/one_page_gpt.py`, a GPT in plain JAX, is `jgpt.GPT`, and learns."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgpt
from jgpt.nn.models import abstract_model
from tests.models import compiled, loud, weights_of

PAGE = Path(__file__).parents[1] / "docs" / "one_page_gpt.py"
page = runpy.run_path(str(PAGE))
CONFIG = jgpt.ModelConfig(
    vocab_size=23, block_size=9, num_layers=2, num_heads=2, embed_dim=20, hidden_dim=80
)
BATCH = 4
TIME = 7


def to_page(weights):
    """Weights of `jgpt.GPT`, or their gradients, under the page's names and in its shapes."""
    heads = CONFIG.num_heads
    head_dim = CONFIG.embed_dim // CONFIG.num_heads

    def to_block(block):
        attention = block["attention"]
        mlp = block["feed_forward"]
        projection = attention["projection"]["kernel"]
        page_block = {
            "attention_norm": block["attention_norm"]["scale"],
            "projection": projection.reshape(heads, head_dim, -1),
            "mlp_norm": block["feed_forward_norm"]["scale"],
            "expansion": mlp["expansion"]["kernel"],
            "contraction": mlp["projection"]["kernel"],
        }
        for name in ("query", "key", "value"):
            kernel = attention[name]["kernel"]
            page_block[name] = kernel.reshape(-1, heads, head_dim)
        return page_block

    return {
        "token_embedding": weights["token_embedding"]["embedding"],
        "position_embedding": weights["position_embedding"]["embedding"],
        "blocks": [to_block(block) for block in weights["blocks"].values()],
        "final_norm": weights["final_norm"]["scale"],
    }


@pytest.fixture(scope="module")
def ours():
    """A graph, weights far from their initial values, and a window of tokens."""
    model = loud(abstract_model(CONFIG), size=0.4)
    random = np.random.default_rng(2)
    window = random.integers(CONFIG.vocab_size, size=(BATCH, TIME + 1))
    return nnx.graphdef(model), weights_of(model), jnp.asarray(window)


def loss_of(weights, graph, window):
    model = nnx.merge(graph, weights)
    logits = model(window[:, :-1])
    return jgpt.cross_entropy(logits, window[:, 1:])


def assert_close(found, expected, atol):
    def compare(found_leaf, expected_leaf):
        np.testing.assert_allclose(found_leaf, expected_leaf, atol=atol)

    jax.tree.map(compare, found, expected)


def test_same_loss_and_gradients(ours):
    graph, weights, window = ours

    def our_loss(weights):
        return loss_of(weights, graph, window)

    loss, gradients = compiled(jax.value_and_grad(our_loss), weights)
    page_loss, page_gradients = compiled(
        jax.value_and_grad(page["loss_of"]), to_page(weights), window
    )

    assert abs(page_loss - loss) < 1e-5
    assert_close(page_gradients, to_page(gradients), atol=1e-5)
    # and none of them is zero, which any mistake would give as well
    for leaf in jax.tree.leaves(page_gradients):
        assert float(jnp.abs(leaf).max()) > 1e-3


def test_same_adam_as_optax(ours):
    graph, weights, window = ours
    initial = to_page(weights)
    optimizer = optax.adam(3e-2, b1=0.9, b2=0.99)
    optimizer_state = compiled(optimizer.init, weights)
    params = initial
    state = compiled(page["init_adam"], params)

    @jax.jit
    def step(weights, state):
        gradients = jax.grad(loss_of)(weights, graph, window)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    for _ in range(3):
        weights, optimizer_state = step(weights, optimizer_state)
        params, state, _ = page["train_step"](params, state, window, 3e-2)

    assert_close(params, to_page(weights), atol=1e-4)
    before = np.asarray(initial["blocks"][1]["expansion"])
    after = np.asarray(params["blocks"][1]["expansion"])
    assert np.abs(after - before).mean() > 1e-2  # far more than the tolerance


def test_samples_continue_past_the_block_and_are_greedy_when_cold(ours):
    graph, weights, window = ours
    model = nnx.merge(graph, weights)
    params = to_page(weights)
    prompt = window[:, :3]

    written = page["sample"](params, prompt, 11, jax.random.key(0), temperature=1e-6)
    greedy = jgpt.generate(model, prompt, 11, key=jax.random.key(5), temperature=0.0)

    assert written.shape[1] > CONFIG.block_size
    np.testing.assert_array_equal(written, greedy)


def test_it_learns_a_text_by_heart(poem, capsys):
    page["main"](str(poem), steps=150, batch_size=8, block_size=24)
    printed = capsys.readouterr().out

    losses = []
    for line in printed.splitlines():
        if line.startswith("step"):
            losses.append(float(line.split()[-1]))
    assert losses[0] > 3
    assert losses[-1] < 1
    sample = printed.split(f"{losses[-1]:.2f}")[-1]  # what follows the last step's line
    assert "So long" in sample
