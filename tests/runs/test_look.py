"""The page of `jgpt look`: its numbers are the forward pass's, and a browser shows them."""

import base64
import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt import CharTokenizer, fit, generate
from jgpt.nn.models import abstract_model
from jgpt.pictures import numbers
from jgpt.pictures import page as html
from jgpt.pictures.page import look_page
from jgpt.words import counted
from tests.browser import CHROMIUM, Page
from tests.commands import refused, worked
from tests.models import config_of, loud, random_gpt
from tests.quick import only
from tests.runs.test_plots import CONFIGS

TOKENIZER = CharTokenizer("\n !/<>abceiprst\u20ac\U0001f642")  # seventeen characters
PROMPT = "script\u20ac\U0001f642\n<"


def page_of(path: Path, model, prompt: str = PROMPT, new: int = 0) -> dict:
    """The data of a page, as a reader finds it there."""
    path.write_text(look_page(model, TOKENIZER, prompt, new, "run"), encoding="utf-8")
    return data_of(path)


def data_of(path: Path) -> dict:
    text = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
    data = json.loads(found)
    lists = ("candidates", "next_ranks", "log_probabilities", "next_log_probabilities")
    attention = data["attention"] and unpacked(data["attention"])
    return data | {name: np.array(data[name]) for name in lists} | {"attention": attention}


def unpacked(array: dict) -> np.ndarray:
    """What the page reads of an array: steps between the least and the largest value."""
    dtype = {1: "u1", 2: "<u2"}[array["bytes"]]
    steps = np.frombuffer(base64.b64decode(array["data"]), dtype).reshape(array["shape"])
    return array["low"] + (array["high"] - array["low"]) / np.iinfo(dtype).max * steps


def by_batch(row: dict) -> np.ndarray:
    """An array of the forward pass, which is sent by token."""
    values = np.moveaxis(unpacked(row["values"]), 0, 1)
    assert tuple(row["sizes"]) == values.shape
    return values


@pytest.mark.parametrize("name", only(["default preset"], ["gpt2", "modern", "default preset"]))
def test_the_page_s_numbers_are_the_forward_pass_s(name, tmp_path):
    model = random_gpt("nanogpt", **vars(CONFIGS[name]))
    data = page_of(tmp_path / "look.html", model)
    tokens = TOKENIZER.encode(PROMPT)
    assert data["tokens"] == tokens.tolist()
    assert [data["texts"][str(token)] for token in data["tokens"]] == list(PROMPT)
    batch = jnp.asarray(tokens)[None]
    weights = np.asarray(model.attention_weights(batch)[:, 0])
    below = weights[..., *np.tril_indices(len(tokens))]
    np.testing.assert_allclose(data["attention"], below, rtol=0, atol=0.5 / 65535 + 1e-6)
    assert abs(data["attention"] - below[:, ::-1]).max() > 0.01  # heads differ

    predicted = np.asarray(jax.nn.softmax(model(batch)[0]))
    following = predicted[np.arange(len(tokens) - 1), tokens[1:]]
    found = np.exp(data["next_log_probabilities"])
    # the page's program is compiled as a whole, for more tokens: it rounds differently
    np.testing.assert_allclose(found[-1], following, rtol=0, atol=1e-5)
    assert abs(found[-2] - following).max() > 0.01  # the last block changes them
    ranks = 1 + (predicted[:-1] > following[:, None]).sum(-1)
    np.testing.assert_array_equal(data["next_ranks"][-1], ranks)


def test_the_logit_lens_is_a_model_of_fewer_blocks(tmp_path):
    model = random_gpt("nanogpt")
    data = page_of(tmp_path / "look.html", model)
    for depth in range(3):
        x = model.embed(jnp.asarray(data["tokens"])[None])
        for block in model.blocks[:depth]:
            x = block(x)
        expected = np.asarray(jax.nn.log_softmax(model.logits(model.final_norm(x))[0]))
        order = np.argsort(-expected, axis=-1, kind="stable")[:, :10]
        np.testing.assert_array_equal(data["candidates"][depth], order)
        expected = np.take_along_axis(expected, order, -1)
        np.testing.assert_allclose(data["log_probabilities"][depth], expected, rtol=0, atol=1e-5)


