"""Comparisons of whole commands and of train steps, each a list of variants.

    JGPT_DATA_DIR=DIR python benchmarks/compare.py step_time --nanogpt PATH

PATH is a checkout of nanoGPT, which step_time, time_to_loss and memory need. The record has the
name of the comparison.

- step_time: one train step beside nanoGPT's, eager and compiled, at its CPU setting (four layers of
  128 features, block 64, batch 12); its batch, forward, backward, clipping and AdamW
- time_to_loss: whole commands on tiny Shakespeare. nanoGPT trains its CPU setting (its README), to
  about 1.886 by its own estimate over 20 batches, and `jgpt train nanogpt-cpu` the same; `jgpt
  train modern-cpu` for a few steps, to an exact loss at least as good, and for as many as end
  before nanoGPT does; `jgpt train` the default preset. None draws a sample. Each round has a seed
- memory: peak memory of nanoGPT's CPU setting in both, of a first run of jgpt, which compiles, and
  of preparing a large text, which is generated in a minute or two
- prepare: whole commands that encode a text, tiny Shakespeare many times, with GPT-2's byte-pairs:
  `jgpt prepare`, tiktoken with as many threads, nanoGPT's prepare.py (tiktoken, the whole text on
  one thread), and tokenizers; the files of the byte-pairs are in $JGPT_DATA_DIR/gpt2-bpe
- startup: `jgpt --help`, and `jgpt train` to its first step, with and without a compilation cache
- scaling: step time against layers, width, block and batch of that setting, one at a time. The
  exponent of time over floating-point operations is 1 where growth is linear
- scan_layers: what a step takes to compile, in seconds of processor time, and to run, with a loop
  and with a scan over the blocks
- ablation: the exact loss of `modern-cpu` and of single changes of it, all with as many steps
  and the same seeds, of which each round has one; the schedule ends with the steps
- narrow_loss: nanoGPT's CPU setting in float32 and in bfloat16. A seed decides parameters and
  batches, so the two runs of a round differ by rounding alone
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from nanogpt import CPU_SETTING, check_out, trained_by_nanogpt
from runner import Measured, Rounds, Variant, compare, jgpt, median, python, trained_by_jgpt
from stepping import variant

from jgpt.presets import preset

SETTING = preset("nanogpt-cpu")
AXES = {
    "num_layers": (2, 4, 8),
    "embed_dim": (64, 128, 256),
    "block_size": (32, 64, 128, 256),
    "batch_size": (6, 12, 24),
}
CHANGES = {
    "the preset": "",
    "learned positions": "--positions learned",
    "layer norm": "--norm layer",
    "norms with a scale": "--norm-scale",
    "no QK-norm, scale by head size": "--no-qk-norm --attention-scale None",
    "scale by head size": "--attention-scale None",
    "GELU": "--activation gelu",
    "no zero initialisation": "--no-zero-init",
    "no embedding shortcut": "--no-embedding-shortcut",
    "no logit softcap": "--logit-softcap None",
    "tied head": "--tie-embeddings",
    "one head of keys and values": "--num-kv-heads 1",
    "window of 128": "--attention-window 128",
    "no window": "--attention-window None",
    "no n-grams": "--ngram-sizes",
    "no dropout of n-grams": "--ngram-dropout 0",
    "dropout of n-grams 0.35": "--ngram-dropout 0.35",
    "AdamW for matrices too (0.008)": "--optimizer adamw",
    "head learns at 0.004": "--learning-rate 0.004",
    "cosine": "--schedule cosine",
    "constant learning rate": "--schedule constant",
    "embeddings learn at 0.008": "--embedding-learning-rate None",
    "no decay": "--weight-decay 0 --muon-weight-decay 0",
    "beta 0.9 and 0.99": "--beta1 0.9 --beta2 0.99",
    "gradients clipped at 1": "--gradient-clip 1",
}
"""What ablation compares, as options of `jgpt train`."""
Name = Literal[
    "step_time",
    "time_to_loss",
    "memory",
    "prepare",
    "startup",
    "scaling",
    "scan_layers",
    "ablation",
    "narrow_loss",
]


@dataclass(frozen=True)
class Options(Rounds):
    comparison: Annotated[Name, tyro.conf.Positional] = "step_time"
    nanogpt: Path = Path("nanoGPT")
    """A checkout of nanoGPT."""
    short_steps: int = 45
    """Steps to reach the loss in, for time_to_loss."""
    steps: int = 1000
    """Steps that end before nanoGPT, for time_to_loss; steps of ablation and narrow_loss."""
    gigabytes: float = 1.0
    """The size of the text to prepare, for memory."""
    megabytes: int = 200
    """The size of the text, for prepare."""
    first_step: Path | None = None
    """Only train into this directory until the first step, and print the seconds."""


def changed(**fields: Any) -> Any:
    """nanoGPT's CPU setting with changes of the model or of the run."""
    run = {name: fields.pop(name) for name in ("batch_size", "steps_per_call") if name in fields}
    return replace(SETTING, model=replace(SETTING.model, **fields), **run)


