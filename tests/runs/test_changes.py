"""Changes inside a forward pass: their numbers are what their code in Python computes."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int

import jgpt
from jgpt.cli import commands
from jgpt.page.numbers import Look
from jgpt.shapes import contract
from jgpt.user_code import load_code
from tests.models import loud, random_gpt
from tests.page.records import Changes, record_of
from tests.runs.test_look import TOKENIZER, by_batch
from tests.runs.test_own import Sums, SumsConfig

PROMPT, OTHER = "script€", "crespas"
CHANGES = {
    "nothing": Changes(),
    "a head": Changes(heads={(1, 2): 0}),
    "two heads of a block": Changes(heads={(0, 0): 0, (0, 1): 0.5}),
    "a block": Changes(blocks={1: 0}),
    "half a block": Changes(blocks={0: 0.5}),
    "a patch": Changes(patch=(0, 3, OTHER)),
    "all": Changes(heads={(1, 0): 2}, blocks={0: 0.25}, patch=(1, 6, OTHER)),
}


@pytest.fixture(scope="module")
def look():
    return Look(random_gpt("modern"), TOKENIZER, "run")


def tokens_of(text: str):
    return jnp.asarray(TOKENIZER.encode(text))[None]


def numbers_of(look: Look, changes: Changes = CHANGES["nothing"]) -> dict[str, Any]:
    return record_of(look, TOKENIZER.encode(PROMPT).tolist(), changes=changes)


def check_code(look: Look, changes: Changes) -> None:
    """The numbers are what the code computes; changes change something."""
    tokens = tokens_of(PROMPT)
    names = {
        "model": look.model,
        "tokenizer": TOKENIZER,
        "jgpt": jgpt,
        "jnp": jnp,
        "tokens": tokens,
    }

    found = numbers_of(look, changes)
    exec(changes.as_code(look.anatomy, PROMPT), names)

    logits = names["logits"]
    log_probabilities = np.asarray(jax.nn.log_softmax(logits[0]))
    candidates = np.array(found["candidates"][-1])
    expected = np.take_along_axis(log_probabilities, candidates, -1)
    # In relation to the largest: float32 has seven digits, and these are some -17.
    tolerance = 2e-6 * abs(expected).max()
    np.testing.assert_allclose(found["log_probabilities"][-1], expected, rtol=0, atol=tolerance)
    difference = abs(logits - look.model(tokens)).max()
    if found["before"]:
        assert difference > 0.01
    else:
        assert difference == 0


@pytest.mark.parametrize("name", CHANGES)
def test_the_numbers_of_a_change_are_what_its_code_computes(look, name):
    check_code(look, CHANGES[name])
    found = numbers_of(look, CHANGES[name])
    assert (name == "nothing") == (found["before"] is None)
    if found["before"]:
        log = jax.nn.log_softmax(look.model(tokens_of(PROMPT))[0])
        np.testing.assert_allclose(
            found["before"]["next_log_probabilities"],
            log[jnp.arange(6), tokens_of(PROMPT)[0, 1:]],
            rtol=0,
            atol=2e-5,
        )


@pytest.mark.slow
def test_a_model_of_one_s_own_is_drawn_and_changed_where_its_trace_allows(tmp_path):
    path = tmp_path / "own.py"
    template = Path(commands.__file__).with_name("new_gpt.py.txt")
    path.write_bytes(template.read_bytes())
    make = load_code(f"{path}:GPT")
    config_class = sys.modules[make.__module__].Config
    config = config_class(vocab_size=17, block_size=16, embed_dim=12, num_heads=3, num_layers=2)
    model = loud(make(config, rngs=nnx.Rngs(0)))
    look = Look(model, TOKENIZER, "run")

    found = numbers_of(look)

    check_code(look, CHANGES["all"])
    assert look.anatomy.branches[1] == ("blocks.1.attention", "blocks.1.mlp")
    captured = jgpt.capture(model, "blocks.1.attention.weights")(tokens_of(PROMPT))
    (weights,) = captured["blocks.1.attention.weights"]
    below_diagonal = weights[:, *np.tril_indices(7)]
    attention = found["attention"][1]
    np.testing.assert_allclose(attention, below_diagonal, rtol=0, atol=1e-4)
    assert found["products"] is None
    assert "mlp" in [row["name"] for row in found["arrays"]]


def test_a_model_without_a_typed_call_has_its_next_token():
    model = Sums(SumsConfig(vocab_size=17, block_size=11, rank=3), rngs=nnx.Rngs(0))
    found = numbers_of(Look(model, TOKENIZER, "run"))

    assert (found["blocks"], found["layers"], found["attention"]) == ([], [], None)
    assert [row["name"] for row in found["arrays"]] == ["logits"]
    assert np.shape(found["candidates"]) == (1, 7, 10)


def test_typed_modules_of_a_model_whose_own_call_is_not_typed_are_drawn():
    class Untyped(nnx.Module):
        vocab_size = 17
        block_size = 11

        def __init__(self, model):
            self.inner = model

        def __call__(self, tokens):
            return 2 * self.inner(tokens) / 2

    model = random_gpt("nanogpt")
    found = numbers_of(Look(Untyped(model), TOKENIZER, "run"))
    expected = numbers_of(Look(model, TOKENIZER, "run"))

    np.testing.assert_array_equal(found["attention"], expected["attention"])
    np.testing.assert_allclose(
        found["log_probabilities"], expected["log_probabilities"], rtol=0, atol=1e-5
    )


def test_a_module_that_returns_a_tuple_is_neither_a_block_nor_a_branch():
    class Pair(nnx.Module):
        @contract.typed
        def __call__(
            self, x: Float[Array, "batch time width"]
        ) -> tuple[Float[Array, "batch time width"], Float[Array, "batch time width"]]:
            return x / 2, x / 4

    class PairBlock(nnx.Module):
        def __init__(self):
            self.pair = Pair()

        @contract.typed
        def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
            half, quarter = self.pair(x)
            return x + half + quarter

    class PairModel(nnx.Module):
        vocab_size = 17
        block_size = 11

        def __init__(self):
            self.blocks = nnx.List([PairBlock(), PairBlock()])
            self.pairs = nnx.List([Pair()])

        @contract.typed
        def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time 17"]:
            x = jax.nn.one_hot(tokens, 17)
            for block in self.blocks:
                x = block(x)
            first, _ = self.pairs[0](x)
            return first

    anatomy = Look(PairModel(), TOKENIZER, "run").anatomy

    assert anatomy.blocks == ("blocks.0", "blocks.1")
    assert anatomy.branches == ((), ())


def test_a_block_switched_off_is_left_out(look):
    found = numbers_of(look, Changes(blocks={1: 0}))
    *_, block = (row for row in found["arrays"] if row["path"] == "blocks.1")
    states = look.model.hidden_states(tokens_of(PROMPT))

    np.testing.assert_allclose(by_batch(block), states[1], rtol=0, atol=1e-3)


def test_attention_follows_a_change_of_an_earlier_block(look):
    plain = numbers_of(look)["attention"]
    off = numbers_of(look, Changes(heads={(0, 1): 0}))["attention"]

    np.testing.assert_array_equal(plain[0], off[0])
    assert abs(plain[1] - off[1]).max() > 0.001
