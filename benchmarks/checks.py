"""Measure what the shape contract may slow down, in this process."""

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tyro
from runner import draws
from stepping import STEPS, take_compiled, traced


def milliseconds(
    function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    gc.collect()
    start = clock()
    result = function()
    return 1e3 * (clock() - start), result


def main(preset: str = "nanogpt-cpu", traced_presets: tuple[str, ...] | None = None) -> None:
    """Print times in milliseconds; of traces of presets in processor time, not to depend on load.

    Args:
        preset: The preset that is compiled and run.
        traced_presets: The presets that are traced; by default all.
    """
    start = time.perf_counter()
    import jgpt

    jgpt.fit  # noqa: B018  # names are imported when they are first used
    times = {"import": 1e3 * (time.perf_counter() - start)}

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jgpt.presets import PRESETS

    config = jgpt.preset(preset)
    times["first trace"], tracing = milliseconds(lambda: traced(config))
    times["compile"], compiled = milliseconds(tracing.lower().compile)
    take = take_compiled(config, compiled)
    times["step"] = 1e3 * statistics.median(draws(lambda _: take(), 7)) / STEPS
    model = jgpt.create_model(config.model, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((config.batch_size, config.model.block_size), jnp.int32)
    eager = draws(lambda _: jax.block_until_ready(model(tokens)), 9)
    times["eager forward"] = 1e3 * statistics.median(eager)
    for name in traced_presets or PRESETS:
        _, config = PRESETS[name]
        vocabulary = max(config.model.vocab_size, 65)  # data decides it in a run
        config = replace(config, model=replace(config.model, vocab_size=vocabulary))
        jax.clear_caches()
        times[f"trace {name}"], _ = milliseconds(lambda its=config: traced(its), time.process_time)
    print(json.dumps(times))


if __name__ == "__main__":
    tyro.cli(main)
