"""Write the documents' tables from the records, between the comments that name them.

    python benchmarks/tables.py

A row whose record is missing is left out.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from breakdown import KINDS
from runner import PROCESSOR, RESULTS, ROOT, Measured, median, spread

PAGES = [
    *(ROOT / "docs" / f"{page}.md" for page in ("benchmarks", "scale")),
    *(
        ROOT / "benchmarks" / f"{page}.md"
        for page in ("ablation", "details", "processors", "proofs")
    ),
    ROOT / "README.md",
]
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER = "what", "theirs", "jgpt", "ratio", "target"
README_ROWS = (
    # like for like: the same model in the same setting
    "train step, nanoGPT's CPU setting, float32",
    "whole command, nanoGPT's CPU setting in both",
    # our preset in the time, or to the loss, of theirs
    "whole command to nanoGPT's loss",
    "loss when nanoGPT's command ends",
    # ahead and behind
    "tokens/s sampled in float32, 10.7M, batch 16, beside CTranslate2",
    "tokens/s sampled in float32, 10.7M, batch 1, beside CTranslate2",
    "peak memory of training, nanoGPT's CPU setting",
)
"""How the rows of the README begin, in its order."""
NUMBERS = "no", "one", "two", "three", "four", "five"
PROMPT = "a prompt of 1,000 tokens"
FIGURES = {"batch 1": "batch 1", "batch 16": "batch 16", "prompt_seconds": PROMPT}
"""Of decoding, and what they are called."""
BETTER_OF_TWO = [
    f"{name} {dtype}" for name in ("CTranslate2", "OpenVINO") for dtype in ("float32", "int8")
]
"""Engines that are measured in two ways."""
PLACES = "_slowest_epyc", "", "_faster_epyc"
"""How the records of each processor's comparisons end."""
TEST_LOSS = "test_loss_in_windows_of_"
Row = Sequence[str]
Table = Sequence[Row]


def record(name: str) -> dict[str, Any]:
    """What was measured; an empty record if it wasn't."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measured(name: str) -> Measured:
    """The values per round, without those of the processor."""
    figures = record(name).get("figures", {})
    return {variant: its for variant, its in figures.items() if variant != PROCESSOR}


def goal(value: float, target: float, unit: str = "", *, more: bool = False) -> str:
    """The cell of a target, which says whether it was missed."""
    missed = value < target if more else value > target
    return f"{target:g}{unit}{' (missed)' if missed else ''}"


def beside(
    theirs: list[float], ours: list[float], form: str, target: float, *, more: bool = False
) -> tuple[str, str, str, str]:
    """The cells of both, of their ratio and of its target."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    cells = f"{ratio:.2f}", goal(ratio, target, more=more)
    return spread(theirs, form), spread(ours, form), *cells


def mean_of(losses: list[float], digits: int = 4) -> str:
    mean, deviation = statistics.mean(losses), deviation_of(losses, digits)
    return f"{mean:.{digits}f}" + (f" (sd {deviation})" if deviation else "")


def deviation_of(losses: list[float], digits: int = 4) -> str:
    """The standard deviation; one loss has none."""
    return f"{statistics.stdev(losses):.{digits}f}" if len(losses) > 1 else ""


def seeds_of(losses: list[float]) -> str:
    count = len(losses)
    number = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{number} seed{'s' * (count != 1)}"


def step_rows(where: str = "") -> Iterator[Row]:
    if its := measured(f"step_time{where}"):
        times = {name: figures["milliseconds"] for name, figures in its.items()}
        nanogpt = [name for name in times if name.startswith("nanoGPT")]
        best = min(nanogpt, key=lambda name: statistics.median(times[name]))
        for dtype, target in (("float32", 0.9), ("bfloat16", 0.65)):
            theirs, ours, *ratio = beside(times[best], times[f"jgpt {dtype}"], ".1f", target)
            what, how = f"train step, nanoGPT's CPU setting, {dtype}", best.split()[1]
            yield what, f"{theirs} ms, {how}", f"{ours} ms", *ratio


