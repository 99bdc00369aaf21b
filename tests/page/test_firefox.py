"""A page that holds its model, opened from disk in a real Firefox."""

import numpy as np
import pytest

from jgpt.page.html import model_page
from tests.firefox import FIREFOX, browser
from tests.page.test_page import RUNS_WEBASSEMBLY, STARTED
from tests.page.test_program import TOKENIZER, look_of


@pytest.mark.slow
@pytest.mark.skipif(FIREFOX is None, reason="Firefox is not installed")
def test_a_page_computes_what_is_typed_in_firefox(tmp_path):
    look = look_of("default preset")
    path = tmp_path / "page.html"
    path.write_text(model_page(look.model, TOKENIZER, "x", "ca"))
    with browser() as page:
        page.open(path)
        page.run(STARTED)
        first = page.run("data.text")
        page.type("prompt", "bs")
        page.run("asking")
        text = page.run("data.text")
        found = page.run("data.log_probabilities.at(-1)")
        closeness = page.run("$('closeness').textContent")
        runs_webassembly = page.run(RUNS_WEBASSEMBLY)

    tokens = TOKENIZER.encode("cabs").tolist()
    expected = look.log_probabilities(tokens, look.weights)
    assert (first, text) == ("ca", "cabs")
    assert "computes every number here" in closeness
    assert runs_webassembly
    np.testing.assert_allclose(np.ravel(found), expected, atol=2e-5)