def test_a_prompt_is_continued_as_generate_does_within_the_block(tmp_path):
    model = random_gpt("nanogpt", block_size=13)
    data = page_of(tmp_path / "look.html", model, new=48)
    prompt = jnp.asarray(TOKENIZER.encode(PROMPT))[None]
    expected = generate(model, prompt, 3, key=jax.random.key(1337))

    assert data["tokens"] == expected[0].tolist()
    assert data["prompt"] == 10
    assert page_of(tmp_path / "look.html", model, new=2)["tokens"] == data["tokens"][:12]


def test_the_arrays_of_the_forward_pass_are_on_the_page(tmp_path):
    model = random_gpt("modern")
    data = page_of(tmp_path / "look.html", model)
    tokens = jnp.asarray(TOKENIZER.encode(PROMPT))[None]
    arrays = {(row["path"], row["name"]): row for row in data["arrays"]}
    found = jgpt.capture(model, "blocks.1.attention", "blocks.0.attention.merge_heads")(tokens)
    for path, name in (
        ("blocks.1.attention", "attention"),
        ("blocks.0.attention.merge_heads", "merge_heads"),
    ):
        row = arrays[path, name]
        values = by_batch(row)
        np.testing.assert_allclose(values, found[path], rtol=0, atol=1e-3 * abs(values).max())
        assert row["dimensions"][:2] == ["batch", "time"]
    logits = by_batch(arrays["", "logits"])
    np.testing.assert_allclose(logits, model(tokens), rtol=0, atol=1e-3 * abs(logits).max())
    assert abs(logits[0, 0] - logits[0, 1]).max() > 0.01
    # the stream between attention and the feed-forward network is an argument only
    between = by_batch(arrays["blocks.0.feed_forward_norm", "feed_forward_norm(x)"])
    states = model.hidden_states(tokens)
    attended = jgpt.capture(model, "blocks.0.attention")(tokens)["blocks.0.attention"]
    np.testing.assert_allclose(
        between, states[0] + attended, rtol=0, atol=1e-3 * abs(between).max()
    )
    # each array once, parameters not at all
    shown = [json.dumps(row["values"]) for row in data["arrays"]]
    assert len(set(shown)) == len(shown)
    assert not [row for row in data["arrays"] if "table" in row["name"]]


def test_the_product_of_query_and_key_gives_the_weight(tmp_path):
    model = random_gpt("modern", num_layers=2)
    data = page_of(tmp_path / "look.html", model)
    query, key = (unpacked(data["products"][name]) for name in ("query", "key"))
    scores = data["products"]["scale"] * np.einsum("lhqd,lhkd->lhqk", query, key)
    time = len(data["tokens"])
    scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
    if data["window"]:
        scores = np.where(~np.tri(time, k=-data["window"], dtype=bool), scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = model.attention_weights(jnp.asarray(data["tokens"])[None])[:, 0]

    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-3)


def test_the_largest_page_has_six_megabytes(tmp_path):
    config = config_of("nanogpt", block_size=200, num_layers=12, num_heads=12, embed_dim=24)
    model = loud(abstract_model(config), size=0.1)  # no weight is 0 or 1, which take less room
    data = page_of(tmp_path / "look.html", model, "a", new=199)

    assert data["attention"].shape == (12, 12, 200 * 201 / 2)
    assert data["products"] is None
    assert {row["values"] for row in data["arrays"]} == {None}
    assert (tmp_path / "look.html").stat().st_size < 6_000_000


