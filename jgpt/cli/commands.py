"""The commands, one for each public function: parameters are options, results lines to print.

Each imports what it needs when it runs: `jgpt --help` must not wait for jax.
"""

import contextlib
import dataclasses
import inspect
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from jgpt.cli.options import (
    File,
    OptionSpec,
    ProcessOptions,
    RunOptions,
    describe_presets,
    in_flags,
)
from jgpt.cli.terminal import importing, open_console, say, spinner
from jgpt.config import (
    Code,
    ComputeDtype,
    DataConfig,
    OptimizerConfig,
    TokenizerName,
    TrainConfig,
    counted,
)
from jgpt.durable import write_file
from jgpt.presets import PRESETS
from jgpt.user_code import with_code
from jgpt.words import did_you_mean

Run = Annotated[str, OptionSpec("RUN", "The run directory.", positional=True)]
LatestRun = Annotated[
    str | None,
    OptionSpec(
        "[RUN]", "The run directory; the latest one in runs/ unless given.", positional=True
    ),
]
What = Annotated[
    str, OptionSpec("PRESET|RUN", "A preset's name or a run directory.", positional=True)
]
Image = Annotated[str, OptionSpec("FILE", "The image to write: .png or .svg.")]
Probability = Annotated[float | None, OptionSpec("P")]
Texts = Annotated[tuple[str, ...], OptionSpec("TEXT", once=True)]
Checkpoint = Annotated[
    Literal["best", "last"] | int,
    OptionSpec(help="The best by validation loss, the last, or a step."),
]
Newlines = Annotated[
    bool, OptionSpec(help="Read CR LF and CR as newlines and drop a byte-order mark.")
]
ModelOption = Annotated[
    str | None,
    OptionSpec("FILE:NAME", "The model, where a run has its own, such as my_gpt.py:GPT."),
]
MeshOption = Annotated[
    str | None, OptionSpec("MESH", "A mesh of devices, such as data=2,fsdp=2,tensor=2.")
]
Lines = list[str]
BATCH_SIZE = 16
SEPARATOR = "---------------"


def train(config: TrainConfig, options: RunOptions, where: ProcessOptions) -> Lines:
    """Train a GPT."""
    began = time.perf_counter()
    if options.dry_run:
        return plan(config, options, where)
    if options.on is not None:
        raise ValueError(f"on={options.on} compiles for other hardware: it needs dry_run=True")
    if options.json:
        raise ValueError("json=True is for a plan: it needs dry_run=True")
    if options.live and where != ProcessOptions():
        raise ValueError("live=True is for training in one process: use jgpt look RUN --live")
    if where == ProcessOptions():
        return _train(config, options, began)
    given = where.coordinator, where.processes, where.process
    if not where.distributed and None in given:
        raise ValueError("give coordinator=HOST:PORT, processes=N and process=I, all three")

    from jgpt.parallel.processes import joined

    with joined(*given, _leave):
        return _train(config, options, began)


def _leave(message: str) -> NoReturn:
    sys.stdout.flush()
    open_console().show_cursor()
    print(f"jgpt: {in_flags(message)}", file=sys.stderr, flush=True)
    os._exit(2)


