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

from jgpt.presets import DEFAULT_PRESET, PRESETS
from jgpt.words import format_bytes

PAGES = [
    *(ROOT / "docs" / f"{page}.md" for page in ("benchmarks", "look", "train")),
    *(
        ROOT / "benchmarks" / f"{page}.md"
        for page in ("ablation", "details", "processors", "proofs")
    ),
    ROOT / "README.md",
]
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER = "what", "theirs", "jgpt", "ratio", "target"
SAME_SETTING = (
    "train step, nanoGPT's CPU setting, float32",
    "whole command, nanoGPT's CPU setting in both",
    "peak memory of training, nanoGPT's CPU setting",
)
"""How the rows begin that compare like for like: the same model in the same setting."""
OTHER_SETTING = (
    "train step, nanoGPT's CPU setting, bfloat16",
    "whole command to nanoGPT's loss",
    "loss when nanoGPT's command ends",
    "whole command, the default preset to its end",
)
"""How the rows begin in which jgpt has another dtype or another model."""
SAMPLED = ("tokens/s sampled in float32",)
README_ROWS = {
    "whole command, nanoGPT's CPU setting in both": "time_to_loss",
    "whole command to nanoGPT's loss": "time_to_loss",
    "tokens/s sampled in float32, 10.7M, batch 16, beside CTranslate2": "sampling",
}
"""How the rows of the README begin, in its order, and the record of each."""
NUMBERS = "no", "one", "two", "three", "four", "five"
PROMPT = "a prompt of 1,000 tokens"
FIGURES = {"batch 1": "batch 1", "batch 16": "batch 16", "prompt_seconds": PROMPT}
"""Of decoding, and what they are called."""
BETTER_OF_TWO = (
    "CTranslate2 float32",
    "CTranslate2 int8",
    "OpenVINO float32",
    "OpenVINO int8",
)
"""Engines that are measured in two ways."""
PLACES = "_slowest_epyc", "", "_faster_epyc"
"""How the records of each processor's comparisons end."""
ENGINES = (
    "jgpt float32",
    "CTranslate2 float32",
    "jgpt bfloat16",
    "jgpt int8",
    "CTranslate2 int8",
    "transformers",
    "nanoGPT",
)
OPTIONAL_ENGINES = ("OpenVINO float32", "OpenVINO int8", "llama.cpp F16", "llama.cpp Q8_0")
"""They have a column where they were measured."""
AXES = {"num_layers": "layers", "embed_dim": "width", "block_size": "block"}
"""What `scaling` calls them."""
TEST_LOSS = "test_loss_in_windows_of_"
LOSSES = ROOT / "benchmarks" / "details.md"
"""The page whose table has the lowest and the highest loss of each preset, and their commit."""
LOSS = re.compile(r"^\| `([a-z-]+)`[^|]*\| (\d\.\d+) \| (\d\.\d+)", re.MULTILINE)
"""A row of that table: the preset, the lowest and the highest loss."""
TIMED = {"nanogpt-cpu": "jgpt nanogpt-cpu", "modern": "the default preset"}
"""The presets whose whole command is a variant of `time_to_loss`, and what it is called there."""
ON_A_CPU = (
    "bigram",
    "tiny",
    "lecture",
    "nanogpt-cpu",
    "modern",
    "modern-cpu",
    "shakespeare-best",
)
"""The presets that two CPU cores train, in the order of their table; the last takes longest."""
WEIGHTS_OF = {32: "float32", 16: "float16", 8: "int8"}
"""The weights of a page, by their bits."""
Row = Sequence[str]
Table = Sequence[Row]


def record(name: str) -> dict[str, Any]:
    """What was measured; an empty record if it wasn't."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text())


def measured(name: str) -> Measured:
    """The values per round, without those of the processor."""
    figures = dict(record(name).get("figures", {}))
    figures.pop(PROCESSOR, None)
    return figures


def figure_of(measured: Measured, figure: str) -> dict[str, list[float]]:
    """One figure of all variants."""
    return {variant: figures[figure] for variant, figures in measured.items()}


def goal(value: float, target: float, unit: str = "", *, more: bool = False) -> str:
    """The cell of a target, which says whether it was missed."""
    missed = value > target
    if more:
        missed = value < target
    cell = f"{target:g}{unit}"
    if missed:
        cell += " (missed)"
    return cell


def beside(
    theirs: list[float], ours: list[float], form: str, target: float, *, more: bool = False
) -> tuple[str, str, str, str]:
    """The cells of both, of their ratio and of its target."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    return (
        spread(theirs, form),
        spread(ours, form),
        f"{ratio:.2f}",
        goal(ratio, target, more=more),
    )


