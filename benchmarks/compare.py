"""Comparisons of whole commands and of train steps: each is a list of variants.

    JGPT_DATA_DIR=DIR python benchmarks/compare.py step_time --nanogpt PATH

PATH is a checkout of nanoGPT. The record has the name of the comparison; `--help` lists them all.
"""

import json
import math
import os
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sampling as engines
import tyro
from nanogpt import CPU_SETTING, check_out, require, trained_by_nanogpt
from runner import (
    Figures,
    Measured,
    Read,
    Rounds,
    Variant,
    call,
    compare,
    jgpt,
    median,
    nothing,
    trained_by_jgpt,
)
from stepping import variant
from tables import ON_A_CPU
from texts import write_code

from jgpt.data.sources import shakespeare_file
from jgpt.fields import to_json
from jgpt.presets import PRESETS, preset

SETTING = preset("nanogpt-cpu")
DTYPES = ("float32", "bfloat16")
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
"""What `ablation` compares, as options of `jgpt train`."""
CANDIDATES = {
    "the preset": "",
    "no dropout": "--dropout 0",
    "weight decay 0.1": "--weight-decay 0.1",
    "rates times 0.7": "--muon-learning-rate 0.0084 --learning-rate 0.0056",
    "average 0.998": "--ema-decay 0.998",
    "3,500 steps": "--steps 3500",
    "dropout 0.1": "--dropout 0.1",
}
"""The same of `shakespeare_candidates`."""
SHORT = "--ngram-dropout 0 --muon-learning-rate 0.03 --learning-rate 0.012"
"""For `modern-cpu` with a few steps: it learns faster, and without dropout."""
AVERAGED = "--ema-decay 0.995"
"""For `modern-cpu` with a thousand steps or more: the average of some 200 is better."""
NANOGPT = Path("nanoGPT")
"""Where its checkout is by default."""


def changed(**fields: Any) -> Any:
    """nanoGPT's CPU setting with changes of the model or of the run."""
    of_the_run = {}
    for name in ("batch_size", "steps_per_call"):
        if name in fields:
            of_the_run[name] = fields.pop(name)
    return replace(SETTING, model=replace(SETTING.model, **fields), **of_the_run)


def repeated_shakespeare(folder: str, size: float) -> Path:
    """A file of tiny Shakespeare as many times as it takes for so many bytes."""
    path = Path(folder, "text.txt")
    text = shakespeare_file().read_bytes()
    times = math.ceil(size / len(text))
    with path.open("wb") as file:
        for _ in range(times):
            file.write(text)
    return path


def step_time(options: Rounds, nanogpt: Path = NANOGPT) -> None:
    """One train step beside nanoGPT's, eager and compiled, at its CPU setting (four layers of 128
    features, block 64, batch 12): its batch, forward, backward, clipping and AdamW."""
    if not options.only:
        require(nanogpt)
    variants = [
        variant("nanoGPT eager", SETTING, nanogpt=nanogpt),
        variant("nanoGPT compiled", SETTING, nanogpt=nanogpt, compile=True),
        variant("jgpt float32", SETTING),
        variant("jgpt bfloat16", changed(dtype="bfloat16")),
    ]
    compare("step_time", variants, options)


def time_to_loss(
    options: Rounds, nanogpt: Path = NANOGPT, short_steps: int = 42, steps: int = 1150
) -> None:
    """Whole commands on tiny Shakespeare. nanoGPT trains its CPU setting (its README), to about
    1.9 by its own estimate over 20 batches, and `jgpt train nanogpt-cpu` the same; `jgpt train
    modern-cpu` for a few steps, to an exact loss at least as good, and for as many as end before
    nanoGPT does, both evaluated at the end; `jgpt train` the default preset. None draws a sample.
    Each round has a seed."""
    with TemporaryDirectory() as folder:
        variants = [
            trained_by_nanogpt("nanoGPT", check_out(nanogpt, folder), *CPU_SETTING),
            trained_by_jgpt("jgpt nanogpt-cpu", "nanogpt-cpu"),
            trained_by_jgpt("to the loss", "modern-cpu", "--steps", short_steps, *SHORT.split()),
            trained_by_jgpt(
                "to nanoGPT's end",
                "modern-cpu",
                *("--steps", steps),
                *("--eval-interval", steps),  # once, at the end
                *AVERAGED.split(),
            ),
            trained_by_jgpt("the default preset"),
        ]
        compare("time_to_loss", variants, options)