def _train(config: TrainConfig, options: RunOptions, began: float) -> Lines:
    with importing():
        from jgpt import hardware
        from jgpt.cli import console, live, signals
        from jgpt.fitting.fit import fit
        from jgpt.fitting.stopping import StoppedBeforeTraining, TrainingStopped
        from jgpt.parallel import processes

    screen = open_console()
    screen.quiet = hardware.process_index() != 0
    shown = console.ConsoleProgress(screen, "reading the data")
    if options.live:
        shown = live.LiveProgress(screen, "reading the data", browser=options.browser)
    with shown as progress, signals.stop_requested(progress.stopping, progress.leaving) as codes:
        try:
            run = fit(
                config,
                resume=options.resume,
                overwrite=options.overwrite,
                progress=progress,
                should_stop=lambda: bool(codes) or progress.reader_left,
                profile_steps=options.profile,
            )
        except StoppedBeforeTraining:
            sys.exit(max(codes, default=128 + signals.BROKEN_PIPE))
        except TrainingStopped as stopped:
            resume = _command("train", "--out", stopped.directory, "--resume", *_own(config))
            lines = [str(stopped), f"resume with: {resume}"]
            progress.say(*lines)
            code = max(codes, default=0)
            if progress.reader_left and not codes:
                print("jgpt: nobody reads the output any more:", *lines, sep="\n", file=sys.stderr)
                code = 128 + signals.BROKEN_PIPE
            sys.exit(max(processes.gather(code)))
    if hardware.process_index() != 0:
        return []
    model = _own(config)[:2] if config.model.make is not None else []
    return [
        *(["", run.sample, ""] if run.sample else []),
        f"validation loss {run.validation_loss:.4f} at step {run.best_step}"
        f"{run.evaluations.over}, "
        f"total time {time.perf_counter() - began:.0f} s",
        f"run directory: {run.directory} (checkpoints, metrics.jsonl, samples.txt, loss.png)",
        f"next: {_command('sample', run.directory, *model)}   or   "
        f"{_command('eval', run.directory, *model)}",
    ]


def _own(config: TrainConfig) -> list[str]:
    """The options for a user's own model and optimizer."""
    makes = {"--model": config.model.make, "--optimizer": config.optimizer.make}
    given = ((flag, Code.of(make).named) for flag, make in makes.items() if make is not None)
    return [word for pair in given for word in pair]


def plan(config: TrainConfig, options: RunOptions, where: ProcessOptions) -> Lines:
    """Show the memory and compute of a training run, here or on other hardware."""
    if options.live:
        raise ValueError("live=True is for training: a plan has no page")
    if where != ProcessOptions():
        raise ValueError("a plan is for one process: leave out --distributed and --coordinator")
    if options.on is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # what this machine has isn't asked for
        if "jax" in sys.modules:  # a user's own model imported it
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    with importing():
        from jgpt.cli import console
        from jgpt.fitting import fit as fit_module
        from jgpt.training import ahead

    if options.on is None:
        screen = open_console(stderr=options.json)
        with console.ConsoleProgress(screen, "reading the data") as progress:
            planned = fit_module.plan(
                config, resume=options.resume, overwrite=options.overwrite, progress=progress
            )
        lines = console.describe(planned)
    else:
        doing = f"compiling for {options.on}, which takes minutes"
        with spinner(open_console(stderr=True), doing):
            planned = ahead.compile_ahead(config, options.on)
        lines = console.describe_ahead(planned)
    return [dumps(dataclasses.asdict(planned), default=str)] if options.json else lines


