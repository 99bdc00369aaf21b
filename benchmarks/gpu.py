"""Everything that an accelerator is for, beside nanoGPT on the same one, in one call and one JSON.

    JGPT_DATA_DIR=DIR python benchmarks/gpu.py --nanogpt PATH

PATH is a checkout of nanoGPT. Four parts, each with a time of its own (`--seconds`), each result
written as soon as it is there; `--parts` runs some of them, and what the file holds of the others
stays. Seeds that it holds already are not run again, so a part that ran out of time is run once
more to go on.

- step: a train step and the model FLOPs utilisation, for GPT-2 124M at block 1024 and for nanoGPT's
  Shakespeare setting, in bfloat16, nanoGPT's with torch.compile, A B A B
- train: seconds of the whole `jgpt train` command until its exact validation loss on tiny
  Shakespeare is nanoGPT's 1.4655, and the best loss, of five seeds
- nanogpt: the same of nanoGPT's own train.py, by its own estimate over 200 batches, of one seed
- sampling: tokens a second of 1, 16 and 64 texts at once, A B A B

`--toy` runs to the end anywhere in less than a minute, at sizes that say nothing about speed.
"""

import contextlib
import dataclasses
import io
import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import record
import tyro
from stepping import Stepper, alternate
from train_cpu import prepare_nanogpt

from jgpt.config import TrainConfig, to_json
from jgpt.presets import preset

# processes that are measured in turn share the GPU's memory
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
NANOGPT_LOSS = 1.4655
"""What nanoGPT's Shakespeare setting reaches on a GPU: its best of a run, mean of five seeds."""
TARGETS = {
    "gpt2, tokens/s of nanoGPT's": 1.15,
    "gpt2, model FLOPs utilisation": 0.5,
    "seconds to nanoGPT's loss, of nanoGPT's": 0.1,
    "best loss, mean of five seeds": 1.45,
}

Part = Literal["step", "train", "nanogpt", "sampling"]


@dataclass(frozen=True)
class Options:
    nanogpt: Path | None = None
    """A checkout of nanoGPT; without it jgpt is measured alone."""
    parts: tuple[Part, ...] = ("step", "train", "nanogpt", "sampling")
    """What to run."""
    out: Path = record.RESULTS / "gpu.json"
    """The JSON to write, or to go on with."""
    train_preset: str = "nanogpt-char"
    """What `jgpt train` trains."""
    train_options: tuple[str, ...] = ()
    """More of its options, such as --train-options=--steps=2000."""
    seeds: int = 5
    """How often it trains."""
    batch_size: int = 32
    """Of GPT-2's step."""
    rounds: int = 5
    """How often each step, and each sampling, is measured."""
    steps: int = 40
    """Steps in a measurement."""
    seconds: float = 540
    """After which a part begins nothing new."""
    toy: bool = False
    """Tiny sizes, in float32, and a loss that is soon reached."""


