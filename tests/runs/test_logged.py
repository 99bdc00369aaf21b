"""The metrics of each part and of an objective, where a user looks for them."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.fitting.stopping import TrainingStopped
from jgpt.runs.directory import RunDirectory
from jgpt.training.objective import next_token_loss
from tests.commands import jgpt as command
from tests.commands import refused
from tests.runs.test_trackers import events_of


def with_metrics(config):
    """An objective with metrics, one of which is not finite at some steps."""

    def objective(model, batch, rngs):
        loss = next_token_loss(model, batch, rngs).value
        odd = batch.tokens.sum() % 2.0
        metrics = {"mine/half": loss / 2, "mine/odd": odd, "undefined": 1 / odd}
        return jgpt.Loss(loss, metrics=metrics)

    return objective


@pytest.fixture
def config(small_run, tmp_path):
    return dataclasses.replace(
        small_run,
        out=str(tmp_path / "run"),
        sample_tokens=0,
        log=("gradient_norms", "update_ratios", "activation_rms"),
        log_interval=2,
        trackers=("tensorboard",),
    )


def test_metrics_of_parts_and_of_an_objective_are_in_all_places(config, tmp_path):
    run = jgpt.fit(config, objective=with_metrics, progress=None)

    lines = RunDirectory.open(run.directory).metrics()
    steps_of: dict[str, list[int]] = {}
    expected = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            steps_of.setdefault(name, []).append(step)
            if name != "step":
                expected[step, name] = np.float32(value)
    for name in ("gradient_norms", "update_ratios", "activation_rms"):
        assert steps_of[f"{name}/blocks.0.attention"] == [2, 4, 6, 8, 10]
    assert steps_of["mine/half"] == list(range(1, 12))
    odd = []
    for line in lines[1:]:
        assert line["loss"] == 2 * line["mine/half"]
        if line["mine/odd"] == 1:
            odd.append(line["step"])
    assert 0 < len(odd) < 11
    assert steps_of["undefined"] == odd

    norms = run.metrics["gradient_norms/blocks.0.feed_forward"]
    for line, norm in zip(lines, norms, strict=True):
        is_logged = line["step"] > 0 and line["step"] % 2 == 0
        assert math.isnan(norm) == (not is_logged)

    found: dict[tuple[int, str], float] = {}
    for event in events_of(run.directory / "tensorboard"):
        for value in event.summary.value:
            found[event.step, value.tag] = value.simple_value
    assert found == expected
    assert found[4, "gradient_norms/blocks.0.attention"] > 0


@pytest.mark.slow
def test_a_run_that_logs_parts_is_resumed_with_the_same_metrics(config, tmp_path):
    config = dataclasses.replace(config, trackers=())
    run = jgpt.fit(config, progress=None)
    stopped = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    begun = tmp_path / "stopped/config.json"
    stops = iter([False, False, True])
    with pytest.raises(TrainingStopped):
        jgpt.fit(
            stopped,
            progress=None,
            should_stop=lambda: begun.exists() and next(stops),
        )
    resumed = jgpt.fit(stopped, resume=True, progress=None)

    timed = ("seconds", "tokens_per_second", "memory_bytes")
    assert set(run.metrics) == set(resumed.metrics)
    for name, values in run.metrics.items():
        if name not in timed:
            np.testing.assert_array_equal(values, resumed.metrics[name], err_msg=name)
    # what is logged may change
    longer = dataclasses.replace(stopped, steps=12, log=(), log_interval=3)
    assert "loss" in jgpt.fit(longer, resume=True, progress=None).metrics


class Hidden(jgpt.GPT):
    """A model that calls its blocks inside a transformation of its own."""

    def hidden(self, tokens: Any, *, rngs: Any = None, **_: Any) -> Any:
        x = self.embed(tokens, rngs=rngs)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.final_norm(x)


def test_a_model_whose_parts_cannot_be_read_leaves_no_directory(config, tmp_path):
    with pytest.raises(ValueError, match=r"activation_rms.*leave it out"):
        jgpt.fit(config, model=Hidden, progress=None)
    assert not (tmp_path / "run").exists()


FILE = """
import jgpt
from jgpt.training.objective import next_token_loss


def z(config):
    def objective(model, batch, rngs):
        loss = next_token_loss(model, batch, rngs).value
        return jgpt.Loss(loss, metrics={"mine/half": loss / 2})

    return objective


def taken(config):
    def objective(model, batch, rngs):
        loss = next_token_loss(model, batch, rngs).value
        return jgpt.Loss(loss, metrics={"update_ratios/mine": loss})

    return objective
"""


@pytest.mark.slow
def test_the_commands_log_and_plot_metrics(tmp_path, poem):
    (tmp_path / "my.py").write_text(FILE)
    run = tmp_path / "r"
    picture = tmp_path / "m.svg"
    sizes = ("--block-size", "7", "--num-layers", "1", "--embed-dim", "12", "--num-heads", "2")
    train = ("train", "tiny", "--data", poem, *sizes, "--steps", "4", "--sample-tokens", "0")
    logging = ("--log", "gradient_norms,update_ratios", "--log-interval", "2")

    taken = refused(*train, *logging, "--objective", "my.py:taken", "--out", run, cwd=tmp_path)
    unknown = refused(*train, "--log", "norms", cwd=tmp_path)

    assert "'update_ratios/mine' is one of jgpt's: rename it" in taken
    assert not run.exists()
    assert "--log must be gradient_norms or" in unknown

    done = command(*train, *logging, "--objective", "my.py:z", "--out", "r", cwd=tmp_path)

    assert done.code == 0, done.stderr
    last_line = (run / "metrics.jsonl").read_text().splitlines()[-1]
    logged = set(json.loads(last_line))
    assert {"mine/half", "gradient_norms/token_embedding", "update_ratios/final_norm"} < logged

    for metric in ("mine/half", "mine", "gradient_norms", "loss"):
        drawn = command("plot", "r", "--metric", metric, "--out", picture, cwd=tmp_path)
        assert drawn.code == 0, drawn.stderr
        assert picture.read_bytes().startswith(b"<?xml")
    misspelt = refused("plot", "r", "--metric", "gradient_norm_s", "--out", "n.svg", cwd=tmp_path)
    assert "r has no metric 'gradient_norm_s' (did you mean 'gradient_norms'?)" in misspelt
    known = "it has gradient_norm, gradient_norms, learning_rate, loss, memory_bytes, mine"
    assert known in misspelt
    assert not (tmp_path / "n.svg").exists()