def sample(
    run: LatestRun = None,
    prompt: Texts = (),
    prompt_file: File = None,
    max_new_tokens: int = 500,
    temperature: float = 0.8,
    top_k: Annotated[int | None, OptionSpec("K")] = None,
    top_p: Probability = None,
    min_p: Probability = None,
    stop: Texts = (),
    num_samples: int = 1,
    seed: int = 1337,
    weights: Literal["saved", "int8"] = "saved",
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
    mesh: MeshOption = None,
) -> None:
    """Generate text with a trained model, streamed as it is sampled.

    Args:
        prompt: The text to continue, by default a newline. Several are sampled as a batch.
        prompt_file: A UTF-8 file with the prompt; - is standard input.
        max_new_tokens: The number of tokens to generate; the context is the last block-size tokens.
        temperature: 0 is greedy; 1 samples from the model's distribution.
        top_k: Sample from the k most likely tokens only.
        top_p: Nucleus sampling: sample from the smallest set of tokens with this total probability.
        min_p: Sample from tokens with at least this fraction of the highest probability only.
        stop: Stop string: end a text before it.
        num_samples: Samples per prompt.
        seed: The random seed.
        weights: int8 quantises them, and the inputs of each product: faster on a CPU.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1")
    _require_seed(seed)
    run = _run_or_latest(run)
    with _loaded(run, checkpoint, mesh, model, weights) as (loaded, tokenizer, config):
        import jax
        import numpy as np

        from jgpt.generation.text import stream_text

        given = _prompts(prompt, prompt_file, config.dataset.universal_newlines)
        prompts = (text for text in given for _ in range(num_samples))
        key = jax.random.key(np.uint32(seed))
        first = 0
        rules: dict[str, Any] = {"temperature": temperature, "stop": stop}
        rules |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        while rows := tuple(islice(prompts, BATCH_SIZE)):
            rules["key"] = jax.random.fold_in(key, first)
            pieces = stream_text(loaded, tokenizer, rows, max_new_tokens, **rules)
            if first > 0:
                print(SEPARATOR)
            # the first text is streamed
            print(rows[0], end="", flush=True)
            others = list(rows[1:])
            for piece, *more in pieces:
                print(piece, end="", flush=True)
                others = [text + new for text, new in zip(others, more, strict=True)]
            print("", *others, sep=f"\n{SEPARATOR}\n")
            first += BATCH_SIZE


def _require_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be at least 0 and below 2**32")


def chat(
    run: LatestRun = None,
    system: Annotated[str | None, OptionSpec("TEXT")] = None,
    max_new_tokens: int = 512,
    temperature: float = 0.6,
    top_p: Probability = 0.95,
    seed: int = 1337,
    weights: Literal["saved", "int8"] = "saved",
    checkpoint: Checkpoint = "best",
) -> None:
    """Chat with an imported model, such as SmolLM2 or Qwen3, in the ChatML template.

    Args:
        system: The system message, which always stays in the context.
        max_new_tokens: The most tokens of an answer.
        temperature: 0 is greedy; 1 samples from the model's distribution.
        top_p: Nucleus sampling: sample from the smallest set of tokens with this total probability.
        seed: The random seed.
        weights: int8 quantises them, and the inputs of each product: faster on a CPU.
    """
    _require_seed(seed)
    run = _run_or_latest(run)
    with _loaded(run, checkpoint, weights=weights) as (loaded, tokenizer, _):
        import jax
        import numpy as np
        from flax import nnx

        from jgpt.generation.chat import Chat

        rngs = nnx.Rngs(jax.random.key(np.uint32(seed)))
        rules = {"rngs": rngs, "temperature": temperature, "top_p": top_p}
        chat = Chat(loaded, tokenizer, system, max_new_tokens, **rules)
    console = open_console()
    prompt = ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows
            import readline  # noqa: F401  # history and editing, for input
        say(console, "Ctrl-C stops an answer, Ctrl-D ends the chat")
        prompt = "> "
    while True:
        try:
            dropped, answer = chat.reply(input(prompt))
            if dropped:
                say(console, f"[the context is full: it loses {dropped} messages]")
            with contextlib.closing(answer):
                for piece in answer:
                    print(piece, end="", flush=True)
            print()
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            say(console, str(error))


def _prompts(
    prompts: tuple[str, ...], path: str | None, universal_newlines: bool
) -> tuple[str, ...]:
    """The prompts; a file is read as the run's text was. By default one that is empty."""
    from jgpt.data.corpus import read_stream

    if path is not None:
        if prompts:
            raise ValueError("give --prompt or --prompt-file, not both")
        name = "standard input" if path == "-" else path
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            prompts = (read_stream(file, name, universal_newlines=universal_newlines),)
    if "" in prompts:
        raise ValueError("the prompt is empty: give at least one character, or no --prompt at all")
    return prompts or ("",)


def eval_(
    run: LatestRun = None,
    json: bool = False,
    checkpoint: Checkpoint = "best",
    split: Literal["validation", "test"] = "validation",
    model: ModelOption = None,
    mesh: MeshOption = None,
) -> Lines:
    """Compute a run's exact loss on its whole validation or test split: every target once.

    Args:
        split: test is what training never read, where the run has a test_fraction.
        json: Print one JSON object.
    """
    run = _run_or_latest(run)
    with importing():
        from jgpt.cli.console import ConsoleProgress
        from jgpt.fitting.evaluate import evaluate
        from jgpt.parallel.mesh import use_mesh

    with use_mesh(mesh), ConsoleProgress(open_console(stderr=True), "evaluating") as progress:
        result = evaluate(run, which=checkpoint, split=split, model=model, progress=progress)
    if json:
        values = dataclasses.asdict(result)
        if math.isinf(result.perplexity):  # which JSON has no number for
            values["perplexity"] = None
        return [dumps(values, allow_nan=False)]
    return [
        f"{split + ' loss':<18}  {result.loss:.4f} nats per token, over {result.tokens:,} targets",
        f"perplexity          {result.perplexity:.3f}",
        f"bits per character  {result.bits_per_character:.4f}",
    ]