def command_rows(where: str = "") -> Iterator[Row]:
    runs = measured(f"time_to_loss{where}")
    if not runs:
        return
    seconds = {name: its["seconds"] for name, its in runs.items()}
    loss = {name: its["validation_loss"] for name, its in runs.items()}
    seeds = seeds_of(loss["nanoGPT"])

    def row(what: str, name: str, reached: str, target: float, form: str = ".0f") -> Row:
        _, ours, *ratio = beside(seconds["nanoGPT"], seconds[name], form, target)
        return what, f"{spread(seconds['nanoGPT'], '.0f')} s", f"{ours} s, to {reached}", *ratio

    name = "to the loss"
    worst = f"{max(loss[name]):.3f} at worst"
    what, theirs, *rest = row("whole command to nanoGPT's loss", name, worst, 0.083, ".1f")
    yield what, f"{theirs}, to {min(loss['nanoGPT']):.3f} at best", *rest
    name, estimates = "to nanoGPT's end", ", ".join(f"{its:.3f}" for its in loss["nanoGPT"])
    ours = f"{mean_of(loss[name], 3)} after {statistics.median(seconds[name]):.0f} s"
    what, reached = f"loss when nanoGPT's command ends, {seeds}", statistics.mean(loss[name])
    yield what, f"{estimates} (its estimate)", ours, "", goal(reached, 1.48)
    name, what = "the default preset", f"whole command, the default preset to its end, {seeds}"
    yield row(what, name, mean_of(loss[name], 3), 1.3)
    name, what = "jgpt nanogpt-cpu", "whole command, nanoGPT's CPU setting in both"
    *cells, _ = row(what, name, spread(loss[name], ".3f"), 1)
    yield *cells, ""


def decoding(where: str = "") -> Iterator[tuple[str, dict[str, list[float]]]]:
    """For each model and batch size, or prompt: the label, and the values by engine.

    CTranslate2 counts with one thread or two, and OpenVINO with either cache, whichever is faster.
    """
    for model in ("10.7M", "124M"):
        for figure, label in FIGURES.items():
            found = {
                name.removeprefix(f"{model} "): its[figure]
                for name, its in measured(f"sampling{where}").items()
                if name.startswith(f"{model} ") and figure in its
            }
            for name in BETTER_OF_TWO:
                both = [found[each] for each in found if each.startswith(name)]
                if both:
                    fastest = min if label == PROMPT else max
                    found[name] = fastest(both, key=statistics.median)
            if found:
                yield f"{model}, {label}", found


def sampling_rows(where: str = "") -> Iterator[Row]:
    for label, found in decoding(where):
        if not label.endswith(PROMPT):
            both = found["CTranslate2 float32"], found["jgpt float32"]
            what = f"tokens/s sampled in float32, {label}, beside CTranslate2"
            yield what, *beside(*both, ",.0f", 1, more=True)


def tested() -> Iterator[tuple[str, str, list[float]]]:
    """For each model and length of a window: both, and the losses of the seeds."""
    for name, its in measured("shakespeare_best").items():
        for figure, losses in its.items():
            if figure.startswith(TEST_LOSS):
                yield name, figure.removeprefix(TEST_LOSS), losses


def best_rows() -> Iterator[Row]:
    """One row per window length; theirs are the nanoGPT settings measured at that length."""
    for name, size, losses in tested():
        if name.startswith("shakespeare-best"):
            theirs = [
                f"{mean_of(others)} ({other})"
                for other, length, others in tested()
                if "nanogpt" in other and length == size
            ]
            what = f"`shakespeare-best`, test loss in windows of {size}, {seeds_of(losses)}"
            yield what, "; ".join(theirs), mean_of(losses), "", ""


