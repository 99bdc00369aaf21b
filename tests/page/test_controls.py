"""The controls of the page, as a reader uses them in a real browser."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jgpt.page.html import model_page
from tests.browser import CHROMIUM, Page, shared_browser
from tests.page.records import Changes, record_of
from tests.page.test_page import STARTED, said
from tests.page.test_program import TOKENIZER, look_of
from tests.runs.test_look import cell_of, middle_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

PROMPT = "tractab"
SETTLED = "(async () => { while (asking) await asking })()"


@pytest.fixture(scope="module")
def look():
    return look_of("default preset")


@pytest.fixture(scope="module")
def path(look, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(model_page(look.model, TOKENIZER, "run", PROMPT))
    return path


@pytest.fixture(scope="module")
def chromium():
    return shared_browser()


@pytest.fixture
def opened(chromium, path) -> Iterator[Page]:
    open_page(chromium, path)
    yield chromium
    assert chromium.errors == []


def open_page(page: Page, path: Any, *how: Any) -> None:
    page.open("about:blank")
    page.errors.clear()
    page.open(path, *how)
    page.run(STARTED)


def test_three_questions_are_answered_by_clicking(opened, look):
    """Which letters made this prediction; what happens without a head; what gives a weight."""
    tokens = TOKENIZER.encode(PROMPT).tolist()
    data = record_of(look, tokens)
    weights = data["attention"][1, 2, 15:21]  # row by row, up to the diagonal
    queries = data["products"]["query"][1, 2]
    keys = data["products"]["key"][1, 2]
    without_head = record_of(look, tokens, changes=Changes(heads={(1, 2): 0}))
    loss = mean_loss(data)
    loss_without_head = mean_loss(without_head)

    opened.click(*middle_of(opened, "textSpans[5]"))
    opened.click(*middle_of(opened, "headButtons[1 * heads + 2]"))
    row = [opened.run(f"weight(1, 2, 5, {key})") for key in range(6)]
    assert row == pytest.approx(weights, abs=1e-4)

    largest = int(np.argmax(row))
    opened.click(*cell_of(opened, 5, largest))
    told = said(opened, "arithmetic")
    match = re.match(r"query · key = (-?[\d.]+); scaled by .*\s(\S+)$", told, re.DOTALL)
    assert match is not None, told
    product = float(match[1])
    weight = float(match[2])
    assert product == pytest.approx(queries[5] @ keys[largest], abs=2e-3)
    assert abs(weight - row[largest]) < 1e-3

    opened.click(*middle_of(opened, "document.querySelector('[name=\"1.2\"]')"))
    opened.run(SETTLED)
    difference = loss_without_head - loss
    effect = said(opened, "effect")
    assert (
        f"{loss:.3f} nats per token before, {loss_without_head:.3f} now ({difference:+.3f})"
        in effect
    )
    assert "jgpt.edit" in said(opened, "code")

    opened.click(*middle_of(opened, "$('reset')"))
    opened.run(SETTLED)
    assert opened.run("data.before") is None

    switched = []
    for _ in range(2):  # off and on again, of which nothing stays in the link
        opened.click(*middle_of(opened, "document.querySelector('[name=\"1.2\"]')"))
        opened.run(SETTLED)
        switched.append(opened.run("state.heads"))
    assert switched == [{"1.2": 0}, {}]


def mean_loss(data):
    return -np.mean(data["next_log_probabilities"][-1])


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_a_page_fits_a_phone_and_a_screen_in_light_and_dark(chromium, path, width, scheme):
    open_page(chromium, path, width, scheme)
    assert chromium.run("document.documentElement.scrollWidth") <= width
    paper = chromium.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 384) == (scheme == "dark")
    assert len(chromium.screenshot()) > 100_000  # a page of empty boxes has 30 to 60 kB
    if width == 390:  # a finger hits each token
        boxes = "textSpans.map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
        assert np.min(chromium.run(boxes)) >= 24
    assert chromium.errors == []
