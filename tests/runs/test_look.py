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
from tests.models import compiled, config_of, loud, random_gpt
from tests.quick import only
from tests.runs.test_plots import CONFIGS

TOKENIZER = CharTokenizer("\n !/<>abceiprst\u20ac\U0001f642")  # seventeen characters
PROMPT = "script\u20ac\U0001f642\n<"


def page_of(path: Path, model, prompt: str = PROMPT, new: int = 0) -> dict:
    """The data of a page, as a reader finds it there."""
    path.write_text(look_page(model, TOKENIZER, prompt, new, "run"), encoding="utf-8")
    return data_of(path)


def json_of(path: Path) -> dict:
    text = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
    return json.loads(found)


def data_of(path: Path) -> dict:
    data = json_of(path)
    for name in ("candidates", "next_ranks", "log_probabilities", "next_log_probabilities"):
        data[name] = np.array(data[name])
    if data["attention"]:  # a bigram model has none
        data["attention"] = unpacked(data["attention"])
    return data


def unpacked(array: dict) -> np.ndarray:
    """What the page reads of an array: steps between the least and the largest value."""
    dtype = {1: "u1", 2: "<u2"}[array["bytes"]]
    packed = base64.b64decode(array["data"])
    steps = np.frombuffer(packed, dtype).reshape(array["shape"])
    step_size = (array["high"] - array["low"]) / np.iinfo(dtype).max
    return array["low"] + step_size * steps


def by_batch(row: dict) -> np.ndarray:
    """An array of the forward pass, which is sent by token."""
    values = np.moveaxis(unpacked(row["values"]), 0, 1)
    assert tuple(row["sizes"]) == values.shape
    return values


def batch_of(data: dict) -> jax.Array:
    """The page's tokens as the model's input."""
    return jnp.asarray(data["tokens"])[None]


def assert_close(found, expected, relative: float) -> None:
    """Within a part of the largest number."""
    tolerance = relative * abs(np.asarray(found)).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", only(["modern"], ["gpt2", "modern", "default preset"]))
def test_the_page_s_numbers_are_the_forward_pass_s(name, tmp_path):
    model = random_gpt("nanogpt", **vars(CONFIGS[name]))
    tokens = TOKENIZER.encode(PROMPT)

    data = page_of(tmp_path / "look.html", model)

    assert data["tokens"] == tokens.tolist()
    texts = [data["texts"][str(token)] for token in data["tokens"]]
    assert texts == list(PROMPT)

    batch = batch_of(data)
    weights = np.asarray(compiled(model.attention_weights, batch)[:, 0])
    below_diagonal = weights[..., *np.tril_indices(len(tokens))]
    half_a_step = 0.5 / 65535
    tolerance = half_a_step + 1e-6
    np.testing.assert_allclose(data["attention"], below_diagonal, rtol=0, atol=tolerance)
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


def test_the_logit_lens_is_a_model_of_fewer_blocks(tmp_path):
    model = random_gpt("nanogpt")

    def log_probabilities_by_depth(tokens):
        found = []
        x = model.embed(tokens)
        for block in (None, *model.blocks):
            if block is not None:
                x = block(x)
            logits = model.logits(model.final_norm(x))
            found.append(jax.nn.log_softmax(logits[0]))
        return found

    data = page_of(tmp_path / "look.html", model)

    by_depth = compiled(log_probabilities_by_depth, batch_of(data))
    assert len(by_depth) == 3  # before the first block, and after each of two
    for depth, log_probabilities in enumerate(np.asarray(by_depth)):
        ten_likeliest = np.argsort(-log_probabilities, axis=-1, kind="stable")[:, :10]
        np.testing.assert_array_equal(data["candidates"][depth], ten_likeliest)
        expected = np.take_along_axis(log_probabilities, ten_likeliest, -1)
        found = data["log_probabilities"][depth]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_prompt_is_continued_as_generate_does_within_the_block(tmp_path):
    model = random_gpt("nanogpt", block_size=13)
    prompt = jnp.asarray(TOKENIZER.encode(PROMPT))[None]
    assert prompt.shape == (1, 10)  # which leaves room for three

    data = page_of(tmp_path / "look.html", model, new=48)
    shorter = page_of(tmp_path / "look.html", model, new=2)

    expected = generate(model, prompt, 3, key=jax.random.key(1337), temperature=1.0)
    assert data["tokens"] == expected[0].tolist()
    assert data["prompt"] == 10
    assert shorter["tokens"] == data["tokens"][:12]