def _config_of(what: str, model: str | None = None, optimizer: str | None = None) -> TrainConfig:
    """The config of a preset or a run directory."""
    from jgpt.runs.directory import RunDirectory

    if what in PRESETS:
        return with_code(PRESETS[what][1], model, optimizer)
    if Path(what).exists():
        return with_code(RunDirectory.open(what).config(), model, optimizer)
    raise ValueError(
        f"{what!r} is neither a preset nor a run directory{did_you_mean(what, PRESETS)}"
    )


def info(
    what: What,
    model: ModelOption = None,
    optimizer: Annotated[str | None, OptionSpec("FILE:NAME", "Likewise the optimizer.")] = None,
    mesh: MeshOption = None,
) -> Lines:
    """Show the parameters, bytes, FLOPs and training memory of a model."""
    with importing() as status:
        from jgpt import hardware
        from jgpt.cli import console
        from jgpt.nn import precision
        from jgpt.nn.costs import flops_per_token, parts_of
        from jgpt.training.memory import training_memory, with_micro_batches
        from jgpt.words import format_bytes

        config = _config_of(what, model, optimizer)
        if mesh is not None:
            return console.describe_placements(dataclasses.replace(config, mesh=mesh))
        status.update("compiling")
        decided = precision.run_for_platform(config, hardware.current_platform())
        decided = with_micro_batches(decided, hardware.memory_limit())
        memory = training_memory(decided)
    rows = [(part.name, part.parameters, part.size) for part in parts_of(config.model)]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    lines = [
        f"{name:<28} {count:>13,} parameters {format_bytes(size):>12}" for name, count, size in rows
    ]
    flops = flops_per_token(config.model)
    lines.append(f"FLOPs per token at full context: {flops:,} forward, {3 * flops:,} in training")
    if memory is not None:
        setting = f"batch_size={config.batch_size}"
        if decided.micro_batches != 1:
            setting += f", micro_batches={decided.micro_batches}"
        lines.append(f"training memory at {setting}: {memory}")
    return lines


