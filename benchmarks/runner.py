"""Measure variants in turn, each in a process of its own; print medians, write a record.

Engines in one process slow each other down: idle threads of one occupy the cores of another. So
each round starts every variant in a new process, one after the other. Medians over the rounds are
compared, and ranges given. The speed of the processor is measured in every round, too.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    *("jax", "flax", "optax", "jaxtyping", "beartype", "numpy"),
    *("torch", "transformers", "ctranslate2", "tiktoken", "tokenizers"),
    *("openvino-genai", "optimum-intel", "xllamacpp"),
)
PROCESSOR = "the processor"
Figures = dict[str, float]
Measured = dict[str, dict[str, list[float]]]
"""Values per round, by variant and figure."""
Read = Callable[[str, Path], Figures]
"""From what a command printed, and its `{out}`."""


@dataclass(frozen=True)
class Variant:
    """A command, and how to read the figures it prints.

    In an argument, `{seed}` becomes the seed of the round, the same for all variants, and `{out}` a
    new path, deleted at the end.
    """

    name: str
    command: Sequence[str]
    read: Read = lambda printed, out: json.loads(printed.splitlines()[-1])
    """By default a JSON object on the last line."""
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    rounds: int | None = None
    """Only the first rounds; by default all."""
    warm: bool = False
    """Run it once before the first round, to fill a cache; this run doesn't count."""


@dataclass(frozen=True)
class Rounds:
    """Options that every comparison has."""

    rounds: int = 5
    """How often each variant is measured."""
    only: tuple[str, ...] = ()
    """Only variants whose names contain one of these; no record is written."""
    first_seed: int = 1337
    """That of the first round; the next round has the next."""
    results: Path = RESULTS
    """The folder of the record."""


class VariantFailed(subprocess.SubprocessError):
    """A variant's command ended with an error."""


def call(script: str, function: str, /, **arguments: Any) -> list[str]:
    """The command that calls a function of a script of this folder and prints the result."""
    given = json.dumps(arguments, default=str)
    return [sys.executable, str(ROOT / "benchmarks" / "runner.py"), script, function, given]


def jgpt(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "jgpt", *map(str, arguments)]


def compare(
    name: str,
    variants: Sequence[Variant],
    options: Rounds,
    facts: Callable[[Measured], dict[str, Any]] = lambda measured: {},
) -> None:
    """Measure variants in turn; print medians, and write the record NAME after every round.

    `facts` adds settings shared by all variants, and what is computed from the figures. A variant
    that fails is left out from then on, and the process ends with 1.
    """
    if options.only:
        variants = [variant for variant in variants if _is_asked_for(variant, options.only)]
    processor = Variant(PROCESSOR, call("runner", "processor_speed"))
    machine = provenance()
    measured: Measured = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        for index in range(-1, options.rounds):  # the one before the first fills caches
            for variant in (processor, *variants):
                first_round = 0
                if variant.warm:
                    first_round = -1
                rounds = range(first_round, variant.rounds or options.rounds)
                if index not in rounds or variant.name in failed:
                    continue
                try:
                    figures = measure(variant, options.first_seed + index, Path(directory))
                except subprocess.SubprocessError as error:
                    print(error, file=sys.stderr, flush=True)
                    failed.append(variant.name)
                    continue
                if index < 0:
                    continue
                for figure, value in figures.items():
                    measured.setdefault(variant.name, {}).setdefault(figure, []).append(value)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                print(f"round {index + 1}: {variant.name}: {shown}", file=sys.stderr, flush=True)
            # after every round: what was measured in hours isn't lost when this is stopped
            if measured.keys() - {PROCESSOR} and not options.only:
                write(name, {"figures": measured, **facts(measured)}, machine, options.results)
    print("median (least to most)")
    for variant, figures in measured.items():
        shown = ", ".join(f"{figure} {spread(values)}" for figure, values in figures.items())
        print(f"{variant}: {shown}")
    if measured.keys() - {PROCESSOR} and not options.only:
        print(options.results / f"{name}.json")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _is_asked_for(variant: Variant, words: tuple[str, ...]) -> bool:
    return any(word in variant.name for word in words)