def test_the_arrays_of_the_forward_pass_are_on_the_page(tmp_path):
    model = random_gpt("modern")
    captured = jgpt.capture(
        model,
        "blocks.0.attention",
        "blocks.1.attention",
        "blocks.0.attention.merge_heads",
    )

    def forward(tokens):
        return captured(tokens), model(tokens), model.hidden_states(tokens)

    data = page_of(tmp_path / "look.html", model)

    found, expected_logits, states = compiled(forward, batch_of(data))
    arrays = {(row["path"], row["name"]): row for row in data["arrays"]}
    for path, name in (
        ("blocks.1.attention", "attention"),
        ("blocks.0.attention.merge_heads", "merge_heads"),
    ):
        row = arrays[path, name]
        # a page has 16 bits between the least and the largest value, and its program rounds alone
        assert_close(by_batch(row), found[path], 1e-3)
        assert row["dimensions"][:2] == ["batch", "time"]
    logits = by_batch(arrays["", "logits"])
    assert_close(logits, expected_logits, 1e-3)
    assert abs(logits[0, 0] - logits[0, 1]).max() > 0.01
    # the stream between attention and the feed-forward network is an argument only
    between = by_batch(arrays["blocks.0.feed_forward_norm", "feed_forward_norm(x)"])
    assert_close(between, states[0] + found["blocks.0.attention"], 1e-3)
    # each array once, parameters not at all
    shown = [json.dumps(row["values"]) for row in data["arrays"]]
    assert len(set(shown)) == len(shown)
    for row in data["arrays"]:
        assert "table" not in row["name"]


def test_the_product_of_query_and_key_gives_the_weight(tmp_path):
    model = random_gpt("modern", num_layers=2)

    data = page_of(tmp_path / "look.html", model)

    query = unpacked(data["products"]["query"])
    key = unpacked(data["products"]["key"])
    scores = data["products"]["scale"] * np.einsum("lhqd,lhkd->lhqk", query, key)
    time = len(data["tokens"])
    visible = np.tri(time, dtype=bool)
    if data["window"]:
        before_window = np.tri(time, k=-data["window"], dtype=bool)
        visible = visible & ~before_window
    exponentials = np.exp(np.where(visible, scores, -np.inf))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    expected = compiled(model.attention_weights, batch_of(data))[:, 0]
    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_the_largest_page_has_six_megabytes(tmp_path):
    config = config_of("nanogpt", block_size=200, num_layers=12, num_heads=12, embed_dim=24)
    model = loud(abstract_model(config), size=0.1)  # no weight is 0 or 1, which take less room
    path = tmp_path / "look.html"
    prompt = "script" * 33 + "ab"

    data = page_of(path, model, prompt)

    pairs = 200 * 201 / 2
    assert data["attention"].shape == (12, 12, pairs)
    # what would be too large is left out
    assert data["products"] is None
    for row in data["arrays"]:
        assert row["values"] is None
    assert data["arrays"]
    assert path.stat().st_size < 6_000_000


def test_no_text_ends_the_script_that_holds_it(tmp_path):
    text = "</script><script>alert(1)</script><!--<script>{{data}}{{style}}{{script}}\u2028\ud800é"
    tokenizer = CharTokenizer.from_text(text)
    path = tmp_path / "look.html"
    model = random_gpt("nanogpt", vocab_size=tokenizer.vocab_size, block_size=len(text))
    empty = html.page_of({})

    page = look_page(model, tokenizer, text, 0, text)
    path.write_text(page, encoding="utf-8")

    data = data_of(path)
    assert data["name"] == text
    texts = [data["texts"][str(token)] for token in data["tokens"]]
    assert "".join(texts) == text
    for marker in ("<script", "</script", "<!--"):
        assert page.count(marker) == empty.count(marker)


