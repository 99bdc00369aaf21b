"""Write the documents' tables from the records, between the comments that name them.

    python benchmarks/tables.py

A row whose record is missing is left out.
"""

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from runner import PROCESSOR, RESULTS, ROOT, median, spread

PAGES = tuple(
    ROOT / page
    for page in (
        "docs/benchmarks.md",
        "docs/scale.md",
        "docs/shapes.md",
        "README.md",
        "benchmarks/ablation.md",
    )
)
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = tuple[str, str, str, str, str]
"""The columns of HEADER."""


def record(name: str) -> dict[str, Any]:
    """What was measured; an empty record if it wasn't."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"figures": {}}


def ratio(value: float, target: float, *, more: bool = False) -> tuple[str, str]:
    """The cells for a ratio and its target."""
    missed = value < target if more else value > target
    return f"{value:.2f}", f"{target:g}{' (missed)' if missed else ''}"


def ratio_of(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


def step_rows() -> Iterator[Row]:
    if measured := record("step_time")["figures"]:
        times = {name: its["milliseconds"] for name, its in measured.items() if name != PROCESSOR}
        nanogpt = [name for name in times if name.startswith("nanoGPT")]
        best = min(nanogpt, key=lambda name: statistics.median(times[name]))
        its = f"{spread(times[best], '.1f')} ms, {best.split()[1]}"
        for dtype, target in (("float32", 0.9), ("bfloat16", 0.65)):
            mine = times[f"jgpt {dtype}"]
            cells = ratio(ratio_of(mine, times[best]), target)
            what = f"train step, nanoGPT's CPU setting, {dtype}"
            yield what, its, f"{spread(mine, '.1f')} ms", *cells


def command_rows() -> Iterator[Row]:
    measured = record("time_to_loss")["figures"]
    if not measured:
        return
    seconds = {name: its["seconds"] for name, its in measured.items()}
    loss = {name: its.get("validation_loss", [0.0]) for name, its in measured.items()}
    theirs, seeds = seconds["nanoGPT"], SEEDS[len(loss["nanoGPT"])]
    whole = f"{spread(theirs, '.0f')} s"

    def took(name: str, form: str = ".0f") -> str:
        return f"{spread(seconds[name], form)} s, to"

    def by_target(name: str, target: float) -> tuple[str, str]:
        return ratio(ratio_of(seconds[name], theirs), target)

    def average(name: str) -> str:
        return f"{statistics.mean(loss[name]):.3f} (sd {statistics.stdev(loss[name]):.3f})"

    name = "to the loss"
    ours = f"{took(name, '.1f')} {max(loss[name]):.3f} at worst"
    yield "whole command to loss 1.886", whole, ours, *by_target(name, 0.083)
    name, estimates = "to nanoGPT's end", ", ".join(f"{its:.3f}" for its in loss["nanoGPT"])
    ours = f"{average(name)} after {statistics.median(seconds[name]):.0f} s"
    target = f"1.48{' (missed)' if statistics.mean(loss[name]) > 1.48 else ''}"
    what = f"loss when nanoGPT's command ends, {seeds} seeds"
    yield what, f"{estimates} (its estimate)", ours, "", target
    name = "the default preset"
    what = f"whole command, the default preset to its end, {seeds} seeds"
    yield what, whole, f"{took(name)} {average(name)}", *by_target(name, 1.3)
    name = "jgpt nanogpt-cpu"
    what, same = "whole command, nanoGPT's CPU setting in both", f"{spread(loss[name], '.3f')}"
    yield what, whole, f"{took(name)} {same}", f"{ratio_of(seconds[name], theirs):.2f}", ""


def decoding() -> Iterator[tuple[str, str, dict[str, list[float]]]]:
    """For each model and batch size, or prompt: label, figure, and the values by engine."""
    measured = record("sampling")["figures"]
    for model in ("10.7M", "124M"):
        engines = {
            name.removeprefix(f"{model} "): its
            for name, its in measured.items()
            if name.startswith(f"{model} ")
        }
        for figure in ("batch 1", "batch 16", "prompt_seconds"):
            if found := {name: its[figure] for name, its in engines.items() if figure in its}:
                label = "a prompt of 1,000 tokens" if figure == "prompt_seconds" else figure
                yield f"{model}, {label}", figure, found


def ctranslate2(found: dict[str, list[float]], dtype: str, figure: str) -> list[float]:
    """The faster of one thread and two."""
    its = [found[f"CTranslate2 {dtype} {threads}"] for threads in (1, 2)]
    return (min if figure == "prompt_seconds" else max)(its, key=statistics.median)


def sampling_rows() -> Iterator[Row]:
    for label, figure, found in decoding():
        if figure != "prompt_seconds":
            ours, theirs = found["jgpt float32"], ctranslate2(found, "float32", figure)
            cells = ratio(ratio_of(ours, theirs), 1, more=True)
            what = f"tokens/s sampled in float32, {label}, beside CTranslate2"
            yield what, spread(theirs, ",.0f"), spread(ours, ",.0f"), *cells


def best_rows() -> Iterator[Row]:
    """One row per window length; theirs are the nanoGPT settings measured at that length."""
    models = record("shakespeare_best").get("models", {})
    ours = models.get("shakespeare-best", {"test": {}})["test"]
    for size, mine in ours.items():
        references = {name: its["test"] for name, its in models.items() if "nanogpt" in name}
        theirs = [
            f"{mean_of(its[size])} ({name})" for name, its in references.items() if size in its
        ]
        what = f"`shakespeare-best`, test loss in windows of {size}, five seeds"
        yield what, "; ".join(theirs), mean_of(mine), "", ""


def mean_of(found: dict[str, float]) -> str:
    return f"{found['mean']:.4f} (sd {found['deviation']:.4f})"


def own_rows() -> Iterator[Row]:
    """Startup, memory, scaling, rounding, and the cost of shape checks."""
    started, memory = record("startup")["figures"], record("memory")["figures"]
    if started:
        seconds = median(started, "jgpt --help", "seconds")
        yield "`jgpt --help`", "", f"{seconds:.2f} s", "", "0.3 s"
        later, first = (f"jgpt train, {which}" for which in ("a later run", "the first run"))
        took = median(started, later, "seconds")
        seconds = f"{took:.1f} s (the first run {median(started, first, 'seconds'):.1f})"
        target = f"4 s{' (missed)' if took > 4 else ''}"
        yield "`jgpt train` to its first step, a later run", "", seconds, "", target
    if memory:
        theirs, ours = (median(memory, name, "peak_mib") for name in ("nanoGPT", "jgpt"))
        what = "peak memory of training, nanoGPT's CPU setting"
        yield what, f"{theirs:.0f} MiB", f"{ours:.0f} MiB", *ratio(ours / theirs, 1.2)
        peak = f"{median(memory, 'jgpt prepare', 'peak_mib'):.0f} MiB"
        yield "peak memory of preparing 1 GB of text", "", peak, "", "500 MB"
    if powers := record("scaling").get("exponents"):
        names = {"num_layers": "layers", "embed_dim": "width", "block_size": "block"}
        its = [f"{power:.2f} ({names.get(axis, 'batch')})" for axis, power in powers.items()]
        yield "step time grows with FLOPs to the power of", "", ", ".join(its), "", "1"
    if (narrow := record("narrow_loss"))["figures"]:
        its = f"{narrow['mean_difference']:.4f}, at most {narrow['largest_difference']:.4f} apart"
        its += f" (seeds: sd {narrow['deviation_over_seeds']:.4f})"
        what = "bfloat16 minus float32, loss after 1,000 steps, five seeds"
        yield what, "", its, "", "within noise"
    if (checks := record("contract_overhead"))["figures"]:
        added = {name: its / 1e3 for name, its in checks["added"].items()}
        slowest = max(added, key=added.__getitem__)
        most = added.pop(slowest)
        its = f"{min(added.values()):.2f} to {max(added.values()):.2f} s; {slowest} {most:.2f} s"
        target = f"0.15 s{' (missed)' if most > 0.15 else ''}"
        yield "shape checks: what they add to a preset's compilation", "", its, "", target
        cells = ratio(checks["ratio"]["eager forward"], 1.6)
        yield "shape checks: an eager forward pass, beside without", "", "", *cells


def rows() -> list[Row]:
    return [*step_rows(), *command_rows(), *best_rows(), *sampling_rows(), *own_rows()]


SEEDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}
HEADER: list[str] = ["what", "theirs", "jgpt", "ratio", "target"]
README_ROWS = (
    "train step, nanoGPT's CPU setting, float32",
    "whole command to loss 1.886",
    "loss when nanoGPT's command ends",
    "tokens/s sampled in float32, 10.7M, batch 16, beside CTranslate2",
    "tokens/s sampled in float32, 124M, batch 16, beside CTranslate2",
)
"""What jgpt is ahead in, by how the rows begin."""


def summary() -> list[list[str]]:
    return [HEADER, *map(list, rows())]


def readme() -> list[list[str]]:
    chosen = [row for row in rows() if row[0].startswith(README_ROWS)]
    return [list(row[:-1]) for row in (HEADER, *chosen)]


def decoding_table() -> list[list[str]]:
    engines = "jgpt float32", "jgpt bfloat16", "jgpt int8", "transformers", "nanoGPT"
    names = [*engines[:1], "CTranslate2 float32", *engines[1:3], "CTranslate2 int8", *engines[3:]]
    measured = {name for _, _, found in decoding() for name in found}
    names += [name for name in ("llama.cpp F16", "llama.cpp Q8_0") if name in measured]
    table = [["tokens/s", *names]]
    for label, figure, found in decoding():
        form, unit = (".2f", " s") if figure == "prompt_seconds" else (",.0f", "")
        for dtype in ("float32", "int8"):
            found[f"CTranslate2 {dtype}"] = ctranslate2(found, dtype, figure)
        cells = [spread(found[name], form) + unit if name in found else "" for name in names]
        table.append([label, *cells])
    return table


def best_table() -> list[list[str]]:
    table = [["model", "windows", "mean", "standard deviation", "each seed"]]
    for name, its in record("shakespeare_best").get("models", {}).items():
        for size, found in its["test"].items():
            seeds = ", ".join(f"{run['test'][size]:.4f}" for run in its["runs"])
            label = name if its["change"] == "the preset" else f"{name}, {its['change']}"
            table.append([label, size, f"{found['mean']:.4f}", f"{found['deviation']:.4f}", seeds])
    return table


def candidates_table() -> list[list[str]]:
    table = [["change of `shakespeare-best`", "loss on the validation half"]]
    losses = record("shakespeare_best").get("candidates", {})
    table += [[name, f"{losses[name]:.4f}"] for name in sorted(losses, key=losses.get)]
    return table


def ablation_table() -> list[list[str]]:
    """The worst change last."""
    figures = record("ablation")["figures"]
    figures.pop(PROCESSOR, None)
    loss = {name: statistics.mean(its["validation_loss"]) for name, its in figures.items()}
    step = {name: statistics.mean(its["milliseconds"]) for name, its in figures.items()}
    base = "the preset"
    table = [["one change", "loss", "each seed", "difference", "a step's time, of the preset's"]]
    for name in sorted(loss, key=loss.__getitem__):
        seeds = ", ".join(f"{each:.3f}" for each in figures[name]["validation_loss"])
        difference, time = f"{loss[name] - loss[base]:+.3f}", f"{step[name] / step[base]:.2f}"
        table.append([name, f"{loss[name]:.3f}", seeds, difference, time])
    return table


def breakdown_table() -> list[list[str]]:
    dtypes = "float32", "bfloat16"
    shares = [record(f"step_breakdown_{dtype}")["share"] for dtype in dtypes]
    kinds = [kind for kind in shares[0] if "not in the program" not in kind]
    cells = [[kind, *(f"{share[kind]:.0%}" for share in shares)] for kind in kinds]
    return [["kind of operation", *dtypes], *cells]


def ahead_table() -> list[list[str]]:
    """The best mesh is the one with the least time, and of equals the one that sends less."""

    def size(count: int) -> str:
        return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

    found: dict[tuple[str, str], list[tuple[float, int, list[str]]]] = {}
    for step in record("ahead")["steps"]:
        sent = sum(kind["sent"] for kind in step["collectives"])
        memory = size(step["memory"]["state"] + step["memory"]["working"])
        least = round(1e3 * step[f"{step['bound']}_seconds"], 1)
        cells = [step["preset"], step["on"], f"{step['batch_size']:,}", f"`{step['mesh']}`"]
        cells += [memory + (not step["fits"]) * ", too much", size(sent)]
        cells += [step["bound"], f"{least} ms"]
        found.setdefault((step["preset"], step["on"]), []).append((least, sent, cells))
    for steps in found.values():
        min(steps)[2][3] += " (best)"
    sizes = "preset", "chips", "sequences", "mesh", "memory of a chip"
    header = [*sizes, "a chip sends", "bound by", "at least"]
    return [header, *(cells for steps in found.values() for *_, cells in steps)]


def prepare_table() -> list[list[str]]:
    table = [["a text with GPT-2's byte-pairs", "seconds", "MB/s", "of tiktoken's", "peak memory"]]
    measured = record("prepare")["figures"]
    for name in [name for name in measured if name != PROCESSOR]:
        its = measured[name]
        best = median(measured, "tiktoken", "seconds")
        seconds, size = statistics.median(its["seconds"]), its["megabytes"][0]
        speed, peak = f"{size / seconds:.1f}", f"{max(its['peak_mib']):.0f} MiB"
        label = f"{name}, {size:.0f} MB"
        cells = [spread(its["seconds"], ".1f"), speed, f"{best / seconds:.2f}", peak]
        table.append([label, *cells])
    return table


def proofs_table() -> list[list[str]]:
    verdicts = "proven", "refused", "open"
    found = json.loads((ROOT / "jgpt" / "proofs.json").read_text())
    rows = [
        [name, f"`{its['arrays']}`", *(str(its[verdict]) for verdict in verdicts)]
        for name, its in found.items()
    ]
    return [["program", "for any", *(f"cases {verdict}" for verdict in verdicts)], *rows]


def judges_table() -> list[list[str]]:
    """How two judges notice an edit of an annotation: calls with numbers, and their proofs."""
    both = ["a right call", "a wrong argument", "a wrong result"]
    columns = ["mutants", *both, "the proof alone", "numbers alone", "neither"]
    rows: dict[str, Counter[str]] = {}
    for name, (numbers, proof) in record("mutants_judged").get("outcomes", {}).items():
        if {numbers, proof} <= {*both, ""}:  # others are of functions that run on the host
            alone = "numbers alone" if numbers else "the proof alone"
            how = numbers or "neither" if bool(numbers) == bool(proof) else alone
            for row in (name.split(":")[0], "all"):
                rows.setdefault(row, Counter()).update(["mutants", how])
    names = sorted(rows, key=lambda name: (name == "all", name))
    cells = ([name, *(str(rows[name][column]) for column in columns)] for name in names)
    return [["module", *columns], *cells]


def processors_table() -> list[list[str]]:
    table = [["record", "processor", "GFLOP/s", "GB/s"]]
    for path in sorted(RESULTS.glob("*.json")):
        found = record(path.stem)
        if speed := found.get("figures", {}).get(PROCESSOR):
            figures = (spread(speed[name], ".0f") for name in ("gflops", "gbytes_per_second"))
            name = f"[{path.stem}](../benchmarks/results/{path.name})"
            table.append([name, found["processor"], *figures])
    return table


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "summary": summary,
    "readme": readme,
    "decoding": decoding_table,
    "best": best_table,
    "candidates": candidates_table,
    "ablation": ablation_table,
    "breakdown": breakdown_table,
    "prepare": prepare_table,
    "processors": processors_table,
    "proofs": proofs_table,
    "judges": judges_table,
    "ahead": ahead_table,
}


def written(page: str) -> str:
    """A page with its tables as the records have them."""

    def fill(block: re.Match[str]) -> str:
        header, *cells = TABLES[block[2]]()
        lines = [
            "".join(f"| {cell} " if cell else "| " for cell in row) for row in [header, *cells]
        ]
        lines.insert(1, "|---" * len(header))
        return block[1] + "".join(f"{line}|\n" for line in lines if cells) + block[3]

    return BLOCK.sub(fill, page)


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
