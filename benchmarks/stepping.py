"""Train steps of jgpt and of nanoGPT, each in a process of its own that is asked in turn.

`Stepper` is a process that has compiled its step and waits: several can be measured A B A B while
each compiles only once. Run as a program, this file is such a process.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import tyro


@dataclass(frozen=True)
class Options:
    config: Path
    """A TrainConfig as JSON: the model, the batch and the optimizer, whoever takes the steps."""
    nanogpt: Path | None = None
    """The checkout of nanoGPT whose model takes them; jgpt by default."""
    compile: bool = False
    """With torch.compile."""


class Stepper:
    """A process that takes train steps when asked; use it as a context manager."""

    def __init__(self, config: Path, *, nanogpt: Path | None = None, compile: bool = False) -> None:
        command = [sys.executable, __file__, "--config", str(config)]
        if nanogpt is not None:
            command += ["--nanogpt", str(nanogpt)]
        if compile:
            command.append("--compile")
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
        )
        self.ready = self._read()
        """What the process said of itself when it had compiled."""
        self.seconds_to_ready = time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def milliseconds(self, steps: int) -> float:
        """Take so many steps; return what one of them took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._read()["milliseconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)


def alternate(steppers: dict[str, Stepper], steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step of each, A B A B, after one round that isn't counted."""
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for counted in range(-1, rounds):
        for name, stepper in steppers.items():
            taken = stepper.milliseconds(steps)
            if counted >= 0:
                times[name].append(taken)
    return times


TakeSteps = Callable[[int], float]
"""Takes so many steps, waits for the last of them, and returns its loss."""


def jgpt_steps(config: Any) -> TakeSteps:
    """As `jgpt train` takes them: many in a call, their batches drawn on the device."""
    from jgpt.data.batches import batches, resident
    from jgpt.hardware import current_platform
    from jgpt.nn.precision import run_for_platform
    from jgpt.training.step import dropout_stream, init_state, make_train_steps

    config = run_for_platform(config, current_platform())
    train_steps, state = make_train_steps(config), init_state(config)
    tokens, key, step = resident(some_tokens(config)), dropout_stream(config.seed), 0

    def take(count: int) -> float:
        nonlocal state, step
        metrics, done = None, 0
        while done < count:
            some = min(config.steps_per_call, count - done)
            windows = batches(
                *(tokens, config.seed, step, config.steps_per_call),
                *(config.batch_size, config.model.block_size),
            )
            state, metrics = train_steps(state, windows, key, some, step)
            step, done = step + some, done + some
        assert metrics is not None
        return float(metrics.loss[some - 1])

    return take


def nanogpt_steps(config: Any, checkout: Path, compile: bool) -> TakeSteps:
    """As nanoGPT's train.py takes them, with the settings that it has for speed."""
    import torch

    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(config.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape, how = config.model, config.optimizer
    sizes = GPTConfig(
        block_size=shape.block_size,
        # its own padding of GPT-2's vocabulary
        vocab_size=-(-shape.vocab_size // 64) * 64 if shape.vocab_size > 1024 else shape.vocab_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.embed_dim,
        dropout=shape.dropout,
        bias=shape.use_bias,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        model = GPT(sizes).to(device)
        optimizer = model.configure_optimizers(
            how.weight_decay, how.learning_rate, (how.beta1, how.beta2), device
        )
    run = torch.compile(model) if compile else model
    narrow = shape.dtype == "bfloat16"
    tokens = torch.from_numpy(some_tokens(config).astype(np.int64))
    if device == "cuda":
        tokens = tokens.pin_memory()

    def next_batch() -> Any:
        starts = torch.randint(len(tokens) - shape.block_size, (config.batch_size, 1))
        window = tokens[starts + torch.arange(shape.block_size + 1)]
        if device == "cuda":
            window = window.pin_memory().to(device, non_blocking=True)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    batch = next_batch()

    def take(count: int) -> float:
        nonlocal batch
        for _ in range(count):
            with torch.autocast(device, torch.bfloat16, enabled=narrow):
                _, loss = run(*batch)
            batch = next_batch()  # while the device computes
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), how.gradient_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return take


def some_tokens(config: Any) -> np.ndarray:
    """Tokens like any others: what a step costs doesn't depend on which they are."""
    return np.random.default_rng(0).integers(config.model.vocab_size, size=1 << 20)


def main(options: Options) -> None:
    from jgpt.config import TrainConfig, from_json

    config = from_json(TrainConfig, options.config.read_text())
    if options.nanogpt is None:
        take = jgpt_steps(config)
    else:
        take = nanogpt_steps(config, options.nanogpt, options.compile)
    began = time.perf_counter()
    loss = take(1)
    print(json.dumps({"first_step_seconds": time.perf_counter() - began, "loss": loss}), flush=True)
    for line in sys.stdin:
        steps = int(line)
        began = time.perf_counter()
        loss = take(steps)
        taken = 1e3 * (time.perf_counter() - began) / steps
        print(json.dumps({"milliseconds": taken, "loss": loss}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