def test_the_page_may_ask_no_host_for_anything():
    addresses = r"https?:|//\w+\."
    style = r"@import|url\("
    link = r'<link (?!rel="icon" href="data:,")'  # other than the empty icon

    page = html.page_of({})

    assert "default-src 'none'" in page
    assert not re.search(f"{addresses}|{style}|{link}", page)


@pytest.fixture(scope="module")
def run(trained) -> Path:
    return trained.directory


@pytest.mark.slow
def test_a_bigram_model_reads_one_token(small_run, tmp_path):
    out = tmp_path / "bigram"
    model = dataclasses.replace(small_run.model, architecture="bigram")
    fit(dataclasses.replace(small_run, model=model, steps=1, sample_tokens=0, out=str(out)))

    said = refused("look", out, "--prompt", "So", cwd=tmp_path)
    worked("look", out, "--prompt", "S", cwd=tmp_path)

    assert said == "jgpt: the prompt has 2 tokens, more than block_size=1"
    data = json_of(tmp_path / "look.html")
    assert data["text"] == "S"
    assert data["paths"] == {"heads": [], "branches": [], "blocks": []}


def test_a_page_holds_just_so_many_weights(tmp_path, monkeypatch):
    model = random_gpt("nanogpt")
    path = tmp_path / "look.html"
    prompt = "a" * 11
    weights = 2 * 3 * 11**2 // 2  # of two layers of three heads

    monkeypatch.setattr(numbers, "MOST_WEIGHTS", weights)
    page_of(path, model, prompt)

    monkeypatch.setattr(numbers, "MOST_WEIGHTS", weights - 1)
    with pytest.raises(ValueError, match="11 tokens are too many for a page: 2 layers, 3"):
        page_of(path, model, prompt)


# In a browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to open it in")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page of two layers, three heads and eleven tokens, and its data."""
    path = tmp_path_factory.mktemp("page") / "look.html"
    model = random_gpt("nanogpt")
    data = page_of(path, model, new=1)
    return path, data


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


def tip(page: Page) -> str:
    return page.run("$('tip').textContent")


def chosen(page: Page) -> list[int]:
    return page.run("[chosen.query, chosen.key]")


def weight(data: dict, layer: int, head: int, query: int, key: int) -> str:
    place = query * (query + 1) // 2 + key  # row by row, up to the diagonal
    value = data["attention"][layer, head, place]
    return f"{value:.4f}"


@needs_chromium
def test_hovering_the_map_tells_the_weight(shown):
    page, data = shown
    expected = weight(data, 1, 2, 7, 3)
    assert expected != weight(data, 0, 0, 7, 3)  # what the head that is shown at first has

    page.click(*middle_of(page, "headButtons[1 * heads + 2]"))
    page.mouse("mouseMoved", *cell_of(page, 7, 3))
    assert tip(page) == f"“🙂” (7) → “i” (3)\nweight {expected}"

    page.mouse("mouseMoved", *cell_of(page, 3, 7))
    assert "can't be attended to" in tip(page)

    page.mouse("mouseMoved", 2, 2)
    assert tip(page) == ""


@needs_chromium
def test_hovering_arcs_tells_the_weight_from_the_chosen_query(shown):
    page, data = shown

    page.click(*middle_of(page, "textSpans[9]"))
    picked = page.run("$('picked').textContent")
    assert picked.startswith("< at position 9, of the prompt: ")

    fourth_name = middle_of(page, "$('arc-names').children[4]")
    page.mouse("mouseMoved", *fourth_name)
    assert tip(page) == f"“<” (9) → “p” (4)\nweight {weight(data, 0, 0, 9, 4)}"

    page.click(*fourth_name)
    assert page.run("chosen.query") == 4


