"""The page of `jgpt look --live`: what it is asked, what it refuses, and in a browser."""

import contextlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int

import jgpt
from jgpt.cli import commands
from jgpt.fitting.profiling import compilations_watched
from jgpt.pictures import live
from jgpt.pictures.live import RunPage, answer, serving
from jgpt.pictures.numbers import Look
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from jgpt.shapes import contract
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import TrainState
from jgpt.user_code import load_code
from tests.models import loud, random_gpt
from tests.runs.test_look import (
    TOKENIZER,
    by_batch,
    cell_of,
    middle_of,
    needs_chromium,
    unpacked,
)
from tests.runs.test_own import Sums, SumsConfig

PROMPT, OTHER = "script€", "crespas"


@pytest.fixture(scope="module")
def look():
    return Look(random_gpt("modern"), TOKENIZER, "run")


@pytest.fixture(scope="module")
def other():
    model = random_gpt("modern")
    for leaf in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda x: hasattr(x, "set_value")
    ):
        leaf.set_value(leaf[...] * 0.8)
    return Look(model, TOKENIZER, "run")


@pytest.fixture(scope="module")
def run(look, other, tmp_path_factory):
    """A run of two checkpoints: step 0, and step 7, which is the best and the last."""
    path = tmp_path_factory.mktemp("runs") / "run"
    jgpt.save(other.model, path, tokenizer=TOKENIZER, config=look.model.config)
    directory = RunDirectory.open(path)
    config = directory.config()
    weights = nnx.to_pure_dict(nnx.state(look.model, nnx.Param))
    optimizer = make_optimizer(config.optimizer, config.steps).init(weights)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(TrainState(weights, optimizer, jnp.int32(7)), 1.5)
    lines = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 8)]
    lines[6] |= {"validation_loss": 1.5}
    directory.append("metrics.jsonl", [{"step": 0, "validation_estimate": 2.75}, *lines])
    return path


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


def check_code(model, found: dict) -> None:
    """An answer is what its code computes; changes change something."""
    names = {"model": model, "tokenizer": TOKENIZER, "jgpt": jgpt, "jnp": jnp}
    names["tokens"] = tokens_of(PROMPT)
    exec(found["code"], names)
    logs = np.asarray(jax.nn.log_softmax(names["logits"][0]))
    expected = np.take_along_axis(logs, np.array(found["candidates"][-1]), -1)
    # In relation to the largest: float32 has seven digits, and these are some -17.
    tolerance = 2e-6 * abs(expected).max()
    np.testing.assert_allclose(found["log_probabilities"][-1], expected, rtol=0, atol=tolerance)
    changed = abs(names["logits"] - model(tokens_of(PROMPT))).max()
    assert changed > 0.01 if found["before"] else changed == 0


@pytest.mark.parametrize("name", CHANGES)
def test_an_answer_is_what_its_code_computes(look, name):
    found = answer(look, {"prompt": PROMPT, **CHANGES[name]})
    check_code(look.model, found)
    assert (name == "nothing") == (found["before"] is None)
    if found["before"]:
        log = jax.nn.log_softmax(look.model(tokens_of(PROMPT))[0])
        np.testing.assert_allclose(
            found["before"]["next_log_probabilities"],
            log[jnp.arange(6), tokens_of(PROMPT)[0, 1:]],
            rtol=0,
            atol=2e-5,
        )