def own_rows() -> Iterator[Row]:
    """Startup, memory, scaling, rounding, and the cost of shape checks."""
    if started := measured("startup"):
        seconds = median(started, "jgpt --help", "seconds")
        yield "`jgpt --help`", "", f"{seconds:.2f} s", "", "0.3 s"
        later, first = (f"jgpt train, {which}" for which in ("a later run", "the first run"))
        took = median(started, later, "seconds")
        both = f"{took:.1f} s (the first run {median(started, first, 'seconds'):.1f})"
        yield "`jgpt train` to its first step, a later run", "", both, "", goal(took, 4, " s")
    if (sampled := "jgpt sample, a later run") in started:
        took = median(started, sampled, "seconds")
        what = "`jgpt sample` of a small run to its first tokens, later"
        yield what, "", f"{took:.1f} s", "", goal(took, 2, " s")
    if memory := measured("memory"):
        peaks = {name: statistics.median(its["peak_mib"]) for name, its in memory.items()}
        ratio = peaks["jgpt"] / peaks["nanoGPT"]
        cells = f"{peaks['nanoGPT']:.0f} MiB", f"{peaks['jgpt']:.0f} MiB", f"{ratio:.2f}"
        yield "peak memory of training, nanoGPT's CPU setting", *cells, goal(ratio, 1.2)
        peak = f"{peaks['jgpt prepare']:.0f} MiB"
        yield "peak memory of preparing 1 GB of text", "", peak, "", "500 MB"
    if powers := record("scaling").get("exponents"):
        names = {"num_layers": "layers", "embed_dim": "width", "block_size": "block"}
        grows = [f"{power:.2f} ({names.get(axis, 'batch')})" for axis, power in powers.items()]
        yield "step time grows with FLOPs to the power of", "", ", ".join(grows), "", "1"
    if narrow := record("narrow_loss"):
        apart = f"{narrow['mean_difference']:.4f}, at most {narrow['largest_difference']:.4f} apart"
        apart += f" (seeds: sd {narrow['deviation_over_seeds']:.4f})"
        seeds = seeds_of(measured("narrow_loss")["float32"]["validation_loss"])
        what = f"bfloat16 minus float32, loss after 1,000 steps, {seeds}"
        yield what, "", apart, "", "within noise"
    if checks := record("contract_overhead"):
        added = {name: milliseconds / 1e3 for name, milliseconds in checks["added"].items()}
        slowest = max(added, key=added.__getitem__)
        most = added.pop(slowest)
        what = "shape checks: what they add to a preset's compilation"
        its = f"{min(added.values()):.2f} to {max(added.values()):.2f} s; {slowest} {most:.2f} s"
        yield what, "", its, "", goal(most, 0.15, " s")
        eager, what = checks["ratio"]["eager forward"], "shape checks: an eager forward pass"
        yield f"{what}, beside without", "", "", f"{eager:.2f}", goal(eager, 1.6)


def rows() -> list[Row]:
    return [*step_rows(), *command_rows(), *best_rows(), *sampling_rows(), *own_rows()]


def ratios(where: str) -> dict[str, str]:
    """The ratio of each row, as measured on one of the processors."""
    found = [*step_rows(where), *command_rows(where), *sampling_rows(where)]
    return {without_seeds(what): ratio for what, *_, ratio, _ in found if ratio}


def without_seeds(what: str) -> str:
    return re.sub(r", \w+ seeds?$", "", what)


def places_table() -> Table:
    """The ratios on each processor, by the speed of its products."""
    columns = {}
    for where in PLACES:
        if speed := record(f"step_time{where}").get("figures", {}).get(PROCESSOR):
            columns[f"{statistics.median(speed['gflops']):.0f} GFLOP/s"] = ratios(where)
    names = dict.fromkeys(what for its in columns.values() for what in its)
    table = [[what, *(its.get(what, "") for its in columns.values())] for what in names]
    return [["ratio, on a processor of", *columns], *table]


def summary() -> Table:
    return [HEADER, *rows()]


def readme() -> Table:
    elsewhere = [ratios(where) for where in PLACES if where]
    table: list[Row] = [[*HEADER[:-1], "on a slower, a faster processor"]]
    found = list(rows())
    for beginning in README_ROWS:
        for row in found:
            if row[0].startswith(beginning):
                others = [ratio_of.get(without_seeds(row[0]), "") for ratio_of in elsewhere]
                table.append([*row[:-1], ", ".join(filter(None, others))])
    return table


def decoding_table() -> Table:
    engines = {name for _, found in decoding() for name in found}
    names = ["jgpt float32", "CTranslate2 float32", "jgpt bfloat16", "jgpt int8"]
    names += ["CTranslate2 int8", "transformers", "nanoGPT"]
    others = "OpenVINO float32", "OpenVINO int8", "llama.cpp F16", "llama.cpp Q8_0"
    names += [name for name in others if name in engines]
    table = [["tokens/s", *names]]
    for label, found in decoding():
        form, unit = (".2f", " s") if label.endswith(PROMPT) else (",.0f", "")
        cells = [spread(found[name], form) + unit if name in found else "" for name in names]
        table.append([label, *cells])
    return table


