"""The figures in the README and the documentation match the benchmark records."""

import importlib
import json
import re
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jgpt.nn.costs import parts_of
from jgpt.presets import PRESETS

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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_names_its_command_and_its_commit(path):
    found = json.loads(path.read_text())
    assert found["command"].startswith("python ")
    assert COMMIT.fullmatch(found["commit"])


COMMIT = re.compile(r"[0-9a-f]{7,}(-dirty| or earlier)?")
"""With changes, or where the record does not say it, that of the commit that added the record."""


def test_what_the_runner_writes_names_its_command_and_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "some.py"), "--kills", "100"])
    commit = "0a1b2c3"

    def printed_by(*command: str) -> str:
        return commit if command[0] == "git" else "cpu"

    monkeypatch.setattr(runner, "printed_by", printed_by)
    path = runner.write("some", {"kills": 100}, folder=tmp_path)
    found = json.loads(path.read_text())
    assert found["command"] == "python benchmarks/some.py --kills 100"
    assert found["commit"] == commit


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
    slower = {
        "nanoGPT eager": {"milliseconds": [60]},
        "jgpt float32": {"milliseconds": [48]},
        "jgpt bfloat16": {"milliseconds": [30]},
        "the processor": {"gflops": [150]},
    }
    faster = slower | {
        "nanoGPT eager": {"milliseconds": [64]},
        "the processor": {"gflops": [249, 251]},
    }
    records = {
        "step_time": slower,
        "step_time_faster_epyc": faster,
        "sampling": SAMPLED,
        "sampling_faster_epyc": SAMPLED,
    }
    for name, figures in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"figures": figures}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    header, *places = tables.compared(["train step", "tokens/s"])
    _, step, sampled = tables.readme()

    steps = "train step, nanoGPT's CPU setting"
    batch = "10.7M, batch 1, beside CTranslate2"
    assert header[3:] == ["ratio, 150 GFLOP/s", "slower, not measured", "faster, 250 GFLOP/s"]
    assert [[row[0], *row[3:]] for row in places] == [
        [f"{steps}, float32", "0.80", "", "0.75"],
        [f"{steps}, bfloat16", "0.50", "", "0.47"],
        [f"tokens/s sampled in float32, {batch}", "1.05", "", "1.05"],
    ]
    record_of_steps = "benchmarks/results/step_time.json"
    assert step[:1] + step[3:] == [f"[{steps}, float32]({record_of_steps})", "0.80", "0.75"]
    what = f"tokens/s sampled in float32, {batch}"
    assert sampled[0] == f"[{what}](benchmarks/results/sampling.json)"


def test_a_first_text_is_a_row_where_it_was_measured(tmp_path, monkeypatch):
    figures = {
        "jgpt --help": {"seconds": [1]},
        "jgpt train, the first run": {"seconds": [1]},
        "jgpt train, a later run": {"seconds": [5]},
    }
    with_text = figures | {"jgpt sample, a later run": {"seconds": [3, 1, 2.5]}}
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    (tmp_path / "startup.json").write_text(json.dumps({"figures": figures}))
    without = list(tables.own_rows())
    (tmp_path / "startup.json").write_text(json.dumps({"figures": with_text}))
    found = list(tables.own_rows())

    assert len(without) == 2
    assert len(found) == 3
    what = "`jgpt sample` of a small run to its first tokens, later"
    assert found[-1] == (what, "", "2.5 s", "", "2 s (missed)")


def test_the_runner_takes_turns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "provenance", dict)
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); print('{\"found\": 2.5}')"
    order = tmp_path / "order"

    def variant(name: str, **options: Any) -> Any:
        command = [sys.executable, "-c", code, str(order), f"{name}{{seed}}"]
        return runner.Variant(name, command, **options)

    variants = [variant("a"), variant("b", rounds=1), variant("c", warm=True)]
    options = runner.Rounds(rounds=2, results=tmp_path)
    runner.compare("turns", variants, options, lambda measured: {"variants": len(measured)})

    assert order.read_text() == "c1336 a1337 b1337 c1337 a1338 c1338 "
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
    fails = [sys.executable, "-c", "raise ValueError('no such thing')"]
    works = [sys.executable, "-c", "print('{\"found\": 2.5}')"]
    bad = runner.Variant("bad", fails)
    good = runner.Variant("good", works)

    with pytest.raises(SystemExit, match="failed: bad"):
        runner.compare("some", [bad, good], runner.Rounds(rounds=2, results=tmp_path))
    record = json.loads((tmp_path / "some.json").read_text())
    assert record["figures"].keys() == {"the processor", "good"}
    assert record["figures"]["good"]["found"] == [2.5, 2.5]
    # once, though there are two rounds
    said = capsys.readouterr().err
    assert said.count("bad ended with 1:") == 1
    assert said.count("ValueError: no such thing") == 1

    # where nothing was measured, there is no record
    with pytest.raises(SystemExit, match="failed: bad"):
        runner.compare("none", [bad], runner.Rounds(rounds=1, results=tmp_path))
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


