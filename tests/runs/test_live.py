"""The page of `jgpt look --live`: what it is asked, what it refuses, and in a browser."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.runs import live
from jgpt.runs.live import answer, serving
from jgpt.runs.look import Look
from tests.browser import browser
from tests.commands import refused
from tests.models import random_gpt
from tests.runs.test_look import TOKENIZER, middle_of, needs_chromium, unpacked

PROMPT, OTHER = "script€", "crespas"


@pytest.fixture(scope="module")
def look():
    return Look(random_gpt("modern"), TOKENIZER, "run")


def tokens_of(text: str):
    return jnp.asarray(TOKENIZER.encode(text))[None]


CHANGES = {
    "nothing": {},
    "a head": {"heads": {"1.2": 0}},
    "two heads of a block": {"heads": {"0.0": 0, "0.1": 0.5}},
    "a block": {"blocks": {"1": 0}},
    "half a block": {"blocks": {"0": 0.5}},
    "a patch": {"patch": {"block": 0, "position": 3, "prompt": OTHER}},
    "all": {
        "heads": {"1.0": 2},
        "blocks": {"0": 0.25},
        "patch": {"block": 1, "position": 6, "prompt": OTHER},
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_answer_is_what_its_code_computes(look, name):
    found = answer(look, {"prompt": PROMPT, **CHANGES[name]})
    names = {"model": look.model, "tokenizer": TOKENIZER, "jgpt": jgpt, "jnp": jnp}
    names["tokens"] = tokens_of(PROMPT)
    exec(found["code"], names)
    logs = jax.nn.log_softmax(names["logits"][0])
    expected = np.take_along_axis(np.asarray(logs), np.array(found["candidates"][-1]), -1)
    np.testing.assert_allclose(found["log_probabilities"][-1], expected, rtol=0, atol=2e-5)
    before = look.model(tokens_of(PROMPT))[0]
    assert (name == "nothing") == (found["before"] is None)
    if found["before"]:
        assert abs(names["logits"][0] - before).max() > 0.01
        log = jax.nn.log_softmax(before)
        np.testing.assert_allclose(
            found["before"]["next_log_probabilities"],
            log[jnp.arange(6), tokens_of(PROMPT)[0, 1:]],
            rtol=0,
            atol=2e-5,
        )


def test_a_block_switched_off_is_left_out(look):
    found = answer(look, {"prompt": PROMPT, "blocks": {"1": 0}})
    arrays = {row["path"]: unpacked(row["values"]) for row in found["arrays"]}
    states = look.model.hidden_states(tokens_of(PROMPT))
    np.testing.assert_allclose(arrays["blocks.1"], states[1], rtol=0, atol=1e-3)


def test_attention_follows_a_change_of_an_earlier_block(look):
    plain = unpacked(answer(look, {"prompt": PROMPT})["attention"])
    off = unpacked(answer(look, {"prompt": PROMPT, "heads": {"0.1": 0}})["attention"])
    np.testing.assert_array_equal(plain[0], off[0])
    assert abs(plain[1] - off[1]).max() > 0.001


REFUSED = {
    "no object": ([], "a request is a JSON object with a prompt"),
    "no prompt": ({}, "a request is a JSON object with a prompt"),
    "empty": ({"prompt": ""}, "the prompt is empty: give at least one character"),
    "unknown": ({"prompt": "a#"}, "unknown character '#' at position 1"),
    "long": ({"prompt": "a" * 12}, "the prompt has 12 tokens, more than block_size=11"),
    "no head": ({"prompt": "a", "heads": {"0.9": 0}}, "heads has no '0.9'"),
    "no block": ({"prompt": "a", "blocks": {"-1": 0}}, "blocks has no '-1'"),
    "no factor": ({"prompt": "a", "blocks": {"0": "x"}}, "blocks 0: 'x' must be a factor from 0"),
    "no number": ({"prompt": "a", "blocks": {"0": float("nan")}}, "blocks 0: nan must be a factor"),
    "no factors": ({"prompt": "a", "heads": [1]}, "heads must be an object of factors"),
    "no patch": ({"prompt": "a", "patch": {"block": 0}}, "a patch has a block, a position in the"),
    "no position": (
        {"prompt": "a", "patch": {"block": 0, "position": 1, "prompt": "b"}},
        "a patch can't be at block 0 and position 1",
    ),
    "another length": (
        {"prompt": "ab", "patch": {"block": 0, "position": 1, "prompt": "a"}},
        "the other prompt has 1 tokens and this one 2: a patch needs as many",
    ),
}


@pytest.mark.parametrize(("asked", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_request_gets_one_line(look, asked, reason):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        answer(look, asked)
    assert reason in str(refused.value)


@pytest.fixture
def served(look):
    """The address of a page, in parts, with its server at work."""
    with serving(look, PROMPT) as (address, server):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield address
        server.shutdown()
        thread.join()


def ask(address: str, path: str | None = None, body: bytes | None = None, **headers: str):
    """The status and the body of an answer."""
    host, _, rest = address.removeprefix("http://").partition("/")
    given = {"Content-Type": "application/json"} if body is not None else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(host, timeout=10)
    with contextlib.closing(connection):
        method = "GET" if body is None else "POST"
        connection.request(method, f"/{rest}" if path is None else path, body, given)
        answered = connection.getresponse()
        return answered.status, answered.read().decode()


def test_the_page_and_its_numbers_are_served(served, look):
    status, page = ask(served)
    assert status == 200
    assert "connect-src 'self'" in page
    secret = served.split("/")[-2]
    body = json.dumps({"prompt": "spice", "heads": {"0.1": 0}}).encode()
    status, found = ask(served, f"/{secret}/look", body, Origin=served.split(f"/{secret}")[0])
    assert status == 200
    assert json.loads(found)["tokens"] == TOKENIZER.encode("spice").tolist()
    status, found = ask(served, f"/{secret}/look", json.dumps({"prompt": "#"}).encode())
    assert status == 200
    assert json.loads(found)["error"].startswith("unknown character '#' at position 0")


def test_strangers_get_one_line(served):
    secret, port = served.split("/")[-2], served.split(":")[2].split("/")[0]
    look, body = f"/{secret}/look", b'{"prompt": "a"}'
    for status, path, sent, headers in (
        (404, "/", None, {}),
        (404, "/wrong/", None, {}),
        (404, f"/{secret}/../../etc/passwd", None, {}),
        (404, f"/{secret}/look.html", None, {}),
        (404, "/wrong/look", body, {}),
        (403, None, None, {"Host": f"evil.example:{port}"}),
        (403, None, None, {"Host": "127.0.0.1"}),
        (403, look, body, {"Origin": "http://evil.example"}),
        (403, look, body, {"Origin": f"http://evil.example:{port}"}),
        (403, look, body, {"Origin": "null"}),
        (415, look, body, {"Content_Type": "text/plain"}),
        (413, look, b"", {"Content_Length": "1073741824"}),
        (413, look, b"", {"Content_Length": "9" * 5000}),
        (415, look, b"", {"Content_Length": "-1"}),
        (400, look, b"[" * 100_000, {}),
        (400, look, b"\xff", {}),
    ):
        found, said = ask(served, path, sent, **headers)
        assert (found, said.count("\n") <= 1) == (status, True), (path, headers, said)
        assert "root:" not in said
    assert ask(served)[0] == 200


def test_the_port_is_open_on_the_loopback_interface_alone(served):
    port = int(served.split(":")[2].split("/")[0])
    with socket.socket() as other:
        other.settimeout(2)
        assert other.connect_ex(("127.0.0.2", port)) != 0


def test_a_thousand_connections_at_once_harm_nobody(look, monkeypatch):
    monkeypatch.setattr(live, "SECONDS", 0.5)
    with serving(look, PROMPT) as (address, server):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, before = int(address.split(":")[2].split("/")[0]), threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        with ThreadPoolExecutor(50) as pool:
            futures = [pool.submit(ask, address) for _ in range(1000)]
        assert {f.result()[0] for f in futures if not f.exception()} <= {200}
        assert threading.active_count() <= before + live.MOST_REQUESTS + 1
        for each in silent:
            each.close()
        time.sleep(0.6)
        assert ask(address)[0] == 200
        server.shutdown()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGHUP")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(trained, number):
    # a shell in the background ignores SIGINT, and its programs would too
    main = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    main += "from jgpt.cli import main; main()"
    command = [sys.executable, "-c", main, "look", str(trained.directory), "--live"]
    process = subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said.endswith(" (Ctrl-C ends it)\n")
    assert ask(said.split()[3])[0] == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (out, err) == ("", "")
    assert process.returncode == (0 if number == signal.SIGINT else -number)


def test_a_page_needs_a_prompt_or_to_be_live(trained, tmp_path):
    said = refused("look", trained.directory, cwd=tmp_path)
    assert said == "jgpt: give a prompt, or --live"
    assert os.listdir(tmp_path) == []


# In a browser


@pytest.fixture(scope="module")
def page():
    with browser() as opened:
        yield opened


@pytest.fixture
def opened(page, served):
    page.errors.clear()
    page.open(served)
    yield page
    assert page.errors == []


SETTLED = "(async () => { while (asking) await asking })()"


def typed(page, text: str) -> None:
    page.run(f"$('prompt').value = {json.dumps(text)}")
    page.run("$('prompt').dispatchEvent(new Event('input'))")
    page.run(SETTLED)


@needs_chromium
def test_everything_follows_the_prompt(opened, look):
    typed(opened, "tractable"[:7])
    assert opened.run("tokens") == TOKENIZER.encode("tractab").tolist()
    assert opened.run("textSpans.map(each => each.textContent).join('')") == "tractab"
    expected = answer(look, {"prompt": "tractab"})
    assert opened.run("weight(1, 1, 5, 2)") == pytest.approx(
        unpacked(expected["attention"])[1, 1, 17], abs=1e-6
    )
    typed(opened, "a#")
    assert opened.run("$('said').textContent").startswith("unknown character '#' at position 1")
    assert opened.run("tokens.length") == 7
    typed(opened, "<script>")
    assert opened.run("textSpans.map(each => each.textContent).join('')") == "<script>"


@needs_chromium
def test_three_questions_are_answered_by_clicking(opened, look):
    """Which letters made this prediction; what happens without a head; what gives a weight."""
    data = answer(look, {"prompt": PROMPT})
    opened.click(*middle_of(opened, "textSpans[5]"))
    opened.click(*middle_of(opened, "headButtons[1 * heads + 2]"))
    row = [opened.run(f"weight(1, 2, 5, {key})") for key in range(6)]
    key = int(np.argmax(row))
    assert row == pytest.approx(unpacked(data["attention"])[1, 2, 15:21], abs=1e-6)

    middle_of(opened, "$('map')")
    left, top = opened.run("(b => [b.left, b.top])($('map').getBoundingClientRect())")
    inner_left, inner_top, cell = opened.run("[map.left, map.top, map.cell]")
    opened.click(left + inner_left + (key + 0.5) * cell, top + inner_top + 5.5 * cell)
    said = opened.run("$('arithmetic').textContent")
    query, keys = (unpacked(each)[1, 2] for each in data["products"])
    assert said.startswith(f"query · key = {query[5] @ keys[key]:.3f}; scaled by ")
    assert said.endswith(f": {row[key]:.4f}") or abs(float(said.split()[-1]) - row[key]) < 1e-3

    opened.click(*middle_of(opened, "document.querySelector('[data-head=\"1.2\"]')"))
    opened.run(SETTLED)
    changed = answer(look, {"prompt": PROMPT, "heads": {"1.2": 0}})
    was, now = (-np.mean(each["next_log_probabilities"][-1]) for each in (data, changed))
    effect = opened.run("$('effect').textContent")
    assert f"{was:.3f} nats per token before, {now:.3f} now ({now - was:+.3f})" in effect
    assert opened.run("$('code').textContent") == changed["code"]
    assert "jgpt.edit" in changed["code"]
    opened.click(*middle_of(opened, "$('reset')"))
    opened.run(SETTLED)
    assert opened.run("data.before") is None


@needs_chromium
def test_an_address_has_the_state(opened, served):
    opened.run("change({ blocks: { 1: 0 }, heads: { '0.2': 0 }, prompt: 'spare' })")
    opened.run(SETTLED)
    there = opened.run("location.href")
    numbers = opened.run("data.log_probabilities[2][4]")
    opened.open("about:blank")
    opened.open(there)
    opened.run(SETTLED)
    assert opened.run("$('prompt').value") == "spare"
    assert opened.run("data.log_probabilities[2][4]") == numbers
    assert opened.run("document.querySelector('[data-head=\"0.2\"]').checked") is False
    assert opened.run("document.querySelector('[data-block=\"1\"]').value") == "0"


@needs_chromium
def test_dials_shape_the_distribution_as_sampling_does(opened, look):
    logits = look.model(tokens_of(PROMPT))[0, -1]
    order = np.argsort(-np.asarray(logits), kind="stable")
    scaled = np.asarray(logits)[order] / 0.5
    p = np.exp(scaled - scaled.max())
    p[5:] = 0
    kept = (np.cumsum(p) - p) / p.sum() < 0.9
    p = p * kept * (p >= 0.05)
    expected = (p / p.sum())[p > 0]
    opened.run("Object.assign(dials, {temperature: .5, 'top-k': 5, 'top-p': .9, 'min-p': .05})")
    found = opened.run("distribution(layers, time - 1).map(each => each.probability)")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert opened.run("distribution(layers, time - 1)[0].token") == order[0]
    opened.run("dials.temperature = 0")
    assert opened.run("distribution(layers, time - 1).map(each => each.probability)") == [1]


@needs_chromium
def test_tokens_are_written_by_click_and_on_and_on(opened, look):
    opened.run("choose(goTo(time - 1))")
    token = opened.run("distribution(layers, time - 1)[1].token")
    opened.click(*middle_of(opened, "document.querySelectorAll('#bars .choice .token')[1]"))
    opened.run(SETTLED)
    assert opened.run("tokens.at(-1)") == token
    opened.run("writeOn()")  # to the end of the block
    assert opened.run("tokens.length") == 11
    assert opened.run("$('said').textContent") == "the text fills the block of 11 tokens"
    assert opened.run("$('write').textContent") == "Write on"


@needs_chromium
def test_controls_work_by_keyboard_and_have_names(opened):
    unnamed = """[...document.querySelectorAll('button, input, select, textarea')].filter(each =>
        !each.textContent.trim() && !each.getAttribute('aria-label') && !each.labels?.length
    ).map(each => each.id || each.outerHTML)"""
    assert opened.run(unnamed) == []
    opened.run("$('prompt').focus()")
    order = []
    for _ in range(12):
        opened.press("Tab")
        order.append(opened.run("document.activeElement.id || document.activeElement.className"))
    assert order[:4] == ["sample", "write", "reset", "text"]
    assert "lens" in order


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "dark")])
def test_the_live_page_fits_its_screen(page, served, width, scheme):
    page.errors.clear()
    page.open(served, width, scheme)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.errors == []
    if width == 390:
        targets = (
            "textSpans.map(each => each.getBoundingClientRect()).map(b => [b.width, b.height])"
        )
        assert np.min(page.run(targets)) >= 24


@needs_chromium
def test_a_server_that_ended_is_said(page, look):
    with serving(look, PROMPT) as (address, server):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(address)
        server.shutdown()
    for text in ("a", "ab", "abc"):  # the browser may have connected before
        typed(page, text)
    assert page.run("$('said').textContent").startswith("the server doesn't answer")
    page.errors.clear()