@pytest.mark.slow
def test_a_model_of_one_s_own_is_drawn_and_changed_where_its_trace_allows(tmp_path):
    path = tmp_path / "own.py"
    path.write_bytes(Path(commands.__file__).with_name("new_gpt.py.txt").read_bytes())
    make = load_code(f"{path}:GPT")
    sizes = {"vocab_size": 17, "block_size": 16, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    model = loud(make(sys.modules[make.__module__].Config(**sizes), rngs=nnx.Rngs(0)))
    look = Look(model, TOKENIZER, "run")
    assert look.anatomy.branches[1] == ("blocks.1.attention", "blocks.1.mlp")
    check_code(model, answer(look, {"prompt": PROMPT, **CHANGES["all"]}))
    plain = answer(look, {"prompt": PROMPT})
    weights = jgpt.capture(model, "blocks.1.attention.weights")(tokens_of(PROMPT))
    below = weights["blocks.1.attention.weights"][0][:, *np.tril_indices(7)]
    np.testing.assert_allclose(unpacked(plain["attention"])[1], below, rtol=0, atol=1e-4)
    assert plain["products"] is None
    assert "mlp" in [row["name"] for row in plain["arrays"]]


def test_a_model_without_a_typed_call_has_its_next_token():
    model = Sums(SumsConfig(vocab_size=17, block_size=11, rank=3), rngs=nnx.Rngs(0))
    found = answer(Look(model, TOKENIZER, "run"), {"prompt": PROMPT})

    assert (found["blocks"], found["layers"], found["attention"]) == ([], [], None)
    assert [row["name"] for row in found["arrays"]] == ["logits"]
    assert np.shape(found["candidates"]) == (1, 7, 10)


def test_typed_modules_of_a_model_whose_own_call_is_not_typed_are_drawn():
    class Untyped(nnx.Module):
        vocab_size = 17
        block_size = 11

        def __init__(self, model):
            self.inner = model

        def __call__(self, tokens):
            return 2 * self.inner(tokens) / 2

    model = random_gpt("nanogpt")
    found = answer(Look(Untyped(model), TOKENIZER, "run"), {"prompt": PROMPT})
    expected = answer(Look(model, TOKENIZER, "run"), {"prompt": PROMPT})

    assert found["attention"] == expected["attention"]
    np.testing.assert_allclose(
        found["log_probabilities"], expected["log_probabilities"], rtol=0, atol=1e-5
    )


def test_a_module_that_returns_a_tuple_is_neither_a_block_nor_a_branch():
    class Pair(nnx.Module):
        @contract.typed
        def __call__(
            self, x: Float[Array, "batch time width"]
        ) -> tuple[Float[Array, "batch time width"], Float[Array, "batch time width"]]:
            return x / 2, x / 4

    class PairBlock(nnx.Module):
        def __init__(self):
            self.pair = Pair()

        @contract.typed
        def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
            half, quarter = self.pair(x)
            return x + half + quarter

    class PairModel(nnx.Module):
        vocab_size = 17
        block_size = 11

        def __init__(self):
            self.blocks = nnx.List([PairBlock(), PairBlock()])
            self.pairs = nnx.List([Pair()])

        @contract.typed
        def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time 17"]:
            x = jax.nn.one_hot(tokens, 17)
            for block in self.blocks:
                x = block(x)
            first, _ = self.pairs[0](x)
            return first

    anatomy = Look(PairModel(), TOKENIZER, "run").anatomy

    assert anatomy.blocks == ("blocks.0", "blocks.1")
    assert anatomy.branches == ((), ())


def test_a_block_switched_off_is_left_out(look):
    found = answer(look, {"prompt": PROMPT, "blocks": {"1": 0}})
    *_, block = (row for row in found["arrays"] if row["path"] == "blocks.1")
    states = look.model.hidden_states(tokens_of(PROMPT))

    np.testing.assert_allclose(by_batch(block), states[1], rtol=0, atol=1e-3)


def test_attention_follows_a_change_of_an_earlier_block(look):
    plain = unpacked(answer(look, {"prompt": PROMPT})["attention"])
    off = unpacked(answer(look, {"prompt": PROMPT, "heads": {"0.1": 0}})["attention"])

    np.testing.assert_array_equal(plain[0], off[0])
    assert abs(plain[1] - off[1]).max() > 0.001


REFUSED = {
    "no object": ([], "a request must be a JSON object with a prompt"),
    "no prompt": ({}, "a request must be a JSON object with a prompt"),
    "empty": ({"prompt": ""}, "the prompt is empty: give at least one character"),
    "unknown": ({"prompt": "a#"}, "unknown character '#' at position 1"),
    "long": ({"prompt": "a" * 12}, "the prompt has 12 tokens, more than block_size=11"),
    "no head": ({"prompt": "a", "heads": {"0.9": 0}}, "heads has no '0.9'"),
    "no block": ({"prompt": "a", "blocks": {"-1": 0}}, "blocks has no '-1'"),
    "no factor": ({"prompt": "a", "blocks": {"0": "x"}}, "blocks 0: 'x' must be a factor from 0"),
    "no number": ({"prompt": "a", "blocks": {"0": float("nan")}}, "blocks 0: nan must be a factor"),
    "no factors": ({"prompt": "a", "heads": [1]}, "heads must be an object of factors"),
    "no patch": ({"prompt": "a", "patch": {"block": 0}}, "a patch has a block, a position in the"),
    "no number of a block": (
        {"prompt": "a", "patch": {"block": True, "position": 0, "prompt": "b"}},
        "a patch has a block, a position in the",
    ),
    "no number of a position": (
        {"prompt": "a", "patch": {"block": 0, "position": False, "prompt": "b"}},
        "a patch has a block, a position in the",
    ),
    "no position": (
        {"prompt": "a", "patch": {"block": 0, "position": 1, "prompt": "b"}},
        "a patch can't be at block 0 and position 1",
    ),
    "another length": (
        {"prompt": "ab", "patch": {"block": 0, "position": 1, "prompt": "a"}},
        "the other prompt has 1 token and this one 2: a patch needs as many",
    ),
}


@pytest.mark.parametrize(("asked", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_request_gets_one_line(look, asked, reason):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        answer(look, asked)
    assert reason in str(refused.value)


@contextlib.contextmanager
def at_work(run: Path, **options: Any):
    """The address of a run's page, with its server at work."""
    with serving(RunPage(run, PROMPT, **options)) as (address, server):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def served(run):
    with at_work(run) as address:
        yield address


def ask(address: str, path: str | None = None, body: bytes | None = None, **headers: str):
    """The status and the body of an answer."""
    host, _, rest = address.removeprefix("http://").partition("/")
    given = {"Content-Type": "application/json"} if body is not None else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(host, timeout=180)
    with contextlib.closing(connection):
        method = "GET" if body is None else "POST"
        connection.request(method, f"/{rest}" if path is None else path, body, given)
        answered = connection.getresponse()
        return answered.status, answered.read().decode()


def test_a_page_is_told_of_training_and_its_checkpoints(run, look, other):
    page = RunPage(run, PROMPT)
    told = page.training({})
    assert told["loss"] == [[step, pytest.approx(3 - step / 10)] for step in range(1, 8)]
    assert (told["validation_loss"], told["validation_estimate"]) == ([[7, 1.5]], [[0, 2.75]])
    assert (told["step"], told["each"]) == (7, 1)
    assert (told["checkpoints"], told["named"]) == ([0, 7], {"best": 7, "last": 7})
    asked = {"prompt": "spice", "heads": {"0.1": 0}, "checkpoint": 7, "other": 0}
    found = page.look(asked)
    for each, its, step in ((found, look, 7), (found["other"], other, 0)):
        expected = answer(its, asked)
        assert each["checkpoint"] == step
        assert each["log_probabilities"] == expected["log_probabilities"]
        assert each["attention"] == expected["attention"]
    assert found["attention"] != found["other"]["attention"]
    snapshot = page.snapshot({"checkpoint": 0})
    assert snapshot["attention"] == answer(other, {"prompt": PROMPT})["attention"]
    assert snapshot["sample"] == jgpt.generate_text(
        other.model, TOKENIZER, "", 100, temperature=0.8
    )
    newest = page.snapshot({"checkpoint": 7})
    assert (newest["checkpoint"], newest["attention"]) == (
        7,
        answer(look, {"prompt": PROMPT})["attention"],
    )
    for wrong in (True, "first", [0]):
        with pytest.raises(ValueError, match="must be best, last or a step"):
            page.look({"prompt": "a", "checkpoint": wrong})
    for wrong in (-1, 3, 10**4000):
        with pytest.raises(ValueError, match=f"has no checkpoint {wrong}: it has 0, 7"):
            page.look({"prompt": "a", "other": wrong})


def test_the_checkpoint_that_was_asked_for_is_shown_first(run):
    """Step 0 is neither the best nor the last one."""
    page = RunPage(run, PROMPT, which=0)
    assert page.look({"prompt": PROMPT})["checkpoint"] == 0
    assert page.look({"prompt": PROMPT, "checkpoint": 7})["checkpoint"] == 7
    with at_work(run, which=0) as address:
        _, html = ask(address)
    assert '"checkpoint":0' in html


def test_a_long_curve_is_drawn_as_means(run, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "MOST_POINTS", 3)
    told = RunPage(run, PROMPT).training({})

    assert told["each"] == 3
    np.testing.assert_allclose(told["loss"], [[2, 2.8], [5, 2.5], [7, 2.3]])


def test_checkpoints_share_a_program_and_few_stay_open(run, monkeypatch):
    monkeypatch.setattr(live, "MOST_OPEN", 1)
    page = RunPage(run, PROMPT)
    (first,) = page._opened.values()
    page._open(0)
    (second,) = page._opened.values()

    assert second is not first
    assert second._program is first._program


def test_a_run_that_is_overwritten_while_it_is_shown_is_shown_with_its_new_weights(
    run, look, other, tmp_path
):
    """At the same step, as a run that is trained again in the same directory has it."""
    path = tmp_path / "run"
    jgpt.save(other.model, path, tokenizer=TOKENIZER, config=look.model.config)
    page = RunPage(path, PROMPT)
    before = page.look({"prompt": PROMPT})
    assert before["log_probabilities"] == answer(other, {"prompt": PROMPT})["log_probabilities"]
    assert page.snapshot({})["attention"] == before["attention"]
    shutil.rmtree(path)
    jgpt.save(look.model, path, tokenizer=TOKENIZER, config=look.model.config)
    after = page.look({"prompt": PROMPT})
    assert after["log_probabilities"] == answer(look, {"prompt": PROMPT})["log_probabilities"]
    assert after["log_probabilities"] != before["log_probabilities"]
    assert page.snapshot({})["attention"] == after["attention"] != before["attention"]


@pytest.mark.parametrize("changed", ["metrics.jsonl", "checkpoints"])
def test_a_page_hears_of_new_metrics_and_of_new_checkpoints(run, tmp_path, changed):
    path = shutil.copytree(run, tmp_path / "run")
    page = RunPage(path, PROMPT)
    seen = page.training({})["at"]
    assert page.training({"since": seen}) == {"unchanged": True}
    os.utime(path / changed, (1, 1))  # as if it was written at another time
    assert page.training({"since": seen})["checkpoints"] == [0, 7]


def test_a_run_that_is_deleted_while_it_is_shown(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    page = RunPage(copy, PROMPT)
    shutil.rmtree(copy)

    for asked in (page.training, page.look, page.snapshot):
        with pytest.raises(OSError, match=r"copy is not a run directory: it has no config\.json"):
            asked({"prompt": "a"})


def test_strangers_get_one_line(served):
    secret = served.split("/")[-2]
    port = served.split(":")[2].split("/")[0]
    look = f"/{secret}/look"
    body = b'{"prompt": "a"}'
    for status, path, sent, headers in (
        (404, "/", None, {}),
        (414, "/" + "a" * 70_000, None, {}),
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
    hosts = f"Host: 127.0.0.1:{port}\r\nHost: evil.example:{port}"
    for status, line in ((403, f"GET /{secret}/"), (501, f"OPTIONS /{secret}/look")):
        with socket.create_connection(("127.0.0.1", int(port))) as other:
            other.sendall(f"{line} HTTP/1.0\r\n{hosts}\r\n\r\n".encode())
            head, _, said = other.makefile().read().partition("\n\n")
            assert (head.split()[1], said.count("\n")) == (f"{status}", 1)
    with socket.socket() as other:  # the port is open on the loopback interface alone
        other.settimeout(2)
        assert other.connect_ex(("127.0.0.2", int(port))) != 0

    assert ask(served)[0] == 200


@pytest.mark.slow
def test_a_thousand_connections_at_once_harm_nobody(run, monkeypatch):
    monkeypatch.setattr(live, "SECONDS", 0.5)
    with at_work(run) as address:
        port = int(address.split(":")[2].split("/")[0])
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        with ThreadPoolExecutor(50) as pool:
            futures = [pool.submit(ask, address) for _ in range(1000)]
        assert {f.result()[0] for f in futures if not f.exception()} <= {200}
        assert threading.active_count() <= before + live.MOST_REQUESTS + 1
        for each in silent:
            each.close()
        time.sleep(0.6)
        assert ask(address)[0] == 200


# idle priority is told and not taken, for on a machine that is busy with tests it would be endless;
# a shell in the background ignores SIGINT, and its programs would too
MAIN = """
import os, signal
os.sched_setscheduler = lambda _, policy, __: print(policy, os.SCHED_IDLE)
signal.signal(signal.SIGINT, signal.default_int_handler)
from jgpt.cli import main
main()
"""
TRAIN = "--steps 1000000 --eval-interval 5000 --steps-per-call 5 --sample-tokens 0 --block-size 16"
TRAIN += " --num-layers 2 --embed-dim 24 --batch-size 4"


@contextlib.contextmanager
def started(*arguments: object):
    """A command with `--live`: the process, and what it says up to its address."""
    command = [sys.executable, "-c", MAIN, *map(str, arguments), "--live", "--no-browser"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline()]
            while said[-1] and "look inside at " not in said[-1] and "(Ctrl-C" not in said[-1]:
                said.append(process.stdout.readline())
            assert said[-1], process.communicate()
            yield process, said
        finally:
            process.kill()


@pytest.fixture
def training(poem, tmp_path):
    """`jgpt train --live`: the process, and the address that it says."""
    options = ("--data", poem, "--out", tmp_path / "run", *TRAIN.split())
    with started("train", "tiny", *options) as (process, said):
        if sys.platform == "linux":
            assert f"{os.SCHED_IDLE} {os.SCHED_IDLE}\n" in said
        yield process, said[-1].split()[-1]


def gone(address: str) -> bool:
    """Whether the server of an address ends.

    It runs only while nothing else wants the processor, so on a busy machine that takes long: the
    limit is for one that never ends.
    """
    port = int(address.split(":")[2].split("/")[0])
    until = time.monotonic() + 180
    while time.monotonic() < until:
        with socket.socket() as other:
            if other.connect_ex(("127.0.0.1", port)) != 0:
                return True
        time.sleep(0.1)
    return False


def test_the_first_checkpoint_finds_its_programs_compiled(run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run, path)
    (path / "checkpoints").rename(path / "later")
    page = RunPage(path, PROMPT, which="last")
    page.warm_up()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        page.look({"prompt": PROMPT})
    (path / "later").rename(path / "checkpoints")
    compiled: list[str] = []
    with compilations_watched(compiled.append):
        assert page.look({"prompt": PROMPT})["checkpoint"] == 7
        assert page.snapshot({})["checkpoint"] == 7
    assert compiled == []


def test_beside_training_the_programs_are_loaded_once_the_address_is_said(run, monkeypatch, capsys):
    said = []
    shown = []

    def warm_up(page):
        said.append(capsys.readouterr().out)
        shown.append(page.which)

    monkeypatch.setattr(live, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(RunPage, "warm_up", warm_up)
    for line in (
        "",
        json.dumps([str(run), PROMPT, None, None]) + "\n",
    ):  # training was refused, or began
        monkeypatch.setattr(sys, "stdin", io.StringIO(line))
        live.main()
        assert [text.startswith("http://127.0.0.1:") for text in said] == [True] * bool(line)

    assert shown == ["last"]  # while a run is trained, not the best checkpoint so far


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_training_waits_for_no_reader_and_ends_with_its_page(training, tmp_path):
    process, address = training
    host = "127.0.0.1"
    port = int(address.split(":")[2].split("/")[0])
    line = f"GET {address.partition(str(port))[2]} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
    stuck = [socket.create_connection((host, port)) for _ in range(20)]
    for each in stuck:  # asks for much, and never reads
        each.sendall(line.encode() * 1000)
    run = RunDirectory.open(tmp_path / "run")
    before = len(run.metrics())
    end = time.monotonic() + 60
    while len(run.metrics()) < before + 1000:
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert (process.returncode, err) == (130, "")
    assert "resume with: " in out
    assert "the page ended" not in out
    assert gone(address)
    for each in stuck:
        each.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_page_ends_however_training_does(training):
    process, address = training
    assert ask(address)[0] == 200
    process.kill()
    process.communicate(timeout=180)
    assert gone(address)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(trained, number):
    with started("look", trained.directory) as (process, (said,)):
        assert said.endswith(" (Ctrl-C ends it)\n")
        assert ask(said.split()[3])[0] == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (out, err) == ("", "")
    assert process.returncode == (0 if number == signal.SIGINT else -number)


# In a browser


@pytest.fixture
def opened(page, served):
    opened_at(page, served)
    yield page
    assert page.errors == []


def opened_at(page, address: str, *how) -> None:
    """Open a live page, and wait until it has all that it asked for."""
    page.open("about:blank")  # another page may still ask a server that ended
    page.errors.clear()
    page.open(address, *how)
    until(page, "data && snapshots.size === training.checkpoints.length")
    page.run(SETTLED)


SETTLED = "(async () => { while (asking) await asking })()"


def put(page, control: str, value: str | float) -> None:
    """Change a control as a reader does."""
    page.run(f"$('{control}').value = {json.dumps(value)}")
    for event in ("input", "change"):
        page.run(f"$('{control}').dispatchEvent(new Event('{event}'))")


def typed(page, text: str) -> None:
    put(page, "prompt", text)
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

    opened.click(*cell_of(opened, 5, key))
    said = opened.run("$('arithmetic').textContent")
    query, keys = (unpacked(data["products"][name])[1, 2] for name in ("query", "key"))
    assert said.startswith(f"query · key = {query[5] @ keys[key]:.3f}; scaled by ")
    assert said.endswith(f": {row[key]:.4f}") or abs(float(said.split()[-1]) - row[key]) < 1e-3

    opened.click(*middle_of(opened, "document.querySelector('[name=\"1.2\"]')"))
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
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_two_checkpoints_are_put_side_by_side(page, served, look, other, width, scheme):
    opened_at(page, served, width, scheme)
    assert page.run("$('twins').hidden")
    assert page.run("document.documentElement.scrollWidth") <= width
    paper = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 384) == (scheme == "dark")
    assert len(page.screenshot()) > 100_000  # a page of empty boxes has 30 to 60 kB
    if width == 390:  # a finger hits each token
        boxes = "textSpans.map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
        assert np.min(page.run(boxes)) >= 24
    put(page, "other", 0)
    page.run(SETTLED)
    page.run("choose({ query: 5, key: 3, layer: 1, head: 2, depth: 1 })")
    both = page.run("twins.map(({ map, told }) => [weight(1, 2, 5, 3, map.of), told.textContent])")
    titles = page.run("[...document.querySelectorAll('#twins h3')].map(e => e.textContent)")
    assert titles == ["Step 7", "Step 0"]
    for (found, said), its, side in zip(both, (look, other), (0, 1), strict=True):
        data = answer(its, {"prompt": PROMPT})
        assert found == pytest.approx(unpacked(data["attention"])[1, 2, 18], abs=1e-6)
        assert f"the weight {found:.4f}." in said
        loss = -np.mean(data["next_log_probabilities"][-1])
        assert f"Loss on the text: {loss:.3f} nats" in said
        best = np.exp(data["log_probabilities"][1][5][0])
        assert f"” {best:.4f}, “" in said
        cell = f"twins[{side}].lens.cells[1][5]"
        page.mouse("mouseMoved", *middle_of(page, cell))
        assert (
            f"layer 0, after “t” (5)\n“{page.run(f'{cell}.textContent')}” {best:.4f}"
            in page.run("$('tip').textContent")
        )
    assert both[0] != both[1]
    assert page.run("document.documentElement.scrollWidth") <= width
    assert "0" in page.run("decodeURIComponent(location.hash)")
    assert page.errors == []


@pytest.mark.slow
@needs_chromium
def test_a_page_grows_with_the_run(page, run, tmp_path):
    """Begun without a checkpoint; then one comes, another, and the run is deleted."""
    copy = shutil.copytree(run, tmp_path / "copy")
    kept = tmp_path / "kept"
    shutil.move(copy / "checkpoints", kept)
    (copy / "checkpoints").mkdir()
    with at_work(copy) as address:
        page.open("about:blank")
        page.errors.clear()
        page.open(address)
        until(page, "training")
        assert page.run("document.body.className") == "empty"
        assert "The first checkpoint comes" in page.run("$('progress').textContent")
        assert page.run("training.loss.length") == 7
        for step, rows in ((0, 1), (7, 2)):
            shutil.move(kept / f"{step}", copy / "checkpoints" / f"{step}")
            until(
                page, f"data?.checkpoint === {step} && $('growth').children.length === {3 * rows}"
            )
        assert page.run("$('growth').children[0].textContent") == "step 7: 1.5000"
        text = page.run("$('growth').children[2].textContent")
        assert text == page.run("snapshots.get(7).sample")
        shutil.rmtree(copy)
        until(page, "$('progress').textContent.includes('is not a run directory')")
        assert page.run("tokens.length") == 7
        assert page.errors == []


@pytest.mark.slow
@needs_chromium
def test_an_open_page_forgets_a_run_that_is_overwritten(page, run, look, tmp_path):
    """Step 0 of the new run has other weights than step 0 of the old one."""
    path = shutil.copytree(run, tmp_path / "run")
    sample = jgpt.generate_text(look.model, TOKENIZER, "", 100, temperature=0.8)
    with at_work(path) as address:
        opened_at(page, address)
        assert page.run("snapshots.get(0).sample") != sample
        shutil.rmtree(path)
        jgpt.save(look.model, path, tokenizer=TOKENIZER, config=look.model.config)
        until(page, "training.step === 0 && data.checkpoint === 0 && snapshots.has(0)")
        until(page, f"snapshots.get(0)?.sample === {json.dumps(sample)}")
        assert page.run("snapshots.size") == 1
        assert page.errors == []


def until(page, condition: str) -> None:
    end = time.monotonic() + 60
    while not page.run(f"Boolean({condition})"):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


@needs_chromium
def test_an_address_has_the_state(opened, served):
    opened.run("change({ blocks: { 1: 0 }, heads: { '0.2': 0 }, prompt: 'spare' })")
    opened.run(SETTLED)
    there = opened.run("location.href")
    numbers = opened.run("data.log_probabilities[2][4]")
    opened.open("about:blank")
    opened_at(opened, there)

    assert opened.run("$('prompt').value") == "spare"
    assert opened.run("data.log_probabilities[2][4]") == numbers
    assert opened.run("document.querySelector('[name=\"0.2\"]').checked") is False
    assert opened.run("document.querySelector('#switches [name=\"1\"]').value") == "0"


def turn(page, dial: str, value: float) -> None:
    put(page, dial, value)
    assert page.run(f"$('{dial}').nextElementSibling.textContent") == f"{value:g}"


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
    for dial, value in {"temperature": 0.5, "top-k": 5, "top-p": 0.9, "min-p": 0.05}.items():
        turn(opened, dial, value)
    found = opened.run("distribution(layers, time - 1).map(each => each.probability)")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert opened.run("distribution(layers, time - 1)[0].token") == order[0]
    assert opened.run("document.querySelectorAll('#bars .bar').length") == len(expected)
    turn(opened, "temperature", 0)
    assert opened.run("distribution(layers, time - 1).map(each => each.probability)") == [1]


@needs_chromium
def test_tokens_are_written_by_click_and_on_and_on(opened, look):
    opened.run("choose(goTo(time - 1))")
    token = opened.run("distribution(layers, time - 1)[1].token")
    opened.click(*middle_of(opened, "document.querySelectorAll('#bars button .token')[1]"))
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
    for _ in range(30):
        opened.press("Tab")
        order.append(opened.run("document.activeElement.id || document.activeElement.className"))
    assert order[:8] == ["sample", "write", "reset", "checkpoint", "other", "", "", "text"]
    assert "lens" in order


@pytest.mark.slow
@needs_chromium
def test_a_server_that_ended_is_said(page, run):
    with at_work(run) as address:
        opened_at(page, address)
    for text in ("a", "ab", "abc"):  # the browser may have connected before
        typed(page, text)
    assert page.run("$('said').textContent").startswith("the server doesn't answer")
    page.errors.clear()
