"""`docs/one_page_gpt.py`, a GPT in plain JAX, is `jgpt.GPT`, and learns."""

import ast
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
BATCH, TIME = 4, 7


def to_page(weights):
    """Weights of `jgpt.GPT`, or their gradients, under the page's names and in its shapes."""
    heads = CONFIG.num_heads
    head_dim = CONFIG.embed_dim // CONFIG.num_heads

    def to_block(block):
        attention = block["attention"]
        mlp = block["feed_forward"]
        split = {
            name: attention[name]["kernel"].reshape(-1, heads, head_dim)
            for name in ("query", "key", "value")
        }
        return split | {
            "attention_norm": block["attention_norm"]["scale"],
            "projection": attention["projection"]["kernel"].reshape(heads, head_dim, -1),
            "mlp_norm": block["feed_forward_norm"]["scale"],
            "expansion": mlp["expansion"]["kernel"],
            "contraction": mlp["projection"]["kernel"],
        }

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
    window = np.random.default_rng(2).integers(CONFIG.vocab_size, size=(BATCH, TIME + 1))
    return nnx.graphdef(model), weights_of(model), jnp.asarray(window)


def loss_of(weights, graph, window):
    return jgpt.cross_entropy(nnx.merge(graph, weights)(window[:, :-1]), window[:, 1:])


def test_same_loss_and_gradients(ours):
    graph, weights, window = ours
    loss, gradients = compiled(
        lambda weights: jax.value_and_grad(loss_of)(weights, graph, window), weights
    )
    its_loss, its = jax.jit(jax.value_and_grad(page["loss_of"]))(to_page(weights), window)
    assert abs(its_loss - loss) < 1e-5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), its, to_page(gradients))
    assert all(float(jnp.abs(leaf).max()) > 1e-3 for leaf in jax.tree.leaves(its))


def test_same_adam_as_optax(ours):
    graph, weights, window = ours
    optimizer = optax.adam(3e-2, b1=0.9, b2=0.99)
    optimizer_state = jax.jit(optimizer.init)(weights)
    params = to_page(weights)
    state = compiled(page["init_adam"], params)

    @jax.jit
    def step(weights, state):
        _, gradients = jax.value_and_grad(loss_of)(weights, graph, window)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    for _ in range(3):
        weights, optimizer_state = step(weights, optimizer_state)
        params, state, _ = page["train_step"](params, state, window, 3e-2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, to_page(weights))
    before = to_page(ours[1])["blocks"][1]["expansion"]

    assert np.abs(params["blocks"][1]["expansion"] - np.asarray(before)).mean() > 1e-2


def test_same_initial_distribution():
    params = page["init_params"](jax.random.key(0), 230, 90, 2, 2, 200)
    config = jgpt.ModelConfig(
        vocab_size=230, block_size=90, num_layers=2, num_heads=2, embed_dim=200
    )
    weights = weights_of(jgpt.GPT(config, rngs=nnx.Rngs(0)))
    ours = jax.tree.leaves(weights)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(leaf.size for leaf in ours)
    for name, part, kind in (
        ("projection", "attention", "projection"),
        ("key", "attention", "key"),
        ("contraction", "feed_forward", "projection"),
    ):
        deviation = float(np.std(weights["blocks"][0][part][kind]["kernel"]))
        assert np.std(params["blocks"][0][name]) == pytest.approx(deviation, rel=0.03)


def test_samples_continue_past_the_block_and_are_greedy_when_cold(ours):
    graph, weights, window = ours
    prompt = window[:, :3]
    written = page["sample"](to_page(weights), prompt, 11, jax.random.key(0), temperature=1e-6)
    model = nnx.merge(graph, weights)
    greedy = jgpt.generate(model, prompt, 11, key=jax.random.key(5), temperature=0.0)

    assert written.shape[1] > CONFIG.block_size
    np.testing.assert_array_equal(written, greedy)


def test_it_learns_a_text_by_heart(poem, capsys):
    page["main"](str(poem), steps=150, batch_size=8, block_size=24)
    printed = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]

    assert losses[0] > 3 > 1 > losses[-1]
    assert "So long" in printed.split(f"{losses[-1]:.2f}")[-1]


def test_it_imports_jax_alone_and_fits_on_a_page():
    source = PAGE.read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)]

    assert {alias.name for node in nodes for alias in node.names} == {"sys", "jax", "jax.numpy"}
    assert "from " not in [line[:5] for line in source.splitlines()]
    assert len(source.splitlines()) <= 180