def mean_of(losses: list[float], digits: int = 4) -> str:
    mean = f"{statistics.mean(losses):.{digits}f}"
    deviation = deviation_of(losses, digits)
    if not deviation:
        return mean
    return f"{mean} (sd {deviation})"


def deviation_of(losses: list[float], digits: int = 4) -> str:
    """The standard deviation; one loss has none."""
    if len(losses) < 2:
        return ""
    return f"{statistics.stdev(losses):.{digits}f}"


def seeds_of(losses: list[float]) -> str:
    count = len(losses)
    number = str(count)
    if count < len(NUMBERS):
        number = NUMBERS[count]
    if count == 1:
        return f"{number} seed"
    return f"{number} seeds"


def step_rows(where: str = "") -> Iterator[Row]:
    figures = measured(f"step_time{where}")
    if not figures:
        return
    times = figure_of(figures, "milliseconds")
    # nanoGPT is measured eager and compiled: the faster of the two counts
    nanogpt = [name for name in times if name.startswith("nanoGPT")]
    fastest = min(nanogpt, key=lambda name: statistics.median(times[name]))
    kind = fastest.removeprefix("nanoGPT ")
    for dtype, target in (("float32", 0.9), ("bfloat16", 0.65)):
        theirs, ours, *ratio = beside(times[fastest], times[f"jgpt {dtype}"], ".1f", target)
        what = f"train step, nanoGPT's CPU setting, {dtype}"
        yield what, f"{theirs} ms, {kind}", f"{ours} ms", *ratio


def command_rows(where: str = "") -> Iterator[Row]:
    runs = measured(f"time_to_loss{where}")
    if not runs:
        return
    seconds = figure_of(runs, "seconds")
    losses = figure_of(runs, "validation_loss")
    seeds = seeds_of(losses["nanoGPT"])
    their_seconds = f"{spread(seconds['nanoGPT'], '.0f')} s"

    def row(what: str, name: str, reached: str, target: float, form: str = ".0f") -> Row:
        _, ours, *ratio = beside(seconds["nanoGPT"], seconds[name], form, target)
        return what, their_seconds, f"{ours} s, to {reached}", *ratio

    # the worst of ours beside the best of theirs, so that no seed decides
    worst = f"{max(losses['to the loss']):.3f} at worst"
    best = f"{min(losses['nanoGPT']):.3f} at best"
    what, theirs, *rest = row("whole command to nanoGPT's loss", "to the loss", worst, 0.083, ".1f")
    yield what, f"{theirs}, to {best}", *rest

    estimates = ", ".join(f"{loss:.3f}" for loss in losses["nanoGPT"])
    reached = losses["to nanoGPT's end"]
    ended = statistics.median(seconds["to nanoGPT's end"])
    ours = f"{mean_of(reached, 3)} after {ended:.0f} s"
    target = goal(statistics.mean(reached), 1.48)
    what = f"loss when nanoGPT's command ends, {seeds}"
    yield what, f"{estimates} (its estimate)", ours, "", target

    what = f"whole command, the default preset to its end, {seeds}"
    yield row(what, "the default preset", mean_of(losses["the default preset"], 3), 1.3)

    what = "whole command, nanoGPT's CPU setting in both"
    name = "jgpt nanogpt-cpu"
    *cells, _ = row(what, name, spread(losses[name], ".3f"), 1)
    yield *cells, ""


def decoding(where: str = "") -> Iterator[tuple[str, dict[str, list[float]]]]:
    """For each model and batch size, or prompt: the label, and the values by engine.

    CTranslate2 counts with one thread or two, and OpenVINO with either cache, whichever is faster.
    """
    variants = measured(f"sampling{where}")
    for model in ("10.7M", "124M"):
        for figure, label in FIGURES.items():
            found = {}
            for name, figures in variants.items():
                if name.startswith(f"{model} ") and figure in figures:
                    found[name.removeprefix(f"{model} ")] = figures[figure]
            for engine in BETTER_OF_TWO:
                both = [found[name] for name in found if name.startswith(engine)]
                if both:
                    # of a prompt these are seconds, of a batch tokens a second
                    fastest = min if label == PROMPT else max
                    found[engine] = fastest(both, key=statistics.median)
            if found:
                yield f"{model}, {label}", found


