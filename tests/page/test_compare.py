"""A page of two models in a real browser: side by side, and their difference."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.data.tokenizers import NumberTokenizer
from jgpt.generation.decoding import generate
from jgpt.pictures import page as page_module
from jgpt.pictures.numbers import Changes, Look
from jgpt.pictures.weights import pack_weights
from tests.browser import CHROMIUM, TWO_FRAMES, Page
from tests.models import loud, random_model
from tests.page.test_controls import UNNAMED, open_page
from tests.page.test_model import assert_same_record
from tests.page.test_page import FIRST, LINK, PATCH, changed, opened, said
from tests.page.test_program import TOKENIZER, look_of
from tests.runs.test_look import middle_of, unpacked

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

NAMES = ("step 10", "step 20")
TEXT = "ips/be"
TOKENS: list[int] = TOKENIZER.encode(TEXT).tolist()
# how often the page says what a stronger colour means, which is not so for a difference
STRONGER = """(() => {
    const sections = document.querySelectorAll("section");
    for (const section of sections) section.style.contentVisibility = "visible";
    return document.body.innerText.split("stronger the colour").length - 1;
})()"""
PAIR = """
JSON.stringify(data.pair, (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value)
"""


@functools.cache
def looks() -> tuple[Look, Look]:
    """Two models of one architecture."""
    one = look_of("default preset")
    other = loud(nnx.clone(one.model), size=0.5, seed=6)
    return one, Look(other, TOKENIZER, one.name, like=one)


@functools.cache
def html_of_both() -> str:
    one, other = looks()
    return jgpt.look(one.model, TOKENIZER, FIRST, other=other.model, names=NAMES).html


def pair_of(page: Page, **state: Any) -> list[dict[str, Any]]:
    """The records of both models after a change of the page's state."""
    page.run(f"change({json.dumps(state)})")
    return [record | {"name": looks()[0].name} for record in json.loads(page.run(PAIR))]


def closeness(page: Page) -> dict[str, float]:
    """How far the page says that each model's numbers are from JAX's."""
    sentence = r"log probabilities of (step \d+) are within (\S+) of "
    return {name: float(within) for name, within in re.findall(sentence, said(page, "closeness"))}


def assert_records(found: list[dict[str, Any]], *changes: Changes) -> None:
    for record, look in zip(found, looks(), strict=True):
        assert_same_record(record, look(TOKENS, len(TOKENS), *changes))


@needs_chromium
def test_both_models_compute_as_in_jax_what_is_typed(tmp_path):
    """Models without blocks, whose programs are soon made."""
    one = look_of("one's own")
    other_model = loud(nnx.clone(one.model), size=0.5, seed=6)
    other = Look(other_model, TOKENIZER, one.name, like=one)
    html = jgpt.look(one.model, TOKENIZER, FIRST, other=other_model, names=NAMES).html
    with opened(tmp_path / "page.html", html) as page:
        page.run(f"change({json.dumps({'prompt': TEXT})})")
        first, second = json.loads(page.run(PAIR))
        errors = page.errors

    assert_same_record(first | {"name": one.name}, one(TOKENS, len(TOKENS)))
    assert_same_record(second | {"name": one.name}, other(TOKENS, len(TOKENS)))
    with pytest.raises(AssertionError):
        assert_same_record(first | {"name": one.name}, other(TOKENS, len(TOKENS)))
    assert errors == []


@pytest.mark.slow
@needs_chromium
def test_both_models_compute_as_in_jax_what_is_typed_and_changed(tmp_path):
    with opened(tmp_path / "page.html", html_of_both()) as page:
        apart = closeness(page)
        typed = pair_of(page, prompt=TEXT)
        without_a_head = pair_of(page, heads={"0.1": 0}, blocks={"1": 0.5})
        patched = pair_of(page, heads={}, blocks={}, patch={**PATCH, "prompt": "tests!"})
        shown = changed(page, patch=None, shown=1)
        errors = page.errors

    assert apart.keys() == {*NAMES}
    assert max(apart.values()) < 1e-5
    assert_records(typed)
    assert_records(without_a_head, Changes(heads={(0, 1): 0.0}, blocks={1: 0.5}))
    assert_records(patched, Changes(patch=(1, 2, "tests!")))
    assert_same_record(shown | {"name": looks()[0].name}, looks()[1](TOKENS, len(TOKENS)))
    with pytest.raises(AssertionError):
        assert_records(typed[::-1])
    assert errors == []


@pytest.mark.slow
@needs_chromium
def test_weights_that_were_swapped_are_noticed_and_the_page_says_so(tmp_path):
    right = "? [own, other] : [own]"
    assert html_of_both().count(right) == 1
    swapped = html_of_both().replace(right, "? [other, own] : [own]")
    with opened(tmp_path / "page.html", swapped) as page:
        apart = closeness(page)
        found = pair_of(page, prompt=TEXT)

    with pytest.raises(AssertionError):
        assert_records(found)
    assert_records(found[::-1])
    assert min(apart.values()) > 0.01


HIDDEN_HEADINGS = """(() => {
    const bar = $("shown");
    const behind = [];
    for (const heading of document.querySelectorAll("section:not([hidden]) h2")) {
        if (bar.compareDocumentPosition(heading) & Node.DOCUMENT_POSITION_PRECEDING) continue;
        for (const place of [heading, heading.closest("section")]) {
            place.scrollIntoView();
            const covered = bar.getBoundingClientRect().bottom;
            if (heading.getBoundingClientRect().top < covered) behind.push(heading.textContent);
        }
    }
    return behind;
})()"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [1200, 390])
def test_the_bar_covers_nothing_that_is_scrolled_to(tmp_path, width):
    with opened(tmp_path / "page.html", html_of_both()) as page:
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        page.run(TWO_FRAMES)
        behind = page.run(HIDDEN_HEADINGS)
        height = page.run("$('shown').getBoundingClientRect().height")
        page.run("document.documentElement.style.scrollPaddingTop = 0")
        without = page.run(HIDDEN_HEADINGS)
        page.call("Emulation.clearDeviceMetricsOverride")

    assert behind == []
    assert len(without) >= 5  # the control
    assert height > 30


@pytest.mark.slow
@needs_chromium
def test_the_difference_is_the_second_model_minus_the_first(tmp_path):
    with opened(tmp_path / "page.html", html_of_both()) as page:
        of_one = page.run(STRONGER)
        difference = changed(page, prompt=TEXT, shown="difference")
        of_difference = page.run(STRONGER)
        page.run("choose({ query: 3, key: 1, layer: 1, head: 2, depth: Infinity })")
        picked = said(page, "picked")
        losses = said(page, "losses")
        row = page.run("$('bars').children[0].children[2].textContent")
        token = page.run(
            "likeliestOfBoth(depths, 3).reduce((x, y) => "
            "Math.abs(y.apart) > Math.abs(x.apart) ? y : x).token"
        )
        tip = page.run("describeWeight(3, 1)")
        disabled = page.run("[$('sample').disabled, $('write').disabled, $('guide').hidden]")
        errors = page.errors

    one, other = (look(TOKENS, len(TOKENS)) for look in looks())
    weights = unpacked(other["attention"]) - unpacked(one["attention"])
    assert np.abs(weights).max() > 0.1
    found = np.reshape(difference["attention"]["steps"], difference["attention"]["shape"])
    np.testing.assert_allclose(found, weights, atol=1e-4)
    for array, first, second in zip(
        difference["arrays"], one["arrays"], other["arrays"], strict=True
    ):
        expected = unpacked(second["values"]) - unpacked(first["values"])
        values = np.reshape(array["values"]["steps"], array["values"]["shape"])
        np.testing.assert_allclose(values, expected, atol=2e-3 * np.abs(expected).max())
    following = [np.array(each["next_log_probabilities"][-1]) for each in (one, other)]
    first_loss, second_loss = (-logs.mean() for logs in following)
    assert losses == (
        f"Loss on the text, in nats per token: {first_loss:.3f} for step 10, {second_loss:.3f} "
        f"for step 20 ({second_loss - first_loss:+.3f})."
    )
    first_bits, second_bits = (-logs[2] / np.log(2) for logs in following)
    assert picked.endswith(
        f": {first_bits:.2f} bits for step 10, {second_bits:.2f} for step 20 "
        f"({second_bits - first_bits:+.2f})."
    )
    batch = jnp.asarray(TOKENS)[None]
    was, now = (np.asarray(jax.nn.softmax(look.model(batch)[0, 3])) for look in looks())
    assert token == np.abs(now - was).argmax()
    assert float(row.split()[0]) == pytest.approx(now[token] - was[token], abs=2e-4)
    change = float(tip.rpartition("(")[2].rstrip(")"))
    assert change == pytest.approx(weights[1, 2, 3 * 4 // 2 + 1], abs=2e-4)
    assert disabled == [True, True, True]
    assert [of_one, of_difference] == [2, 0]
    assert errors == []


@pytest.mark.slow
@needs_chromium
def test_the_gradient_is_that_of_each_model_and_of_their_difference(tmp_path):
    def gradient_of(look: Look) -> np.ndarray:
        def loss_of(logits: Any) -> Any:
            log_probabilities = jax.nn.log_softmax(logits[0, :-1])
            return -log_probabilities[jnp.arange(len(TOKENS) - 1), jnp.asarray(TOKENS[1:])].mean()

        return np.asarray(jax.grad(loss_of)(look.model(jnp.asarray(TOKENS)[None])))[0]

    one, other = map(gradient_of, looks())
    with opened(tmp_path / "page.html", html_of_both()) as page:
        for shown, expected in ((0, one), (1, other), ("difference", other - one)):
            found = changed(page, prompt=TEXT, gradient=True, shown=shown)
            values = found["arrays"][-1]["values"]
            gradient = np.reshape(values["steps"], values["shape"])[:, 0]  # time batch vocab
            np.testing.assert_allclose(gradient, expected, atol=1e-6)
        title = said(page, "flow-title")

    assert np.abs(other - one).max() > 0.01
    assert title.startswith("step 20 minus step 10: The gradient of the text's loss, ")


@pytest.mark.slow
@needs_chromium
def test_what_is_shown_is_chosen_by_key_or_click_and_a_link_holds_it(tmp_path):
    path = tmp_path / "page.html"
    with opened(path, html_of_both()) as page:
        assert page.run(UNNAMED) == []
        labels = page.run("[...$('shown').querySelectorAll('label')].map(each => each.textContent)")
        page.run("$('shown').querySelector('input').focus()")
        page.press("ArrowRight")
        page.run("asking")
        by_key = page.run("state.shown")
        page.click(*middle_of(page, "$('shown').querySelectorAll('label')[2]"))
        page.run("asking")
        link = page.run(LINK)
        open_page(page, link)
        restored = page.run("[state.shown, data.difference]")
        checked = page.run("[...$('shown').querySelectorAll('input')].map(each => each.checked)")
        wrong = link.replace("difference", "third")
        open_page(page, wrong)
        shown_by_a_wrong_link = page.run("state.shown")
        errors = page.errors

    assert labels == ["step 10", "step 20", "step 20 minus step 10"]
    assert by_key == 1
    assert restored == ["difference", True]
    assert checked == [False, False, True]
    assert shown_by_a_wrong_link == 0
    assert errors == []


@pytest.mark.slow
@needs_chromium
def test_a_reset_undoes_what_was_changed_and_shows_what_was_shown(tmp_path):
    with opened(tmp_path / "page.html", html_of_both()) as page:
        changed(page, prompt=TEXT, heads={"0.1": 0}, shown="difference")
        page.run("$('reset').onclick()")
        found = page.run("[state.prompt, state.heads, state.shown, data.difference]")

    assert found == [FIRST, {}, "difference", True]


@pytest.mark.slow
@needs_chromium
def test_writing_on_uses_the_model_that_is_shown(tmp_path):
    with opened(tmp_path / "page.html", html_of_both()) as page:
        written = []
        for shown in (0, 1):
            changed(page, prompt="ips", shown=shown)
            page.run("""(async () => {
                crypto.getRandomValues = array => array.fill(7);
                await writeOnInWorker();
            })()""")
            written.append(page.run("tokens"))

    prompt = jnp.asarray(TOKENIZER.encode("ips"))[None]
    count = looks()[0].model.block_size - 3
    for found, look in zip(written, looks(), strict=True):
        drawn = generate(look.model, prompt, count, key=jax.random.key(7), temperature=1.0)
        assert found == np.asarray(drawn)[0].tolist()
    assert written[0] != written[1]


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_two_models_are_side_by_side_and_one_below_the_other_on_a_phone(width, scheme, tmp_path):
    path = tmp_path / "page.html"
    with opened(path, html_of_both()) as page:
        open_page(page, path, width, scheme)
        boxes = page.run(
            "[...$('compared').children].map(each => each.getBoundingClientRect())"
            ".map(each => [each.left, each.top, each.right, each.bottom])"
        )
        rows = page.run(
            "[...$('compared').children].map(side => [...side.querySelectorAll('canvas')]"
            ".map(each => each.getBoundingClientRect().top))"
        )
        widest = page.run("document.documentElement.scrollWidth")
        errors = page.errors

    (left, top, right, bottom), (other_left, other_top, _, _) = boxes
    assert widest <= width
    if width == 390:
        assert other_left == left
        assert other_top >= bottom
    else:
        assert other_left > right
        assert other_top == top
        assert rows[0] == rows[1]
    assert errors == []


@pytest.mark.slow
@needs_chromium
def test_the_size_of_both_decides_on_the_precision(tmp_path, monkeypatch):
    one, other = looks()
    size = sum(array.nbytes for array in one.named_weights().values())
    packed = functools.partial(pack_weights, most_full_bytes=int(1.5 * size))
    monkeypatch.setattr(page_module, "pack_weights", packed)
    alone = jgpt.look(one.model, TOKENIZER, FIRST).html
    together = jgpt.look(one.model, TOKENIZER, FIRST, other=other.model, names=NAMES).html
    with opened(tmp_path / "page.html", together) as page:
        sentences = said(page, "closeness")

    assert '"precision":"float32"' in alone
    assert "holds both models, step 10 and step 20, with weights in float16" in sentences
    found = re.findall(
        r"of (step \d+) are within (\S+) of those that JAX computes with these weights, and within "
        r"(\S+) of",
        sentences,
    )
    assert [name for name, _, _ in found] == [*NAMES]
    for _, to_rounded, to_own in found:
        assert float(to_rounded) < 1e-5 < float(to_own)


def test_a_pair_that_no_page_shows_is_refused(monkeypatch):
    one, other = looks()

    def look(second: Any, tokenizer: Any = TOKENIZER) -> None:
        jgpt.look(one.model, tokenizer, FIRST, other=second, names=NAMES)

    with pytest.raises(ValueError, match=r"^step 10 and step 20 have equal weights: give one"):
        look(nnx.clone(one.model))
    wider = random_model("nanogpt", vocab_size=17, embed_dim=15)
    with pytest.raises(ValueError, match=r"^\S+ is .+ in step 10 and .+ in step 20: a page"):
        look(wider)
    windowed = dataclasses.replace(one.model.config, attention_window=4)
    same_shapes = nnx.merge(
        nnx.graphdef(jgpt.GPT(windowed, rngs=nnx.Rngs(0))), nnx.state(other.model)
    )
    with pytest.raises(ValueError, match=r"^step 10 and step 20 differ in more than their weights"):
        look(same_shapes)
    with pytest.raises(ValueError, match="leave the other model out, for a page of one text alone"):
        look(other.model, NumberTokenizer(17))
    parameters = sum(array.size for array in one.named_weights().values())
    monkeypatch.setattr(page_module, "MOST_PARAMETERS", parameters)
    with pytest.raises(ValueError, match=rf"^{2 * parameters:,} parameters of both models"):
        look(other.model)
