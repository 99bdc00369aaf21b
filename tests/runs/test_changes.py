"""Changes inside a forward pass: their numbers are what their code in Python computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.page.numbers import Look
from tests.models import random_gpt
from tests.page.records import Changes, record_of
from tests.runs.test_look import TOKENIZER
from tests.runs.test_own import Sums, SumsConfig

PROMPT, OTHER = "script€", "crespas"
CHANGES = {
    "nothing": Changes(),
    "all": Changes(heads={(1, 0): 2}, blocks={0: 0.25}, patch=(1, 6, OTHER)),
}


@pytest.fixture(scope="module")
def look():
    return Look(random_gpt("modern"), TOKENIZER, "run")


def tokens_of(text: str):
    return jnp.asarray(TOKENIZER.encode(text))[None]


def numbers_of(look: Look, changes: Changes = CHANGES["nothing"]) -> dict[str, Any]:
    return record_of(look, TOKENIZER.encode(PROMPT).tolist(), changes=changes)


@pytest.mark.parametrize("name", CHANGES)
def test_the_numbers_of_a_change_are_what_its_code_computes(look, name):
    changes = CHANGES[name]
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
    assert (name == "nothing") == (found["before"] is None)
    if found["before"]:
        log = jax.nn.log_softmax(look.model(tokens_of(PROMPT))[0])
        np.testing.assert_allclose(
            found["before"]["next_log_probabilities"],
            log[jnp.arange(6), tokens_of(PROMPT)[0, 1:]],
            rtol=0,
            atol=2e-5,
        )


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
