"""The GPU benchmark runs to the end without one, at toy sizes; its records hold everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("gpu")
    subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--toy", "--rounds", "2", "--results", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        timeout=600,
    )
    return {part: json.loads((out / f"gpu_{part}.json").read_text()) for part in FIGURES}


FIGURES = {
    "step": {"gpt2 jgpt": "milliseconds", "nanogpt-char jgpt": "tokens_per_second"},
    "train": {"jgpt": "best_loss"},
    "sampling": {"10.7M jgpt float32": "batch 2"},
}


def test_each_round_has_its_figures(records):
    for part, variants in FIGURES.items():
        found = records[part]
        assert set(found["figures"]) == {"the processor", *variants}
        assert found["toy"]
        assert "benchmarks/gpu.py --toy" in found["command"]
        for variant, figure in variants.items():
            its = found["figures"][variant]
            assert len(its[figure]) == len(its["seconds"]) == len(its["peak_mib"]) == 2
            assert min(its[figure]) > 0


def test_a_step_s_speed_is_that_of_its_tokens(records):
    its = records["step"]["figures"]["gpt2 jgpt"]
    for time, speed in zip(its["milliseconds"], its["tokens_per_second"], strict=True):
        assert speed == pytest.approx(3 * 8 * 1e3 / time)
    assert "utilisation" not in its  # a CPU's peak is unknown


def test_each_round_trains_another_seed(records):
    its = records["train"]["figures"]["jgpt"]
    assert its["validation_loss"][0] != its["validation_loss"][1]
    assert all(0 < share <= 1 for share in its["share_to_target"])