def best_table() -> Table:
    table = [["model", "windows", "mean", "standard deviation", "each seed"]]
    for name, size, losses in tested():
        mean, seeds = statistics.mean(losses), ", ".join(f"{loss:.4f}" for loss in losses)
        table.append([name, size, f"{mean:.4f}", deviation_of(losses), seeds])
    return table


def candidates_table() -> Table:
    losses = {name: its["best_loss"][0] for name, its in measured("shakespeare_candidates").items()}
    lines = [[name, f"{losses[name]:.4f}"] for name in sorted(losses, key=losses.__getitem__)]
    return [["change of `shakespeare-best`", "loss on the validation half"], *lines]


def ablation_table() -> Table:
    """The worst change last."""
    figures = measured("ablation")
    loss = {name: statistics.mean(its["validation_loss"]) for name, its in figures.items()}
    step = {name: statistics.mean(its["milliseconds"]) for name, its in figures.items()}
    base = "the preset"
    table = [["one change", "loss", "each seed", "difference", "a step's time, of the preset's"]]
    for name in sorted(loss, key=loss.__getitem__):
        seeds = ", ".join(f"{each:.3f}" for each in figures[name]["validation_loss"])
        difference, time = f"{loss[name] - loss[base]:+.3f}", f"{step[name] / step[base]:.2f}"
        table.append([name, f"{loss[name]:.3f}", seeds, difference, time])
    return table


def breakdown_table() -> Table:
    total = {
        dtype: {kind: sum(its[kind]) for kind in KINDS}
        for dtype, its in measured("step_breakdown").items()
    }
    shares = (
        [kind, *(f"{its[kind] / sum(its.values()):.0%}" for its in total.values())]
        for kind in KINDS
    )
    return [["kind of operation", *total], *shares]


def ahead_table() -> Table:
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


def prepare_table() -> Table:
    table = [["a text with GPT-2's byte-pairs", "seconds", "MB/s", "of tiktoken's", "peak memory"]]
    ways = measured("prepare")
    for name, its in ways.items():
        best, seconds = (median(ways, which, "seconds") for which in ("tiktoken", name))
        size = its["megabytes"][0]
        speed, peak = f"{size / seconds:.1f}", f"{max(its['peak_mib']):.0f} MiB"
        label = f"{name}, {size:.0f} MB"
        cells = [spread(its["seconds"], ".1f"), speed, f"{best / seconds:.2f}", peak]
        table.append([label, *cells])
    return table


def large_text_table() -> Table:
    """Whole commands on a text of hundreds of megabytes."""
    table = [["a large text", "seconds", "to the first step", "besides steps", "peak memory"]]
    for name, figures in measured("large_text").items():
        first_step = ""
        besides_steps = ""
        if "seconds_to_first_step" in figures:
            first_step = f"{spread(figures['seconds_to_first_step'], '.1f')} s"
            besides_steps = f"{statistics.median(figures['share_besides_steps']):.0%}"
        peak = f"{max(figures['peak_mib']):.0f} MiB"
        seconds = spread(figures["seconds"], ".0f")
        table.append([name, seconds, first_step, besides_steps, peak])
    return table


def proofs_table() -> Table:
    verdicts = "proven", "refused", "open"
    found = record("proofs")
    rows = [
        [name, f"`{its['arrays']}`", *(str(its[verdict]) for verdict in verdicts)]
        for name, its in found.items()
    ]
    return [["program", "for any", *(f"cases {verdict}" for verdict in verdicts)], *rows]


def processors_table() -> Table:
    table = [["record", "processor", "GFLOP/s", "GB/s"]]
    for path in sorted(RESULTS.glob("*.json")):
        found = record(path.stem)
        if speed := found.get("figures", {}).get(PROCESSOR):
            figures = (spread(speed[name], ".0f") for name in ("gflops", "gbytes_per_second"))
            name = f"[{path.stem}](results/{path.name})"
            table.append([name, found["processor"], *figures])
    return table


TABLES: dict[str, Callable[[], Table]] = {
    "summary": summary,
    "readme": readme,
    "decoding": decoding_table,
    "best": best_table,
    "candidates": candidates_table,
    "ablation": ablation_table,
    "breakdown": breakdown_table,
    "prepare": prepare_table,
    "large_text": large_text_table,
    "places": places_table,
    "processors": processors_table,
    "proofs": proofs_table,
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
