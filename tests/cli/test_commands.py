"""The numbers that commands print, each computed by hand. In this process: jax is there already."""

import dataclasses
import json
import re

import jax
import pytest

from jgpt.cli import main
from jgpt.cli.report import describe_ahead
from jgpt.generation.text import stream_text
from jgpt.parallel.mesh import current_mesh
from jgpt.runs.evaluate import evaluate
from jgpt.runs.load import load
from jgpt.training.ahead import CHIPS, CompiledStep
from jgpt.training.memory import TrainingMemory
from tests.commands import worked

MIB = 1 << 20


STEP = CompiledStep(
    on="v5e:2x4",
    chip=CHIPS["v5e"],
    chips=8,
    mesh="data=2,fsdp=4",
    micro_batches=1,
    memory=TrainingMemory(state=3 * MIB, working=MIB // 2),
    fits=True,
    flops=197_000_000_000,
    compute_seconds=0.001,
    memory_seconds=0.002,
)


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


def test_a_dry_run_for_other_hardware(capsys, monkeypatch):
    asked = []

    def compile_ahead(config, on):
        asked.append((config.batch_size, config.mesh, on))
        return STEP

    monkeypatch.setattr("jgpt.training.ahead.compile_ahead", compile_ahead)
    options = ["tiny", "--batch-size", "24", "--mesh", "data=2,fsdp=4", "--on", "v5e:2x4"]
    main(["train", "--dry-run", *options])
    assert asked == [(24, "data=2,fsdp=4", "v5e:2x4")]
    assert jax.config.jax_platforms == "cpu"  # type: ignore[attr-defined]
    assert capsys.readouterr().out.splitlines() == describe_ahead(STEP)
    main(["train", "--dry-run", *options, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["memory"] == {"state": 3 * MIB, "working": MIB // 2}


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