def sampling_rows(where: str = "") -> Iterator[Row]:
    for label, found in decoding(where):
        if label.endswith(PROMPT):
            continue
        what = f"tokens/s sampled in float32, {label}, beside CTranslate2"
        theirs = found["CTranslate2 float32"]
        yield what, *beside(theirs, found["jgpt float32"], ",.0f", 1, more=True)


def tested() -> Iterator[tuple[str, str, list[float]]]:
    """For each model and length of a window: both, and the losses of the seeds."""
    for name, figures in measured("shakespeare_best").items():
        for figure, losses in figures.items():
            if figure.startswith(TEST_LOSS):
                yield name, figure.removeprefix(TEST_LOSS), losses


def best_rows() -> Iterator[Row]:
    """One row per window length; theirs are the nanoGPT settings measured at that length."""
    for name, size, losses in tested():
        if not name.startswith("shakespeare-best"):
            continue
        theirs = []
        for other, length, their_losses in tested():
            if "nanogpt" in other and length == size:
                theirs.append(f"{mean_of(their_losses)} ({other})")
        changes = name.removeprefix("shakespeare-best")
        what = f"`shakespeare-best`{changes}, test loss in windows of {size}, {seeds_of(losses)}"
        yield what, "; ".join(theirs), mean_of(losses), "", ""


def own_rows() -> Iterator[Row]:
    """Startup, memory, scaling, rounding, and the cost of shape checks."""
    yield from startup_rows()
    yield from memory_rows()
    yield from scaling_rows()
    yield from narrow_rows()
    yield from contract_rows()


def startup_rows() -> Iterator[Row]:
    started = measured("startup")
    if not started:
        return
    seconds = median(started, "jgpt --help", "seconds")
    yield "`jgpt --help`", "", f"{seconds:.2f} s", "", "0.3 s"

    later = median(started, "jgpt train, a later run", "seconds")
    first = median(started, "jgpt train, the first run", "seconds")
    what = "`jgpt train` to its first step, a later run"
    yield what, "", f"{later:.1f} s (the first run {first:.1f})", "", goal(later, 4, " s")

    if "jgpt sample, a later run" in started:
        seconds = median(started, "jgpt sample, a later run", "seconds")
        what = "`jgpt sample` of a small run to its first tokens, later"
        yield what, "", f"{seconds:.1f} s", "", goal(seconds, 2, " s")


def memory_rows() -> Iterator[Row]:
    figures = measured("memory")
    if not figures:
        return
    theirs = median(figures, "nanoGPT", "peak_mib")
    ours = median(figures, "jgpt", "peak_mib")
    ratio = ours / theirs
    what = "peak memory of training, nanoGPT's CPU setting"
    yield what, f"{theirs:.0f} MiB", f"{ours:.0f} MiB", f"{ratio:.2f}", goal(ratio, 1.2)

    prepare = median(figures, "jgpt prepare", "peak_mib")
    yield "peak memory of preparing 1 GB of text", "", f"{prepare:.0f} MiB", "", "500 MB"


def scaling_rows() -> Iterator[Row]:
    exponents = record("scaling").get("exponents", {})
    if not exponents:
        return
    grows = []
    for axis, power in exponents.items():
        grows.append(f"{power:.2f} ({AXES.get(axis, 'batch')})")
    yield "step time grows with FLOPs to the power of", "", ", ".join(grows), "", "1"


def narrow_rows() -> Iterator[Row]:
    narrow = record("narrow_loss")
    if not narrow:
        return
    seeds = seeds_of(measured("narrow_loss")["float32"]["validation_loss"])
    what = f"bfloat16 minus float32, loss after 1,000 steps, {seeds}"
    apart = f"{narrow['mean_difference']:.4f}, at most {narrow['largest_difference']:.4f} apart"
    noise = f"(seeds: sd {narrow['deviation_over_seeds']:.4f})"
    yield what, "", f"{apart} {noise}", "", "within noise"


