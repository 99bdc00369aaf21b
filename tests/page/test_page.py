"""A page that holds its model, in a real browser: what is typed and changed is computed there."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.data.characters import NumberTokenizer
from jgpt.generation.decoding import generate
from jgpt.page import html as page_module
from jgpt.page import model, numbers
from jgpt.page.html import model_page
from jgpt.page.numbers import Look
from jgpt.page.program import Uncomputable
from jgpt.page.weights import pack_weights
from tests.browser import CHROMIUM, Page, shared_browser
from tests.models import random_gpt
from tests.page.records import Changes, record_of
from tests.page.test_model import assert_same_record
from tests.page.test_program import TOKENIZER, look_of
from tests.quick import only

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

FIRST = "cabs"
SET_ASIDE = "[...document.querySelectorAll('[inert]')].map(each => each.id)"
OF_THE_TEXT = ["questions", "surprise", "next", "changes", "attention", "forward"]
UNDERLINED = "textSpans.filter(each => each.classList.contains('prompt')).length"
STARTED = """
new Promise((done) => {
  const look = () => data && $("closeness").textContent ? done(0) : setTimeout(look, 20);
  look();
})
"""
PATCH = {"block": 1, "position": 2}
OPEN_GROUPS = """
(async () => {
  for (const group of $("arrays").children) group.open = true;
  await change({});
})()
"""
"""The worker is asked for the numbers of the arrays that are shown."""
RECORD = """
JSON.stringify(data, (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value)
"""


def page_of(look: Look, prompt: str | None = FIRST, name: str = "x") -> str:
    return model_page(look.model, TOKENIZER, name, prompt)


@pytest.fixture(scope="module")
def default_page() -> str:
    return page_of(look_of("default preset"))


@contextlib.contextmanager
def opened(path: Any, html: str, *, open_groups: bool = True) -> Iterator[Page]:
    """The browser with a page, once the page has computed its first text."""
    path.write_text(html)
    page = shared_browser()
    page.open("about:blank")  # ends the page of the test before
    page.errors.clear()
    page.requests.clear()
    page.open(path)
    page.run(STARTED)
    if open_groups:
        page.run(OPEN_GROUPS)
    yield page


def changed(page: Page, **state: Any) -> dict[str, Any]:
    """Change the state of a page; return its record."""
    page.run(f"change({json.dumps(state)})")
    return json.loads(page.run(RECORD))


def said(page: Page, element: str) -> str:
    return page.run(f"$('{element}').textContent")


def records_of(page: Page, look: Look) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The records of a page after several changes, each with that of Python."""
    text = "ips/be"[: look.model.block_size]
    tokens = TOKENIZER.encode(text).tolist()
    unchanged = changed(page, prompt=text)
    pairs = [(unchanged, record_of(look, tokens))]
    if not look.anatomy.blocks:
        return pairs

    scaled = changed(page, heads={"0.1": 0}, blocks={"1": 0.5})
    scales = Changes(heads={(0, 1): 0.0}, blocks={1: 0.5})
    pairs.append((scaled, record_of(look, tokens, changes=scales)))

    page_patch = {"block": 1, "position": 2, "prompt": "tests!"}
    patched = changed(page, heads={}, blocks={}, patch=page_patch)
    patch = Changes(patch=(1, 2, "tests!"))
    pairs.append((patched, record_of(look, tokens, changes=patch)))

    unpatched = changed(page, patch=None)
    pairs.append((unpatched, record_of(look, tokens)))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    only(["default preset"], ["one's own", "default preset", "gpt2", "qwen3", "bigram", "lecture"]),
)
def test_what_is_typed_and_changed_is_computed_in_the_page(name, request, tmp_path):
    look = look_of(name)
    if name == "default preset":
        html = request.getfixturevalue("default_page")
    else:
        html = page_of(look, FIRST[: look.model.block_size])
    with opened(tmp_path / "page.html", html) as page:
        pairs = records_of(page, look)

        for found, expected in pairs:
            assert_same_record(found | {"name": look.name}, expected)
        if len(pairs) > 1:
            with pytest.raises(AssertionError):
                assert_same_record(pairs[1][0] | {"name": look.name}, pairs[0][1])
        assert page.errors == []
        assert [url.partition(":")[0] for url in page.requests] == ["file", "blob"]


