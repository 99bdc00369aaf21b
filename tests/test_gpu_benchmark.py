"""A comparison for a GPU runs to the end without one, and its record holds what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
WORDS = ["gpu_step", "--presets", "tiny", "--steps", "2", "--rounds", "1"]


@pytest.mark.slow
def test_each_round_has_its_figures(tmp_path):
    command = [sys.executable, "benchmarks/compare.py", *WORDS, "--results", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=600)
    record = json.loads((tmp_path / "gpu_step.json").read_text())

    assert set(record["figures"]) == {"the processor", "tiny jgpt"}
    assert f"benchmarks/compare.py {' '.join(WORDS)}" in record["command"]
    measured = record["figures"]["tiny jgpt"]
    assert len(measured["milliseconds"]) == len(measured["peak_mib"]) == 1
    (speed,) = measured["tokens_per_second"]
    assert speed == pytest.approx(8 * 16 * 1e3 / measured["milliseconds"][0])
    assert "utilisation" not in measured  # a CPU's peak is unknown
