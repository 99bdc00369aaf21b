"""The figures in the README and the documentation match the benchmark records."""

import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jgpt.presets import PRESETS
from tests.test_config import PARAMETERS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
runner = importlib.import_module("runner")
tables = importlib.import_module("tables")
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_tables_are_the_results():
    pages = [page.read_text() for page in tables.PAGES]
    assert pages == [tables.written(page) for page in pages]
    found = {name for page in pages for _, name, _ in tables.BLOCK.findall(page)}
    assert found == set(tables.TABLES)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_names_its_command_and_its_commit(path):
    found = json.loads(path.read_text())
    assert found["command"].startswith("python ")
    assert COMMIT.fullmatch(found["commit"])


COMMIT = re.compile(r"[0-9a-f]{7,}(-dirty| or earlier)?")
"""With changes, or where the record does not say it, that of the commit that added the record."""


def shakespeare_best(found: dict[str, Any]) -> str:
    deviation = found["standard_deviation"]
    return f"{found['mean']:.4f} (sd {deviation:.4f}) for five seeds in windows of 512"


def int8(found: dict[str, Any]) -> str:
    changes = [its["int8"][0] - its["loss"][0] for its in found["figures"].values()]
    return f"raises the loss by {max(changes):.4f} at most"


KILLS = (
    "{kills} kills, {in_a_save} of them inside a save, {before_the_first_checkpoint} before the "
    "first checkpoint: {lost} lost, {differing} of {runs} runs differing"
)
KILLS_ON_CHANGING_MESHES = (
    "{kills} kills, {in_a_save} of them inside a save, {of_one} of one process of several: "
    "{lost} lost, {hanging} hanging, {differing} of {runs} runs differing"
)


def scanning(layers: int) -> Callable[[dict[str, Any]], str]:
    """The row of so many layers."""

    def row(found: dict[str, Any]) -> str:
        scanned = found["figures"][f"scan, {layers} layers"]
        looped = found["figures"][f"loop, {layers} layers"]
        to_scan = statistics.median(scanned["first_step_cpu_seconds"])
        to_loop = statistics.median(looped["first_step_cpu_seconds"])
        # round by round: the two of a round share what else the machine did
        ratios = []
        for scan, loop in zip(scanned["milliseconds"], looped["milliseconds"], strict=True):
            ratios.append(scan / loop)
        return f"| {layers} | {to_scan:.1f} s | {to_loop:.1f} s | {runner.spread(ratios, '.2f')} |"

    return row


FIRST_TRACE = "new process | {ratio[first trace]:.2f} times |"
EAGER_PASS = "forward pass | {ratio[eager forward]:.2f} times |"


def slower_than_llama_cpp(found: dict[str, Any]) -> str:
    ratios = []
    for model in ("10.7M", "124M"):
        ours = statistics.median(found["figures"][f"{model} jgpt float32"]["batch 1"])
        theirs = statistics.median(found["figures"][f"{model} llama.cpp F16"]["batch 1"])
        ratios.append(round(theirs / ours))
    assert ratios == [4, 2]
    return "llama.cpp is [two to four times as fast]"


def first_run(found: dict[str, Any]) -> str:
    peak = statistics.median(found["figures"]["jgpt, first run"]["peak_mib"])
    return f"{peak:.0f} MiB"


def errors_of_smollm2(found: dict[str, Any]) -> str:
    logits = found["logits"]["largest_difference"]["others"] / found["logits"]["largest"]
    loss = abs(found["loss"]["jgpt"] / found["loss"]["transformers"] - 1)
    assert all(written["same_tokens"] for written in found["written"].values())
    return f"the logits differ by {logits:.1e} and the loss by {loss:.1e}, and all 200 greedy"


def memory_of_char(found: dict[str, Any]) -> str:
    return (
        f"{found['presets']['nanogpt-char']['training_bytes'] / 2**30:.1f} GiB of training memory"
    )


SENTENCES: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
    ("README.md", "memory", first_run),
    ("README.md", "sampling", slower_than_llama_cpp),
    ("docs/benchmarks.md", "shakespeare_best_tuned", shakespeare_best),
    ("docs/benchmarks.md", "int8", int8),
    ("docs/benchmarks.md", "memory", first_run),
    ("docs/train.md", "presets", memory_of_char),
    ("docs/train.md", "kill_resume", KILLS.format_map),
    ("docs/scale.md", "kill_resume_changing_mesh", KILLS_ON_CHANGING_MESHES.format_map),
    ("docs/scale.md", "scan_layers", scanning(36)),
    ("docs/scale.md", "scan_layers", scanning(4)),
    ("docs/shapes.md", "contract_overhead", FIRST_TRACE.format_map),
    ("docs/shapes.md", "contract_overhead", EAGER_PASS.format_map),
    ("docs/parity.md", "smollm2", errors_of_smollm2),
]
"""A page, a record, and what the page says about it."""


@pytest.mark.parametrize(("page", "record", "said"), SENTENCES)
def test_sentences_are_the_results(page, record, said):
    text = (ROOT / page).read_text()
    assert said(result(record)) in " ".join(text.split())
    # the sentence names its record, or the table above it does
    assert f"benchmarks/results/{record}.json" in text


def test_the_time_of_make_train_is_that_of_the_records():
    seconds = []
    for place in tables.PLACES:
        figures = result(f"time_to_loss{place}")["figures"]
        seconds += figures["the default preset"]["seconds"]
    found = f"{min(seconds):.0f} to {max(seconds):.0f} s"
    assert found in (ROOT / "README.md").read_text()
    assert found in (ROOT / "docs" / "train.md").read_text()


def test_the_record_of_the_presets_is_that_of_today():
    found = result("presets")["presets"]
    assert found.keys() == PRESETS.keys()
    for name, (_, config) in PRESETS.items():
        assert found[name]["parameters"] == PARAMETERS[name]
        assert found[name]["steps"] == config.steps
        assert found[name]["tokens_per_step"] == config.batch_size * config.model.block_size


def test_parity_is_the_results():
    largest: dict[tuple[str, str, str], float] = {}
    for path in sorted(RESULTS.glob("parity*.json")):
        for row in json.loads(path.read_text())["rows"]:
            # checkpoints that nanoGPT wrote are in one row
            family = "a checkpoint" if row["family"].startswith("ckpt.pt") else row["family"]
            key = (family, row["dtype"], row["rung"])
            largest[key] = max(largest.get(key, 0), row["relative"])
    # rounding errors through Adam are no measure of parity: the page leaves them out
    largest = {key: error for key, error in largest.items() if key[1:] != NOT_COMPARED}

    shown = []
    for line in (ROOT / "docs" / "parity.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if "e-" in line and len(cells) == 2 + len(RUNGS):
            shown.append(cells)
    assert len(shown) >= 9
    for family, dtype, *cells in shown:
        name = family.partition(" that")[0]
        for rung, cell in zip(RUNGS, cells, strict=True):
            key = (name, dtype, rung)
            expected = f"{largest[key]:.1e}" if key in largest else ""
            assert cell == expected, key


RUNGS = ("logits", "loss", "gradients", "AdamW", "ten steps", "weights after ten")
NOT_COMPARED = ("float32", "weights after ten")