def step_time(options: Options, folder: Path) -> list[Variant]:
    theirs = "--nanogpt", options.nanogpt
    return [
        variant("nanoGPT eager", SETTING, *theirs),
        variant("nanoGPT compiled", SETTING, *theirs, "--compile"),
        variant("jgpt float32", SETTING),
        variant("jgpt bfloat16", changed(dtype="bfloat16")),
    ]


def time_to_loss(options: Options, folder: Path) -> list[Variant]:
    return [
        trained_by_nanogpt("nanoGPT", check_out(options.nanogpt, folder), *CPU_SETTING),
        trained_by_jgpt("jgpt nanogpt-cpu", "nanogpt-cpu"),
        trained_by_jgpt("to the loss", "modern-cpu", "--steps", options.short_steps),
        trained_by_jgpt("to nanoGPT's end", "modern-cpu", "--steps", options.steps),
        trained_by_jgpt("the default preset"),
    ]


def memory(options: Options, folder: Path) -> list[Variant]:
    theirs = *CPU_SETTING, "--max_iters=200"
    ours = jgpt("train", "nanogpt-cpu", "--data", "shakespeare", "--steps", 200, "--out", "{out}")
    cache = {"XDG_CACHE_HOME": f"{folder}/programs"}  # jgpt's own cache, as its users have it
    text = folder / "text.txt"
    write_text(text, round(options.gigabytes * 1e9))
    prepare = jgpt("prepare", text, "--out", "{out}")
    return [
        trained_by_nanogpt("nanoGPT", check_out(options.nanogpt, folder), *theirs),
        Variant("jgpt, first run", ours, nothing, {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
        Variant("jgpt", ours, nothing, cache, warm=True),
        Variant("jgpt prepare", prepare, nothing, rounds=1),
    ]


def prepare(options: Options, folder: Path) -> list[Variant]:
    data = Path(os.environ["JGPT_DATA_DIR"])
    words = (data / "tinyshakespeare.txt").read_bytes()
    text, files = folder / "text.txt", data / "gpt2-bpe"
    text.write_bytes(words * -(-options.megabytes * 10**6 // len(words)))
    ours = jgpt("prepare", text, "--tokenizer", "gpt2", "--tokenizer-files", files)

    def theirs(name: str, way: str, **rest: Any) -> Variant:
        where = "--text", text, "--files", files, "--out", "{out}"
        return Variant(name, python("encoding.py", "--way", way, *where), speed, **rest)

    def speed(printed: str, out: Path) -> dict[str, float]:
        tokens = out / "tokens.bin" if out.is_dir() else out
        return {"megabytes": text.stat().st_size / 1e6, "tokens": tokens.stat().st_size / 2}

    return [
        theirs("tiktoken", "tiktoken"),
        theirs("nanoGPT's prepare.py", "nanogpt"),
        theirs("tokenizers", "tokenizers", rounds=1),
        Variant("jgpt prepare", [*ours, "--out", "{out}"], speed),
    ]


def nothing(printed: str, out: Path) -> dict[str, float]:
    """No figures besides those of every variant."""
    return {}


def write_text(path: Path, size: int) -> None:
    """Lines of random words out of a vocabulary of some thousands."""
    generator = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(generator.choices(letters, k=generator.randint(1, 9))) for _ in range(5000)]
    lines = [" ".join(generator.choices(words, k=12)) + "\n" for _ in range(20_000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            generator.shuffle(lines)
            file.write("".join(lines))


def startup(options: Options, folder: Path) -> list[Variant]:
    train = python("compare.py", "startup", "--first-step", "{out}")
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # jgpt's own is below XDG_CACHE_HOME
    first, later = {"JAX_ENABLE_COMPILATION_CACHE": "false"}, {"XDG_CACHE_HOME": str(folder)}
    return [
        Variant("jgpt --help", jgpt("--help"), nothing, warm=True),
        Variant("jgpt train, the first run", train, environment=first),
        Variant("jgpt train, a later run", train, environment=later, warm=True),
    ]


def seconds_to_first_step(out: Path) -> float:
    """From the start of the process to the first line of metrics; then stop the process."""
    # one step per call, so that the first is reported at once
    command = jgpt("train", "nanogpt-cpu", "--out", out, "--steps-per-call", 1)
    metrics = out / "metrics.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                sys.exit(f"{command} ended with {process.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - began
    finally:
        process.terminate()  # saving takes a while
        process.wait()


def scaling(options: Options, folder: Path) -> list[Variant]:
    return [
        variant(f"{axis} {size}", changed(**{axis: size}), "--steps", 10)
        for axis, sizes in AXES.items()
        for size in sizes
    ]


def exponents(measured: Measured, options: Options) -> dict[str, Any]:
    """The slope of log time over log FLOPs, for each axis."""
    from jgpt.nn.models import flops_per_token

    found: dict[str, Any] = {"exponents": {}, "flops": {}}
    for axis, sizes in AXES.items():
        configs = {f"{axis} {size}": changed(**{axis: size}) for size in sizes}
        work = {
            name: 3 * flops_per_token(it.model) * it.batch_size * it.model.block_size
            for name, it in configs.items()
            if name in measured
        }
        times = [median(measured, name, "milliseconds") for name in work]
        if len(times) > 1:
            slope = np.polyfit(np.log(list(work.values())), np.log(times), 1)[0]
            found["exponents"][axis] = float(slope)
        found["flops"] |= work
    return found


def scan_layers(options: Options, folder: Path) -> list[Variant]:
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return [
        variant(
            f"{name}, {layers} layers",
            changed(num_layers=layers, scan_layers=scan, steps_per_call=4),
            *("--steps", 4),
        )
        for layers in (4, 12, 36)
        for name, scan in (("loop", False), ("scan", True))
    ]


def ablation(options: Options, folder: Path) -> list[Variant]:
    its = "modern-cpu", *evaluated_once(options)
    return [trained_by_jgpt(name, *its, *change.split()) for name, change in CHANGES.items()]


def narrow_loss(options: Options, folder: Path) -> list[Variant]:
    its = "nanogpt-cpu", *evaluated_once(options)
    return [trained_by_jgpt(dtype, *its, "--dtype", dtype) for dtype in ("float32", "bfloat16")]


def evaluated_once(options: Options) -> tuple[object, ...]:
    return "--steps", options.steps, "--eval-interval", options.steps


def differences(measured: Measured, options: Options) -> dict[str, Any]:
    """bfloat16's losses minus float32's of the same seeds, and how far apart seeds are."""
    wide, narrow = (measured.get(it, {}).get("validation_loss") for it in ("float32", "bfloat16"))
    if not wide or not narrow:
        return {}
    apart = [after - before for before, after in zip(wide, narrow, strict=False)]
    return {
        "deviation_over_seeds": statistics.stdev(wide) if len(wide) > 1 else 0.0,
        "mean_difference": statistics.mean(apart),
        "largest_difference": max(map(abs, apart)),
    }


COMPARISONS: dict[Name, Callable[[Options, Path], list[Variant]]] = {
    "step_time": step_time,
    "time_to_loss": time_to_loss,
    "memory": memory,
    "prepare": prepare,
    "startup": startup,
    "scaling": scaling,
    "scan_layers": scan_layers,
    "ablation": ablation,
    "narrow_loss": narrow_loss,
}
FACTS: dict[str, Callable[[Measured, Options], dict[str, Any]]] = {
    "scaling": exponents,
    "ablation": lambda measured, options: {"steps": options.steps},
    "narrow_loss": differences,
}


def main(options: Options) -> None:
    if options.first_step:
        print(json.dumps({"seconds": seconds_to_first_step(options.first_step)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        variants = COMPARISONS[options.comparison](options, Path(folder))
        facts = FACTS.get(options.comparison, lambda measured, options: {})
        compare(options.comparison, variants, options, lambda measured: facts(measured, options))


if __name__ == "__main__":
    main(tyro.cli(Options))