def test_a_page_says_how_close_it_is_to_jax_and_what_a_change_is_in_python(default_page, tmp_path):
    look = look_of("default preset")
    with opened(tmp_path / "page.html", default_page) as page:
        closeness = said(page, "closeness")
        changed(page, prompt="ips/be", heads={"0.1": 0}, patch={**PATCH, "prompt": "tests!"})
        code = said(page, "code")

    assert "with weights in float32" in closeness
    relative = float(closeness.partition("are within ")[2].partition(" ")[0])
    assert relative < 1e-5
    expected = Changes(heads={(0, 1): 0.0}, patch=(1, 2, "tests!"))
    assert code.replace('"', "'") == expected.as_code(look.anatomy, "ips/be").replace('"', "'")


RUNS_WEBASSEMBLY = """
new Promise((done) => {
  const empty = "new WebAssembly.Module(Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0))";
  const source = `try { ${empty}; postMessage(true); } catch { postMessage(false); }`;
  const started = new Worker(URL.createObjectURL(new Blob([source])));
  started.onmessage = ({data: answer}) => done(answer);
})
"""
"""Whether a worker of the page may start WebAssembly, or loops take its place."""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_policy_of_a_page_lets_its_worker_run_webassembly(default_page, tmp_path):
    with opened(tmp_path / "page.html", default_page) as page:
        assert page.run(RUNS_WEBASSEMBLY)

    strict = default_page.replace("'wasm-unsafe-eval'", "")
    with opened(tmp_path / "strict.html", strict) as page:
        assert not page.run(RUNS_WEBASSEMBLY)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_page_of_rounded_weights_says_how_far_they_are_from_the_model_s(
    precision, tmp_path, monkeypatch
):
    monkeypatch.setattr("jgpt.page.weights.FEWEST_QUANTISED", 1)
    look = look_of("default preset")
    most_half_bytes = 10 if precision == "int8" else 1_000_000
    monkeypatch.setattr(
        page_module,
        "pack_weights",
        lambda weights: pack_weights(weights, 10, most_half_bytes),
    )
    html = page_of(look)
    with opened(tmp_path / "page.html", html) as page:
        closeness = said(page, "closeness")
        found = np.ravel(json.loads(page.run(RECORD))["log_probabilities"][-1])
        errors = page.errors

    unpacked = pack_weights(look.named_weights(), 10, most_half_bytes).unpacked
    tokens = TOKENIZER.encode(FIRST).tolist()
    of_rounded = look.log_probabilities(tokens, look.weights_named(unpacked))
    own = look.log_probabilities(tokens, look.weights)
    np.testing.assert_allclose(found, of_rounded, rtol=0, atol=2e-5)
    rounding = np.abs(np.subtract(found, own)).max() / np.abs(own).max()
    assert f"with weights in {precision}" in closeness
    contents = re.findall(r"<(script|style)[^>]*>(.*?)</\1>", html, re.DOTALL)
    size = sum(len(content) for _, content in contents)
    assert f"This file of {size / 1e6:.1f} MB" in closeness
    to_rounded, to_own = re.findall(r"within (\S+) of", closeness)
    assert float(to_rounded) < 1e-5 < float(to_own)
    assert float(to_own) == pytest.approx(rounding, rel=0.5)
    assert errors == []


def test_what_can_t_be_computed_is_said_and_loses_nothing(default_page, tmp_path):
    with opened(tmp_path / "page.html", default_page) as page:
        before = changed(page, prompt="ips")
        assert page.run(SET_ASIDE) == []
        for state, reason in (
            ({"prompt": "zoo"}, "unknown character “z” at position 0"),
            ({"prompt": ""}, "the prompt is empty"),
            ({"prompt": "a" * 99}, "the prompt has 99 tokens, more than the block"),
        ):
            found = changed(page, **state)
            assert reason in said(page, "said")
            assert said(page, "said").endswith(". Below is still the text before: “ips”")
            assert page.run("$('said').role") == "status"  # which is read aloud
            assert page.run(SET_ASIDE) == OF_THE_TEXT
            assert page.run("$('text').focus(), document.activeElement.id") != "text"
            assert found == before
        assert changed(page, prompt="ips") == before
        assert said(page, "said") == ""
        assert page.run(SET_ASIDE) == []
        assert page.run("$('text').focus(), document.activeElement.id") == "text"
        assert page.errors == []