def test_no_text_ends_the_script_that_holds_it(tmp_path):
    text = "</script><script>alert(1)</script><!--<script>{{data}}{{style}}{{script}}\u2028\ud800é"
    tokenizer = CharTokenizer.from_text(text)
    path = tmp_path / "look.html"
    model = random_gpt("nanogpt", vocab_size=tokenizer.vocab_size, block_size=len(text))
    page = look_page(model, tokenizer, text, 0, text)
    path.write_text(page, encoding="utf-8")
    data = data_of(path)
    assert data["name"] == text
    assert "".join(data["texts"][str(token)] for token in data["tokens"]) == text
    empty = html.page_of({})
    for marker in ("<script", "</script", "<!--"):
        assert page.count(marker) == empty.count(marker)


def test_the_page_may_ask_no_host_for_anything():
    page = html.page_of({})
    assert "default-src 'none'" in page
    assert not re.search(
        r"https?:|//\w+\.|@import|url\(|<link (?!rel=\"icon\" href=\"data:,\")", page
    )


@pytest.fixture(scope="module")
def run(trained) -> Path:
    return trained.directory


def test_a_bigram_model_reads_one_token(small_run, tmp_path):
    model = dataclasses.replace(small_run.model, architecture="bigram")
    config = dataclasses.replace(small_run, model=model, steps=1, out=str(tmp_path / "bigram"))
    fit(config)
    said = refused("look", tmp_path / "bigram", "--prompt", "So", cwd=tmp_path)
    assert said == "jgpt: the prompt has 2 tokens, more than block_size=1"
    worked("look", tmp_path / "bigram", "--prompt", "S", cwd=tmp_path)
    table = data_of(tmp_path / "look.html")
    assert (table["layers"], table["blocks"], table["attention"]) == ([], [], None)
    assert [row["name"] for row in table["arrays"]] == ["logits"]


def test_a_page_holds_just_so_many_weights(tmp_path, monkeypatch):
    model = random_gpt("nanogpt")
    most = 2 * 3 * 11**2 // 2
    monkeypatch.setattr("jgpt.pictures.numbers.MOST_WEIGHTS", most)
    page_of(tmp_path / "look.html", model, "a" * 11)
    monkeypatch.setattr("jgpt.pictures.numbers.MOST_WEIGHTS", most - 1)

    with pytest.raises(ValueError, match="11 tokens are too many for a page: 2 layers, 3"):
        page_of(tmp_path / "look.html", model, "a" * 11)


# In a browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to open it in")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page of two layers, three heads and eleven tokens, and its data."""
    path = tmp_path_factory.mktemp("page") / "look.html"
    return path, page_of(path, random_gpt("nanogpt"), new=1)


@pytest.fixture
def shown(page: Page, written):
    path, data = written
    page.errors.clear()
    page.requests.clear()
    page.open(path)
    yield page, data
    assert page.errors == []
    assert page.requests == [path.as_uri()]


def middle_of(page: Page, element: str) -> tuple[float, float]:
    """Where the middle of an element is, which is brought into sight."""
    box = f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
    box += "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
    left, top, width, height = page.run(box)
    return left + width / 2, top + height / 2


def cell_of(page: Page, query: int, key: int) -> tuple[float, float]:
    """Where a cell of the attention map is."""
    middle_of(page, "map.canvas")
    left, top, width, time = page.run(
        "(b => [b.left, b.top, b.width, time])(map.canvas.getBoundingClientRect())"
    )
    assert width > 4 * time
    return left + (key + 0.5) * width / time, top + (query + 0.5) * width / time


def tip(page: Page) -> str:
    return page.run("$('tip').textContent")


def weight(data: dict, layer: int, head: int, query: int, key: int) -> str:
    return f"{data['attention'][layer, head, query * (query + 1) // 2 + key]:.4f}"


