"""What a page computes of models that lack what it shows."""

from typing import Any

import numpy as np
from flax import nnx

from jgpt.page.numbers import Look
from tests.models import random_gpt
from tests.page.records import record_of
from tests.runs.test_look import TOKENIZER
from tests.runs.test_own import Sums, SumsConfig


def numbers_of(model: Any) -> dict[str, Any]:
    return record_of(Look(model, TOKENIZER, "run"), TOKENIZER.encode("script€").tolist())


def test_a_model_without_a_typed_call_has_its_next_token():
    model = Sums(SumsConfig(vocab_size=17, block_size=11, rank=3), rngs=nnx.Rngs(0))
    found = numbers_of(model)

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
    found = numbers_of(Untyped(model))
    expected = numbers_of(model)

    np.testing.assert_array_equal(found["attention"], expected["attention"])
    np.testing.assert_allclose(
        found["log_probabilities"], expected["log_probabilities"], rtol=0, atol=1e-5
    )