def test_figures_of_rounds_are_compared():
    """Times by their least: what disturbs a measurement only adds to it."""
    comparisons = importlib.import_module("compare")
    checks = {
        "checks on": {"trace tiny": [12, 24, 13]},
        "checks off": {"trace tiny": [10, 11, 20]},
    }
    losses = {
        "float32": {"validation_loss": [2.0, 3.0]},
        "bfloat16": {"validation_loss": [1.5, 3.25]},
    }

    ratios = comparisons.ratios(checks)
    differences = comparisons.differences(losses)

    assert ratios == {"ratio": {"trace tiny": 1.2}, "added": {"tiny": 2}}
    assert differences["mean_difference"] == -0.125
    assert differences["largest_difference"] == 0.5


def test_time_that_grows_with_the_root_of_work_has_half_its_exponent():
    comparisons = importlib.import_module("compare")
    measured = {
        "embed_dim 64": {"flops": [64], "milliseconds": [8]},
        "embed_dim 512": {"flops": [512], "milliseconds": [512**0.5]},
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


def whole_commands(found: dict[str, Any]) -> str:
    ours = statistics.median(found["figures"]["jgpt nanogpt-cpu"]["peak_mib"])
    theirs = statistics.median(found["figures"]["nanoGPT"]["peak_mib"])
    return f"takes {ours:.0f} MiB, and nanoGPT's takes {theirs:.0f} MiB"


def seconds_of_modern(found: dict[str, Any]) -> str:
    seconds = found["figures"]["the default preset"]["seconds"]
    return f"{min(seconds):.0f} to {max(seconds):.0f} s"


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
    ("docs/benchmarks.md", "time_to_loss", whole_commands),
    ("docs/presets.md", "presets", memory_of_char),
    ("docs/presets.md", "time_to_loss_slowest_epyc", seconds_of_modern),
    ("docs/presets.md", "time_to_loss_faster_epyc", seconds_of_modern),
    ("docs/runs.md", "kill_resume", KILLS.format_map),
    ("docs/scale.md", "kill_resume_changing_mesh", KILLS_ON_CHANGING_MESHES.format_map),
    ("docs/scale.md", "scan_layers", scanning(36)),
    ("docs/scale.md", "scan_layers", scanning(4)),
    ("docs/shapes.md", "contract_overhead", FIRST_TRACE.format_map),
    ("docs/shapes.md", "contract_overhead", EAGER_PASS.format_map),
    ("docs/weights.md", "smollm2", "Both losses are {loss[jgpt]:.6f},".format_map),
    ("docs/weights.md", "smollm2", "Both losses are {loss[transformers]:.6f},".format_map),
]
"""A page, a record, and what the page says about it."""


@pytest.mark.parametrize(("page", "record", "said"), SENTENCES)
def test_sentences_are_the_results(page, record, said):
    text = (ROOT / page).read_text()
    assert said(result(record)) in " ".join(text.split())
    # the sentence names its record, or the table above it does
    assert f"benchmarks/results/{record}.json" in text


def test_the_minutes_of_make_train_are_those_of_the_records():
    seconds = []
    for place in tables.PLACES:
        figures = result(f"time_to_loss{place}")["figures"]
        seconds += figures["the default preset"]["seconds"]
    assert "[1.5 to 5 on Shakespeare]" in (ROOT / "README.md").read_text()
    assert min(seconds) == pytest.approx(1.5 * 60, rel=0.1)
    assert max(seconds) == pytest.approx(5 * 60, rel=0.1)


def test_every_row_of_the_readme_names_a_record():
    rows = tables.readme()[1:]
    assert len(rows) == len(tables.README_ROWS)
    for row in rows:
        path = row[0].partition("](")[2].removesuffix(")")
        assert (ROOT / path).is_file(), row[0]


def test_the_record_of_the_presets_is_that_of_today():
    found = result("presets")["presets"]
    assert found.keys() == PRESETS.keys()
    for name, (_, config) in PRESETS.items():
        assert found[name]["parameters"] == sum(part.parameters for part in parts_of(config.model))
        assert found[name]["steps"] == config.steps
        assert found[name]["tokens_per_step"] == config.batch_size * config.model.block_size


def test_each_preset_of_the_table_has_its_recorded_loss_or_none():
    losses = tables.recorded_losses()
    assert losses["modern"] == "1.498 to 1.512"
    assert set(tables.ON_A_CPU) - losses.keys() == {"shakespeare-best"}


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
