"""The numbers that commands print, each computed by hand. In this process: jax is there already."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jgpt import TrainConfig, fit
from jgpt.cli import main
from jgpt.cli.console import describe, describe_ahead
from jgpt.data.dataset import load_dataset
from jgpt.hardware import CHIPS
from jgpt.nn.loss import token_losses
from jgpt.training.ahead import Collective, CompiledStep
from jgpt.training.plan import Plan, TrainingMemory, format_bytes

MIB = 1 << 20


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*(?:e\+?\d+)?", text)


def test_info_of_gpt2_by_hand(capsys, monkeypatch):
    def memory(config):  # 32 sequences at once are half a MiB, and 48 more than there is
        rows = config.batch_size // config.micro_batches
        return TrainingMemory(state=3 * MIB, working=rows * MIB // 64)

    monkeypatch.setattr("jgpt.training.plan.training_memory", memory)
    monkeypatch.setattr("jgpt.training.plan.host_memory", lambda: 7 * MIB)
    main(["info", "gpt2"])
    *parts, flops, needed = capsys.readouterr().out.splitlines()
    width, layers = 768, 12
    attention, feed_forward = 4 * width * width, 8 * width * width
    expected = {
        "token_embedding": 50257 * width,
        "position_embedding": 1024 * width,
        "blocks.attention_norm": layers * 2 * width,
        "blocks.attention": layers * (attention + 4 * width),
        "blocks.feed_forward_norm": layers * 2 * width,
        "blocks.feed_forward": layers * (feed_forward + 5 * width),
        "final_norm": 2 * width,
    }
    assert sum(expected.values()) == 124_439_808
    # the name, parameters, and bytes in float32
    said = {line.split()[0]: numbers(line.partition(" ")[2]) for line in parts}
    assert said == {
        name: [f"{count:,}", format_bytes(4 * count).split()[0]]
        for name, count in {**expected, "all": 124_439_808}.items()
    }
    assert [line.split()[-2:] for line in parts[:4]] == [
        ["147.2", "MiB"],
        ["3.0", "MiB"],
        ["108.1", "MiB"],
        ["72.0", "KiB"],
    ]
    assert parts[-1].endswith("474.7 MiB")
    # two for each weight of a product and for each key and value met in 1024 positions
    forward = 2 * (layers * (attention + feed_forward) + 50257 * width + layers * 2 * 1024 * width)
    assert numbers(flops) == [f"{forward:,}", f"{3 * forward:,}"] == ["284,812,800", "854,438,400"]
    assert numbers(needed) == ["480,", "15", "3.5", "3.0", "512.0"]
    assert (needed.count("MiB"), needed.count("KiB")) == (2, 1)


def test_a_plan_in_words_by_hand():
    """2000 steps of 12 x 64 tokens."""
    planned = Plan(
        TrainConfig(name="a"),
        Path("out"),
        1_000_000,  # tokens to train on
        111_111,
        parameters=812_345,
        mesh=None,
        replicated=(),
        memory=TrainingMemory(state=5 * MIB, working=7 * MIB),
        flops=123_456_789_000,
    )
    who, data, steps, evaluations, memory, _ = describe(planned)
    assert {"812,345", "65"} <= {number.strip(",") for number in numbers(who)}
    assert numbers(data) == ["1,000,000", "111,111"]
    # 1,536,000 tokens of a million: one and a half times
    assert numbers(steps) == ["2,000", "12", "64", "1.5", "1.23e+11"]
    assert numbers(evaluations) == ["250"]
    assert re.findall(r"[\d.]+ MiB", memory) == ["12.0 MiB", "5.0 MiB", "7.0 MiB"]
    parts = dataclasses.replace(planned, config=TrainConfig(micro_batches=3))
    assert describe(parts)[2].startswith(
        "2,000 steps of 12 x 64 tokens, in 3 micro-batches into out"
    )
    sharded = dataclasses.replace(planned, mesh="fsdp=8", replicated=("so much",))
    assert describe(sharded)[4:6] == ["mesh: fsdp=8", "so much"]


def test_eval_prints_the_loss_of_the_run_s_model(trained, capsys):
    tokens, total = load_dataset(trained.config.dataset, 7).validation, 0.0
    for start in range(0, len(tokens) - 1, 7):
        window = jnp.asarray(tokens[None, start : start + 8])
        total += float(token_losses(trained.model(window[:, :-1]), window[:, 1:]).sum())
    loss = total / (len(tokens) - 1)
    main(["eval", str(trained.directory)])
    said = [numbers(line) for line in capsys.readouterr().out.splitlines()]
    assert [float(line[0]) for line in said] == [
        pytest.approx(loss, abs=6e-5),
        pytest.approx(math.exp(loss), abs=1e-3),
        pytest.approx(loss / math.log(2), abs=6e-5),  # a token is a character
    ]
    assert said[0][1] == str(len(tokens) - 1)


# --- on a mesh, and on other hardware ---------------------------------------------------------


def test_info_says_where_each_parameter_lies(capsys):
    main(["info", "nanogpt-cpu", "--mesh", "fsdp=4,tensor=3"])
    *parameters, total, kv_heads, heads, hidden, vocabulary = capsys.readouterr().out.splitlines()
    said = {line.split()[0]: line.split(maxsplit=1)[1].rsplit(maxsplit=2) for line in parameters}
    kernels = 4 * 128 * 128 // 4  # a quarter, in float32; four heads are not divided by three
    assert said["blocks.2.attention.query.kernel"] == [
        "float32[128@fsdp, 128]",
        f"{kernels / 1024:.1f}",
        "KiB",
    ]
    assert said["blocks.0.feed_forward.projection.kernel"][0] == "float32[512, 128@fsdp]"
    assert said["final_norm.scale"] == ["float32[128]", "512", "bytes"]
    assert len(parameters) == 4 * 8 + 3
    matrices = 4 * (4 * 128 * 128 + 2 * 128 * 512) + 65 * 128 + 64 * 128
    vectors = 9 * 128
    on_each = 4 * (matrices // 4 + vectors)
    with_moments = 3 * on_each + 3 * 4
    assert total == (
        f"on each device: {format_bytes(on_each)} of parameters, {format_bytes(with_moments)} with "
        "the optimizer's state"
    )
    assert kv_heads.startswith("num_kv_heads=4 is not divided by tensor=3 and is replicated: ")
    assert heads.startswith("num_heads=4 is")
    assert hidden.startswith("hidden_dim=512 is")
    # a third would do: of a matrix in four shards
    more = 65 * 128 - 65 * 128 // 3
    assert vocabulary.endswith(f": {format_bytes(more)} more parameters on each device")


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
    assert capsys.readouterr().out.splitlines() == [
        "8 x TPU v5 lite (v5e:2x4), mesh data=2,fsdp=4",
        "memory of each chip: 3.5 MiB (3.0 MiB parameters and optimizer, 512.0 KiB activations "
        "and gradients); it has 16.0 GiB, which is enough",
        "collectives of a step: 7 all-gather (2.0 MiB), 1 all-reduce (1.0 MiB), as each chip sends "
        "them",
        "a step takes each chip at least, from published peaks:",
        "  compute           1.000 ms  0.197 TFLOP at 197 T/s",
        "  memory            2.000 ms  all of that memory twice at 0.82 T/s",
        "  interconnect      3.500 ms  3.0 MiB at 0.2 T/s",
        "bound by interconnect",
        "custom kernels: fast",
    ]
    main([*command, *options, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["memory"] == {"state": 3 * MIB, "working": MIB // 2}
    assert said["collectives"][0] == {"kind": "all-gather", "count": 7, "sent": 2 * MIB}
    small = describe_ahead(
        dataclasses.replace(STEP, fits=False, micro_batches=3, collectives=(), kernels=())
    )
    assert small[0] == "8 x TPU v5 lite (v5e:2x4), mesh data=2,fsdp=4, in 3 micro-batches"
    assert small[1].endswith(", which is NOT enough")
    assert small[2] == "collectives of a step: none, as each chip sends them"
    assert small[-1] == "custom kernels: none"


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
