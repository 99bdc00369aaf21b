"""The commands: each parses its options, calls the library, and prints.

They import what they need when they run: `jgpt --help` must not wait for jax.
"""

import dataclasses
import functools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar

from jgpt.cli.options import (
    AttentionOptions,
    EvalOptions,
    ExportOptions,
    ImportOptions,
    InfoOptions,
    PlotOptions,
    PrepareOptions,
    PresetsOptions,
    RunOptions,
    SampleOptions,
    describe_presets,
    parse,
    parse_train,
)
from jgpt.config import DataConfig, OptimizerConfig, TrainConfig, did_you_mean
from jgpt.presets import DEFAULT_PRESET, PRESETS, preset

Options = TypeVar("Options")
BATCH_SIZE = 16
SEPARATOR = "---------------"


def train(args: list[str]) -> None:
    """`jgpt train [PRESET] ...`"""
    began = time.perf_counter()
    if any(word.partition("=")[0] == "--vocab-size" for word in args):
        raise ValueError("--vocab-size can't be set: the tokenizer determines it")
    config, options = parse_train(args, _base_config)
    if options.profile < 0:
        raise ValueError(f"profile={options.profile} must not be negative")

    from rich.console import Console

    from jgpt.cli.terminal import importing

    with importing():
        from jgpt.cli.console import ConsoleProgress, describe
        from jgpt.cli.signals import stop_requested
        from jgpt.runs.loop import TrainingStopped, fit, plan

    with ConsoleProgress(Console(), "reading the data") as progress:
        if options.dry_run:
            planned = plan(
                config, resume=options.resume, overwrite=options.overwrite, progress=progress
            )
            progress.say(*describe(planned))
            return
        with stop_requested(progress.stopping, progress.leaving) as stop:
            try:
                run = fit(
                    config,
                    resume=options.resume,
                    overwrite=options.overwrite,
                    progress=progress,
                    should_stop=stop,
                    profile_steps=options.profile,
                )
            except TrainingStopped as stopped:
                resume = _command("train", "--out", stopped.directory, "--resume")
                progress.say(str(stopped), f"resume with: {resume}")
                sys.exit(stop.exit_code)
        if run.sample:
            progress.say("", run.sample, "")
        progress.say(
            f"validation loss {run.validation_loss:.4f} at step {run.best_step}, "
            f"total time {time.perf_counter() - began:.0f} s",
            f"run directory: {run.directory} (checkpoints, metrics.jsonl, samples.txt, loss.png)",
            f"next: {_command('sample', run.directory)}   or   {_command('eval', run.directory)}",
        )


def _base_config(given: Any) -> TrainConfig:
    """The config that options override: of a preset, a file, or the run to resume."""
    if given.run.config is not None:
        if given.preset is not None:
            raise ValueError(f"give the preset {given.preset} or --config, not both")

        from jgpt.runs.directory import read_config

        return dataclasses.replace(read_config(Path(given.run.config)), out=None)
    if given.preset is None and given.out is not None and given.run.resume:
        from jgpt.runs.directory import RunDirectory

        return RunDirectory.open(given.out).config()
    for word in (word for words in given.data for word in words):
        if given.preset is None and word in PRESETS and not Path(word).exists():
            raise ValueError(f"{word} is a preset: put it before --data")
    name = given.preset or DEFAULT_PRESET
    # preset() checks the type of the name, for which it imports jax
    return PRESETS[name][1] if name in PRESETS else preset(name)


def sample(args: list[str]) -> None:
    """`jgpt sample RUN ...`"""
    options = parse(SampleOptions, "sample", args)
    if options.num_samples < 1:
        raise ValueError(f"num_samples={options.num_samples} must be at least 1")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"seed={options.seed} must be at least 0 and below 2**32")

    from jgpt.cli.terminal import importing

    with importing() as spinner:
        import jax
        import numpy as np

        from jgpt.generation.text import stream_text
        from jgpt.runs.checkpoints import load

        spinner.update("loading the model")
        model, tokenizer, config = load(options.run, which=options.checkpoint)
    given = _prompts(options, config.dataset.universal_newlines)
    prompts = (prompt for prompt in given for _ in range(options.num_samples))
    key = jax.random.key(np.uint32(options.seed))
    for first in count(0, BATCH_SIZE):
        rows = tuple(islice(prompts, BATCH_SIZE))
        if not rows:
            break
        pieces = stream_text(
            model,
            tokenizer,
            rows,
            options.max_new_tokens,
            key=jax.random.fold_in(key, first),
            stop=options.stop,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )
        if first:
            print(SEPARATOR)
        _print_texts(rows, pieces)


