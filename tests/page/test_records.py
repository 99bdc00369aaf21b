"""What a page computes of models that lack what it shows."""

import numpy as np
from flax import nnx

from jgpt.page.numbers import Look
from tests.page.records import record_of
from tests.runs.test_look import TOKENIZER
from tests.runs.test_own import Sums, SumsConfig


def test_a_model_without_a_typed_call_has_its_next_token():
    model = Sums(SumsConfig(vocab_size=17, block_size=11, rank=3), rngs=nnx.Rngs(0))
    found = record_of(Look(model, TOKENIZER, "run"), TOKENIZER.encode("script€").tolist())

    assert (found["blocks"], found["layers"], found["attention"]) == ([], [], None)
    assert [row["name"] for row in found["arrays"]] == ["logits"]
    assert np.shape(found["candidates"]) == (1, 7, 10)