def contract_rows() -> Iterator[Row]:
    checks = record("contract_overhead")
    if not checks:
        return
    # the preset with the most is named apart from the others: the target is for it
    added = {preset: milliseconds / 1e3 for preset, milliseconds in checks["added"].items()}
    slowest = max(added, key=added.__getitem__)
    most = added.pop(slowest)
    # noise can make the smallest one negative, and -0.00 is no number to print
    least = round(min(added.values()), 2) + 0.0
    others = f"{least:.2f} to {max(added.values()):.2f} s"
    what = "shape checks: what they add to a preset's compilation"
    yield what, "", f"{others}; {slowest} {most:.2f} s", "", goal(most, 0.15, " s")

    eager = checks["ratio"]["eager forward"]
    what = "shape checks: an eager forward pass, beside without"
    yield what, "", "", f"{eager:.2f}", goal(eager, 1.1)


def rows() -> list[Row]:
    return [*step_rows(), *command_rows(), *best_rows(), *sampling_rows(), *own_rows()]


def ratios(where: str) -> dict[str, str]:
    """The ratio of each row, as measured on one of the processors."""
    found = {}
    for what, *_, ratio, _ in (*step_rows(where), *command_rows(where), *sampling_rows(where)):
        if ratio:
            found[without_seeds(what)] = ratio
    return found


def without_seeds(what: str) -> str:
    return re.sub(r", \w+ seeds?$", "", what)


def processor_speed(where: str) -> str:
    """How fast the processor multiplied matrices when a step was timed there."""
    speeds = record(f"step_time{where}").get("figures", {}).get(PROCESSOR)
    if not speeds:
        return "not measured"
    return f"{statistics.median(speeds['gflops']):.0f} GFLOP/s"


def compared(beginnings: Sequence[str]) -> Table:
    """The rows that begin so, with their ratio on each of the three processors."""
    slower, _, faster = PLACES
    header = ["what", "theirs", "jgpt", f"ratio, {processor_speed('')}"]
    header += [f"slower, {processor_speed(slower)}", f"faster, {processor_speed(faster)}"]
    table = [header]
    slower_ratios = ratios(slower)
    faster_ratios = ratios(faster)
    for beginning in beginnings:
        for what, theirs, ours, ratio, _ in rows():
            if what.startswith(beginning):
                name = without_seeds(what)
                elsewhere = [slower_ratios.get(name, ""), faster_ratios.get(name, "")]
                table.append([what, theirs, ours, ratio, *elsewhere])
    return table


def same_setting() -> Table:
    return compared(SAME_SETTING)


def other_setting() -> Table:
    return compared(OTHER_SETTING)


def sampled() -> Table:
    return compared(SAMPLED)


def costs() -> Table:
    """What jgpt takes where there is nothing to compare it with."""
    table = [["what", "jgpt"]]
    for what, theirs, ours, ratio, _ in own_rows():
        if not theirs:
            table.append([what, ours or f"{ratio} times"])
    return table


def summary() -> Table:
    return [HEADER, *rows()]


def readme() -> Table:
    elsewhere = [ratios(where) for where in PLACES if where]
    table: list[Row] = [[*HEADER[:-1], "ratio on a slower and on a faster processor"]]
    found = rows()
    for beginning, source in README_ROWS.items():
        for row in found:
            if row[0].startswith(beginning):
                others = [ratio_of.get(without_seeds(row[0]), "") for ratio_of in elsewhere]
                what = f"[{row[0]}](benchmarks/results/{source}.json)"
                table.append([what, *row[1:-1], ", ".join(filter(None, others))])
    return table


def decoding_table() -> Table:
    """An engine that was not measured has no column where it is optional, and else empty cells."""
    found = list(decoding())
    measured_engines = {engine for _, values in found for engine in values}
    engines: list[str] = list(ENGINES)
    for engine in OPTIONAL_ENGINES:
        if engine in measured_engines:
            engines.append(engine)
    table = [["tokens/s", *engines]]
    for label, values in found:
        is_prompt = label.endswith(PROMPT)
        row = [label]
        for engine in engines:
            if engine not in values:
                row.append("")
            elif is_prompt:
                row.append(f"{spread(values[engine], '.2f')} s")
            else:
                row.append(spread(values[engine], ",.0f"))
        table.append(row)
    return table


def best_table() -> Table:
    table = [["model", "windows", "mean", "standard deviation", "each seed"]]
    for name, size, losses in tested():
        mean = f"{statistics.mean(losses):.4f}"
        seeds = ", ".join(f"{loss:.4f}" for loss in losses)
        table.append([name, size, mean, deviation_of(losses), seeds])
    return table


