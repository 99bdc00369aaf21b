"""Runs with an objective of one's own: recorded, logged, resumed, on a mesh, and refused."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.fields import Code, from_json, to_json
from jgpt.runs.fit import TrainingStopped
from tests.commands import jgpt as command
from tests.commands import refused

FILE = """
import jax.numpy as jnp
import jgpt
from jgpt.training.objective import next_token_loss


def distillation(config):
    teacher = jgpt.GPT(config.model, rngs=jgpt_rngs(5))

    def objective(model, batch, rngs):
        loss = next_token_loss(model, batch, rngs).value
        difference = jnp.square(model(batch.inputs) - teacher(batch.inputs)).mean()
        return jgpt.Loss(loss + 0.1 * difference, metrics={"distance/teacher": difference})

    return objective


def jgpt_rngs(seed):
    from flax import nnx

    return nnx.Rngs(seed)


def wrong(config):
    return lambda model, batch, rngs: model(batch.inputs)
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
def test_a_run_with_an_objective_is_recorded_logged_and_resumed_bitwise(config, file, tmp_path):
    objective = f"{file}:distillation"
    run = jgpt.fit(config, objective=objective, progress=None)
    stopped = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    begun = tmp_path / "stopped/config.json"
    stops = iter([False, False, True])
    with pytest.raises(TrainingStopped):
        jgpt.fit(
            stopped,
            objective=objective,
            progress=None,
            should_stop=lambda: begun.exists() and next(stops),
        )
    with pytest.raises(ValueError, match=r"never loads by itself: give `objective=.*my\.py:dist"):
        jgpt.fit(stopped, resume=True, progress=None)
    resumed = jgpt.fit(stopped, objective=objective, resume=True, progress=None)

    for name in ("loss", "distance/teacher", "gradient_norm"):
        np.testing.assert_array_equal(run.metrics[name], resumed.metrics[name])
    np.testing.assert_array_equal(
        run.model.token_embedding.embedding[...],  # type: ignore[attr-defined]
        resumed.model.token_embedding.embedding[...],  # type: ignore[attr-defined]
    )
    assert min(run.metrics["distance/teacher"][1:]) > 0
    recorded = jgpt.load(run.path).config.objective
    assert isinstance(recorded, Code)
    assert (recorded.name, Path(recorded.file or "").name) == ("distillation", "my.py")
    assert from_json(jgpt.TrainConfig, to_json(run.config)).objective == Code.of(
        run.config.objective
    )


@pytest.mark.slow
def test_an_objective_trains_on_a_mesh_with_the_same_numbers(config, file, tmp_path):
    config = dataclasses.replace(config, batch_size=8)
    objective = f"{file}:distillation"
    run = jgpt.fit(config, objective=objective, progress=None)
    sharded = dataclasses.replace(config, mesh="data=4,fsdp=2", out=str(tmp_path / "sharded"))
    begun = tmp_path / "sharded/config.json"
    stops = iter([False, False, True])
    with pytest.raises(TrainingStopped):
        jgpt.fit(
            sharded,
            objective=objective,
            progress=None,
            should_stop=lambda: begun.exists() and next(stops),
        )
    other = jgpt.fit(sharded, objective=objective, resume=True, progress=None)

    for name in ("loss", "distance/teacher"):
        np.testing.assert_allclose(other.metrics[name], run.metrics[name], rtol=1e-4)


def test_a_wrong_objective_leaves_no_directory(config, file, tmp_path):
    with pytest.raises(ValueError, match=r"must return a scalar.*not float32\[5,7,"):
        jgpt.fit(config, objective=f"{file}:wrong", progress=None)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_takes_an_objective(config, file, tmp_path, poem):
    sizes = ("--block-size", "7", "--num-layers", "1", "--embed-dim", "12", "--num-heads", "2")
    given = ("train", "tiny", "--data", poem, *sizes, "--steps", "2", "--sample-tokens", "0")
    line = refused(*given, "--objective", "my.py:wrong", "--out", "wrong", cwd=tmp_path)
    assert "must return a scalar" in line
    assert "no function or class 'distilation' (did you mean 'distillation'?)" in refused(
        *given, "--objective", "my.py:distilation", cwd=tmp_path
    )
    done = command(*given, "--objective", "my.py:distillation", "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "custom objective" in done.stdout
    assert "distillation; validation losses are cross-entropies" in " ".join(done.stdout.split())
    assert jnp.isfinite(jgpt.load(tmp_path / "r").model(jnp.ones((1, 3), int))).all()
