"""The page of `jgpt train --page`: what is on it, what it survives, and that it reloads itself."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.cli.options import in_options
from jgpt.cli.page import PROGRAM, PageProgress
from jgpt.cli.terminal import open_console
from jgpt.data.tokenizers import NumberTokenizer
from jgpt.fitting.profiling import compilations_watched
from jgpt.pictures import page as page_module
from jgpt.pictures import training_page
from jgpt.pictures.numbers import Look
from jgpt.pictures.training_page import TrainingPage
from jgpt.refusal import message_of
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import TrainState
from tests.commands import refused
from tests.models import random_gpt
from tests.runs.test_look import TOKENIZER, needs_chromium, unpacked

PROMPT = "script€"


@pytest.fixture(scope="module")
def looks():
    """The models of the two checkpoints, by step."""
    first = random_gpt("modern")
    for leaf in jax.tree.leaves(
        nnx.state(first, nnx.Param), is_leaf=lambda x: hasattr(x, "set_value")
    ):
        leaf.set_value(leaf[...] * 0.8)
    return {0: Look(first, TOKENIZER, "run"), 7: Look(random_gpt("modern"), TOKENIZER, "run")}


@pytest.fixture(scope="module")
def made(looks, tmp_path_factory):
    """A run of two checkpoints, of which the second one is evaluated."""
    path = tmp_path_factory.mktemp("runs") / "run"
    jgpt.save(looks[0].model, path, tokenizer=TOKENIZER, config=looks[0].model.config)
    directory = RunDirectory.open(path)
    save(directory, looks[7].model, 7, validation_loss=1.5)
    lines: list[dict[str, Any]] = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 8)]
    lines[6] |= {"validation_loss": 1.5}
    directory.append("metrics.jsonl", [{"step": 0, "validation_estimate": 2.75}, *lines])
    return path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def save(run: RunDirectory, model: Any, step: int, **loss: Any) -> None:
    config = run.config()
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = make_optimizer(config.optimizer, config.steps).init(weights)
    state = TrainState(weights, optimizer, jnp.int32(step))
    with Checkpoints(run) as checkpoints:
        checkpoints.save(state, loss.pop("validation_loss", None), **loss)


@pytest.fixture(scope="module")
def prepared(made):
    """A writer that has made its programs, which takes seconds, and written nothing."""
    writer = TrainingPage(made, PROMPT)
    writer.prepare()
    return writer


def with_programs_of(prepared: TrainingPage, writer: TrainingPage) -> TrainingPage:
    """A writer as `prepare` leaves it, of a run of the same model."""
    writer._look = prepared._look
    writer._pages = prepared._pages
    return writer


@pytest.fixture
def writer(run, prepared):
    return with_programs_of(prepared, TrainingPage(run, PROMPT))


def data_of(run: Path) -> dict[str, Any]:
    html = (run / "page.html").read_text(encoding="utf-8")
    assert html.endswith("</html>\n")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', html)
    return json.loads(found)


def expected_of(look: Look) -> Any:
    """The log probabilities of the first text that a page compares its own with."""
    return np.ravel(look(TOKENIZER.encode(PROMPT).tolist(), 7)["log_probabilities"][-1])


def test_a_page_has_the_losses_and_each_checkpoint_s_sample_and_attention(run, writer, looks):
    tokens = TOKENIZER.encode(PROMPT).tolist()

    is_new = writer.update()
    data = data_of(run)
    is_new_again = writer.update()

    assert is_new
    assert not is_new_again
    assert data["text"] == PROMPT
    training = data["training"]
    assert training["loss"] == [[step, pytest.approx(3 - step / 10)] for step in range(1, 8)]
    assert training["validation_loss"] == [[7, 1.5]]
    assert training["validation_estimate"] == [[0, 2.75]]
    assert training["step"] == 7
    assert training["each"] == 1
    assert training["seconds"] > 0
    first, second = training["snapshots"]
    assert first["checkpoint"] == 0
    assert second["checkpoint"] == 7
    for snapshot in (first, second):
        look = looks[snapshot["checkpoint"]]
        sample = jgpt.generate_text(look.model, TOKENIZER, "", 100)
        attention = unpacked(look(tokens, 7)["attention"])
        assert snapshot["tokens"] == tokens
        assert snapshot["sample"] == sample
        found = unpacked(snapshot["attention"])
        np.testing.assert_allclose(found, attention, rtol=0, atol=0.003)
        assert snapshot["attention"]["bytes"] == 1
    # The model in the page is the newest one.
    np.testing.assert_allclose(
        data["models"][0]["expected"], expected_of(looks[7]), rtol=0, atol=1e-5
    )


def test_the_last_page_has_no_timer_and_the_newest_losses(run, writer):
    writer.update()
    RunDirectory.open(run).append("metrics.jsonl", [{"step": 8, "loss": 0.5}])
    assert writer.update(is_last=True)
    training = data_of(run)["training"]

    assert training["seconds"] is None
    assert training["loss"][-1] == [8, 0.5]


def test_a_checkpoint_waits_for_its_loss(run, writer, looks):
    directory = RunDirectory.open(run)
    writer.update()
    save(directory, looks[0].model, 9, unevaluated={"step": 9, "loss": 1.0})
    assert not writer.update()
    with Checkpoints(directory) as checkpoints:
        checkpoints.evaluated(9, 1.25)
    assert writer.update()

    found = [each["checkpoint"] for each in data_of(run)["training"]["snapshots"]]
    assert found == [0, 7, 9]


def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(run, writer, looks, monkeypatch):
    load = training_page.load

    def deleted(path, *, which, **options):
        shutil.rmtree(run / "checkpoints" / "7")
        return load(path, which=which, **options)

    writer.update()
    os.utime(run / "checkpoints" / "7" / "manifest.json", (5, 5))  # as if it was written again
    monkeypatch.setattr(training_page, "load", deleted)
    assert not writer.update()
    monkeypatch.setattr(training_page, "load", load)
    assert writer.update()
    (model,) = data_of(run)["models"]
    np.testing.assert_allclose(model["expected"], expected_of(looks[0]), rtol=0, atol=1e-5)


def test_a_page_whose_writing_is_interrupted_leaves_the_older_one(run, writer, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    writer.update()
    before = (run / "page.html").read_bytes()
    monkeypatch.setattr("jgpt.durable.os.replace", killed)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process tidies nothing
    with pytest.raises(Killed):
        writer.update(is_last=True)
    monkeypatch.undo()

    assert (run / "page.html").read_bytes() == before
    assert len(list(run.glob("page.html.*.partial"))) == 1
    TrainingPage(run, PROMPT)
    assert list(run.glob("page.html.*")) == []


def test_a_run_with_a_hostile_name_and_prompt_has_a_page(made, prepared, tmp_path):
    name = "<script>{{style}} 'é*?[a]"
    run = shutil.copytree(made, tmp_path / name)
    writer = with_programs_of(prepared, TrainingPage(run, "</script"))

    is_new = writer.update()

    assert is_new
    data = data_of(run)
    assert data["name"] == name
    assert data["text"] == "</script"


def test_a_beginning_that_is_too_long_for_a_page_is_cut(run, monkeypatch):
    for name in ("ModelPages", "first_text", "_sample"):  # programs that this needs none of
        monkeypatch.setattr(training_page, name, lambda *_: None)
    writer = TrainingPage(run, "script" * 3)  # of eighteen tokens, where eleven are a block

    writer.prepare()

    assert writer._prompt == "scrip"


def test_a_long_curve_is_drawn_as_means(run, monkeypatch):
    monkeypatch.setattr(training_page, "MOST_POINTS", 3)
    found = training_page._progress(RunDirectory.open(run))

    assert found["each"] == 3
    np.testing.assert_allclose(found["loss"], [[2, 2.8], [5, 2.5], [7, 2.3]])


def test_of_many_checkpoints_every_second_one_is_left_out(run, writer, monkeypatch):
    monkeypatch.setattr(training_page, "MOST_SNAPSHOTS", 5)
    monkeypatch.setattr(training_page, "_sample", lambda look: "")
    look = writer._open(0)
    text = page_module.first_text(look, PROMPT)
    for step in range(6):
        writer._add_snapshot(step, look, text)

    assert list(writer._snapshots) == [0, 2, 4, 5]


def test_the_first_checkpoint_finds_its_programs_compiled(run):
    writer = TrainingPage(run, PROMPT)
    writer.prepare()
    compiled: list[str] = []
    with compilations_watched(compiled.append):
        assert writer.update()
    assert compiled == []


def test_collections_are_on_again_when_the_page_is_prepared(run):
    watched = (
        "from jgpt.pictures.training_page import TrainingPage; states = []; "
        "TrainingPage.prepare = lambda self: states.append(gc.isenabled()); "
        "TrainingPage.update = lambda self, **_: states.append(gc.isenabled()); "
        "main(); print(states, flush=True)"
    )
    program = PROGRAM.removesuffix("main()") + watched
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        # It ends at once when this is closed, so that comes after what it says.
        print(json.dumps([str(run), PROMPT, None, None]), file=process.stdin)
        print("end", file=process.stdin, flush=True)
        said = process.stderr.readline()

    # `main` prints what user code would print to standard error
    assert re.fullmatch(r"\[False(, True)+\]\n", said), said


def test_a_page_is_a_file_of_its_run(run, writer):
    writer.update()
    directory = RunDirectory.open(run)
    directory.clear(())
    assert not (run / "page.html").exists()
    (run / "page.html").symlink_to(run / "elsewhere")
    with pytest.raises(ValueError, match=r"page\.html is a link"):
        writer.update()


# --- beside training ------------------------------------------------------------------------------


@pytest.fixture
def progress(monkeypatch):
    console = open_console()
    return PageProgress(console, "reading the data")


def test_a_model_that_no_page_holds_is_refused_before_anything_is_written(
    small_run, tmp_path, monkeypatch, progress
):
    monkeypatch.setattr(page_module, "MOST_PARAMETERS", 20)
    out = tmp_path / "run"
    config = dataclasses.replace(small_run, out=str(out))
    with pytest.raises(ValueError, match=r"parameters are too many for a page") as error:
        jgpt.fit(config, progress=progress)

    assert in_options(message_of(error.value)).endswith(", which holds 20: leave out --page")
    assert not out.exists()


def test_a_tokenizer_that_no_page_encodes_with_is_refused(small_run, progress):
    dataset = dataclasses.replace(
        jgpt.Dataset.from_tokens(np.arange(400) % 17), tokenizer=NumberTokenizer(17)
    )
    config = random_gpt("nanogpt").config
    with pytest.raises(ValueError, match="because its tokens have no text: leave out page=True"):
        progress.prepared(dataclasses.replace(small_run, model=config), dataset)


# idle priority is told and not taken, for on a machine that is busy with tests it would be endless;
# a shell in the background ignores SIGINT, and its programs would too
MAIN = """
import os, signal
os.sched_setscheduler = lambda _, policy, __: print(policy == os.SCHED_IDLE)
signal.signal(signal.SIGINT, signal.default_int_handler)
from jgpt.cli import main
main()
"""
TRAIN = "--steps 1000000 --eval-interval 2000 --steps-per-call 5 --sample-tokens 0 --block-size 16"
TRAIN += " --num-layers 2 --embed-dim 24 --batch-size 4"


@contextlib.contextmanager
def training(text: Path, out: Path, *options: str):
    """`jgpt train --page`: the process, once it says where the page is, and its children."""
    words = ["train", "tiny", "--page", "--data", text, "--out", out, *TRAIN.split(), *options]
    command = [sys.executable, "-c", MAIN, *map(str, words)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline()]
            while said[-1] and not said[-1].startswith("look inside: open "):
                said.append(process.stdout.readline())
            assert said[-1], process.communicate()
            if sys.platform == "linux":
                assert said[0] == "True\n"
            assert said[-1] == f"look inside: open {out / 'page.html'} in a browser\n"
            yield process
        finally:
            process.kill()


def children_of(process: subprocess.Popen[str]) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        found.extend(map(int, (thread / "children").read_text().split()))
    return found


def wait_until(condition: Any, what: str) -> None:
    """Wait, for minutes on a busy machine, until something is true."""
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_trainer_that_is_killed_leaves_a_whole_page_and_no_process(poem, tmp_path):
    out = tmp_path / "run"
    with training(poem, out) as process:
        (child,) = children_of(process)
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        assert command.split(b"\0")[1:3] == [b"-P", b"-c"]
        assert b"jgpt.pictures.training_page" in command
        process.kill()
        process.communicate()
        wait_until(lambda: not Path(f"/proc/{child}").exists(), "the page's process stays")

    assert data_of(out)["training"]["seconds"] > 0
    assert list(out.glob("page.html.*")) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@needs_chromium
def test_an_open_page_follows_its_run_to_the_end(page, poem, tmp_path):
    shown = page
    out = tmp_path / "run"

    def is_there(condition: str) -> bool:
        # While the page reloads, there is nothing to ask.
        with contextlib.suppress(AssertionError):
            return bool(shown.run(f"typeof training === 'object' && ({condition})"))
        return False

    with training(poem, out) as process:
        shown.open(out / "page.html")
        wait_until(lambda: is_there("Boolean(data)"), "the page computes nothing")
        first = shown.run("training.step")
        shown.run("change({ blocks: { 1: 0 }, prompt: 'men' })")
        shown.run("choose({ query: 2, key: 1, layer: 1, head: 1 })")
        shown.run("$('temperature').value = 0.5")
        wait_until(
            lambda: is_there(f"data && training.step > {first} && chosen.layer === 1"),
            "the page isn't reloaded",
        )
        assert shown.run("training.snapshots.length") > 1
        assert shown.run("$('growth').children.length") >= 6
        assert shown.run("data.text") == "men"
        assert shown.run("state.blocks") == {"1": 0}
        assert shown.run("[chosen.query, chosen.key, chosen.head]") == [2, 1, 1]
        assert shown.run("$('temperature').value") == "0.5"

        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert errors == ""
    assert "the page ended" not in said
    wait_until(lambda: is_there("data && training.seconds === null"), "the last page isn't shown")
    assert data_of(out)["training"]["step"] == shown.run("training.step")
    shown.run("marked = 1")
    time.sleep(5)
    assert shown.run("marked") == 1
    assert shown.errors == []


@pytest.mark.slow
def test_a_failure_of_the_page_is_one_line_and_training_goes_on(
    poem, tmp_path, monkeypatch, capsys
):
    """The page's process is one that ends at once, as one without memory does."""
    monkeypatch.setattr("jgpt.cli.page.sys.executable", shutil.which("false"))
    progress = PageProgress(open_console(), "reading the data")
    config = jgpt.preset("tiny")
    config = dataclasses.replace(
        config,
        steps=3,
        sample_tokens=0,
        out=str(tmp_path / "run"),
        dataset=dataclasses.replace(config.dataset, data=(str(poem),)),
    )
    with progress:
        run = jgpt.fit(config, progress=progress)

    assert run.best_step == 3
    assert "the page ended: its process exited with 1\n" in capsys.readouterr().out


def test_the_old_option_says_what_it_is_called_now(tmp_path):
    said = refused("train", "tiny", "--live", "--no-browser", cwd=tmp_path)
    assert said == "jgpt: --live is --page now: it writes RUN/page.html, which needs no server"