def preset_times(options: Rounds) -> None:
    """The whole command `jgpt train PRESET` for the presets that two CPU cores train, without a
    sample. Each round has a seed; `shakespeare-best`, which takes longest, is trained once."""
    variants = []
    for name in ON_A_CPU:
        variants.append(trained_by_jgpt(name, name))
    variants[-1] = replace(variants[-1], rounds=1)
    compare("preset_times", variants, options)


def memory(options: Rounds, nanogpt: Path = NANOGPT, gigabytes: float = 1.0) -> None:
    """Peak memory of nanoGPT's CPU setting in both, of a first run of jgpt, which compiles, and of
    preparing a large text."""
    setting = ("nanogpt-cpu", "--data", "shakespeare", "--steps", 200)
    train = jgpt("train", *setting, "--out", "{out}")
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    with TemporaryDirectory() as folder:
        theirs = check_out(nanogpt, folder)
        cache = {"XDG_CACHE_HOME": f"{folder}/programs"}  # jgpt's own cache, as its users have it
        prepare = jgpt("prepare", repeated_shakespeare(folder, 1e9 * gigabytes), "--out", "{out}")
        variants = [
            trained_by_nanogpt("nanoGPT", theirs, *CPU_SETTING, "--max_iters=200"),
            Variant("jgpt, first run", train, nothing, uncached),
            Variant("jgpt", train, nothing, cache, warm=True),
            Variant("jgpt prepare", prepare, nothing, rounds=1),
        ]
        compare("memory", variants, options)


def prepare(options: Rounds, megabytes: int = 200) -> None:
    """Whole commands that encode a text, tiny Shakespeare many times, with GPT-2's byte-pairs:
    `jgpt prepare`, tiktoken with as many threads, nanoGPT's prepare.py (tiktoken, the whole text on
    one thread), and tokenizers; the files of the byte-pairs are in $JGPT_DATA_DIR/gpt2-bpe."""
    files = Path(os.environ["JGPT_DATA_DIR"], "gpt2-bpe")
    with TemporaryDirectory() as folder:
        text = repeated_shakespeare(folder, 1e6 * megabytes)

        def speed(printed: str, out: Path) -> Figures:
            tokens = out
            if out.is_dir():  # as `jgpt prepare` makes it
                tokens = out / "tokens.bin"
            megabytes = text.stat().st_size / 1e6
            return {"megabytes": megabytes, "tokens": tokens.stat().st_size / 2}  # of 16 bits

        def theirs(name: str, way: str, **rest: Any) -> Variant:
            command = call("encoding", "encode", way=way, text=text, files=files, out="{out}")
            return Variant(name, command, speed, **rest)

        ours = ("--tokenizer", "gpt2", "--tokenizer-files", files, "--out", "{out}")
        variants = [
            theirs("tiktoken", "tiktoken"),
            theirs("nanoGPT's prepare.py", "nanogpt"),
            theirs("tokenizers", "tokenizers", rounds=1),
            Variant("jgpt prepare", jgpt("prepare", text, *ours), speed),
        ]
        compare("prepare", variants, options)


