"""Runs with an objective of one's own: recorded, logged, resumed, on a mesh, and refused."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

import jgpt
from jgpt.fields import Code, from_json, to_json
from jgpt.runs.directory import RunDirectory
from jgpt.runs.fit import TrainingStopped
from jgpt.training.objective import next_token_loss
from tests.runs.harness import BIGRAM, path_of, stopping, with_changes
from tests.runs.test_trackers import events_of

FILE = """
import jax.numpy as jnp
import jgpt
from flax import nnx
from jgpt.training.objective import next_token_loss


class Distillation(nnx.Module):
    def __init__(self):
        config = jgpt.ModelConfig(
            vocab_size=21, block_size=7, num_layers=1, num_heads=2, embed_dim=12
        )
        self.teacher = jgpt.GPT(config, rngs=nnx.Rngs(5))

    def __call__(self, model, tokens, rngs):
        loss = next_token_loss(model, tokens, rngs)
        inputs = tokens[:, :-1]
        difference = jnp.square(model(inputs) - self.teacher(inputs)).mean()
        return jgpt.Loss(loss + 0.1 * difference, metrics={"distance/teacher": difference})


distillation = Distillation()
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def config(small_run, tmp_path):
    return dataclasses.replace(small_run, out=str(tmp_path / "run"), sample_tokens=0)


@pytest.mark.slow
def test_a_run_with_an_objective_is_recorded_logged_and_resumed(config, file, tmp_path):
    """Bitwise on one device. The objective holds a teacher, whose arrays are not saved."""
    objective = f"{file}:distillation"
    config = dataclasses.replace(config, batch_size=8)
    run = jgpt.fit(config, objective=objective, progress=None)
    for mesh, tolerance in ((None, 0), ("data=4,fsdp=2", 1e-4)):
        out = tmp_path / f"on {mesh}"
        stopped = dataclasses.replace(config, mesh=mesh, out=str(out))
        with pytest.raises(TrainingStopped):
            jgpt.fit(stopped, objective=objective, progress=None, should_stop=stopping(out))
        with pytest.raises(ValueError, match=r"never loads by itself: give `objective=.*my\.py:d"):
            jgpt.fit(stopped, resume=True, progress=None)
        resumed = jgpt.fit(stopped, objective=objective, resume=True, progress=None)

        for name in ("loss", "distance/teacher", "gradient_norm"):
            np.testing.assert_allclose(resumed.metrics[name], run.metrics[name], rtol=tolerance)
        assert resumed.validation_loss == pytest.approx(run.validation_loss, rel=tolerance)
    assert min(run.metrics["distance/teacher"]) > 0
    recorded = jgpt.load(path_of(run)).config.objective
    assert isinstance(recorded, Code)
    assert Path(recorded.file or "").name == "my.py"
    assert (path_of(run) / "code" / "my.py").read_text() == FILE
    reread = from_json(jgpt.TrainConfig, to_json(run.config))
    assert reread.objective == Code.of(run.config.objective)


def with_metrics(model, tokens, rngs):
    """An objective with metrics, one of which is not finite at some steps."""
    loss = next_token_loss(model, tokens, rngs)
    odd = tokens.sum() % 2.0
    return jgpt.Loss(loss, metrics={"mine/half": loss / 2, "mine/odd": odd, "undefined": 1 / odd})


def test_metrics_of_an_objective_are_in_all_places(config):
    config = with_changes(config, **BIGRAM, trackers=("tensorboard",))

    run = jgpt.fit(config, objective=with_metrics, progress=None)

    lines = RunDirectory(path_of(run)).metrics()
    told = {}
    for event in events_of(path_of(run) / "tensorboard"):
        for value in event.summary.value:
            told[event.step, value.tag] = value.simple_value
    odd = 0
    for line in lines:
        assert line["loss"] == 2 * line["mine/half"]
        assert (line["undefined"] is None) == (line["mine/odd"] == 0)
        odd += line["mine/odd"]
        for name, value in line.items():
            if name != "step" and value is not None:
                assert told.pop((line["step"], name)) == np.float32(value)
    assert 0 < odd < 11
    assert told == {}
    undefined = [math.isnan(value) for value in run.metrics["undefined"]]
    assert undefined == [value == 0 for value in run.metrics["mine/odd"]]