@needs_chromium
def test_hovering_the_map_tells_the_weight(shown):
    page, data = shown
    page.click(*middle_of(page, "headButtons[1 * heads + 2]"))
    page.mouse("mouseMoved", *cell_of(page, 7, 3))
    assert tip(page) == f"“🙂” (7) → “i” (3)\nweight {weight(data, 1, 2, 7, 3)}"
    page.mouse("mouseMoved", *cell_of(page, 3, 7))
    assert "can't be attended to" in tip(page)
    page.mouse("mouseMoved", 2, 2)
    assert tip(page) == ""
    assert weight(data, 1, 2, 7, 3) != weight(data, 0, 0, 7, 3)  # of the head that was chosen


@needs_chromium
def test_hovering_arcs_tells_the_weight_from_the_chosen_query(shown):
    page, data = shown
    page.click(*middle_of(page, "textSpans[9]"))
    assert page.run("$('picked').textContent").startswith("< at position 9, of the prompt: ")
    place = middle_of(page, "$('arc-names').children[4]")
    page.mouse("mouseMoved", *place)
    assert tip(page) == f"“<” (9) → “p” (4)\nweight {weight(data, 0, 0, 9, 4)}"
    page.click(*place)
    assert page.run("chosen.query") == 4


@needs_chromium
def test_hovering_the_text_and_the_lens_tells_probabilities(shown):
    page, data = shown
    page.mouse("mouseMoved", *middle_of(page, "textSpans[5]"))
    log = data["next_log_probabilities"][-1, 4]
    assert f"“t” (5): {-log / math.log(2):.2f} bits" in tip(page)
    assert f"rank {data['next_ranks'][-1, 4]} of 17" in tip(page)
    page.mouse("mouseMoved", *middle_of(page, "lens.cells[1][6]"))
    first, *_ = np.exp(data["log_probabilities"][1, 6])
    assert tip(page).startswith("layer 0, after “€” (6)\n")
    assert f"” {first:.4f}\n" in tip(page)
    page.click(*middle_of(page, "lens.cells[1][6]"))
    assert page.run("$('bars-title').textContent") == "After “€” (6), read at: layer 0"
    number = page.run("document.querySelector('#bars span:last-child').textContent")
    assert number == f"{first:.4f}"


@needs_chromium
def test_keys_move_what_is_chosen(shown):
    page, data = shown
    page.run("choose({ query: 5, key: 2 })")
    page.press("ArrowRight")  # scrolls, since no picture has the focus
    assert page.run("[chosen.query, chosen.key]") == [5, 2]
    page.run("$('text').focus()")
    page.press("ArrowRight")
    assert page.run("[chosen.query, chosen.key]") == [6, 6]
    page.run("map.canvas.focus()")
    for key in ("ArrowDown", "ArrowLeft"):
        page.press(key)
    assert page.run("[chosen.query, chosen.key]") == [7, 5]
    assert tip(page) == f"“🙂” (7) → “t” (5)\nweight {weight(data, 0, 0, 7, 5)}"
    page.click(*middle_of(page, "headButtons[1 * heads + 2]"))
    for keys, head in ((("ArrowUp", "ArrowLeft"), [0, 1]), (("ArrowDown", "ArrowDown"), [1, 1])):
        for key in keys:
            page.press(key)
        assert page.run("[chosen.layer, chosen.head]") == head
        assert page.run("headButtons.findIndex(each => each.checked)") == 3 * head[0] + head[1]
    assert page.run("document.activeElement.getAttribute('aria-label')") == "layer 1, head 1"
    page.run("lens.grid.focus()")
    page.press("ArrowUp")
    assert page.run("[chosen.depth, chosen.query]") == [1, 7]


@needs_chromium
def test_a_finger_chooses_and_is_told(shown, written):
    page, data = shown
    page.open(written[0], 390)
    page.requests.pop()
    page.tap(*cell_of(page, 8, 2))
    assert page.run("[chosen.query, chosen.key]") == [8, 2]
    assert tip(page) == f"“⏎” (8) → “r” (2)\nweight {weight(data, 0, 0, 8, 2)}"
    page.tap(*middle_of(page, "textSpans[3]"))
    assert page.run("chosen.query") == 3


