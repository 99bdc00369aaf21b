"""The controls of the page, as a reader uses them in a real browser."""

import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.page.html import Page as ShownPage
from jgpt.page.html import model_page
from tests.browser import CHROMIUM, TWO_FRAMES, Page, shared_browser
from tests.page.records import Changes, record_of
from tests.page.test_page import STARTED, said
from tests.page.test_program import TOKENIZER, look_of
from tests.runs.test_look import cell_of, json_of, middle_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

PROMPT = "tractab"
SETTLED = "(async () => { while (asking) await asking })()"
UNNAMED = """
[...document.querySelectorAll('button, input, select, textarea')].filter(each =>
    !each.textContent.trim() && !each.getAttribute('aria-label') && !each.labels?.length
).map(each => each.id || each.outerHTML)
"""


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


def turn(page: Page, dial: str, value: float) -> None:
    """Change a dial as a reader does."""
    page.run(f"$('{dial}').value = {value}; $('{dial}').dispatchEvent(new Event('input'))")
    assert page.run(f"$('{dial}').nextElementSibling.textContent") == f"{value:g}"


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


def test_dials_shape_the_distribution_as_sampling_does(opened, look):
    dials = {"temperature": 0.5, "top-k": 5, "top-p": 0.9, "min-p": 0.05}
    tokens = jnp.asarray(TOKENIZER.encode(PROMPT))[None]
    logits = np.asarray(look.model(tokens)[0, -1])
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order] / 0.5
    p = np.exp(scaled - scaled.max())
    p[5:] = 0
    mass_before = (np.cumsum(p) - p) / p.sum()
    p[mass_before >= 0.9] = 0
    p[p < 0.05] = 0  # the likeliest has 1
    expected = (p / p.sum())[p > 0]

    for dial, value in dials.items():
        turn(opened, dial, value)
    found = opened.run("distribution(layers, time - 1).map(each => each.probability)")

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert opened.run("distribution(layers, time - 1)[0].token") == order[0]
    assert opened.run("document.querySelectorAll('#bars .bar').length") == len(expected)

    turn(opened, "temperature", 0)
    assert opened.run("distribution(layers, time - 1).map(each => each.probability)") == [1]


def test_controls_work_by_keyboard_and_have_names(opened):
    assert opened.run(UNNAMED) == []
    opened.run("$('prompt').focus()")
    order = []
    for _ in range(30):
        opened.press("Tab")
        order.append(opened.run("document.activeElement.id || document.activeElement.className"))
    assert order[:4] == ["sample", "write", "reset", "text"]
    assert "lens-grid" in order


@pytest.mark.parametrize("width", [240, 390])
def test_controls_fit_a_narrow_window(chromium, path, width):
    open_page(chromium, path, width)

    beyond = chromium.run(f"""[...document.querySelectorAll("#dials *, #patching *")]
        .filter(each => each.getBoundingClientRect().right > {width})
        .map(({{ tagName, id }}) => tagName + id)""")

    assert beyond == []


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


@pytest.mark.slow
def test_a_page_says_what_is_the_prompt_and_what_was_sampled(chromium, look, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(model_page(look.model, TOKENIZER, "run", "tra", max_new_tokens=4))
    open_page(chromium, path)

    assert json_of(path)["prompt"] == 3
    assert chromium.run("textSpans.map(each => each.classList.contains('prompt'))") == [
        *[True] * 3,
        *[False] * 4,
    ]
    assert "3 tokens of a prompt and 4 sampled" in said(chromium, "summary")
    chromium.run("change({ prompt: 'trac' })")
    assert "4 tokens of a prompt." not in said(chromium, "summary")
    assert said(chromium, "summary").endswith("; 4 tokens of a prompt")


@pytest.mark.slow
def test_a_page_in_a_notebook_computes(chromium, look, tmp_path):
    shown = jgpt.look(look.model, TOKENIZER, "tra")
    path = tmp_path / "notebook.html"
    # A notebook's frame lets no one look inside, so the page says itself what it has computed.
    report = """<script>
    const told = setInterval(() => {
      if (!data || !$("closeness").textContent) return;
      clearInterval(told);
      change({ prompt: "trac" }).then(() => parent.postMessage(data.text, "*"));
    }, 20);
    </script></body>"""
    page = ShownPage(shown.html.replace("</body>", report))
    chromium.errors.clear()
    heard = "heard = new Promise(done => addEventListener('message', each => done(each.data)))"
    path.write_text(f"<script>{heard}</script>{page._repr_html_()}")
    chromium.open(path)

    assert chromium.run("heard") == "trac"
    assert chromium.errors == []


# the heads whose switches are out of sight at the right, and how far a message leaves its section
OUT_OF_SIGHT = """
[...$("switches").querySelectorAll("[type=checkbox]")].filter(each =>
    each.getBoundingClientRect().right > innerWidth).map(each => each.name)
"""
MESSAGE_OVERHANG = """
$("said").scrollWidth - $("said").closest("section").clientWidth
"""


# whether the chosen weight is in the box of the map, and in the window; how tall the box is; and
# how far the names of the columns are from its top
CHOSEN_WEIGHT = """(() => {
    const box = $("map").getBoundingClientRect();
    const { left, top, right, bottom } = map.square.getBoundingClientRect();
    const x = (left + right) / 2;
    const y = (top + bottom) / 2;
    return [x > box.left && x < box.right, y > box.top && y < box.bottom, y < innerHeight,
        box.height, map.columns.getBoundingClientRect().top - box.top];
})()"""


def test_the_map_of_a_phone_shows_the_chosen_weight(chromium, tmp_path):
    config = jgpt.ModelConfig(
        vocab_size=TOKENIZER.vocab_size, block_size=110, num_layers=1, num_heads=1, embed_dim=2
    )
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    path = tmp_path / "look.html"
    path.write_text(model_page(model, TOKENIZER, "run", "tractab/be" * 11))
    open_page(chromium, path, 390)

    shown = []
    for query, key in ((109, 109), (109, 2), (3, 1)):
        chromium.run(f"choose({{ query: {query}, key: {key} }})")
        chromium.run("$('map-title').scrollIntoView()")
        chromium.run(TWO_FRAMES)
        shown.append(chromium.run(CHOSEN_WEIGHT))
    chromium.run("$('lens').scrollIntoView()")
    for position in (109, 50):
        chromium.run(f"choose(goTo({position}))")
        chromium.run(TWO_FRAMES)
    before = chromium.run(
        "lens.cells[1][47].getBoundingClientRect().left"
        " - lens.rows[0].name.getBoundingClientRect().right"
    )

    assert before > 0  # some of the tokens before the chosen one are in sight
    for across, down, in_window, height, names in shown:
        assert across
        assert down
        assert in_window
        assert height < 844  # of the window
        assert names == 0
    assert chromium.errors == []


@pytest.mark.slow
def test_a_phone_shows_all_heads_a_whole_message_and_the_answer_about_a_line(chromium, path):
    open_page(chromium, path, 360)
    chromium.run("$('changes').scrollIntoView()")
    chromium.run(TWO_FRAMES)
    out_of_sight = chromium.run(OUT_OF_SIGHT)
    chromium.run("[...$('questions').children].at(-1).onclick()")
    chromium.run(TWO_FRAMES)
    top = chromium.run("$('answer').getBoundingClientRect().top")
    chromium.run("say('a'.repeat(200), true)")
    overhang = chromium.run(MESSAGE_OVERHANG)

    assert out_of_sight == []
    assert 0 <= top < 100
    assert overhang <= 0
