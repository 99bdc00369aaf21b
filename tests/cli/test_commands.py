"""The numbers that commands print, each computed by hand. In this process: jax is there already."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jgpt import TrainConfig
from jgpt.cli import main
from jgpt.cli.commands.info import info
from jgpt.cli.report import describe, describe_ahead
from jgpt.generation.text import stream_text
from jgpt.parallel.mesh import current_mesh
from jgpt.runs.evaluate import evaluate
from jgpt.runs.load import load
from jgpt.training.ahead import CHIPS, CompiledStep
from jgpt.training.memory import TrainingMemory
from jgpt.training.plan import Plan
from tests.commands import worked

MIB = 1 << 20


PLAN = Plan(
    TrainConfig(name="a"),
    Path("out"),
    training_tokens=1_000_000,
    validation_tokens=111_111,
    parameters=812_345,
    memory=TrainingMemory(state=5 * MIB, working=7 * MIB),
    flops=123_456_789_000,
    evaluation_targets=111_110,
)
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
TOO_LARGE = {"fits": False, "micro_batches": 3}
DESCRIBED = {
    "info gpt2": lambda: info("gpt2"),
    "info nanogpt-cpu on a mesh": lambda: info("nanogpt-cpu", mesh="fsdp=4,tensor=3"),
    "a plan": lambda: describe(PLAN),
    "a plan on a mesh, in micro-batches": lambda: describe(
        replace(
            PLAN,
            config=TrainConfig(micro_batches=3, mesh="tensor=3"),
            memory=None,
            evaluation_targets=19_200,
        )
    ),
    "a compiled step": lambda: describe_ahead(STEP),
    "one that does not fit": lambda: describe_ahead(replace(STEP, **TOO_LARGE)),
}
EXPECTED = (Path(__file__).parent / "described.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", DESCRIBED)
def test_a_description_is_as_it_was(title, monkeypatch):
    def memory(config):  # 32 sequences at once are half a MiB, and 48 more than there is
        rows = config.batch_size // config.micro_batches
        return TrainingMemory(state=3 * MIB, working=rows * MIB // 64)

    monkeypatch.setattr("jgpt.training.memory.training_memory", memory)
    monkeypatch.setattr("jgpt.training.plan.training_memory", memory)
    monkeypatch.setattr("jgpt.machine.host_memory", lambda: 7 * MIB)
    _, _, rest = EXPECTED.partition(f"=== {title}\n")

    assert DESCRIBED[title]() == rest.partition("\n\n")[0].splitlines()


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
