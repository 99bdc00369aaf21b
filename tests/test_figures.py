"""Figures in the README and the documentation are those of the benchmarks' results."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(page: Path, header: str) -> dict[str, list[str]]:
    """The rows of the table below a header line that starts so, by their first cell."""
    lines = page.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = rest
    return found


def ctranslate2(speeds: dict[str, list[float]], kind: str) -> float:
    """Its speed with one thread or with two: the better."""
    threads = [its for name, its in speeds.items() if name.startswith(f"CTranslate2, {kind}")]
    assert len(threads) == 2
    return max(map(statistics.median, threads))


def benchmark_rows() -> dict[str, list[str]]:
    """The table of docs/benchmarks.md as the results have it, but for its last two columns."""
    step, end, sampled = result("step_time"), result("time_to_loss"), result("sampling")["models"]
    memory, started, scaling = result("memory"), result("startup"), result("scaling")["axes"]
    narrow, checks = result("narrow_loss")["summary"]["1000"], result("contract_overhead")
    median = {
        name: statistics.median(its)
        for values in (step["milliseconds"], started["seconds"])
        for name, its in values.items()
    }
    mib = {name: statistics.median(its) for name, its in memory["train_mib"].items()}
    runs = {
        name: {key: [run[key] for run in its] for key in ("seconds", "validation_loss")}
        for name, its in end["runs"].items()
    }
    nanogpt, short, long = runs["nanoGPT"], runs["to the loss"], runs["to nanoGPT's end"]
    found = {
        f"train step, nanoGPT's CPU setting, {dtype}": [
            f"{median['nanoGPT compiled']:.1f} ms",
            f"{median[f'jgpt {dtype}']:.1f} ms",
            f"{step['ratio'][f'jgpt {dtype}']:.2f}",
        ]
        for dtype in ("float32", "bfloat16")
    }
    found[f"whole command to loss {max(nanogpt['validation_loss']):.3f}"] = [
        f"{statistics.mean(nanogpt['seconds']):.0f} s",
        f"{statistics.median(short['seconds']):.1f} s ({min(short['seconds']):.1f} to "
        f"{max(short['seconds']):.1f}), to {end['worst_loss_of_the_short_runs']:.3f} at worst",
        f"{end['ratio']:.2f}",
    ]
    found["loss when nanoGPT's command ends, five seeds"] = [
        f"{', '.join(f'{loss:.3f}' for loss in nanogpt['validation_loss'])} (its estimate)",
        f"{end['mean_loss_at_nanogpts_end']:.3f} (sd {end['standard_deviation']:.3f}) after "
        f"{statistics.median(long['seconds']):.0f} s",
        "",
    ]
    best = result("shakespeare_best")
    losses = [run["validation_loss"] for run in best["runs"]]
    found["`jgpt train shakespeare-best`, mean loss of five seeds"] = [
        f"{best['published']:.4f} (the lowest published)",
        f"{statistics.mean(losses):.4f} (sd {statistics.stdev(losses):.4f}) after "
        f"{best['runs'][0]['seconds'] / 60:.1f} min",
        "",
    ]
    for model, size in (("10.7M", "10.7M parameters"), ("124M", "GPT-2's size")):
        for batch, its in sampled[model]["batches"].items():
            ours, theirs = statistics.median(its["jgpt"]), ctranslate2(its, "float32")
            found[f"tokens/s sampled, {size}, batch {batch}, beside CTranslate2"] = [
                f"{theirs:,.0f}",
                f"{ours:,.0f}",
                f"{ours / theirs:.2f}x",
            ]
    exponents = [
        f"{scaling[axis]['exponent']:.2f} ({name})"
        for axis, name in (
            ("num_layers", "layers"),
            ("embed_dim", "width"),
            ("block_size", "block"),
            ("batch_size", "batch"),
        )
    ]
    added = {name: its["added"] / 1e3 for name, its in checks["presets"].items()}
    gpt2 = added.pop("gpt2")
    return found | {
        "`jgpt --help`": ["", f"{median['jgpt --help']:.2f} s", ""],
        "`jgpt train` to its first step, a later run": [
            "",
            f"{median['jgpt train, a later run']:.1f} s "
            f"(the first run {median['jgpt train, the first run']:.1f})",
            "",
        ],
        "peak memory of training, nanoGPT's CPU setting": [
            f"{mib['nanoGPT']:.0f} MiB",
            f"{mib['jgpt']:.0f} MiB",
            f"{memory['ratio']:.2f}",
        ],
        "peak memory of preparing 1 GB of text": ["", f"{memory['prepare']['mib']:.0f} MiB", ""],
        "step time grows with FLOPs to the power of": ["", ", ".join(exponents), ""],
        "bfloat16 minus float32, loss after 1,000 steps, five seeds": [
            "",
            f"{narrow['mean_difference']:.4f}, at most {narrow['largest_difference']:.4f} apart "
            f"(seeds: sd {narrow['deviation_over_seeds']:.4f})",
            "",
        ],
        "shape checks: what they add to a preset's compilation": [
            "",
            f"{min(added.values()):.2f} to {max(added.values()):.2f} s; gpt2 {gpt2:.2f} s",
            "",
        ],
        "shape checks: an eager forward pass, beside without": [
            "",
            "",
            f"{checks['milliseconds']['eager forward']['ratio']:.2f}",
        ],
    }


def test_benchmarks_are_the_results():
    written = rows(BENCHMARKS, "| what | theirs")
    assert {name: cells[:3] for name, cells in written.items()} == benchmark_rows()


def test_the_lowest_loss_is_the_result():
    best, text = result("shakespeare_best"), " ".join(BENCHMARKS.read_text().split())
    losses = [run["validation_loss"] for run in best["runs"]]
    assert all(run["step"] == 5000 for run in best["runs"])
    assert f"{min(losses):.3f} to {max(losses):.3f}, mean {statistics.mean(losses):.4f}" in text
    assert f"(one-sided t-test, p = {best['p']:.5f})" in text
    assert f"the same five models have {best['mean_in_windows_of_256']:.4f}." in text


@pytest.mark.parametrize(
    ("name", "header"), [("sampling", "| tokens/s |"), ("sampling_xeon", "| tokens/s, Xeon |")]
)
def test_decoding_is_the_results(name, header):
    sampled, written = result(name), rows(BENCHMARKS, header)
    speeds = {
        f"{model}, batch {batch}": (its, "{:,.0f}", lambda speed: speed)
        for model, of in sampled["models"].items()
        for batch, its in of["batches"].items()
    }
    prefill = sampled["prefill"], "{:.2f} s", lambda speed: 1 / speed
    speeds["a prompt of 1,000 tokens, 124M"] = prefill
    for name, (its, form, value) in speeds.items():
        middle = {who: statistics.median(values) for who, values in its.items()}
        cells = [
            *(middle.get(who) for who in ("jgpt", "transformers", "nanoGPT")),
            ctranslate2(its, "float32"),
            middle["jgpt, int8"],
            ctranslate2(its, "int8"),
        ]
        assert written.pop(name) == [
            "" if cell is None else form.format(value(cell)) for cell in cells
        ]
    assert not written
    shares = [its["bandwidth_share"] for its in sampled["models"].values()]
    said = f"{sampled['bandwidth'] / 1e9:.0f} GB/s: {shares[0]:.0%} of it for 10.7M parameters"
    text = " ".join(BENCHMARKS.read_text().split())
    assert f"{said} and {shares[1]:.0%} for 124M" in text


def test_what_int8_adds_to_the_loss_is_the_results():
    text = " ".join(BENCHMARKS.read_text().split())
    changes = [its["int8"] - its["loss"] for its in result("int8")["runs"].values()]
    assert f"raises the loss by {max(changes):.4f} at most" in text


def test_the_readme_repeats_rows_of_the_benchmarks():
    whole = rows(BENCHMARKS, "| what | theirs")
    written = rows(ROOT / "README.md", "| what | nanoGPT, or CTranslate2")
    assert len(written) == 5
    assert any("missed" in cells[3] for cells in written.values())
    assert written == {name: whole[name][:4] for name in written}


def test_the_breakdown_of_a_step_is_the_results():
    shares = [result(f"step_breakdown_{dtype}")["share"] for dtype in ("float32", "bfloat16")]
    written = rows(BENCHMARKS, "| kind of operation")
    assert written == {name: [f"{share[name]:.0%}" for share in shares] for name in written}
    assert len(written) == 5


def test_other_commands_seconds_and_losses_are_the_results():
    written = rows(BENCHMARKS, "| command | seconds")
    runs = result("train_cpu")["runs"]
    for cells, its in zip(written.values(), (runs["nanoGPT"], runs["jgpt"]), strict=True):
        seconds = [run["seconds"] for run in its]
        losses = ", ".join(f"{run['validation_loss']:.3f}" for run in its)
        middle = statistics.median(seconds)
        assert cells[0] == f"{middle:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        assert cells[1].startswith(f"{losses} (")


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


def test_kills_are_the_results():
    sentence = (
        "{kills} kills, {in_a_save} of them inside a save, {before_the_first_checkpoint} before "
        "the first checkpoint: {lost} lost, {differing} of {runs} runs differing"
    )
    assert sentence.format(**result("kill_resume")) in (ROOT / "docs" / "runs.md").read_text()
    sentence = (
        "{kills} kills, {in_a_save} of them inside a save, {of_one} of one process of several: "
        "{lost} lost, {hanging} hanging, {differing} of {runs} runs differing"
    )
    found = result("kill_resume_changing_mesh")
    assert found["largest_difference"] <= 1e-12
    assert sentence.format(**found) in (ROOT / "docs" / "scale.md").read_text()


def test_scanning_is_the_results():
    deepest = result("scan_layers")["depths"][-1]
    compiled, steps = deepest["compile_cpu_seconds"], deepest["milliseconds"]
    ratios = [scan / loop for scan, loop in zip(steps["scan"], steps["loop"], strict=True)]
    sentence = (
        f"{deepest['layers']} layers compile in [{compiled['scan']:.1f} s instead of "
        f"{compiled['loop']:.1f}, and a step takes {statistics.median(ratios):.2f} times as long]"
    )
    assert sentence in " ".join((ROOT / "docs" / "scale.md").read_text().split())


def test_the_cost_of_checks_is_the_results():
    text = " ".join((ROOT / "docs" / "shapes.md").read_text().split())
    ratios = result("contract_overhead")["milliseconds"]
    assert f"{ratios['first trace']['ratio']:.2f} times as long in a new process" in text
    assert f"an eager forward pass {ratios['eager forward']['ratio']:.2f} times" in text


def test_steps_for_other_hardware_are_the_results():
    def size(count: int) -> str:
        return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

    found: dict[tuple[str, str], list[tuple[float, int, list[str]]]] = {}
    for step in result("ahead")["steps"]:
        assert step["fits"]
        sent = sum(kind["sent"] for kind in step["collectives"])
        memory = size(step["memory"]["state"] + step["memory"]["working"])
        least = round(1e3 * step[f"{step['bound']}_seconds"], 1)
        cells = [step["preset"], step["on"], f"{step['batch_size']:,}", f"`{step['mesh']}`"]
        cells += [memory, size(sent), step["bound"], f"{least} ms"]
        found.setdefault((step["preset"], step["on"]), []).append((least, sent, cells))
    for steps in found.values():
        min(steps)[2][3] += " (best)"
    text = (ROOT / "docs" / "scale.md").read_text()
    shown = [line.strip("| ").split(" | ") for line in text.splitlines() if " ms |" in line]
    assert shown == [cells for steps in found.values() for _, _, cells in steps]


def test_the_real_model_s_figures_are_the_results():
    found = result("smollm2")
    speed = {name: its["tokens_per_second"] for name, its in found["tokens_per_second"].items()}
    middle = {name: f"{statistics.median(its):.1f}" for name, its in speed.items()}
    spread = f"{min(speed['jgpt']):.1f} to {max(speed['jgpt']):.1f}"
    loss, others = found["loss"], f"CTranslate2 {middle['CTranslate2']}, transformers"
    text = " ".join((ROOT / "docs" / "weights.md").read_text().split())
    assert (
        f"`jgpt` {middle['jgpt']} tokens/s ({spread}), {others} {middle['transformers']}." in text
    )
    assert f"Both losses are {loss['jgpt']:.6f}," in text
    assert f"{loss['transformers']:.6f}" == f"{loss['jgpt']:.6f}"
    assert not found["machine_was_busy"]