def test_a_text_that_is_wrong_is_not_replaced_by_the_buttons(default_page, tmp_path):
    with opened(tmp_path / "page.html", default_page) as page:
        changed(page, prompt="ips")
        texts = []
        for text in ("zoo", "ips"):
            page.run(f"$('prompt').value = '{text}'; change({{ prompt: '{text}' }})")
            page.run("$('sample').onclick()")
            page.run("$('bars').children[0].onclick()")
            texts.append(page.run("$('prompt').value"))
        errors = page.errors

    wrong, right = texts
    assert wrong == "zoo"
    assert right.startswith("ips")
    assert len(right) == 5  # the control: a token of each button
    assert errors == []


def test_a_patch_that_doesn_t_fit_is_said_beside_it_and_can_be_removed(default_page, tmp_path):
    with opened(tmp_path / "page.html", default_page) as page:
        before = changed(page, prompt="ips")
        for state, reason in (
            ({"patch": {**PATCH, "prompt": "be"}}, "“be” has no token at position 2"),
            ({"patch": {**PATCH, "prompt": "zoo"}}, "unknown character “z”"),
            ({"prompt": "ip", "patch": {**PATCH, "prompt": "best"}}, "The patch waits"),
        ):
            found = changed(page, **state)
            assert reason in said(page, "patch-said")
            assert said(page, "said") == ""
            assert found["before"] is None
        patched = changed(page, prompt="ips")
        assert patched["before"] is not None
        assert said(page, "patch-said") == (
            "Block 1 returns at position 2 what it returns there for “best”."
        )
        page.run("$('unpatch').click()")
        page.run("asking")
        assert json.loads(page.run(RECORD)) == before
        assert page.run("$('unpatch').hidden && $('patch').disabled")
        assert page.run("document.activeElement.id") == "patch-prompt"
        assert page.errors == []


@pytest.mark.slow
def test_a_text_is_written_on_in_the_page_with_the_tokens_of_generate(default_page, tmp_path):
    look = look_of("default preset")
    with opened(tmp_path / "page.html", default_page) as page:
        changed(page, prompt="ips")
        shown = page.run("""(async () => {
            crypto.getRandomValues = array => array.fill(7);
            $("temperature").value = .9;
            const lengths = new Set();
            const hear = worker.onmessage;
            worker.onmessage = message => {
                hear(message);
                if (message.data.token !== undefined) showWritten();
                lengths.add($("prompt").value.length);
            };
            await writeOnInWorker();
            return [...lengths];
        })()""")
        found = json.loads(page.run(RECORD))
        text = page.run("$('prompt').value")
        sentence = said(page, "said")

    prompt = TOKENIZER.encode("ips")
    count = look.model.block_size - len(prompt)
    key = jax.random.key(7)
    drawn = generate(look.model, jnp.asarray(prompt)[None], count, key=key, temperature=0.9)
    assert found["tokens"] == np.asarray(drawn)[0].tolist()
    assert text == found["text"] == TOKENIZER.decode(found["tokens"])
    assert shown == list(range(4, 4 + count))  # each as it comes
    assert sentence.startswith(f"{count} tokens, ")
    assert sentence.endswith(" a second, with seed 7. The text is now as long as a page shows")