def candidates_table() -> Table:
    # one seed chose: a candidate has one loss
    losses = {}
    for name, (loss,) in figure_of(measured("shakespeare_candidates"), "best_loss").items():
        losses[name] = loss
    table = [["change of `shakespeare-best`", "loss on the validation half"]]
    for name in sorted(losses, key=losses.__getitem__):
        table.append([name, f"{losses[name]:.4f}"])
    return table


def ablation_table() -> Table:
    """The worst change last."""
    figures = measured("ablation")
    base = "the preset"
    loss = {}
    step = {}
    for name, values in figures.items():
        loss[name] = statistics.mean(values["validation_loss"])
        step[name] = statistics.mean(values["milliseconds"])
    table = [["one change", "loss", "each seed", "difference", "a step's time, of the preset's"]]
    for name in sorted(loss, key=loss.__getitem__):
        seeds = ", ".join(f"{seed:.3f}" for seed in figures[name]["validation_loss"])
        difference = f"{loss[name] - loss[base]:+.3f}"
        time = f"{step[name] / step[base]:.2f}"
        table.append([name, f"{loss[name]:.3f}", seeds, difference, time])
    return table


def breakdown_table() -> Table:
    """Shares: the times are summed over threads, so they are no times of a step."""
    columns: dict[str, dict[str, float]] = {}
    for dtype, figures in measured("step_breakdown").items():
        columns[dtype] = {kind: sum(figures[kind]) for kind in KINDS}
    table = [["kind of operation", *columns]]
    for kind in KINDS:
        row = [kind]
        for spent in columns.values():
            row.append(f"{spent[kind] / sum(spent.values()):.0%}")
        table.append(row)
    return table