@needs_chromium
def test_hovering_the_text_and_the_lens_tells_probabilities(shown):
    page, data = shown
    # the last layer's prediction after the fourth token, of the fifth
    bits = -data["next_log_probabilities"][-1, 4] / math.log(2)
    rank = data["next_ranks"][-1, 4]
    # what one block makes of the sixth token
    likeliest = np.exp(data["log_probabilities"][1, 6, 0])

    page.mouse("mouseMoved", *middle_of(page, "textSpans[5]"))
    assert f"“t” (5): {bits:.2f} bits" in tip(page)
    assert f"rank {rank} of 17" in tip(page)

    page.mouse("mouseMoved", *middle_of(page, "lens.cells[1][6]"))
    assert tip(page).startswith("layer 0, after “€” (6)\n")
    assert f"” {likeliest:.4f}\n" in tip(page)

    page.click(*middle_of(page, "lens.cells[1][6]"))
    assert page.run("$('bars-title').textContent") == "After “€” (6), read at: layer 0"
    number = page.run("document.querySelector('#bars span:last-child').textContent")
    assert number == f"{likeliest:.4f}"


@needs_chromium
def test_keys_move_what_is_chosen(shown):
    page, data = shown
    page.run("choose({ query: 5, key: 2 })")

    page.press("ArrowRight")  # scrolls, since no picture has the focus
    assert chosen(page) == [5, 2]

    page.run("$('text').focus()")
    page.press("ArrowRight")
    assert chosen(page) == [6, 6]

    page.run("map.canvas.focus()")
    page.press("ArrowDown")
    page.press("ArrowLeft")
    assert chosen(page) == [7, 5]
    assert tip(page) == f"“🙂” (7) → “t” (5)\nweight {weight(data, 0, 0, 7, 5)}"

    page.click(*middle_of(page, "headButtons[1 * heads + 2]"))
    page.press("ArrowUp")
    page.press("ArrowLeft")
    assert page.run("[chosen.layer, chosen.head]") == [0, 1]
    assert page.run("headButtons.findIndex(each => each.checked)") == 0 * 3 + 1
    page.press("ArrowDown")
    page.press("ArrowDown")  # there is no third layer
    assert page.run("[chosen.layer, chosen.head]") == [1, 1]
    assert page.run("headButtons.findIndex(each => each.checked)") == 1 * 3 + 1
    focused = page.run("document.activeElement.getAttribute('aria-label')")
    assert focused == "layer 1, head 1"

    page.run("lens.grid.focus()")
    page.press("ArrowUp")
    assert page.run("[chosen.depth, chosen.query]") == [1, 7]


@needs_chromium
def test_a_finger_chooses_and_is_told(shown, written):
    page, data = shown
    path, _ = written
    page.open(path, 390)  # as wide as a telephone
    page.requests.pop()

    page.tap(*cell_of(page, 8, 2))
    assert chosen(page) == [8, 2]
    assert tip(page) == f"“⏎” (8) → “r” (2)\nweight {weight(data, 0, 0, 8, 2)}"

    page.tap(*middle_of(page, "textSpans[3]"))
    assert page.run("chosen.query") == 3


@needs_chromium
def test_a_single_token_can_be_looked_at(page, tmp_path):
    path = tmp_path / "look.html"
    page_of(path, random_gpt("nanogpt"), "a")
    page.errors.clear()

    page.open(path)

    assert page.errors == []
    assert "nothing comes before it" in page.run("$('picked').textContent")


@pytest.mark.slow
@needs_chromium
def test_256_tokens_are_drawn_within_frames(page, tmp_path):
    """The least of thirty times, which what else the machine does hardly changes."""
    model = random_gpt("nanogpt", block_size=256, num_layers=4, num_heads=4, embed_dim=32)
    path = tmp_path / "look.html"
    page_of(path, model, "script" * 42)
    page.errors.clear()
    page.open(path)
    least = """(act => Math.min(...Array.from({ length: 30 }, (_, i) => {
        const began = performance.now();
        act(i);
        document.body.offsetHeight;  // with its layout
        return performance.now() - began;
    })))"""

    milliseconds_to_choose = page.run(f"{least}(i => choose(goTo(100 + 3 * i)))")
    assert page.run("chosen.query") == 187
    milliseconds_to_draw = page.run(f"{least}(() => show({{ ...data }}))")
    assert milliseconds_to_choose < 40  # 5 when this was written
    assert milliseconds_to_draw < 250  # 30

    # and what is drawn again is what the data are then
    page.run("data.candidates[4][7][0] = (tokens[8] + 1) % 17; show({ ...data })")
    page.run("lens.place.scrollLeft = 0")  # cells out of sight are filled when they are seen
    page.run("new Promise(done => setTimeout(() => requestAnimationFrame(done), 50))")
    drawn = page.run("lens.cells[4][7].textContent")
    expected = page.run("visible((tokens[8] + 1) % 17)")
    assert drawn == expected
    assert page.run("lens.cells[4].length") == 252
    assert page.errors == []