@needs_chromium
def test_a_single_token_can_be_looked_at(page, tmp_path):
    page_of(tmp_path / "look.html", random_gpt("nanogpt"), "a")
    page.errors.clear()
    page.open(tmp_path / "look.html")

    assert page.errors == []
    assert "nothing comes before it" in page.run("$('picked').textContent")


@needs_chromium
def test_256_tokens_are_drawn_within_frames(page, tmp_path):
    """The least of thirty times, which what else the machine does hardly changes."""
    model = random_gpt("nanogpt", block_size=256, num_layers=4, num_heads=4, embed_dim=32)
    page_of(tmp_path / "look.html", model, "script" * 42)
    page.errors.clear()
    page.open(tmp_path / "look.html")
    least = """(act => Math.min(...Array.from({ length: 30 }, (_, i) => {
        const began = performance.now();
        act(i);
        document.body.offsetHeight;  // with its layout
        return performance.now() - began;
    })))"""
    assert page.run(f"{least}(i => choose(goTo(100 + 3 * i)))") < 40  # 5 when this was written
    assert page.run("chosen.query") == 187
    assert page.run(f"{least}(() => show({{ ...data }}))") < 250  # 30
    page.run("data.candidates[4][7][0] = (tokens[8] + 1) % 17; show({ ...data })")
    drawn = page.run("[lens.cells[4][7].textContent, visible((tokens[8] + 1) % 17)]")
    assert drawn[0] == drawn[1]
    assert page.run("lens.cells[4].length") == 252
    assert page.errors == []


@needs_chromium
def test_an_error_of_a_page_is_noticed(page, tmp_path):
    (tmp_path / "bad.html").write_text("<script>console.log(1); missing()</script><img src=no.png>")
    page.errors.clear()
    page.requests.clear()
    page.open(tmp_path / "bad.html")
    assert any("missing is not defined" in error for error in page.errors)
    assert page.requests[-1].endswith("no.png")
    page.errors.clear()


def test_the_command_writes_a_page(run, tmp_path):
    said = worked("look", run, "--prompt", "So", "--max-new-tokens", 4, cwd=tmp_path)
    assert said == "wrote look.html\n"
    data = data_of(tmp_path / "look.html")
    assert (data["name"], data["prompt"], len(data["tokens"])) == (run.name, 2, 6)


def test_a_page_samples_as_much_as_it_has_room_for_unless_told(monkeypatch):
    """The default of 48 tokens is no reason to refuse a page: two layers of three heads here."""
    model = random_gpt("nanogpt", block_size=64)
    asked = []

    def canned(model, tokens, count, **_):
        asked.append(count)
        return tokens

    monkeypatch.setattr(html, "generate", canned)
    monkeypatch.setattr(numbers.Look, "__call__", lambda self, tokens, prompt: {})
    for most_tokens, sampled in ((1000, [48]), (60, [48]), (20, [15]), (5, []), (3, [])):
        monkeypatch.setattr(numbers, "MOST_WEIGHTS", 2 * 3 * most_tokens**2 // 2)
        asked.clear()
        look_page(model, TOKENIZER, "a" * 5, None, "run")
        assert asked == sampled
    look_page(random_gpt("nanogpt", block_size=11), TOKENIZER, "a" * 5, 48, "run")

    assert asked == [6]  # as far as the block goes
    with pytest.raises(ValueError, match="max_new_tokens=-1 must be 0 or more"):
        look_page(model, TOKENIZER, "a" * 5, -1, "run")


def test_a_single_token_is_counted_as_one():
    model = random_gpt("nanogpt", num_layers=1)
    page = numbers.Look(model, TOKENIZER, "run")

    with pytest.raises(ValueError, match="the other prompt has 1 token and this one 3: a patch"):
        page([1, 2, 3], 3, numbers.Changes(patch=(0, 0, "a")))
    assert [counted(number, "token") for number in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