def measure(variant: Variant, seed: int, directory: Path) -> Figures:
    """Run a variant in a new process; return the printed figures, seconds and peak memory."""
    out = directory / f"{variant.name.replace('/', ' ')}-{seed}"
    command = []
    for argument in variant.command:
        command.append(argument.replace("{seed}", str(seed)).replace("{out}", str(out)))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as complained:
        began = time.perf_counter()
        # Linux counts the memory of the process that starts it too: this one imports no jax
        process = subprocess.Popen(
            command,
            cwd=variant.cwd,
            env=environment | dict(variant.environment),
            stdout=printed,
            stderr=complained,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        complained.seek(0)
        if process.returncode:
            said = complained.read()[-3000:]
            raise VariantFailed(f"{variant.name} ended with {process.returncode}:\n{said}")
        unit = 1024
        if sys.platform == "darwin":  # bytes there, KiB elsewhere
            unit = 1
        peak = usage.ru_maxrss * unit / 2**20
        return {"seconds": seconds, "peak_mib": peak} | variant.read(printed.read(), out)


def nothing(printed: str, out: Path) -> Figures:
    """No figures besides those of every variant."""
    return {}


def trained_by_jgpt(name: str, *options: object, target: float = 0.0) -> Variant:
    def read(printed: str, out: Path) -> Figures:
        losses = []
        seconds = []
        for text in (out / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            if "validation_loss" in line:
                losses.append((line["step"], line["validation_loss"]))
            if line.get("tokens_per_second"):
                tokens_per_step = line["tokens"] / line["step"]
                seconds.append(tokens_per_step / line["tokens_per_second"])
        figures = losses_of(losses, target)
        if seconds:
            figures["milliseconds"] = 1e3 * statistics.median(seconds)
        return figures

    command = jgpt("train", *options, "--data", "shakespeare", "--sample-tokens", 0)
    return Variant(name, [*command, "--out", "{out}", "--seed", "{seed}"], read)


def losses_of(found: list[tuple[int, float]], target: float) -> Figures:
    """The last loss, the best one, and the share of the steps that it took to reach the target."""
    last_step, last_loss = found[-1]
    best_loss, best_step = min((loss, step) for step, loss in found)
    needed = last_step
    for step, loss in found:
        if loss <= target:
            needed = step
            break
    return {
        "validation_loss": last_loss,
        "best_loss": best_loss,
        "best_step": best_step,
        "share_to_target": needed / max(last_step, 1),
    }


def median(measured: Measured, variant: str, figure: str) -> float:
    return statistics.median(measured[variant][figure])


def spread(values: Sequence[float], form: str = ".4g") -> str:
    """The median and the range."""
    middle = statistics.median(values)
    return f"{middle:{form}} ({min(values):{form}} to {max(values):{form}})"


def draws(action: Callable[[int], object], count: int) -> list[float]:
    """Seconds per call; a first call, which compiles or warms up, is not counted."""
    action(0)
    taken = []
    for index in range(1, count + 1):
        began = time.perf_counter()
        action(index)
        taken.append(time.perf_counter() - began)
    return taken


def provenance() -> dict[str, Any]:
    """The machine, the versions, the command and the commit."""
    device = printed_by(sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)")
    commit = printed_by("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    # absolute paths mean nothing on another machine
    arguments = []
    for argument in sys.argv[1:]:
        if os.path.isabs(argument):
            argument = "PATH"
        arguments.append(argument)
    return {
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *arguments]),
        "commit": commit or None,
        "device": f"{device or 'unknown'}, {os.cpu_count()} cores",
        "processor": processor_name(),
        "python": platform.python_version(),
        "versions": {name: installed.get(name) for name in PACKAGES},
    }


def printed_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return ""


def write(
    name: str,
    results: Mapping[str, Any],
    machine: Mapping[str, Any] | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write a record with the provenance."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**(machine or provenance()), **results}, indent=2) + "\n")
    return path


def processor_speed() -> Figures:
    """A product of matrices of 2,048, and sums of 256 MiB in two threads; the best of five."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    matrix = np.ones((2048, 2048), np.float32)
    numbers = np.ones((2, 1 << 25), np.float32)
    with ThreadPoolExecutor(2) as pool:
        products = draws(lambda _: matrix @ matrix, 5)
        sums = draws(lambda _: list(pool.map(np.sum, numbers)), 5)
    return {
        "gflops": 2e-9 * 2048**3 / min(products),
        "gbytes_per_second": 1e-9 * numbers.nbytes / min(sums),
    }


if __name__ == "__main__":
    script, function, given = sys.argv[1:]
    called = getattr(importlib.import_module(script), function)
    result = called(**json.loads(given))
    print(json.dumps(result))