def large_text(options: Rounds, megabytes: int = 400, steps: int = 200) -> None:
    """A text of the size that people have, made from a seed: `jgpt prepare` with byte-pairs, and
    `jgpt train` on the text as it is, the first time, which tokenizes it, and a later time; peak
    memory, the seconds to the first step and the share of the time that no step takes."""
    with TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        write_code(text, 1_000_000 * megabytes)
        pairs = ("--tokenizer", "bpe", "--bpe-vocab-size", 8192)
        train = call("watching", "large_text", text=text, out="{out}", preset="tiny", steps=steps)
        # the caches of texts are below these folders
        first = {"XDG_CACHE_HOME": f"{folder}/first"}
        later = {"XDG_CACHE_HOME": f"{folder}/later"}
        variants = [
            Variant("jgpt prepare", jgpt("prepare", text, *pairs, "--out", "{out}"), nothing),
            Variant("jgpt train, the first run", train, environment=first, rounds=1),
            Variant("jgpt train, a later run", train, environment=later, warm=True),
        ]

        def facts(measured: Measured) -> dict[str, Any]:
            return {"text_bytes": text.stat().st_size}

        compare("large_text", variants, options, facts)


def startup(options: Rounds) -> None:
    """`jgpt --help`, `jgpt train` to its first step, with and without a compilation cache, and
    `jgpt sample` to its first tokens, with one."""
    train = call("watching", "first_step", out="{out}")
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # jgpt's own is below XDG_CACHE_HOME
    with TemporaryDirectory() as folder:
        first = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        later = {"XDG_CACHE_HOME": folder}
        run = f"{folder}/run"
        one_step = ("--data", "shakespeare", "--steps", 1, "--sample-tokens", 0)
        train_once = jgpt("train", "nanogpt-cpu", *one_step, "--out", run)
        subprocess.run(train_once, check=True, stdout=subprocess.DEVNULL)
        sample = call("watching", "first_text", run=run)
        variants = [
            Variant("jgpt --help", jgpt("--help"), nothing, warm=True),
            Variant("jgpt train, the first run", train, environment=first),
            Variant("jgpt train, a later run", train, environment=later, warm=True),
            Variant("jgpt sample, a later run", sample, environment=later, warm=True),
        ]
        compare("startup", variants, options)


def scaling(options: Rounds) -> None:
    """Step time against layers, width, block and batch of nanoGPT's CPU setting, one at a time. The
    exponent of time over floating-point operations is 1 where growth is linear."""
    variants = []
    for axis, sizes in AXES.items():
        for size in sizes:
            config = changed(**{axis: size})
            variants.append(variant(f"{axis} {size}", config, steps=10))
    compare("scaling", variants, options, exponents)


def exponents(measured: Measured) -> dict[str, Any]:
    """The slope of log time over log FLOPs, for each axis."""
    found = {}
    for axis in AXES:
        names = [name for name in measured if name.startswith(axis)]
        if len(names) < 2:  # with `only`
            continue
        work = [np.log(median(measured, name, "flops")) for name in names]
        times = [np.log(median(measured, name, "milliseconds")) for name in names]
        slope, _ = np.polyfit(work, times, 1)
        found[axis] = float(slope)
    return {"exponents": found}


def scan_layers(options: Rounds) -> None:
    """What a step takes to compile, in seconds of processor time, and to run, with a loop and with
    a scan over the blocks."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    variants = []
    for layers in (4, 12, 36):
        for name, scan in (("loop", False), ("scan", True)):
            config = changed(num_layers=layers, scan_layers=scan, steps_per_call=4)
            variants.append(variant(f"{name}, {layers} layers", config, steps=4))
    compare("scan_layers", variants, options)


def step_breakdown(options: Rounds, train_preset: str = "nanogpt-cpu") -> None:
    """Where a train step's time goes: milliseconds by kind of operation, summed over threads."""
    given = preset(train_preset)
    variants = []
    for dtype in DTYPES:
        config = replace(given, model=replace(given.model, dtype=dtype))
        variants.append(Variant(dtype, call("breakdown", "step", config=to_json(config))))
    compare("step_breakdown", variants, options)


def ablation(options: Rounds, steps: int = 1000) -> None:
    """The exact loss of `modern-cpu` and of single changes of it, all with as many steps and the
    same seeds, of which each round has one; the schedule ends with the steps."""
    setting = ("modern-cpu", "--steps", steps, "--eval-interval", steps)
    variants = []
    for name, change in CHANGES.items():
        variants.append(trained_by_jgpt(name, *setting, *change.split()))
    compare("ablation", variants, options, lambda _: {"steps": steps})


