"""The controls of the page, as a reader uses them in a real browser."""

import re

import numpy as np
import pytest

from tests.browser import CHROMIUM
from tests.page.records import Changes, record_of
from tests.page.test_page import opened, page_of, said
from tests.page.test_program import TOKENIZER, look_of
from tests.runs.test_look import cell_of, middle_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

PROMPT = "tractab"
SETTLED = "(async () => { while (asking) await asking })()"


@pytest.fixture(scope="module")
def look():
    return look_of("default preset")


@pytest.fixture(scope="module")
def html(look) -> str:
    return page_of(look, PROMPT)


@pytest.mark.slow
def test_three_questions_are_answered_by_clicking(look, html, tmp_path):
    """Which letters made this prediction; what happens without a head; what gives a weight."""
    tokens = TOKENIZER.encode(PROMPT).tolist()
    data = record_of(look, tokens)
    weights = data["attention"][1, 2, 15:21]  # row by row, up to the diagonal
    queries = data["products"]["query"][1, 2]
    keys = data["products"]["key"][1, 2]
    without_head = record_of(look, tokens, changes=Changes(heads={(1, 2): 0}))
    loss = mean_loss(data)
    loss_without_head = mean_loss(without_head)

    with opened(tmp_path / "page.html", html) as page:
        page.click(*middle_of(page, "textSpans[5]"))
        page.click(*middle_of(page, "headButtons[1 * heads + 2]"))
        row = [page.run(f"weight(1, 2, 5, {key})") for key in range(6)]
        assert row == pytest.approx(weights, abs=1e-4)

        largest = int(np.argmax(row))
        page.click(*cell_of(page, 5, largest))
        told = said(page, "arithmetic")
        match = re.match(r"query · key = (-?[\d.]+); scaled by .*\s(\S+)$", told, re.DOTALL)
        assert match is not None, told
        product = float(match[1])
        weight = float(match[2])
        assert product == pytest.approx(queries[5] @ keys[largest], abs=2e-3)
        assert abs(weight - row[largest]) < 1e-3

        page.click(*middle_of(page, "document.querySelector('[name=\"1.2\"]')"))
        page.run(SETTLED)
        difference = loss_without_head - loss
        effect = said(page, "effect")
        assert (
            f"{loss:.3f} nats per token before, {loss_without_head:.3f} now ({difference:+.3f})"
            in effect
        )
        assert "jgpt.edit" in said(page, "code")

        page.click(*middle_of(page, "$('reset')"))
        page.run(SETTLED)
        assert page.run("data.before") is None

        switched = []
        for _ in range(2):  # off and on again, of which nothing stays in the link
            page.click(*middle_of(page, "document.querySelector('[name=\"1.2\"]')"))
            page.run(SETTLED)
            switched.append(page.run("state.heads"))
        assert switched == [{"1.2": 0}, {}]
        assert page.errors == []


def mean_loss(data):
    return -np.mean(data["next_log_probabilities"][-1])


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_a_page_fits_a_phone_and_a_screen_in_light_and_dark(html, tmp_path, width, scheme):
    with opened(tmp_path / "page.html", html, width, scheme) as page:
        assert page.run("document.documentElement.scrollWidth") <= width
        paper = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 384) == (scheme == "dark")
        assert len(page.screenshot()) > 100_000  # a page of empty boxes has 30 to 60 kB
        if width == 390:  # a finger hits each token
            boxes = "textSpans.map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
            assert np.min(page.run(boxes)) >= 24
        assert page.errors == []