def _print_texts(prompts: tuple[str, ...], pieces: Iterator[tuple[str, ...]]) -> None:
    """Stream the first text, then print the others."""
    print(prompts[0], end="", flush=True)
    others = list(prompts[1:])
    for first, *more in pieces:
        print(first, end="", flush=True)
        others = [text + new for text, new in zip(others, more, strict=True)]
    print()
    for text in others:
        print(f"{SEPARATOR}\n{text}")


def evaluate(args: list[str]) -> None:
    """`jgpt eval RUN`"""
    options = parse(EvalOptions, "eval", args)

    from jgpt.cli.terminal import error_console, importing

    with importing():
        from jgpt.cli.console import ConsoleProgress
        from jgpt.runs import loop

    with ConsoleProgress(error_console(), "evaluating") as progress:
        result = loop.evaluate(options.run, which=options.checkpoint, progress=progress)
    if options.json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    print(f"validation loss     {result.loss:.4f} nats per token, over {result.tokens:,} targets")
    print(f"perplexity          {result.perplexity:.3f}")
    print(f"bits per character  {result.bits_per_character:.4f}")


def info(args: list[str]) -> None:
    """`jgpt info PRESET|RUN`"""
    options = parse(InfoOptions, "info", args)

    from rich.console import Console

    from jgpt.cli.terminal import importing, say

    with importing() as spinner:
        from jgpt.hardware import current_platform
        from jgpt.nn.models import flops_per_token, parts_of
        from jgpt.nn.precision import run_for_platform
        from jgpt.runs.directory import RunDirectory
        from jgpt.training.plan import format_bytes, training_memory

        if options.what in PRESETS:
            config = PRESETS[options.what][1]
        elif Path(options.what).exists():
            config = RunDirectory.open(options.what).config()
        else:
            raise ValueError(
                f"{options.what!r} is neither a preset nor a run directory"
                f"{did_you_mean(options.what, PRESETS)}"
            )
        spinner.update("compiling")
        memory = training_memory(run_for_platform(config, current_platform()))
    rows = [(part.name, part.parameters, part.size) for part in parts_of(config.model)]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    flops = flops_per_token(config.model)
    lines = [
        *(
            f"{name:<28} {count:>13,} parameters {format_bytes(size):>12}"
            for name, count, size in rows
        ),
        f"FLOPs per token at full context: {flops:,} forward, {3 * flops:,} in training",
    ]
    if memory is not None:
        lines.append(f"training memory at batch_size={config.batch_size}: {memory}")
    say(Console(), *lines)


def prepare(args: list[str]) -> None:
    """`jgpt prepare FILES --out DIR`"""
    options = parse(PrepareOptions, "prepare", args)
    config = DataConfig(
        data=options.files,
        universal_newlines=options.universal_newlines,
        tokenizer=options.tokenizer,
        bpe_vocab_size=options.bpe_vocab_size,
        tokenizer_files=options.tokenizer_files,
    )

    from jgpt.data import dataset

    tokens = dataset.prepare(config, Path(options.out), warn=print)
    print(f"{tokens:,} tokens in {options.out}; next: {_command('train', '--data', options.out)}")


def import_(args: list[str]) -> None:
    """`jgpt import SOURCE --out RUN`"""
    options = parse(ImportOptions, "import", args)
    out = Path(options.out)
    if out.exists():  # before loading, which may take a while
        raise ValueError(f"{out} already exists: choose another directory")

    from jgpt.cli.terminal import importing

    with importing() as spinner:
        from jgpt.interop.huggingface import load_gpt2
        from jgpt.interop.names import crop_vocabulary
        from jgpt.interop.nanogpt import load_nanogpt
        from jgpt.runs.checkpoints import write_run

        spinner.update("loading the model")
        model = (load_gpt2 if options.format == "gpt2" else load_nanogpt)(options.source)
        tokenizer = _tokenizer(options)
        model = crop_vocabulary(model, tokenizer.vocab_size)
    config = TrainConfig(
        model=model.config,
        # small and constant, as is usual for fine-tuning
        optimizer=OptimizerConfig(
            learning_rate=3e-5, min_learning_rate=3e-5, schedule="constant", warmup_steps=0
        ),
        dataset=DataConfig(
            data=tuple(chain(*options.data)) if options.data else DataConfig().data,
            universal_newlines=options.universal_newlines,
        ),
        name=out.name,
        out=options.out,
    )
    write_run(out, model, tokenizer, config)
    print(
        f"{model.config.num_layers} layers, {model.config.embed_dim} features, "
        f"vocabulary {model.vocab_size}; next: {_command('sample', out)}"
    )