class Measurement:
    """The results so far, and the file that they are in."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.results: dict[str, Any] = {"target": TARGETS, "toy": options.toy}
        if options.out.exists():
            kept = json.loads(options.out.read_text())
            if kept["toy"] == options.toy:
                self.results |= {part: kept[part] for part in PARTS if part in kept}

    def begin(self, part: str) -> None:
        """Start the part's clock."""
        self._ends = time.perf_counter() + self.options.seconds
        self.part = self.results.setdefault(part, {})

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether the part may begin something that takes so long."""
        return time.perf_counter() + seconds < self._ends

    def write(self) -> None:
        record.write_to(self.options.out, self.results)


def measure_steps(measurement: Measurement) -> None:
    from jgpt.hardware import peak_flops
    from jgpt.nn.models import flops_per_token

    options, peak = measurement.options, peak_flops()
    for name in ("gpt2", "nanogpt-char"):
        if not measurement.has_time():
            print(f"no time is left for the step of {name}")
            return
        config = step_config(name, options)
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            file = Path(directory) / "config.json"
            file.write_text(to_json(config))
            steppers = {"jgpt": stack.enter_context(Stepper(file))}
            if options.nanogpt is not None:
                steppers["nanoGPT"] = stack.enter_context(
                    Stepper(file, nanogpt=options.nanogpt, compile=not options.toy)
                )
            times = alternate(steppers, options.steps, options.rounds)
        tokens = config.batch_size * config.model.block_size
        speed = {who: 1e3 * tokens / statistics.median(its) for who, its in times.items()}
        flops = 3 * flops_per_token(config.model)
        measurement.part[name] = {
            "dtype": config.model.dtype,
            "batch_size": config.batch_size,
            "milliseconds": times,
            "tokens_per_second": speed,
            "model_flops_utilisation": {
                who: tokens_per_second * flops / peak if peak else None
                for who, tokens_per_second in speed.items()
            },
            "seconds_to_first_step": {
                who: stepper.seconds_to_ready for who, stepper in steppers.items()
            },
        }
        if "nanoGPT" in speed:
            measurement.part[name]["ratio"] = speed["jgpt"] / speed["nanoGPT"]
        measurement.write()
        for who, its in times.items():
            used = measurement.part[name]["model_flops_utilisation"][who]
            print(
                f"{name}: {who}: {record.spread(its)} ms a step, {speed[who]:,.0f} tokens/s, "
                f"utilisation {'unknown' if used is None else f'{used:.3f}'}",
                flush=True,
            )


def step_config(name: str, options: Options) -> TrainConfig:
    config = preset(name)
    if options.toy:
        sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "block_size": 8}
        vocab_size = min(config.model.vocab_size, 1100)
        model = dataclasses.replace(config.model, **sizes, vocab_size=vocab_size, dtype="float32")
        return dataclasses.replace(
            config, model=model, batch_size=3, micro_batches=1, steps_per_call=2
        )
    model = dataclasses.replace(config.model, dtype="bfloat16")
    batch_size = options.batch_size if name == "gpt2" else config.batch_size
    return dataclasses.replace(config, model=model, batch_size=batch_size, micro_batches=1)


def measure_training(measurement: Measurement) -> None:
    options, part = measurement.options, measurement.part
    target = 10.0 if options.toy else NANOGPT_LOSS
    name = "tiny" if options.toy else options.train_preset
    command = [sys.executable, "-m", "jgpt.cli", "train", name, *options.train_options]
    if options.toy:
        command += ["--steps", "4", "--eval-interval", "2", "--steps-per-call", "2"]
        command += ["--eval-tokens", "100", "--sample-tokens", "5"]
    else:
        command += ["--data", "shakespeare"]
    setting = {"preset": name, "options": [*options.train_options], "target": target}
    if {key: part.get(key) for key in setting} != setting:
        part.clear()
        part |= setting | {"runs": []}
    for seed in range(1337, 1337 + options.seeds):
        if any(run["seed"] == seed for run in part["runs"]):
            continue
        longest = max([run["seconds"] for run in part["runs"]], default=0.0)
        if not measurement.has_time(longest):
            print(f"no time is left to train with seed {seed}")
            break
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "run"
            run = watched_run([*command, "--seed", str(seed), "--out", str(out)], out, target)
        part["runs"].append({"seed": seed} | run)
        summarise(part)
        measurement.write()
        print(f"train: {part['runs'][-1]}", flush=True)


def watched_run(command: list[str], out: Path, target: float) -> dict[str, Any]:
    """Run jgpt's command; the wall clock when its metrics say that the target is reached."""
    metrics, seen, losses, reached = out / "metrics.jsonl", 0, [], None
    env = {name: value for name, value in os.environ.items() if name != PREALLOCATE}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=env)
        ended = False
        while not ended:
            ended = process.poll() is not None  # what it wrote until then is still read
            if metrics.exists():
                with metrics.open() as file:
                    file.seek(seen)
                    new = file.read()
                whole = new[: new.rfind("\n") + 1]
                seen += len(whole)
                for line in map(json.loads, whole.splitlines()):
                    losses += [line["validation_loss"]] if "validation_loss" in line else []
                if reached is None and losses and min(losses) <= target:
                    reached = time.perf_counter() - began
            if not ended:
                time.sleep(0.02)
        seconds = time.perf_counter() - began
        if process.returncode != 0:
            said.seek(0)
            sys.exit(f"{command} ended with {process.returncode}: {said.read()}")
    return {
        "seconds": seconds,
        "seconds_to_target": reached,
        "best_loss": min(losses),
        "losses": losses,
    }


def measure_nanogpt(measurement: Measurement) -> None:
    """nanoGPT's own command; when its estimate of the validation loss reaches the target."""
    from jgpt.data.corpus import shakespeare_file

    options, part = measurement.options, measurement.part
    if options.nanogpt is None:
        print("nanoGPT: no checkout was given")
        return
    part |= {"target": 10.0 if options.toy else NANOGPT_LOSS}
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory) / "nanoGPT"
        shutil.copytree(options.nanogpt, checkout, ignore=shutil.ignore_patterns(".git"))
        prepare_nanogpt(checkout, shakespeare_file())
        command = [sys.executable, "-u", "train.py", "config/train_shakespeare_char.py"]
        if options.toy:
            command += ["--device=cpu", "--compile=False", "--eval_iters=1", "--max_iters=2"]
            command += ["--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=8"]
            command += ["--eval_interval=1", "--batch_size=3"]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        losses, reached = [], None
        while measurement.has_time():
            with contextlib.suppress(queue.Empty):
                said = lines.get(timeout=1.0)
                if said is None:
                    break
                if loss := re.search(r"val loss ([\d.]+)", said[1]):
                    losses.append(float(loss[1]))
                    if reached is None and losses[-1] <= part["target"]:
                        reached = said[0] - began
        whole = process.poll() is not None or process.wait(60) == 0
        if not whole:
            process.kill()
    part["runs"] = [
        {
            "seconds": time.perf_counter() - began if whole else None,
            "seconds_to_target": reached,
            "best_loss": min(losses, default=None),
            "losses": losses,
        }
    ]
    measurement.write()
    print(f"nanogpt: {part['runs'][-1]}", flush=True)


