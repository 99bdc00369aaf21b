"""The numbers that commands print, each computed by hand. In this process: jax is there already."""

import dataclasses
import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jgpt import TrainConfig
from jgpt.cli import main
from jgpt.cli.console import describe
from jgpt.data.dataset import load_dataset
from jgpt.nn.loss import token_losses
from jgpt.training.plan import Plan, TrainingMemory, format_bytes

MIB = 1 << 20


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*(?:e\+?\d+)?", text)


def test_info_of_gpt2_by_hand(capsys, monkeypatch):
    memory = TrainingMemory(state=3 * MIB, working=MIB // 2)
    monkeypatch.setattr("jgpt.training.plan.training_memory", lambda config: memory)
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
    assert numbers(needed) == ["12", "3.5", "3.0", "512.0"]
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