def test_what_was_given_alone_is_underlined_and_a_link_holds_it(tmp_path):
    path = tmp_path / "page.html"
    with opened(path, page_of(look_of("one's own"))) as page:
        underlined = [page.run(UNDERLINED)]
        changed(page, prompt="ips")
        page.run("sampleToken()")
        sampled = page.run("[time, data.prompt]")
        underlined.append(page.run(UNDERLINED))
        page.run("writeOnInWorker()")
        written = page.run("data.text")
        underlined.append(page.run(UNDERLINED))
        link = page.run(LINK)

        shorter = written[:-1]
        page.run(f"change({{ prompt: {json.dumps(shorter)} }})")  # the reader's own text
        underlined_of_another = page.run(UNDERLINED)
        page.run(f"change({{ prompt: {json.dumps(written)} }})")  # typed again
        underlined.append(page.run(UNDERLINED))

        open_another(page, link)
        underlined.append(page.run(UNDERLINED))
        opened_text = page.run("data.text")
        page.run("location.hash = encodeURIComponent(JSON.stringify({ prompt: 'be' }))")
        page.run("new Promise(done => setTimeout(done, 50))")
        page.run("asking")
        assert page.run(f"[data.text, {UNDERLINED}]") == ["be", 2]
        page.run("history.back()")
        page.run("new Promise(done => setTimeout(done, 50))")
        page.run("asking")
        underlined.append(page.run(UNDERLINED))
        text_after_going_back = page.run("data.text")
        for given, count in ((10**9, 2), (-3, 1)):  # which someone made up
            state = json.dumps(json.dumps({"prompt": "be", "given": given}))
            page.run(f"location.hash = encodeURIComponent({state})")
            page.run("new Promise(done => setTimeout(done, 50))")
            page.run("asking")
            assert page.run(UNDERLINED) == count
        errors = page.errors

    assert sampled == [4, 3]
    assert len(written) > 5
    assert underlined == [len(FIRST), 3, 3, 3, 3, 3]
    assert underlined_of_another == len(shorter)
    assert opened_text == text_after_going_back == written
    assert errors == []


def open_another(page: Page, address: str) -> None:
    """Open an address in place of the page that is open."""
    page.open("about:blank")
    page.open(address)
    page.run(STARTED)


def test_a_single_token_has_no_gradient_and_the_next_one_has(tmp_path):
    with opened(tmp_path / "page.html", page_of(look_of("one's own"))) as page:
        found = []
        for prompt, gradient in (("ip", True), ("i", True), ("ip", True)):
            changed(page, prompt=prompt, gradient=gradient)
            switch = page.run("[$('gradient').checked, $('gradient').disabled]")
            found.append([said(page, "said"), data_shown(page), *switch])

    assert found == [["", "ip", True, False], ["", "i", False, True], ["", "ip", True, False]]


def test_a_token_without_a_gradient_says_so(tmp_path):
    with opened(tmp_path / "page.html", page_of(look_of("one's own"))) as page:
        zero = {}
        for gradient, query in ((True, 5), (True, 4), (3, 3), (3, 2)):
            record = changed(page, prompt="ips/be", gradient=gradient)
            page.run(f"choose(goTo({query}))")
            values = record["arrays"][-1]["values"]
            gradients = np.reshape(values["numbers"], values["shape"])[query]
            sentence = said(page, "no-gradient")
            zero[gradient, query] = [not gradients.any(), sentence.startswith("Every gradient at ")]

    assert list(zero.values()) == [[True, True], [False, False], [True, True], [False, False]]


def data_shown(page: Page) -> str:
    return page.run("data.text")


def test_what_is_typed_ends_writing_and_stays(default_page, tmp_path):
    with opened(tmp_path / "page.html", default_page) as page:
        changed(page, prompt="ips")
        page.run("""(async () => {
            const done = writeOnInWorker();
            $("prompt").value = "tab";
            await change({ prompt: "tab" });
            await done;
        })()""")
        found = json.loads(page.run(RECORD))
        assert found["text"] == page.run("$('prompt').value") == "tab"
        assert page.run("$('write').textContent") == "Write on"
        assert page.errors == []


def test_the_backward_pass_is_shown_in_place_of_the_numbers(tmp_path):
    look = look_of("one's own")
    text = "ips/be"
    tokens = TOKENIZER.encode(text)
    predictions = len(tokens) - 1

    with opened(tmp_path / "page.html", page_of(look)) as page:
        numbers = changed(page, prompt=text)
        page.run("$('gradient').click()")
        page.run("asking")
        record = json.loads(page.run(RECORD))

    def loss_of(logits: Any) -> Any:
        log_probabilities = jax.nn.log_softmax(logits[0, :-1])
        chosen = log_probabilities[jnp.arange(predictions), tokens[1:]]
        return -chosen.mean()

    logits = look.model(jnp.asarray(tokens)[None])
    expected = np.asarray(jax.grad(loss_of)(logits))[0]
    last_array = record["arrays"][-1]
    values = last_array["values"]
    gradient = np.reshape(values["numbers"], values["shape"])  # time batch vocab
    assert last_array["name"] == "logits"
    np.testing.assert_allclose(gradient[:, 0], expected, atol=1e-6)
    assert record["loss"] == pytest.approx(float(loss_of(logits)), rel=1e-5)
    # the control
    shown_before = numbers["arrays"][-1]["values"]["numbers"]
    assert not np.allclose(values["numbers"], shown_before)