@needs_chromium
def test_an_error_of_a_page_is_noticed(page, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<script>console.log(1); missing()</script><img src=no.png>")
    page.errors.clear()
    page.requests.clear()

    page.open(path)

    assert any("missing is not defined" in error for error in page.errors)
    assert page.requests[-1].endswith("no.png")
    page.errors.clear()


def test_the_command_writes_a_page_that_computes(run, tmp_path):
    said = worked("look", run, "--prompt", "So", "--max-new-tokens", 4, cwd=tmp_path)

    assert re.fullmatch(
        r"wrote look\.html, [\d.]+ [KM]iB: the model is in it; open it in a browser\n", said
    )
    data = json_of(tmp_path / "look.html")
    assert data["name"] == run.name
    assert data["text"].startswith("So")
    assert len(data["text"]) == 2 + 4
    assert data["prompt"] == 2
    assert data["worker"]


def test_of_a_model_that_no_page_holds_the_command_writes_the_page_of_a_text(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(html, "MOST_PARAMETERS", 20)
    said = worked("look", run, "--prompt", "So", "--max-new-tokens", 4, cwd=tmp_path)
    data = data_of(tmp_path / "look.html")
    said_of_validation = worked("look", run, cwd=tmp_path)
    monkeypatch.setattr("jgpt.pictures.opening.MOST_BYTES", 0)
    refusal = refused("look", run, cwd=tmp_path)

    reason = "parameters are too many for a page, which holds 20"
    assert re.fullmatch(rf"wrote look\.html, the page of this text alone: [\d,]+ {reason}\n", said)
    assert refusal.endswith(f"{reason}: give a --prompt, for a page of that text alone")
    assert said_of_validation == said
    assert len(data["tokens"]) == 2 + 4
    assert data["reason"].endswith(reason)


def test_a_page_samples_as_much_as_it_has_room_for_unless_told(monkeypatch):
    """The default of 48 tokens is no reason to refuse a page: two layers of three heads here."""
    model = random_gpt("nanogpt", block_size=64)
    short_model = random_gpt("nanogpt", block_size=11)
    prompt = "a" * 5
    asked = []

    def canned(model, tokens, count, **_):
        asked.append(count)
        return tokens

    monkeypatch.setattr(html, "generate", canned)
    monkeypatch.setattr(numbers.Look, "__call__", lambda self, tokens, prompt: {})
    for most_tokens, sampled in ((1000, [48]), (60, [48]), (20, [15]), (5, []), (3, [])):
        weights = 2 * 3 * most_tokens**2 // 2
        monkeypatch.setattr(numbers, "MOST_WEIGHTS", weights)
        asked.clear()
        look_page(model, TOKENIZER, prompt, None, "run")
        assert asked == sampled

    look_page(short_model, TOKENIZER, prompt, 48, "run")
    assert asked == [11 - 5]  # as far as the block goes
    with pytest.raises(ValueError, match="max_new_tokens=-1 must be 0 or more"):
        look_page(model, TOKENIZER, prompt, -1, "run")


@pytest.mark.slow
def test_a_single_token_is_counted_as_one():
    model = random_gpt("nanogpt", num_layers=1)
    look = numbers.Look(model, TOKENIZER, "run")
    patch_of_another_prompt = numbers.Changes(patch=(0, 0, "a"))

    with pytest.raises(ValueError, match="the other prompt has 1 token and this one 3: a patch"):
        look([1, 2, 3], 3, patch_of_another_prompt)
    assert counted(0, "token") == "0 tokens"
    assert counted(1, "token") == "1 token"
    assert counted(2, "token") == "2 tokens"
