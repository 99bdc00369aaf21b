"""The numbers that commands print, each computed by hand. In this process: jax is there already."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jgpt import TrainConfig, fit
from jgpt.cli import main
from jgpt.cli.commands import info
from jgpt.cli.console import describe, describe_ahead
from jgpt.data.dataset import load_dataset
from jgpt.hardware import CHIPS
from jgpt.nn.loss import token_losses
from jgpt.training.ahead import Collective, CompiledStep
from jgpt.training.plan import Plan, TrainingMemory

MIB = 1 << 20


PLAN = Plan(
    TrainConfig(name="a"),
    Path("out"),
    training_tokens=1_000_000,
    validation_tokens=111_111,
    parameters=812_345,
    mesh=None,
    replicated=(),
    memory=TrainingMemory(state=5 * MIB, working=7 * MIB),
    flops=123_456_789_000,
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
    collectives=(Collective("all-gather", 7, 2 * MIB), Collective("all-reduce", 1, MIB)),
    kernels=("fast",),
    compute_seconds=0.001,
    memory_seconds=0.002,
    interconnect_seconds=0.0035,
    bound="interconnect",
)
NOTHING = {"fits": False, "micro_batches": 3, "collectives": (), "kernels": ()}
DESCRIBED = {
    "info gpt2": lambda: info("gpt2"),
    "info nanogpt-cpu on a mesh": lambda: info("nanogpt-cpu", mesh="fsdp=4,tensor=3"),
    "a plan": lambda: describe(PLAN),
    "a plan on a mesh, in micro-batches": lambda: describe(
        replace(
            PLAN,
            config=TrainConfig(micro_batches=3),
            mesh="fsdp=8",
            replicated=("so much",),
            memory=None,
        )
    ),
    "a compiled step": lambda: describe_ahead(STEP),
    "one without collectives that does not fit": lambda: describe_ahead(replace(STEP, **NOTHING)),
}
EXPECTED = (Path(__file__).parent / "described.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", DESCRIBED)
def test_a_description_is_as_it_was(title, monkeypatch):
    def memory(config):  # 32 sequences at once are half a MiB, and 48 more than there is
        rows = config.batch_size // config.micro_batches
        return TrainingMemory(state=3 * MIB, working=rows * MIB // 64)

    monkeypatch.setattr("jgpt.training.plan.training_memory", memory)
    monkeypatch.setattr("jgpt.training.plan.host_memory", lambda: 7 * MIB)
    _, _, rest = EXPECTED.partition(f"=== {title}\n")
    assert DESCRIBED[title]() == rest.partition("\n\n")[0].splitlines()


def test_eval_prints_the_loss_of_the_run_s_model(trained, capsys):
    tokens, total = load_dataset(trained.config.dataset, 7).validation, 0.0
    for start in range(0, len(tokens) - 1, 7):
        window = jnp.asarray(tokens[None, start : start + 8])
        total += float(token_losses(trained.model(window[:, :-1]), window[:, 1:]).sum())
    loss = total / (len(tokens) - 1)
    main(["eval", str(trained.directory)])
    lines = capsys.readouterr().out.splitlines()
    said = [re.findall(r"\d[\d,.]*", line) for line in lines]
    assert [float(line[0]) for line in said] == [
        pytest.approx(loss, abs=6e-5),
        pytest.approx(math.exp(loss), abs=1e-3),
        pytest.approx(loss / math.log(2), abs=6e-5),  # a token is a character
    ]
    assert said[0][1] == str(len(tokens) - 1)


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]])
def test_a_plan_for_other_hardware(command, capsys, monkeypatch):
    asked = []

    def compile_ahead(config, on):
        asked.append((config.batch_size, config.mesh, on))
        return STEP

    monkeypatch.setattr("jgpt.training.ahead.compile_ahead", compile_ahead)
    options = ["tiny", "--batch-size", "24", "--mesh", "data=2,fsdp=4", "--on", "v5e:2x4"]
    monkeypatch.setenv("JAX_PLATFORMS", "what this machine has")
    main([*command, *options])
    assert asked == [(24, "data=2,fsdp=4", "v5e:2x4")]
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert capsys.readouterr().out.splitlines() == describe_ahead(STEP)
    main([*command, *options, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["memory"] == {"state": 3 * MIB, "working": MIB // 2}
    assert said["collectives"][0] == {"kind": "all-gather", "count": 7, "sent": 2 * MIB}


def test_a_plan_as_json(capsys, monkeypatch, poem):
    memory = TrainingMemory(state=3 * MIB, working=MIB // 2)
    monkeypatch.setattr("jgpt.training.plan.training_memory", lambda config: memory)
    main(["plan", "tiny", "--data", str(poem), "--block-size", "4", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["memory"]["state"] == 3 * MIB
    assert said["config"]["model"]["block_size"] == 4
    assert said["training_tokens"] == int(len(poem.read_text()) * 0.9)


@pytest.mark.slow
def test_a_mesh_samples_and_evaluates_alike(small_run, capsys):
    run = fit(small_run)
    said = []
    for mesh in ([], ["--mesh", "data=2,fsdp=2,tensor=2"]):
        main(["sample", str(run.directory), "--max-new-tokens", "9", "--temperature", "0", *mesh])
        main(["eval", str(run.directory), "--json", *mesh])
        text, _, measured = capsys.readouterr().out.strip().rpartition("\n")
        said.append((text, json.loads(measured)))
    (text, alone), (same, together) = said
    assert text == same
    assert alone["tokens"] == together["tokens"]
    assert alone["loss"] == pytest.approx(together["loss"], rel=1e-6)