LINK = "(putInAddress(), location.href)"
"""The link to a page as it is, for which a reader waits a moment."""


def test_a_link_holds_what_was_changed_and_chosen(default_page, tmp_path):
    path = tmp_path / "page.html"
    with opened(path, default_page) as page:
        before = changed(
            page, prompt="ips/be", heads={"0.1": 0}, patch={**PATCH, "prompt": "tests!"}
        )
        page.run("choose({ query: 2, key: 1, layer: 1, head: 1 })")
        link = page.run(LINK)
        page.run("change(restored({}))")
        assert json.loads(page.run(RECORD)) != before
        assert page.run("chosen.query") != 2
        page.open("about:blank")
        page.open(link)
        page.run(STARTED)
        page.run(OPEN_GROUPS)

        assert json.loads(page.run(RECORD)) == before
        assert page.run("[chosen.query, chosen.key, chosen.layer, chosen.head]") == [2, 1, 1, 1]
        assert "JAX" not in said(page, "closeness")  # which has computed the first text alone
        assert page.errors == []


def test_a_link_that_someone_made_up_chooses_what_there_is(default_page, tmp_path):
    out_of_range = {"chosen": {"query": 10**9, "head": -3, "layer": "<b>", "toString": 1}}
    with opened(tmp_path / "page.html", default_page) as page:
        last = page.run("time - 1")
        chosen = []
        for link in (out_of_range, {"chosen": "query"}, {"chosen": None}, None, 7):
            page.run("choose({ query: 0, layer: 0, head: 0 })")
            page.run(f"location.hash = encodeURIComponent({json.dumps(json.dumps(link))})")
            page.run("new Promise(done => setTimeout(done, 50))")
            page.run("asking")
            chosen.append(page.run("[chosen.query, chosen.layer, chosen.head]"))
        kind = page.run("typeof chosen.toString")
        errors = page.errors

    assert chosen == [[last, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert kind == "function"
    assert errors == []


def test_a_link_of_another_model_changes_what_there_is(default_page, tmp_path):
    nothing = {"heads": {}, "blocks": {}, "patch": None, "gradient": False}
    patch = {"block": 1, "position": 2, "prompt": "tests!"}
    links = [
        ({"heads": None, "blocks": "0", "patch": 5, "gradient": "x"}, nothing),
        ({"heads": {"0.1": 0, "0.9": 0, "7.0": 0, "x": 0}}, nothing | {"heads": {"0.1": 0}}),
        ({"heads": {"0.1": None, "1.0": 3}, "blocks": {"0": "x"}}, nothing),
        ({"blocks": {"1": 0.5, "77": 0, "length": 0}}, nothing | {"blocks": {"1": 0.5}}),
        ({"patch": patch}, nothing | {"patch": patch}),
        ({"patch": patch | {"block": 99}}, nothing),
        ({"patch": patch | {"position": "2"}}, nothing),
        ({"patch": patch | {"prompt": 7}}, nothing),
        ({"gradient": 2}, nothing | {"gradient": 2}),
        ({"gradient": 1.5}, nothing),
        ({"prompt": 5}, nothing),
    ]
    found = []
    with opened(tmp_path / "page.html", default_page) as page:
        for link, _ in links:
            page.run(f"location.hash = encodeURIComponent({json.dumps(json.dumps(link))})")
            page.run("new Promise(done => setTimeout(done, 50))")
            page.run("asking")
            found.append(json.loads(page.run("JSON.stringify(state)")))
        text = page.run("data.text")
        said_at_the_end = said(page, "said")
        errors = page.errors

    same = {"prompt": FIRST}
    assert found == [same | wanted for _, wanted in links]
    assert (text, said_at_the_end) == (FIRST, "")
    assert errors == []


NOTHING_STARTED = """
new Promise((done) => {
  const look = () => $("said").classList.contains("wrong") ? done(0) : setTimeout(look, 20);
  look();
})
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        (
            "'none'; worker-src blob:",
            "'none'; worker-src 'none'",
            "Content-Security-Policy must have",
        ),
        ('"data":"H4sI', '"data":"AAAA', "is damaged"),
    ],
    ids=["policy", "damage"],
)
def test_a_page_that_can_not_compute_says_why(right, wrong, reason, default_page, tmp_path):
    assert default_page.count(right) == 1
    path = tmp_path / "page.html"
    path.write_text(default_page.replace(right, wrong))
    page = shared_browser()
    page.open(path)
    page.run(NOTHING_STARTED)

    sentence = said(page, "said")
    can_type = page.run("!$('prompt').disabled")

    assert sentence.startswith("This page can't compute: ")
    assert reason in sentence
    assert not can_type


def test_the_address_follows_after_a_moment(default_page, tmp_path):
    with opened(tmp_path / "page.html", default_page) as page:
        page.run("new Promise(done => setTimeout(done, 500))")
        page.run("choose({ query: 1 })")
        at_once = page.run("inAddress().chosen.query")
        page.run("new Promise(done => setTimeout(done, 500))")
        later = page.run("inAddress().chosen.query")

    assert at_once != 1
    assert later == 1


def test_the_numbers_of_a_closed_group_come_when_it_is_opened(default_page, tmp_path):
    look = look_of("default preset")
    with opened(tmp_path / "page.html", default_page, open_groups=False) as page:
        page.run("change({ prompt: 'ips/be' })")
        of_open_groups = json.loads(page.run(RECORD))
        page.run("(async () => { $('blocks.1').open = true; await new Promise(setTimeout) })()")
        page.run("asking")
        of_a_block_more = json.loads(page.run(RECORD))
        page.run(OPEN_GROUPS)
        of_all = json.loads(page.run(RECORD))
        errors = page.errors

    def are_there(record: dict[str, Any]) -> dict[str, bool]:
        there = {}
        for array in record["arrays"]:
            group, _, _ = f"{array['path']}...".partition(".")
            if group == "blocks":
                group = ".".join(array["path"].split(".")[:2])
            there[group] = array["values"] is not None
        return there

    tokens = TOKENIZER.encode("ips/be").tolist()
    assert_same_record(of_all | {"name": look.name}, record_of(look, tokens))
    assert are_there(of_open_groups)["token_embedding"]
    assert not are_there(of_open_groups)["blocks.0"]
    assert not are_there(of_open_groups)["blocks.1"]
    assert not are_there(of_a_block_more)["blocks.0"]
    assert are_there(of_a_block_more)["blocks.1"]
    assert errors == []


def test_the_lens_and_its_cells_follow_a_text_that_grows_and_shrinks(default_page, tmp_path):
    look = look_of("default preset")
    shown = {}
    with opened(tmp_path / "page.html", default_page) as page:
        for text in ("ips", "ips/be", "ip"):
            page.run(f"change({{ prompt: '{text}' }})")
            shown[text] = page.run(
                "[lens.named[0], ...lens.cells, lens.named[1]]"
                ".map(row => row.map(cell => cell.textContent))"
            )
            in_order = page.run("[...lens.grid.children].map(each => each.textContent)")
            names = page.run("lens.rows.map(({ name }) => name.textContent)")
            expected = []
            for name, row in zip(names, shown[text], strict=True):
                expected += [name, *row]
            assert in_order == expected

    for text, (above, *rows, below) in shown.items():
        tokens = TOKENIZER.encode(text).tolist()
        candidates = record_of(look, tokens)["candidates"]
        likeliest = []
        for row in candidates:
            likeliest.append([TOKENIZER.decode([best]) for best, *_ in row])
        assert above == [*text]
        assert below == [*text[1:], ""]
        assert [[visible_as(each) for each in row] for row in likeliest] == rows


@pytest.mark.slow
def test_the_cells_of_a_lens_are_filled_when_they_come_into_sight(tmp_path):
    model = random_gpt("modern", vocab_size=TOKENIZER.vocab_size, block_size=128, num_layers=2)
    html = jgpt.look(model, TOKENIZER, "ips").html
    text = "ips/be" * 20
    moved = f"b{text}"
    read = """
        new Promise(done => setTimeout(() => requestAnimationFrame(() => done([
          lens.named[0].map(cell => cell.textContent),
          lens.cells.at(-1).map(cell => cell.textContent),
          data.candidates.at(-1).map(([best]) => visible(best)),
        ])), 50))
    """
    with opened(tmp_path / "page.html", html) as page:
        page.run("lens.place.style.width = '500px'")
        page.run(f"change({{ prompt: {moved!r} }})")
        page.run("choose({ query: 0, key: 0 })")
        names, cells, best = page.run(read)
        assert (names[:25], cells[:25]) == ([*moved[:25]], best[:25])

        page.run("lens.place.scrollLeft = 1e6")
        names, cells, best = page.run(read)
        assert (names[-25:], cells[-25:]) == ([*moved[-25:]], best[-25:])

        page.run(f"change({{ prompt: {text!r} }})")
        names, cells, best = page.run(read)
        assert names[:25] == [*moved[:25]]  # as they were, since they are out of sight

        page.run("lens.place.scrollLeft = 0")
        names, cells, best = page.run(read)
        assert (names[:25], cells[:25]) == ([*text[:25]], best[:25])


def visible_as(text: str) -> str:
    """What a page shows of a token."""
    return text.replace("\n", "⏎").replace(" ", "␣")


def test_a_model_that_no_page_holds_is_refused_with_the_reason(monkeypatch):
    look = look_of("one's own")
    with pytest.raises(ValueError, match="this tokenizer: it is none of characters, bytes and"):
        model_page(look.model, NumberTokenizer(17), "x")
    monkeypatch.setattr(page_module, "MOST_PARAMETERS", 20)
    with pytest.raises(Uncomputable, match=r"^\d+ parameters are too many for a page, which holds"):
        page_of(look)


def test_a_large_vocabulary_leaves_room_for_fewer_tokens(monkeypatch):
    look = look_of("gpt2")
    logits_of_a_token = 3 * 17  # the embeddings and two blocks
    monkeypatch.setattr(numbers, "MOST_LOGITS", 9 * logits_of_a_token)
    for module in (numbers, model):
        monkeypatch.setattr(module, "SHORTEST", 2)

    assert look.most_tokens() == 8
    assert model.program_lengths(look) == [2, 4, 8]
    reason = "the prompt has 9 tokens, and a page of this model has room for 8"
    with pytest.raises(ValueError, match=reason):
        page_of(look, "ipsbestca")


def test_a_token_is_written_from_the_bars(tmp_path):
    with opened(tmp_path / "page.html", page_of(look_of("one's own"))) as page:
        changed(page, prompt="ips")
        page.run("choose(goTo(2)); $('bars').children[0].focus(); document.activeElement.click()")
        page.run("asking")
        found = json.loads(page.run(RECORD))
        focused = page.run("[...$('bars').children].indexOf(document.activeElement)")

    before = found["tokens"][:3]
    assert TOKENIZER.decode(before) == "ips"
    likeliest = record_of(look_of("one's own"), before)["candidates"][-1][2][0]
    assert found["tokens"] == [*before, likeliest]
    assert focused == 0


def test_the_worker_of_a_page_writes_the_tokens_of_generate(tmp_path):
    look = look_of("one's own")
    question = {"write": {"tokens": [3, 1, 4], "count": 5, "temperature": 0.9, "seed": 7}}
    with opened(tmp_path / "page.html", page_of(look)) as page:
        written = page.run(f"askWorker({json.dumps(question)})")

    key = jax.random.key(7)
    drawn = generate(look.model, jnp.asarray([[3, 1, 4]]), 5, key=key, temperature=0.9)
    assert written == drawn[0, 3:].tolist()


def test_a_page_begins_with_a_text_that_the_model_writes(tmp_path):
    look = look_of("one's own")
    with opened(tmp_path / "page.html", page_of(look, None)) as page:
        found = json.loads(page.run(RECORD))

    assert found["text"].startswith("\n")  # the default prompt
    assert len(found["tokens"]) == min(49, look.most_tokens())
    np.testing.assert_allclose(
        found["log_probabilities"][-1][0],
        record_of(look, found["tokens"])["log_probabilities"][-1][0],
        atol=2e-5,
    )


def test_nothing_in_a_name_or_a_prompt_runs(tmp_path):
    name = "</script><script>document.title='ran'</script>{{style}}"
    html = page_of(look_of("one's own"), "<!/<!/s", name)
    with opened(tmp_path / "page.html", html) as page:
        title = page.run("document.title")
        text = json.loads(page.run(RECORD))["text"]

    assert title == f"Inside {name}"
    assert text == "<!/<!/s"
    assert page.errors == []
