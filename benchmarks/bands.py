"""Train five seeds of presets, to say of other runs whether they are normal.

    JGPT_DATA_DIR=DIR python benchmarks/bands.py --runs RUNS

Writes jgpt/runs/bands.json: the lowest, median and highest loss of the seeds at a hundred steps,
which `jgpt plot` draws behind a run, and the range that `jgpt train` compares with. The runs, on
tiny Shakespeare, take half an hour or so on two cores; a second call continues them. Presets that
are not named keep their bands.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from runner import Variant, jgpt, measure, nothing, provenance

from jgpt.config import as_dict
from jgpt.runs.bands import BANDS
from jgpt.runs.directory import RunDirectory
from jgpt.runs.plots import _running_mean, _window
from jgpt.runs.provenance import known_text

Curve = tuple[list[int], np.ndarray]
"""Steps and losses."""
SEEDS = range(1337, 1342)
POINTS = 100


def training_curve(run: RunDirectory) -> Curve:
    """Smoothed as in a picture, and at a hundred steps alone."""
    lines = [line for line in run.metrics() if "loss" in line]
    smooth = _running_mean(np.array([line["loss"] for line in lines]), _window(run.metrics()))
    at = np.unique(np.linspace(0, len(lines) - 1, POINTS).round().astype(int))
    return [lines[i]["step"] for i in at], smooth[at]


def validation_curve(run: RunDirectory) -> Curve:
    lines = [line for line in run.metrics() if "validation_loss" in line]
    return [line["step"] for line in lines], np.array([line["validation_loss"] for line in lines])


def band(runs: list[RunDirectory]) -> dict[str, Any]:
    curves = {
        "loss": spread(training_curve, runs),
        "validation_loss": spread(validation_curve, runs),
    }
    (digest,) = {known.tokens_digest for run in runs if (known := known_text(run.provenance()))}
    best = [round(float(validation_curve(run)[1].min()), 4) for run in runs]
    config = as_dict(runs[0].config()) | {"out": None}
    return {"config": config, "tokens_sha256": digest, "best": best, "curves": curves}


def spread(curve: Callable[[RunDirectory], Curve], runs: list[RunDirectory]) -> dict[str, Any]:
    steps, losses = zip(*map(curve, runs), strict=True)
    assert all(each == steps[0] for each in steps)
    rows = np.stack(losses)
    drawn = {"low": rows.min(0), "median": np.median(rows, 0), "high": rows.max(0)}
    return {"step": steps[0]} | {name: row.round(4).tolist() for name, row in drawn.items()}


def main(
    runs: Path,
    presets: tuple[str, ...] = ("bigram", "tiny", "lecture", "modern", "modern-cpu", "nanogpt-cpu"),
    out: Path = BANDS,
) -> None:
    """Train what isn't trained yet, and write the bands.

    Args:
        runs: The folder of the runs.
    """
    bands, machine = json.loads(out.read_text())["presets"], provenance()
    for name in presets:
        command = jgpt("train", name, "--data", "shakespeare", "--seed", "{seed}", "--resume")
        trained = Variant(name, [*command, "--out", "{out}"], nothing)
        for seed in SEEDS:
            print(name, seed, measure(trained, seed, runs), flush=True)
        bands[name] = machine | band([RunDirectory.open(runs / f"{name}-{it}") for it in SEEDS])
    text = json.dumps({"presets": bands}, indent=2)
    in_a_line = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    out.write_text(in_a_line + "\n")
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
