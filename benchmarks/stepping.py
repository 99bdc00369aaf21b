"""Measure the train step of jgpt, or of nanoGPT, in this process."""

import contextlib
import gc
import io
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from nanogpt import nanogpt_model
from runner import Figures, Variant, call, draws

STEPS = 10
"""In a call of a program that was compiled ahead."""
TakeSteps = Callable[[int], float]
"""Takes a number of steps, waits for them, and returns the last loss."""


def variant(name: str, config: Any, **options: Any) -> Variant:
    from jgpt.fields import to_json

    return Variant(name, call("stepping", "step", config=to_json(config), **options))


def jgpt_steps(config: Any) -> TakeSteps:
    """As in `jgpt train`: many steps per call, with batches drawn on the device."""
    from jgpt.data.batches import batches, resident
    from jgpt.machine import current_platform
    from jgpt.nn.precision import for_platform
    from jgpt.training.state import dropout_stream, init_state
    from jgpt.training.step import make_train_steps

    config = replace(config, model=for_platform(config.model, current_platform()))
    train_steps = make_train_steps(config)
    state = init_state(config)
    tokens = resident(some_tokens(config))
    key = dropout_stream(config.seed)
    step = 0

    def take(count: int) -> float:
        nonlocal state, step
        losses = []
        end = step + count
        while step < end:
            some = min(config.steps_per_call, end - step)
            windows = batches(
                tokens,
                config.seed,
                step,
                config.steps_per_call,
                config.batch_size,
                config.model.block_size,
            )
            state, metrics = train_steps(state, windows, key, some, step)
            losses.append(metrics.loss[some - 1])
            step += some
        return float(losses[-1])

    return take


def nanogpt_steps(config: Any, checkout: Path, compile: bool) -> TakeSteps:
    """As in nanoGPT's train.py, with the same settings for speed."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(config.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape = config.model
    optimization = config.optimizer
    model = nanogpt_model(checkout, shape).to(device)
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer = model.configure_optimizers(
            optimization.weight_decay,
            optimization.learning_rate,
            (optimization.beta1, optimization.beta2),
            device,
        )
    run = torch.compile(model) if compile else model
    tokens = torch.from_numpy(some_tokens(config).astype(np.int64))

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
            with torch.autocast(device, torch.bfloat16, enabled=shape.dtype == "bfloat16"):
                _, loss = run(*batch)
            batch = next_batch()  # while the device computes
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optimization.gradient_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return take


def step(
    config: str, nanogpt: str | None = None, compile: bool = False, steps: int = 50
) -> Figures:
    """The time of a step, the median of three measurements of `steps` steps.

    `config` is a TrainConfig as JSON: model, batch and optimizer of jgpt, or of nanoGPT where there
    is a checkout of it, with torch.compile or without.
    """
    from jgpt.config import TrainConfig
    from jgpt.fields import from_json
    from jgpt.machine import peak_flops
    from jgpt.nn.costs import flops_per_token

    setting = from_json(TrainConfig, config)
    if nanogpt:
        take = nanogpt_steps(setting, Path(nanogpt), compile)
    else:
        take = jgpt_steps(setting)
    began = time.perf_counter()
    busy = time.process_time()
    take(1)
    first_step = time.perf_counter() - began
    first_step_cpu = time.process_time() - busy
    seconds = statistics.median(draws(lambda _: take(steps), 3)) / steps
    tokens = setting.batch_size * setting.model.block_size
    figures = {
        "milliseconds": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "flops": 3 * flops_per_token(setting.model) * tokens,
        "first_step_seconds": first_step,
        "first_step_cpu_seconds": first_step_cpu,
    }
    if peak := peak_flops():  # it isn't known of a CPU
        figures["utilisation"] = figures["flops"] / seconds / peak
    return figures


def traced(config: Any) -> Any:
    """The train step as JAX traces it, for several steps in a call."""
    import jax
    import jax.numpy as jnp

    from jgpt.training.state import abstract_state, dropout_stream
    from jgpt.training.step import make_train_steps

    windows = jax.ShapeDtypeStruct(shape_of_windows(config), jnp.int32)
    given = abstract_state(config), windows, dropout_stream(config.seed)
    return make_train_steps(config).trace(*given, STEPS, 0)  # type: ignore[attr-defined]


def take_compiled(config: Any, compiled: Any) -> Callable[[], None]:
    """A function that takes STEPS steps with the compiled program, and waits for them."""
    import jax
    import jax.numpy as jnp

    from jgpt.training.state import dropout_stream, init_state

    state = init_state(config)
    key = dropout_stream(config.seed)
    windows = jnp.asarray(np.resize(some_tokens(config), shape_of_windows(config)), jnp.int32)

    def take() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(compiled(state, windows, key, STEPS, 0))

    return take


def shape_of_windows(config: Any) -> tuple[int, int, int]:
    return STEPS, config.batch_size, config.model.block_size + 1


def some_tokens(config: Any) -> np.ndarray:
    """Random tokens: the time of a step doesn't depend on their values."""
    return np.random.default_rng(0).integers(config.model.vocab_size, size=1 << 20)


def checks(preset: str, traced_presets: Sequence[str]) -> Figures:
    """Milliseconds of what the shape contract may slow down, with a preset's train step; traces of
    the other presets' in processor time, not to depend on load."""
    start = time.perf_counter()
    import jgpt

    jgpt.fit  # noqa: B018  # names are imported when they are first used
    times = {"import": 1e3 * (time.perf_counter() - start)}

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jgpt.nn.models import create_model

    def timed(name: str, clock: Callable[[], float], function: Any, *arguments: Any) -> Any:
        gc.collect()
        start = clock()
        result = function(*arguments)
        times[name] = 1e3 * (clock() - start)
        return result

    config = jgpt.preset(preset)
    tracing = timed("first trace", time.perf_counter, traced, config)
    compiled = timed("compile", time.perf_counter, tracing.lower().compile)
    take = take_compiled(config, compiled)
    times["step"] = 1e3 * statistics.median(draws(lambda _: take(), 7)) / STEPS
    model = create_model(config.model, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((config.batch_size, config.model.block_size), jnp.int32)
    eager = draws(lambda _: jax.block_until_ready(model(tokens)), 60)
    times["eager forward"] = 1e3 * min(eager)
    for name in traced_presets:
        config = jgpt.preset(name)
        vocabulary = max(config.model.vocab_size, 65)  # data decides it in a run
        config = replace(config, model=replace(config.model, vocab_size=vocabulary))
        jax.clear_caches()
        timed(f"trace {name}", time.process_time, traced, config)
    return times