def narrow_loss(options: Rounds, steps: int = 1000) -> None:
    """nanoGPT's CPU setting in float32 and in bfloat16. A seed decides parameters and batches, so
    the two runs of a round differ by rounding alone."""
    setting = ("nanogpt-cpu", "--steps", steps, "--eval-interval", steps)
    variants = [trained_by_jgpt(dtype, *setting, "--dtype", dtype) for dtype in DTYPES]
    compare("narrow_loss", variants, options, differences)


def differences(measured: Measured) -> dict[str, Any]:
    """bfloat16's losses minus float32's of the same seeds, and how far apart seeds are."""
    wide = measured.get("float32", {}).get("validation_loss")
    narrow = measured.get("bfloat16", {}).get("validation_loss")
    if not wide or not narrow:
        return {}
    apart = [rounded - exact for exact, rounded in zip(wide, narrow, strict=False)]
    deviation = 0.0
    if len(wide) > 1:
        deviation = statistics.stdev(wide)
    return {
        "deviation_over_seeds": deviation,
        "mean_difference": statistics.mean(apart),
        "largest_difference": max(map(abs, apart)),
    }


def contract_overhead(
    options: Rounds, preset: str = "nanogpt-cpu", traced_presets: tuple[str, ...] = tuple(PRESETS)
) -> None:
    """What the shape contract costs: the import, the first trace of a preset's train step, its
    compilation and steps, an eager forward pass, and tracing each preset's train step."""
    command = call("stepping", "checks", preset=preset, traced_presets=traced_presets)
    variants = [
        Variant("checks on", command, environment={"JAXTYPING_DISABLE": "0"}),
        Variant("checks off", command, environment={"JAXTYPING_DISABLE": "1"}),
    ]
    compare("contract_overhead", variants, options, ratios)


def ratios(measured: Measured) -> dict[str, Any]:
    """The ratio of the minima over alternating rounds, and the time added to the trace of each
    preset: what disturbs a measurement only adds to it."""
    on = measured.get("checks on", {})
    off = measured.get("checks off", {})
    ratio = {}
    added = {}
    for name in on:
        if name not in off:
            continue
        ratio[name] = min(on[name]) / min(off[name])
        if name.startswith("trace "):
            added[name.removeprefix("trace ")] = min(on[name]) - min(off[name])
    return {"ratio": ratio, "added": added}


def shakespeare_candidates(
    options: Rounds, candidates: tuple[str, ...] = tuple(CANDIDATES), extra: str = ""
) -> None:
    """Changes of `shakespeare-best`, with one seed: the loss on the first half of the last tenth of
    tiny Shakespeare, which nobody trains on. `extra` are options of all runs."""
    variants = [
        trained_on_nine_tenths(name, "shakespeare-best", CANDIDATES[name], extra)
        for name in candidates
    ]
    compare("shakespeare_candidates", variants, replace(options, rounds=1))


def shakespeare_best(
    options: Rounds,
    candidate: str = "weight decay 0.1",
    references: tuple[str, ...] = ("nanogpt-cpu",),
    extra: str = "",
) -> None:
    """The best candidate and other presets, with other seeds: the loss on the second half of the
    last tenth, which chose nothing, at the checkpoint that is best on the first half.
    `nanogpt-char` as a reference takes hours on a CPU."""
    name = f"shakespeare-best, {candidate}"
    trained = [trained_on_nine_tenths(name, "shakespeare-best", CANDIDATES[candidate], extra)]
    for reference in references:
        trained.append(trained_on_nine_tenths(reference, reference, extra))
    variants = [replace(variant, read=tested(variant.read)) for variant in trained]
    compare("shakespeare_best", variants, replace(options, first_seed=101))


def trained_on_nine_tenths(name: str, train_preset: str, *changes: str) -> Variant:
    halves = ("--validation-fraction", 0.05, "--test-fraction", 0.05)
    return trained_by_jgpt(name, train_preset, *halves, *" ".join(changes).split())