def size_of(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"


def ahead_table() -> Table:
    """The best mesh is the one with the least time, and of equals the one that sends less."""
    header = ["preset", "chips", "sequences", "mesh", "memory of a chip"]
    header += ["a chip sends", "bound by", "at least"]
    groups: dict[tuple[str, str], list[tuple[float, int, list[str]]]] = {}
    for step in record("ahead")["steps"]:
        sent = sum(kind["sent"] for kind in step["collectives"])
        memory = size_of(step["memory"]["state"] + step["memory"]["working"])
        if not step["fits"]:
            memory += ", too much"
        resource = max(("compute", "memory"), key=lambda name: step[f"{name}_seconds"])
        least = round(1e3 * step[f"{resource}_seconds"], 1)
        cells = [
            step["preset"],
            step["on"],
            f"{step['batch_size']:,}",
            f"`{step['mesh']}`",
            memory,
            size_of(sent),
            resource,
            f"{least} ms",
        ]
        group = groups.setdefault((step["preset"], step["on"]), [])
        group.append((least, sent, cells))
    table = [header]
    for steps in groups.values():
        _, _, best = min(steps)
        best[header.index("mesh")] += " (best)"
        for _, _, cells in steps:
            table.append(cells)
    return table


def prepare_table() -> Table:
    table = [["program, text size", "seconds", "MB/s", "speed / tiktoken", "peak memory"]]
    ways = measured("prepare")
    for name, figures in ways.items():
        seconds = median(ways, name, "seconds")
        ratio = median(ways, "tiktoken", "seconds") / seconds
        size = figures["megabytes"][0]
        what = f"{name}, {size:.0f} MB"
        taken = spread(figures["seconds"], ".1f")
        speed = f"{size / seconds:.1f}"
        peak = f"{max(figures['peak_mib']):.0f} MiB"
        table.append([what, taken, speed, f"{ratio:.2f}", peak])
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
    verdicts = ("proven", "rejected", "open")
    header = ["program", "for any"]
    for verdict in verdicts:
        header.append(f"cases {verdict}")
    table = [header]
    for name, found in record("proofs").get("programs", {}).items():
        row = [name, f"`{found['arrays']}`"]
        for verdict in verdicts:
            row.append(str(found[verdict]))
        table.append(row)
    return table


def recorded_losses() -> dict[str, str]:
    """The range of each preset's loss over five seeds."""
    return {name: f"{low} to {high}" for name, low, high in LOSS.findall(LOSSES.read_text())}


def whole_seconds(seconds: list[float]) -> str:
    """The least and the most, or one number if they are the same."""
    least = f"{min(seconds):.0f}"
    most = f"{max(seconds):.0f}"
    if least == most:
        return f"{most} s"
    return f"{least} to {most} s"


def presets_table() -> Table:
    """The presets that train on a CPU."""
    losses = recorded_losses()
    compared = figure_of(measured("time_to_loss"), "seconds")
    seconds = {name: compared[variant] for name, variant in TIMED.items()}
    seconds |= figure_of(measured("preset_times"), "seconds")
    table = [["preset", "parameters", "steps", "loss", "time", "training memory", "what it is"]]
    sizes = record("presets").get("presets", {})
    for name in ON_A_CPU:
        if name not in sizes:
            continue
        time = "not measured"
        if name in seconds:
            time = whole_seconds(seconds[name])
        shown = f"`{name}`"
        if name == DEFAULT_PRESET:
            shown += ", the default"
        memory = format_bytes(sizes[name]["training_bytes"])
        cells = [shown, f"{sizes[name]['parameters']:,}", f"{sizes[name]['steps']:,}"]
        cells += [losses.get(name, "see below"), time, memory, PRESETS[name][0]]
        table.append(cells)
    return table


def large_presets_table() -> Table:
    """The presets for accelerators."""
    table = [["preset", "parameters", "steps", "what it is"]]
    for name, sizes in record("presets").get("presets", {}).items():
        if name in ON_A_CPU:
            continue
        steps = f"{sizes['steps']:,} x {sizes['tokens_per_step']:,} tokens"
        cells = [f"`{name}`", f"{sizes['parameters']:,}", steps, PRESETS[name][0]]
        table.append(cells)
    return table


def pages_table() -> Table:
    """The pages of `jgpt look`, then the presets that are too large for one, with the reason."""
    header = ["preset", "page", "weights", "opens in", "a keystroke", "Write on"]
    table = [[*header, "difference", "to the model's own weights"]]
    for name, figures in measured("pages").items():
        opened = [1e-3 * value for value in figures["open_milliseconds"]]
        typed = [1e-3 * value for value in figures["keystroke_milliseconds"]]
        written = ""
        if "tokens_per_second" in figures:
            written = f"{statistics.median(figures['tokens_per_second']):,.0f} tokens/s"
        table.append(
            [
                f"`{name}`",
                f"{figures['bytes'][0] / 1e6:.1f} MB",
                WEIGHTS_OF[figures["bits"][0]],
                f"{statistics.median(opened):.1f} s",
                f"{statistics.median(typed):.2f} s",
                written,
                f"{max(figures['difference']):.0e}",
                f"{max(figures['difference_to_own_weights']):.0e}",
            ]
        )
    for name, reason in record("pages").get("refused", {}).items():
        parameters, _, _ = reason.partition(" are too many")
        table.append([f"`{name}`", f"none: {parameters}", *[""] * 6])
    return table


def processors_table() -> Table:
    table = [["record", "processor", "GFLOP/s", "GB/s"]]
    for path in sorted(RESULTS.glob("*.json")):
        found = record(path.stem)
        speed = found.get("figures", {}).get(PROCESSOR)
        if not speed:
            continue  # from before it was measured, or not a comparison
        name = f"[{path.stem}](results/{path.name})"
        products = spread(speed["gflops"], ".0f")
        sums = spread(speed["gbytes_per_second"], ".0f")
        table.append([name, found["processor"], products, sums])
    return table


TABLES: dict[str, Callable[[], Table]] = {
    "summary": summary,
    "same_setting": same_setting,
    "other_setting": other_setting,
    "sampled": sampled,
    "costs": costs,
    "readme": readme,
    "decoding": decoding_table,
    "best": best_table,
    "candidates": candidates_table,
    "ablation": ablation_table,
    "breakdown": breakdown_table,
    "prepare": prepare_table,
    "large_text": large_text_table,
    "pages": pages_table,
    "processors": processors_table,
    "proofs": proofs_table,
    "ahead": ahead_table,
    "presets": presets_table,
    "large_presets": large_presets_table,
}


def written(page: str) -> str:
    """A page with its tables as the records have them."""

    def fill(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        header, *cells = TABLES[name]()
        if not cells:  # nothing was measured: no header alone
            return begin + end
        text = line_of(header)
        text += "|---" * len(header) + "|\n"
        for row in cells:
            text += line_of(row)
        return begin + text + end

    return BLOCK.sub(fill, page)


def line_of(row: Row) -> str:
    line = ""
    for cell in row:
        line += "| "
        if cell:
            line += f"{cell} "
    return f"{line}|\n"


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