def _read(process: subprocess.Popen[str], lines: queue.Queue[tuple[float, str] | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put((time.perf_counter(), line))
    lines.put(None)


def summarise(part: dict[str, Any]) -> None:
    reached = [run["seconds_to_target"] for run in part["runs"]]
    best = [run["best_loss"] for run in part["runs"]]
    part["best_loss_mean"] = statistics.mean(best)
    part["best_loss_deviation"] = statistics.stdev(best) if len(best) > 1 else None
    # a seed that didn't reach it has no time, and so neither has the median of all
    part["seconds_to_target_median"] = None if None in reached else statistics.median(reached)


def measure_sampling(measurement: Measurement) -> None:
    options = measurement.options
    config = step_config("nanogpt-char", options)
    samplers = {"jgpt": jgpt_sampler(config)}
    if options.nanogpt is not None:
        samplers["nanoGPT"] = nanogpt_sampler(config, options.nanogpt)
    count = config.model.block_size - 1  # nothing slides yet
    measurement.part |= {"tokens": count, "dtype": config.model.dtype}
    for batch in (1, 2) if options.toy else (1, 16, 64):
        if not measurement.has_time():
            print(f"no time is left to sample {batch} texts at once")
            return
        speed: dict[str, list[float]] = {who: [] for who in samplers}
        for counted in range(-1, options.rounds):
            for who, draw in samplers.items():
                began = time.perf_counter()
                draw(batch, count)
                if counted >= 0:
                    speed[who].append(batch * count / (time.perf_counter() - began))
        result: dict[str, Any] = {"tokens_per_second": speed}
        if "nanoGPT" in speed:
            medians = {who: statistics.median(its) for who, its in speed.items()}
            result["ratio"] = medians["jgpt"] / medians["nanoGPT"]
        measurement.part[f"batch {batch}"] = result
        measurement.write()
        for who, its in speed.items():
            print(f"sampling, batch {batch}: {who}: {record.spread(its)} tokens/s", flush=True)


def jgpt_sampler(config: TrainConfig) -> Callable[[int, int], None]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jgpt.generation.decoding import generate
    from jgpt.hardware import current_platform
    from jgpt.nn.models import create_model
    from jgpt.nn.precision import for_platform

    model = create_model(for_platform(config.model, current_platform()), rngs=nnx.Rngs(0))

    def draw(batch: int, count: int) -> None:
        prompt = jnp.zeros((batch, 1), jnp.int32)
        jax.block_until_ready(generate(model, prompt, count, key=jax.random.key(0)))

    return draw


def nanogpt_sampler(config: TrainConfig, checkout: Path) -> Callable[[int, int], None]:
    """As its sample.py does, which doesn't compile: the length grows with each token."""
    import torch

    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = config.model
    sizes = GPTConfig(
        block_size=shape.block_size,
        vocab_size=shape.vocab_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.embed_dim,
        bias=shape.use_bias,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        model = GPT(sizes).to(device).eval()

    def draw(batch: int, count: int) -> None:
        narrow = torch.autocast(device, torch.bfloat16, enabled=shape.dtype == "bfloat16")
        with torch.no_grad(), narrow:
            tokens = torch.zeros((batch, 1), dtype=torch.long, device=device)
            model.generate(tokens, count)[0, -1].item()  # waits for the device

    return draw


PARTS: dict[str, Callable[[Measurement], None]] = {
    "step": measure_steps,
    "train": measure_training,
    "nanogpt": measure_nanogpt,
    "sampling": measure_sampling,
}


def main(options: Options) -> None:
    os.environ.setdefault(PREALLOCATE, "false")
    if options.toy:
        options = dataclasses.replace(options, rounds=2, steps=2, seeds=2)
    measurement = Measurement(options)
    for part in options.parts:
        measurement.begin(part)
        PARTS[part](measurement)
    ours, theirs = (measurement.results.get(part, {}) for part in ("train", "nanogpt"))
    reached = [run["seconds_to_target"] for run in theirs.get("runs", [])]
    if ours.get("seconds_to_target_median") and all(reached) and reached:
        ours["seconds_ratio"] = ours["seconds_to_target_median"] / statistics.median(reached)
    measurement.write()
    print(options.out)


if __name__ == "__main__":
    main(tyro.cli(Options))