def tested(read: Read) -> Read:
    """The figures of a run, and its losses on its test split."""

    def read_and_test(printed: str, out: Path) -> Figures:
        command = call("evaluating", "tested", run=out)
        asked = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return read(printed, out) | json.loads(asked.stdout)

    return read_and_test


def int8(options: Rounds, runs: tuple[Path, ...]) -> None:
    """The validation loss of trained runs with and without int8 weights."""
    variants = [Variant(run.name, call("evaluating", "int8", run=run)) for run in runs]
    compare("int8", variants, replace(options, rounds=1))


def sampling(options: Rounds, nanogpt: Path | None = None) -> None:
    """Tokens a second when sampling, beside what people use on a CPU; see `sampling.py`. First
    `pip install ctranslate2 gguf xllamacpp`; engines that aren't there are left out."""
    sampled("sampling", options, nanogpt=nanogpt)


def gpu_sampling(
    options: Rounds,
    nanogpt: Path | None = None,
    batches: tuple[int, ...] = (1, 16, 64),
    tokens: int = 255,
) -> None:
    """Tokens a second of several texts at once on an accelerator. At most one block of tokens;
    beyond it, nanoGPT's window would slide."""
    sampled(
        "gpu_sampling",
        options,
        nanogpt=nanogpt,
        tokens={"10.7M": tokens},
        batches=batches,
        names=("jgpt bfloat16", "nanoGPT"),
    )


def sampled(name: str, options: Rounds, tokens: Any = engines.TOKENS, **which: Any) -> None:
    with TemporaryDirectory() as folder:
        prepare = call("sampling", "prepare", folder=folder, models=[*tokens])
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        facts = {"temperature": engines.TEMPERATURE, "tokens": tokens}
        compare(name, engines.variants(folder, tokens, **which), options, lambda _: facts)


def gpu_step(
    options: Rounds,
    nanogpt: Path | None = None,
    presets: tuple[str, ...] = ("gpt2", "nanogpt-char"),
    batch_size: int = 32,
    steps: int = 40,
) -> None:
    """A train step and the FLOPs utilisation on an accelerator, in bfloat16, beside nanoGPT's with
    torch.compile. GPT-2 has `batch_size`, other presets their own."""
    variants = []
    for name in presets:
        config = preset(name)
        if name == "gpt2":
            config = replace(config, batch_size=batch_size)
        model = replace(config.model, dtype="bfloat16")
        config = replace(config, model=model, micro_batches=1)
        variants.append(variant(f"{name} jgpt", config, steps=steps))
        if nanogpt:
            name = f"{name} nanoGPT"
            variants.append(variant(name, config, steps=steps, nanogpt=nanogpt, compile=True))
    compare("gpu_step", variants, options)


def gpu_train(
    options: Rounds,
    nanogpt: Path | None = None,
    train_preset: str = "nanogpt-char",
    target: float = 1.4655,
) -> None:
    """`jgpt train` on an accelerator: its best exact loss on tiny Shakespeare, and the share of the
    steps that it takes to the target, by default the mean of five seeds of nanoGPT; beside
    nanoGPT's train.py in the first round, by its own estimate over 200 batches. Each round has a
    seed."""
    with TemporaryDirectory() as folder:
        variants = [trained_by_jgpt("jgpt", train_preset, target=target)]
        if nanogpt:
            theirs = check_out(nanogpt, folder)
            variants.append(trained_by_nanogpt("nanoGPT", theirs, target=target, rounds=1))
        compare("gpu_train", variants, options, lambda _: {"target": target})


COMPARISONS = (
    step_time,
    time_to_loss,
    preset_times,
    memory,
    prepare,
    large_text,
    startup,
    scaling,
    scan_layers,
    step_breakdown,
    ablation,
    narrow_loss,
    contract_overhead,
    shakespeare_candidates,
    shakespeare_best,
    int8,
    sampling,
    gpu_step,
    gpu_train,
    gpu_sampling,
)

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {comparison.__name__: comparison for comparison in COMPARISONS},
        description=__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
