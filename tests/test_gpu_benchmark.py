"""The comparisons for a GPU run to the end without one; the records hold everything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("gpu")
    for name, sizes in SIZES.items():
        command = [sys.executable, "benchmarks/compare.py", name, *sizes.split()]
        subprocess.run(
            [*command, "--results", str(out)],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            timeout=600,
        )
    return {name: json.loads((out / f"{name}.json").read_text()) for name in SIZES}


SIZES = {
    "gpu_step": "--presets tiny bigram --steps 2 --rounds 1",
    "gpu_train": "--train-preset tiny --rounds 2",
    "gpu_sampling": "--batches 1 2 --tokens 2 --rounds 1",
}
FIGURES = {
    "gpu_step": {"tiny jgpt": "milliseconds", "bigram jgpt": "tokens_per_second"},
    "gpu_train": {"jgpt": "best_loss"},
    "gpu_sampling": {"10.7M jgpt bfloat16": "batch 2"},
}


def test_each_round_has_its_figures(records):
    for name, variants in FIGURES.items():
        found = records[name]
        assert set(found["figures"]) == {"the processor", *variants}
        assert f"benchmarks/compare.py {name} {SIZES[name]}" in found["command"]
        for variant, figure in variants.items():
            its = found["figures"][variant]
            rounds = int(SIZES[name][-1])
            assert len(its[figure]) == len(its["seconds"]) == len(its["peak_mib"]) == rounds
            assert min(its[figure]) > 0


def test_a_step_s_speed_is_that_of_its_tokens(records):
    its = records["gpu_step"]["figures"]["tiny jgpt"]
    for time, speed in zip(its["milliseconds"], its["tokens_per_second"], strict=True):
        assert speed == pytest.approx(8 * 16 * 1e3 / time)
    assert "utilisation" not in its  # a CPU's peak is unknown


def test_each_round_trains_another_seed(records):
    its = records["gpu_train"]["figures"]["jgpt"]
    assert its["validation_loss"][0] != its["validation_loss"][1]
    assert all(0 < share <= 1 for share in its["share_to_target"])
