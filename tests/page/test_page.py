"""A page that holds its model, in a real browser: what is typed and changed is computed there."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.generation.decoding import generate
from jgpt.page.html import model_page
from jgpt.page.numbers import Look
from tests.browser import CHROMIUM, Page, shared_browser
from tests.page.test_program import TOKENIZER, look_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

FIRST = "cabs"
SET_ASIDE = "[...document.querySelectorAll('[inert]')].map(each => each.id)"
OF_THE_TEXT = ["questions", "surprise", "next", "changes", "attention", "forward"]
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
def opened(path: Any, html: str, *how: Any) -> Iterator[Page]:
    """The browser with a page, once it has computed its first text; `how` is that of `open`."""
    path.write_text(html)
    page = shared_browser()
    page.open("about:blank")  # ends the page of the test before
    page.errors.clear()
    page.requests.clear()
    page.open(path, *how)
    page.run(STARTED)
    page.run(OPEN_GROUPS)
    yield page


def changed(page: Page, **state: Any) -> dict[str, Any]:
    """Change the state of a page; return its record."""
    page.run(f"change({json.dumps(state)})")
    return json.loads(page.run(RECORD))


def said(page: Page, element: str) -> str:
    return page.run(f"$('{element}').textContent")


@pytest.mark.slow
def test_a_page_says_how_close_it_is_to_jax_and_what_a_change_is_in_python(default_page, tmp_path):
    look = look_of("default preset")
    with opened(tmp_path / "page.html", default_page) as page:
        closeness = said(page, "closeness")
        patch = {**PATCH, "prompt": "tests!"}
        changes = {"heads": {"0.1": 0}, "blocks": {"1": 0.5}, "patch": patch}
        record = changed(page, prompt="ips/be", **changes)
        code = said(page, "code")
        assert page.errors == []
        assert [url.partition(":")[0] for url in page.requests] == ["file", "blob"]

    assert "with weights in float32" in closeness
    relative = float(closeness.partition("are within ")[2].partition(" ")[0])
    assert relative < 1e-5
    names: dict[str, Any] = {"model": look.model, "tokenizer": TOKENIZER, "jgpt": jgpt, "jnp": jnp}
    exec(code, names)
    tokens, log_probabilities = record["last"]
    expected = jax.nn.log_softmax(names["logits"])[0, -1, np.array(tokens)]
    np.testing.assert_allclose(log_probabilities, expected, atol=2e-5)


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


def test_what_can_t_be_computed_is_said_and_loses_nothing(default_page, tmp_path):
    with opened(tmp_path / "page.html", default_page) as page:
        before = changed(page, prompt="ips")
        for prompt, reason in (
            ("zoo", "unknown character “z” at position 0"),
            ("a" * 99, "the prompt has 99 tokens, more than the block"),
        ):
            found = changed(page, prompt=prompt)
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

    prompt = TOKENIZER.encode("ips")
    count = look.model.block_size - len(prompt)
    key = jax.random.key(7)
    drawn = generate(look.model, jnp.asarray(prompt)[None], count, key=key, temperature=0.9)
    assert found["tokens"] == np.asarray(drawn)[0].tolist()
    assert text == found["text"] == TOKENIZER.decode(found["tokens"])
    assert shown == list(range(4, 4 + count))  # each as it comes


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
            "Content-Security-Policy",
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