def shapes(
    what: What,
    model: ModelOption = None,
    batch: int | None = None,
    time: int | None = None,
    depth: int = 3,
    decode: bool = False,
    train: bool = False,
    json: bool = False,
) -> Lines:
    """Show the forward pass as a tree of calls, with the shape of each result.

    Args:
        batch: Sequences; by default any number, written b.
        time: Positions; by default any number, written t.
        depth: Levels of the tree.
        decode: Trace one step of decoding, over a KV cache.
        train: Trace a train step.
        json: Print one JSON object.
    """
    for name, value in (("batch", batch), ("time", time), ("depth", depth)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be positive")
    if decode and train:
        raise ValueError("decode=True and train=True are two pictures: give one")
    with importing():
        from jgpt.shapes.trace import name_colours, with_symbols
        from jgpt.training import programs

        config = dataclasses.replace(_config_of(what, model), micro_batches=1)
        trace = programs.trace_forward
        if decode or train:
            trace = programs.trace_decode if decode else programs.trace_train
        most = config.model.block_size
        first = (batch or 2, time or max(most - 1, 1))
        second = (batch or 3, time or most)
        traced = trace(config, *first)
        if first != second:
            symbols = {"b": (first[0], second[0]), "t": (first[1], second[1])}
            traced = with_symbols(traced, trace(config, *second), symbols)
    if json:
        return [dumps(traced.as_json())]
    lines = traced.lines(depth)
    say(open_console(), *lines, colours=name_colours("\n".join(lines)))
    return []


def plot(
    runs: Annotated[tuple[str, ...], OptionSpec("RUN", positional=True)], out: Image = "losses.png"
) -> Lines:
    """Plot the losses of runs against steps, tokens and seconds.

    Args:
        runs: Run directories.
    """
    path = _out(out, ".png", ".svg")
    with importing():
        from jgpt.pictures.plots import runs_image
        from jgpt.runs.directory import RunDirectory

    write_file(path, runs_image([RunDirectory.open(run) for run in runs], path.suffix[1:]))
    return [f"wrote {out}"]


def attention(
    prompt: Annotated[str, OptionSpec("TEXT")],
    run: LatestRun = None,
    out: Image = "attention.png",
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
) -> Lines:
    """Plot the attention weights of each layer and head over a text.

    Args:
        prompt: The text; its last block-size tokens are plotted.
    """
    path = _out(out, ".png", ".svg")
    run = _run_or_latest(run)
    with _loaded(run, checkpoint, model=model) as (loaded, tokenizer, _):
        from jgpt.pictures.plots import attention_image

        write_file(path, attention_image(loaded, tokenizer, prompt, path.suffix[1:]))
    return [f"wrote {out}"]


def look(
    run: LatestRun = None,
    prompt: Annotated[str | None, OptionSpec("TEXT")] = None,
    out: Annotated[
        str | None, OptionSpec("FILE", "The page to write, look.html unless given.")
    ] = None,
    max_new_tokens: int | None = None,
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
    live: bool = False,
    browser: bool = True,
) -> Lines:
    """Write an HTML page to look into a model, or serve a live one.

    Args:
        prompt: The text to continue and to look at, at most block-size tokens.
        max_new_tokens: The number of tokens to sample: 48, fewer where the block or the page ends.
        live: Serve the page to this machine: change the prompt, heads and blocks in it.
        browser: With --live, open the page in the browser.
    """
    if prompt is None and not live:
        raise ValueError("give a prompt, or live=True")
    run = _run_or_latest(run)
    if live:
        for option, given in (("out", out), ("max_new_tokens", max_new_tokens)):
            if given is not None:
                raise ValueError(f"{option}={given} is for a page as a file: leave out live=True")
        return _serve(run, prompt, checkpoint, model, browser)
    out = out or "look.html"
    path = _out(out, ".html")
    name = Path(run).resolve().name
    with _loaded(run, checkpoint, model=model) as (loaded, tokenizer, _):
        from jgpt.pictures.look import look_page

        page = look_page(loaded, tokenizer, prompt or "", max_new_tokens, name)
    write_file(path, page)
    return [f"wrote {out}"]


def _serve(run: str, prompt: str | None, which: Any, model: str | None, browser: bool) -> Lines:
    import webbrowser

    with importing() as status:
        from jgpt.pictures.live import RunPage, serving

        status.update("loading the model")
        page = RunPage(run, prompt, which=which, model=model)
    with serving(page) as (address, server):
        say(open_console(), f"{page.name} is at {address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return []


def new(
    file: Annotated[str, OptionSpec("FILE", "The Python file to write.", positional=True)],
) -> Lines:
    """Write a GPT of one file, to change and to train."""
    path = _out(file, ".py")
    if os.path.lexists(path):
        raise ValueError(f"{file} already exists: choose another name")
    write_file(path, Path(__file__).with_name("new_gpt.py.txt").read_bytes())
    return [f"wrote {file}; next: {_command('train', '--model', f'{file}:GPT')}"]


def prepare(
    out: Annotated[str, OptionSpec("DIR", "The folder to write.")],
    files: Annotated[tuple[str, ...], OptionSpec("TEXT", positional=True)] = (),
    data: Annotated[tuple[str, ...], OptionSpec("TEXT")] = (),
    data_field: Annotated[str, OptionSpec("NAME")] = DataConfig.data_field,
    universal_newlines: Newlines = DataConfig.universal_newlines,
    tokenizer: TokenizerName = "char",
    bpe_vocab_size: int = 1024,
    tokenizer_files: Annotated[str | None, OptionSpec("DIR")] = None,
) -> Lines:
    """Tokenize text of any size, for `jgpt train --data`.

    Args:
        files: Files and folders of text, JSON lines or Parquet, or corpora.
        data: More of them, as for `jgpt train`.
        data_field: The field or column of JSON lines and Parquet that has the text.
        tokenizer: Characters, bytes, byte-pairs trained on the text, or GPT-2's byte-pairs.
        bpe_vocab_size: The vocabulary size of trained byte-pairs.
        tokenizer_files: For gpt2, a folder of encoder.json, vocab.bpe (or vocab.json, merges.txt).
    """
    if not files + data:
        raise ValueError("give a text to prepare: a file, a folder or a corpus")
    config = DataConfig(
        data=(*files, *data),
        universal_newlines=universal_newlines,
        tokenizer=tokenizer,
        bpe_vocab_size=bpe_vocab_size,
        tokenizer_files=tokenizer_files,
        data_field=data_field,
    )

    from rich.progress import Progress

    from jgpt.data import dataset

    console = open_console()

    def warn(line: str) -> None:
        say(console, in_flags(line))

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=1.0)

        def progress(fraction: float) -> None:
            bar.update(task, completed=fraction)

        tokens = dataset.prepare(config, Path(out), warn=warn, progress=progress)
    return [f"{tokens:,} tokens in {out}; next: {_command('train', '--data', out)}"]


def import_(
    source: Annotated[str, OptionSpec("DIR|FILE|NAME", positional=True)],
    out: Annotated[str, OptionSpec("RUN", "The run directory to write.")],
    from_: Literal["hf", "gpt2", "nanogpt"] = "hf",
    block_size: Annotated[int | None, OptionSpec("N")] = None,
    dtype: ComputeDtype = "float32",
    tokenizer: Annotated[str | None, OptionSpec("DIR|FILE")] = None,
    data: Annotated[tuple[str, ...], OptionSpec("TEXT")] = DataConfig().data,
    universal_newlines: Newlines = DataConfig.universal_newlines,
) -> Lines:
    """Import the weights of GPT-2, Llama, SmolLM2, Qwen3 or nanoGPT as a run.

    Args:
        source: A Hugging Face folder (config.json, model.safetensors), or nanoGPT's ckpt.pt;
            hub:OWNER/NAME, gpt2, smollm2, smollm2-chat and qwen3 are fetched from the hub.
        from_: The format of the weights.
        block_size: The context length, where positions are rotary; the config's by default.
        dtype: The dtype of matrix products; auto is bfloat16 where that is fast.
        tokenizer: A folder, if not the source; a tokenizer.json; or a text with all characters.
        data: The text to evaluate on and to train further with.
    """
    path = Path(out)
    if path.exists():  # before loading, which may take a while
        raise ValueError(f"{path} already exists: choose another directory")
    if (Path(source) / "checkpoints").is_dir():
        raise ValueError(f"{source} is a run already: sample, eval and train take it as it is")
    if block_size is not None and from_ == "nanogpt":
        raise ValueError(f"block_size={block_size} needs rotary positions, which nanoGPT lacks")

    with importing() as status:
        from jgpt.interop import hub, huggingface, names, nanogpt
        from jgpt.interop.formats import describe_dropout
        from jgpt.interop.text_files import HF_CONFIG, parse_text_file, read_text_files
        from jgpt.runs import checkpoints

        status.update(f"loading {source}")
        if from_ == "nanogpt":
            folder = Path(source)
            model = nanogpt.load_nanogpt(source)
            text_files = {}
        else:
            folder = hub.find_model(source)
            model = huggingface.load_hf(folder, block_size=block_size)
            # a single file, as --tokenizer may be, says nothing about special tokens
            tokenizer_folder = Path(tokenizer or folder)
            text_files = read_text_files(folder, tokenizer_folder)
        own_tokenizer = _tokenizer(folder, tokenizer, universal_newlines, model.vocab_size)
        model, own_tokenizer = names.with_one_vocabulary(model, own_tokenizer)
    # small and constant, as is usual for fine-tuning
    optimizer = OptimizerConfig(
        learning_rate=3e-5, min_learning_rate=3e-5, schedule="constant", warmup_steps=0
    )
    dataset = DataConfig(data, universal_newlines)
    model_config = dataclasses.replace(model.config, dtype=dtype)
    # by default the windows of a call of steps would be more tokens than a config allows, where the
    # context is of millions
    tokens_per_step = TrainConfig.batch_size * model_config.block_size
    most_steps = max(1, (2**32 - 1) // tokens_per_step)
    config = TrainConfig(
        model_config,
        optimizer,
        dataset,
        name=path.name,
        out=out,
        steps_per_call=min(TrainConfig.steps_per_call, most_steps),
    )
    checkpoints.save(model, path, tokenizer=own_tokenizer, config=config, text_files=text_files)
    lines = []
    source_config = parse_text_file(text_files, HF_CONFIG)
    if source_config:
        dropout = describe_dropout(source_config, model.config)
        if dropout is not None:
            lines.append(dropout)
    lines.append(
        f"{counted(model.config.num_layers, 'layer')}, {model.config.embed_dim} features, "
        f"vocabulary {model.vocab_size}; next: {_command('sample', path)}"
    )
    return lines


def _tokenizer(source: Path, given: str | None, universal_newlines: bool, vocab_size: int) -> Any:
    from jgpt.data.corpus import read_text
    from jgpt.data.tokenizers import CharTokenizer, read_tokenizer
    from jgpt.interop.text_files import read_folder_tokenizer

    path = Path(given or source)
    if path.is_dir():
        return read_folder_tokenizer(path, vocab_size)
    if path.suffix == ".json":
        return read_tokenizer(path)
    if given is None:
        raise ValueError(f"{path} has no tokenizer next to it: give --tokenizer")
    return CharTokenizer.from_text(read_text((given,), universal_newlines=universal_newlines))


def export(
    run: Run,
    out: Annotated[str, OptionSpec("DIR", "The directory to write.")],
    zero_biases: bool = False,
    checkpoint: Checkpoint = "best",
) -> Lines:
    """Export a run's model as a Hugging Face directory of GPT-2, Llama or Qwen3.

    Args:
        zero_biases: Write zeros for biases that the model lacks and GPT-2's format requires.
    """
    with importing():
        from jgpt.interop.formats import hf_config
        from jgpt.runs.directory import RunDirectory

        # before the model is loaded, which may take a while
        directory = RunDirectory.open(run)
        hf_config(directory.config().model, zero_biases=zero_biases)
        like = directory.imported()
    with _loaded(run, checkpoint) as (model, tokenizer, _):
        from jgpt.interop.huggingface import save_hf

        save_hf(model, out, tokenizer=tokenizer, zero_biases=zero_biases, like=like)
    return [f"wrote {out}, for transformers.AutoModelForCausalLM.from_pretrained"]


def presets() -> Lines:
    """List the presets of `jgpt train`."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    return describe_presets(width)


@contextlib.contextmanager
def _loaded(
    run: str, which: Any, mesh: str | None = None, model: str | None = None, weights: str = "saved"
) -> Iterator[tuple[Any, Any, Any]]:
    with importing() as status:
        from jgpt.nn.int8 import with_int8_weights
        from jgpt.parallel.mesh import use_mesh
        from jgpt.runs.checkpoints import load

        status.update("loading the model")
        with use_mesh(mesh):
            loaded, tokenizer, config = load(run, which=which, model=model)
    with use_mesh(mesh):
        yield with_int8_weights(loaded) if weights == "int8" else loaded, tokenizer, config


def _run_or_latest(run: str | None) -> str:
    """The run that was named, or else the latest one, which is said."""
    if run is not None:
        return run

    from jgpt.runs.directory import RunDirectory

    latest = RunDirectory.latest()
    say(open_console(stderr=True), f"the latest run is {latest}")
    return str(latest)


def _out(path: str, *suffixes: str) -> Path:
    """The path of a file to write, checked before anything is computed."""
    if Path(path).suffix.lower() not in suffixes:
        raise ValueError(f"{path} must end in {' or '.join(suffixes)}")
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: create it, or choose another for {path}")
    return Path(path)


def _command(*words: object) -> str:
    return shlex.join(["jgpt", *map(str, words)])


COMMANDS: dict[str, Callable[..., Lines | None]] = {
    name.rstrip("_"): it
    for name, it in vars().items()
    if inspect.isfunction(it) and it.__module__ == __name__ and not name.startswith("_")
}
