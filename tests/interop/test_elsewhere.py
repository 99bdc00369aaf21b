"""The commands of docs/elsewhere.md, each run where its program is installed."""

import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jgpt
from jgpt.generation.chat import END, START
from tests.commands import worked
from tests.generation.test_chat import with_chat_tokens
from tests.interop.test_gguf import byte_pairs, of_llamacpp, preset_model
from tests.models import random_gpt
from tests.test_documents import ROOT, blocks, commands

PAGE = (ROOT / "docs" / "elsewhere.md").read_text()
BLOCKS = blocks(PAGE)
LINES = [line for block in BLOCKS if block.language == "sh" for line, _ in commands(block)]
NOTES = """\
First Citizen:
Before we proceed any further, hear me speak.
First Citizen:
Before we proceed a"""
PROMPT = "hear me"


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"there is no {package}")


def line_of(program: str) -> list[str]:
    """The words of the page's line that calls a program."""
    (line,) = [line for line in LINES if line.startswith(program)]
    return shlex.split(line, comments=True)


def work(place: Path, *command: str) -> None:
    """Run a program that reads nothing from the network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache")}
    done = subprocess.run(
        command, cwd=place, env=os.environ | offline, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a run, a text, and what the page's commands of jgpt have made of the run."""
    place = tmp_path_factory.mktemp("elsewhere")
    tokenizer = byte_pairs()
    model = preset_model("tiny", tokenizer)
    # whole windows: the harness gives more context to the last one
    assert len(tokenizer.encode(NOTES)) % model.block_size == 0
    jgpt.save(model, place / "runs" / "gpt", tokenizer=tokenizer, config=model.config)
    (place / "notes.txt").write_text(NOTES)
    for line in LINES:
        if line.startswith("jgpt export"):
            worked(*shlex.split(line, comments=True)[1:], cwd=place)
    return place


@pytest.fixture(scope="module")
def greedy(place) -> str:
    """What the run continues."""
    return jgpt.load(place / "runs" / "gpt").generate(PROMPT, 9, temperature=0.0)


@pytest.mark.slow
@needs("torch")
@needs("transformers")
def test_a_pipeline_of_transformers_continues_a_text_as_jgpt(place, greedy, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(place)
    import transformers

    (line,) = re.findall(r"`(transformers\.pipeline\(.*?\))`", PAGE)
    pipeline = eval(line, {"transformers": transformers})
    (drawn,) = pipeline(PROMPT, max_new_tokens=9, do_sample=False)

    assert drawn["generated_text"] == PROMPT + greedy


@needs("xllamacpp")
def test_llamacpp_continues_a_text_from_the_exported_file(place):
    run = jgpt.load(place / "runs" / "gpt")
    case: Any = run.model, run.tokenizer, PROMPT

    answers = of_llamacpp({"gpt": place / "gpt.gguf"}, {"gpt": case})

    new = run.config.model.block_size - len(run.tokenizer.encode(PROMPT))
    assert answers["gpt"]["text"] == run.generate(PROMPT, new, temperature=0.0)


@needs("torch")
@needs("ctranslate2")
def test_ctranslate2_draws_our_tokens(place, greedy):
    import ctranslate2  # pyright: ignore[reportMissingImports]

    program, *options = line_of("ct2-transformers-converter")
    work(place, str(Path(sys.executable).with_name(program)), *options)
    tokenizer = jgpt.load(place / "runs" / "gpt").tokenizer
    backend: Any = tokenizer.to_hf()
    prompt = [backend.id_to_token(token) for token in tokenizer.encode(PROMPT).tolist()]
    drawn = ctranslate2.Generator(str(place / "ct2")).generate_batch(
        [prompt], max_length=9, end_token=[], include_prompt_in_result=False
    )

    assert tokenizer.decode(drawn[0].sequences_ids[0]) == greedy


@needs("lm_eval")
def test_the_evaluation_harness_computes_the_loss_of_jgpt_eval(place):
    (task,) = [block.code for block in BLOCKS if block.language == "yaml"]
    (place / "notes.yaml").write_text(task)
    _, *options = line_of("lm_eval")
    work(place, sys.executable, "-m", "lm_eval", *options, "--output_path", "found")
    (file,) = (place / "found").rglob("results_*.json")
    bits = json.loads(file.read_text())["results"]["notes"]["bits_per_byte,none"]

    (place / "begun.txt").write_text(f"<|endoftext|>{NOTES}")
    run = place / "runs" / "gpt"
    ours = json.loads(worked("eval", run, "--data", place / "begun.txt", "--json"))
    without_beginning = json.loads(worked("eval", run, "--data", place / "notes.txt", "--json"))

    nats = bits * len(NOTES) * math.log(2)
    assert nats == pytest.approx(ours["loss"] * ours["tokens"], rel=1e-5)
    assert nats != pytest.approx(without_beginning["loss"] * ours["tokens"], rel=1e-4)


def test_ollama_gets_the_conversation_that_jgpt_chat_has(tmp_path, monkeypatch):
    tokenizer = with_chat_tokens(byte_pairs())
    model = random_gpt("qwen3", vocab_size=tokenizer.vocab_size, block_size=48)
    run = jgpt.save(model, tmp_path / "gpt", tokenizer=tokenizer, config=model.config)
    # a folder with spaces, from which `FROM` is read
    file = tmp_path / "my models" / "gpt.gguf"

    worked("export", run, "--to", "gguf", "--modelfile", "--out", file)

    written = file.with_name("Modelfile").read_text()
    (weights,) = re.findall("^FROM (.*)$", written, flags=re.M)
    assert (file.parent / weights).samefile(file)
    assert re.findall("^PARAMETER stop (.*)$", written, flags=re.M) == [START, END]
    # what Go's templates make of it: `range` repeats what is up to `end`
    (template,) = re.findall('^TEMPLATE """(.*)"""$', written, flags=re.M | re.S)
    ((each, rest),) = re.findall("^{{ range .Messages }}(.*){{ end }}(.*)$", template, flags=re.S)
    prompt = ""
    for role, content in (("system", "Be brief."), ("user", "hear 12")):
        prompt += each.replace("{{ .Role }}", role).replace("{{ .Content }}", content)
    asked: list[Any] = []

    def stream(model, tokenizer, tokens, *_, **options):
        asked.append(tokens[0].tolist())
        yield ("",)

    monkeypatch.setattr("jgpt.generation.chat.stream_continuations", stream)
    _, answer = jgpt.Chat(model, tokenizer, "Be brief.", 4).reply("hear 12")
    assert list(answer) == [""]
    assert tokenizer.encode(prompt + rest).tolist() == asked[0]
