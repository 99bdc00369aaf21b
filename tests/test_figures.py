"""The figures in the README and the documentation match the benchmark records."""

import importlib
import json
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
runner = importlib.import_module("runner")
tables = importlib.import_module("tables")
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_tables_are_the_results():
    pages = [page.read_text() for page in tables.PAGES]
    assert pages == [tables.written(page) for page in pages]
    found = {name for page in pages for _, name, _ in tables.BLOCK.findall(page)}
    assert found == set(tables.TABLES)


def test_a_figure_that_was_changed_by_hand_is_noticed():
    page = BENCHMARKS.read_text()
    assert tables.written(page.replace("20.4 (", "18.2 (")) == page
    assert tables.written("<!-- table: best -->\nnothing\n<!-- end -->") != page


def test_a_missing_record_leaves_its_rows_out(tmp_path, monkeypatch):
    (tmp_path / "sampling.json").write_text(json.dumps({"processor": "EPYC", "figures": SAMPLED}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert [row[2] for row in tables.rows()] == ["390 (350 to 400)"]
    assert tables.rows()[0][1] == "370 (360 to 380)"  # two threads are faster than one
    assert tables.rows()[0][3:] == ("1.05", "1")
    engines = dict(zip(*tables.decoding_table(), strict=True))
    assert engines["tokens/s"] == "10.7M, batch 1"
    assert engines["CTranslate2 int8"] == "990 (990 to 990)"
    assert engines["nanoGPT"] == ""
    assert engines["llama.cpp Q8_0"] == "700 (650 to 900)"
    assert "llama.cpp F16" not in engines
    assert engines["OpenVINO int8"] == "450 (450 to 450)"
    assert tables.processors_table()[1][1:] == ["EPYC", "205 (200 to 210)", "60 (60 to 60)"]


SAMPLED = {
    "the processor": {"gflops": [200, 210], "gbytes_per_second": [60, 60]},
    "10.7M jgpt float32": {"batch 1": [390, 350, 400]},
    "10.7M CTranslate2 float32 1": {"batch 1": [223, 224, 225]},
    "10.7M CTranslate2 float32 2": {"batch 1": [380, 360, 370]},
    "10.7M CTranslate2 int8 1": {"batch 1": [990]},
    "10.7M CTranslate2 int8 2": {"batch 1": [238]},
    "10.7M llama.cpp Q8_0": {"batch 1": [900, 700, 650]},
    "10.7M OpenVINO int8 PA": {"batch 1": [440]},
    "10.7M OpenVINO int8 SDPA": {"batch 1": [450]},
}


def test_ratios_on_other_processors_stand_beside(tmp_path, monkeypatch):
    slower = {"nanoGPT eager": {"milliseconds": [60]}, "the processor": {"gflops": [150]}}
    slower |= {"jgpt float32": {"milliseconds": [48]}, "jgpt bfloat16": {"milliseconds": [30]}}
    faster = slower | {
        "nanoGPT eager": {"milliseconds": [64]},
        "the processor": {"gflops": [249, 251]},
    }
    for where, figures in (("", slower), ("_faster_epyc", faster)):
        for name, its in (("step_time", figures), ("sampling", SAMPLED)):
            (tmp_path / f"{name}{where}.json").write_text(json.dumps({"figures": its}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    steps = "train step, nanoGPT's CPU setting"
    batch = "10.7M, batch 1, beside CTranslate2"
    assert tables.places_table() == [
        ["ratio, on a processor of", "150 GFLOP/s", "250 GFLOP/s"],
        [f"{steps}, float32", "0.80", "0.75"],
        [f"{steps}, bfloat16", "0.50", "0.47"],
        [f"tokens/s sampled in float32, {batch}", "1.05", "1.05"],
    ]
    _, step, sampled = tables.readme()
    assert step[:1] + step[3:] == [f"{steps}, float32", "0.80", "0.75"]
    assert sampled[0] == f"tokens/s sampled in float32, {batch}"


def test_a_first_text_is_a_row_where_it_was_measured(tmp_path, monkeypatch):
    figures = {f"jgpt {it}": {"seconds": [1]} for it in ("--help", "train, the first run")}
    figures["jgpt train, a later run"] = {"seconds": [5]}
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for sampled, rows in (({}, 2), ({"jgpt sample, a later run": {"seconds": [3, 1, 2.5]}}, 3)):
        record = json.dumps({"figures": figures | sampled})
        (tmp_path / "startup.json").write_text(record)
        found = list(tables.own_rows())
        assert len(found) == rows
    what = "`jgpt sample` of a small run to its first tokens, later"

    assert found[-1] == (what, "", "2.5 s", "", "2 s (missed)")


def test_the_runner_takes_turns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "provenance", dict)
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); print('{\"found\": 2.5}')"
    told = tmp_path / "told"
    variants = [
        runner.Variant(name, [sys.executable, "-c", code, str(told), f"{name}{{seed}}"], **how)
        for name, how in (("a", {}), ("b", {"rounds": 1}), ("c", {"warm": True}))
    ]
    options = runner.Rounds(rounds=2, results=tmp_path)
    runner.compare("turns", variants, options, lambda measured: {"variants": len(measured)})
    assert told.read_text() == "c1336 a1337 b1337 c1337 a1338 c1338 "
    record = json.loads((tmp_path / "turns.json").read_text())
    assert record["variants"] == 4  # with the processor
    assert record["figures"]["b"]["found"] == [2.5]
    assert len(record["figures"]["the processor"]["gflops"]) == 2
    # a child's peak begins with that of the process that starts it
    most = 500 + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert all(0 < peak < most for peak in record["figures"]["a"]["peak_mib"])
    assert "2.5 (2.5 to 2.5)" in capsys.readouterr().out


def test_a_variant_that_fails_is_said_and_the_rest_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "provenance", dict)
    codes = {"bad": "raise ValueError('no such thing')", "good": "print('{\"found\": 2.5}')"}
    commands = {name: [sys.executable, "-c", code] for name, code in codes.items()}
    variants = [runner.Variant(*each) for each in commands.items()]
    with pytest.raises(SystemExit, match="failed: bad"):
        runner.compare("some", variants, runner.Rounds(rounds=2, results=tmp_path))
    record = json.loads((tmp_path / "some.json").read_text())
    assert record["figures"].keys() == {"the processor", "good"}
    assert record["figures"]["good"]["found"] == [2.5, 2.5]
    said = capsys.readouterr().err
    assert said.count("bad ended with 1:") == said.count("ValueError: no such thing") == 1
    with pytest.raises(SystemExit, match="failed: bad"):
        runner.compare("none", variants[:1], runner.Rounds(rounds=1, results=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


@pytest.mark.parametrize("name", ["step_time", "time_to_loss", "memory"])
def test_a_checkout_of_nanogpt_that_is_not_there_is_said_in_a_line(name, tmp_path, capsys):
    comparisons = importlib.import_module("compare")
    with pytest.raises(SystemExit) as stopped:
        getattr(comparisons, name)(runner.Rounds(results=tmp_path), nanogpt=tmp_path / "no")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"{tmp_path}/no is no checkout of nanoGPT: --nanogpt PATH\n"


def test_one_round_has_no_standard_deviation(tmp_path, monkeypatch):
    names = ("nanoGPT", "to the loss", "to nanoGPT's end", "the default preset", "jgpt nanogpt-cpu")
    figures = {name: {"seconds": [9.0], "validation_loss": [1.5]} for name in names}
    (tmp_path / "time_to_loss.json").write_text(json.dumps({"figures": figures}))
    best = {"shakespeare-best": {"test_loss_in_windows_of_64": [1.5]}}
    (tmp_path / "shakespeare_best.json").write_text(json.dumps({"figures": best}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.best_table()[1] == ["shakespeare-best", "64", "1.5000", "", "1.5000"]
    said = {what: ours for what, _, ours, *_ in tables.rows()}
    assert said["loss when nanoGPT's command ends, one seed"] == "1.500 after 9 s"
    assert said["`shakespeare-best`, test loss in windows of 64, one seed"] == "1.5000"


def test_figures_of_rounds_are_compared_round_by_round():
    """A round in which the machine was busy is slow in both halves."""
    comparisons = importlib.import_module("compare")
    times = {"on": [12, 24, 12], "off": [10, 20, 10]}
    found = comparisons.ratios(
        {f"checks {name}": {"trace tiny": its} for name, its in times.items()}
    )
    assert found == {"ratio": {"trace tiny": 1.2}, "added": {"tiny": 2}}
    losses = {"float32": [2.0, 3.0], "bfloat16": [1.5, 3.25]}
    measured = {it: {"validation_loss": its} for it, its in losses.items()}
    found = comparisons.differences(measured)
    assert (found["mean_difference"], found["largest_difference"]) == (-0.125, 0.5)


def test_time_that_grows_with_the_root_of_work_has_half_its_exponent():
    comparisons = importlib.import_module("compare")
    measured = {
        f"embed_dim {flops}": {"flops": [flops], "milliseconds": [flops**0.5]}
        for flops in (64, 512)
    }
    found = comparisons.exponents(measured)

    assert found["exponents"] == {"embed_dim": pytest.approx(0.5)}


def shakespeare_best(found: dict[str, Any]) -> str:
    mean = found["mean"]
    deviation = found["standard_deviation"]
    return (
        f"a mean of {mean:.4f} (sd {deviation:.4f}) in windows of 512, and "
        f"{found['mean_in_windows_of_256']:.4f} in windows of 256"
    )


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
        seconds = [
            f"{statistics.median(its['first_step_cpu_seconds']):.1f} s" for its in (scanned, looped)
        ]
        pairs = zip(scanned["milliseconds"], looped["milliseconds"], strict=True)
        times = runner.spread([scan / loop for scan, loop in pairs], ".2f")
        return f"| {layers} | {seconds[0]} | {seconds[1]} | {times} |"

    return row


SENTENCES: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
    ("benchmarks", "shakespeare_best_tuned", shakespeare_best),
    ("benchmarks", "int8", int8),
    ("runs", "kill_resume", KILLS.format_map),
    ("scale", "kill_resume_changing_mesh", KILLS_ON_CHANGING_MESHES.format_map),
    ("scale", "scan_layers", scanning(36)),
    ("scale", "scan_layers", scanning(4)),
    ("shapes", "contract_overhead", "new process | {ratio[first trace]:.2f} times |".format_map),
    ("shapes", "contract_overhead", "forward pass | {ratio[eager forward]:.2f} times |".format_map),
    ("weights", "smollm2", "Both losses are {loss[jgpt]:.6f},".format_map),
    ("weights", "smollm2", "Both losses are {loss[transformers]:.6f},".format_map),
]
"""A page, a record, and what the page says about it."""


@pytest.mark.parametrize(("page", "record", "said"), SENTENCES)
def test_sentences_are_the_results(page, record, said):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert said(result(record)) in " ".join(text.split())


def test_parity_is_the_results():
    lines = (ROOT / "docs" / "parity.md").read_text().splitlines()
    written = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "e-" in line]
    columns = ("logits", "loss", "gradients", "AdamW", "ten steps", "weights after ten")
    largest: dict[tuple[str, str, str], float] = {}
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("parity*.json"))]
    for row in (row for its in results for row in its["rows"]):
        # checkpoints that nanoGPT wrote are in one row
        family = "a checkpoint" if row["family"].startswith("ckpt.pt") else row["family"]
        key = family, row["dtype"], row["rung"]
        largest[key] = max(largest.get(key, 0), row["relative"])
    shown = [row for row in written if len(row) == 8]
    assert len(shown) >= 9
    for family, dtype, *cells in shown:
        name = family.partition(" that")[0]
        for column, cell in zip(columns, cells, strict=True):
            compared = (name, dtype, column) in largest and (dtype, column) != (
                "float32",
                "weights after ten",
            )
            assert cell == (f"{largest[name, dtype, column]:.1e}" if compared else "")
