"""Comparisons of whole commands and of train steps: each is a list of variants.

    JGPT_DATA_DIR=DIR python benchmarks/compare.py step_time --nanogpt PATH

PATH is a checkout of nanoGPT. The record has the name of the comparison; `--help` lists them all.
"""

import json
import os
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fuzz as fuzzing
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
from texts import write_code

from jgpt.data.corpus import shakespeare_file
from jgpt.fields import to_json
from jgpt.presets import PRESETS, preset

SETTING = preset("nanogpt-cpu")
DTYPES = "float32", "bfloat16"
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
    run = {name: fields.pop(name) for name in ("batch_size", "steps_per_call") if name in fields}
    return replace(SETTING, model=replace(SETTING.model, **fields), **run)


def repeated_shakespeare(folder: str, size: float) -> Path:
    """A file of tiny Shakespeare as many times as it takes for so many bytes."""
    path, words = Path(folder, "text.txt"), shakespeare_file().read_bytes()
    with path.open("wb") as file:
        for _ in range(-int(-size // len(words))):
            file.write(words)
    return path


def step_time(how: Rounds, nanogpt: Path = NANOGPT) -> None:
    """One train step beside nanoGPT's, eager and compiled, at its CPU setting (four layers of 128
    features, block 64, batch 12): its batch, forward, backward, clipping and AdamW."""
    if not how.only:
        require(nanogpt)
    variants = [
        variant("nanoGPT eager", SETTING, nanogpt=nanogpt),
        variant("nanoGPT compiled", SETTING, nanogpt=nanogpt, compile=True),
        variant("jgpt float32", SETTING),
        variant("jgpt bfloat16", changed(dtype="bfloat16")),
    ]
    compare("step_time", variants, how)


def time_to_loss(
    how: Rounds, nanogpt: Path = NANOGPT, short_steps: int = 42, steps: int = 1150
) -> None:
    """Whole commands on tiny Shakespeare. nanoGPT trains its CPU setting (its README), to about
    1.9 by its own estimate over 20 batches, and `jgpt train nanogpt-cpu` the same; `jgpt train
    modern-cpu` for a few steps, to an exact loss at least as good, and for as many as end before
    nanoGPT does, both evaluated at the end; `jgpt train` the default preset. None draws a sample.
    Each round has a seed."""
    once = "--eval-interval", steps
    with TemporaryDirectory() as folder:
        variants = [
            trained_by_nanogpt("nanoGPT", check_out(nanogpt, folder), *CPU_SETTING),
            trained_by_jgpt("jgpt nanogpt-cpu", "nanogpt-cpu"),
            trained_by_jgpt("to the loss", "modern-cpu", "--steps", short_steps, *SHORT.split()),
            trained_by_jgpt(
                "to nanoGPT's end", "modern-cpu", "--steps", steps, *once, *AVERAGED.split()
            ),
            trained_by_jgpt("the default preset"),
        ]
        compare("time_to_loss", variants, how)


def memory(how: Rounds, nanogpt: Path = NANOGPT, gigabytes: float = 1.0) -> None:
    """Peak memory of nanoGPT's CPU setting in both, of a first run of jgpt, which compiles, and of
    preparing a large text."""
    train = "train", "nanogpt-cpu", "--data", "shakespeare", "--steps", 200, "--out", "{out}"
    ours, uncached = jgpt(*train), {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    with TemporaryDirectory() as folder:
        theirs = check_out(nanogpt, folder)
        cache = {"XDG_CACHE_HOME": f"{folder}/programs"}  # jgpt's own cache, as its users have it
        prepare = jgpt("prepare", repeated_shakespeare(folder, 1e9 * gigabytes), "--out", "{out}")
        variants = [
            trained_by_nanogpt("nanoGPT", theirs, *CPU_SETTING, "--max_iters=200"),
            Variant("jgpt, first run", ours, nothing, uncached),
            Variant("jgpt", ours, nothing, cache, warm=True),
            Variant("jgpt prepare", prepare, nothing, rounds=1),
        ]
        compare("memory", variants, how)


def prepare(how: Rounds, megabytes: int = 200) -> None:
    """Whole commands that encode a text, tiny Shakespeare many times, with GPT-2's byte-pairs:
    `jgpt prepare`, tiktoken with as many threads, nanoGPT's prepare.py (tiktoken, the whole text on
    one thread), and tokenizers; the files of the byte-pairs are in $JGPT_DATA_DIR/gpt2-bpe."""
    files = Path(os.environ["JGPT_DATA_DIR"], "gpt2-bpe")
    with TemporaryDirectory() as folder:
        text = repeated_shakespeare(folder, 1e6 * megabytes)

        def speed(printed: str, out: Path) -> Figures:
            tokens = out / "tokens.bin" if out.is_dir() else out
            return {"megabytes": text.stat().st_size / 1e6, "tokens": tokens.stat().st_size / 2}

        def theirs(name: str, way: str, **rest: Any) -> Variant:
            command = call("encoding", "encode", way=way, text=text, files=files, out="{out}")
            return Variant(name, command, speed, **rest)

        ours = "--tokenizer", "gpt2", "--tokenizer-files", files, "--out", "{out}"
        variants = [
            theirs("tiktoken", "tiktoken"),
            theirs("nanoGPT's prepare.py", "nanogpt"),
            theirs("tokenizers", "tokenizers", rounds=1),
            Variant("jgpt prepare", jgpt("prepare", text, *ours), speed),
        ]
        compare("prepare", variants, how)


def large_text(how: Rounds, megabytes: int = 400, steps: int = 200) -> None:
    """A text of the size that people have, made from a seed: `jgpt prepare` with byte-pairs, and
    `jgpt train` on the text as it is, the first time, which tokenizes it, and a later time; peak
    memory, the seconds to the first step and the share of the time that no step takes."""
    with TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        write_code(text, 1_000_000 * megabytes)
        pairs = "--tokenizer", "bpe", "--bpe-vocab-size", 8192
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

        compare("large_text", variants, how, facts)


def startup(how: Rounds) -> None:
    """`jgpt --help`, `jgpt train` to its first step, with and without a compilation cache, and
    `jgpt sample` to its first tokens, with one."""
    train = call("watching", "first_step", out="{out}")
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # jgpt's own is below XDG_CACHE_HOME
    with TemporaryDirectory() as folder:
        first, later = {"JAX_ENABLE_COMPILATION_CACHE": "false"}, {"XDG_CACHE_HOME": folder}
        run, its = f"{folder}/run", ("--data", "shakespeare", "--steps", 1, "--sample-tokens", 0)
        subprocess.run(
            jgpt("train", "nanogpt-cpu", *its, "--out", run), check=True, stdout=subprocess.DEVNULL
        )
        sample = call("watching", "first_text", run=run)
        variants = [
            Variant("jgpt --help", jgpt("--help"), nothing, warm=True),
            Variant("jgpt train, the first run", train, environment=first),
            Variant("jgpt train, a later run", train, environment=later, warm=True),
            Variant("jgpt sample, a later run", sample, environment=later, warm=True),
        ]
        compare("startup", variants, how)


def scaling(how: Rounds) -> None:
    """Step time against layers, width, block and batch of nanoGPT's CPU setting, one at a time. The
    exponent of time over floating-point operations is 1 where growth is linear."""
    variants = [
        variant(f"{axis} {size}", changed(**{axis: size}), steps=10)
        for axis, sizes in AXES.items()
        for size in sizes
    ]
    compare("scaling", variants, how, exponents)


def exponents(measured: Measured) -> dict[str, Any]:
    """The slope of log time over log FLOPs, for each axis."""
    found = {}
    for axis in AXES:
        names = [name for name in measured if name.startswith(axis)]
        if len(names) > 1:
            work, times = (
                [np.log(median(measured, name, figure)) for name in names]
                for figure in ("flops", "milliseconds")
            )
            found[axis] = float(np.polyfit(work, times, 1)[0])
    return {"exponents": found}


def scan_layers(how: Rounds) -> None:
    """What a step takes to compile, in seconds of processor time, and to run, with a loop and with
    a scan over the blocks."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    variants = [
        variant(
            f"{name}, {layers} layers",
            changed(num_layers=layers, scan_layers=scan, steps_per_call=4),
            steps=4,
        )
        for layers in (4, 12, 36)
        for name, scan in (("loop", False), ("scan", True))
    ]
    compare("scan_layers", variants, how)


def step_breakdown(how: Rounds, train_preset: str = "nanogpt-cpu") -> None:
    """Where a train step's time goes: milliseconds by kind of operation, summed over threads."""
    its = preset(train_preset)
    configs = [replace(its, model=replace(its.model, dtype=dtype)) for dtype in DTYPES]
    variants = [
        Variant(it.model.dtype, call("breakdown", "step", config=to_json(it))) for it in configs
    ]
    compare("step_breakdown", variants, how)


def ablation(how: Rounds, steps: int = 1000) -> None:
    """The exact loss of `modern-cpu` and of single changes of it, all with as many steps and the
    same seeds, of which each round has one; the schedule ends with the steps."""
    its = "modern-cpu", "--steps", steps, "--eval-interval", steps
    variants = [trained_by_jgpt(name, *its, *change.split()) for name, change in CHANGES.items()]
    compare("ablation", variants, how, lambda _: {"steps": steps})


def narrow_loss(how: Rounds, steps: int = 1000) -> None:
    """nanoGPT's CPU setting in float32 and in bfloat16. A seed decides parameters and batches, so
    the two runs of a round differ by rounding alone."""
    its = "nanogpt-cpu", "--steps", steps, "--eval-interval", steps
    variants = [trained_by_jgpt(dtype, *its, "--dtype", dtype) for dtype in DTYPES]
    compare("narrow_loss", variants, how, differences)


def differences(measured: Measured) -> dict[str, Any]:
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


def contract_overhead(
    how: Rounds, preset: str = "nanogpt-cpu", traced_presets: tuple[str, ...] = tuple(PRESETS)
) -> None:
    """What the shape contract costs: the import, the first trace of a preset's train step, its
    compilation and steps, an eager forward pass, and tracing each preset's train step."""
    command = call("stepping", "checks", preset=preset, traced_presets=traced_presets)
    variants = [
        Variant(f"checks {name}", command, environment={"JAXTYPING_DISABLE": disable})
        for name, disable in (("on", "0"), ("off", "1"))
    ]
    compare("contract_overhead", variants, how, ratios)


def ratios(measured: Measured) -> dict[str, Any]:
    """The median ratio over the rounds, and the time added to the trace of each preset.

    Other load slows both halves of a round alike."""
    on, off = (measured.get(f"checks {name}", {}) for name in ("on", "off"))
    pairs = {name: list(zip(on[name], off[name], strict=False)) for name in on if name in off}
    return {
        "ratio": {name: statistics.median(a / b for a, b in its) for name, its in pairs.items()},
        "added": {
            name.removeprefix("trace "): statistics.median(a - b for a, b in its)
            for name, its in pairs.items()
            if name.startswith("trace ")
        },
    }


def live(how: Rounds, steps: int = 2000) -> None:
    """`jgpt train` with its live page, which is read, and without: the time of a step."""
    variants = [
        Variant(name, call("watching", "page", steps=steps, out="{out}", live=name == "live"))
        for name in ("alone", "live")
    ]

    def slower(measured: Measured) -> dict[str, Any]:
        times = [
            measured.get(name, {}).get("milliseconds_per_step", ()) for name in ("live", "alone")
        ]
        each = [live / alone - 1 for live, alone in zip(*times, strict=False)]
        median = sorted(each)[len(each) // 2] if each else None
        return {"steps": steps, "slower_by": each, "median": median}

    compare("live", variants, how, slower)


def shakespeare_candidates(
    how: Rounds, candidates: tuple[str, ...] = tuple(CANDIDATES), extra: str = ""
) -> None:
    """Changes of `shakespeare-best`, with one seed: the loss on the first half of the last tenth of
    tiny Shakespeare, which nobody trains on. `extra` are options of all runs."""
    variants = [
        trained_on_nine_tenths(name, "shakespeare-best", CANDIDATES[name], extra)
        for name in candidates
    ]
    compare("shakespeare_candidates", variants, replace(how, rounds=1))


def shakespeare_best(
    how: Rounds,
    candidate: str = "weight decay 0.1",
    references: tuple[str, ...] = ("nanogpt-cpu",),
    extra: str = "",
) -> None:
    """The best candidate and other presets, with other seeds: the loss on the second half of the
    last tenth, which chose nothing, at the checkpoint that is best on the first half.
    `nanogpt-char` as a reference takes hours on a CPU."""
    name, change = f"shakespeare-best, {candidate}", CANDIDATES[candidate]
    trained = [
        trained_on_nine_tenths(name, "shakespeare-best", change, extra),
        *(trained_on_nine_tenths(name, name, extra) for name in references),
    ]
    variants = [replace(its, read=tested(its.read)) for its in trained]
    compare("shakespeare_best", variants, replace(how, first_seed=101))


def trained_on_nine_tenths(name: str, train_preset: str, *changes: str) -> Variant:
    halves = "--validation-fraction", 0.05, "--test-fraction", 0.05
    return trained_by_jgpt(name, train_preset, *halves, *" ".join(changes).split())


def tested(read: Read) -> Read:
    """The figures of a run, and its losses on its test split."""

    def read_and_test(printed: str, out: Path) -> Figures:
        command = call("evaluating", "tested", run=out)
        asked = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return read(printed, out) | json.loads(asked.stdout)

    return read_and_test


def int8(how: Rounds, runs: tuple[Path, ...]) -> None:
    """The validation loss of trained runs with and without int8 weights."""
    variants = [Variant(run.name, call("evaluating", "int8", run=run)) for run in runs]
    compare("int8", variants, replace(how, rounds=1))


def fuzz(
    how: Rounds, formats: tuple[str, ...] = tuple(fuzzing.TARGETS), inputs: int = 10_000
) -> None:
    """Mutated files of each format: how many are loaded, and how many refused; see `fuzz.py`."""
    variants = [fuzzing.variant(format, inputs) for format in formats]
    compare("fuzz", variants, replace(how, rounds=1))


def sampling(how: Rounds, nanogpt: Path | None = None) -> None:
    """Tokens a second when sampling, beside what people use on a CPU; see `sampling.py`. First
    `pip install ctranslate2 gguf xllamacpp`; engines that aren't there are left out."""
    sampled("sampling", how, nanogpt=nanogpt)


def gpu_sampling(
    how: Rounds,
    nanogpt: Path | None = None,
    batches: tuple[int, ...] = (1, 16, 64),
    tokens: int = 255,
) -> None:
    """Tokens a second of several texts at once on an accelerator. At most one block of tokens;
    beyond it, nanoGPT's window would slide."""
    counts, names = {"10.7M": tokens}, ("jgpt bfloat16", "nanoGPT")
    sampled("gpu_sampling", how, nanogpt=nanogpt, tokens=counts, batches=batches, names=names)


def sampled(name: str, how: Rounds, tokens: Any = engines.TOKENS, **which: Any) -> None:
    with TemporaryDirectory() as folder:
        prepare = call("sampling", "prepare", folder=folder, models=[*tokens])
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        facts = {"temperature": engines.TEMPERATURE, "tokens": tokens}
        compare(name, engines.variants(folder, tokens, **which), how, lambda _: facts)


def gpu_step(
    how: Rounds,
    nanogpt: Path | None = None,
    presets: tuple[str, ...] = ("gpt2", "nanogpt-char"),
    batch_size: int = 32,
    steps: int = 40,
) -> None:
    """A train step and the FLOPs utilisation on an accelerator, in bfloat16, beside nanoGPT's with
    torch.compile. GPT-2 has `batch_size`, other presets their own."""
    variants = []
    for name in presets:
        its = preset(name)
        size = batch_size if name == "gpt2" else its.batch_size
        model = replace(its.model, dtype="bfloat16")
        config = replace(its, model=model, batch_size=size, micro_batches=1)
        variants.append(variant(f"{name} jgpt", config, steps=steps))
        if nanogpt:
            theirs = {"steps": steps, "nanogpt": nanogpt, "compile": True}
            variants.append(variant(f"{name} nanoGPT", config, **theirs))
    compare("gpu_step", variants, how)


def gpu_train(
    how: Rounds,
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
        compare("gpu_train", variants, how, lambda _: {"target": target})


COMPARISONS = (
    *(step_time, time_to_loss, memory, prepare, large_text, startup, scaling, scan_layers),
    *(step_breakdown, ablation, narrow_loss, contract_overhead, live, shakespeare_candidates),
    *(shakespeare_best, int8, fuzz, sampling, gpu_step, gpu_train, gpu_sampling),
)

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {comparison.__name__: comparison for comparison in COMPARISONS},
        description=__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
