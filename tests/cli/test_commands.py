"""The numbers that commands print, each computed by hand. In this process: jax is there already."""

import dataclasses
import json
import re

import pytest

from jgpt.generation.text import stream_text
from jgpt.parallel.mesh import current_mesh
from jgpt.runs.evaluate import evaluate
from jgpt.runs.load import load
from tests.commands import worked


def test_eval_prints_what_was_measured(trained):
    found = evaluate(trained.path)
    run = trained.path
    assert found.loss == pytest.approx(trained.validation_loss, rel=1e-6)
    lines = worked("eval", run).splitlines()
    said = [float(re.findall(r"\d[\d.]*", line)[0]) for line in lines]
    expected = (found.loss, found.perplexity, found.bits_per_character)
    assert said == pytest.approx(expected, abs=6e-4)
    assert f" {found.tokens:,} " in lines[0]
    assert json.loads(worked("eval", run, "--json")) == dataclasses.asdict(found)


@pytest.mark.slow
def test_a_mesh_samples_and_evaluates_alike(trained, monkeypatch):
    said = []
    meshes = []

    def heard(call):
        def wrapper(*arguments, **options):
            meshes.append(dict(current_mesh().shape))
            return call(*arguments, **options)

        return wrapper

    monkeypatch.setattr("jgpt.runs.load.load", heard(load))
    monkeypatch.setattr("jgpt.generation.text.stream_text", heard(stream_text))
    monkeypatch.setattr("jgpt.runs.evaluate.evaluate", heard(evaluate))
    for mesh in ((), ("--mesh", "data=2,fsdp=2,tensor=2")):
        ask = (trained.path, *mesh)
        text = worked("sample", *ask, "--max-new-tokens", 9, "--temperature", 0)
        said.append((text, json.loads(worked("eval", *ask, "--json"))))
    assert meshes == [{}] * 3 + [{"data": 2, "fsdp": 2, "tensor": 2}] * 3
    (text, alone), (same, together) = said
    assert text == same
    assert alone["tokens"] == together["tokens"]
    assert alone["loss"] == pytest.approx(together["loss"], rel=1e-6)
