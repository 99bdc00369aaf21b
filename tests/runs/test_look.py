"""The page of `jgpt look`: its numbers are the forward pass's, and a browser shows them."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jgpt
from jgpt import CharTokenizer
from jgpt.page import html
from jgpt.page.numbers import Look
from tests.browser import Page
from tests.commands import worked
from tests.models import compiled, random_gpt
from tests.page.records import record_of
from tests.runs.test_plots import CONFIGS

TOKENIZER = CharTokenizer("\n !/<>abceiprst\u20ac\U0001f642")  # seventeen characters
PROMPT = "script\u20ac\U0001f642\n<"


def record(model, prompt: str = PROMPT) -> dict:
    return record_of(Look(model, TOKENIZER, "run"), TOKENIZER.encode(prompt).tolist())


def json_of(path: Path) -> dict:
    """The data of a page, as a reader finds it there."""
    text = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
    return json.loads(found)


def by_batch(row: dict) -> np.ndarray:
    """An array of the forward pass, which is there by token."""
    values = np.moveaxis(row["values"], 0, 1)
    assert tuple(row["sizes"]) == values.shape
    return values


def batch_of(data: dict) -> jax.Array:
    """The tokens of a record as the model's input."""
    return jnp.asarray(data["tokens"])[None]


def assert_close(found, expected, relative: float) -> None:
    """Within a part of the largest number."""
    tolerance = relative * abs(np.asarray(found)).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_the_page_s_numbers_are_the_forward_pass_s():
    model = random_gpt("nanogpt", **vars(CONFIGS["modern"]))
    tokens = TOKENIZER.encode(PROMPT)

    data = record(model)

    batch = batch_of(data)
    weights = np.asarray(compiled(model.attention_weights, batch)[:, 0])
    below_diagonal = weights[..., *np.tril_indices(len(tokens))]
    np.testing.assert_allclose(data["attention"], below_diagonal, rtol=0, atol=1e-6)
    other_heads = below_diagonal[:, ::-1]
    assert abs(data["attention"] - other_heads).max() > 0.01

    logits = compiled(model, batch)[0]
    probabilities = np.asarray(jax.nn.softmax(logits))[:-1]
    positions = np.arange(len(tokens) - 1)
    of_next = probabilities[positions, tokens[1:]]
    *_, before_last_block, after_last_block = np.exp(data["next_log_probabilities"])
    # the page's program is for more tokens: it rounds differently
    np.testing.assert_allclose(after_last_block, of_next, rtol=0, atol=1e-5)
    assert abs(before_last_block - of_next).max() > 0.01  # the last block changes them
    likelier = probabilities > of_next[:, None]
    ranks = 1 + likelier.sum(-1)
    np.testing.assert_array_equal(data["next_ranks"][-1], ranks)


def test_the_arrays_of_the_forward_pass_are_on_the_page():
    model = random_gpt("modern")
    captured = jgpt.capture(
        model, "blocks.0.attention", "blocks.1.attention", "blocks.0.attention.merge_heads"
    )

    def forward(tokens):
        return captured(tokens), model(tokens), model.hidden_states(tokens)

    data = record(model)

    found, expected_logits, states = compiled(forward, batch_of(data))
    arrays = {(row["path"], row["name"]): row for row in data["arrays"]}
    for path, name in (
        ("blocks.1.attention", "attention"),
        ("blocks.0.attention.merge_heads", "merge_heads"),
    ):
        row = arrays[path, name]
        assert_close(by_batch(row), found[path], 1e-5)  # the page's program rounds differently
        assert row["dimensions"][:2] == ["batch", "time"]
    logits = by_batch(arrays["", "logits"])
    assert_close(logits, expected_logits, 1e-5)
    assert abs(logits[0, 0] - logits[0, 1]).max() > 0.01
    # the stream between attention and the feed-forward network is an argument only
    between = by_batch(arrays["blocks.0.feed_forward_norm", "feed_forward_norm(x)"])
    assert_close(between, states[0] + found["blocks.0.attention"], 1e-5)
    # each array once, parameters not at all
    shown = [(row["values"].shape, row["values"].tobytes()) for row in data["arrays"]]
    assert len(set(shown)) == len(shown)
    for row in data["arrays"]:
        assert "table" not in row["name"]


def test_no_text_ends_the_script_that_holds_it(tmp_path):
    text = "</script><script>alert(1)</script><!--<script>{{data}}{{style}}\u2028\ud800é"
    path = tmp_path / "look.html"
    page = html.page_of({"text": text})
    path.write_text(page, encoding="utf-8")

    assert json_of(path) == {"text": text}
    for marker in ("<script", "</script", "<!--"):
        assert page.count(marker) == html.page_of({}).count(marker)


def test_the_page_may_ask_no_host_for_anything():
    addresses = r"https?:|//\w+\."
    style = r"@import|url\("
    link = r'<link (?!rel="icon" href="data:,")'  # other than the empty icon

    page = html.page_of({})

    assert "default-src 'none'" in page
    assert not re.search(f"{addresses}|{style}|{link}", page)


def middle_of(page: Page, element: str) -> tuple[float, float]:
    """Where the middle of an element is, which is brought into sight."""
    box = f"""(() => {{
        const element = {element};
        element.scrollIntoView({{ block: 'center' }});
        const box = element.getBoundingClientRect();
        return [box.left, box.top, box.width, box.height];
    }})()"""
    left, top, width, height = page.run(box)
    return left + width / 2, top + height / 2


def cell_of(page: Page, query: int, key: int) -> tuple[float, float]:
    """Where a cell of the attention map is."""
    middle_of(page, "map.canvas")  # brings it into sight
    left, top, width, time = page.run(
        "(b => [b.left, b.top, b.width, time])(map.canvas.getBoundingClientRect())"
    )
    assert width > 4 * time
    cell = width / time
    return left + (key + 0.5) * cell, top + (query + 0.5) * cell


def test_the_command_writes_a_page_that_computes(trained, tmp_path):
    said = worked("look", trained.path, "--prompt", "So", "--max-new-tokens", 4, cwd=tmp_path)

    assert re.fullmatch(
        r"wrote look\.html, [\d.]+ [KM]iB: the model is in it; open it in a browser\n", said
    )
    data = json_of(tmp_path / "look.html")
    assert data["name"] == trained.path.name
    assert data["text"].startswith("So")
    assert len(data["text"]) == 2 + 4
    assert data["prompt"] == 2
    assert data["worker"]
