"""The GPU's benchmark runs to the end without one, at toy sizes, and its JSON holds everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parent.parent


def benchmark(out: Path, *options: str) -> dict:
    subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--toy", "--out", str(out), *options],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Of two calls, the second of which goes on with the file of the first."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    first = benchmark(out, "--parts", "train", "sampling")
    second = benchmark(out, "--parts", "step")
    assert {part: second[part] for part in ("train", "sampling")} == {
        part: first[part] for part in ("train", "sampling")
    }
    return second


def test_it_says_where_it_ran(results: dict):
    assert "benchmarks/gpu.py --toy" in results["command"]
    assert results["versions"]["jax"]
    assert results["toy"] is True


def test_each_step_has_its_times_and_speed(results: dict):
    assert set(results["step"]) == {"gpt2", "nanogpt-char"}
    for step in results["step"].values():
        assert len(step["milliseconds"]["jgpt"]) == 2
        middle = sum(step["milliseconds"]["jgpt"]) / 2
        assert step["tokens_per_second"]["jgpt"] == pytest.approx(3 * 8 * 1e3 / middle)
        assert step["model_flops_utilisation"] == {"jgpt": None}  # a CPU's peak is unknown


def test_each_seed_has_its_loss_and_when_it_was_reached(results: dict):
    train = results["train"]
    assert [run["seed"] for run in train["runs"]] == [1337, 1338]
    for run in train["runs"]:
        assert len(run["losses"]) == 2
        assert run["best_loss"] == min(run["losses"]) < train["target"] == 10
        assert 0 < run["seconds_to_target"] <= run["seconds"]
    assert train["runs"][0]["losses"] != train["runs"][1]["losses"]
    best = [run["best_loss"] for run in train["runs"]]
    assert train["best_loss_mean"] == pytest.approx(sum(best) / 2)


def test_each_batch_has_its_sampling_speed(results: dict):
    for batch in (1, 2):
        speeds = results["sampling"][f"batch {batch}"]["tokens_per_second"]["jgpt"]
        assert len(speeds) == 2
        assert min(speeds) > 0