def export(args: list[str]) -> None:
    """`jgpt export RUN --out DIR`"""
    options = parse(ExportOptions, "export", args)

    from jgpt.cli.terminal import importing

    with importing() as spinner:
        from jgpt.data.tokenizers import BPETokenizer
        from jgpt.interop.huggingface import save_gpt2
        from jgpt.runs.checkpoints import load

        spinner.update("loading the model")
        model, tokenizer, _ = load(options.run, which=options.checkpoint)
    save_gpt2(model, options.out, tokenizer=tokenizer, zero_biases=options.zero_biases)
    print(f"wrote {options.out}, for transformers.GPT2LMHeadModel.from_pretrained")
    if not isinstance(tokenizer, BPETokenizer):
        print(
            "the tokenizer was not exported: GPT-2's format needs byte-pairs, and this run has a "
            f"{type(tokenizer).__name__}"
        )


def presets(args: list[str]) -> None:
    """`jgpt presets`"""
    parse(PresetsOptions, "presets", args)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    print("\n".join(describe_presets(width)))


def plot(args: list[str]) -> None:
    """`jgpt plot RUN...`"""
    options = parse(PlotOptions, "plot", args)

    if not options.runs:
        raise ValueError("there is nothing to plot: name at least one run directory")

    from jgpt.cli.terminal import importing

    with importing():
        from jgpt.runs.directory import RunDirectory
        from jgpt.runs.plots import plot_runs

    plot_runs([RunDirectory.open(run) for run in options.runs], Path(options.out))
    print(f"wrote {options.out}")


def attention(args: list[str]) -> None:
    """`jgpt attention RUN --prompt TEXT`"""
    options = parse(AttentionOptions, "attention", args)

    from jgpt.cli.terminal import importing

    with importing() as spinner:
        from jgpt.runs.checkpoints import load
        from jgpt.runs.plots import plot_attention

        spinner.update("loading the model")
        model, tokenizer, _ = load(options.run, which=options.checkpoint)
        spinner.update("plotting")
        plot_attention(model, tokenizer, options.prompt, Path(options.out))
    print(f"wrote {options.out}")


COMMANDS: dict[str, tuple[Any, ...]] = {
    "train": ("train a GPT", train, TrainConfig, RunOptions),
    "sample": ("generate text with a trained model", sample, SampleOptions),
    "eval": ("compute a run's exact validation loss", evaluate, EvalOptions),
    "info": ("parameters, bytes, FLOPs and memory of a preset or a run", info, InfoOptions),
    "plot": ("plot the losses of runs", plot, PlotOptions),
    "attention": ("plot the attention weights of a trained model", attention, AttentionOptions),
    "prepare": ("tokenize text larger than memory into a folder", prepare, PrepareOptions),
    "import": ("import GPT-2 or nanoGPT weights as a run", import_, ImportOptions),
    "export": ("export a run's model in Hugging Face's GPT-2 format", export, ExportOptions),
    "presets": ("list the presets", presets, PresetsOptions),
}


def _command(*words: object) -> str:
    """A command to copy, quoted for the shell."""
    return shlex.join(["jgpt", *map(str, words)])


def _tokenizer(options: ImportOptions) -> Any:
    from jgpt.data.corpus import read_text
    from jgpt.data.tokenizers import BPETokenizer, CharTokenizer, tokenizer_from_json

    path = Path(options.tokenizer or options.source)
    if path.is_dir():
        return BPETokenizer.from_gpt2(path)
    if options.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer next to it: give --tokenizer")
    if path.suffix == ".json":
        return tokenizer_from_json(path.read_text(encoding="utf-8"))
    text = read_text((options.tokenizer,), universal_newlines=options.universal_newlines)
    return CharTokenizer.from_text(text)


def _prompts(options: SampleOptions, universal_newlines: bool) -> tuple[str, ...]:
    """The prompts, files read as the run's text was; an empty one stands for a newline."""
    from jgpt.data.corpus import read_stream

    if options.prompt and options.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    read = functools.partial(read_stream, universal_newlines=universal_newlines)
    prompts = options.prompt
    if options.prompt_file == "-":
        prompts = (read(sys.stdin.buffer, "standard input"),)
    elif options.prompt_file is not None:
        with open(options.prompt_file, "rb") as file:
            prompts = (read(file, options.prompt_file),)
    if "" in prompts:
        raise ValueError("the prompt is empty: give at least one character, or no --prompt at all")
    return prompts or ("",)
